"""Inference engine: what its model's routes look like, and what it cannot do with the routes flag on.

What a vLLM does was read in the sources of 0.15.1 to 0.30.0, release by release. A development build counts as older
than its release. Of a vLLM whose version is unknown, only what holds for all of them is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from packaging.version import InvalidVersion, Version

from skyrl_r3.errors import EngineError, ReplyError, describe
from skyrl_r3.spec import RouteSpec
from skyrl_r3.wire import START_FIELD

logger: logging.Logger = logging.getLogger(__name__)

_FLAG = "--enable-return-routed-experts"
_CAPTURES_LOGICAL_IDS = Version("0.16.0")
"""vllm#33013. Before, capture came behind the load balancer's map, and was bound too late to see anything."""
_FINDS_ATTENTION_GROUP = Version("0.22.0")
"""vllm#35744. Before, rows were looked up by the slots of the first cache group, whatever it is of."""
_LEAVES_DRAFT_OUT = Version("0.26.0")
"""vllm#48622. Before, a draft's layer 0 was captured over the model's."""
_STARTS_AT_PROMPT_END = Version("0.30.0")
"""vllm#56844. Before, from 0.22.0 on, the scheduler asserted that a start is less than the prompt's length."""
_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix")


def vllm_version() -> Version | None:
    """Of the vLLM that runs in this process; None where there is none, or it has no number that tells."""
    try:
        version = Version(sys.modules["vllm"].__version__)
    except (KeyError, AttributeError, TypeError, InvalidVersion):
        return None
    # Built from sources without tags, vLLM calls itself 0.1.dev and a hash, however new it is.
    return None if version.is_devrelease and version.release == (0, 1) else version


def check_start(body: dict[str, Any]) -> None:
    """Refuse a request whose ``routed_experts_prompt_start`` the engine might die of.

    vLLM 0.30.0 refuses what is outside of the prompt by itself. The prompt's end is inside: rows of the response alone.
    Up to 0.29.0 nothing is checked but in the scheduler, where an error ends the engine and all its requests.

    Raises:
        ReplyError: No integer, or none that this vLLM takes. Whatever else is wrong is left to SkyRL's handler.
    """
    params, token_ids = body.get("sampling_params"), body.get("token_ids")
    if not isinstance(params, dict) or START_FIELD not in params or not isinstance(token_ids, list):
        return
    start, version = params[START_FIELD], vllm_version()
    takes_end = version is not None and version >= _STARTS_AT_PROMPT_END
    last = len(token_ids) if takes_end else max(len(token_ids) - 1, 0)
    if type(start) is not int or not 0 <= start <= last:
        raise ReplyError(
            f"sampling_params.{START_FIELD}",
            expected=f"an integer from 0 to {last} for a prompt of {len(token_ids)} tokens",
            got=describe(start),
            hint=""
            if takes_end
            else f"vLLM {version or 'of unknown version'} may die of a start at the prompt's end; "
            f"{_STARTS_AT_PROMPT_END} does not.",
        )


def route_spec(engine: Any) -> RouteSpec:
    """What ``engine`` says of its model; what it does not say is unknown.

    Where vLLM counts otherwise than we read the config, vLLM, which captures, is right, and which layers route is
    unknown.
    """
    model = _model_config(engine)
    spec = RouteSpec.from_config(getattr(model, "hf_text_config", None))
    counts = {
        "layers": _call(model, "get_total_num_hidden_layers"),
        "num_experts": _call(model, "get_num_experts"),
        "topk": _call(model, "get_num_experts_per_tok"),
    }
    counts = {name: count for name, count in counts.items() if type(count) is int and count > 0}
    wrong = {name: count for name, count in counts.items() if getattr(spec, name) not in (None, count)}
    if wrong:
        read = ", ".join(f"{name} {getattr(spec, name)}" for name in wrong)
        told = ", ".join(f"{name} {count}" for name, count in wrong.items())
        logger.warning("The model's config says %s, and vLLM %s. Which layers route is not checked.", read, told)
        spec = replace(spec, moe_layers=None)
    return replace(spec, **counts)


def refuse_combinations(cli_args: Any, engine: Any) -> None:
    """Refuse to serve routes from an engine that does not capture them as it was started.

    From 0.22.0 on vLLM itself refuses pipeline parallelism, KV connectors and context parallelism. SkyRL's trainer
    refuses the ray executor, but a server that is started by hand does not. What nobody sees, up to 0.30.0, is
    ``--kv-offloading-size``: vLLM makes a connector of it, but after it has looked for one.

    The engine, which is running, is shut down, so that the error is the last that is printed.

    Args:
        cli_args: The server's.
        engine: Its ``vllm_config`` is read besides. What neither of the two has is not refused.

    Raises:
        EngineError: For the first such combination.
    """
    for refusal in _refusals(partial(_settings, cli_args, engine), _model_config(engine), vllm_version()):
        getattr(engine, "shutdown", lambda: None)()
        raise refusal


def _refusals(settings: Any, model: Any, version: Version | None) -> Iterator[EngineError]:
    def refusal(flags: str, expected: str, got: Any, hint: str) -> EngineError:
        return EngineError(f"{_FLAG} with {flags}", expected=expected, got=str(got), hint=hint)

    def older(bound: Version) -> bool:
        return version is not None and version < bound

    for size in settings("parallel_config", "pipeline_parallel_size"):
        if size > 1:
            hint = (
                "Only one stage's rows are returned, with zeros for the layers of the others. Use tensor parallelism."
            )
            yield refusal("--pipeline-parallel-size", "1", size, hint)
    for size in settings("cache_config", "kv_offloading_size"):
        hint = (
            "Rows are kept by cache slot: a block that comes back from elsewhere has those of the slot's last tenant."
        )
        yield refusal("--kv-offloading-size", "none", f"{size} GiB", hint)
    for connector in map(_connector, settings("", "kv_transfer_config")):
        if connector:
            hint = "Rows are kept by cache slot, and do not travel with a block from another server or from storage."
            yield refusal("--kv-transfer-config", "none", connector, hint)
    for backend in settings("parallel_config", "distributed_executor_backend"):
        if backend == "ray" or getattr(backend, "uses_ray", False):
            yield refusal("--distributed-executor-backend", "mp", "ray", "Capture can hang there. Use mp.")
    if older(_LEAVES_DRAFT_OUT):
        for speculation in settings("", "speculative_config")[:1]:
            if _drafts(speculation):
                hint = f"vLLM {version} captures the draft model's routes in the place of layer 0's."
                yield refusal("--speculative-config", f"none, or vLLM {_LEAVES_DRAFT_OUT}", _method(speculation), hint)
    if older(_FINDS_ATTENTION_GROUP) and getattr(model, "is_hybrid", False):
        hint = f"vLLM {version} mixes up the cache groups of attention and mamba layers."
        yield refusal("--model", f"attention only, or vLLM {_FINDS_ATTENTION_GROUP}", "a hybrid model", hint)
    if older(_CAPTURES_LOGICAL_IDS) and any(settings("parallel_config", "enable_eplb")):
        hint = f"vLLM {version} captures the load balancer's slots in the place of experts."
        yield refusal("--enable-eplb", f"it off, or vLLM {_CAPTURES_LOGICAL_IDS}", "it on", hint)
    experts = _call(model, "get_num_experts")
    if experts is None:
        experts = RouteSpec.from_config(getattr(model, "hf_text_config", None)).num_experts
    if experts == 0:
        name = getattr(model, "model", "a model")
        yield refusal("--model", "a mixture of experts", f"{name} without experts", "There is nothing to replay.")


def _settings(cli_args: Any, engine: Any, section: str, name: str) -> list[Any]:
    """``name`` of a ``section`` of the engine's config (of the config itself: an empty one), and of the arguments."""
    config = getattr(engine, "vllm_config", None)
    places = (getattr(config, section, None) if section else config, cli_args)
    return [value for place in places if (value := getattr(place, name, None)) is not None]


def _model_config(engine: Any) -> Any:
    config = getattr(engine, "vllm_config", None)
    return getattr(config, "model_config", None) or getattr(engine, "model_config", None)


def _call(model: Any, name: str) -> Any:
    return getattr(model, name, lambda: None)()


def _part(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _connector(config: Any) -> Any:
    """What a config names as its connector. As text it names one; vLLM's parser leaves none of that."""
    return config if isinstance(config, str) else _part(config, "kv_connector")


def _method(config: Any) -> str:
    return config if isinstance(config, str) else str(_part(config, "method") or _part(config, "model"))


def _drafts(config: Any) -> bool:
    """Whether there may be experts in what it drafts with."""
    if _part(config, "method") in _WITHOUT_DRAFT:
        return False
    return _call(_part(config, "draft_model_config"), "get_num_experts") != 0
