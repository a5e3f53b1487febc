"""``skyrl_r3.reply``: the reply of the generate endpoint, written and read."""

from __future__ import annotations

import base64
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import strategies as r3st
from skyrl_r3 import reply
from skyrl_r3.errors import CodecError, MissingRoutesError, R3Error, ReplyError
from skyrl_r3.routes import RoutedExperts

SERVER = "http://10.0.0.7:8000"
PROMPT = [11, 12, 13]
RESPONSE = [21, 22]
IDS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
"""Rows of PROMPT and RESPONSE: 3 + 2 - 1."""


def _body(**changes: Any) -> bytes:
    """A right reply, written without the code under test, with keys of its choice replaced. ``...`` leaves one out."""
    choice = {
        "token_ids": RESPONSE,
        "finish_reason": "stop",
        "logprobs": None,
        "routed_experts": r3st.envelope(IDS),
    } | changes
    return orjson.dumps({"choices": [{key: value for key, value in choice.items() if value is not ...}]})


def _load(body: bytes, prompt: list[int] = PROMPT) -> RoutedExperts:
    parsed, _ = reply.load(body, prompt_token_ids=prompt, where=SERVER)
    return parsed["choices"][0]["routed_experts"]


def _refused(body: bytes, prompt: list[int] = PROMPT) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        reply.load(body, prompt_token_ids=prompt, where=SERVER)
    assert caught.value.where == SERVER
    return caught.value


# Negotiation.


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (["packed"], "packed"),
        (["nested"], "nested"),
        (["packed", "nested"], "packed"),
        (["nested", "packed"], "nested"),
        (["frame/9", "packed", "nested"], "packed"),
        (["", "x", "nested"], "nested"),
        (["packed", "packed"], "packed"),
    ],
)
def test_the_first_known_encoding_is_chosen(wanted: list[str], chosen: str) -> None:
    assert reply.choose_encoding(wanted) == chosen


@pytest.mark.parametrize(
    "wanted", [None, "packed", {}, {"packed": 1}, 5, True, ("packed",), [], [None], ["packed", 1], ["x"], [["packed"]],
               ["PACKED"], ["packed "], ["x"] * 10_000], ids=lambda value: repr(value)[:20]
)  # fmt: skip
def test_other_wishes_are_refused(wanted: Any) -> None:
    with pytest.raises(ReplyError) as caught:
        reply.choose_encoding(wanted)
    assert caught.value.field == "routed_experts_encodings"
    assert len(str(caught.value)) < 500


@given(st.lists(st.text(max_size=3) | st.sampled_from(["packed", "nested"]), max_size=5))
def test_a_choice_is_one_of_the_wishes(wanted: list[str]) -> None:
    known = [name for name in wanted if name in ("packed", "nested")]
    if known:
        assert reply.choose_encoding(wanted) == known[0]
    else:
        with pytest.raises(ReplyError):
            reply.choose_encoding(wanted)


# Logprobs. R20.


def _logprob(value: float | None) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def test_floored_logprobs() -> None:
    """R20: five floored, the rest as it was, as many entries as tokens."""
    tokens = [1, 2, 3, 4, 5, 6]
    entries = [
        {1: _logprob(-0.1), 9: _logprob(-5.0)},
        {2: _logprob(math.nan)},
        {3: _logprob(-math.inf)},
        {4: _logprob(math.inf)},
        {5: None},
        {7: _logprob(-0.5)},
    ]
    content, floored = reply.floored_logprobs(tokens, entries)
    assert content == [{"logprob": -0.1}, *[{"logprob": -9999.0}] * 5]
    assert floored == 5


@pytest.mark.parametrize("entry", [None, {}, {1: _logprob(None)}, {1: None}, {2: _logprob(-1.0)}], ids=repr)
def test_a_missing_logprob_is_floored(entry: Any) -> None:
    assert reply.floored_logprobs([1, 1], [entry, {1: _logprob(-2.0)}]) == (
        [{"logprob": -9999.0}, {"logprob": -2.0}],
        1,
    )


@pytest.mark.parametrize("value", [0.0, -0.0, -9999.0, -1e300, 5.0, -5])
def test_finite_logprobs_stay(value: float) -> None:
    content, floored = reply.floored_logprobs([1], [{1: _logprob(value)}])
    assert content == [{"logprob": value}]
    assert floored == 0


@given(st.lists(st.floats() | st.none()))
def test_floored_logprobs_are_numbers_in_json(values: list[float | None]) -> None:
    """R22: neither null nor a bare NaN comes out."""
    tokens = list(range(len(values)))
    entries = [{token: _logprob(value)} for token, value in zip(tokens, values, strict=True)]
    content, floored = reply.floored_logprobs(iter(tokens), iter(entries))
    assert floored == sum(value is None or not math.isfinite(value) for value in values)
    body = reply.dump_packed(token_ids=tokens, finish_reason=None, logprobs=content, routed_experts=None)
    got = [entry["logprob"] for entry in orjson.loads(body)["choices"][0]["logprobs"]["content"]]
    assert got == [-9999.0 if value is None or not math.isfinite(value) else value for value in values]


# Writing.


def test_exact_bytes_of_a_reply() -> None:
    body = reply.dump_packed(
        token_ids=[5, 6],
        finish_reason="stop",
        logprobs=[{"logprob": -0.5}, {"logprob": -9999.0}],
        routed_experts=np.array([[[256, 32767]]], np.uint16),
    )
    assert body == (
        b'{"choices":[{"token_ids":[5,6],"finish_reason":"stop",'
        b'"logprobs":{"content":[{"logprob":-0.5},{"logprob":-9999.0}]},'
        b'"routed_experts":{"data":"AAH/fw==","shape":[1,1,2],"dtype":"int16"}}]}'
    )


def test_exact_bytes_without_logprobs_and_routes() -> None:
    body = reply.dump_packed(token_ids=[], finish_reason=None, logprobs=None, routed_experts=None)
    assert body == b'{"choices":[{"token_ids":[],"finish_reason":null,"logprobs":null,"routed_experts":null}]}'


@given(
    routes=r3st.routes(),
    token_ids=st.lists(st.integers(0, 2**31 - 1)),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "abort"]) | st.text(max_size=8),
    logprobs=st.none() | st.lists(st.fixed_dictionaries({"logprob": st.floats(-9999, 0)}), max_size=3),
)
def test_a_reply_is_what_orjson_writes(
    routes: r3st.Routes, token_ids: list[int], finish_reason: str | None, logprobs: Any
) -> None:
    dtype = r3st.wire_dtype(int(routes.values.max(initial=0)))
    whole = {
        "choices": [
            {
                "token_ids": token_ids,
                "finish_reason": finish_reason,
                "logprobs": None if logprobs is None else {"content": logprobs},
                "routed_experts": r3st.envelope(routes.values.astype(dtype)),
            }
        ]
    }
    body = reply.dump_packed(
        token_ids=token_ids, finish_reason=finish_reason, logprobs=logprobs, routed_experts=routes.given
    )
    assert body == orjson.dumps(whole)


@pytest.mark.parametrize(
    "wrong", ["AAEC", [[[1]]], np.zeros((2, 2)), np.full((1, 1, 1), -1)], ids=["str", "list", "2d", "-1"]
)
def test_routes_that_are_none_are_not_written(wrong: Any) -> None:
    """R25: no double base64."""
    with pytest.raises(CodecError) as caught:
        reply.dump_packed(token_ids=[1], finish_reason=None, logprobs=None, routed_experts=wrong)
    assert caught.value.field == "routed_experts"


# Reading.


def test_rows_without_layers_are_refused() -> None:
    body = reply.dump_packed(
        token_ids=[7], finish_reason="stop", logprobs=None, routed_experts=np.zeros((2, 0, 8), np.uint8)
    )
    with pytest.raises(ReplyError) as caught:
        reply.load(body, prompt_token_ids=[1, 2], where=SERVER)
    assert caught.value.field == "routed_experts.shape"


@given(r3st.ids().filter(lambda ids: ids.size or not len(ids)), st.data())
def test_what_is_written_is_read(ids: r3st.Array, data: st.DataObject) -> None:
    """Row rule: prompt + response - 1."""
    response = data.draw(st.integers(1, len(ids) + 1))
    prompt = list(range(len(ids) + 1 - response))
    tokens = list(range(1000, 1000 + response))
    body = reply.dump_packed(token_ids=tokens, finish_reason="stop", logprobs=None, routed_experts=ids)
    parsed, encoding = reply.load(body, prompt_token_ids=prompt, where=SERVER)
    assert encoding == "packed"
    routes = parsed["choices"][0]["routed_experts"]
    assert type(routes) is RoutedExperts
    r3st.assert_canonical(routes.ids, ids.astype(np.int64))
    assert routes.token_ids.tolist() == [*prompt, *tokens][: len(ids)]
    assert routes.token_ids.dtype == np.int32
    plain = orjson.loads(body)["choices"][0]
    assert {key: value for key, value in parsed["choices"][0].items() if key != "routed_experts"} == {
        key: value for key, value in plain.items() if key != "routed_experts"
    }


def test_nested_lists_are_read() -> None:
    """R19: the form of a stock server is read, and named as what it is."""
    parsed, encoding = reply.load(_body(routed_experts=IDS.tolist()), prompt_token_ids=PROMPT, where=SERVER)
    assert encoding == "nested"
    r3st.assert_canonical(parsed["choices"][0]["routed_experts"].ids, IDS.astype(np.int64))
    assert parsed["choices"][0]["routed_experts"].token_ids.tolist() == [11, 12, 13, 21]


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("nested", [False, True])
def test_another_number_of_rows_is_refused(rows: int, nested: bool) -> None:
    """R60"""
    ids = np.zeros((rows, 2, 3), np.uint8)
    error = _refused(_body(routed_experts=ids.tolist() if nested else r3st.envelope(ids)))
    assert type(error) is ReplyError
    assert error.field == "routed_experts.shape"
    assert error.expected.startswith("4 rows ")
    assert error.got == f"{rows} rows"
    assert error.hint


def test_a_longer_prompt_than_was_sent_is_refused() -> None:
    """R60: an image that became many tokens at the server."""
    assert _refused(_body(), prompt=[*PROMPT, 14]).expected.startswith("5 rows ")


def test_one_sampled_token() -> None:
    ids = np.zeros((3, 1, 1), np.uint8)
    assert len(_load(_body(token_ids=[5], routed_experts=r3st.envelope(ids)))) == 3
    assert len(_load(_body(token_ids=[5], routed_experts=r3st.envelope(ids[:0])), prompt=[])) == 0


# No tokens. An aborted request trains nothing, whatever was captured.


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_no_tokens(rows: int) -> None:
    ids = np.arange(rows, dtype=np.uint8).reshape(rows, 1, 1)
    routes = _load(_body(token_ids=[], finish_reason="abort", routed_experts=r3st.envelope(ids)))
    assert routes.ids[:, 0, 0].tolist() == list(range(rows))
    assert routes.token_ids.tolist() == PROMPT[:rows]


@pytest.mark.parametrize("rows", [4, 9])
def test_no_tokens_but_more_rows_than_the_prompt_has(rows: int) -> None:
    ids = np.zeros((rows, 1, 1), np.uint8)
    assert _refused(_body(token_ids=[], routed_experts=r3st.envelope(ids))).field == "routed_experts.shape"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"finish_reason": ...}, "finish_reason"),
        ({"logprobs": "x"}, "logprobs.content"),
        ({"logprobs": {"content": "x"}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": None}, {"logprob": 0.0}]}}, "logprobs.content"),
        ({"logprobs": {"content": [{}, {}]}}, "logprobs.content"),
        ({"logprobs": {"content": [-0.5, -0.5]}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": -0.5}]}}, "logprobs.content"),
        ({"token_ids": [5, -1]}, "token_ids"),
    ],
    ids=repr,
)
def test_what_else_skyrl_takes_from_a_reply_is_checked(change: dict[str, Any], field: str) -> None:
    assert _refused(_body(**change)).field == field


def test_an_error_in_the_place_of_a_reply_is_quoted() -> None:
    """A proxy may answer 200 with an error inside."""
    assert "upstream is gone" in _refused(b'{"error":{"message":"upstream is gone"}}').got


def test_a_broken_body_is_not_kept_alive_by_its_error() -> None:
    error = _refused(b"[" + b" " * 100_000)
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize("routes", [None, ..., []])
def test_no_tokens_and_no_routes(routes: Any) -> None:
    assert len(_load(_body(token_ids=[], routed_experts=routes))) == 0


def test_no_tokens_and_a_wrong_envelope() -> None:
    error = _refused(_body(token_ids=[], routed_experts=r3st.envelope(IDS) | {"dtype": "uint16"}))
    assert error.field == "routed_experts.dtype"


# No routes. R07, R54.


@pytest.mark.parametrize("routes", [None, ...])
@pytest.mark.parametrize("finish_reason", ["stop", "length", None, ...])
def test_missing_routes_name_the_flag_of_the_server(routes: Any, finish_reason: Any) -> None:
    """R07, R54: the first reply says what is wrong, never zeros and no None in a batch."""
    error = _refused(_body(routed_experts=routes, finish_reason=finish_reason))
    assert type(error) is MissingRoutesError
    assert error.field == "routed_experts"
    assert "enable-return-routed-experts" in error.hint
    assert "generator.inference_engine.enable_return_routed_experts" in error.hint
    assert repr(None if finish_reason is ... else finish_reason) in error.got


# Wrong replies.


@given(r3st.malformed_envelopes())
def test_malformed_envelopes_are_refused_by_field(malformed: r3st.Malformed) -> None:
    """Those that JSON can carry."""
    try:
        body = _body(routed_experts=malformed.envelope)
    except TypeError:
        return
    arrived = orjson.loads(body)["choices"][0]["routed_experts"]
    if arrived == []:
        return  # nested lists of no rows: right in themselves
    error = _refused(body)
    assert error.field.startswith("routed_experts")
    if arrived == malformed.envelope and arrived is not None:
        assert error.field == malformed.field
    assert isinstance(error.__cause__, CodecError) or isinstance(error, MissingRoutesError)


def _npy() -> str:
    buffer = io.BytesIO()
    np.save(buffer, IDS)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(_npy(), id="npy"),
        pytest.param(base64.b85encode(IDS.tobytes()).decode(), id="base85"),
        pytest.param(base64.b64encode(IDS.tobytes()).decode(), id="base64"),
        pytest.param("", id="empty-str"),
        pytest.param(0, id="int"),
        pytest.param(1.5, id="float"),
        pytest.param(True, id="bool"),
    ],
)
def test_other_encodings_are_named(other: Any) -> None:
    """R48: the error says what arrived and that it is not read."""
    error = _refused(_body(routed_experts=other))
    assert error.field == "routed_experts"
    assert error.hint
    if isinstance(other, str):
        assert f"{len(other)} characters" in error.got


@pytest.mark.parametrize(
    "other",
    [
        {"data": base64.b85encode(IDS.tobytes()).decode(), "shape": [4, 2, 3]},
        {"data": base64.b64encode(IDS.tobytes()).decode(), "shape": [4, 2, 3]},
        {"data": base64.b64encode(IDS.tobytes()).decode(), "shape": [4, 2, 3], "start": 0},
        {"data": base64.b64encode(IDS.tobytes()).decode(), "shape": [4, 2, 3], "dtype": "uint8", "start": 0},
        {},
    ],
)
def test_other_objects_are_refused(other: Any) -> None:
    """R35, R48: no dtype is not uint8."""
    assert _refused(_body(routed_experts=other)).field == "routed_experts"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nope",
        b"\xff\xfe",
        b"\x93NUMPY",
        b'{"choices":[NaN]}',
        b'{"choices":[{"token_ids":[1],"logprobs":{"content":[{"logprob":NaN}]}}]}',
        b'{"choices":[{"token_ids":[1e999]}]}',
        b'{"choices":[]}}',
        b'{"choices":["\xff"]}',
        b"[" * 5000,
        b"<html>502 Bad Gateway</html>",
        json.dumps({"choices": [math.inf]}).encode(),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json(body: bytes) -> None:
    """R22: also the bare NaN that the standard library writes."""
    error = _refused(body)
    assert error.field == "reply"
    assert f"{len(body)} bytes" in error.got


@pytest.mark.parametrize(
    "parsed",
    [None, True, 5, "x", [], [{}], {}, {"choice": []}, {"error": {"message": "x"}}, *(
        {"choices": wrong} for wrong in (None, True, 5, "x", {}, {"0": {}}, [], [None], [[]], ["x"], [5], [None, {}])
    )],
    ids=repr,
)  # fmt: skip
def test_wrong_choices(parsed: Any) -> None:
    assert _refused(orjson.dumps(parsed)).field == "choices"


@pytest.mark.parametrize(
    "token_ids",
    [..., None, True, 5, "21,22", {}, {"0": 21, "1": 22}, [None, None], [1.0, 2.0], [1, 2.5], ["21", "22"],
     [[21], [22]], [{}, {}], [2**31, 1], [1, -(2**31) - 1], [2**63, 1]],
    ids=repr,
)  # fmt: skip
def test_wrong_token_ids(token_ids: Any) -> None:
    assert _refused(_body(token_ids=token_ids)).field == "token_ids"


# The text of JSON. R44: the same result as parsing it, whatever it looks like.


def _loads_like_json(body: bytes) -> None:
    """What :func:`reply.load` reads is what a parser reads and the standard library decodes."""
    envelope = json.loads(body)["choices"][0]["routed_experts"]
    raw = base64.b64decode(envelope["data"])
    want = np.frombuffer(raw, envelope["dtype"]).reshape(envelope["shape"]).astype(np.int64)
    r3st.assert_canonical(_load(body).ids, want)


def test_order_of_keys_and_white_space() -> None:
    choice = orjson.loads(_body())["choices"][0]
    routes = choice["routed_experts"]
    turned = {key: choice[key] for key in reversed(choice)} | {
        "routed_experts": {key: routes[key] for key in ("shape", "dtype", "data")}
    }
    for text in (
        json.dumps({"choices": [turned]}),
        json.dumps({"choices": [turned]}, indent=4),
        json.dumps({"choices": [choice]}, separators=(" , ", " : ")),
        "\n\t " + json.dumps({"model": "m", "choices": [turned], "x": None}) + "\r\n",
        json.dumps({"choices": [choice]}).replace("routed_experts", "\\u0072outed_experts"),
        json.dumps({"choices": [choice]}).replace("AAEC", "\\u0041AEC").replace("/", "\\/"),
    ):
        _loads_like_json(text.encode())


def test_keys_that_look_like_routes() -> None:
    choice = orjson.loads(_body())["choices"][0]
    decoy = r3st.envelope(np.zeros((4, 2, 3), np.uint8))
    for extra in (
        {"x_routed_experts": decoy},
        {"finish_reason": '"routed_experts":{"data":"'},
        {"note": {"routed_experts": decoy}},
    ):
        _loads_like_json(orjson.dumps({"choices": [{**extra, **choice, **extra}]}))


def test_keys_that_come_twice() -> None:
    """JSON parsers take the last one; so do we, for the tokens and the routes alike."""
    last = orjson.dumps(r3st.envelope(IDS))
    first = orjson.dumps(r3st.envelope(IDS + 1))
    tokens = b'{"choices":[],"choices":[{"finish_reason":"stop","token_ids":[1],'
    body = tokens + b'"routed_experts":%s,"routed_experts":%s,"token_ids":[1,2]}]}'
    _loads_like_json(body % (first, last))
    assert _load(body % (first, last)).ids.tolist() == IDS.tolist()
    assert type(_refused(body % (first, b"null"))) is MissingRoutesError
    twice = b'{"choices":[{"finish_reason":null,"token_ids":[1,2],"routed_experts":{"data":"AA==",' + last[1:] + b"}]}"
    assert _load(twice).ids.tolist() == IDS.tolist()


# Fuzzing: whatever the bytes, routes of the right number of rows or an R3Error.


def _attempt(body: bytes, prompt: list[int]) -> Any:
    try:
        parsed, encoding = reply.load(body, prompt_token_ids=prompt, where=SERVER)
    except R3Error as error:
        return error
    assert encoding in ("packed", "nested")
    return parsed


def _check(body: bytes, prompt: list[int]) -> Any:
    parsed = _attempt(body, prompt)
    if isinstance(parsed, R3Error):
        assert isinstance(parsed, ReplyError)
        assert parsed.where == SERVER
        return None
    choice = parsed["choices"][0]
    routes, tokens = choice["routed_experts"], choice["token_ids"]
    assert type(routes) is RoutedExperts
    assert all(type(token) is int for token in tokens)
    r3st.assert_canonical(routes.ids, routes.ids.astype(np.int64))
    rows = len(prompt) + len(tokens) - 1
    assert len(routes) == rows if tokens else len(routes) <= len(prompt)
    assert routes.token_ids.tolist() == [*prompt, *tokens][: len(routes)]
    return routes


@given(st.data())
def test_a_mutated_reply_is_refused_or_valid(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(BODIES))
    _check(data.draw(r3st.mutations(body)), PROMPT)


BODIES = [
    _body(),
    _body(routed_experts=r3st.envelope(IDS.astype(np.int16) + 250)),
    _body(routed_experts=IDS.tolist()),
    _body(routed_experts=[]),
    _body(token_ids=[]),
    reply.dump_packed(token_ids=RESPONSE, finish_reason="stop", logprobs=[{"logprob": -1.0}] * 2, routed_experts=IDS),
]


@pytest.mark.parametrize("body", BODIES[:3], ids=["uint8", "int16", "nested"])
def test_every_cut_and_every_flipped_bit(body: bytes) -> None:
    """All single accidents of a small reply: cut short, a byte lost, a bit flipped."""
    survivors = 0
    for at in range(len(body)):
        assert _check(body[:at], PROMPT) is None
        survivors += _check(body[:at] + body[at + 1 :], PROMPT) is not None
        for bit in range(8):
            survivors += _check(body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :], PROMPT) is not None
    assert survivors  # flips inside the ids and other fields cannot be seen here


@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    _check(body, PROMPT)


JSON = r3st.json_values()


@given(
    st.one_of(
        JSON,
        st.fixed_dictionaries({"choices": JSON}),
        st.fixed_dictionaries({"choices": st.lists(JSON, max_size=2)}),
        st.builds(
            lambda **choice: {"choices": [choice]},
            token_ids=st.lists(st.integers(-2, 2**31), max_size=3) | JSON,
            routed_experts=st.builds(
                dict,
                data=st.sampled_from(["", "AAAA", "AAAAAAAA"]) | JSON,
                shape=st.lists(st.integers(0, 4), min_size=3, max_size=3) | JSON,
                dtype=st.sampled_from(["uint8", "int16", "int32"]) | JSON,
            )
            | JSON,
            finish_reason=JSON,
            logprobs=JSON,
        ),
    ),
    st.integers(0, 3),
)
def test_any_json(value: Any, prompt: int) -> None:
    _check(orjson.dumps(value), list(range(prompt)))


# Inputs that were once let through, or raised something else.


@pytest.mark.parametrize("shape", [[2**63, 0, 8], [2**62, 0, 8], [4, 0, 2**63]], ids=repr)
@pytest.mark.parametrize("token_ids", [RESPONSE, []], ids=["tokens", "no-tokens"])
def test_huge_dimensions_of_no_bytes(shape: list[int], token_ids: list[int]) -> None:
    """R46, over the wire: orjson reads integers of 64 bits."""
    body = _body(token_ids=token_ids, routed_experts={"data": "", "shape": shape, "dtype": "uint8"})
    assert _refused(body).field == "routed_experts.shape"


@pytest.mark.parametrize("token_ids", [[True, False], [21, True], [False, 22]], ids=repr)
def test_a_bool_is_no_token_id(token_ids: list[Any]) -> None:
    assert _refused(_body(token_ids=token_ids)).field == "token_ids"


def test_a_bool_is_no_id() -> None:
    nested = IDS.tolist()
    nested[2][1][0] = True
    assert _refused(_body(routed_experts=nested)).field == "routed_experts"


def test_a_long_reply_does_not_end_up_in_the_message() -> None:
    long = "x" * 1_000_000
    for body in (
        _body(routed_experts=None, finish_reason=long),
        _body(routed_experts={long: 1}),
        _body(routed_experts=long),
        _body(routed_experts=r3st.envelope(IDS) | {"dtype": long}),
        _body(token_ids=long),
        orjson.dumps({"choices": long}),
        long.encode(),
    ):
        assert len(str(_refused(body))) < 2_000
