"""The encoding ``frame/1``: a reply as one safetensors document.

- 8 bytes: N, the length of the header, unsigned little-endian.
- N bytes: the header, JSON, padded with spaces so that the buffers begin at a multiple of 8.
- The buffers, without gaps: ``token_ids`` I32 [response], ``logprobs`` F32 [response] (absent when not asked for) and
  ``routed_experts`` U8, I16 or I32 [rows, layers, topk] (absent when there are none), little-endian, C order.
- ``__metadata__``, strings: ``format`` = ``skyrl-r3/1``, ``finish_reason``, ``model``, ``prompt_tokens``, ``start``,
  and of the model ``num_experts``, ``topk``, ``layers`` and ``moe_layers``, those of them that route, as ``1,3,5-7``.
  What is unknown is left out; readers ignore keys that they don't know, and refuse rows of another width than ``topk``.

Any safetensors reader opens it. It is written and read by hand because safetensors' own functions copy every tensor
twice to write and once to read, and write arrays that are not C-contiguous in the wrong order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Buffer
from typing import Any

import numpy as np
import orjson

from skyrl_r3 import codec
from skyrl_r3.errors import BrokenRoutesError, CodecError, ReplyError, describe
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec, layers_text, read_layers

__all__ = ["CONTENT_TYPE", "FORMAT", "FRAME", "dump", "is_frame", "load", "pieces"]

FRAME = "frame/1"
CONTENT_TYPE = "application/vnd.skyrl-r3.frame"
FORMAT = "skyrl-r3/1"

_ROUTES = "routed_experts"
_MAX_HEADER_BYTES = 2**16
_ROUTE_DTYPES = {"U8": "uint8", "I16": "int16", "I32": "int32"}
_OTHER_DTYPES = {"token_ids": ("I32", np.dtype("<i4")), "logprobs": ("F32", np.dtype("<f4"))}
_NUMBERS = ("prompt_tokens", "start")
_SPEC_NUMBERS = ("num_experts", "topk", "layers")


def dump(reply: Reply) -> bytes:
    """``reply`` as a frame. Raises what :func:`pieces` does."""
    return b"".join(pieces(reply))


def pieces(reply: Reply) -> list[Buffer]:
    """The frame in two pieces, of which the second is the routes' own memory, so that they are not copied.

    logprobs are written as float32, in which vLLM computes them.

    Raises:
        CodecError: The engine's routes are not an array of expert ids.
        ReplyError: The names of the reply are too long for a header.
    """
    metadata = {"format": FORMAT, "finish_reason": reply.finish_reason, "model": reply.model or None}
    metadata |= {name: getattr(reply, name) for name in _NUMBERS}
    metadata |= {name: getattr(reply.spec, name) for name in _SPEC_NUMBERS}
    metadata["moe_layers"] = layers_text(reply.spec.moe_layers or ()) or None
    arrays: list[tuple[str, str, np.ndarray]] = [("token_ids", "I32", np.ascontiguousarray(reply.token_ids))]
    if reply.logprobs is not None:
        arrays.append(("logprobs", "F32", np.ascontiguousarray(reply.logprobs, dtype=np.float32)))
    if reply.routed_experts is not None:
        ids = codec.canonical(reply.routed_experts)
        name = next(name for name, dtype in _ROUTE_DTYPES.items() if dtype == ids.dtype.name)
        arrays.append((_ROUTES, name, ids))
    header: dict[str, Any] = {"__metadata__": {key: str(value) for key, value in metadata.items() if value is not None}}
    end = 0
    for name, dtype, array in arrays:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ReplyError("frame", expected=f"a header of at most {_MAX_HEADER_BYTES} bytes", got=f"{len(text)} bytes")
    buffers = [codec.buffer(array) for _, _, array in arrays]
    routes = buffers.pop() if reply.routed_experts is not None else b""
    return [b"".join((len(text).to_bytes(8, "little"), text, *buffers)), routes]


def is_frame(body: bytes | bytearray | memoryview) -> bool:
    """Whether ``body`` begins like a safetensors document. JSON cannot: it has no NUL."""
    return len(body) > 7 and body[7] == 0


def load(body: bytes | bytearray | memoryview) -> Reply:
    """Read a frame from an untrusted source.

    Args:
        body: The whole body.

    Returns:
        The reply. Its arrays are views of ``body``, which lives as long as one of them, and read-only where it is.

    Raises:
        BrokenRoutesError: The routes are wrong and the rest is right.
        ReplyError: Anything else than such a frame.
    """
    header, data = _header(body)
    metadata = _metadata(header.pop("__metadata__", {}))
    if unknown := sorted(set(header) - {*_OTHER_DTYPES, _ROUTES}):
        expected = f"the tensors {', '.join((*_OTHER_DTYPES, _ROUTES))}"
        raise ReplyError("frame", expected=expected, got=f"{describe(unknown[0])} beside them")
    if "token_ids" not in header:
        raise ReplyError("frame", expected="the tensor token_ids", got="none of that name")
    pieces = _pieces(header, data)
    arrays = {}
    for name, (code, dtype) in _OTHER_DTYPES.items():
        if name in pieces:
            found, shape = header[name]["dtype"], header[name]["shape"]
            if found != code:
                raise ReplyError(f"{name}.dtype", expected=code, got=describe(found))
            if len(shape) != 1 or shape[0] * dtype.itemsize != len(pieces[name]):
                expected = f"[tokens] in {len(pieces[name])} bytes"
                raise ReplyError(f"{name}.shape", expected=expected, got=describe(shape))
            arrays[name] = np.frombuffer(pieces[name], dtype=dtype).astype(dtype.newbyteorder("="), copy=False)
    spec, routes, wrong = _spec(metadata), None, None
    if _ROUTES in pieces:
        found, shape = header[_ROUTES]["dtype"], header[_ROUTES]["shape"]
        try:
            if not isinstance(found, str) or found not in _ROUTE_DTYPES:
                expected = f"one of {', '.join(_ROUTE_DTYPES)}"
                raise CodecError(f"{_ROUTES}.dtype", expected=expected, got=describe(found))
            routes = codec.from_buffer(pieces[_ROUTES], shape=shape, dtype=_ROUTE_DTYPES[found])
            if len(routes) and spec.topk not in (None, routes.shape[2]):
                expected = f"{routes.shape[2]} as in {_ROUTES}"
                raise CodecError("__metadata__.topk", expected=expected, got=str(spec.topk))
        except CodecError as error:
            routes, wrong = None, error
    reply = Reply(
        token_ids=arrays["token_ids"],
        finish_reason=metadata.get("finish_reason"),
        logprobs=arrays.get("logprobs"),
        routed_experts=routes,
        spec=spec,
        model=metadata.get("model", ""),
        **{name: _number(metadata, name) for name in _NUMBERS},
    )
    if wrong is not None:
        raise BrokenRoutesError.of(wrong, reply) from wrong
    return reply


def _header(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
    """The header and the bytes behind it."""
    view = memoryview(body)
    if not view.c_contiguous or view.itemsize != 1:
        raise ReplyError("frame", expected="bytes without gaps", got=describe(body))
    size = int.from_bytes(view[:8], "little") if len(view) >= 8 else 0
    if not 0 < size <= min(len(view) - 8, _MAX_HEADER_BYTES):
        expected = f"a header of 1 to {_MAX_HEADER_BYTES} bytes in the body"
        raise ReplyError("frame", expected=expected, got=f"{size} in a body of {len(view)} bytes")
    text = bytes(view[8 : 8 + size])
    try:
        # The standard library takes other encodings than UTF-8, halves of surrogate pairs and NaN. orjson does not, but
        # keeps the last of two equal names and says nothing.
        orjson.loads(text)
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        # `from None`: the decoder's error holds the whole text.
        raise ReplyError("frame", expected="a JSON header", got=f"{describe(text)}: {error}") from None
    if not isinstance(header, dict):
        raise ReplyError("frame", expected="an object as header", got=describe(header))
    return header, view[8 + size :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ReplyError("frame", expected="every name once", got=f"{describe(names.most_common(1)[0][0])} twice")
    return found


def _metadata(metadata: Any) -> dict[str, str]:
    values = metadata.values() if isinstance(metadata, dict) else [metadata]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in values):
        wrong = next((value for value in values if not isinstance(value, str)), metadata)
        raise ReplyError("__metadata__", expected="an object of strings", got=describe(wrong))
    if metadata.get("format") != FORMAT:
        hint = "The server has another version of skyrl-r3. Install the same one in both environments."
        raise ReplyError("__metadata__.format", expected=FORMAT, got=describe(metadata.get("format")), hint=hint)
    return metadata


def _number(metadata: dict[str, str], name: str) -> int | None:
    text = metadata.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ReplyError(f"__metadata__.{name}", expected="a number in decimal digits", got=describe(text))
    return int(text)


def _spec(metadata: dict[str, str]) -> RouteSpec:
    numbers = {name: _number(metadata, name) for name in _SPEC_NUMBERS}
    text, layers = metadata.get("moe_layers"), numbers["layers"]
    routing = None if text is None else read_layers(text, layers=layers, field="__metadata__.moe_layers")
    return RouteSpec(moe_layers=routing, **numbers)


def _pieces(header: dict[str, Any], data: memoryview) -> dict[str, memoryview]:
    """The bytes of each tensor, once it is sure that they cover ``data`` without gap and overlap."""
    spans = []
    for name, info in header.items():
        if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
            got = describe(info) if not isinstance(info, dict) else ", ".join(map(describe, info)) or "nothing"
            raise ReplyError(name, expected="an object of dtype, shape and data_offsets", got=got)
        for key in ("shape", "data_offsets"):
            if not isinstance(info[key], list) or not all(type(item) is int and item >= 0 for item in info[key]):
                raise ReplyError(f"{name}.{key}", expected="integers of 0 or more", got=describe(info[key]))
        if len(info["data_offsets"]) != 2:
            raise ReplyError(f"{name}.data_offsets", expected="begin and end", got=describe(info["data_offsets"]))
        spans.append((*info["data_offsets"], name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position or not begin <= end <= len(data):
            expected = f"a begin at {position}, where the tensor before ends, and an end from there to {len(data)}"
            raise ReplyError(f"{name}.data_offsets", expected=expected, got=describe([begin, end]))
        position = end
    if position != len(data):
        raise ReplyError("frame", expected=f"{position} bytes of tensors", got=f"{len(data)} bytes")
    return {name: data[begin:end] for begin, end, name in spans}
