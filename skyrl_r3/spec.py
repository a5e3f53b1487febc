"""What a model's routes look like, read from its Hugging Face config.

Counted as vLLM counts (0.30.0): one captured layer for each hidden layer, dense ones included, which stay all zero. The
layers of multi-token prediction are not captured. Experts are the routed, logical ones, without shared experts and
without the copies of a load balancer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_r3.errors import ReplyError, describe

__all__ = ["MAX_LAYERS", "RouteSpec", "layers_text", "read_layers"]

MAX_LAYERS = 4096
"""More than any model has. A bound, as a few bytes of a frame's ``moe_layers`` can spell out as many as they like."""

# The first name that a config has counts, as in vLLM.
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")

type _Fields = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """What a model's routes look like. What is unknown is None, and is not checked.

    Attributes:
        layers: Captured layers, which are all hidden layers, dense ones included.
        topk: Experts a token and layer.
        num_experts: Of a layer: routed, logical, without shared ones. 0 where the config says that there are none.
        moe_layers: Which of the layers route, ascending. vLLM leaves the others all zero.
    """

    layers: int | None = None
    topk: int | None = None
    num_experts: int | None = None
    moe_layers: tuple[int, ...] | None = None

    @classmethod
    def from_config(cls, config: Any) -> RouteSpec:
        """Read a config, or the ``text_config`` in it.

        Layers and counts are read of any model, by the names that vLLM knows. Which layers route is read of the
        families that are listed here, and not guessed of others.

        Args:
            config: Of Hugging Face: an object, or the dict of a ``config.json``.
        """
        config = _field(config, "text_config") or config
        fields = partial(_field, config)
        layers, topk, experts = _count(fields, ("num_hidden_layers",)), _count(fields, _TOPK), _num_experts(config)
        routes = _FAMILIES.get(str(fields("model_type")))
        moe_layers = None
        if experts == 0:
            moe_layers = ()
        elif layers and experts and routes:
            try:
                moe_layers = tuple(layer for layer in range(layers) if routes(fields, layer))
            except (TypeError, ZeroDivisionError, IndexError):
                moe_layers = None  # A field that the family's models have is missing, or is of another form.
        return cls(layers=layers, topk=topk or None, num_experts=experts, moe_layers=moe_layers)


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _count(fields: _Fields, names: Iterable[str]) -> int | None:
    value = next((value for name in names if (value := fields(name)) is not None), None)
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        value = value[0]  # Some configs say it for each layer.
    return value if type(value) is int and value >= 0 else None


def _num_experts(config: Any) -> int | None:
    """0 where a config has the name and no number, as DeepSeek's dense ones; None where it has no such name."""
    named = any(name in config if isinstance(config, Mapping) else hasattr(config, name) for name in _EXPERTS)
    if named and all(_field(config, name) is None for name in _EXPERTS):
        return 0
    return _count(partial(_field, config), _EXPERTS)


# Whether a layer routes, for each family. A TypeError says that a field is not what it is in that family.


def _every(fields: _Fields, layer: int) -> bool:
    return True


def _sparse_step(fields: _Fields, layer: int) -> bool:
    step = fields("decoder_sparse_step")
    return layer not in (fields("mlp_only_layers") or ()) and (layer + 1) % (1 if step is None else step) == 0


def _dense_first(fields: _Fields, layer: int) -> bool:
    types = fields("mlp_layer_types")
    if fields("first_k_dense_replace") is None and types is not None:
        return types[layer] == "sparse"  # Newer config classes of transformers write the layers out.
    return layer >= fields("first_k_dense_replace")


def _dense_first_and_frequency(fields: _Fields, layer: int) -> bool:
    frequency = fields("moe_layer_freq")
    if isinstance(frequency, list | tuple):
        routes = bool(frequency[layer])
    else:
        routes = layer % (1 if frequency is None else frequency) == 0
    return _dense_first(fields, layer) and routes


def _interleaved(fields: _Fields, layer: int) -> bool:
    step = fields("interleave_moe_layer_step")
    return step > 0 and (layer + 1) % step == 0


_FAMILIES: dict[str, Callable[[_Fields, int], bool]] = {
    "qwen2_moe": _sparse_step,
    "qwen3_moe": _sparse_step,
    "qwen3_vl_moe_text": _sparse_step,
    "qwen3_next": _sparse_step,
    "qwen3_5_moe_text": _every,
    "deepseek_v2": _dense_first_and_frequency,
    "deepseek_v3": _dense_first_and_frequency,  # Moonlight calls itself so, too.
    "deepseek_v32": _dense_first_and_frequency,
    "kimi_k2": _dense_first_and_frequency,
    "glm4_moe": _dense_first,
    "glm4v_moe_text": _dense_first,
    "glm4_moe_lite": _dense_first_and_frequency,
    "mixtral": _every,
    "olmoe": _every,
    "gpt_oss": _every,
    "minimax": _every,
    "minimax_text_01": _every,
    "minimax_m1": _every,
    "minimax_m2": _every,
    "llama4_text": _interleaved,
}


# As text, for a frame's metadata.


def layers_text(layers: Iterable[int]) -> str:
    """Ascending ``layers`` as ranges: ``3-60``, or ``1,3,5-7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_layers(text: str, *, layers: int | None, field: str) -> tuple[int, ...]:
    """The layers in such a text from an untrusted source.

    Args:
        text: It.
        layers: How many there are, None where unknown.
        field: Its name, for the error.

    Raises:
        ReplyError: Anything that :func:`layers_text` would not have written, or a layer that there is not.
    """
    limit = MAX_LAYERS if layers is None else min(layers, MAX_LAYERS)
    found: list[int] = []
    for part in text.split(","):
        ends = part.partition("-")[::2] if "-" in part else (part, part)
        digits = all(end.isascii() and end.isdigit() and len(end) <= 4 for end in ends)
        first, last = map(int, ends) if digits else (0, -1)
        # Compared with what is there before it is spelled out: a header has room for ten thousand ranges of all layers.
        if not (found[-1] if found else -1) < first <= last < limit:
            break
        found += range(first, last + 1)
    if not text or layers_text(found) != text:
        expected = f"ascending ranges of layers below {limit}, as 1,3,5-7"
        raise ReplyError(field, expected=expected, got=describe(text))
    return tuple(found)
