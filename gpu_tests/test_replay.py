"""What the engine did, replayed by the trainer: the logprobs come closer, and the same through either tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import skyrl_r3
from gpu_tests import recorded, replay, routers
from gpu_tests.facts import Facts, Gap
from gpu_tests.generation import Engine, Generation, Model
from gpu_tests.passes import Passes
from gpu_tests.transformers_engine import TransformersEngine
from skyrl_r3 import RoutedExperts, codec, frame
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, what an engine generated with it in bfloat16, and a trainer that computes in float32."""

    model: Model
    engine: Engine
    device: str
    generations: list[Generation]
    trainer: replay.Trainer


@pytest.fixture(scope="session")
def case(engine: Engine, generations: list[Generation], device: str) -> Case:
    trainer = replay.Trainer(engine.model, device=device, dtype=torch.float32)
    return Case(model=engine.model, engine=engine, device=device, generations=generations, trainer=trainer)


def gap_of(case: Case, routes: Sequence[np.ndarray]) -> Gap:
    return replay.measure(case.trainer, case.generations, engine=case.engine.name, routes=routes).replayed


def own_routes(case: Case) -> list[np.ndarray]:
    return [each.routes for each in case.generations]


# The gap.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replay_lowers_the_gap(case: Case, dtype: torch.dtype, facts: Facts) -> None:
    """In bfloat16 too: one pass over all tokens rounds otherwise than one token at a time."""
    trainer = replay.Trainer(case.model, device=case.device, dtype=dtype)
    seen = replay.measure(trainer, case.generations, engine=case.engine.name)
    assert seen.tokens == sum(len(each.response) for each in case.generations)
    assert seen.replayed.mean_abs < seen.without.mean_abs
    assert seen.replayed.k3 < seen.without.k3
    assert tuple(seen.agreement) == case.model.spec.moe_layers
    assert min(seen.agreement.values()) < 1, "nothing to replay"
    first, *_ = seen.agreement.values()
    assert first > 0.5, "the engine and the trainer compute different models"
    facts.replays.append(seen)


def test_the_routes_of_another_sample_make_it_larger(case: Case) -> None:
    """And so do those of the token before: it matters which rows are replayed, not that some are."""
    right = gap_of(case, own_routes(case))
    everything = np.concatenate(own_routes(case))
    others = [
        np.take(everything, range(end, end + len(each)), axis=0, mode="wrap")
        for each, end in zip(own_routes(case), np.cumsum([len(each) for each in own_routes(case)]), strict=True)
    ]
    late = [np.concatenate([each[:1], each[:-1]]) for each in own_routes(case)]
    for wrong in (gap_of(case, others), gap_of(case, late)):
        assert wrong.mean_abs > 2 * right.mean_abs
        assert wrong.k3 > 2 * right.k3


# Which experts are used.


def test_the_experts_are_called_with_the_captured_ids(case: Case) -> None:
    for each in case.generations:
        with routers.recorded(case.trainer.network, case.model.spec) as calls:
            used = case.trainer.forward(each, each.routes).routes
        assert np.array_equal(routers.table(calls, case.model.spec)[:-1], each.routes)
        assert np.array_equal(used, each.routes)
        assert used.shape == (len(each.prompt) + len(each.response) - 1, case.model.spec.layers, case.model.spec.topk)


def test_to_replay_the_trainers_own_choice_changes_nothing(case: Case) -> None:
    for each in case.generations:
        free = case.trainer.forward(each)
        assert np.array_equal(case.trainer.forward(each, free.routes).logprobs, free.logprobs)


def test_the_same_pass_takes_the_same_routes(case: Case) -> None:
    """Of the prompt, which transformers takes in one pass: same dtype, same tokens, same shape as the trainer's."""
    engine = TransformersEngine(case.model, device=case.device, dtype=torch.bfloat16)
    trainer = replay.Trainer(case.model, device=case.device, dtype=torch.bfloat16)
    for each in case.generations:
        (again,) = engine.generate([each.prompt], max_tokens=1, temperature=0)
        known = dataclasses.replace(again, prompt=each.prompt[:-1], response=each.prompt[-1:])
        assert np.array_equal(trainer.forward(known).routes, again.routes[:-1])


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda routes: routes[1:], "rows, prompt"),
        (lambda routes: routes[:, 1:], "routes: expected"),
        (lambda routes: routes[:, :, 1:], "routes: expected"),
        (lambda routes: np.zeros_like(routes), "each once"),
        (lambda routes: routes.astype(np.int32) + 4096, "ids below"),
    ],
    ids=["a row less", "a layer less", "an expert less", "repeated", "too large"],
)
def test_routes_that_do_not_fit_are_refused(case: Case, spoil: Callable[[Any], Any], expected: str) -> None:
    each = case.generations[0]
    with pytest.raises(ValueError, match=expected):
        case.trainer.forward(each, spoil(each.routes))


# Packed and unpacked.


def training_tensor(case: Case, routes: Any) -> torch.Tensor:
    """By the function that SkyRL's trainer is bound to."""
    from skyrl.train import trainer
    from skyrl.utils.tok import get_tokenizer

    responses = [each.response for each in case.generations]
    tensors = trainer.convert_prompts_responses_to_batch_tensors(
        get_tokenizer(str(case.model.path), padding_side="left"),
        [each.prompt for each in case.generations],
        responses,
        [[0.0] * len(response) for response in responses],
        [[1] * len(response) for response in responses],
        [each.logprobs.tolist() for each in case.generations],
        routes,
    )
    assert isinstance(tensors[-1], torch.Tensor)
    return tensors[-1]


def through_packed(generation: Generation) -> RoutedExperts:
    tokens = np.array(generation.prompt + generation.response, dtype=np.int32)
    return RoutedExperts(codec.unpack(codec.pack(generation.routes)), tokens[:-1])


def through_frame(generation: Generation) -> RoutedExperts:
    tokens = np.array(generation.prompt + generation.response, dtype=np.int32)
    reply = Reply(
        token_ids=tokens[len(generation.prompt) :],
        finish_reason=generation.finish_reason,
        logprobs=generation.logprobs,
        routed_experts=generation.routes,
        prompt_tokens=len(generation.prompt),
        start=0,
    )
    ids = frame.load(frame.dump(reply)).routes_for(prompt=len(generation.prompt))
    return RoutedExperts(ids, tokens[:-1])


@pytest.mark.parametrize("through", [through_packed, through_frame])
def test_packed_and_unpacked_give_the_identical_gap(case: Case, through: Callable[[Generation], RoutedExperts]) -> None:
    pytest.importorskip("skyrl")
    skyrl_r3.disable()
    stock = training_tensor(case, [each.routes.tolist() for each in case.generations])
    skyrl_r3.enable()
    try:
        packed = training_tensor(case, [through(each) for each in case.generations])
    finally:
        skyrl_r3.disable()
    assert packed.dtype == stock.dtype == (torch.uint8 if (case.model.spec.num_experts or 0) <= 256 else torch.int16)
    assert not torch.equal(packed, stock), "rows that were not captured: zeros in one, distinct ids in the other"
    sides = [replay.captured_rows(tensor, case.generations) for tensor in (stock, packed)]
    for unpacked, ours, each in zip(*sides, case.generations, strict=True):
        assert np.array_equal(unpacked, each.routes)
        assert np.array_equal(ours, each.routes)
    assert gap_of(case, sides[0]) == gap_of(case, sides[1]) == gap_of(case, own_routes(case))


def test_served_replies_give_the_identical_gap(passes: Passes, case: Case) -> None:
    """Through SkyRL's server, client and preprocessing, stock and with the overlay, packed and as frames."""
    name = "single turn, replayed"

    async def work(demo: Any) -> None:
        await demo.client_case(name, count=4, max_tokens=48, sizes=(40, 80, 160, 320), temperature=1.0)

    passes.compare(name, work)
    generations = recorded.samples(passes.runs["frame"], name)
    tensors = {encoding: torch.from_numpy(run.of(name)["tensor|routes"]) for encoding, run in passes.runs.items()}
    seen = {
        encoding: replay.measure(
            case.trainer,
            generations,
            engine=case.engine.name,
            routes=replay.captured_rows(tensor, generations),
        )
        for encoding, tensor in tensors.items()
    }
    assert seen["nested"] == seen["packed"] == seen["frame"]
    assert seen["frame"].replayed.mean_abs < seen["frame"].without.mean_abs
    passes.passed(name, f"the identical gap: {seen['frame'].replayed.mean_abs:.4g} nats in the mean")


# Figures.


def test_a_gap_is_what_its_fields_say() -> None:
    seen = replay.gap(np.array([-1.0, -2.0]), np.array([-1.5, -2.0]))
    assert (seen.mean_abs, seen.max_abs) == (0.25, 0.5)
    assert seen.k3 == pytest.approx((np.exp(0.5) - 1.5) / 2)
    with pytest.raises(ValueError, match="finite"):
        replay.gap(np.array([-1.0, np.nan]), np.array([-1.5, -2.0]))


def test_agreement_is_of_sets_and_of_layers_that_route() -> None:
    captured = np.array([[[0, 0], [1, 2], [3, 4]], [[0, 0], [1, 2], [3, 4]]], dtype=np.uint8)
    chosen = np.array([[[0, 0], [2, 1], [3, 4]], [[0, 0], [1, 2], [3, 5]]])
    assert replay.agreement(captured, chosen, RouteSpec(moe_layers=(1, 2))) == {1: 1.0, 2: 0.5}


def test_the_load_counts_every_captured_choice(case: Case, facts: Facts) -> None:
    load = replay.load_of(case.model, case.generations, engine=case.engine.name)
    facts.loads.append(load)
    assert tuple(load.layers) == case.model.spec.moe_layers
    for layer, counts in zip(load.layers, load.counts, strict=True):
        for expert in (0, (case.model.spec.num_experts or 0) - 1):
            assert counts[expert] == sum(int((each.routes[:, layer] == expert).sum()) for each in case.generations)
        assert len(counts) == case.model.spec.num_experts
        assert sum(counts) == sum(len(each.routes) for each in case.generations) * (case.model.spec.topk or 0)
