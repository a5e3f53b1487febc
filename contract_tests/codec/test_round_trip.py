"""Routes to their wire form and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from contract_tests import oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import Adapter
from contract_tests.strategies import Routes, lay_out

NUMPY, TORCH = tuple(r3st.LAYOUTS), tuple(r3st.TENSOR_LAYOUTS) or ("torch is missing",)


def through_json(payload: Any) -> Any:
    """``payload`` as it arrives at the other end."""
    return orjson.loads(orjson.dumps(payload))


@given(routes=r3st.routes(NUMPY, empty=False))
def test_round_trip(impl: Adapter, routes: Routes) -> None:
    """What is encoded is decoded with the same ids, shape and dtype, writable, in C order."""
    oracle.assert_canonical(impl.decode(through_json(impl.encode(routes.given))), routes.values)


@pytest.mark.case("R26", "R27", "R34")
@pytest.mark.parametrize("layout", NUMPY)
@pytest.mark.parametrize("max_id", [255, 256, 383, 32767, 32768, 2**31 - 1])
def test_layouts(impl: Adapter, layout: str, max_id: int) -> None:
    """No memory layout, byte order, subclass or read-only flag of an array changes what arrives."""
    routes = edge(layout, max_id)
    oracle.assert_canonical(impl.decode(through_json(impl.encode(routes.given))), routes.values)


def edge(layout: str, max_id: int) -> Routes:
    """A few ids with ``max_id`` among them, in the first row, which is all that the broadcast layouts keep."""
    dtype = "int64" if max_id > 2**15 else "uint16" if max_id > 255 else "uint8"
    ids = (np.arange(2 * 3 * 4) % (max_id + 1)).reshape(2, 3, 4).astype(dtype)
    ids[0, 1, 2] = max_id
    routes = lay_out(ids, layout)
    assert routes.values.max() == max_id
    return routes


@pytest.mark.capability("tensors")
@given(routes=r3st.routes(TORCH, empty=False))
def test_tensors(impl: Adapter, routes: Routes) -> None:
    """Torch tensors, contiguous or not, are taken as arrays are."""
    oracle.assert_canonical(impl.decode(through_json(impl.encode(routes.given))), routes.values)


def by_shape(*shapes: tuple[int, int, int]) -> pytest.MarkDecorator:
    """Run a test for each of ``shapes``."""
    return pytest.mark.parametrize("shape", [pytest.param(shape, id="x".join(map(str, shape))) for shape in shapes])


@pytest.mark.capability("packed")
@by_shape((0, 48, 8), (0, 1, 1), (0, 3, 2), (5, 0, 8), (5, 8, 0))
def test_no_rows(impl: Adapter, shape: tuple[int, int, int]) -> None:
    """Routes without rows keep their layers and top-k, and so do rows without ids."""
    empty = np.zeros(shape, np.uint16)
    oracle.assert_canonical(impl.decode(through_json(impl.encode(empty))), empty)


@by_shape(
    (1, 1, 1), (1, 48, 8), (5, 1, 8), (5, 48, 1), (2, 61, 8), (2, 130, 3), (2, 2, 22), (4097, 6, 3), (1025, 48, 8),
    (65_537, 1, 1), (70_000, 2, 2),
)  # fmt: skip
@pytest.mark.parametrize("max_id", [127, 300, 70_000])
def test_shapes(impl: Adapter, shape: tuple[int, int, int], max_id: int) -> None:
    """One row, one layer, top-1, many layers, wide top-k and thousands of rows arrive, each id in its place."""
    ids = (np.arange(np.prod(shape), dtype=np.int64) * 7919 % (max_id + 1)).reshape(shape)
    ids[-1, -1, -1] = max_id
    oracle.assert_canonical(impl.decode(through_json(impl.encode(ids))), ids)


def plain(payload: Any) -> Any:
    """What a reader of ``payload`` sees now, of whatever types it is made."""
    if isinstance(payload, Mapping):
        return {key: plain(payload[key]) for key in payload}
    return [plain(item) for item in payload] if isinstance(payload, list | tuple) else payload


@pytest.mark.case("R14")
@given(routes=r3st.routes(NUMPY, empty=False))
def test_encoding_takes_a_copy(impl: Adapter, routes: Routes) -> None:
    """An engine that writes its buffer again does not change what was encoded."""
    encoded = impl.encode(routes.given)
    before = plain(encoded)
    routes.overwrite()
    assert plain(encoded) == before


@pytest.mark.case("R14")
@given(routes=r3st.routes(NUMPY, empty=False))
def test_encoding_again(impl: Adapter, routes: Routes) -> None:
    """The same array with other ids in it is encoded with those."""
    impl.encode(routes.given)
    routes.overwrite()
    now = np.array(routes.given, np.int64, subok=False)
    oracle.assert_canonical(impl.decode(through_json(impl.encode(routes.given))), now)


@given(first=r3st.routes(NUMPY, empty=False), second=r3st.routes(NUMPY, empty=False))
def test_encoded_routes_are_independent(impl: Adapter, first: Routes, second: Routes) -> None:
    """What was encoded does not change when something else is."""
    encoded = impl.encode(first.given)
    before = plain(encoded)
    impl.encode(second.given)
    assert plain(encoded) == before


@given(routes=r3st.routes(NUMPY, empty=False))
def test_encoding_leaves_its_input_alone(impl: Adapter, routes: Routes) -> None:
    """Encoding changes neither the ids nor the flags of the engine's array."""
    before = (routes.given.flags.writeable, routes.given.dtype, routes.given.strides)
    impl.encode(routes.given)
    assert (routes.given.flags.writeable, routes.given.dtype, routes.given.strides) == before
    assert np.array_equal(routes.given, routes.values)


@pytest.mark.case("R89")
@pytest.mark.parametrize("rows", [3, 30_000])
@pytest.mark.parametrize("max_id", [255, 256, 32768])
def test_decoded_arrays_are_independent(impl: Adapter, max_id: int, rows: int) -> None:
    """Each decoding gives memory of its own, whether the ids are the same or others, few or many."""
    ids = (np.arange(rows * 12) % (max_id + 1)).reshape(rows, 4, 3)
    ids[0, 0, 0] = max_id
    payload, other = (through_json(impl.encode(array)) for array in (ids, ids[::-1]))
    before = copy.deepcopy(payload)
    first, second, third = impl.decode(payload), impl.decode(payload), impl.decode(other)
    oracle.assert_canonical(first, ids)
    first[...] = 1
    assert not any(np.shares_memory(first, array) for array in (second, third))
    oracle.assert_canonical(second, ids)
    oracle.assert_canonical(third, ids[::-1])
    assert payload == before


def test_a_thousand_times(impl: Adapter) -> None:
    """The result does not depend on how often, or of what, it was asked for before."""
    for number in range(1_500):
        ids = np.array([[[number % 7, number]], [[number, number * 31]]])
        oracle.assert_canonical(impl.decode(through_json(impl.encode(ids))), ids)


@pytest.mark.parametrize("count", [256, 32_768])
def test_every_id(impl: Adapter, count: int) -> None:
    """Every single id that a uint8, and that an int16 holds, arrives as itself."""
    ids = np.arange(count).reshape(-1, 8, 2)
    oracle.assert_canonical(impl.decode(through_json(impl.encode(ids))), ids)


@pytest.mark.capability("packed")
def test_forty_mebibytes(impl: Adapter) -> None:
    """Routes of 40 MiB, those of 109,000 tokens of 48 layers, are encoded and decoded."""
    ids = np.resize(np.arange(251, dtype=np.uint8), (109_227, 48, 8))
    if ids.nbytes > impl.quirks.max_bytes:
        ids = ids[: impl.quirks.max_bytes // 384]
    found = impl.decode(through_json(impl.encode(ids)))
    assert (found.dtype, found.shape) == (ids.dtype, ids.shape)
    assert np.array_equal(found, ids)


@pytest.mark.capability("packed")
@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))], ids=["bytearray", "memoryview"])
def test_decoding_takes_a_copy_of_a_buffer(impl: Adapter, kind: Any) -> None:
    """Data may be a view of the body; the array does not change with it."""
    routes = edge("c", 256)
    payload = through_json(impl.encode(routes.given))
    data = kind(payload["data"].encode())
    found = impl.decode({**payload, "data": data})
    data[:4] = b"////"
    oracle.assert_canonical(found, routes.values)
