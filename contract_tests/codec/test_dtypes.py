"""The dtype of the wire, and ids that have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import Adapter
from contract_tests.codec.attempts import refused
from contract_tests.codec.test_round_trip import through_json


@pytest.mark.case("R34")
@pytest.mark.parametrize("max_id", r3st.EDGE_IDS)
def test_smallest_dtype(impl: Adapter, max_id: int) -> None:
    """The largest id alone decides: uint8 up to 255, int16 up to 32,767, int32 up to 2**31 - 1."""
    ids = np.array([[[0, max_id]], [[max_id, 1]]], np.int64)
    found = impl.decode(through_json(impl.encode(ids)))
    assert found.dtype.name == oracle.smallest(max_id)
    oracle.assert_canonical(found, ids)


@pytest.mark.capability("packed")
@given(ids=r3st.ids())
def test_envelopes_name_the_smallest_dtype(impl: Adapter, ids: Any) -> None:
    """The envelope is the oracle's, whatever integer dtype the engine has."""
    assert through_json(impl.encode(ids)) == oracle.envelope(oracle.canonical(ids))


@pytest.mark.capability("packed")
def test_envelopes_are_plain(impl: Adapter) -> None:
    """An envelope is a str, a list of ints and a str, in this order, and not what JSON merely makes of it."""
    made = impl.encode(np.array([[[1, 300]]], np.uint16))
    assert list(made) == ["data", "shape", "dtype"]
    assert [type(value) for value in made.values()] == [str, list, str]
    assert [type(dim) for dim in made["shape"]] == [int, int, int]


@pytest.mark.case("R39")
@pytest.mark.parametrize("dtype", r3st.INTEGER_DTYPES)
def test_no_other_dtype(impl: Adapter, dtype: str) -> None:
    """Of no integer dtype, uint16 among them, comes anything but uint8, int16 or int32."""
    for max_id in (7, 511, 40_000, np.iinfo(dtype).max):
        if max_id <= min(np.iinfo(dtype).max, 2**31 - 1):
            ids = np.full((2, 1, 3), max_id).astype(dtype)
            found = impl.decode(through_json(impl.encode(ids)))
            assert found.dtype in (np.dtype("uint8"), np.dtype("int16"), np.dtype("int32"))
            oracle.assert_canonical(found, ids)


@pytest.mark.case("R10", "R37")
@pytest.mark.parametrize("wrong", [-1, -2, -128, -129, -32768, -(2**31), -(2**63)])
def test_negative_ids(impl: Adapter, wrong: int) -> None:
    """A negative id is refused, not wrapped round."""
    dtypes = [name for name in ("int8", "int16", "int32", "int64") if np.iinfo(name).min <= wrong]
    for dtype in dtypes:
        for size, at in ((12, 0), (12, 5), (12, 11), (6_000, 5_999), (150_000, 100_001)):
            ids = (np.arange(size) % 100).astype(dtype).reshape(-1, 3, 2)
            ids.reshape(-1)[at] = wrong
            refused(impl, impl.encode, ids)


@pytest.mark.case("R34")
@pytest.mark.parametrize("wrong", [2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1])
def test_ids_beyond_int32(impl: Adapter, wrong: int) -> None:
    """An id above 2**31 - 1 is refused, not cut off."""
    for dtype in ("uint32", "int64", "uint64"):
        if np.iinfo(dtype).max >= wrong:
            for size in (12, 6_000):
                ids = (np.arange(size) % 100).astype(dtype).reshape(-1, 3, 2)
                ids[-1, 1, 1] = wrong
                refused(impl, impl.encode, ids)


@pytest.mark.case("R37")
@given(wrong=st.integers(-(2**63), -1) | st.integers(2**31, 2**63 - 1), at=st.integers(0, 11))
def test_no_id_is_wrapped(impl: Adapter, wrong: int, at: int) -> None:
    """No id out of range is ever turned into another one."""
    ids = np.arange(12, dtype=np.int64).reshape(2, 3, 2)
    ids.reshape(-1)[at] = wrong
    refused(impl, impl.encode, ids)


_IDS = np.arange(12).reshape(2, 3, 2)
NO_ROUTES = {
    "none": None,
    "text": "AAEC",
    "bytes": b"AAEC",
    "a number": 7,
    "an envelope": {"data": "AAEC", "shape": [1, 1, 3], "dtype": "uint8"},
    "nested bools": [[[True, False]], [[False, True]]],
    "nested floats": [[[1.0, 2.0]]],
    "a list of arrays": [_IDS, _IDS],
    "floats": _IDS.astype(np.float32),
    "half floats": _IDS.astype(np.float16),
    "long floats": _IDS.astype(np.longdouble),
    "no floats": np.zeros((0, 3, 2)),
    "records": np.zeros((2, 3, 2), [("id", "i4")]),
    "whole floats": _IDS.astype(np.float64),
    "bools": _IDS.astype(bool),
    "objects": _IDS.astype(object),
    "texts": _IDS.astype(str),
    "complex": _IDS.astype(complex),
    "times": _IDS.astype("m8[s]"),
    "one axis": _IDS.reshape(-1),
    "two axes": _IDS.reshape(2, 6),
    "four axes": _IDS.reshape(1, 2, 3, 2),
    "five axes": _IDS.reshape(1, 2, 3, 2, 1),
    "no axis": np.array(7),
}


@pytest.mark.case("R25")
@pytest.mark.parametrize("kind", NO_ROUTES)
def test_what_is_no_array_of_ids(impl: Adapter, kind: str) -> None:
    """What is no integer array of three axes is refused by name, and nothing of it is guessed."""
    refused(impl, impl.encode, NO_ROUTES[kind])


@pytest.mark.capability("packed")
def test_masked_arrays(impl: Adapter) -> None:
    """An array some of whose ids are masked out is refused: the ids under the mask are none."""
    for masked in (0, 5, 11):
        refused(impl, impl.encode, np.ma.masked_array(_IDS, mask=masked == _IDS))
