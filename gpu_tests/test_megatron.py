"""Megatron-Core's router replay, fed by SkyRL 0.3's replay utilities with what the overlay's preprocessing makes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

# Before imports of the same: without one of them, the other files still run.
pytest.importorskip("megatron.core")
pytest.importorskip("skyrl")

from megatron.core.transformer.moe.router_replay import RouterReplay
from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils
from skyrl.backends.skyrl_train.utils import replay_utils

import skyrl_r3
from gpu_tests.generation import Engine, Generation
from gpu_tests.megatron_gpt import Call, ReplayModel, known, micro_batches, one_rank
from gpu_tests.megatron_replay import captured, check_replay, mismatches, training_batch
from skyrl_r3.codec import compact
from skyrl_r3.spec import RouteSpec

VOCABULARY = 100

MODELS = {
    "all-layers-route": RouteSpec(layers=3, topk=8, num_experts=64, moe_layers=(0, 1, 2)),
    "dense-first": RouteSpec(layers=4, topk=6, num_experts=64, moe_layers=(1, 2, 3)),
    "dense-in-the-middle": RouteSpec(layers=4, topk=4, num_experts=32, moe_layers=(0, 2, 3)),
    "int16": RouteSpec(layers=2, topk=8, num_experts=320, moe_layers=(0, 1)),
}
each_model = pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
each_layout = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


@pytest.fixture(autouse=True)
def overlay() -> Iterator[None]:
    skyrl_r3.enable()
    yield
    skyrl_r3.disable()


@pytest.fixture(scope="session")
def place(device: str) -> torch.device:
    return torch.device(device)


SIZES = ((5, 6), (3, 2), (7, 9))
"""Tokens of prompt and response of each sample: 11, 5 and 16."""


def generated(spec: RouteSpec, sizes: Sequence[tuple[int, int]] = SIZES, *, seed: int = 0) -> list[Generation]:
    """Random ones that are valid for the model."""
    layers, topk, num_experts, moe_layers = known(spec)
    dice = np.random.default_rng(seed)
    made = []
    for prompt, response in sizes:
        routes = dice.random((prompt + response - 1, layers, num_experts)).argsort(axis=-1)[..., :topk]
        routes[:, [layer for layer in range(layers) if layer not in moe_layers]] = 0
        routes[0, moe_layers[-1]] = np.arange(num_experts)[-topk:]  # The dtype is that of the highest id.
        tokens = dice.integers(1, VOCABULARY, prompt + response).tolist()
        made.append(
            Generation(
                prompt=tokens[:prompt],
                response=tokens[prompt:],
                logprobs=np.full(response, -0.5),
                routes=compact(routes),
                finish_reason="length",
            )
        )
    return made


def model_for(spec: RouteSpec, place: torch.device, *, recompute: bool = False) -> ReplayModel:
    return ReplayModel(spec, vocab_size=VOCABULARY, device=place, recompute=recompute)


def queued() -> list[int]:
    """Entries in each router's queue for recomputation."""
    return [len(one.replay_backward_list) for one in RouterReplay.global_router_replay_instances]


@each_model
@each_layout
def test_the_experts_used_are_the_captured_ones(spec: RouteSpec, packed: bool, place: torch.device) -> None:
    found = check_replay(generated(spec), spec, device=place, packed=packed)
    assert found.mismatches == []
    assert found.layers == list(known(spec)[3])
    # Left padding of 5 and 11 tokens, and the last token of each sample.
    assert (found.rows, found.padding) == (10 + 4 + 15, 5 + 11 + 3)


@each_layout
def test_samples_are_packed_if_that_is_asked_for(
    packed: bool, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, packs = megatron_utils.preprocess_packed_seqs, []

    def noted(sequences: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packs.append(len(sequences))
        return pack(sequences, *args, **kwargs)

    monkeypatch.setattr(megatron_utils, "preprocess_packed_seqs", noted)
    spec = MODELS["dense-first"]
    check_replay(generated(spec), spec, device=place, packed=packed)
    assert packs == ([len(SIZES)] if packed else [])


@each_layout
def test_what_a_real_engine_has_captured(
    engine: Engine, generations: list[Generation], packed: bool, place: torch.device
) -> None:
    found = check_replay(generations, engine.model.spec, device=place, packed=packed)
    assert found.mismatches == []
    assert found.layers == list(known(engine.model.spec)[3])
    assert found.rows == sum(len(one.prompt) + len(one.response) - 1 for one in generations)


@each_layout
@pytest.mark.parametrize("name", ["uint8", "int16", "int32"])
def test_in_each_dtype_of_a_training_tensor(name: str, packed: bool, place: torch.device) -> None:
    """int32 is made here: it would take a model with more than 32,768 experts."""
    spec = MODELS["all-layers-route" if name == "uint8" else "int16"]
    generations = generated(spec)
    batch = training_batch(generations)
    made = batch["rollout_expert_indices"].dtype
    assert made == (torch.uint8 if name == "uint8" else torch.int16)
    batch["rollout_expert_indices"] = batch["rollout_expert_indices"].to(getattr(torch, name))
    with one_rank(place):
        used = model_for(spec, place).infer(batch, packed=packed)
    assert mismatches(used.experts, generations) == []


@each_model
@each_layout
def test_other_experts_are_used_without_replay_and_with_the_routes_of_another_layer(
    spec: RouteSpec, packed: bool, place: torch.device
) -> None:
    """So that the other tests can fail."""
    generations = generated(spec)
    layers, _, _, moe_layers = known(spec)
    first, second = moe_layers[0], moe_layers[1]
    order = list(range(layers))
    order[first], order[second] = second, first
    swapped = [dataclasses.replace(one, routes=one.routes[:, order]) for one in generations]
    with one_rank(place):
        model = model_for(spec, place)
        alone = model.infer(training_batch(generations), packed=packed, replay=False)
        wrong = model.infer(training_batch(swapped), packed=packed)
    rows = sum(int(captured(one).sum()) for one in generations)
    assert len(mismatches(alone.experts, generations)) > 0.9 * rows * len(moe_layers)
    found = mismatches(wrong.experts, generations)
    assert {one.layer for one in found} == {first, second}
    assert found[0].got == sorted(generations[found[0].sample].routes[found[0].row, second].tolist())
    assert mismatches(wrong.experts, swapped) == []


@each_model
def test_padding_is_not_taken_for_captured_and_fills_the_routing_map(spec: RouteSpec, place: torch.device) -> None:
    """R81: each token goes to topk experts, also the last, that of a masked row, and those of an aborted request."""
    generations = generated(spec, [*SIZES, (4, 0)])
    generations[1].routes[2] = 0
    batch = training_batch(generations)
    real = batch["attention_mask"].bool()
    expected = torch.zeros_like(real)
    for i, one in enumerate(generations):
        expected[i, -len(captured(one)) :] = torch.from_numpy(captured(one))
    assert torch.equal(~batch["router_padding_mask"], expected)
    assert int((real & ~expected).sum()) == 3 + 1 + 4
    with one_rank(place):
        model = model_for(spec, place)
        used = model.infer(batch, packed=True)
    assert mismatches(used.experts, generations) == []
    for call in model.calls:
        assert int(call.chosen.sum()) == call.received == int(real.sum()) * known(spec)[1]


@each_model
@each_layout
def test_stock_skyrl_and_the_overlay_use_the_same_experts_in_captured_rows(
    spec: RouteSpec, packed: bool, place: torch.device
) -> None:
    """Stock SkyRL has expert 0, topk times, where nothing was captured, so that the routing map comes out short."""
    generations = generated(spec)
    ours = training_batch(generations)
    skyrl_r3.disable()
    stock = training_batch(generations, nested=True)
    assert stock["rollout_expert_indices"].dtype == ours["rollout_expert_indices"].dtype
    with one_rank(place):
        model = model_for(spec, place)
        of_ours = model.infer(ours, packed=packed)
        of_stock = model.infer(stock, packed=packed)
    is_captured = ~ours["router_padding_mask"]
    last = stock["attention_mask"].bool() & ~is_captured
    assert int(last.sum()) == len(generations)
    for layer, experts in of_stock.experts.items():
        assert torch.equal(experts[is_captured], of_ours.experts[layer][is_captured])
        assert experts[last].nonzero()[:, 1].tolist() == [0] * len(generations)
        assert of_ours.experts[layer][last].sum(-1).tolist() == [spec.topk] * len(generations)


def test_both_layouts_compute_the_same(place: torch.device) -> None:
    """So that it is the right token that gets the route, and not only the right number of tokens."""
    spec = MODELS["dense-first"]
    batch = training_batch(generated(spec))
    with one_rank(place):
        model = ReplayModel(spec, vocab_size=VOCABULARY, device=place, sigmoid=True)
        padded, packed = (model.infer(batch, packed=packed).logits for packed in (False, True))
        alone = model.infer(batch, packed=True, replay=False).logits
    torch.testing.assert_close(packed, padded)
    assert not torch.allclose(packed, alone, atol=1e-3)


def recomputed(calls: Sequence[Call], layers: int) -> list[tuple[list[Call], list[Call]]]:
    """For each micro-batch the routers' calls of its forward pass and, in that order, those of its recomputation."""
    found = []
    for start in range(0, len(calls), 2 * layers):
        first, again = calls[start : start + layers], calls[start + 2 * layers - 1 : start + layers - 1 : -1]
        assert [call.layer for call in first] == [call.layer for call in again]
        found.append((list(first), list(again)))
    return found


def same(calls: Sequence[Call], others: Sequence[Call]) -> list[bool]:
    return [torch.equal(call.chosen, other.chosen) for call, other in zip(calls, others, strict=True)]


@each_model
@each_layout
def test_recomputation_takes_the_routes_of_the_forward_pass(spec: RouteSpec, packed: bool, place: torch.device) -> None:
    """Micro-batch by micro-batch. Nothing is left when the mini-batch is through."""
    batch = training_batch(generated(spec))
    with one_rank(place):
        model = model_for(spec, place, recompute=True)
        model.train(batch, packed=packed, samples=1)
        assert queued() == [0] * len(model.layers)
        replay_utils.clear_router_replay()
        left = [(one.router_replay_action, one.target_topk_idx) for one in RouterReplay.global_router_replay_instances]
        assert left == [(None, None)] * len(model.layers)
    passes = recomputed(model.calls, len(model.layers))
    assert len(passes) == len(SIZES)
    assert all(all(same(first, again)) for first, again in passes)
    gradients = {name: weight.grad for name, weight in model.gpt.named_parameters()}
    # An expert that no token was sent to has none.
    assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)
    of_routers = [gradient for name, gradient in gradients.items() if name.endswith("router.weight")]
    assert [gradient is not None and bool(gradient.any()) for gradient in of_routers] == [True] * len(model.layers)


def test_without_recomputation_the_queues_fill_until_skyrl_clears_them(place: torch.device) -> None:
    spec = MODELS["dense-first"]
    with one_rank(place):
        model = model_for(spec, place)
        model.train(training_batch(generated(spec)), packed=True, samples=1)
        assert queued() == [len(SIZES)] * len(model.layers)
        replay_utils.clear_router_replay()
        assert queued() == [0] * len(model.layers)


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "not-cleared"])
def test_a_forward_pass_alone_leaves_its_routes_to_the_next_recomputation_unless_skyrl_clears(
    clear: bool, place: torch.device
) -> None:
    """R91. SkyRL's worker clears after its passes for logprobs; the overlay leaves that to it."""
    spec = MODELS["dense-first"]
    earlier, batch = (training_batch(generated(spec, seed=seed)) for seed in (1, 2))
    with one_rank(place):
        model = model_for(spec, place, recompute=True)
        with torch.no_grad():
            for micro in micro_batches(earlier, 1):
                model.forward(micro, packed=True)
        assert queued() == [len(SIZES)] * len(model.layers)
        if clear:
            replay_utils.clear_router_replay()
        of_earlier = list(model.calls)
        model.calls.clear()
        model.train(batch, packed=True, samples=1)
        assert queued() == [0 if clear else len(SIZES)] * len(model.layers)
    passes = recomputed(model.calls, len(model.layers))
    for i, (first, again) in enumerate(passes):
        if clear:
            assert all(same(first, again))
        else:
            assert not any(same(first, again))
            assert all(same(of_earlier[i * len(first) : (i + 1) * len(first)], again))


def test_skyrl_without_packing_mixes_up_the_routes_of_a_micro_batch_of_two(place: torch.device) -> None:
    """SkyRL 0.3.0's own, with any routes: it lays rows out as [batch, tokens], and Megatron reads [tokens, batch].

    Behind the shorter sample it puts rows of expert 0, topk times, and these come to tokens of the longer one.
    Where this fails, SkyRL has been repaired, and what megatron_gpt.py says about it is out of date.
    """
    spec = MODELS["dense-first"]
    generations = generated(spec, [(3, 4), (3, 2)])
    batch = training_batch(generations)
    ids = batch["rollout_expert_indices"].long()
    with one_rank(place):
        model = model_for(spec, place)
        two = model.infer(batch, packed=False, samples=2).experts
        assert mismatches(model.infer(batch, packed=False, samples=1).experts, generations) == []
    assert mismatches(two, generations)
    laid_out = torch.zeros_like(ids)
    laid_out[0], laid_out[1, :5] = ids[0], ids[1, 2:]
    read = laid_out.flatten(0, 1).view(7, 2, *ids.shape[2:]).transpose(0, 1)
    for layer, experts in two.items():
        expected = torch.zeros(2, 7, spec.num_experts or 0, dtype=torch.bool).scatter(2, read[:, :, layer], True)
        assert torch.equal(experts[0], expected[0])
        assert torch.equal(experts[1, 2:], expected[1, :5])


def test_nothing_is_left_of_the_rank(place: torch.device) -> None:
    before = torch.cuda.current_device, dict(os.environ)
    with one_rank(place):
        model_for(MODELS["dense-first"], place)
    assert (torch.cuda.current_device, dict(os.environ)) == before
    assert not torch.distributed.is_initialized()
    assert RouterReplay.global_router_replay_instances == []
