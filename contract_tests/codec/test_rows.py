"""Rows stay with their tokens: when turns become a trajectory, and when it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import oracle
from contract_tests.adapter import Adapter, Array, Turn


def rows_of(tokens: int, start: int = 0, experts: int = 200) -> Array:
    """Rows [tokens - start, 3, 2] each of which tells which token it belongs to."""
    token = np.arange(start, tokens).reshape(-1, 1, 1)
    base = token * 7 + np.arange(3).reshape(1, -1, 1) * 2
    return oracle.canonical((base + np.arange(2)) % experts)


@st.composite
def trajectories(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Turns: new prompt tokens, response tokens, and how many experts there are, which changes the dtype."""
    turn = st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([200, 500, 40_000]))
    return draw(st.lists(turn, min_size=1, max_size=12))


@pytest.mark.case("R63")
@pytest.mark.capability("trace")
@given(turns=trajectories())
def test_turns_become_a_trajectory(impl: Adapter, turns: list[tuple[int, int, int]]) -> None:
    """However a trajectory was split into turns, row i is the route of token i, in the smallest dtype of them all."""
    deltas = impl.quirks.trace == "deltas"
    held, tokens, given_turns, wanted = 0, 0, [], []
    for prompt, response, experts in turns:
        start, before = held if deltas else 0, tokens + prompt
        tokens = before + response
        rows = rows_of(tokens - 1, start, experts)
        given_turns.append(Turn(list(range(before)), list(range(before, tokens)), start, rows))
        wanted = [*wanted, rows.astype(np.int64)] if deltas else [rows.astype(np.int64)]
        held = tokens - 1
    before = [(list(turn.prompt), list(turn.response), turn.rows.tolist()) for turn in given_turns]
    found = impl.trace(given_turns)
    assert [(turn.prompt, turn.response, turn.rows.tolist()) for turn in given_turns] == before
    oracle.assert_canonical(found, np.concatenate(wanted))
    assert len(found) == tokens - 1


@pytest.mark.case("R64")
@pytest.mark.capability("cut")
@given(total=st.integers(1, 30), data=st.data(), experts=st.sampled_from([200, 500, 40_000]))
def test_a_cut_keeps_the_first_rows(impl: Adapter, total: int, data: st.DataObject, experts: int) -> None:
    """Routes that are cut keep the rows of the tokens that are left, and no other."""
    rows = data.draw(st.integers(0, total))
    whole = rows_of(total, experts=experts)
    found = impl.cut(whole, rows)
    assert found.dtype in (whole.dtype, oracle.canonical(whole[:rows]).dtype)
    assert len(found) == rows
    assert found.tolist() == whole[:rows].tolist()
