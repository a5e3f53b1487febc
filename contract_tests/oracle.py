"""The contract as code: what an envelope, a JSON body and a frame say, worked out apart from every implementation.

Slow and plain. Of an envelope it knows everything that is wrong with it, by name; of a body, whether it can be read,
and as what.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from contract_tests.adapter import FRAME, NESTED, Array, Reply

ITEM_BYTES = {"uint8": 1, "int16": 2, "int32": 4}
FORMAT = "skyrl-r3/1"
_CODES = {"U8": "uint8", "I16": "int16", "I32": "int32"}
_NUMBERS = ("prompt_tokens", "start", "num_experts", "layers")
_MOST_LAYERS = 4096


def smallest(largest: int) -> str:
    """Name of the dtype that the contract gives to a largest id."""
    if not 0 <= largest < 1 << 31:
        raise AssertionError(f"no dtype of the wire holds {largest}")
    return "uint8" if largest < 1 << 8 else "int16" if largest < 1 << 15 else "int32"


def canonical(values: Any) -> Array:
    """``values`` [rows, layers, topk] in the dtype that the contract gives them."""
    given = np.asarray(values)
    assert given.dtype.kind in "iu", given.dtype
    assert 0 <= given.min(initial=0) <= given.max(initial=0) < 2**31, "no ids"
    array = np.array(given, dtype=np.int64, order="C", subok=False)
    return array.astype(smallest(int(array.max(initial=0))))


def assert_canonical(found: Any, values: Any) -> None:
    """``found`` has the ids of ``values`` and everything else that the contract says of a decoded array.

    ``np.array_equal`` alone would take a float or an int64 array for right.
    """
    want = canonical(values)
    assert type(found) is np.ndarray
    assert (found.dtype.str, found.shape) == (want.dtype.str, want.shape)
    assert found.tolist() == want.tolist()
    assert found.flags.writeable, "the array cannot be written"
    assert found.flags.c_contiguous, "the array is not in C order"
    assert found.flags.aligned, "the array is not aligned"


# Envelopes.


def envelope(values: Array) -> dict[str, Any]:
    """The envelope of ``values`` in their own dtype, right or not, made one id at a time."""
    size = values.itemsize
    raw = b"".join(int(value).to_bytes(size, "little", signed=value < 0) for value in values.reshape(-1))
    return {"data": base64.b64encode(raw).decode(), "shape": list(values.shape), "dtype": values.dtype.name}


def violations(given: Any, max_bytes: int = 2**31) -> set[str]:
    """Everything that is wrong with an envelope. Empty: it has to be decoded."""
    if not isinstance(given, Mapping):
        return {"no object"}
    found = set()
    if missing := {"data", "shape", "dtype"} - set(given):
        found.add("missing keys")
    if set(given) - {"data", "shape", "dtype"}:
        found.add("extra keys")
    if missing:
        return found
    dtype, shape, data = given["dtype"], given["shape"], given["data"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        found.add("dtype")
    dims = _dims(shape, found)
    raw = _raw(data, found)
    if dims is None or raw is None or "dtype" in found:
        return found
    size = math.prod(dims) * ITEM_BYTES[dtype]
    if math.prod(max(dim, 1) for dim in dims) * ITEM_BYTES[dtype] > max_bytes:
        found.add("too large")
    if len(raw) != size:
        found.add("another number of bytes")
        return found
    ids = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
    if ids.min(initial=0) < 0:
        found.add("negative id")
    elif smallest(int(ids.max(initial=0))) != dtype:
        found.add("wider than needed")
    return found


def _dims(shape: Any, found: set[str]) -> list[int] | None:
    """The dimensions, if they can be understood. JSON has lists; what else a caller in the process may give has names
    of its own here.
    """
    if isinstance(shape, str | bytes | bytearray) or not hasattr(shape, "__iter__"):
        found.add("shape" if not isinstance(shape, bytes | bytearray) else "shape container")
        if not isinstance(shape, bytes | bytearray):
            return None
    elif not isinstance(shape, list | tuple):
        found.add("shape container")
    dims = list(shape)
    if any(isinstance(dim, np.integer) for dim in dims):
        found.add("shape numpy")
    if len(dims) != 3 or not all(type(dim) is int or isinstance(dim, np.integer) for dim in dims) or min(dims) < 0:
        found.add("shape")
        return None
    return [int(dim) for dim in dims]


def _raw(data: Any, found: set[str]) -> bytes | None:
    """The bytes that ``data`` stands for, if it stands for any."""
    gaps = isinstance(data, memoryview) and not (data.c_contiguous and data.itemsize == 1)
    if gaps or not isinstance(data, str | bytes | bytearray | memoryview):
        found.add("data")
        return None
    try:
        text = data if isinstance(data, str) else bytes(data).decode("ascii")
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeError, binascii.Error):
        found.add("base64")
        return None
    again = base64.b64encode(raw).decode()
    if again != text:
        found.add("pad bits" if len(again) == len(text) and again[:-4] == text[:-4] else "base64")
    return raw


def decoded(given: Mapping[str, Any]) -> Array:
    """The ids of an envelope whose violations, if any, leave no doubt about them."""
    raw = base64.b64decode(given["data"])
    shape = [int(dim) for dim in given["shape"]]
    return np.frombuffer(raw, np.dtype(given["dtype"]).newbyteorder("<")).reshape(shape).astype(np.int64)


# Bodies.


class UnreadableError(Exception):
    """A body that no implementation may read. The text says why.

    Attributes:
        violations: What is wrong with its envelope, or the field beside it that is wrong. Empty, if the whole is.
    """

    def __init__(self, why: str, violations: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.violations = frozenset(violations)


def write(reply: Reply, encoding: str, routes: Array | None = None) -> bytes:
    """``reply`` as the contract has it, to the byte. ``routes`` are written as they are in the place of the reply's."""
    ids = routes if routes is not None else None if reply.routes is None else canonical(reply.routes)
    if encoding == FRAME:
        return _write_frame(reply, ids)
    content = None if reply.logprobs is None else {"content": [{"logprob": value} for value in reply.logprobs]}
    form = None if ids is None else ids.tolist() if encoding == NESTED else envelope(ids)
    choice = {"token_ids": reply.token_ids, "finish_reason": reply.finish_reason, "logprobs": content}
    return orjson.dumps({"choices": [choice | {"routed_experts": form}]})


def _write_frame(reply: Reply, ids: Array | None) -> bytes:
    told = {"format": FORMAT, "finish_reason": reply.finish_reason, "model": reply.metadata.get("model")}
    told |= {name: reply.metadata.get(name) for name in _NUMBERS[:-1]}
    told |= {"topk": None if ids is None else ids.shape[2], "layers": reply.metadata.get("layers")}
    told |= {"moe_layers": ranges(reply.metadata.get("moe_layers", ())) or None}
    tensors = [("token_ids", "I32", np.array(reply.token_ids, "<i4"))]
    if reply.logprobs is not None:
        tensors.append(("logprobs", "F32", np.array(reply.logprobs, "<f4")))
    if ids is not None:
        code = next(code for code, name in _CODES.items() if name == ids.dtype.name)
        tensors.append(("routed_experts", code, np.ascontiguousarray(ids, ids.dtype.newbyteorder("<"))))
    header: dict[str, Any] = {"__metadata__": {name: str(value) for name, value in told.items() if value is not None}}
    end = 0
    for name, code, array in tensors:
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    return frame(header, b"".join(array.tobytes() for _, _, array in tensors))


def ranges(layers: Iterable[int]) -> str:
    """The layers as the contract writes them."""
    layers = sorted(layers)
    firsts = [layer for layer in layers if layer - 1 not in layers]
    lasts = [layer for layer in layers if layer + 1 not in layers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def frame(header: Any, data: bytes) -> bytes:
    """A frame of any header and any bytes behind it."""
    if isinstance(header, bytes):
        text = header
    else:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read(body: bytes) -> Reply:
    """The reply in ``body``, of whatever encoding.

    Raises:
        UnreadableError: There is none.
    """
    return _read_frame(body) if len(body) > 7 and body[7] == 0 else _read_json(body)


_FIELDS = ("token_ids", "finish_reason", "logprobs")


def says_twice(body: bytes) -> bool:
    """Whether an object in the JSON of ``body`` has a key twice. As orjson has it, the last one counts."""
    try:
        json.loads(body, object_pairs_hook=_once)
    except UnreadableError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise UnreadableError(why, {why} & set(_FIELDS))


def _read_json(body: bytes) -> Reply:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnreadableError(f"no JSON: {error}") from None
    choices: Any = parsed.get("choices") if isinstance(parsed, dict) else None
    _need(isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict), "no choices")
    choice: dict[str, Any] = choices[0]
    tokens: Any = choice.get("token_ids")
    reason, routes = choice.get("finish_reason", 0), choice.get("routed_experts")
    _need(isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**31 for token in tokens), "token_ids")
    _need(reason is None or isinstance(reason, str), "finish_reason")
    logprobs = choice.get("logprobs")
    values = None
    if logprobs is not None:
        content: Any = logprobs.get("content", []) if isinstance(logprobs, dict) else None
        _need(isinstance(content, list) and all(isinstance(entry, dict) for entry in content), "logprobs")
        values = [entry.get("logprob") for entry in content]
        _need(all(type(value) in (int, float) for value in values), "logprobs")
        if tokens and not values:
            values = None  # SkyRL's own client takes it for none.
        _need(values is None or len(values) == len(tokens), "logprobs")
    ids = None
    if isinstance(routes, list):
        ids = nested(routes)
    elif routes is not None:
        wrong = violations(routes)
        if wrong:
            raise UnreadableError(f"routed_experts: {', '.join(sorted(wrong))}", wrong)
        ids = canonical(decoded(routes))
    return Reply(tokens, reason, None if values is None else [float(value) for value in values], ids)


def nested(rows: Any) -> Array:
    """The ids of nested lists.

    Raises:
        UnreadableError: They are none.
    """
    _need(isinstance(rows, list), "nested lists")
    _need(all(isinstance(row, list) for row in rows), "nested lists")
    _need(all(isinstance(layer, list) for row in rows for layer in row), "nested lists")
    flat = [number for row in rows for layer in row for number in layer]
    _need(all(type(number) is int and 0 <= number < 2**31 for number in flat), "nested ids")
    shape = (len(rows), len(rows[0]) if rows else 0, len(rows[0][0]) if rows and rows[0] else 0)
    ragged = any(len(row) != shape[1] or any(len(layer) != shape[2] for layer in row) for row in rows)
    _need(not ragged, "ragged lists")
    _need(bool(flat) or not rows, "lists without ids")
    return canonical(np.array(flat, np.int64).reshape(shape))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _need(len(dict(pairs)) == len(pairs), "a name twice")
    return dict(pairs)


def _read_frame(body: bytes) -> Reply:
    size = int.from_bytes(body[:8], "little")
    _need(0 < size <= len(body) - 8, "header length")
    text, data = body[8 : 8 + size], body[8 + size :]
    try:
        text.decode("utf-8")
        orjson.loads(text)  # The standard library's parser takes NaN, and other encodings.
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"header: {error}") from None
    _need(isinstance(header, dict), "header")
    told = header.pop("__metadata__", {})
    _need(isinstance(told, dict) and all(isinstance(value, str) for value in told.values()), "metadata")
    _need(told.get("format") == FORMAT, "format")
    _need({"token_ids"} <= set(header) <= {"token_ids", "logprobs", "routed_experts"}, "tensors")
    arrays = {name: _tensor(name, info, data) for name, info in header.items()}
    spans = sorted(tuple(info["data_offsets"]) for info in header.values())
    ends = [0, *(end for _, end in spans)]
    _need([begin for begin, _ in spans] == ends[:-1] and ends[-1] == len(data), "gaps or overlaps")
    tokens, logprobs, ids = arrays["token_ids"], arrays.get("logprobs"), arrays.get("routed_experts")
    _need(tokens.min(initial=0) >= 0, "token_ids")
    _need(logprobs is None or (len(logprobs) == len(tokens) and bool(np.isfinite(logprobs).all())), "logprobs")
    if ids is not None:
        _need(ids.min(initial=0) >= 0, "negative id")
        _need(smallest(int(ids.max(initial=0))) == ids.dtype.name, "wider than needed")
    metadata: dict[str, Any] = {}
    for name in _NUMBERS:
        if name in told:
            _need(told[name].isascii() and told[name].isdigit() and len(told[name]) <= 10, f"metadata {name}")
            metadata[name] = int(told[name])
    if "moe_layers" in told:
        metadata["moe_layers"] = _layers(told["moe_layers"], min(metadata.get("layers", _MOST_LAYERS), _MOST_LAYERS))
    if "topk" in told:
        _need(told["topk"].isascii() and told["topk"].isdigit() and len(told["topk"]) <= 10, "metadata topk")
        _need(ids is None or not len(ids) or int(told["topk"]) == ids.shape[2], "another topk")
    if told.get("model"):
        metadata["model"] = told["model"]
    values = None if logprobs is None else logprobs.tolist()
    return Reply(tokens.tolist(), told.get("finish_reason"), values, ids, metadata)


def _layers(text: str, limit: int) -> tuple[int, ...]:
    """The layers in ``text``, each of which is compared, so that a claim costs nothing."""
    found: set[int] = set()
    for part in text.split(","):
        _need(re.fullmatch("[0-9]{1,4}(-[0-9]{1,4})?", part) is not None, "moe_layers")
        first, last = (int(number) for number in (part.split("-") * 2)[:2])
        found.update(range(first, last + 1))
    _need(bool(found) and max(found) < limit and ranges(found) == text, "moe_layers")
    return tuple(sorted(found))


def _tensor(name: str, info: Any, data: bytes) -> Array:
    _need(isinstance(info, dict) and set(info) == {"dtype", "shape", "data_offsets"}, name)
    code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    for numbers in (shape, offsets):
        _need(isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers), name)
    wanted = {"token_ids": {"I32": "int32"}, "logprobs": {"F32": "float32"}, "routed_experts": _CODES}[name]
    _need(isinstance(code, str) and code in wanted, f"{name} dtype")
    dtype = np.dtype(wanted[code]).newbyteorder("<")
    _need(len(shape) == (3 if name == "routed_experts" else 1), f"{name} rank")
    _need(len(offsets) == 2 and offsets[0] <= offsets[1] <= len(data), f"{name} offsets")
    _need(math.prod(shape) * dtype.itemsize == offsets[1] - offsets[0], f"{name} bytes")
    _need(math.prod(max(dim, 1) for dim in shape) * dtype.itemsize <= 2**31, f"{name} too large")
    array = np.frombuffer(data[offsets[0] : offsets[1]], dtype)
    return array.reshape(shape).astype(dtype.newbyteorder("="))
