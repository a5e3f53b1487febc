"""Nested lists, which servers that do not pack send."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from contract_tests import corruption, oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import NESTED, Adapter, Reply
from contract_tests.codec.attempts import attempt, refused
from contract_tests.corruption import fed


def body_of(lists: Any) -> bytes:
    """A reply with ``lists`` as its routes."""
    choice = {"token_ids": [5, 6], "finish_reason": "stop", "logprobs": None, "routed_experts": lists}
    return orjson.dumps({"choices": [choice]})


@pytest.mark.capability("reads nested")
@given(ids=r3st.ids(shape=(3, 2, 2)))
def test_nested_lists(impl: Adapter, ids: Any) -> None:
    """Nested lists become the same array as a packed envelope."""
    found = impl.load(oracle.write(Reply([5], routes=oracle.canonical(ids)), NESTED)).routes
    oracle.assert_canonical(found, ids)


WRONG = {
    "rows of different layers": [[[1, 2]], [[1, 2], [3, 4]]],
    "layers of different top-k": [[[1, 2], [3]]],
    "a later row of another top-k": [[[1, 2]], [[3]]],
    "two axes": [[1, 2], [3, 4]],
    "one axis": [1, 2, 3],
    "four axes": [[[[1]]]],
    "mixed axes": [[[1, 2]], [3, 4]],
    "a bool": [[[1, True]]],
    "a float": [[[1, 2.0]]],
    "a text": [[[1, "2"]]],
    "null": [[[1, None]]],
    "a row of null": [[[1, 2]], None],
    "an object": [[{"0": 1}]],
    "negative": [[[1, -1]]],
    "beyond int32": [[[1, 2**31]]],
    "beyond int64": [[[1, 2**64 - 1]]],
    "no layers": [[], []],
    "no ids": [[[]], [[]]],
    "a long text": [[[1, "x" * 10_000]]],
}


@pytest.mark.case("R46")
@pytest.mark.capability("nested")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_not_decoded(impl: Adapter, case: str) -> None:
    """Ragged lists, other axes and what is no id are refused by a codec of nested lists."""
    refused(impl, impl.decode, fed("list", WRONG[case]))


@pytest.mark.capability("nested")
@pytest.mark.parametrize("value", [value for value in r3st.NOT_OBJECTS if not isinstance(value, list)], ids=repr)
def test_what_is_no_list(impl: Adapter, value: Any) -> None:
    """Text, numbers and envelopes in the place of nested lists are refused."""
    refused(impl, impl.decode, fed("list", value))


@r3st.more(5)
@pytest.mark.capability("nested")
@given(lists=corruption.structure_of([[[1, 300], [2, 4]], [[5, 6], [7, 8]]]).map(corruption.without_twice))
def test_accidents_of_lists(impl: Adapter, lists: Any) -> None:
    """After accidents to their structure, nested lists are decoded if the oracle reads them, and else refused."""
    found = attempt(impl, impl.decode, fed("nested structure", lists))
    want = _read(lists)
    if isinstance(want, oracle.UnreadableError):
        assert isinstance(found, Exception) or not np.size(found), f"decoded, although {want}"
    else:
        oracle.assert_canonical(found, want)


def _read(lists: Any) -> Any:
    try:
        return oracle.nested(lists)
    except oracle.UnreadableError as error:
        return error


@pytest.mark.capability("reads nested")
@pytest.mark.case("R19", "R46", "R76")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists(impl: Adapter, case: str) -> None:
    """Ragged lists, other axes and what is no id are refused in few words."""
    refused(impl, impl.load, fed("list", body_of(WRONG[case])))
