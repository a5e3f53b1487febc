"""SkyRL's real dynamic sampling with the overlay: routes follow their samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skyrl.train.utils import trainer_utils

import skyrl_r3
from contract_tests import canned
from skyrl_r3 import RoutedExperts, codec
from skyrl_r3.errors import RouteError


@pytest.fixture(autouse=True, scope="module")
def overlay() -> Iterator[None]:
    skyrl_r3.enable()
    logging.getLogger("skyrl").setLevel(logging.ERROR)
    yield
    skyrl_r3.disable()


def output_of(rewards: list[float], *, stop_reasons: bool = True, routes: bool = True, base: int = 0) -> dict[str, Any]:
    """A generator's output in which everything about sample ``i`` tells ``base + i``."""
    numbers = [base + i for i in range(len(rewards))]
    tokens = [[number, number + 1, number + 2] for number in numbers]
    return {
        "prompt_token_ids": [sample[:1] for sample in tokens],
        "response_ids": [sample[1:] for sample in tokens],
        "rewards": list(rewards),
        "loss_masks": [[1, 1] for _ in numbers],
        "stop_reasons": [f"stop {number}" for number in numbers] if stop_reasons else None,
        "rollout_metrics": None,
        "rollout_logprobs": [[-float(number), 0.0] for number in numbers],
        "rollout_expert_indices": [
            RoutedExperts(codec.compact(canned.routes_of(sample[:2], experts=512)), np.asarray(sample[:2], np.int32))
            for sample in tokens
        ]
        if routes
        else None,
    }


def assert_routes_are_with_their_samples(output: dict[str, Any]) -> None:
    assert len(output["rollout_expert_indices"]) == len(output["response_ids"])
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        assert routes.token_ids.tolist() == tokens[:2]
        np.testing.assert_array_equal(routes.ids, canned.routes_of(tokens[:2], experts=512))


@pytest.mark.case("R70")
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))))
def test_filtered_samples_keep_their_routes(case: tuple[int, list[int]]) -> None:
    size, kept = case
    filtered = trainer_utils.filter_generator_output(output_of([0.0] * size), kept)  # pyright: ignore[reportArgumentType]
    assert_routes_are_with_their_samples(filtered)  # pyright: ignore[reportArgumentType]


@pytest.mark.case("R70")
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8), st.booleans(), st.integers(0, 2**32 - 1))
def test_replaced_samples_bring_their_routes(rewards: list[float], stop_reasons: bool, seed: int) -> None:
    uids = [str(i // 2) for i in range(8)]
    config = {"type": "replace", "n_samples_per_prompt": 2, "min_replace_ratio": 0.2}
    results = []
    for routes in (False, True):
        np.random.seed(seed)
        output = output_of(rewards, stop_reasons=stop_reasons, routes=routes)
        results.append(trainer_utils.handle_dynamic_sampling(output, uids, config))  # pyright: ignore[reportArgumentType]
    (stock, stock_uids, *stock_rest), (patched, patched_uids, *rest) = results
    assert (patched_uids, rest) == (stock_uids, stock_rest)
    assert {**patched, "rollout_expert_indices": None} == stock
    assert_routes_are_with_their_samples(patched)


def test_a_replacement_that_fails_leaves_the_output_as_it_was() -> None:
    output = output_of([0.0, 0.0, 0.0, 1.0])
    before = {key: list(value) if isinstance(value, list) else value for key, value in output.items()}
    with pytest.raises(KeyError):
        trainer_utils.handle_replace_sampling(output, ["a", "a", "b", "b"], {"n_samples_per_prompt": 2})  # pyright: ignore[reportArgumentType]
    assert output == before


def test_filter_sampling_collects_routes_over_batches() -> None:
    config = {"type": "filter", "train_batch_size": 3, "n_samples_per_prompt": 2}
    state: Any = {"sample_batch_count": 1}
    uids = ["a", "a", "b", "b"]
    first = output_of([0.0, 1.0, 1.0, 1.0])
    _, _, more, state = trainer_utils.handle_dynamic_sampling(first, uids, config, state)  # pyright: ignore[reportArgumentType]
    assert more
    second = output_of([0.0, 1.0, 0.0, 1.0], base=100)
    final, final_uids, more, _ = trainer_utils.handle_dynamic_sampling(second, ["c", "c", "d", "d"], config, state)  # pyright: ignore[reportArgumentType]
    assert not more
    assert final_uids == ["a", "a", "c", "c", "d", "d"]
    assert_routes_are_with_their_samples(final)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("count", [0, 2, 5])
def test_another_number_of_routes_is_an_error_and_changes_nothing(count: int) -> None:
    output = output_of([0.0, 1.0, 1.0, 1.0])
    output["rollout_expert_indices"] = (output["rollout_expert_indices"] * 2)[:count]
    before = {key: list(value) if isinstance(value, list) else value for key, value in output.items()}
    config = {"n_samples_per_prompt": 2, "min_replace_ratio": 0.2}
    for attempt in (
        lambda: trainer_utils.handle_replace_sampling(output, ["a", "a", "b", "b"], config),  # pyright: ignore[reportArgumentType]
        lambda: trainer_utils.filter_generator_output(output, [0, 1]),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(RouteError) as caught:
            attempt()
        assert (caught.value.expected, caught.value.got) == ("4 entries, one for each response", str(count))
    assert output == before


def test_kept_indices_may_be_an_iterator() -> None:
    filtered = trainer_utils.filter_generator_output(output_of([0.0] * 3), iter([0, 2]))  # pyright: ignore[reportArgumentType]
    assert_routes_are_with_their_samples(filtered)  # pyright: ignore[reportArgumentType]
    assert len(filtered["response_ids"]) == 2


def test_without_routes_stock_s_output_is_unchanged() -> None:
    filtered = trainer_utils.filter_generator_output(output_of([0.0] * 3, routes=False), [0, 2])  # pyright: ignore[reportArgumentType]
    assert "rollout_expert_indices" not in filtered
