"""SkyRL's real preprocessing and trainer, stock and with the overlay: captured rows equal, padding known."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train import trainer as trainer_module
from skyrl.train.dataset import preprocess

import skyrl_r3
from skyrl_r3 import RoutedExperts, codec, packed
from skyrl_r3.errors import RouteError

TOKENIZER: Any = SimpleNamespace(pad_token_id=0)


@pytest.fixture(autouse=True)
def overlay() -> Iterator[None]:
    skyrl_r3.enable()
    yield
    skyrl_r3.disable()


def convert(*args: Any, **kwargs: Any) -> Any:
    """Under the name that the trainer has imported."""
    return trainer_module.convert_prompts_responses_to_batch_tensors(*args, **kwargs)


def stock_convert(*args: Any, **kwargs: Any) -> Any:
    patched: Any = preprocess.convert_prompts_responses_to_batch_tensors
    return patched.__wrapped__(*args, **kwargs)


def batch_of(
    sizes: list[tuple[int, int, int]], *, layers: int = 3, topk: int = 2, experts: int = 64, seed: int = 0
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Arguments for the conversion, and the routes: per sample (prompt, response, tokens without a route)."""
    dice = np.random.default_rng(seed)
    prompts = [dice.integers(1, 1000, prompt).tolist() for prompt, _, _ in sizes]
    responses = [dice.integers(1, 1000, response).tolist() for _, response, _ in sizes]
    ids = [
        codec.compact(dice.permuted(np.tile(np.arange(experts), (p + r - missing, layers, 1)), axis=-1)[..., :topk])
        for p, r, missing in sizes
    ]
    arguments = {
        "tokenizer": TOKENIZER,
        "prompts": prompts,
        "responses": responses,
        "rewards": [[0.0] * response for _, response, _ in sizes],
        "loss_masks": [[1] * response for _, response, _ in sizes],
        "logprobs": [[-0.5] * response for _, response, _ in sizes],
    }
    return arguments, ids


def with_tokens(arguments: dict[str, Any], ids: list[np.ndarray]) -> list[RoutedExperts]:
    tokens = [[*p, *r] for p, r in zip(arguments["prompts"], arguments["responses"], strict=True)]
    return [
        RoutedExperts(rows, np.asarray(sample[: len(rows)], dtype=np.int32))
        for rows, sample in zip(ids, tokens, strict=True)
    ]


sizes_strategy = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3)).filter(lambda s: s[0] + s[1] > s[2]),
    min_size=1,
    max_size=5,
)


@pytest.mark.case("R81")
@given(sizes_strategy, st.sampled_from([2, 64, 256, 257, 512]), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_captured_rows_equal_stock_bit_for_bit(
    sizes: list[tuple[int, int, int]], experts: int, layers: int, topk: int, plain: bool
) -> None:
    arguments, ids = batch_of(sizes, layers=layers, topk=topk, experts=experts, seed=len(sizes))
    stock = stock_convert(**arguments, rollout_expert_indices=[rows.tolist() for rows in ids])
    routes: list[Any] = list(ids) if plain else with_tokens(arguments, ids)
    ours = convert(**arguments, rollout_expert_indices=routes)
    assert len(ours) == len(stock)
    for expected, tensor in zip(stock[:-1], ours[:-1], strict=True):
        assert torch.equal(expected, tensor)
    assert ours[-1].dtype == stock[-1].dtype
    assert ours[-1].shape == stock[-1].shape
    for i, (prompt, response, _) in enumerate(sizes):
        start = stock[-1].shape[1] - prompt - response
        captured = slice(start, start + len(ids[i]))
        assert torch.equal(ours[-1][i, captured], stock[-1][i, captured])
        rest = torch.cat([ours[-1][i, :start], ours[-1][i, captured.stop :]]).sort(dim=-1).values
        assert (rest[..., 1:] != rest[..., :-1]).all()
        assert not stock[-1][i, :start].any()


def test_both_names_are_one_function_that_pickles_by_name() -> None:
    assert trainer_module.convert_prompts_responses_to_batch_tensors is (
        preprocess.convert_prompts_responses_to_batch_tensors
    )
    again = pickle.loads(pickle.dumps(preprocess.convert_prompts_responses_to_batch_tensors))
    assert again is preprocess.convert_prompts_responses_to_batch_tensors


@pytest.mark.case("R76")
def test_nested_lists_of_a_custom_generator_take_skyrl_s_own_path() -> None:
    arguments, ids = batch_of([(3, 4, 1), (2, 2, 1)])
    nested: list[Any] = [rows.tolist() for rows in ids]
    for routes in (nested, [nested[0], None]):
        ours = convert(**arguments, rollout_expert_indices=routes)
        assert torch.equal(ours[-1], stock_convert(**arguments, rollout_expert_indices=routes)[-1])


def test_without_routes_nothing_is_added() -> None:
    arguments, _ = batch_of([(3, 4, 1)])
    for routes in (None, []):
        assert convert(**arguments, rollout_expert_indices=routes)[-1] is None


def test_arguments_may_be_positional_as_in_the_trainer() -> None:
    arguments, ids = batch_of([(3, 4, 1)])
    routes = with_tokens(arguments, ids)
    ours = convert(*arguments.values(), routes, max_seq_len=4)
    assert ours[-1] is not None
    np.testing.assert_array_equal(ours[-1][0, :6].numpy(), ids[0])


WRONG: dict[str, Any] = {
    "none of a trained sample": None,
    "nested lists among arrays": [[[1, 2]]],
    "empty lists among arrays": [],
    "a number": 5,
    "text": "AAEC",
    "two dimensions": np.zeros((4, 6), np.uint8),
    "no rows": np.zeros((0, 3, 2), np.uint8),
    "int64": np.zeros((4, 3, 2), np.int64),
    "uint16": np.zeros((4, 3, 2), np.uint16),
    "big-endian": np.ones((4, 3, 2), ">i2"),
    "negative": np.full((4, 3, 2), -1, np.int16),
    "other layers": np.zeros((4, 2, 2), np.uint8),
    "other top-k": np.zeros((4, 3, 3), np.uint8),
    "more rows than tokens": np.zeros((7, 3, 2), np.uint8),
}


@pytest.mark.case("R12", "R27", "R39", "R76", "R87")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_is_an_error_that_names_its_sample(case: str) -> None:
    arguments, ids = batch_of([(3, 4, 1), (2, 4, 1), (5, 2, 1)])
    routes: list[Any] = [ids[0], WRONG[case], ids[2]]
    with pytest.raises(RouteError) as caught:
        convert(**arguments, rollout_expert_indices=routes)
    assert caught.value.where == "sample 1"
    assert caught.value.field.startswith("rollout_expert_indices[1]")


@pytest.mark.case("R70")
def test_routes_of_another_sample_are_an_error() -> None:
    arguments, ids = batch_of([(3, 4, 1), (3, 4, 1)])
    routes = with_tokens(arguments, ids)[::-1]
    with pytest.raises(RouteError) as caught:
        convert(**arguments, rollout_expert_indices=routes)
    assert caught.value.where == "sample 0"
    assert caught.value.expected == f"the route of token {arguments['prompts'][0][0]} in row 0"


@pytest.mark.case("R75")
def test_a_sample_that_is_not_trained_on_needs_no_routes() -> None:
    arguments, ids = batch_of([(3, 4, 1), (2, 4, 1)])
    arguments["loss_masks"][1] = [0] * 4
    empty = RoutedExperts(packed.from_nested([]), np.empty(0, np.int32))
    for nothing in (None, empty):
        routes: list[Any] = [ids[0], nothing]
        tensor = convert(**arguments, rollout_expert_indices=routes)[-1]
        assert tensor is not None
        assert (tensor[1, ..., 0] != tensor[1, ..., 1]).all()


@pytest.mark.case("R89")
def test_read_only_routes_give_a_writable_tensor_without_a_warning() -> None:
    arguments, ids = batch_of([(3, 4, 1)])
    ids[0].flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = convert(**arguments, rollout_expert_indices=[ids[0]])[-1]
        assert tensor is not None
        tensor += 1
    np.testing.assert_array_equal(tensor[0, : len(ids[0])].numpy(), ids[0] + 1)


@pytest.mark.case("R14")
def test_a_later_write_to_the_routes_does_not_reach_the_tensor() -> None:
    arguments, ids = batch_of([(3, 4, 1)])
    tensor = convert(**arguments, rollout_expert_indices=[ids[0]])[-1]
    before = ids[0].copy()
    ids[0][:] = 0
    assert tensor is not None
    np.testing.assert_array_equal(tensor[0, : len(before)].numpy(), before)


def training_input(
    sizes: list[tuple[int, int, int]], dp_size: int = 1, routes: str = "arrays", experts: int = 64
) -> Any:
    """What SkyRL's ``convert_to_training_input`` makes, called on a trainer with nothing but what it reads."""
    arguments, ids = batch_of(sizes, experts=experts)
    given: dict[str, Any] = {"arrays": with_tokens(arguments, ids), "nested": [rows.tolist() for rows in ids]}
    output = {
        "prompt_token_ids": arguments["prompts"],
        "response_ids": arguments["responses"],
        "rewards": arguments["rewards"],
        "loss_masks": arguments["loss_masks"],
        "rollout_logprobs": arguments["logprobs"],
        "rollout_expert_indices": given.get(routes),
    }
    correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    algorithm = SimpleNamespace(max_seq_len=None, off_policy_correction=correction)
    trainer = SimpleNamespace(
        tokenizer=TOKENIZER,
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: dp_size),
        cfg=SimpleNamespace(
            trainer=SimpleNamespace(
                algorithm=algorithm,
                train_batch_size=len(sizes),
                policy_mini_batch_size=len(sizes),
                critic=SimpleNamespace(model=SimpleNamespace(path=None)),
            ),
            generator=SimpleNamespace(n_samples_per_prompt=1, step_wise_trajectories=False),
        ),
    )
    uids = [str(i) for i in range(len(sizes))]
    convert_to_training_input: Any = trainer_module.RayPPOTrainer.convert_to_training_input
    return convert_to_training_input(trainer, output, uids)


@pytest.mark.case("R83")
def test_the_batch_says_which_rows_are_padding() -> None:
    made = training_input([(3, 3, 2), (5, 3, 1)])
    mask = made["router_padding_mask"]
    assert mask.dtype == torch.bool
    # Six tokens left-padded to eight, of which the first four were captured.
    assert mask[0].tolist() == [True, True, False, False, False, False, True, True]
    assert mask[1].tolist() == [False] * 7 + [True]


def test_the_mask_covers_the_copies_that_fill_up_a_batch() -> None:
    made = training_input([(3, 3, 2), (5, 3, 1), (2, 2, 1)], dp_size=4)
    assert made["router_padding_mask"].shape == made["sequences"].shape == (4, 8)
    assert torch.equal(made["router_padding_mask"][3], made["router_padding_mask"][0])
    assert torch.equal(made["rollout_expert_indices"][3], made["rollout_expert_indices"][0])


@pytest.mark.parametrize("routes", ["nested", "none"])
def test_no_mask_where_the_overlay_made_no_tensor(routes: str) -> None:
    assert "router_padding_mask" not in training_input([(3, 3, 1)], routes=routes)


@pytest.mark.case("R34", "R72", "R79")
@pytest.mark.parametrize("experts", [64, 512])
def test_routes_and_mask_survive_what_skyrl_does_to_the_batch(experts: int) -> None:
    """Selected, split, pickled for each worker and put together again. Each worker gets its own rows alone."""
    keys = ["sequences", "rollout_expert_indices", "router_padding_mask"]
    made = training_input([(3, 3, 1), (4, 4, 1), (2, 1, 0), (5, 1, 2)], experts=experts)
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in made.select(keys=keys).chunk(2)]
    again: Any = TrainingInputBatch.cat(chunks)
    for key in keys:
        assert again[key].dtype == made[key].dtype
        assert torch.equal(again[key], made[key])
        assert sum(chunk[key].untyped_storage().nbytes() for chunk in chunks) == made[key].nbytes


@pytest.mark.case("R40", "R41")
@pytest.mark.parametrize("experts", [64, 256, 512])
def test_the_tensor_can_be_widened_to_what_collectives_and_indexing_take(experts: int) -> None:
    """NCCL refuses int16, and uint8 as an index is a mask. SkyRL's workers cast to int32 before either."""
    sizes = [(3, 3, 1), (4, 4, 1)]
    tensor = training_input(sizes, experts=experts)["rollout_expert_indices"]
    _, ids = batch_of(sizes, experts=experts)
    wide = tensor.to(torch.int32)
    np.testing.assert_array_equal(wide[1, :7].numpy(), ids[1])
    scores = torch.rand(*tensor.shape[:3], experts, generator=torch.Generator().manual_seed(0))
    picked = torch.gather(scores, -1, wide.long())
    expected = np.take_along_axis(scores[1, :7].numpy(), ids[1].astype(np.int64), axis=-1)
    np.testing.assert_array_equal(picked[1, :7].numpy(), expected)


def peak_growth(call: Any) -> tuple[int, Any]:
    """By how many bytes this process was larger than before, at most, while ``call`` ran; and what it returned.

    As the kernel counts it, because most of the memory here is torch's, which tracemalloc does not see.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = call()
    return resident("VmHWM") - before, result


def resident(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.case("R73")
def test_the_memory_of_a_batch_is_that_of_its_tensor_and_a_quarter() -> None:
    """Large enough that each of its copies is memory that the process did not have before."""
    length = 8192
    arguments, _ = batch_of([(2, 2, 1)] * 64)
    arguments["prompts"] = [[1] * 100] * 64
    for key, value in (("responses", 1), ("rewards", 0.0), ("loss_masks", 1), ("logprobs", -0.5)):
        arguments[key] = [[value] * (length - 100)] * 64
    ids = [np.full((length - 1, 47, 4), i, np.uint8) for i in range(64)]
    without, _ = peak_growth(lambda: convert(**arguments))
    growth, tensors = peak_growth(lambda: convert(**arguments, rollout_expert_indices=ids))
    assert tensors[-1].nbytes == 64 * length * 47 * 4
    assert growth - without <= 1.25 * tensors[-1].nbytes
