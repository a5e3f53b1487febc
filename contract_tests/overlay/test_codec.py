"""``skyrl_r3.codec``: ids to their canonical form and the packed envelope, and back."""

from __future__ import annotations

import array as stdlib_array
import base64
import copy
import math
import pickle
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract_tests import oracle
from contract_tests import strategies as r3st
from skyrl_r3 import codec, errors, packed
from skyrl_r3.errors import CodecError


def _refused(call: Any, *args: Any) -> CodecError:
    with pytest.raises(CodecError) as caught:
        call(*args)
    assert type(caught.value) is CodecError
    return caught.value


def _attempt(call: Any, value: Any) -> Any:
    """The array that ``call`` makes of ``value``, or the error. Every other exception goes through."""
    try:
        return call(value)
    except CodecError as error:
        return error


def _fields(error: errors.R3Error) -> tuple[str, str, str, str, str]:
    return error.field, error.expected, error.got, error.where, error.hint


# Round trips, of every layout and dtype.


@pytest.mark.case("R26", "R27", "R34", "R89")
@given(r3st.routes())
def test_compact_gives_the_canonical_array(routes: r3st.Routes) -> None:
    oracle.assert_canonical(codec.compact(routes.given), routes.values)


@given(r3st.routes())
def test_the_pieces_are_what_orjson_writes(routes: r3st.Routes) -> None:
    assert b"".join(codec.packed_pieces(routes.given)) == orjson.dumps(codec.pack(routes.given))


@pytest.mark.case("R26", "R27", "R34", "R37")
@pytest.mark.parametrize("layout", list(r3st.ALL_LAYOUTS))
@pytest.mark.parametrize("max_id", [255, 256, 383, 32767, 32768, 2**31 - 1])
def test_every_layout_at_every_dtype_edge(layout: str, max_id: int) -> None:
    """Without chance: no layout depends on what hypothesis happens to draw."""
    dtype = "int64" if max_id > 2**15 else "uint16" if max_id > 255 else "uint8"
    ids = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    ids[0, 1, 2] = max_id  # in the first row, which is all that the broadcast layouts keep
    routes = r3st.lay_out(ids, layout)
    assert routes.values.max() == max_id
    oracle.assert_canonical(codec.compact(routes.given), routes.values)
    oracle.assert_canonical(codec.unpack(codec.pack(routes.given)), routes.values)
    assert codec.pack(routes.given) == codec.pack(np.ascontiguousarray(routes.values))
    assert b"".join(codec.packed_pieces(routes.given)) == orjson.dumps(codec.pack(routes.values))


def test_the_layouts_are_what_they_are_called() -> None:
    """The strategy would prove nothing if it gave contiguous arrays all the time."""
    ids = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    made = {name: r3st.lay_out(ids, name).given for name in r3st.LAYOUTS}
    contiguous = {name for name, given in made.items() if given.flags.c_contiguous}
    assert contiguous == {"c", "tail", "read_only", "big_endian", "subclass", "unaligned"}
    assert [name for name, given in made.items() if not given.flags.writeable] == ["broadcast", "read_only"]
    assert made["big_endian"].dtype.str == ">i4"
    assert not made["unaligned"].flags.aligned
    assert type(made["subclass"]) is r3st.Tagged
    tensors = {name: r3st.lay_out(ids, name).given for name in r3st.TENSOR_LAYOUTS}
    assert [name for name, tensor in tensors.items() if tensor.is_contiguous()] == (["tensor"] if tensors else [])


# Golden bytes.


def test_golden_json() -> None:
    assert (
        b"".join(codec.packed_pieces(np.array([[[256, 32767]]])))
        == b'{"data":"AAH/fw==","shape":[1,1,2],"dtype":"int16"}'
    )
    assert (
        b"".join(codec.packed_pieces(np.zeros((0, 48, 8), np.uint16)))
        == b'{"data":"","shape":[0,48,8],"dtype":"uint8"}'
    )


def test_empty_routes() -> None:
    empty = np.zeros((0, 48, 8), np.uint16)
    assert codec.pack(empty) == {"data": "", "shape": [0, 48, 8], "dtype": "uint8"}
    oracle.assert_canonical(codec.unpack(codec.pack(empty)), empty.astype(np.int64))
    oracle.assert_canonical(packed.from_nested([]), np.empty((0, 0, 0), np.int64))


@pytest.mark.case("R19")
def test_the_envelope_is_a_third_larger_than_the_ids() -> None:
    """No nested list; at most 1.34 times the raw bytes and 1 KB."""
    ids = np.random.default_rng(0).integers(0, 128, (3000, 48, 8))
    assert len(codec.packed_pieces(ids)) <= 1.34 * ids.size + 1024


# Aliasing: the engine may write its buffer again.


@pytest.mark.case("R14")
@given(r3st.routes())
def test_compact_does_not_alias(routes: r3st.Routes) -> None:
    result = codec.compact(routes.given)
    if isinstance(routes.buffer, np.ndarray):
        assert not np.shares_memory(result, routes.buffer)
    routes.overwrite()
    assert result.tolist() == routes.values.tolist()


@given(r3st.routes())
def test_writing_to_the_result_leaves_the_engine_alone(routes: r3st.Routes) -> None:
    result = codec.compact(routes.given)
    result += 1
    given_now = np.asarray(routes.given).astype(np.int64)
    assert given_now.tolist() == routes.values.tolist()


def test_unpack_gives_new_memory_each_time() -> None:
    envelope = codec.pack(np.full((2, 2, 2), 300))
    source = bytearray(envelope["data"].encode())
    first, second = codec.unpack(envelope), codec.unpack({**envelope, "data": source})
    first[...] = 1
    source[:] = b"A" * len(source)
    assert second.tolist() == np.full((2, 2, 2), 300).tolist()
    assert codec.unpack(envelope).tolist() == second.tolist()


def test_compact_does_not_keep_a_larger_buffer_alive() -> None:
    whole = np.zeros((1000, 4, 8), np.uint8)
    result = codec.compact(whole[:1])
    root = result
    while isinstance(root.base, np.ndarray):
        root = root.base
    assert root.nbytes == 32


# Canonical without a copy, for what is written out at once.


@given(r3st.routes())
def test_canonical_has_the_ids_of_compact(routes: r3st.Routes) -> None:
    result = codec.canonical(routes.given)
    want = codec.compact(routes.given)
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape, result.tolist()) == (want.dtype, want.shape, want.tolist())
    assert result.flags.c_contiguous
    assert result.dtype.isnative


@pytest.mark.case("R39")
@pytest.mark.parametrize(
    ("dtype", "largest", "shares"),
    [
        ("uint8", 255, True),
        ("int8", 127, True),
        ("int16", 32767, True),
        ("uint16", 32767, True),
        ("int32", 32768, True),
        ("uint32", 2**31 - 1, True),
        ("uint16", 255, False),
        ("uint16", 32768, False),
        ("int16", 255, False),
        ("int32", 32767, False),
        ("int64", 2**31 - 1, False),
        (">u2", 300, False),
        (">i4", 40_000, False),
        (">u1", 255, True),
    ],
)
def test_canonical_copies_only_to_another_size(dtype: str, largest: int, shares: bool) -> None:
    """vLLM's uint16 becomes int16 for nothing, and it is not uint16 any more."""
    ids = np.full((2, 3, 4), largest, dtype)
    result = codec.canonical(ids)
    assert np.shares_memory(result, ids) is shares
    assert result.dtype.name == oracle.smallest(largest)
    assert result.tolist() == ids.tolist()
    assert not np.shares_memory(codec.compact(ids), ids)


@pytest.mark.case("R26")
@pytest.mark.parametrize("layout", ["fortran", "sliced", "reversed_all", "transposed", "broadcast"])
def test_canonical_is_contiguous_whatever_it_is_given(layout: str) -> None:
    for dtype, largest in (("uint8", 255), ("uint16", 300), ("int32", 40_000)):
        routes = r3st.lay_out(np.full((2, 3, 4), largest, dtype), layout)
        result = codec.canonical(routes.given)
        assert result.flags.c_contiguous
        assert result.tolist() == routes.values.tolist()


@pytest.mark.skipif(not r3st.HAVE_TORCH, reason="torch is not installed")
def test_canonical_shares_the_memory_of_a_tensor() -> None:
    import torch

    tensor = torch.full((2, 3, 4), 300, dtype=torch.int16)
    assert np.shares_memory(codec.canonical(tensor), tensor.numpy())
    assert not np.shares_memory(codec.compact(tensor), tensor.numpy())


class Counted(np.ndarray):
    """Takes note of every calculation over an array."""

    calculations: list[str]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        Counted.calculations.append(f"{ufunc.__name__}.{method}")
        plain = (np.asarray(item) if isinstance(item, Counted) else item for item in inputs)
        return getattr(ufunc, method)(*plain, **kwargs)


@pytest.mark.case("R23")
@pytest.mark.parametrize(
    ("dtype", "largest", "scans"),
    [("uint8", 255, 0), ("uint16", 300, 1), ("int16", 300, 1), ("int32", 300, 1), ("int64", 2**31 - 1, 1)],
)
def test_ids_are_scanned_once(dtype: str, largest: int, scans: int) -> None:
    """For negative ids and for the largest one; uint8 has none to find."""
    ids = np.full((2, 3, 4), largest, dtype)
    for call in (codec.canonical, codec.compact, codec.packed_pieces):
        Counted.calculations = []
        call(ids.view(Counted))
        assert Counted.calculations == ["maximum.reduce"] * scans


def test_checking_makes_no_array_of_the_size_of_the_ids() -> None:
    ids = np.full((4000, 48, 8), 300, np.uint16)
    codec.canonical(ids)
    tracemalloc.start()
    try:
        codec.canonical(ids)
        codec.check(ids.view(np.int16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


# Buffers: the ids as they are on the wire, without base64.


@given(r3st.routes())
def test_a_buffer_holds_the_ids_in_little_endian(routes: r3st.Routes) -> None:
    array = codec.canonical(routes.given)
    data = codec.buffer(array)
    size = array.dtype.itemsize
    assert type(data) is memoryview
    assert (data.format, data.ndim) == ("B", 1)
    assert data == b"".join(int(value).to_bytes(size, "little") for value in routes.values.reshape(-1))
    assert not array.size or np.shares_memory(np.frombuffer(data, np.uint8), array)


def test_a_buffer_of_a_big_endian_array() -> None:
    assert codec.buffer(np.array([[[1, 256]]], ">i2")) == b"\x01\x00\x00\x01"


@given(r3st.routes())
def test_buffers_are_read(routes: r3st.Routes) -> None:
    array = codec.canonical(routes.given)
    data = bytes(codec.buffer(array))
    result = codec.from_buffer(data, shape=list(array.shape), dtype=array.dtype.name)
    assert type(result) is np.ndarray
    assert result.dtype.str == array.dtype.str
    assert (result.shape, result.tolist()) == (array.shape, array.tolist())
    assert result.flags.c_contiguous


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(("dtype", "data"), [("uint8", b"\1\2\3\4"), ("int16", b"\0\1\1\1"), ("int32", b"\0\0\1\0")])
def test_an_array_of_a_buffer_is_a_view(kind: Any, dtype: str, data: bytes) -> None:
    buffer = kind(data)
    result = codec.from_buffer(buffer, shape=[1, len(data) // np.dtype(dtype).itemsize, 1], dtype=dtype)
    assert np.shares_memory(result, np.frombuffer(buffer, np.uint8))
    assert result.flags.writeable is (kind is bytearray)


def _from_buffer(data: Any, shape: Any, dtype: Any) -> r3st.Array:
    return codec.from_buffer(data, shape=shape, dtype=dtype)


@pytest.mark.parametrize("dtype", r3st.WRONG_DTYPES, ids=repr)
def test_a_buffer_of_a_wrong_dtype(dtype: Any) -> None:
    assert _refused(_from_buffer, b"\0\1", [1, 1, 1], dtype).field == "routed_experts.dtype"


@pytest.mark.parametrize("shape", r3st.WRONG_SHAPES, ids=repr)
def test_a_buffer_of_a_wrong_shape(shape: Any) -> None:
    assert _refused(_from_buffer, bytes(range(12)), shape, "uint8").field == "routed_experts.shape"


@pytest.mark.parametrize("size", [0, 1, 11, 13, 24])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_a_buffer_of_another_size(size: int, dtype: str) -> None:
    error = _refused(_from_buffer, b"\x7f" * size, [1, 3, 4 if dtype == "uint8" else 5], dtype)
    assert (error.field, error.got) == ("routed_experts", f"{size} bytes")


@pytest.mark.parametrize(
    ("data", "dtype"),
    [(b"\1\0", "int16"), (b"\xff\0", "int16"), (b"\xff\x7f\0\0", "int32"), (b"", "int16"), (b"", "int32")],
)
def test_a_buffer_of_ids_that_a_smaller_dtype_holds(data: bytes, dtype: str) -> None:
    error = _refused(_from_buffer, data, [1 if data else 0, 1, 1], dtype)
    assert (error.field, error.got) == ("routed_experts.dtype", dtype)


@pytest.mark.case("R10", "R46")
@pytest.mark.parametrize(("data", "dtype"), [(b"\0\1\xff\xff", "int16"), (b"\0\0\1\0\xff\xff\xff\xff", "int32")])
def test_a_buffer_of_negative_ids(data: bytes, dtype: str) -> None:
    error = _refused(_from_buffer, data, [2, 1, 1], dtype)
    assert (error.field, error.got, error.where) == ("routed_experts", "-1", "row 1, layer 0, slot 0")


def test_an_envelope_may_be_a_view_of_its_body() -> None:
    """What the parser of replies makes of it."""
    envelope = codec.pack(np.array([[[256, 32767]]]))
    body = f"x{envelope['data']}x".encode()
    result = codec.unpack({**envelope, "data": memoryview(body)[1:-1]})
    oracle.assert_canonical(result, np.array([[[256, 32767]]]))
    assert _refused(codec.unpack, {**envelope, "data": memoryview(body)[1:]}).field == "routed_experts.data"
    assert _refused(codec.unpack, {**envelope, "data": memoryview(body)[:-2]}).field == "routed_experts.data"


# Dtypes.


@pytest.mark.case("R34")
@pytest.mark.parametrize(
    ("max_id", "name"),
    [(0, "u1"), (255, "u1"), (256, "i2"), (383, "i2"), (511, "i2"), (32767, "i2"), (32768, "i4"), (2**31 - 1, "i4")],
)
def test_smallest_dtype(max_id: int, name: str) -> None:
    assert codec.smallest_dtype(max_id) == np.dtype(name)
    assert codec.smallest_dtype(max_id).isnative


@pytest.mark.case("R37")
@given(st.integers(0, 2**31 - 1))
def test_smallest_dtype_holds_and_is_smallest(max_id: int) -> None:
    dtype = codec.smallest_dtype(max_id)
    assert dtype.name == oracle.smallest(max_id)
    assert int(np.array(max_id).astype(dtype)) == max_id


@pytest.mark.case("R34")
@pytest.mark.parametrize("max_id", [2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_ids_above_int32(max_id: int) -> None:
    """2**31 is an error and does not wrap."""
    error = _refused(codec.smallest_dtype, max_id)
    assert (error.field, error.got) == ("routed_experts", str(max_id))
    for call in (codec.compact, codec.canonical, codec.pack, codec.packed_pieces):
        error = _refused(call, np.array([[[0, max_id]]], dtype=np.uint64))
        assert (error.field, error.got) == ("routed_experts", str(max_id))
    assert _refused(packed.from_nested, [[[0, max_id]]]).field == "routed_experts"


@pytest.mark.case("R10")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", ">i2", ">i8"])
@pytest.mark.parametrize("call", [codec.compact, codec.canonical, codec.pack, codec.packed_pieces])
def test_negative_ids(call: Any, dtype: str) -> None:
    """A -1 row is refused, never 255 or 65535. The error says where it is."""
    ids = np.ones((3, 2, 4), dtype)
    ids[2, 1, 3] = -1
    error = _refused(call, ids)
    assert (error.field, error.got, error.where) == ("routed_experts", "-1", "row 2, layer 1, slot 3")


def test_naming_a_negative_id_takes_no_more_memory_than_the_ids() -> None:
    body = np.full((20_000, 8, 8), -1, np.int16).tobytes()
    tracemalloc.start()
    try:
        error = _refused(_from_buffer, body, [20_000, 8, 8], "int16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.where == "row 0, layer 0, slot 0"
    assert peak < len(body)


def test_the_first_negative_id_is_named() -> None:
    ids = np.zeros((3, 2, 2), np.int64)
    ids[1, 0, 1], ids[2, 1, 1] = -7, -9
    error = _refused(codec.compact, ids[:, ::-1])
    assert (error.got, error.where) == ("-7", "row 1, layer 1, slot 1")


# What is no array of ids.

NOT_ROUTES: list[Any] = [
    None,
    True,
    5,
    "AAEC",
    b"AAEC",
    bytearray(8),
    memoryview(bytes(8)).cast("B", (2, 2, 2)),
    stdlib_array.array("i", [1]),
    [],
    [[[1]]],
    ([[1]],),
    {},
    {"data": "AA==", "shape": [1, 1, 1], "dtype": "uint8"},
    object(),
    np.ndarray,
    np.int64(3),
    np.array(3),
    np.zeros(4, np.uint8),
    np.zeros((2, 2), np.uint8),
    np.zeros((2, 2, 2, 1), np.uint8),
    np.zeros((2, 2, 2)),
    np.zeros((2, 2, 2), np.float16),
    np.zeros((2, 2, 2), bool),
    np.zeros((2, 2, 2), complex),
    np.zeros((2, 2, 2), object),
    np.zeros((2, 2, 2), "m8[s]"),
    np.zeros((2, 2, 2), "M8[s]"),
    np.zeros((2, 2, 2), "S1"),
    np.zeros((2, 2, 2), "U1"),
    np.zeros((2, 2, 2), [("a", "u1")]),
    np.ma.array(np.zeros((2, 2, 2), np.uint8), mask=True),
]


@pytest.mark.case("R25")
@pytest.mark.parametrize("wrong", NOT_ROUTES, ids=lambda value: errors.describe(value)[:40])
@pytest.mark.parametrize("call", [codec.compact, codec.canonical, codec.pack, codec.packed_pieces])
def test_what_is_no_array_of_ids_is_refused(call: Any, wrong: Any) -> None:
    """A str that was encoded already is named, and is not encoded twice."""
    error = _refused(call, wrong)
    assert error.field == "routed_experts"
    assert error.got == errors.describe(wrong)


@pytest.mark.skipif(not r3st.HAVE_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_tensors_of_other_dtypes_are_refused(dtype: str) -> None:
    import torch

    assert _refused(codec.compact, torch.zeros((2, 2, 2)).to(getattr(torch, dtype))).field == "routed_experts"


@pytest.mark.skipif(not r3st.HAVE_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_tensors_of_every_integer_dtype(dtype: str) -> None:
    import torch

    tensor = torch.tensor([[[0, 1, 127]]]).to(getattr(torch, dtype))
    oracle.assert_canonical(codec.compact(tensor), np.array([[[0, 1, 127]]]))
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    oracle.assert_canonical(codec.compact(parameter), np.array([[[0, 1, 127]]]))


# Wrong envelopes.


@pytest.mark.case("R35", "R46", "R47")
@given(r3st.malformed_envelopes())
def test_malformed_envelopes_are_refused_by_field(malformed: r3st.Malformed) -> None:
    error = _refused(codec.unpack, malformed.envelope)
    assert error.field == malformed.field
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), *_fields(again), str(again)) == (CodecError, *_fields(error), str(error))


@pytest.mark.parametrize("dtype", r3st.WRONG_DTYPES, ids=repr)
def test_wrong_dtypes(dtype: Any) -> None:
    assert _refused(codec.unpack, {"data": "AAE=", "shape": [1, 1, 1], "dtype": dtype}).field == "routed_experts.dtype"


@pytest.mark.case("R46")
@pytest.mark.parametrize("shape", r3st.WRONG_SHAPES, ids=repr)
def test_wrong_shapes(shape: Any) -> None:
    data = base64.b64encode(bytes(range(12))).decode()
    assert _refused(codec.unpack, {"data": data, "shape": shape, "dtype": "uint8"}).field == "routed_experts.shape"


@pytest.mark.case("R46")
@pytest.mark.parametrize("data", r3st.WRONG_DATA, ids=repr)
def test_wrong_types_of_data(data: Any) -> None:
    assert _refused(codec.unpack, {"data": data, "shape": [1, 1, 3], "dtype": "uint8"}).field == "routed_experts.data"


@pytest.mark.case("R35")
@pytest.mark.parametrize("missing", ["data", "shape", "dtype"])
def test_no_key_has_a_default(missing: str) -> None:
    """int16 bytes without a dtype are not taken for uint8."""
    envelope = {"data": "AAEAAQ==", "shape": [1, 1, 2], "dtype": "int16"}
    del envelope[missing]
    error = _refused(codec.unpack, envelope)
    assert error.field == "routed_experts"
    assert error.got == ", ".join(sorted(envelope))


@pytest.mark.case("R47")
@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ("AB==", [1, 1, 1]),
        ("AP==", [1, 1, 1]),
        ("AAB=", [1, 1, 2]),
        ("AAD=", [2, 1, 1]),
        ("AAAAAB==", [4, 1, 1]),
        ("AA==AAAA", [4, 1, 1]),
        ("AA==AAAA", [6, 1, 1]),
        ("AA\n=", [1, 1, 2]),
        ("AA!=", [1, 1, 2]),
        ("AA A", [1, 1, 3]),
        ("-_-_", [1, 1, 3]),
        ("AA=A", [1, 1, 3]),
        ("A===", [1, 1, 1]),
        ("====", [0, 1, 1]),
        ("====", [1, 1, 3]),
        ("AA", [1, 1, 1]),
        ("AAA", [1, 1, 2]),
        ("AA==\n", [1, 1, 1]),
        ("\u0410AA=", [1, 1, 2]),
        ("\ud800AA=", [1, 1, 2]),
        ("AAA\0", [1, 1, 3]),
    ],
)
def test_base64_is_strict(data: str, shape: list[int]) -> None:
    """One array has one encoding; what is no base64 is not skipped."""
    assert _refused(codec.unpack, {"data": data, "shape": shape, "dtype": "uint8"}).field == "routed_experts.data"


@given(data=st.text(alphabet="AB/+=\n_é", max_size=8), size=st.integers(0, 6))
def test_only_what_the_standard_library_would_write_is_read(data: str, size: int) -> None:
    """Whatever ``unpack`` takes, encoding its bytes again gives the same characters."""
    result = _attempt(codec.unpack, {"data": data, "shape": [size, 1, 1], "dtype": "uint8"})
    if isinstance(result, CodecError):
        assert result.field == "routed_experts.data"
    else:
        assert base64.b64encode(result.tobytes()).decode() == data


@pytest.mark.case("R46", "R65")
@given(st.integers(0, 8), st.binary(max_size=8))
def test_bytes_and_shape_have_to_agree(size: int, raw: bytes) -> None:
    """Short and long by any number of bytes, odd byte counts for int16."""
    data = base64.b64encode(raw).decode()
    for name, item in (("uint8", 1), ("int16", 2), ("int32", 4)):
        envelope = {"data": data, "shape": [size, 1, 1], "dtype": name}
        if size * item != len(raw):
            error = _refused(codec.unpack, envelope)
            # A wide dtype without a byte is refused for its dtype before anything else can be wrong with it.
            assert error.field in ("routed_experts.data", "routed_experts.dtype")
        elif name == "uint8":
            assert codec.unpack(envelope).tobytes() == raw


@pytest.mark.case("R46")
def test_a_negative_id_in_an_envelope_is_named() -> None:
    error = _refused(codec.unpack, {"data": "AAH//w==", "shape": [2, 1, 1], "dtype": "int16"})
    assert (error.field, error.got, error.where) == ("routed_experts", "-1", "row 1, layer 0, slot 0")


# Allocation: nothing of the claimed size is allocated.


@pytest.mark.case("R46")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([2**20, 2**10, 8], "uint8"),
        ([2**20, 2**7, 8], "uint8"),
        ([2**31, 1, 1], "uint8"),
        ([2**28, 1, 1], "int32"),
        ([2**40, 1, 1], "int32"),
        ([2**63, 2, 1], "int16"),
    ],
)
def test_a_claimed_size_is_not_allocated(shape: list[int], dtype: str) -> None:
    envelope = {"data": "", "shape": shape, "dtype": dtype}
    _refused(codec.unpack, envelope)
    tracemalloc.start()
    try:
        _refused(codec.unpack, envelope)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.case("R46")
def test_data_that_is_too_long_is_not_decoded() -> None:
    data = "A" * 8_000_000
    tracemalloc.start()
    try:
        error = _refused(codec.unpack, {"data": data, "shape": [1, 1, 3], "dtype": "uint8"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.field, error.got) == ("routed_experts.data", "8000000")
    assert peak < 100_000


@pytest.mark.parametrize(
    ("data", "shape", "dtype", "canonical"),
    [
        ("/wA=", [1, 1, 1], "int16", "uint8"),
        ("/wAAAA==", [1, 1, 1], "int32", "uint8"),
        ("/38AAA==", [1, 1, 1], "int32", "int16"),
        ("", [0, 2, 2], "int16", "uint8"),
        ("", [0, 2, 2], "int32", "uint8"),
    ],
)
def test_a_wider_dtype_than_needed_is_refused(data: str, shape: list[int], dtype: str, canonical: str) -> None:
    """One array has one encoding."""
    error = _refused(codec.unpack, {"data": data, "shape": shape, "dtype": dtype})
    assert (error.field, error.got) == ("routed_experts.dtype", dtype)
    assert canonical in error.expected


def test_the_cap_is_on_bytes_and_not_on_items() -> None:
    """One byte less than the cap is refused for its data, one more for its shape."""
    at_cap = {"data": "", "shape": [codec.MAX_BYTES // 4, 1, 1], "dtype": "int32"}
    above = {"data": "", "shape": [codec.MAX_BYTES // 4 + 1, 1, 1], "dtype": "int32"}
    assert _refused(codec.unpack, at_cap).field == "routed_experts.data"
    error = _refused(codec.unpack, above)
    assert error.field == "routed_experts.shape"
    assert str(4 * math.prod(above["shape"])) in error.got


def test_unpack_needs_little_more_than_its_result() -> None:
    envelope = codec.pack(np.full((4000, 48, 8), 300, np.int16))
    tracemalloc.start()
    try:
        array = codec.unpack(envelope)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 1.25 * array.nbytes + 100_000


# Nested lists: the form of a server that does not pack.


@pytest.mark.case("R19", "R48")
@given(r3st.ids())
def test_nested_lists_of_any_routes(ids: r3st.Array) -> None:
    """Lists of no rows do not say how many layers there are."""
    nested = ids.tolist()
    if ids.size or not len(ids):
        want = ids.astype(np.int64) if len(ids) else np.empty((0, 0, 0), np.int64)
        oracle.assert_canonical(packed.from_nested(nested), want)
    else:
        assert _refused(packed.from_nested, nested).field == "routed_experts"


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "AAEC",
        b"AAEC",
        5,
        True,
        {},
        ([[1]],),
        np.zeros((1, 1, 1), int),
        [1],
        [[1]],
        [[[[1]]]],
        [[]],
        [[[]]],
        [[[1], [2, 3]]],
        [[[1]], [[1], [2]]],
        [[[1]], [2]],
        [[[1]], None],
        [None],
        [[[None]]],
        [[[1.0]]],
        [[[1, 0.5]]],
        [[[True]]],
        [[["1"]]],
        [[[1, "1"]]],
        [["12"]],
        ["ab"],
        [{}],
        [[{"a": 1}]],
        [[[-1]]],
        [[[0, -(2**63)]]],
        [[[-(2**63) - 1]]],
        [[[2**31]]],
        [[[2**63]]],
        [[[-1, 2**63]]],
        [[[2**64]]],
        [[[float("nan")]]],
    ],
    ids=repr,
)
def test_other_lists_are_refused(wrong: Any) -> None:
    assert _refused(packed.from_nested, wrong).field == "routed_experts"


def _are_ids(value: Any, depth: int) -> bool:
    if depth:
        return isinstance(value, list) and all(_are_ids(item, depth - 1) for item in value)
    return type(value) is int


ODD_LEAVES = st.sampled_from([-1, 2**31, 2**63, 2**64, None, True, 1.0, "1", "x"])
NESTED_LEAVES = st.integers(-1, 300) | ODD_LEAVES


@given(
    st.one_of(
        r3st.json_values(NESTED_LEAVES),
        st.lists(st.lists(st.lists(NESTED_LEAVES, max_size=3), max_size=3), max_size=3),
        # One odd item among right ones gets further than many.
        st.builds(
            lambda rows, ids, odd: [[ids]] * rows + [[[*ids, odd][1:]]],
            st.integers(0, 2),
            st.lists(st.integers(0, 300), min_size=1, max_size=3),
            ODD_LEAVES,
        ),
    )
)
@example([[[1, None]]])
def test_from_nested_of_anything_is_an_array_or_a_codec_error(value: Any) -> None:
    result = _attempt(packed.from_nested, value)
    if isinstance(result, CodecError):
        assert result.field == "routed_experts"
    else:
        assert _are_ids(value, 3)
        assert result.tolist() == value
        oracle.assert_canonical(result, result.astype(np.int64))


def test_deep_and_recursive_lists() -> None:
    deep: list[Any] = [1]
    for _ in range(3000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    assert _refused(packed.from_nested, deep).field == "routed_experts"
    assert _refused(packed.from_nested, loop).field == "routed_experts"


# Errors.


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_survive_pickle_and_copy(cls: type[errors.R3Error]) -> None:
    """Ray pickles what a task raises."""
    assert issubclass(cls, errors.R3Error)
    more = {"kind": "rows"} if issubclass(cls, errors.RoutesError) else {}
    error = cls("a.b", expected="x", got="y", where="z", hint="w", **more)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is cls
        assert _fields(again) == _fields(error) == ("a.b", "x", "y", "z", "w")
        assert str(again) == str(error)
        assert getattr(again, "kind", None) == more.get("kind")
    assert _fields(copy.deepcopy(error)) == _fields(error)


def test_an_error_says_expected_got_and_where() -> None:
    error = CodecError("routed_experts.shape", expected="[41, 48, 8]", got="[42, 48, 8]", where="sample 3")
    assert isinstance(error, ValueError)
    assert error.hint == ""
    for part in ("routed_experts.shape", "[41, 48, 8]", "[42, 48, 8]", "sample 3"):
        assert part in str(error)


@given(st.one_of(r3st.json_values(), st.binary(max_size=100), st.text(max_size=100)))
def test_descriptions_are_short(value: Any) -> None:
    """A reply of 17 MB does not end up in a log line."""
    assert 0 < len(errors.describe(value)) < 200


# Inputs that were once let through, or raised something else.


@pytest.mark.case("R46")
@pytest.mark.parametrize(
    "shape", [[2**63, 0, 8], [2**62, 0, 8], [0, 2**64 - 1, 1], [2**62, 0, 2**62], [0, 2**32, 2**32]], ids=repr
)
def test_huge_dimensions_of_no_bytes(shape: list[int]) -> None:
    """A dimension of 0 hides the others from a size cap, and numpy cannot hold them."""
    error = _refused(codec.unpack, {"data": "", "shape": shape, "dtype": "uint8"})
    assert error.field == "routed_experts.shape"


@pytest.mark.parametrize("nested", [[[[1, True]]], [[[False, 2]]], [[[3]], [[True]]]], ids=repr)
def test_a_bool_is_no_id(nested: Any) -> None:
    """numpy makes an int of it as soon as there is another int beside it."""
    assert _refused(packed.from_nested, nested).field == "routed_experts"


@pytest.mark.case("R46")
def test_a_string_among_ids_is_not_multiplied() -> None:
    """numpy gives every item the room of the longest string: here 160 MB for a reply of 26 kB."""
    nested = [[["x" * 20_000, *[1] * 2_000]]]
    _refused(packed.from_nested, [[["x", 1]]])
    tracemalloc.start()
    try:
        error = _refused(packed.from_nested, nested)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.field == "routed_experts"
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shape": [10**5000, 1, 1]}, "routed_experts.shape"),
        ({"shape": [-(10**5000), 1, 1]}, "routed_experts.shape"),
        ({"shape": 10**5000}, "routed_experts.shape"),
        ({"dtype": 10**5000}, "routed_experts.dtype"),
        ({"data": 10**5000}, "routed_experts.data"),
        ({10**5000: 1}, "routed_experts"),
    ],
    ids=["dim", "negative-dim", "shape", "dtype", "data", "key"],
)
def test_integers_too_long_to_print(changes: dict[Any, Any], field: str) -> None:
    """Python refuses to print integers of more than 4,300 digits, with a ValueError of its own."""
    right = {"data": "AA==", "shape": [1, 1, 1], "dtype": "uint8"}
    assert _refused(codec.unpack, {**right, **changes}).field == field


def test_an_id_too_long_to_print() -> None:
    assert _refused(codec.smallest_dtype, 10**5000).field == "routed_experts"


def test_smallest_dtype_of_a_negative_id() -> None:
    """None of the three holds it by the contract of the wire, and uint8 does not hold it at all."""
    assert _refused(codec.smallest_dtype, -1).field == "routed_experts"


@pytest.mark.skipif(not r3st.HAVE_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("kind", ["sparse", "meta", "quantized", "class"])
def test_tensors_without_a_host_array_are_refused(kind: str) -> None:
    import torch

    ids = torch.ones((2, 2, 2), dtype=torch.int64)
    if kind == "sparse":
        wrong: Any = ids.to_sparse()
    elif kind == "meta":
        wrong = ids.to("meta")
    elif kind == "quantized":
        # Not through `quantize_per_tensor`, which new releases of torch warn about.
        quantized: Any = getattr(torch, "_empty_affine_quantized")  # noqa: B009
        wrong = quantized((2, 2, 2), scale=1.0, zero_point=0, dtype=torch.quint8)
    else:
        wrong = torch.Tensor
    assert _refused(codec.compact, wrong).field == "routed_experts"


def test_what_only_looks_like_a_tensor_is_refused() -> None:
    class Tensorlike:
        def detach(self) -> Tensorlike:
            return self

        def cpu(self) -> Tensorlike:
            return self

    assert _refused(codec.compact, Tensorlike()).field == "routed_experts"


def test_a_long_key_does_not_end_up_in_the_message() -> None:
    error = _refused(codec.unpack, {"x" * 1_000_000: 1})
    assert error.field == "routed_experts"
    assert len(str(error)) < 2_000
