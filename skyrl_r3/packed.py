"""The JSON encodings of a reply: ``packed``, which is SkyRL 0.4.0's, and the nested lists of SkyRL 0.3.

Packed is ``choices[0].routed_experts = {"data": base64, "shape": [rows, layers, topk], "dtype": name}`` in the reply
that SkyRL's endpoint has anyway. It is byte compatible with SkyRL 0.4.0, whose parser wants the keys in that order and
no white space. The parser here reads any JSON.
"""

from __future__ import annotations

import reprlib
from array import array as Array
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson

from skyrl_r3 import codec
from skyrl_r3.errors import BrokenRoutesError, CodecError, ReplyError, RouteError, describe
from skyrl_r3.reply import Reply
from skyrl_r3.routes import as_token_array

__all__ = ["NESTED", "PACKED", "dump", "from_nested", "parse", "pieces", "read"]

PACKED = "packed"
NESTED = "nested"

_QUOTE = reprlib.Repr(maxlevel=4, maxstring=100)
"""Quotes what came in the place of a reply, which may be megabytes."""
_ROUTES_KEY = b'"routed_experts":{"data":"'
_PLACEHOLDER = b"#"
"""Stands for the base64 while the rest is parsed, where there is no other of it."""


def dump(reply: Reply) -> bytes:
    """The JSON body of ``reply`` with packed routes. Raises what :func:`pieces` does."""
    return b"".join(pieces(reply))


def pieces(reply: Reply) -> list[bytes]:
    """The JSON body of ``reply`` in three pieces, of which the second is the routes' base64, so that it is not copied.

    Raises:
        CodecError: The engine's routes are not an array of expert ids.
    """
    # Contiguous, because orjson takes no other arrays.
    tokens = orjson.dumps(np.ascontiguousarray(reply.token_ids), option=orjson.OPT_SERIALIZE_NUMPY)
    logprobs, (opening, data, closing) = b"null", (b"null", b"", b"")
    if reply.logprobs is not None:
        # One object for each logprob is what SkyRL reads. Made from the array's text, which orjson writes in one go.
        values = orjson.dumps(np.ascontiguousarray(reply.logprobs), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        content = b'{"logprob":' + values.replace(b",", b'},{"logprob":') + b"}" if values else b""
        logprobs = b'{"content":[' + content + b"]}"
    if reply.routed_experts is not None:
        opening, data, closing = codec.packed_pieces(reply.routed_experts)
    reason = orjson.dumps(reply.finish_reason)
    head = (b'{"choices":[{"token_ids":', tokens, b',"finish_reason":', reason, b',"logprobs":', logprobs)
    return [b"".join((*head, b',"routed_experts":', opening)), data, closing + b"}]}"]


def parse(body: bytes) -> Any:
    """The JSON of ``body``, as ``orjson.loads`` reads it, but with the routes' base64 as a view of ``body``.

    orjson would make a str of it, and scan and copy 17 MB for that.

    Raises:
        ReplyError: Not JSON.
    """
    key = body.find(_ROUTES_KEY)
    if key >= 0:
        start = key + len(_ROUTES_KEY)
        end = body.find(b'"', start)
        # With an escape in it, the string is not what its bytes are, and may go on behind this quote.
        if end > 0 and body.find(b"\\", start, end) < 0:
            shortened = b"".join((body[:start], _PLACEHOLDER, body[end:]))
            parsed = _routes_replaced(shortened, memoryview(body)[start:end])
            if parsed is not None:
                return parsed
    return _loads(body)


def _routes_replaced(shortened: bytes, data: memoryview) -> Any:
    """The JSON of ``shortened`` with ``data`` for the placeholder.

    None if the placeholder is not, or may not be, the data of the routes: what was found need not be their key.
    """
    if shortened.count(_PLACEHOLDER) != 1 or b"\\u0023" in shortened:
        return None
    try:
        parsed = orjson.loads(shortened)
        routes = parsed["choices"][0]["routed_experts"]
        if routes["data"] != _PLACEHOLDER.decode():
            return None
        routes["data"] = data
    except (orjson.JSONDecodeError, TypeError, KeyError, IndexError):
        return None
    return parsed


def _loads(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        got = f"{describe(body)}: {error}"
        # `from None`, because the JSON error holds the whole body.
        raise ReplyError("reply", expected="JSON", got=got) from None


def read(parsed: Any) -> tuple[Reply, str]:
    """The reply in parsed JSON, and which encoding its routes come in, :data:`PACKED` or :data:`NESTED`.

    Raises:
        BrokenRoutesError: The routes are wrong and the rest is right.
        ReplyError: Not such a reply.
    """
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        got = f"{describe(choices)} in {_QUOTE.repr(parsed)[:100]}"
        raise ReplyError("choices", expected="a list that begins with an object", got=got)
    choice = choices[0]
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list):
        raise ReplyError("token_ids", expected="a list of token ids", got=describe(token_ids))
    reason = choice.get("finish_reason")
    if "finish_reason" not in choice or not isinstance(reason, str | None):
        got = describe(reason) if "finish_reason" in choice else "nothing"
        raise ReplyError("finish_reason", expected="a reason", got=got)
    routes = choice.get("routed_experts")
    try:
        tokens = as_token_array(token_ids)
    except RouteError as error:
        raise error.at("") from error
    reply = Reply(
        token_ids=tokens,
        finish_reason=reason,
        logprobs=_logprobs(choice.get("logprobs"), len(token_ids)),
        routed_experts=None,
    )
    try:
        reply = replace(reply, routed_experts=_routes(routes))
    except (CodecError, ReplyError) as error:
        raise BrokenRoutesError.of(error, reply) from error
    return reply, NESTED if isinstance(routes, list) else PACKED


def _logprobs(logprobs: Any, tokens: int) -> np.ndarray | None:
    if logprobs is None:
        return None
    content = logprobs.get("content", []) if isinstance(logprobs, dict) else None
    if isinstance(content, list):
        if tokens and not content:
            return None  # SkyRL's client takes it for none as well.
        try:
            values = [entry["logprob"] for entry in content]
            if set(map(type, values)) <= {float, int}:
                return np.array(values, dtype=np.float64)
        except (TypeError, KeyError):
            pass
    got = describe(logprobs if not isinstance(content, list) else next(iter(content), None))
    raise ReplyError("logprobs.content", expected="a list of {logprob: number}", got=got)


def _routes(routes: Any) -> np.ndarray | None:
    if routes is None:
        return None
    if isinstance(routes, list):
        return from_nested(routes)
    if not isinstance(routes, dict):
        hint = "Other encodings (.npy, base85, raw base64) are not read."
        raise ReplyError("routed_experts", expected="an envelope or nested lists", got=describe(routes), hint=hint)
    return codec.unpack(routes)


def from_nested(ids: Any) -> np.ndarray:
    """Decode the nested lists ``[rows][layers][topk]`` of a server that does not pack.

    Raises:
        CodecError: Not such lists: ragged, other types than int inside, ids out of range.
    """
    if not isinstance(ids, list):
        raise CodecError("routed_experts", expected="an envelope or nested lists", got=describe(ids))
    # By hand, not with np.array, which takes True for 1 and turns everything to text where it meets a string, at the
    # length of the longest: 26 kB of such lists made it ask for 160 MB.
    _check_lists(ids, "a list of rows")
    layers = list(chain.from_iterable(ids))
    _check_lists(layers, "lists of layers")
    flat = list(chain.from_iterable(layers))
    num_layers, topk = (len(items[0]) if items else 0 for items in (ids, layers))
    if any(len(row) != num_layers for row in ids) or any(len(layer) != topk for layer in layers):
        raise CodecError("routed_experts", expected="nested lists of one shape", got="ragged lists")
    if ids and not flat:
        raise CodecError("routed_experts", expected="ids in the nested lists", got="empty lists")
    if set(map(type, flat)) - {int}:
        wrong = next(item for item in flat if type(item) is not int)
        raise CodecError("routed_experts", expected="integers in the nested lists", got=describe(wrong))
    try:
        array = np.frombuffer(Array("q", flat), dtype=np.int64).reshape(len(ids), num_layers, topk)
    except OverflowError:
        raise CodecError(
            "routed_experts", expected=f"ids up to {2**31 - 1}", got=describe(max(flat, key=abs))
        ) from None
    return codec.compact(array)


def _check_lists(items: list[Any], what: str) -> None:
    if set(map(type, items)) - {list}:
        wrong = next(item for item in items if type(item) is not list)
        raise CodecError("routed_experts", expected=what, got=describe(wrong))
