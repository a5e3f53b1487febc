"""What a model's routes look like, read from the configs of real models, by transformers' classes and as published."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from skyrl_r3.spec import RouteSpec, layers_text


def spec_of(config: Any) -> tuple[Any, Any, Any, str | None]:
    """layers, experts and top-k of a config, and which layers route, as a frame writes it."""
    spec = RouteSpec.from_config(config)
    routing = None if spec.moe_layers is None else layers_text(spec.moe_layers)
    return spec.layers, spec.num_experts, spec.topk, routing


# The fields that count of the published ``config.json``, and others that must not mislead.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "num_hidden_layers": 24, "num_experts": 60, "num_experts_per_tok": 4,
         "decoder_sparse_step": 1, "max_window_layers": 21, "shared_expert_intermediate_size": 5632},
        (24, 60, 4, "0-23"),
    ),
    "Qwen2-57B-A14B": (
        {"model_type": "qwen2_moe", "num_hidden_layers": 28, "num_experts": 64, "num_experts_per_tok": 8,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        (28, 64, 8, "0-27"),
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        (48, 128, 8, "0-47"),
    ),
    "Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        (94, 128, 8, "0-93"),
    ),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4},
        (48, 512, 10, "0-47"),
    ),
    "Qwen3.5-35B-A3B": (
        {"model_type": "qwen3_5_moe", "text_config": {
            "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
            "full_attention_interval": 4, "mtp_num_hidden_layers": 1}},
        (40, 256, 8, "0-39"),
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "num_hidden_layers": 27, "n_routed_experts": 64, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        (27, 64, 6, "1-26"),
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
        (61, 256, 8, "3-60"),
    ),
    "Kimi-K2": (
        {"model_type": "kimi_k2", "num_hidden_layers": 61, "n_routed_experts": 384, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
        (61, 384, 8, "1-60"),
    ),
    "Kimi-K2.5": (
        {"model_type": "kimi_k25", "num_hidden_layers": 3, "text_config": {
            "model_type": "kimi_k2", "num_hidden_layers": 61, "n_routed_experts": 384, "num_experts_per_tok": 8,
            "first_k_dense_replace": 1, "moe_layer_freq": 1}},
        (61, 384, 8, "1-60"),
    ),
    "Moonlight-16B-A3B": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 27, "n_routed_experts": 64, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
        (27, 64, 6, "1-26"),
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "num_hidden_layers": 46, "n_routed_experts": 128, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        (46, 128, 8, "1-45"),
    ),
    "GLM-4.5": (
        {"model_type": "glm4_moe", "num_hidden_layers": 92, "n_routed_experts": 160, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        (92, 160, 8, "3-91"),
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
        (32, 8, 2, "0-31"),
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8},
        (16, 64, 8, "0-15"),
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
         "experts_per_token": 4},
        (24, 32, 4, "0-23"),
    ),
    "MiniMax-M1-80k": (
        {"model_type": "minimax_m1", "num_hidden_layers": 80, "num_local_experts": 32, "num_experts_per_tok": 2,
         "shared_intermediate_size": 0},
        (80, 32, 2, "0-79"),
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8,
         "use_mtp": True, "num_mtp_modules": 3, "shared_intermediate_size": 0},
        (62, 256, 8, "0-61"),
    ),
}  # fmt: skip

# Families that this transformers has a class of, with the defaults of that class.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "qwen2_moe": (24, 60, 4, "0-23"),
    "qwen3_moe": (24, 128, 8, "0-23"),
    "qwen3_vl_moe": (24, 60, 4, "0-23"),
    "qwen3_next": (48, 512, 10, "0-47"),
    "qwen3_5_moe": (40, 256, 8, "0-39"),
    "deepseek_v2": (32, 64, None, "0-31"),
    "deepseek_v3": (61, 256, 8, "3-60"),
    "glm4_moe": (46, 128, 8, "1-45"),
    "glm4v_moe": (46, 128, 8, "1-45"),
    "glm4_moe_lite": (47, 64, 4, "1-46"),
    "mixtral": (32, 8, 2, "0-31"),
    "olmoe": (16, 64, 8, "0-15"),
    "gpt_oss": (36, 128, 4, "0-35"),
    "minimax": (32, 8, 2, "0-31"),
    "minimax_m2": (62, 256, 8, "0-61"),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs(model: str) -> None:
    config, expected = PUBLISHED[model]
    assert spec_of(config) == expected


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_read_by_transformers(model: str) -> None:
    """Its classes have defaults, other names for the same, and keep what they don't know."""
    config, expected = PUBLISHED[model]
    known = transformers.CONFIG_MAPPING.keys()
    if config["model_type"] not in known:
        assert model.startswith(("Kimi", "MiniMax-M1")), f"transformers {transformers.__version__} has no class"
        made: Any = transformers.PretrainedConfig(**config)
    else:
        made = AutoConfig.for_model(**json.loads(json.dumps(config)))
    assert spec_of(made) == expected
    assert spec_of(made.get_text_config()) == expected


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_defaults_of_transformers_classes(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert spec_of(config) == spec_of(config.get_text_config()) == spec_of(config.to_dict()) == DEFAULTS[family]


MIXED: dict[str, tuple[dict[str, Any], str | None]] = {
    "every second layer": ({"decoder_sparse_step": 2}, "1,3,5,7"),
    "every third layer": ({"decoder_sparse_step": 3}, "2,5"),
    "dense ones that are listed": ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3, 7]}, "1-2,4-6"),
    "both": ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]}, "1,5,7"),
    "no list": ({"decoder_sparse_step": 1, "mlp_only_layers": None}, "0-7"),
    "a step of 0": ({"decoder_sparse_step": 0}, None),
    "a step of text": ({"decoder_sparse_step": "2"}, None),
    "the first few dense": ({"model_type": "deepseek_v3", "first_k_dense_replace": 2}, "2-7"),
    "none dense": ({"model_type": "deepseek_v3", "first_k_dense_replace": 0}, "0-7"),
    "all dense": ({"model_type": "deepseek_v3", "first_k_dense_replace": 8}, ""),
    "the first few dense, unknown": ({"model_type": "deepseek_v3"}, None),
    "a frequency": ({"model_type": "kimi_k2", "first_k_dense_replace": 1, "moe_layer_freq": 2}, "2,4,6"),
    "a frequency for each layer": (
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_layer_freq": [1, 1, 0, 1, 0, 0, 1, 1]},
        "1,3,6-7",
    ),
    "a frequency for other layers": (
        {"model_type": "deepseek_v2", "first_k_dense_replace": 0, "moe_layer_freq": [1, 1]},
        None,
    ),
    "GLM has no frequency": ({"model_type": "glm4_moe", "first_k_dense_replace": 1, "moe_layer_freq": 2}, "1-7"),
    "kinds that are written out": (
        {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
        "2-7",
    ),
    "interleaved": ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, "1,3,5,7"),
    "another family": ({"model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1}, None),
    "no family": ({"model_type": None, "decoder_sparse_step": 1}, None),
}


@pytest.mark.parametrize("case", MIXED)
def test_models_with_dense_layers(case: str) -> None:
    fields, expected = MIXED[case]
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "num_experts": 16, "num_experts_per_tok": 2, **fields}
    assert spec_of(config) == (8, 16, 2, expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None, None)),
        ({"num_hidden_layers": 4}, (4, None, None, None)),
        ({"num_hidden_layers": 4, "moe_num_experts": 8, "moe_k": 2}, (4, 8, 2, None)),
        ({"num_hidden_layers": 4, "moe_num_experts": [8, 8], "moe_topk": [2, 2]}, (4, 8, 2, None)),
        ({"num_hidden_layers": 4, "moe_num_experts": [8, 16], "moe_topk": [2, 4]}, (4, None, None, None)),
        ({"num_hidden_layers": True, "num_experts": "8", "num_experts_per_tok": 2.0}, (None, None, None, None)),
        ({"num_hidden_layers": -4, "num_experts": -8, "num_experts_per_tok": 0}, (None, None, None, None)),
        # Dense, in a word.
        ({"num_hidden_layers": 4, "num_experts": 0}, (4, 0, None, "")),
        ({"num_hidden_layers": 4, "n_routed_experts": None, "num_experts_per_tok": None}, (4, 0, None, "")),
    ],
)
def test_what_other_configs_say(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert spec_of(fields) == expected
    assert spec_of(type("Config", (), fields)()) == expected


@pytest.mark.parametrize("config", [None, (), "text", 5])
def test_what_is_no_config_says_nothing(config: Any) -> None:
    assert RouteSpec.from_config(config) == RouteSpec()


def test_a_spec_is_a_value() -> None:
    spec = RouteSpec.from_config(PUBLISHED["Qwen3-30B-A3B"][0])
    assert spec == RouteSpec(layers=48, topk=8, num_experts=128, moe_layers=tuple(range(48)))
    assert len({spec, RouteSpec(layers=48, topk=8, num_experts=128, moe_layers=tuple(range(48)))}) == 1
