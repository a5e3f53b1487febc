"""The transformers engine: what it returns is what one pass of the model says, row for row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_tests import models, routers
from gpu_tests.generation import Engine, Generation, Model
from gpu_tests.transformers_engine import TransformersEngine, load_network

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [200, 100, 50], [8]]
MAX_TOKENS = 12


@pytest.fixture(scope="module", params=models.KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return models.make(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def alone(tiny: Model) -> TransformersEngine:
    """In float32, in which one token at a time and all at once differ by little."""
    return TransformersEngine(tiny, device="cpu", dtype=torch.float32)


def expected(model: Model, generation: Generation) -> tuple[torch.Tensor, np.ndarray]:
    """Logits ``[response, vocabulary]`` and routes of the whole sequence, in one pass without a cache."""
    network: Any = load_network(model, device="cpu", dtype=torch.float32)
    fed = torch.tensor([generation.prompt + generation.response[:-1]])
    with torch.inference_mode(), routers.recorded(network, model.spec) as used:
        logits = network(input_ids=fed, use_cache=False).logits[0, len(generation.prompt) - 1 :]
    return logits, routers.table(used, model.spec).numpy()


def test_greedy_takes_the_most_likely_token(tiny: Model, alone: Engine) -> None:
    generations = alone.generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=0)
    assert [each.prompt for each in generations] == PROMPTS
    for each in generations:
        logits, _ = expected(tiny, each)
        assert each.response == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
def test_logprobs_and_routes_are_those_of_the_tokens(tiny: Model, alone: Engine, temperature: float) -> None:
    """At temperature 1, whatever they were sampled at."""
    for each in alone.generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=temperature):
        logits, routes = expected(tiny, each)
        logprobs = logits.double().log_softmax(-1)[range(len(each.response)), each.response]
        assert each.logprobs.dtype == np.float64
        assert np.abs(each.logprobs - logprobs.numpy()).max() < 1e-3
        assert each.routes.shape == routes.shape
        # The set, as the order of two experts with nearly the same score is rounding's.
        assert np.array_equal(np.sort(each.routes), np.sort(routes))


def test_routes_are_as_an_engine_hands_them_over(tiny: Model, alone: Engine) -> None:
    spec = tiny.spec
    generations = alone.generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=1.0)
    for each in generations:
        assert each.routes.dtype == (np.uint8 if (spec.num_experts or 0) <= 256 else np.uint16)
        for layer in range(spec.layers or 0):
            ids = np.sort(each.routes[:, layer])
            if layer in (spec.moe_layers or ()):
                assert (ids[:, 1:] > ids[:, :-1]).all()
            else:
                assert not ids.any()
    assert max(int(each.routes.max()) for each in generations) > 0.9 * (spec.num_experts or 0)


def test_the_seed_is_fixed(alone: Engine) -> None:
    once, again, cold = (
        alone.generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=temperature) for temperature in (1.0, 1.0, 0.0)
    )
    assert [each.response for each in once] == [each.response for each in again]
    assert [each.response for each in once] != [each.response for each in cold]
    for one, other in zip(once, again, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.routes, other.routes)


def test_an_end_token_ends_the_response(alone: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = alone.generate(PROMPTS[:1], max_tokens=MAX_TOKENS, temperature=1.0)
    assert (len(whole.response), whole.finish_reason) == (MAX_TOKENS, "length")
    end = whole.response[5]
    monkeypatch.setattr(alone, "_ends", {end})
    (cut,) = alone.generate(PROMPTS[:1], max_tokens=MAX_TOKENS, temperature=1.0)
    assert cut.response == whole.response[: whole.response.index(end) + 1]
    assert cut.finish_reason == "stop"
    assert len(cut.routes) == len(cut.prompt) + len(cut.response) - 1


# The models.


def test_the_same_model_is_made_again(tiny: Model, tmp_path: Path) -> None:
    again = models.make(tiny.name, tmp_path / tiny.name)
    assert again.spec == tiny.spec
    weights = [Path(each.path, "model.safetensors").read_bytes() for each in (tiny, again)]
    assert weights[0] == weights[1]


def test_each_kind_has_what_it_is_there_for(tmp_path: Path) -> None:
    made = {kind: models.make(kind, tmp_path / kind) for kind in models.KINDS}
    assert (made["many-experts"].spec.num_experts or 0) > 256
    deepseek = made["deepseek"]
    assert deepseek.spec.moe_layers == tuple(range(1, deepseek.spec.layers or 0))
    network: Any = load_network(deepseek, device="cpu", dtype=torch.float32)
    block, _ = routers.experts(network, deepseek.spec)[1]
    assert block.shared_experts.gate_proj.weight.any()
    scores = torch.rand((100, deepseek.spec.num_experts or 0), generator=torch.Generator().manual_seed(0))
    with_bias, _ = block.route_tokens_to_experts(scores)
    block.gate.e_score_correction_bias.zero_()
    without, _ = block.route_tokens_to_experts(scores)
    assert not torch.equal(with_bias.sort().values, without.sort().values)


def test_its_output_is_neither_certain_nor_even(tiny: Model, alone: Engine) -> None:
    logprobs = np.concatenate(
        [each.logprobs for each in alone.generate(PROMPTS, max_tokens=MAX_TOKENS, temperature=1.0)]
    )
    assert -np.log(tiny.vocab_size) + 1 < logprobs.mean() < -1
    assert logprobs.std() > 1


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="with experts"):
        models.load(tmp_path)


def test_each_test_has_the_model_of_its_name(model: Model, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["model"]
    if kind not in models.KINDS:
        pytest.skip("the model is the caller's")
    assert (0 in (model.spec.moe_layers or ())) == (kind != "deepseek")
    assert ((model.spec.num_experts or 0) > 256) == (kind == "many-experts")
