"""``skyrl_r3.routes``: what SkyRL's generator does to routes, done to arrays."""

from __future__ import annotations

import base64
import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_r3 import codec
from skyrl_r3.errors import CodecError, RouteError
from skyrl_r3.routes import RoutedExperts, as_token_array

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def _routes(rows: int, *, layers: int = 2, topk: int = 3, dtype: str = "int16") -> RoutedExperts:
    """Row ``i`` holds ``i`` everywhere, and belongs to token ``100 + i``."""
    ids = np.broadcast_to(np.arange(rows, dtype=dtype).reshape(rows, 1, 1), (rows, layers, topk)).copy()
    return RoutedExperts(ids, np.arange(100, 100 + rows, dtype=np.int32))


@pytest.mark.case("R77")
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_length_and_truth(rows: int) -> None:
    """An ``if routes:`` does not meet numpy's refusal to say whether an array is true."""
    routes = _routes(rows)
    assert len(routes) == rows
    assert bool(routes) is (rows > 0)
    assert len(list(routes)) == rows


@pytest.mark.case("R64")
@given(st.integers(0, 9), st.slices(9))
def test_a_slice_takes_rows_and_their_tokens(rows: int, cut: slice) -> None:
    """What is cut off the tokens is cut off the routes."""
    routes = _routes(rows)
    part = routes[cut]
    assert type(part) is RoutedExperts
    assert part.token_ids.tolist() == [100 + row for row in range(rows)][cut]
    assert part.ids[:, 0, 0].tolist() == list(range(rows))[cut]
    assert part.ids.shape[1:] == routes.ids.shape[1:]
    assert part.ids.dtype == routes.ids.dtype
    assert len(part) == len(range(rows)[cut])
    assert len(routes) == rows


@pytest.mark.case("R64")
def test_cutting_a_response_keeps_the_rows_of_the_prompt() -> None:
    """Prompt 5, response 10, at most 6 of it."""
    whole = _routes(5 + 10 - 1)
    cut = whole[: 5 + 6]
    assert len(cut) == 11
    assert cut.ids[:5].tolist() == whole.ids[:5].tolist()


@pytest.mark.case("R65")
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_a_cut_is_packed_with_its_own_shape_and_bytes(dtype: str) -> None:
    """From 10 rows to 6. What is packed cannot be cut, because it is an array by then."""
    whole = _routes(10, dtype=dtype)
    whole.ids[:6] += np.iinfo(dtype).max - 5  # So that no smaller dtype would do.
    envelope = codec.pack(whole[:6].ids)
    assert (envelope["shape"], envelope["dtype"]) == ([6, 2, 3], dtype)
    assert base64.b64decode(envelope["data"], validate=True) == whole.ids[:6].tobytes()
    np.testing.assert_array_equal(codec.unpack(envelope), whole.ids[:6], strict=True)


@pytest.mark.parametrize("index", [0, 2, -1, np.int64(1)])
def test_one_row(index: Any) -> None:
    routes = _routes(3)
    row = routes[index]
    assert isinstance(row, np.ndarray)
    assert row.tolist() == routes.ids[index].tolist()
    assert row.shape == (2, 3)


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_out_of_range(index: int) -> None:
    """``for`` over a sequence without ``__iter__`` would end here."""
    with pytest.raises(IndexError):
        _routes(3)[index]


def test_iteration_gives_the_rows() -> None:
    routes = _routes(4)
    assert [row.tolist() for row in routes] == routes.ids.tolist()


# Appending: a token without a route never becomes a row of expert 0.


@pytest.mark.case("R100", "R77")
def test_the_row_of_a_synthetic_token_is_not_stored() -> None:
    """SkyRL makes it from the first row, as nested lists of zeros."""
    routes = _routes(4)
    before = routes.ids.copy()
    routes.append([[0] * len(layer) for layer in routes[0]])
    routes.append(np.zeros((2, 3), np.int16))
    assert len(routes) == 4
    assert len(routes.token_ids) == 4
    assert routes.ids.tolist() == before.tolist()


def test_a_row_with_ids_is_not_lost_silently() -> None:
    routes = _routes(4)
    with pytest.raises(RouteError) as caught:
        routes.append([[0, 0, 0], [0, 0, 1]])
    assert caught.value.field == "routed_experts"
    assert len(routes) == 4


# Arrays.


def test_as_an_array() -> None:
    routes = _routes(5)
    view = np.asarray(routes)
    assert view.dtype == np.int16
    assert view.shape == (5, 2, 3)
    assert np.shares_memory(view, routes.ids)
    assert not np.shares_memory(np.array(routes, copy=True), routes.ids)
    wide = np.asarray(routes, dtype=np.int64)
    assert wide.dtype == np.int64
    assert wide.tolist() == routes.ids.tolist()
    with pytest.raises(ValueError, match="copy"):
        np.asarray(routes, dtype=np.int64, copy=False)


@pytest.mark.parametrize("rows", [0, 3])
def test_pickle_and_copy(rows: int) -> None:
    """Ray sends trajectories between processes."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        routes = _routes(rows)
        again = pickle.loads(pickle.dumps(routes, protocol))
        assert type(again) is RoutedExperts
        assert again.ids.dtype == routes.ids.dtype
        assert again.ids.shape == routes.ids.shape
        assert again.ids.tolist() == routes.ids.tolist()
        assert again.token_ids.dtype == np.int32
        assert again.token_ids.tolist() == routes.token_ids.tolist()
    clone = copy.deepcopy(_routes(3))
    assert len(clone) == 3


def test_a_slice_is_sent_without_the_rest() -> None:
    whole = _routes(5000, layers=4, topk=8)
    assert len(pickle.dumps(whole[:2])) < 2000


def test_rows_and_tokens_have_to_be_as_many() -> None:
    with pytest.raises(RouteError) as caught:
        RoutedExperts(np.zeros((3, 1, 1), np.uint8), np.zeros(2, np.int32))
    assert caught.value.field == "routed_experts.token_ids"
    assert caught.value.got == "2"


def test_a_description_is_short() -> None:
    assert len(repr(_routes(5000))) < 100
    assert "[5000, 2, 3]" in repr(_routes(5000))


# Prefixes: rows belong to tokens.


@pytest.mark.case("R67")
@given(TOKENS, TOKENS)
def test_common_prefix(captured: list[int], other: list[int]) -> None:
    routes = RoutedExperts(np.zeros((len(captured), 1, 1), np.uint8), as_token_array(captured))
    want = 0
    while want < min(len(captured), len(other)) and captured[want] == other[want]:
        want += 1
    assert routes.common_prefix(as_token_array(other)) == want
    assert routes.common_prefix(np.array(other, np.int64)) == want


@pytest.mark.case("R67")
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_common_prefix_of_a_changed_token(captured: list[int], data: st.DataObject) -> None:
    routes = RoutedExperts(np.zeros((len(captured), 1, 1), np.uint8), as_token_array(captured))
    at = data.draw(st.integers(0, len(captured) - 1))
    other = as_token_array([*captured[:at], 7, *captured[at + 1 :], 1, 2])
    assert routes.common_prefix(other) == at
    assert routes.common_prefix(as_token_array([*captured, 9])) == len(captured)


# Token ids.


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_token_arrays(token_ids: list[int]) -> None:
    tokens = as_token_array(token_ids)
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(token_ids),)
    assert tokens.tolist() == token_ids
    assert as_token_array(tuple(token_ids)).tolist() == token_ids
    assert as_token_array(np.array(token_ids, np.int64)).tolist() == token_ids  # type: ignore[arg-type]


def test_a_token_array_is_not_the_list() -> None:
    source = np.array([1, 2, 3], np.int32)
    tokens = as_token_array(source)  # type: ignore[arg-type]
    source[0] = 9
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [None, 5, 1.5, "abc", [None], [1, None], [1.0], ["1"], [[1]], [{}], [2**31], [-(2**31) - 1], [2**64], [b"1"]],
    ids=repr,
)
def test_what_is_no_list_of_token_ids(wrong: Any) -> None:
    with pytest.raises(RouteError) as caught:
        as_token_array(wrong, field="prompt_token_ids")
    assert caught.value.field == "prompt_token_ids"


# Inputs that were once let through, or raised something else.


@pytest.mark.parametrize("wrong", [[True], [1, False], [np.True_], b"abc", b"abcd", bytearray(3)], ids=repr)
def test_bools_and_bytes_are_no_token_ids(wrong: Any) -> None:
    """``array`` takes a bool for an int, and bytes for the memory of its items: b"abcd" would be one token."""
    with pytest.raises(RouteError) as caught:
        as_token_array(wrong)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        pytest.param(np.full((2, 1, 1), -1, np.int16), "routed_experts", marks=pytest.mark.case("R10")),
        (np.zeros((2, 1, 1), np.int64), "routed_experts.dtype"),
        (np.zeros((2, 1, 1), np.uint16), "routed_experts.dtype"),
        (np.zeros((2, 1, 1), np.float32), "routed_experts.dtype"),
        (np.zeros((2, 1, 1), ">i2"), "routed_experts.dtype"),
        (np.zeros((2, 2), np.uint8), "routed_experts"),
        (np.ma.array(np.zeros((2, 1, 1), np.uint8), mask=True), "routed_experts"),
        ([[[1]], [[2]]], "routed_experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_array_of_routes_is_refused_where_it_enters(ids: Any, field: str) -> None:
    """Later stages trust :class:`RoutedExperts`: a -1 would become expert 255 in a uint8 tensor."""
    with pytest.raises(CodecError) as caught:
        RoutedExperts(ids, np.zeros(2, np.int32))
    assert caught.value.field == field
