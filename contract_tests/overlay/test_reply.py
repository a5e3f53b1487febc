"""``skyrl_r3.reply``: what has to be true of a reply in any encoding, and the logprobs of its tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_r3 import packed
from skyrl_r3.errors import CodecError, MissingRoutesError, R3Error, ReplyError, RouteError, RoutesError
from skyrl_r3.reply import Reply, sampled_logprobs

# Logprobs.


def _logprob(value: float | None) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def _sampled(token_ids: list[int], logprobs: Any) -> tuple[list[float], int]:
    values, floored = sampled_logprobs(token_ids, logprobs)
    assert type(values) is np.ndarray
    assert values.dtype == np.float64
    assert values.ndim == 1
    assert type(floored) is int
    return values.tolist(), floored


@pytest.mark.case("R20")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [-1e300, 1e300, -3.5e38])
def test_a_logprob_that_float32_does_not_hold_is_floored(value: float) -> None:
    """It would be infinite in a frame."""
    assert _sampled([1, 2], [{1: _logprob(value)}, {2: _logprob(-0.5)}]) == ([-9999.0, -0.5], 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e300])
def test_a_reply_has_no_logprob_that_an_encoding_has_no_number_for(value: float) -> None:
    with pytest.raises(ReplyError) as caught:
        Reply(
            token_ids=np.array([1, 2], np.int32),
            finish_reason="stop",
            logprobs=np.array([-0.5, value]),
            routed_experts=None,
        )
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32", ">i4"])
def test_token_ids_are_int32(dtype: str) -> None:
    """int64 would lose its upper half on the wire and say nothing."""
    with pytest.raises(ReplyError) as caught:
        Reply(token_ids=np.array([1], dtype), finish_reason="stop", logprobs=None, routed_experts=None)
    assert caught.value.field == "token_ids.dtype"


@pytest.mark.case("R20")
def test_missing_and_non_finite_logprobs_are_floored() -> None:
    """Five floored, the rest as it was, as many entries as tokens."""
    tokens = [1, 2, 3, 4, 5, 6]
    entries = [
        {1: _logprob(-0.1), 9: _logprob(-5.0)},
        {2: _logprob(math.nan)},
        {3: _logprob(-math.inf)},
        {4: _logprob(math.inf)},
        {5: None},
        {7: _logprob(-0.5)},
    ]
    assert _sampled(tokens, entries) == ([-0.1, *[-9999.0] * 5], 5)


@pytest.mark.case("R20")
@pytest.mark.parametrize("entry", [None, {}, {1: _logprob(None)}, {1: None}, {2: _logprob(-1.0)}], ids=repr)
def test_a_missing_logprob_is_floored(entry: Any) -> None:
    assert _sampled([1, 1], [entry, {1: _logprob(-2.0)}]) == ([-9999.0, -2.0], 1)


@pytest.mark.case("R20")
@pytest.mark.parametrize("entries", [[], [{1: _logprob(-0.5)}]])
def test_fewer_entries_than_tokens_are_missing_ones(entries: Any) -> None:
    assert _sampled([1, 2, 3], entries) == ([-0.5][: len(entries)] + [-9999.0] * (3 - len(entries)), 3 - len(entries))
    flat = _flat([{1: -0.5}][: len(entries)])
    assert _sampled([1, 2, 3], flat) == _sampled([1, 2, 3], entries)


@pytest.mark.parametrize("value", [0.0, -0.0, -9999.0, -3.4e38, 5.0, -5])
def test_finite_logprobs_stay(value: float) -> None:
    values, floored = _sampled([1], [{1: _logprob(value)}])
    assert values == [value]
    assert math.copysign(1, values[0]) == math.copysign(1, value)
    assert floored == 0


@pytest.mark.case("R22")
@given(st.lists(st.floats(-3.4e38, 3.4e38) | st.sampled_from([math.nan, math.inf, -math.inf, 1e39]) | st.none()))
def test_logprobs_are_numbers_in_json(values: list[float | None]) -> None:
    """Neither null nor a bare NaN comes out."""
    tokens = list(range(len(values)))
    entries = [{token: _logprob(value)} for token, value in zip(tokens, values, strict=True)]
    logprobs, floored = sampled_logprobs(tokens, iter(entries))
    right = [-9999.0 if value is None or not abs(value) < 3.5e38 else value for value in values]
    assert floored == sum(value is None or not abs(value) < 3.5e38 for value in values)
    reply = Reply(token_ids=np.array(tokens, np.int32), finish_reason=None, logprobs=logprobs, routed_experts=None)
    got = [entry["logprob"] for entry in orjson.loads(packed.dump(reply))["choices"][0]["logprobs"]["content"]]
    assert got == right


def _flat(positions: list[dict[int, float]]) -> Any:
    """vLLM's own ``FlatLogprobs``, which the server asks for."""
    from vllm.logprobs import FlatLogprobs, Logprob

    flat = FlatLogprobs()
    for position in positions:
        flat.append({token: Logprob(value) for token, value in position.items()} or None)
    return flat


POSITIONS = st.lists(st.dictionaries(st.integers(0, 3), st.floats(), max_size=3), max_size=4)


@given(POSITIONS, st.data())
def test_flat_logprobs_are_read_like_mappings(positions: list[dict[int, float]], data: st.DataObject) -> None:
    """Whatever is in which place: the sampled token first, later, or nowhere."""
    first = [next(iter(position), 0) for position in positions]
    tokens = data.draw(st.just(first) | st.lists(st.integers(0, 3), max_size=5))
    mappings = [{token: _logprob(value) for token, value in position.items()} for position in positions]
    want = sampled_logprobs(tokens, mappings)
    flat = _flat(positions)
    before = repr(flat.logprobs)
    got = sampled_logprobs(tokens, flat)
    assert (got[0].tolist(), got[1]) == (want[0].tolist(), want[1])
    # The engine's own list is not floored. As text, because a NaN is not equal to itself.
    assert repr(flat.logprobs) == before


@pytest.mark.case("R20")
@pytest.mark.parametrize(
    ("positions", "want"),
    [
        ([{5: -0.5}, {6: -0.25}], ([-0.5, -0.25], 0)),
        ([{5: -0.5, 9: -0.1}, {6: -0.25, 5: -3.0}], ([-0.5, -0.25], 0)),
        ([{9: -0.1, 5: -0.5}, {6: -0.25}], ([-0.5, -0.25], 0)),
        ([{5: math.nan}, {6: -math.inf}], ([-9999.0, -9999.0], 2)),
        ([{5: -0.5}, {}], ([-0.5, -9999.0], 1)),
        ([{}, {6: -0.25}], ([-9999.0, -0.25], 1)),
        ([{9: -0.5}, {6: -0.25}], ([-9999.0, -0.25], 1)),
        # As many entries as tokens, and in their order, but two of the first position and none of the second.
        ([{5: -0.5, 6: -0.25}, {}], ([-0.5, -9999.0], 1)),
        ([{}, {5: -0.5, 6: -0.25}], ([-9999.0, -0.25], 1)),
    ],
)
def test_flat_logprobs(positions: list[dict[int, float]], want: tuple[list[float], int]) -> None:
    assert _sampled([5, 6], _flat(positions)) == want


# Replies.

IDS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)


def _reply(**changes: Any) -> Reply:
    fields = {
        "token_ids": np.array([21, 22], np.int32),
        "finish_reason": "stop",
        "logprobs": None,
        "routed_experts": IDS,
    }
    return Reply(**(fields | changes))


def _tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def _rows(count: int) -> np.ndarray:
    return np.zeros((count, 2, 3), np.uint8)


def _refused(reply: Reply, *, prompt: int, start: int = 0) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        reply.routes_for(prompt=prompt, start=start)
    return caught.value


@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_negative_token_ids_are_refused(value: int) -> None:
    with pytest.raises(ReplyError) as caught:
        _reply(token_ids=np.array([3, value], np.int32))
    assert (caught.value.field, caught.value.got) == ("token_ids", str(value))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_logprobs_is_refused(count: int) -> None:
    with pytest.raises(ReplyError) as caught:
        _reply(logprobs=np.zeros(count))
    assert (caught.value.field, caught.value.got) == ("logprobs", str(count))


def test_logprobs_of_no_tokens() -> None:
    assert _reply(token_ids=_tokens(0), logprobs=np.zeros(0)).logprobs is not None
    with pytest.raises(ReplyError):
        _reply(token_ids=_tokens(0), logprobs=np.zeros(1))


@given(prompt=st.integers(0, 6), response=st.integers(0, 4), start=st.integers(0, 7), rows=st.integers(0, 12))
def test_rows(prompt: int, response: int, start: int, rows: int) -> None:
    """Row rule: prompt + response - 1, less start or not; no more than the prompt where nothing was sampled."""
    reply = _reply(token_ids=_tokens(response), routed_experts=_rows(rows))
    right = rows in (prompt + response - 1 - start, prompt + response - 1) if response else rows <= prompt
    if right:
        assert reply.routes_for(prompt=prompt, start=start) is reply.routed_experts
    else:
        error = _refused(reply, prompt=prompt, start=start)
        assert isinstance(error, RoutesError)
        assert (error.kind, error.field, error.got) == ("rows", "routed_experts.shape", f"{rows} rows")


@pytest.mark.case("R60")
def test_the_error_says_how_many_rows_there_should_be() -> None:
    error = _refused(_reply(), prompt=9)
    assert error.expected.startswith("10 rows ")
    assert error.hint
    error = _refused(_reply(), prompt=9, start=2)
    assert error.expected.startswith("8 rows ")
    assert "start 2" in error.expected


@pytest.mark.case("R24")
@pytest.mark.parametrize(("start", "rows"), [(0, 4), (1, 3), (3, 1), (4, 0)])
def test_rows_from_a_start_on(start: int, rows: int) -> None:
    """All rows, and the tail only."""
    assert len(_reply(routed_experts=_rows(rows)).routes_for(prompt=3, start=start)) == rows


@pytest.mark.parametrize("shape", [(4, 0, 3), (4, 2, 0), (4, 0, 0)])
def test_rows_of_nothing_are_refused(shape: tuple[int, int, int]) -> None:
    error = _refused(_reply(routed_experts=np.zeros(shape, np.uint8)), prompt=3)
    assert error.field == "routed_experts.shape"
    aborted = _reply(token_ids=_tokens(0), routed_experts=np.zeros(shape, np.uint8))
    assert _refused(aborted, prompt=4).field == "routed_experts.shape"


@pytest.mark.parametrize("shape", [(0, 2, 3), (0, 0, 0), (0, 0, 3)])
def test_no_rows_of_anything(shape: tuple[int, int, int]) -> None:
    reply = _reply(token_ids=_tokens(1), routed_experts=np.zeros(shape, np.uint8))
    assert len(reply.routes_for(prompt=0)) == 0


# What the server counted.


@pytest.mark.case("R60")
@pytest.mark.parametrize("counted", [2, 4, 0])
def test_a_prompt_that_the_server_counted_otherwise(counted: int) -> None:
    """Right by its number of rows, but of another prompt."""
    error = _refused(_reply(prompt_tokens=counted), prompt=3)
    assert (error.field, error.got) == ("prompt_tokens", str(counted))
    assert _refused(_reply(prompt_tokens=counted, routed_experts=None), prompt=3).field == "prompt_tokens"


@pytest.mark.case("R78")
@pytest.mark.parametrize(("counted", "sent"), [(1, 0), (2, 1), (1, 2)])
def test_a_start_that_nobody_asked_for(counted: int, sent: int) -> None:
    error = _refused(_reply(start=counted, routed_experts=_rows(4 - counted)), prompt=3, start=sent)
    assert (error.field, error.got) == ("start", str(counted))


@pytest.mark.case("R78")
def test_a_start_that_the_engine_ignored() -> None:
    """All rows came, as the server says or as their number does."""
    for counted in (0, None):
        assert len(_reply(start=counted, routed_experts=_rows(4)).routes_for(prompt=3, start=1)) == 4
    # It says that they are all, and they are not.
    assert _refused(_reply(start=0, routed_experts=_rows(3)), prompt=3, start=1).field == "routed_experts.shape"
    assert _refused(_reply(start=1, routed_experts=_rows(4)), prompt=3, start=1).field == "routed_experts.shape"


def test_what_the_server_counted_as_the_client_did() -> None:
    reply = _reply(prompt_tokens=3, start=1, routed_experts=_rows(3))
    assert len(reply.routes_for(prompt=3, start=1)) == 3
    assert len(_reply(prompt_tokens=3, start=0).routes_for(prompt=3)) == 4


# No routes.


@pytest.mark.case("R07", "R54")
@pytest.mark.parametrize("finish_reason", ["stop", "length", None])
def test_missing_routes(finish_reason: str | None) -> None:
    error = _refused(_reply(routed_experts=None, finish_reason=finish_reason), prompt=3)
    assert type(error) is MissingRoutesError
    assert error.field == "routed_experts"
    assert "enable-return-routed-experts" in error.hint
    assert "a router strips the reply: see skyrl-r3 status --server" in error.hint
    assert "generator.inference_engine.enable_return_routed_experts" in error.hint
    assert repr(finish_reason) in error.got


def test_no_tokens_and_no_routes() -> None:
    routes = _reply(token_ids=_tokens(0), routed_experts=None).routes_for(prompt=3)
    assert routes.shape == (0, 0, 0)
    assert routes.dtype == np.uint8


def test_a_reply_is_not_changed() -> None:
    with pytest.raises(AttributeError):
        _reply().token_ids = _tokens(1)  # type: ignore[misc]


# Where an error is. The client knows the server, the codec the row.


@pytest.mark.parametrize("kind", [R3Error, CodecError, RouteError, ReplyError, RoutesError, MissingRoutesError])
def test_an_error_becomes_one_of_the_reply(kind: type[R3Error]) -> None:
    more = {"kind": "missing"} if issubclass(kind, RoutesError) else {}
    error = kind("a.b", expected="x", got="y", where="row 1", hint="Look there.", **more)
    placed = error.at("http://10.0.0.7:8000")
    assert type(placed) is (kind if issubclass(kind, ReplyError) else ReplyError)
    assert (placed.field, placed.expected, placed.got) == ("a.b", "x", "y")
    assert placed.where == "row 1, http://10.0.0.7:8000"
    assert placed.hint == "Look there."
    assert error.where == "row 1"


def test_an_error_keeps_its_own_hint_and_place() -> None:
    error = ReplyError("a", expected="x", got="y", hint="First.")
    assert error.at("s").hint == "First."
    assert error.at("s").where == "s"
    assert error.at("").where == ""
    assert error.at("s").at("t").where == "s, t"


def test_a_long_value_is_cut_once() -> None:
    error = ReplyError("a", expected="x", got="z" * 1_000)
    assert error.at("s").got.startswith("z" * 200)
    assert len(error.at("s").at("t").got) < 300
