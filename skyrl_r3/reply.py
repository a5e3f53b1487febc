"""The reply of ``/skyrl/v1/generate``, written by the server and read by the client.

A client names the encodings it reads, most wanted first, in the request field ``routed_experts_encodings``. A body
field and no header, because vllm-router passes unknown fields on and drops headers (seen with 0.1.17).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from skyrl_r3 import codec
from skyrl_r3.errors import CodecError, MissingRoutesError, ReplyError, RouteError, describe
from skyrl_r3.routes import RoutedExperts, as_token_array

GENERATE_PATH = "/skyrl/v1/generate"
ENCODINGS_FIELD = "routed_experts_encodings"
PACKED = "packed"
NESTED = "nested"
ENCODINGS = (PACKED, NESTED)

FLOORED_LOGPROB = -9999.0
"""Stands for a missing or non-finite logprob: the value that vLLM's own OpenAI endpoints use."""


def choose_encoding(wanted: object) -> str:
    """The first encoding of a request's list that this version writes.

    Raises:
        ReplyError: Not a list of names, or none of them is known.
    """
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ReplyError(ENCODINGS_FIELD, expected="a list of names", got=describe(wanted))
    for name in wanted:
        if name in ENCODINGS:
            return name
    raise ReplyError(ENCODINGS_FIELD, expected=f"one of {', '.join(ENCODINGS)}", got=repr(wanted)[:80])


def floored_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[Mapping[int, Any] | None]
) -> tuple[list[dict[str, float]], int]:
    """SkyRL's ``logprobs.content`` for the sampled tokens, and how many of them had to be floored.

    A missing entry, None, NaN or an infinity becomes :data:`FLOORED_LOGPROB`. JSON has no number for them: orjson
    writes ``null``, and SkyRL's own server answers with an error that ends the run.
    """
    content = []
    floored = 0
    for token_id, candidates in zip(token_ids, logprobs, strict=False):
        entry = candidates.get(token_id) if candidates else None
        value = None if entry is None else entry.logprob
        if value is None or not math.isfinite(value):
            value = FLOORED_LOGPROB
            floored += 1
        content.append({"logprob": value})
    return content, floored


def dump_packed(
    *, token_ids: list[int], finish_reason: str | None, logprobs: list[dict[str, float]] | None, routed_experts: Any
) -> bytes:
    """The JSON body of a reply with packed routes.

    Args:
        token_ids: The sampled tokens.
        finish_reason: vLLM's.
        logprobs: :func:`floored_logprobs`, or None where the request asked for none.
        routed_experts: ids ``[rows, layers, topk]``, or None where the engine captured none.

    Raises:
        CodecError: The engine's routes are not an array of expert ids.
    """
    head = orjson.dumps(
        {
            "token_ids": token_ids,
            "finish_reason": finish_reason,
            "logprobs": None if logprobs is None else {"content": logprobs},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
    routes = b"null" if routed_experts is None else codec.pack_json(routed_experts)
    return b"".join((b'{"choices":[', head[:-1], b',"routed_experts":', routes, b"}]}"))


def load(body: bytes, *, prompt_token_ids: list[int], where: str) -> tuple[dict[str, Any], str]:
    """Read a reply in any JSON encoding.

    Args:
        body: The whole body.
        prompt_token_ids: What was sent.
        where: The server's address and what else tells the request, for errors.

    Returns:
        The parsed body, in which ``routed_experts`` is a :class:`RoutedExperts` with one row for each token that
        was fed to the model (prompt + response - 1: the last sampled token never is), and the encoding it came in.

    Raises:
        ReplyError: The body is not such a reply, or has another number of rows.
        MissingRoutesError: It has tokens but no routes.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        got = f"{describe(body)}: {error}"
        # `from None`, because the JSON error holds the whole body.
        raise ReplyError("reply", expected="JSON", got=got, where=where) from None
    choice = _first_choice(reply, body, where)
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list):
        raise ReplyError("token_ids", expected="a list of token ids", got=describe(token_ids), where=where)
    encoding, ids = _decoded(choice, where)
    _check_rest(choice, where)
    prompt, response = len(prompt_token_ids), len(token_ids)
    # A request that was aborted before its first token trains nothing, whatever part of its prompt was captured.
    if response and len(ids) != prompt + response - 1:
        raise ReplyError(
            "routed_experts.shape",
            expected=f"{prompt + response - 1} rows from prompt {prompt} + response {response} - 1",
            got=f"{len(ids)} rows",
            where=where,
            hint="The engine and this client disagree on what was generated, so no row can be trusted.",
        )
    if len(ids) and not ids.size:
        expected = "at least one layer and one expert a row"
        raise ReplyError("routed_experts.shape", expected=expected, got=describe(ids), where=where)
    if not response and len(ids) > prompt:
        expected = f"at most {prompt} rows for a prompt of {prompt} and no response"
        raise ReplyError("routed_experts.shape", expected=expected, got=f"{len(ids)} rows", where=where)
    try:
        tokens = as_token_array([*prompt_token_ids, *token_ids])
    except RouteError as error:
        raise ReplyError(error.field, expected=error.expected, got=error.got, where=where) from error
    if response and int(tokens.min()) < 0:
        raise ReplyError("token_ids", expected="ids of 0 or more", got=str(int(tokens.min())), where=where)
    choice["routed_experts"] = RoutedExperts(ids, tokens[: len(ids)])
    return reply, encoding


def _first_choice(reply: object, body: bytes, where: str) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        got = f"{describe(choices)} in {body[:100].decode(errors='replace')}"
        raise ReplyError("choices", expected="a list that begins with an object", got=got, where=where)
    return choices[0]


def _check_rest(choice: dict[str, Any], where: str) -> None:
    """Check what SkyRL's client takes from the reply beside the routes, so that a fault in it says where it is."""
    if "finish_reason" not in choice:
        raise ReplyError("finish_reason", expected="a reason", got="nothing", where=where)
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return
    content = logprobs.get("content", []) if isinstance(logprobs, dict) else None
    kinds = {type(entry.get("logprob")) if isinstance(entry, dict) else None for entry in content or []}
    if not isinstance(content, list) or kinds - {float, int}:
        got = describe(logprobs if content is None else next(iter(content), None))
        raise ReplyError("logprobs.content", expected="a list of {logprob: number}", got=got, where=where)
    if content and len(content) != len(choice["token_ids"]):
        expected = f"{len(choice['token_ids'])} entries, one for each token"
        raise ReplyError("logprobs.content", expected=expected, got=str(len(content)), where=where)


def _decoded(choice: dict[str, Any], where: str) -> tuple[str, Any]:
    routes = choice.get("routed_experts")
    if routes is None and not choice["token_ids"]:
        return PACKED, codec.from_nested([])
    if routes is None:
        raise MissingRoutesError(
            "routed_experts",
            expected="the routes of the reply",
            got=f"null with finish_reason {choice.get('finish_reason')!r}",
            where=where,
            hint="Start the inference server with --enable-return-routed-experts "
            "(generator.inference_engine.enable_return_routed_experts=true), or switch that flag off in the trainer.",
        )
    try:
        return (NESTED, codec.from_nested(routes)) if isinstance(routes, list) else (PACKED, codec.unpack(routes))
    except CodecError as error:
        hint = "" if isinstance(routes, dict | list) else "Other encodings (.npy, base85, raw base64) are not read."
        raise ReplyError(error.field, expected=error.expected, got=error.got, where=where, hint=hint) from error
