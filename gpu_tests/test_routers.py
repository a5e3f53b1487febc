"""Recording and forcing routes, in every family whose way to choose differs in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from gpu_tests import routers
from skyrl_r3.spec import RouteSpec

LAYERS, EXPERTS, TOPK, TOKENS = 3, 16, 4, 10
_SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts_per_tok=TOPK,
    initializer_range=0.3,
    pad_token_id=0,
)
_MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1
)
# As many groups as experts are chosen of a token, so that only over how many says which choice is which.
_GROUPS: dict[str, Any] = dict(n_routed_experts=EXPERTS, n_group=8, topk_group=TOPK, n_shared_experts=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": dict(num_experts=EXPERTS, shared_expert_intermediate_size=16, mlp_only_layers=[1]),
    "Qwen3Moe": dict(num_experts=EXPERTS, head_dim=16, norm_topk_prob=True),
    "Olmoe": dict(num_experts=EXPERTS),
    "Mixtral": dict(num_local_experts=EXPERTS),
    "DeepseekV2": _MLA | _GROUPS | dict(topk_method="greedy"),
    "DeepseekV3": _MLA | _GROUPS,
    "Glm4Moe": _GROUPS | dict(head_dim=16, first_k_dense_replace=1),
    "GptOss": dict(num_local_experts=EXPERTS, head_dim=16),
}


@pytest.fixture(params=FAMILIES)
def network(request: pytest.FixtureRequest) -> Any:
    config = getattr(transformers, f"{request.param}Config")(**_SIZES, **FAMILIES[request.param])
    torch.manual_seed(0)
    made: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made.eval()


@pytest.fixture
def spec(network: Any) -> RouteSpec:
    return RouteSpec.from_config(network.config)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def run(network: Any, spec: RouteSpec, routes: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[tokens, vocabulary]``, and the experts that were used."""
    tokens = torch.arange(1, TOKENS + 1)[None]
    with routers.recorded(network, spec) as used:
        if routes is None:
            logits = network(input_ids=tokens, use_cache=False).logits[0]
        else:
            with routers.forced(network, spec, routes):
                logits = network(input_ids=tokens, use_cache=False).logits[0]
    return logits, routers.table(used, spec)


def other_routes(spec: RouteSpec, rows: int) -> torch.Tensor:
    """Random ids, distinct for each token; zeros in dense layers."""
    dice = torch.Generator().manual_seed(1)
    routes = torch.rand((rows, LAYERS, EXPERTS), generator=dice).argsort(dim=-1)[..., :TOPK]
    routes[:, [layer for layer in range(LAYERS) if layer not in (spec.moe_layers or ())]] = 0
    return routes


def test_forced_ids_are_used_for_the_first_tokens_and_the_others_choose(network: Any, spec: RouteSpec) -> None:
    free_logits, free = run(network, spec)
    routes = other_routes(spec, rows=TOKENS - 1)
    logits, used = run(network, spec, routes)
    assert torch.equal(used[:-1], routes)
    first = min(spec.moe_layers or ())
    assert torch.equal(used[-1, first], free[-1, first]), "nothing before it has changed for this token"
    assert not torch.allclose(logits[:-1], free_logits[:-1], atol=1e-2)


def test_the_models_own_choice_forced_is_the_same_pass(network: Any, spec: RouteSpec) -> None:
    """Its weights for the experts too, so that scaling and normalisation are the model's own."""
    free_logits, free = run(network, spec)
    logits, used = run(network, spec, free)
    assert torch.equal(used, free)
    assert torch.equal(logits, free_logits)


def test_each_forced_expert_has_its_own_weight(network: Any, spec: RouteSpec) -> None:
    """In whatever order: the captured one need not be that of the scores."""
    free_logits, free = run(network, spec)
    logits, used = run(network, spec, free.flip(-1))
    assert torch.equal(used, free.flip(-1))
    assert torch.allclose(logits, free_logits, atol=1e-4)


def test_nothing_stays_behind(network: Any, spec: RouteSpec) -> None:
    before = run(network, spec)
    run(network, spec, other_routes(spec, rows=TOKENS))
    after = run(network, spec)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    hooks = [module for module in network.modules() if module._forward_pre_hooks or module._forward_hooks]
    assert not hooks


def test_a_layer_that_chose_out_of_sight_is_an_error(
    network: Any, spec: RouteSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose router is a fused kernel: it would take its own experts, and nobody would see it."""
    last = max(spec.moe_layers or ())
    block, _ = routers.experts(network, spec)[last]
    original = block.forward

    def hidden(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return original(*args)

    monkeypatch.setattr(block, "forward", hidden)
    with pytest.raises(ValueError, match=f"{last}: 0"):
        run(network, spec, other_routes(spec, rows=TOKENS))


def test_no_choice_outside_of_a_layer_is_answered(network: Any, spec: RouteSpec) -> None:
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2))
    with routers.forced(network, spec, other_routes(spec, rows=TOKENS)):
        before = scores.topk(TOPK).indices
        network(input_ids=torch.arange(1, TOKENS + 1)[None], use_cache=False)
        after = scores.topk(TOPK).indices
    assert torch.equal(before, scores.topk(TOPK).indices)
    assert torch.equal(after, before)


def test_two_passes_are_an_error(network: Any, spec: RouteSpec) -> None:
    """The rows are those of one."""
    first = min(spec.moe_layers or ())

    def twice(**inputs: Any) -> Any:
        network(**inputs)
        return network(**inputs)

    with pytest.raises(ValueError, match=f"{first}: 2"), routers.forced(network, spec, other_routes(spec, rows=TOKENS)):
        twice(input_ids=torch.arange(1, TOKENS + 1)[None], use_cache=False)


def test_more_rows_than_tokens_are_an_error(network: Any, spec: RouteSpec) -> None:
    with pytest.raises(ValueError, match=f"at least {TOKENS + 1}"):
        run(network, spec, other_routes(spec, rows=TOKENS + 1))


def test_other_layers_than_the_spec_says_are_an_error(network: Any) -> None:
    with pytest.raises(ValueError, match="layers with experts"):
        routers.experts(network, RouteSpec(moe_layers=(0,)))
