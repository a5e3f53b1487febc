"""What the property-based tests feed the package: routes in every layout, and replies that are wrong.

Stock hypothesis array strategies give neither strided nor read-only nor big-endian arrays, so the layouts are made
here. Nothing in this module uses the code under test.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from contract_tests import oracle
from contract_tests.adapter import Array, Reply

Shape = tuple[int, int, int]

EDGE_IDS = (0, 1, 7, 127, 128, 254, 255, 256, 257, 383, 511, 32766, 32767, 32768, 65535, 65536, 2**31 - 1)
"""Largest ids at and beside the limits of int8, uint8, int16, uint16 and int32."""

INTEGER_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")

HAVE_TORCH = importlib.util.find_spec("torch") is not None


class Tagged(np.ndarray):
    """A numpy subclass, as xarray-like wrappers and memory maps are."""


@dataclass(eq=False)
class Routes:
    """Ids to be encoded, and what must come back. Made by :func:`lay_out`, as its repr says.

    Attributes:
        given: What the code under test gets, of any layout.
        values: The same ids as int64, C order, in memory of their own.
        buffer: The array that owns the memory of ``given``, for tests that write to it afterwards.
        ids: What they were laid out from.
        layout: Name of the layout.
    """

    given: Any
    values: Array
    buffer: Any
    ids: Array
    layout: str

    def __repr__(self) -> str:
        return f"lay_out({pasteable(self.ids)}, {self.layout!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print the fields of a dataclass.

    def overwrite(self) -> None:
        """Do what an engine does that reuses its buffer: change every id in place."""
        self.buffer[...] = self.buffer == 0


# Layouts: each takes C-ordered ids and gives an array of the same ids, and the array that owns its memory.


def _plain(ids: Array) -> tuple[Any, Any]:
    copy = ids.copy()
    return copy, copy


def _fortran(ids: Array) -> tuple[Any, Any]:
    copy = np.array(ids, order="F")
    return copy, copy


def _sliced(ids: Array) -> tuple[Any, Any]:
    rows, layers, topk = ids.shape
    buffer = np.full((2 * rows + 1, layers + 2, topk + 1), 9, ids.dtype)
    view = buffer[1::2, 1:-1, :topk]
    view[...] = ids
    return view, buffer


def _tail(ids: Array) -> tuple[Any, Any]:
    buffer = np.concatenate([np.full_like(ids[:1], 9), ids])
    return buffer[len(buffer) - len(ids) :], buffer


def _reversed_rows(ids: Array) -> tuple[Any, Any]:
    buffer = ids[::-1].copy()
    return buffer[::-1], buffer


def _reversed_all(ids: Array) -> tuple[Any, Any]:
    buffer = ids[::-1, ::-1, ::-1].copy()
    return buffer[::-1, ::-1, ::-1], buffer


def _reversed_layers(ids: Array) -> tuple[Any, Any]:
    buffer = ids[:, ::-1].copy()
    return buffer[:, ::-1], buffer


def _reversed_topk(ids: Array) -> tuple[Any, Any]:
    buffer = ids[:, :, ::-1].copy()
    return buffer[:, :, ::-1], buffer


def _transposed(ids: Array) -> tuple[Any, Any]:
    buffer = ids.transpose(2, 1, 0).copy()
    return buffer.transpose(2, 1, 0), buffer


def _layers_first(ids: Array) -> tuple[Any, Any]:
    buffer = ids.transpose(1, 0, 2).copy()
    return buffer.transpose(1, 0, 2), buffer


def _broadcast(ids: Array) -> tuple[Any, Any]:
    buffer = ids[:1].copy()
    return (np.broadcast_to(buffer, ids.shape) if len(buffer) else buffer), buffer


def _read_only(ids: Array) -> tuple[Any, Any]:
    buffer = ids.copy()
    view = buffer.view()
    view.flags.writeable = False
    return view, buffer


def _big_endian(ids: Array) -> tuple[Any, Any]:
    copy = ids.astype(ids.dtype.newbyteorder(">"))
    return copy, copy


def _subclass(ids: Array) -> tuple[Any, Any]:
    buffer = ids.copy()
    return buffer.view(Tagged), buffer


def _unaligned(ids: Array) -> tuple[Any, Any]:
    array = np.ndarray(ids.shape, ids.dtype, bytearray(ids.nbytes + 1), offset=1)
    array[...] = ids
    return array, array


def _tensor(ids: Array) -> tuple[Any, Any]:
    import torch

    tensor = torch.from_numpy(ids.copy())
    return tensor, tensor


def _tensor_transposed(ids: Array) -> tuple[Any, Any]:
    import torch

    buffer = torch.from_numpy(ids.transpose(2, 1, 0).copy())
    return buffer.permute(2, 1, 0), buffer


def _tensor_strided(ids: Array) -> tuple[Any, Any]:
    import torch

    buffer = torch.from_numpy(np.repeat(ids, 2, axis=0))
    return buffer[::2], buffer


def _tensor_expanded(ids: Array) -> tuple[Any, Any]:
    import torch

    buffer = torch.from_numpy(ids[:1].copy())
    return (buffer.expand(*ids.shape) if len(buffer) else buffer), buffer


LAYOUTS: dict[str, Callable[[Array], tuple[Any, Any]]] = {
    "c": _plain,
    "fortran": _fortran,
    "sliced": _sliced,
    "tail": _tail,
    "reversed_rows": _reversed_rows,
    "reversed_layers": _reversed_layers,
    "reversed_topk": _reversed_topk,
    "reversed_all": _reversed_all,
    "transposed": _transposed,
    "layers_first": _layers_first,
    "broadcast": _broadcast,
    "read_only": _read_only,
    "big_endian": _big_endian,
    "subclass": _subclass,
    "unaligned": _unaligned,
}
TENSOR_LAYOUTS: dict[str, Callable[[Array], tuple[Any, Any]]] = (
    {
        "tensor": _tensor,
        "tensor_transposed": _tensor_transposed,
        "tensor_strided": _tensor_strided,
        "tensor_expanded": _tensor_expanded,
    }
    if HAVE_TORCH
    else {}
)
ALL_LAYOUTS = {**LAYOUTS, **TENSOR_LAYOUTS}


def lay_out(ids: Array, layout: str) -> Routes:
    """``ids`` in one of :data:`ALL_LAYOUTS`."""
    given, buffer = ALL_LAYOUTS[layout](ids)
    # Broadcast layouts repeat the first row, so what comes back is read from the result.
    values = np.array(given.numpy() if layout in TENSOR_LAYOUTS else given, dtype=np.int64, order="C", subok=False)
    return Routes(given, values, buffer, ids, layout)


def pasteable(array: Array) -> str:
    """``array`` as code. numpy's own repr leaves out the middle of a large one, and the shape of an empty one."""
    return f"np.array({array.tolist()}, {array.dtype.name!r}).reshape({array.shape})"


def more(factor: int) -> settings:
    """``factor`` times the examples of the profile, for what is cheap and where chance finds more than thought.

    Five times as many again at night.
    """
    at_night = 5 if settings.get_current_profile_name() == "nightly" else 1
    return settings(max_examples=factor * at_night * settings().max_examples)


def shapes() -> st.SearchStrategy[Shape]:
    """[rows, layers, topk]: none, one and a few hundred rows, one layer, top-1, odd byte counts."""
    small = st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 9))
    return st.one_of(
        small, st.sampled_from([(0, 48, 8), (1, 1, 1), (1, 48, 8), (300, 3, 2), (257, 1, 1), (400, 1, 8), (5, 0, 8)])
    )


def full_shapes() -> st.SearchStrategy[Shape]:
    """The same without those that hold no id."""
    return shapes().filter(all)


@st.composite
def ids(draw: st.DrawFn, max_ids: tuple[int, ...] = EDGE_IDS, shape: Shape | None = None) -> Array:
    """C-ordered ids of any integer dtype, the largest of which is one of ``max_ids``."""
    size = draw(shapes()) if shape is None else shape
    max_id = draw(st.sampled_from(max_ids))
    dtype = draw(st.sampled_from([name for name in INTEGER_DTYPES if np.iinfo(name).max >= max_id]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    array = random.integers(0, max_id + 1, size, dtype=np.int64).astype(dtype)
    if array.size:
        array.reshape(-1)[draw(st.integers(0, array.size - 1))] = max_id
    return array


@st.composite
def routes(draw: st.DrawFn, layouts: tuple[str, ...] = tuple(ALL_LAYOUTS), *, empty: bool = True) -> Routes:
    """Routes of any shape, dtype, range and layout."""
    shape = None if empty else draw(full_shapes())
    return lay_out(draw(ids(shape=shape)), draw(st.sampled_from(layouts)))


# Wrong envelopes.


@dataclass
class Malformed:
    """An envelope that must be refused, and the field that the error must name."""

    envelope: Any
    field: str
    mutation: str


NOT_OBJECTS: tuple[Any, ...] = (None, True, 0, 1.5, "AAECAw==", b"AAEC", [], ["data", "shape", "dtype"], (), {1, 2})
WRONG_DTYPES: tuple[Any, ...] = (
    "<i2", "=i2", ">i2", "|u1", "u1", "i2", "int8", "uint16", "int64", "uint32", "float32", "float16", "bool",
    "object", "O", "INT16", " int16", "int16 ", "int16\n", "", "int", None, True, 0, 2, 1.5, [], ["int16"], {},
    {"name": "int16"}, b"int16", np.dtype("int16"), np.int16,
)  # fmt: skip
WRONG_SHAPES: tuple[Any, ...] = (
    None, True, 12, 12.0, "232", "[2,3,2]", b"\x02\x03\x02", {}, {2: 0, 3: 0, 1: 0}, {2, 3, 4}, range(2, 5), [],
    [12], [6, 2], [2, 3, 2, 1], [True, 3, 2], [2, True, 6], [2, 3, False], [2.0, 3, 2], [2, 3, 2.0],
    ["2", "3", "2"], [2, 3, None], [[2], [3], [2]], [-2, 3, -2], [2, -3, 2], [-1, 3, 2], [np.int64(2), 3, 2],
    [2, 3, float("nan")], [2, 3, float("inf")], [2.0, 3.0, 2.0],
    [1, 2, 3, 2], "2,3,2", [True, 3, 4], [2**40, 1, 1], [1, 2**31 + 1, 1], [2**20, 2**10, 8],
    [2**32, 2**32, 1],    [2**63, 2**63, 2**63], [2**64 - 1, 1, 1],
)  # fmt: skip
WRONG_DATA: tuple[Any, ...] = (None, True, 0, 1.5, [], ["AAAA"], {}, {"data": "AAAA"}, [65, 65, 65, 65])
FOREIGN = "\n\r\t \x00!-_.,=%\"'\\é€"
"""Characters outside the standard alphabet: white space, the URL-safe pair, padding, and non-ASCII ones."""


def _ending(remainder: int) -> st.SearchStrategy[Shape]:
    """Shapes whose uint8 bytes leave ``remainder`` over a multiple of three, so that the base64 is padded."""
    return st.integers(0, 20).map(lambda n: (3 * n + remainder, 1, 1))


@st.composite
def _set_pad_bits(draw: st.DrawFn) -> Malformed:
    remainder = draw(st.sampled_from([1, 2]))
    array = draw(ids(max_ids=(200,), shape=draw(_ending(remainder)))).astype(np.uint8)
    wrong = oracle.envelope(array)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    pad = 3 - remainder
    body, last = wrong["data"][: -pad - 1], wrong["data"][-pad - 1]
    bits = draw(st.integers(1, (1 << 2 * pad) - 1))
    wrong["data"] = body + alphabet[alphabet.index(last) | bits] + "=" * pad
    return Malformed(wrong, "routed_experts.data", "pad bits")


@st.composite
def _wrong_data(draw: st.DrawFn) -> Malformed:
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
    max_id = draw(st.sampled_from([255, 256, 32768]))
    right = oracle.envelope(draw(ids(max_ids=(max_id,), shape=shape)).astype(oracle.smallest(max_id)))
    data = right["data"]
    raw = base64.b64decode(data)
    item = np.dtype(right["dtype"]).itemsize
    at = draw(st.integers(0, len(data.rstrip("=")) - 1))
    foreign = draw(st.sampled_from(FOREIGN))
    mutation, changed = draw(
        st.sampled_from(
            [
                ("type", draw(st.sampled_from(WRONG_DATA))),
                ("empty", ""),
                ("inserted", data[:at] + foreign + data[at:]),
                ("replaced", data[:at] + foreign + data[at + 1 :]),
                ("appended", data + foreign),
                ("led", foreign + data),
                ("no pad", data.rstrip("=") if data.endswith("=") else data[:-1]),
                ("more pad", data + "="),
                ("all pad", "=" * len(data)),
                ("after pad", data[:-4] + data[:2] + "==" + data[-4:]),
                ("pad inside", "AA==" + data[4:] if len(data) > 4 else "A=A="),
                ("twice", data + data),
                ("item short", base64.b64encode(raw[:-item]).decode()),
                ("item long", base64.b64encode(raw + raw[:item]).decode()),
                ("byte short", base64.b64encode(raw[:-1]).decode()),
                ("byte long", base64.b64encode(raw + b"\0").decode()),
                ("base85", base64.b85encode(raw).decode() + "~"),
                ("hex", raw.hex() + "0"),
            ]
        )
    )
    if isinstance(changed, str) and changed.isascii() and draw(st.booleans()):
        changed = changed.encode("ascii")
    return Malformed({**right, "data": changed}, "routed_experts.data", mutation)


@st.composite
def _wrong_ids(draw: st.DrawFn) -> Malformed:
    """Well-formed envelopes of arrays that the encoder never makes."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)))
    small = draw(ids(max_ids=(255,), shape=shape))
    if draw(st.booleans()):
        array = small.astype(draw(st.sampled_from(["int16", "int32"])))
        array.reshape(-1)[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from([-1, -2, -128, -32768]))
        return Malformed(oracle.envelope(array), "routed_experts", "negative id")
    wide = draw(
        st.sampled_from(
            [
                small.astype("int16"),
                small.astype("int32"),
                draw(ids(max_ids=(256, 32767), shape=shape)).astype("int32"),
                np.empty((0, *shape[1:]), draw(st.sampled_from(["int16", "int32"]))),
            ]
        )
    )
    return Malformed(oracle.envelope(wide), "routed_experts.dtype", "wider than needed")


@st.composite
def _wrong_structure(draw: st.DrawFn) -> Malformed:
    right = oracle.envelope(np.arange(256, 268, dtype=np.int16).reshape(2, 3, 2))
    kind = draw(st.sampled_from(["not an object", "keys", "dtype", "shape"]))
    if kind == "not an object":
        return Malformed(draw(st.sampled_from(NOT_OBJECTS)), "routed_experts", kind)
    if kind == "keys":
        wrong: dict[Any, Any] = dict(right)
        for key in draw(st.sets(st.sampled_from(["data", "shape", "dtype"]))):
            del wrong[key]
        extra = draw(st.dictionaries(st.sampled_from(["start", "", "Data", "encoding", 0, None, True]), st.none()))
        wrong.update(extra if extra or len(wrong) < 3 else {"start": 0})
        return Malformed(wrong, "routed_experts", kind)
    wrongs = WRONG_DTYPES if kind == "dtype" else WRONG_SHAPES
    return Malformed({**right, kind: draw(st.sampled_from(wrongs))}, f"routed_experts.{kind}", kind)


def malformed_envelopes() -> st.SearchStrategy[Malformed]:
    """Envelopes each of which is wrong in one way, with the field that is wrong."""
    return st.one_of(_wrong_structure(), _wrong_data(), _set_pad_bits(), _wrong_ids())


def json_values(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Anything that JSON can say."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["", "AA==", "AAAA", "uint8", "int16", "int32", "é", "\x93NUMPY"]),
    )
    return st.recursive(
        scalars if leaves is None else leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["data", "shape", "dtype", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )


# Replies.

VECTOR_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "c": lambda values: values.copy(),
    "reversed": lambda values: values[::-1].copy()[::-1],
    "strided": lambda values: np.repeat(values, 2)[::2],
    "read_only": lambda values: np.frombuffer(values.tobytes(), values.dtype),
    "big_endian": lambda values: values.astype(values.dtype.newbyteorder(">")),
    "unaligned": lambda values: np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1),
}
NATIVE_LAYOUTS = tuple(name for name in VECTOR_LAYOUTS if name != "big_endian")

LOGPROBS = st.floats(-9999, 0, width=32) | st.sampled_from(
    [-9999.0, -0.0, 0.0, -1.401298464324817e-45, -1.1754943508222875e-38]
)
"""What float32 holds exactly."""


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def reply_fields(
    draw: st.DrawFn,
    *,
    layouts: tuple[str, ...] = tuple(VECTOR_LAYOUTS),
    logprobs: st.SearchStrategy[float] = LOGPROBS,
    dtypes: tuple[str, ...] = ("float32", "float64"),
) -> tuple[dict[str, Any], Routes | None]:
    """What a reply is made of, arrays in any layout, and the routes among it with what must come back.

    The number of rows is anybody's: which it should be is known to who asked.
    """
    from skyrl_r3.spec import RouteSpec

    tokens = draw(st.lists(st.integers(0, 2**31 - 1) | st.just(2**31 - 1), max_size=5))
    values = draw(st.none() | st.lists(logprobs, min_size=len(tokens), max_size=len(tokens)))
    captured = draw(st.none() | routes())
    numbers = st.none() | st.integers(0, 2**31)
    layers = draw(st.none() | st.integers(1, 100))
    fields = {
        "token_ids": VECTOR_LAYOUTS[draw(st.sampled_from(NATIVE_LAYOUTS))](np.array(tokens, np.int32)),
        "finish_reason": draw(st.none() | st.sampled_from(["stop", "length", "abort", ""]) | st.text(max_size=8)),
        "logprobs": None,
        "routed_experts": None if captured is None else captured.given,
        "prompt_tokens": draw(numbers),
        "start": draw(numbers),
        "spec": RouteSpec(
            layers=layers,
            topk=draw(st.sampled_from([None, captured.values.shape[2]]) if captured is not None else numbers),
            num_experts=draw(numbers),
            moe_layers=draw(st.none() | moe_layers(layers)),
        ),
        "model": draw(st.text(max_size=8)),
    }
    if values is not None:
        dtype = draw(st.sampled_from(dtypes))
        fields["logprobs"] = VECTOR_LAYOUTS[draw(st.sampled_from(layouts))](np.array(values, dtype))
    return fields, captured


def moe_layers(layers: int | None) -> st.SearchStrategy[tuple[int, ...]]:
    """Which of ``layers`` route, of at most 4,096 where that is unknown: some of them, or all but the first few."""
    count = 4096 if layers is None else layers
    some = st.sets(st.integers(0, count - 1), min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))
    return some | st.integers(0, count - 1).map(lambda first: tuple(range(first, count)))


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """Whole replies, with logprobs that a float32 holds. The number of rows is anybody's."""
    tokens = draw(st.lists(st.integers(0, 2**31 - 1) | st.just(2**31 - 1), max_size=12))
    logprobs = draw(st.none() | st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens)))
    captured = draw(st.none() | ids(shape=draw(full_shapes())))
    numbers = st.none() | st.integers(0, 2**31)
    layers = draw(st.none() | st.integers(1, 100))
    told = {name: draw(numbers) for name in ("prompt_tokens", "start", "num_experts")} | {"model": draw(TEXT)}
    told |= {"layers": layers, "moe_layers": draw(st.none() | moe_layers(layers))}
    return Reply(
        token_ids=tokens,
        finish_reason=draw(st.none() | st.sampled_from(["stop", "length", "abort", ""]) | TEXT),
        logprobs=logprobs,
        routes=None if captured is None else oracle.canonical(captured),
        metadata={name: value for name, value in told.items() if value not in (None, "")},
    )
