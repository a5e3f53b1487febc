"""A file that somebody saved -> the reply or the routes in it.

What a file is, its content says: its name is the user's. It is mapped and not read, so that its routes are views of it
and what it claims to hold is compared with its length before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_r3 import codec, frame, packed
from skyrl_r3.errors import BrokenRoutesError, CodecError, ReplyError, describe
from skyrl_r3.reply import Reply

_NPY = np.lib.format.MAGIC_PREFIX
_HEADER_BYTES = 2**16
"""Of .npy and of frames. numpy refuses longer ones too, but asks for their memory first."""
_JSON_BYTES = 2 * codec.MAX_BYTES
_ROUTES = "routed_experts"
_HINTS = {
    b"PK": "An archive (.npz, .pt) holds several: save one array with numpy.save.",
    b"\x80": "A pickle is not opened, as that could run code: save the array with numpy.save.",
    b"HTTP/": "These are the headers of a response: save the body alone, with curl -o and without -i.",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """What a file holds.

    Attributes:
        what: In words.
        file_bytes: Its length.
        reply: None where it holds routes alone.
        ids: ``[rows, layers, topk]``, as the codec has them; None where there are none, or none that can be decoded.
        stored: Name of their dtype in the file; empty for text.
        broken: Why the routes of the reply cannot be decoded.
    """

    what: str
    file_bytes: int = 0
    reply: Reply | None = None
    ids: np.ndarray | None = None
    stored: str = ""
    broken: BrokenRoutesError | None = None


def read(path: Path) -> Saved:
    """Read a file from an untrusted source.

    Raises:
        R3Error: It is none of those that are known, or broken.
        OSError: It cannot be read.
        ModuleNotFoundError: It takes the package safetensors, which is not installed.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # An empty file cannot be mapped.
        data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")
    start = bytes(data[:64])
    if start.startswith(_NPY):
        saved = _npy(data)
    elif frame.is_frame(start) and start[8:9] == b"{":
        saved = _frame(data) if _is_ours(data) else _safetensors(path)
    elif start.lstrip()[:1] in (b"{", b"[", b"n"):
        saved = _json(data)
    else:
        hint = next((hint for prefix, hint in _HINTS.items() if start.startswith(prefix)), "")
        got = f"{start[:24]!r}{'…' if size > 24 else ''} ({size} bytes)" if size else "an empty file"
        raise ReplyError("file", expected="a reply (frame or JSON), .npy or .safetensors", got=got, hint=hint)
    return replace(saved, file_bytes=size)


def _npy(data: memoryview) -> Saved:
    file = BytesIO(data[:_HEADER_BYTES])
    formats = np.lib.format
    try:
        with warnings.catch_warnings(action="ignore"):  # Of what the header's text looks like.
            version = formats.read_magic(file)
            read_header = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
            shape, by_column, dtype = read_header(file)
    except Exception as error:  # It is read as Python source, which can fail in many ways.
        raise ReplyError("npy", expected="a header", got=f"{type(error).__name__}: {error}") from error
    field = f"npy.{_ROUTES}"
    # numpy takes True for a size.
    if dtype.kind not in "iu" or len(shape) != 3 or not all(type(size) is int and size >= 0 for size in shape):
        got = f"{dtype} array {describe(list(shape))}"
        hint = "Save one sample of a batch." if len(shape) == 4 else ""
        raise CodecError(field, expected="an integer array [rows, layers, topk]", got=got, hint=hint)
    # A dimension of 0 must not hide one that no array can have.
    if math.prod(max(size, 1) for size in shape) > codec.MAX_BYTES:
        raise CodecError(f"{field}.shape", expected=f"at most {codec.MAX_BYTES} ids", got=describe(list(shape)))
    rest = data[file.tell() :]
    if (size := math.prod(shape) * dtype.itemsize) != len(rest):
        raise CodecError(field, expected=f"{size} bytes for {describe(list(shape))}", got=f"{len(rest)} bytes")
    array = np.frombuffer(rest, dtype=dtype).reshape(shape, order="F" if by_column else "C")
    return Saved(what="routes, .npy", ids=codec.canonical(array), stored=dtype.name)


def _is_ours(data: memoryview) -> bool:
    """Whether a safetensors document is a frame, of any version. One that is cut off is taken for one."""
    header = int.from_bytes(data[:8], "little")
    return header > len(data) - 8 or b'"skyrl-r3/' in bytes(data[8 : 8 + min(header, _HEADER_BYTES)])


def _frame(data: memoryview) -> Saved:
    what = f"a reply, {frame.FRAME}"
    try:
        reply = frame.load(data)
    except BrokenRoutesError as error:
        return Saved(what=what, reply=error.reply, broken=error)
    stored = "" if reply.routed_experts is None else reply.routed_experts.dtype.name
    return Saved(what=what, reply=reply, ids=reply.routed_experts, stored=stored)


def _safetensors(path: Path) -> Saved:
    """A document that is no frame: its tensor ``routed_experts``, or the only one that can be routes."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            all_names = file.keys()
            fitting = [name for name in all_names if _may_be_routes(file.get_slice(name))]
            names = [_ROUTES] if _ROUTES in all_names else fitting
            array = file.get_tensor(names[0]) if len(names) == 1 else None
    except OSError:
        raise
    except Exception as error:  # SafetensorError, and what Rust makes of a dtype that numpy has not.
        raise ReplyError("safetensors", expected="a document", got=f"{type(error).__name__}: {error}") from error
    if array is None:
        expected = f"a tensor {_ROUTES}, or one alone that is an integer [rows, layers, topk]"
        raise ReplyError("safetensors", expected=expected, got=f"{len(names)} such of {len(all_names)} tensors")
    what = f"routes, tensor {names[0]} of a .safetensors"
    return Saved(what=what, ids=codec.canonical(array), stored=array.dtype.name)


def _may_be_routes(tensor: Any) -> bool:
    return tensor.get_dtype()[0] in "UI" and len(tensor.get_shape()) == 3


def _json(data: memoryview) -> Saved:
    if len(data) > _JSON_BYTES:
        raise ReplyError("file", expected=f"at most {_JSON_BYTES} bytes of JSON", got=f"{len(data)} bytes")
    parsed = packed.parse(bytes(data))
    if parsed is None:
        return Saved(what="null, which stands for routes that were not captured")
    if isinstance(parsed, list):
        return Saved(what="routes, nested lists of JSON", ids=packed.from_nested(parsed))
    if isinstance(parsed, dict) and {"data", "shape", "dtype"} <= set(parsed):
        ids = codec.unpack(parsed)
        return Saved(what="routes, packed JSON", ids=ids, stored=ids.dtype.name)
    try:
        reply, encoding = packed.read(parsed)
    except BrokenRoutesError as error:
        return Saved(what="a reply, JSON", reply=error.reply, broken=error)
    ids = reply.routed_experts
    if ids is None:
        return Saved(what="a reply, JSON", reply=reply)
    stored = ids.dtype.name if encoding == packed.PACKED else ""
    return Saved(what=f"a reply, {encoding} JSON", reply=reply, ids=ids, stored=stored)
