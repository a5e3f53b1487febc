"""The models that are tested: tiny ones, made on the spot with random weights, or any that the caller names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny_moe

from gpu_tests.generation import Model
from skyrl_r3.spec import RouteSpec


def load(path: str | Path) -> Model:
    """A model by its directory, or by its id on the hub.

    Raises:
        ValueError: It routes nothing, or in layers that :class:`RouteSpec` cannot tell.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    spec = RouteSpec.from_config(config)
    if not spec.moe_layers:
        raise ValueError(f"{path}: expected a model with experts, of a family that RouteSpec knows, got {spec}")
    return Model(name=Path(path).name, path=path, spec=spec, vocab_size=config.get_text_config().vocab_size)


def make(kind: str, directory: Path) -> Model:
    """Write the tiny model of that kind into ``directory``: always the same weights.

    Args:
        kind: One of :data:`KINDS`.
        directory: For config, weights and tokenizer; its name is the model's.
    """
    KINDS[kind](directory)
    return load(directory)


def _deepseek_config(**tokens: Any) -> Any:
    """A DeepSeek-V3 with a dense first layer, a shared expert and top-8 of 64 experts, out of 4 of 8 groups."""
    from transformers import DeepseekV3Config

    fields: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        # DeepSeek's own sizes of what is cached for a token: vLLM's CPU kernel (0.30.0) is built for these alone.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        # transformers knows no other way to route; vLLM reads these.
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        max_position_embeddings=tiny_moe.MAX_POSITIONS,
        # Scaled as DeepSeek's own. vLLM 0.30.0's CPU kernel for the plain kind is wrong for queries of several heads
        # that come as [tokens, heads, size]: logprobs were 4 nats off, and 1% of the routes agreed.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": tiny_moe.MAX_POSITIONS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    return DeepseekV3Config(**fields, **tokens)


def _balance(model: Any) -> None:
    """Give each expert a bias that counts for its choice, and keep attention scores small, as norms do in Qwen3.

    With weights as wide as the others, one token would get nearly all of the attention, and rounding decide which.
    """
    import torch

    for layer in model.model.layers:
        for projection in (layer.self_attn.q_b_proj, layer.self_attn.kv_b_proj):
            torch.nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        if hasattr(layer.mlp, "gate"):
            torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.1)


KINDS: dict[str, Callable[[Path], int]] = {
    "qwen3-moe": partial(tiny_moe.write_checkpoint, config=partial(tiny_moe.qwen3_moe, layers=8)),
    "deepseek": partial(tiny_moe.write_checkpoint, config=_deepseek_config, adjust=_balance),
    # Ids above 255: uint16 from the engine, int16 on the wire.
    "many-experts": partial(tiny_moe.write_checkpoint, config=partial(tiny_moe.qwen3_moe, layers=4, experts=320)),
}
