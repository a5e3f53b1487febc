"""``skyrl_r3.trace``: routes of one trajectory across its turns."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import canned
from skyrl_r3.routes import RoutedExperts
from skyrl_r3.trace import Trace, Traces


def tokens(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def turn(trace: Trace, prompt: list[int], response: list[int], routes: np.ndarray) -> tuple[int, RoutedExperts]:
    """Ask and answer as client and engine do: the rows from the start on. ``routes`` are those of all tokens."""
    held = trace.held_for(tokens(prompt))
    start = len(held) if held is not None else 0
    fed = [*prompt, *response][:-1]
    assert len(routes) == len(fed)
    return start, trace.add(held, routes[start:], tokens(fed))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=8), st.sampled_from([16, 512]))
def test_as_if_all_rows_were_asked_for(turns: list[tuple[int, int]], experts: int) -> None:
    """With an engine that routes a token always the same."""
    trace, prompt, sent = Trace(), [], 0
    dice = random.Random(len(turns))
    for observed, generated in turns:
        prompt = [*prompt, *(dice.randrange(99) for _ in range(observed))]
        response = [dice.randrange(99) for _ in range(generated)]
        routes = canned.routes_of([*prompt, *response][:-1], experts=experts).astype(
            "int16" if experts > 256 else "uint8"
        )
        start, got = turn(trace, prompt, response, routes)
        sent += len(routes) - start
        assert np.array_equal(got.ids, routes)
        assert got.token_ids.tolist() == [*prompt, *response][:-1]
        prompt = [*prompt, *response]
    assert sent == len(prompt) - 1  # Each row once.


@pytest.mark.case("R67")
def test_the_first_capture_wins_and_the_last_token_comes_with_the_next_turn() -> None:
    trace = Trace()
    first = canned.routes_of([1, 2, 3, 4])
    turn(trace, [1, 2, 3], [4, 5], first)
    start, got = turn(trace, [1, 2, 3, 4, 5, 6], [7, 8], canned.routes_of([1, 2, 3, 4, 5, 6, 7]) + 20)
    assert start == 4
    assert np.array_equal(got.ids[:4], first)
    assert np.array_equal(got.ids[4:], canned.routes_of([1, 2, 3, 4, 5, 6, 7])[4:] + 20)


@pytest.mark.parametrize("prompt", [[1, 9, 3, 4, 5, 6], [9], [1, 2], [1, 2, 3], [2, 3, 4, 5, 6], [1, 2, 3, 9, 5]])
def test_a_prompt_that_does_not_go_on_is_asked_for_anew(prompt: list[int]) -> None:
    trace = Trace()
    turn(trace, [1, 2, 3], [4, 5], canned.routes_of([1, 2, 3, 4]))
    routes = canned.routes_of([*prompt, 7]) + 20
    start, got = turn(trace, prompt, [7, 8], routes)
    assert (start, got.ids.tolist()) == (0, routes.tolist())
    # And this is what the trajectory holds from there on.
    start, got = turn(trace, [*prompt, 7, 8, 1], [2], canned.routes_of([*prompt, 7, 8, 1]))
    assert start == len(prompt) + 1
    assert np.array_equal(got.ids[:start], routes)


def test_the_last_prompt_token_is_always_asked_for() -> None:
    """The prompt may be no longer than what is held. With nothing to return of it, vLLM 0.28 and before die."""
    trace = Trace()
    routes = canned.routes_of([1, 2, 3, 4])
    turn(trace, [1, 2, 3], [4, 5], routes)
    start, got = turn(trace, [1, 2, 3, 4], [6, 7], canned.routes_of([1, 2, 3, 4, 6]))
    assert start == 3
    assert np.array_equal(got.ids, canned.routes_of([1, 2, 3, 4, 6]))


def test_what_was_returned_is_never_written_again() -> None:
    trace, prompt, seen = Trace(), [1, 2], []
    for number in range(30):
        fed = [*prompt, number]
        _, got = turn(trace, prompt, [number, number + 1], canned.routes_of(fed) + number)
        seen.append((got, got.ids.copy(), got.token_ids.tolist()))
        prompt = [*fed, number + 1, 7]
    for got, ids, token_ids in seen:
        assert np.array_equal(got.ids, ids)
        assert got.token_ids.tolist() == token_ids


def test_two_requests_at_once_from_the_same_rows() -> None:
    """Once from a reply's own array, and once from the trace's memory, in which there is room behind them."""
    for turns in (1, 2):
        trace, prompt = Trace(), list(range(20))
        for _ in range(turns):
            turn(trace, prompt, [7, 8], canned.routes_of([*prompt, 7]))
            prompt = [*prompt, 7, 8, *range(20)]
        held = trace.held_for(tokens(prompt))
        assert held is not None
        one, two = [*prompt[: len(held)], 9, 1], [*prompt[: len(held)], 9, 2]
        first = trace.add(held, canned.routes_of(one)[len(held) :], tokens(one))
        second = trace.add(held, canned.routes_of(two)[len(held) :] + 50, tokens(two))
        assert np.array_equal(first.ids, canned.routes_of(one))
        assert np.array_equal(second.ids[len(held) :], canned.routes_of(two)[len(held) :] + 50)


@pytest.mark.case("R63")
@pytest.mark.parametrize(
    "order", [("uint8", "int16", "int32"), ("int32", "uint8", "int16"), ("int16", "int32", "uint8")]
)
def test_the_widest_dtype_wins(order: tuple[str, ...]) -> None:
    top = {"uint8": 200, "int16": 300, "int32": 40000}
    trace, expected = Trace(), []
    for dtype, rows in zip((order[0], *order), (30, 30, 3, 3), strict=True):  # For the last there is room already.
        prompt = tokens([1] * (len(expected) + rows))
        got = trace.add(trace.held_for(prompt), np.array([[[top[dtype], 1]]] * rows).astype(dtype), prompt)
        expected += [top[dtype]] * rows
        assert got.ids[:, 0, 0].tolist() == expected
    assert trace.held_for(tokens([1] * 99)).ids.dtype == np.int32  # type: ignore[union-attr]


def test_each_model_at_each_address_has_a_trace() -> None:
    traces = Traces()
    turn(traces["http://a", "policy"], [1, 2, 3], [4, 5], canned.routes_of([1, 2, 3, 4]))
    prompt = tokens([1, 2, 3, 4, 5, 6])
    for key in (("http://a", "judge"), ("http://b", "policy")):
        assert traces[key].held_for(prompt) is None
    assert len(traces["http://a", "policy"].held_for(prompt) or ()) == 4


def test_nothing_is_copied_for_one_turn() -> None:
    ids = canned.routes_of([1, 2, 3])
    assert Trace().add(None, ids, tokens([1, 2, 3])).ids is ids


def test_a_turn_copies_its_own_rows() -> None:
    """50 turns allocate no more than a few times the rows that there are in the end, and free what they held."""
    rows, layers, topk = 200, 16, 8
    tracemalloc.start()
    try:
        trace, held, fresh = Trace(), None, np.empty(0)
        held_bytes = 50 * rows * layers * topk
        prompt = list(range(rows))
        for number in range(50):
            held = trace.held_for(tokens(prompt))
            fresh = np.full((len(prompt) + 1 - len(held or ()), layers, topk), number, np.uint8)
            trace.add(held, fresh, tokens([*prompt, 0]))
            prompt = [*prompt, 0, 1, *range(rows - 2)]
        now, peak = tracemalloc.get_traced_memory()
        assert now < 1.5 * held_bytes
        assert peak < 3 * held_bytes
        del trace, held, fresh
        assert tracemalloc.get_traced_memory()[0] < 0.1 * held_bytes
    finally:
        tracemalloc.stop()
