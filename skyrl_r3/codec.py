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

__all__ = ["DTYPES", "MAX_BYTES", "check", "compact", "pack", "smallest_dtype", "unpack"]

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
    return np.array(canonical(ids), order="C")


def pack(ids: Any) -> dict[str, Any]:
    """Encode ``ids`` as a packed envelope. Takes and raises what :func:`compact` does."""
    array = canonical(ids)
    return {"data": _base64(array).decode("ascii"), "shape": list(array.shape), "dtype": array.dtype.name}


def packed_pieces(ids: Any) -> tuple[bytes, bytes, bytes]:
    """The JSON text of :func:`pack` in three pieces, byte for byte what orjson would write.

    By hand because orjson has to scan and copy ``data`` as a str: for 17 MB that takes 8 times as long.
    """
    array = canonical(ids)
    rows, layers, topk = array.shape
    tail = f'","shape":[{rows},{layers},{topk}],"dtype":"{array.dtype.name}"}}'
    return b'{"data":"', _base64(array), tail.encode()


def unpack(envelope: Any) -> np.ndarray:
    """Decode a packed envelope from an untrusted source.

    Args:
        envelope: Mapping with exactly the keys ``data`` (base64 as str or a buffer), ``shape`` and ``dtype``.

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
    size = _size(envelope["shape"], envelope["dtype"])
    return from_buffer(_checked_base64(envelope["data"], size), shape=envelope["shape"], dtype=envelope["dtype"])


def from_buffer(data: Any, *, shape: Any, dtype: Any) -> np.ndarray:
    """View ``data``, the bytes of ids in the wire's byte and memory order, as an array.

    Args:
        data: A buffer of bytes. The array shares its memory, and is read-only where the buffer is.
        shape: ``[rows, layers, topk]``.
        dtype: Name of the dtype.

    Returns:
        A C-contiguous array ``[rows, layers, topk]`` of uint8, int16 or int32 in native byte order.

    Raises:
        CodecError: No such shape or dtype, another number of bytes, a negative id, or ids that a smaller dtype holds.
    """
    size = _size(shape, dtype)
    view = memoryview(data)
    if not view.c_contiguous:
        raise CodecError("routed_experts", expected="bytes without gaps", got=describe(data))
    if view.nbytes != size:
        raise CodecError("routed_experts", expected=f"{size} bytes", got=f"{view.nbytes} bytes")
    array = np.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)
    array = array.astype(DTYPES[dtype].newbyteorder("="), copy=False)
    smallest = array.dtype if array.dtype == np.uint8 else smallest_dtype(_largest(array))
    if smallest != array.dtype:
        raise CodecError("routed_experts.dtype", expected=f"{smallest.name}, the smallest", got=array.dtype.name)
    return array


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
    if ids.dtype != np.uint8:
        _largest(ids)


def canonical(ids: Any) -> np.ndarray:
    """``ids`` in canonical form, sharing their memory where they are canonical already.

    For what is written out at once. Takes and raises what :func:`compact` does.
    """
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
    """``array`` in the smallest dtype; shares memory where no other size of integer is needed."""
    if array.dtype == np.uint8:
        return array
    dtype = smallest_dtype(_largest(array))
    if array.dtype.isnative and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)  # Another sign alone: vLLM's uint16 and our int16 are the same bits.
    return array.astype(dtype, copy=False)


def _largest(array: np.ndarray) -> int:
    """The largest id, 0 if there are none.

    In one scan: a negative id of a signed dtype is a huge one of the unsigned dtype with the same bits.

    Raises:
        CodecError: An id is negative.
    """
    largest = int(array.view(array.dtype.str.replace("i", "u")).max(initial=0))
    if array.dtype.kind == "i" and largest > np.iinfo(array.dtype).max:
        row, layer, slot = (int(i) for i in np.unravel_index(np.argmax(array < 0), array.shape))
        raise CodecError(
            "routed_experts",
            expected="ids of 0 or more",
            got=str(int(array[row, layer, slot])),
            where=f"row {row}, layer {layer}, slot {slot}",
        )
    return largest


def _base64(array: np.ndarray) -> bytes:
    return pybase64.b64encode(buffer(array))


def buffer(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array in the wire's byte order; a view of its memory where that is the machine's."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return memoryview(little).cast("B") if little.size else memoryview(b"")


def _size(shape: object, dtype: object) -> int:
    """Bytes of an array of this shape and dtype, both from an untrusted source."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CodecError("routed_experts.dtype", expected=f"one of {', '.join(DTYPES)}", got=describe(dtype))
    # `type(...) is int` because bool is a subclass of int, and True is no dimension.
    fits = isinstance(shape, list | tuple) and len(shape) == 3 and all(type(dim) is int and dim >= 0 for dim in shape)
    if not isinstance(shape, list | tuple) or not fits:
        expected = "[rows, layers, topk], integers of 0 or more"
        raise CodecError("routed_experts.shape", expected=expected, got=describe(shape))
    itemsize = DTYPES[dtype].itemsize
    size = math.prod(shape) * itemsize
    # A dimension of 0 must not hide one that no array can have.
    if math.prod(max(dim, 1) for dim in shape) * itemsize > MAX_BYTES:
        got = f"{describe(shape)}, {describe(size)} bytes"
        raise CodecError("routed_experts.shape", expected=f"at most {MAX_BYTES} bytes", got=got)
    return size


def _checked_base64(data: object, size: int) -> bytearray:
    """The ``size`` bytes that ``data`` encodes."""
    plain = not isinstance(data, memoryview) or (data.c_contiguous and data.itemsize == 1)
    if not isinstance(data, str | bytes | bytearray | memoryview) or not plain:
        raise CodecError("routed_experts.data", expected="base64 as text or bytes", got=describe(data))
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
