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
from array import array as Array
from collections.abc import Mapping
from itertools import chain
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
        CodecError: ``max_id`` is negative or above 2**31 - 1.
    """
    for dtype in DTYPES.values():
        if 0 <= max_id <= np.iinfo(dtype).max:
            return dtype.newbyteorder("=")
    raise CodecError("routed_experts", expected=f"ids from 0 to {2**31 - 1}", got=describe(max_id))


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
        keys = ", ".join(sorted(key if isinstance(key, str) else describe(key) for key in envelope)) or "none"
        raise CodecError("routed_experts", expected="the keys data, shape and dtype", got=keys)
    dtype = _checked_dtype(envelope["dtype"])
    shape = _checked_shape(envelope["shape"])
    size = math.prod(shape) * dtype.itemsize
    # A dimension of 0 must not hide one that no array can have.
    if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize > MAX_BYTES:
        got = f"{describe(shape)}, {describe(size)} bytes"
        raise CodecError("routed_experts.shape", expected=f"at most {MAX_BYTES} bytes", got=got)
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
    return compact(array)


def check(ids: Any) -> None:
    """Check that ``ids`` is an array that this module could have made, whatever its layout.

    Raises:
        CodecError: Not a numpy array ``[rows, layers, topk]`` of uint8, int16 or int32 in native byte order, or a
            negative id. Ids that a smaller dtype would hold are fine: a slice may have lost the largest one.
    """
    if not isinstance(ids, np.ndarray) or isinstance(ids, np.ma.MaskedArray) or ids.ndim != 3:
        raise CodecError("routed_experts", expected="an array [rows, layers, topk]", got=describe(ids))
    if ids.dtype not in DTYPES.values():
        raise CodecError("routed_experts.dtype", expected=f"one of {', '.join(DTYPES)}", got=ids.dtype.str)
    _check_not_negative(ids)


def _canonical(ids: Any) -> np.ndarray:
    """``ids`` in canonical form; shares memory with ``ids`` where they are canonical already."""
    given = ids
    if callable(getattr(ids, "detach", None)):
        try:
            ids = ids.detach().cpu().numpy()
        except Exception as error:
            # Sparse, quantized, meta and bfloat16 tensors have no numpy counterpart, each with an error of its own.
            raise CodecError("routed_experts", expected="a tensor that numpy can hold", got=describe(ids)) from error
    integers = isinstance(ids, np.ndarray) and ids.ndim == 3 and ids.dtype.kind in "iu"
    if not integers or isinstance(ids, np.ma.MaskedArray):
        got = describe(ids if isinstance(ids, np.ndarray) else given)
        raise CodecError("routed_experts", expected="an integer array [rows, layers, topk]", got=got)
    return np.ascontiguousarray(_narrowed(ids))


def _narrowed(array: np.ndarray) -> np.ndarray:
    """``array`` in the smallest dtype, or itself where it has that. Scans only what the dtype leaves open."""
    if array.dtype == np.uint8:
        return array
    _check_not_negative(array)
    return array.astype(smallest_dtype(int(array.max(initial=0))), copy=False)


def _check_not_negative(array: np.ndarray) -> None:
    if array.dtype.kind == "i" and int(array.min(initial=0)) < 0:
        row, layer, slot = (int(i) for i in np.argwhere(array < 0)[0])
        raise CodecError(
            "routed_experts",
            expected="ids of 0 or more",
            got=str(int(array[row, layer, slot])),
            where=f"row {row}, layer {layer}, slot {slot}",
        )


def _check_lists(items: list[Any], what: str) -> None:
    if set(map(type, items)) - {list}:
        wrong = next(item for item in items if type(item) is not list)
        raise CodecError("routed_experts", expected=what, got=describe(wrong))


def _base64(array: np.ndarray) -> bytes:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return pybase64.b64encode(memoryview(little).cast("B") if little.size else b"")


def _checked_dtype(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or name not in DTYPES:
        raise CodecError("routed_experts.dtype", expected=f"one of {', '.join(DTYPES)}", got=describe(name))
    return DTYPES[name]


def _checked_shape(shape: object) -> tuple[int, int, int]:
    # `type(...) is int` because bool is a subclass of int, and True is no dimension.
    fits = isinstance(shape, list | tuple) and len(shape) == 3 and all(type(dim) is int and dim >= 0 for dim in shape)
    if not isinstance(shape, list | tuple) or not fits:
        expected = "[rows, layers, topk], integers of 0 or more"
        raise CodecError("routed_experts.shape", expected=expected, got=describe(shape))
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
