"""Routed experts <-> the smallest safe array <-> the packed JSON envelope.

Contract. Expert ids are an integer array ``[rows, layers, topk]``. Their canonical form is C order, native byte
order and the smallest of uint8 (ids up to 255), int16 (up to 32,767) and int32 (up to 2**31 - 1) that holds the
largest id; an array without elements is uint8. uint16, which vLLM uses above 256 experts, never leaves this module:
torch has next to no operations for it.

The envelope is ``{"data": base64, "shape": [rows, layers, topk], "dtype": name}`` with little-endian bytes, the
standard alphabet and padding. It is byte compatible with the one of SkyRL 0.4.0. Decoding trusts nothing: every
byte string gives an array or a :class:`~skyrl_r3.errors.CodecError`.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

from skyrl_r3.errors import CodecError, describe

MAX_BYTES = 2**31
"""Largest array that is decoded, in bytes. One million tokens of 61 layers, top-8 and 384 experts take 1 GB."""

DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int16", "int32")}
"""The dtypes of the wire by name, smallest first."""

_ENVELOPE_KEYS = ("data", "shape", "dtype")


def smallest_dtype(max_id: int) -> np.dtype[Any]:
    """The smallest dtype of the wire that holds ``max_id``.

    Raises:
        CodecError: ``max_id`` is above 2**31 - 1.
    """
    for dtype in DTYPES.values():
        if max_id <= np.iinfo(dtype).max:
            return dtype.newbyteorder("=")
    raise CodecError("routed_experts", expected=f"ids up to {2**31 - 1}", got=str(max_id))


def compact(ids: Any) -> np.ndarray:
    """Copy ``ids`` into their canonical form.

    The result never shares memory with ``ids``: the engine may write its buffer again while the result is still
    on its way to the trainer.

    Args:
        ids: Integer array ``[rows, layers, topk]`` of any layout and byte order: numpy, or a torch tensor on any
            device, which is copied to the host.

    Returns:
        A writable, C-contiguous array ``[rows, layers, topk]`` of uint8, int16 or int32.

    Raises:
        CodecError: Not such an array, a negative id, or an id above 2**31 - 1.
    """
    return np.array(_canonical(ids), order="C")


def pack(ids: Any) -> dict[str, Any]:
    """Encode ``ids`` as a packed envelope. Takes and raises what :func:`compact` does."""
    array = _canonical(ids)
    return {"data": _base64(array).decode("ascii"), "shape": list(array.shape), "dtype": array.dtype.name}


def pack_json(ids: Any) -> bytes:
    """The JSON text of :func:`pack`, byte for byte what orjson would write.

    Joined by hand because orjson has to scan and copy ``data`` as a str: for 17 MB that takes 8 times as long.
    """
    array = _canonical(ids)
    rows, layers, topk = array.shape
    tail = f'","shape":[{rows},{layers},{topk}],"dtype":"{array.dtype.name}"}}'
    return b"".join((b'{"data":"', _base64(array), tail.encode()))


def unpack(envelope: Any) -> np.ndarray:
    """Decode a packed envelope from an untrusted source.

    Args:
        envelope: Mapping with exactly the keys ``data`` (base64 as str or bytes), ``shape`` and ``dtype``.

    Returns:
        A writable, C-contiguous array ``[rows, layers, topk]`` of uint8, int16 or int32 that owns its memory.

    Raises:
        CodecError: Anything else. Nothing is allocated for a claimed size that the data does not have.
    """
    if not isinstance(envelope, Mapping):
        raise CodecError("routed_experts", expected="an object with data, shape and dtype", got=describe(envelope))
    if set(envelope) != set(_ENVELOPE_KEYS):
        keys = ", ".join(sorted(map(str, envelope))[:8]) or "none"
        raise CodecError("routed_experts", expected="the keys data, shape and dtype", got=keys)
    dtype = _checked_dtype(envelope["dtype"])
    shape = _checked_shape(envelope["shape"])
    size = math.prod(shape) * dtype.itemsize
    if size > MAX_BYTES:
        raise CodecError("routed_experts.shape", expected=f"at most {MAX_BYTES} bytes", got=f"{list(shape)} = {size}")
    array = np.frombuffer(_checked_base64(envelope["data"], size), dtype=dtype).reshape(shape)
    array = array.astype(dtype.newbyteorder("="), copy=False)
    canonical = _narrowed(array).dtype
    if canonical != array.dtype:
        raise CodecError("routed_experts.dtype", expected=f"{canonical.name}, the smallest", got=array.dtype.name)
    return array


def from_nested(ids: Any) -> np.ndarray:
    """Decode the nested lists ``[rows][layers][topk]`` of a server that does not pack.

    Raises:
        CodecError: Not such lists: ragged, other types than int inside, ids out of range.
    """
    if not isinstance(ids, list):
        raise CodecError("routed_experts", expected="an envelope or nested lists", got=describe(ids))
    try:
        array = np.array(ids) if ids else np.empty((0, 0, 0), np.uint8)
    except (ValueError, OverflowError, TypeError, MemoryError) as error:
        raise CodecError("routed_experts", expected="nested lists of one shape", got=str(error)) from error
    return compact(array)


def _canonical(ids: Any) -> np.ndarray:
    """``ids`` in canonical form; shares memory with ``ids`` where they are canonical already."""
    if callable(getattr(ids, "detach", None)) and callable(getattr(ids, "cpu", None)):
        ids = ids.detach().cpu().numpy() if _is_integer_tensor(ids) else ids
    if not isinstance(ids, np.ndarray) or isinstance(ids, np.ma.MaskedArray):
        raise CodecError("routed_experts", expected="an integer array [rows, layers, topk]", got=describe(ids))
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise CodecError("routed_experts", expected="an integer array [rows, layers, topk]", got=describe(ids))
    return np.ascontiguousarray(_narrowed(ids))


def _is_integer_tensor(tensor: Any) -> bool:
    # bfloat16 has no numpy counterpart: asking for one would raise torch's TypeError instead of ours.
    return not (tensor.is_floating_point() or tensor.is_complex())


def _narrowed(array: np.ndarray) -> np.ndarray:
    """``array`` in the smallest dtype, or itself where it has that. Scans only what the dtype leaves open."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "i" and int(array.min(initial=0)) < 0:
        row, layer, slot = (int(i) for i in np.argwhere(array < 0)[0])
        raise CodecError(
            "routed_experts",
            expected="ids of 0 or more",
            got=str(int(array[row, layer, slot])),
            where=f"row {row}, layer {layer}, slot {slot}",
        )
    return array.astype(smallest_dtype(int(array.max(initial=0))), copy=False)


def _base64(array: np.ndarray) -> bytes:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return pybase64.b64encode(memoryview(little).cast("B") if little.size else b"")


def _checked_dtype(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        raise CodecError("routed_experts.dtype", expected=f"one of {', '.join(DTYPES)}", got=describe(name))
    return DTYPES[name]


def _checked_shape(shape: object) -> tuple[int, int, int]:
    # `type(...) is int` because bool is a subclass of int, and True is no dimension.
    if (
        not isinstance(shape, list | tuple)
        or len(shape) != 3
        or not all(type(dim) is int and dim >= 0 for dim in shape)
    ):
        got = repr(shape)[:80] if isinstance(shape, list | tuple) else describe(shape)
        raise CodecError("routed_experts.shape", expected="[rows, layers, topk], integers of 0 or more", got=got)
    rows, layers, topk = shape
    return rows, layers, topk


def _checked_base64(data: object, size: int) -> bytearray:
    """The ``size`` bytes that ``data`` encodes."""
    if not isinstance(data, str | bytes | bytearray):
        raise CodecError("routed_experts.data", expected="base64", got=describe(data))
    expected = 4 * ((size + 2) // 3)
    if len(data) != expected:
        raise CodecError(
            "routed_experts.data", expected=f"{expected} base64 characters for {size} bytes", got=str(len(data))
        )
    try:
        # canonical: without it, set pad bits are let through and one array has several encodings.
        decoded = pybase64.b64decode_as_bytearray(data, validate=True, canonical=True)
    except (binascii.Error, ValueError) as error:
        raise CodecError("routed_experts.data", expected="canonical base64", got=str(error)) from error
    if len(decoded) != size:
        raise CodecError("routed_experts.data", expected=f"{size} bytes", got=f"{len(decoded)} bytes")
    return decoded
