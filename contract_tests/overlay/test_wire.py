"""``skyrl_r3.wire``: a reply in any encoding, read and checked against the request, and how one is chosen."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, oracle
from contract_tests import strategies as r3st
from skyrl_r3 import frame, packed, wire
from skyrl_r3.errors import CodecError, MissingRoutesError, R3Error, ReplyError
from skyrl_r3.reply import Reply

PROMPT = 3
RESPONSE = [21, 22]
IDS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
"""Rows of a prompt of 3 and RESPONSE: 3 + 2 - 1."""


def _body(**changes: Any) -> bytes:
    """A right reply, written without the code under test, with keys of its choice replaced. ``...`` leaves one out."""
    choice = {
        "token_ids": RESPONSE,
        "finish_reason": "stop",
        "logprobs": None,
        "routed_experts": oracle.envelope(IDS),
    } | changes
    return orjson.dumps({"choices": [{key: value for key, value in choice.items() if value is not ...}]})


def _load(body: bytes, prompt: int = PROMPT) -> tuple[Reply, str]:
    """What a client does with a body: read it, and take the routes that it asked for."""
    reply, encoding = wire.load(body)
    reply.routes_for(prompt=prompt)
    return reply, encoding


def _routes(body: bytes, prompt: int = PROMPT) -> r3st.Array:
    return wire.load(body)[0].routes_for(prompt=prompt)


def _refused(body: bytes, prompt: int = PROMPT) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        _load(body, prompt)
    assert len(str(caught.value)) < 2_000
    return caught.value


# Negotiation.

WRITTEN = ("frame/1", "packed", "nested")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (["packed"], "packed"),
        (["nested"], "nested"),
        (["frame/1"], "frame/1"),
        (["packed", "nested"], "packed"),
        (["nested", "packed"], "nested"),
        (["packed", "frame/1"], "packed"),
        (["frame/1", "packed", "nested"], "frame/1"),
        (["frame/9", "packed", "nested"], "packed"),
        (["", "x", "nested"], "nested"),
        (["packed", "packed"], "packed"),
    ],
)
def test_the_first_known_encoding_is_chosen(wanted: list[str], chosen: str) -> None:
    """In the client's order, not in the server's."""
    assert wire.choose_encoding(wanted, WRITTEN) == chosen
    assert wire.choose_encoding(wanted, WRITTEN[::-1]) == chosen


def test_a_server_that_does_not_write_them_all() -> None:
    """SkyRL 0.4's has no nested lists."""
    assert wire.choose_encoding(["nested", "packed"], ("frame/1", "packed")) == "packed"
    with pytest.raises(ReplyError) as caught:
        wire.choose_encoding(["nested"], ("frame/1", "packed"))
    assert caught.value.field == "routed_experts_encodings"


@pytest.mark.parametrize(
    "wanted", [None, "packed", {}, {"packed": 1}, 5, True, ("packed",), [], [None], ["packed", 1], ["x"], [["packed"]],
               ["PACKED"], ["packed "], ["frame"], ["frame/2"], ["x"] * 10_000], ids=lambda value: repr(value)[:20]
)  # fmt: skip
def test_other_wishes_are_refused(wanted: Any) -> None:
    with pytest.raises(ReplyError) as caught:
        wire.choose_encoding(wanted, WRITTEN)
    assert caught.value.field == "routed_experts_encodings"
    assert len(str(caught.value)) < 500


NAMES = ["frame/1", "packed", "nested"]


@given(
    st.lists(st.text(max_size=3) | st.sampled_from(NAMES), max_size=5),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
)
def test_a_choice_is_one_of_the_wishes(wanted: list[str], written: list[str]) -> None:
    known = [name for name in wanted if name in written]
    if known:
        assert wire.choose_encoding(wanted, written) == known[0]
    else:
        with pytest.raises(ReplyError):
            wire.choose_encoding(wanted, written)


def test_the_names_of_the_wire() -> None:
    """Processes of other versions have them too."""
    assert wire.ENCODINGS == WRITTEN
    assert wire.ENCODINGS_FIELD == "routed_experts_encodings"
    assert wire.START_FIELD == "routed_experts_prompt_start"
    assert wire.GENERATE_PATH == "/skyrl/v1/generate"
    assert frame.CONTENT_TYPE == "application/vnd.skyrl-r3.frame"


# Reading.


@pytest.mark.parametrize("encoding", WRITTEN)
@given(ids=r3st.ids().filter(lambda ids: ids.size or not len(ids)), data=st.data())
def test_what_is_written_is_read(encoding: str, ids: r3st.Array, data: st.DataObject) -> None:
    """Row rule: prompt + response - 1 - start."""
    response = data.draw(st.integers(1, len(ids) + 1))
    start = data.draw(st.integers(0, 3))
    prompt = len(ids) + 1 - response + start
    tokens = np.arange(1000, 1000 + response, dtype=np.int32)
    logprobs = data.draw(st.none() | st.just(-np.arange(response, dtype=np.float64)))
    reply = Reply(token_ids=tokens, finish_reason="stop", logprobs=logprobs, routed_experts=ids)
    if encoding == "frame/1":
        body = frame.dump(reply)
    elif encoding == "packed":
        body = packed.dump(reply)
    else:
        content = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs.tolist()]}
        body = _body(token_ids=tokens.tolist(), logprobs=content, routed_experts=ids.tolist())
    got, found = wire.load(body)
    assert found == encoding
    routes = got.routes_for(prompt=prompt, start=start)
    assert routes.dtype.name == oracle.smallest(int(ids.max(initial=0)))
    assert routes.tolist() == ids.tolist()
    # No rows in nested lists do not say how many layers there are.
    assert routes.shape == (ids.shape if len(ids) or encoding != "nested" else (0, 0, 0))
    assert got.token_ids.dtype == np.int32
    assert got.token_ids.tolist() == tokens.tolist()
    assert got.finish_reason == "stop"
    assert (got.logprobs is None) is (logprobs is None)
    assert got.logprobs is None or got.logprobs.tolist() == [-float(i) for i in range(response)]


@pytest.mark.parametrize("encoding", WRITTEN)
def test_a_reply_does_not_depend_on_its_encoding(encoding: str) -> None:
    reply = Reply(
        token_ids=np.array(RESPONSE, np.int32),
        finish_reason="length",
        logprobs=np.array([-0.5, -9999.0]),
        routed_experts=IDS,
    )
    nested = {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}
    bodies = {
        "frame/1": frame.dump(reply),
        "packed": packed.dump(reply),
        "nested": _body(routed_experts=IDS.tolist(), finish_reason="length", logprobs=nested),
    }
    got, found = wire.load(bodies[encoding])
    assert found == encoding
    assert got.finish_reason == "length"
    assert got.token_ids.tolist() == RESPONSE
    assert got.logprobs is not None
    assert got.logprobs.tolist() == [-0.5, -9999.0]
    assert got.routes_for(prompt=PROMPT).tolist() == IDS.tolist()


@pytest.mark.case("R19")
def test_nested_lists_are_read() -> None:
    """The form of a stock server is read, and named as what it is."""
    reply, encoding = _load(_body(routed_experts=IDS.tolist()))
    assert encoding == "nested"
    oracle.assert_canonical(reply.routes_for(prompt=PROMPT), IDS.astype(np.int64))


def test_rows_without_layers_are_refused() -> None:
    body = _body(token_ids=[7], routed_experts=oracle.envelope(np.zeros((2, 0, 8), np.uint8)))
    assert _refused(body, prompt=2).field == "routed_experts.shape"


@pytest.mark.case("R60")
@pytest.mark.parametrize("rows", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("nested", [False, True])
def test_another_number_of_rows_is_refused(rows: int, nested: bool) -> None:
    ids = np.zeros((rows, 2, 3), np.uint8)
    error = _refused(_body(routed_experts=ids.tolist() if nested else oracle.envelope(ids)))
    assert isinstance(error, ReplyError)
    assert error.field == "routed_experts.shape"
    assert error.expected.startswith("4 rows ")
    assert error.got == f"{rows} rows"
    assert error.hint


@pytest.mark.case("R60")
def test_a_longer_prompt_than_was_sent_is_refused() -> None:
    """An image that became many tokens at the server."""
    assert _refused(_body(), prompt=PROMPT + 1).expected.startswith("5 rows ")


def test_one_sampled_token() -> None:
    ids = np.zeros((3, 1, 1), np.uint8)
    assert len(_routes(_body(token_ids=[5], routed_experts=oracle.envelope(ids)))) == 3
    assert len(_routes(_body(token_ids=[5], routed_experts=oracle.envelope(ids[:0])), prompt=0)) == 0


# No tokens. An aborted request trains nothing, whatever was captured.


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_no_tokens(rows: int) -> None:
    ids = np.arange(rows, dtype=np.uint8).reshape(rows, 1, 1)
    routes = _routes(_body(token_ids=[], finish_reason="abort", routed_experts=oracle.envelope(ids)))
    assert routes[:, 0, 0].tolist() == list(range(rows))


@pytest.mark.parametrize("rows", [4, 9])
def test_no_tokens_but_more_rows_than_the_prompt_has(rows: int) -> None:
    ids = np.zeros((rows, 1, 1), np.uint8)
    assert _refused(_body(token_ids=[], routed_experts=oracle.envelope(ids))).field == "routed_experts.shape"


@pytest.mark.parametrize("routes", [None, ..., []])
def test_no_tokens_and_no_routes(routes: Any) -> None:
    assert len(_routes(_body(token_ids=[], routed_experts=routes))) == 0


def test_no_tokens_and_a_wrong_envelope() -> None:
    error = _refused(_body(token_ids=[], routed_experts=oracle.envelope(IDS) | {"dtype": "uint16"}))
    assert error.field == "routed_experts.dtype"


# What else SkyRL takes from a reply.


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"finish_reason": ...}, "finish_reason"),
        ({"finish_reason": 5}, "finish_reason"),
        ({"finish_reason": True}, "finish_reason"),
        ({"finish_reason": ["stop"]}, "finish_reason"),
        ({"finish_reason": {"type": "stop"}}, "finish_reason"),
        ({"logprobs": "x"}, "logprobs.content"),
        ({"logprobs": 5}, "logprobs.content"),
        ({"logprobs": False}, "logprobs.content"),
        ({"logprobs": []}, "logprobs.content"),
        ({"logprobs": [{"logprob": -0.5}]}, "logprobs.content"),
        ({"logprobs": {"content": "x"}}, "logprobs.content"),
        ({"logprobs": {"content": ""}}, "logprobs.content"),
        ({"logprobs": {"content": {}}}, "logprobs.content"),
        ({"logprobs": {"content": {"logprob": -0.5}}}, "logprobs.content"),
        ({"logprobs": {"content": None}}, "logprobs.content"),
        ({"logprobs": {"content": 0}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": None}, {"logprob": 0.0}]}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": True}, {"logprob": 0.0}]}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": "0"}, {"logprob": 0.0}]}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": [0.5]}, {"logprob": [0.5]}]}}, "logprobs.content"),
        ({"logprobs": {"content": [{}, {}]}}, "logprobs.content"),
        ({"logprobs": {"content": [[], []]}}, "logprobs.content"),
        ({"logprobs": {"content": [None, None]}}, "logprobs.content"),
        ({"logprobs": {"content": ["logprob", "logprob"]}}, "logprobs.content"),
        ({"logprobs": {"content": [-0.5, -0.5]}}, "logprobs.content"),
        ({"logprobs": {"content": [{"logprob": -0.5}]}}, "logprobs"),
        ({"logprobs": {"content": [{"logprob": -0.5}] * 3}}, "logprobs"),
        ({"token_ids": [5, -1]}, "token_ids"),
        ({"token_ids": [-1], "routed_experts": oracle.envelope(IDS[:3])}, "token_ids"),
    ],
    ids=repr,
)
def test_what_else_skyrl_takes_from_a_reply_is_checked(change: dict[str, Any], field: str) -> None:
    assert _refused(_body(**change)).field == field
    if field == "logprobs.content":
        assert _refused(_body(**change, token_ids=[], routed_experts=[])).field == field


@pytest.mark.parametrize("logprobs", [{}, {"content": []}, None, ...], ids=repr)
def test_no_logprobs(logprobs: Any) -> None:
    """SkyRL's client takes an empty list for none."""
    assert _load(_body(logprobs=logprobs))[0].logprobs is None


@pytest.mark.parametrize(
    "values", [[-0.5, -9999.0], [-5, 0], [0.0, -0.0], [2**63, -(2**63)], [-3.4e38, 5e-324]], ids=repr
)
def test_logprobs_that_are_read(values: list[float]) -> None:
    content = [{"logprob": value, "token": "x", "top_logprobs": [{"logprob": None}]} for value in values]
    logprobs = _load(_body(logprobs={"content": content}))[0].logprobs
    assert logprobs is not None
    assert logprobs.dtype == np.float64
    assert logprobs.tolist() == [float(value) for value in values]


def test_an_error_in_the_place_of_a_reply_is_quoted() -> None:
    """A proxy may answer 200 with an error inside."""
    assert "upstream is gone" in _refused(b'{"error":{"message":"upstream is gone"}}').got


def test_a_broken_body_is_not_kept_alive_by_its_error() -> None:
    error = _refused(b"[" + b" " * 100_000)
    assert error.__cause__ is None
    assert error.__suppress_context__


# No routes.


@pytest.mark.case("R07", "R54")
@pytest.mark.parametrize("routes", [None, ...])
@pytest.mark.parametrize("finish_reason", ["stop", "length", None])
def test_missing_routes_name_the_flag_of_the_server(routes: Any, finish_reason: Any) -> None:
    """The first reply says what is wrong, never zeros and no None in a batch."""
    error = _refused(_body(routed_experts=routes, finish_reason=finish_reason))
    assert type(error) is MissingRoutesError
    assert error.field == "routed_experts"
    assert "enable-return-routed-experts" in error.hint
    assert "generator.inference_engine.enable_return_routed_experts" in error.hint
    assert repr(finish_reason) in error.got


@pytest.mark.case("R07", "R54")
@pytest.mark.parametrize("finish_reason", ["stop", None])
def test_missing_routes_in_a_frame(finish_reason: str | None) -> None:
    reply = Reply(
        token_ids=np.array(RESPONSE, np.int32), finish_reason=finish_reason, logprobs=None, routed_experts=None
    )
    error = _refused(frame.dump(reply))
    assert type(error) is MissingRoutesError
    assert repr(finish_reason) in error.got


def test_neither_routes_nor_a_reason() -> None:
    """Not even SkyRL's own reply: its form is wrong before its routes are missed."""
    assert _refused(_body(routed_experts=None, finish_reason=...)).field == "finish_reason"


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
    if isinstance(arrived, dict | list):
        assert isinstance(error.__cause__, CodecError)


def _npy() -> str:
    buffer = io.BytesIO()
    np.save(buffer, IDS)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.case("R48")
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
    """The error says what arrived and that it is not read."""
    error = _refused(_body(routed_experts=other))
    assert error.field == "routed_experts"
    assert error.hint
    if isinstance(other, str):
        assert f"{len(other)} characters" in error.got


@pytest.mark.case("R35", "R48")
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
    """No dtype is not uint8."""
    assert _refused(_body(routed_experts=other)).field == "routed_experts"


@pytest.mark.case("R22")
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
        # The same in a body with packed routes, of which only the rest is parsed.
        _body()[:-1],
        _body() + b"}",
        _body(finish_reason="NaN").replace(b'"NaN"', b"NaN"),
        _body(finish_reason="-").replace(b'"-"', b'"\xff"'),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json(body: bytes) -> None:
    """Also the bare NaN that the standard library writes."""
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


# The text of JSON: the same result as parsing it, whatever it looks like.


def _loads_like_json(body: bytes) -> None:
    """What is read is what a parser reads and the standard library decodes."""
    envelope = json.loads(body)["choices"][0]["routed_experts"]
    raw = base64.b64decode(envelope["data"])
    want = np.frombuffer(raw, envelope["dtype"]).reshape(envelope["shape"]).astype(np.int64)
    oracle.assert_canonical(_routes(body), want)


@pytest.mark.case("R44")
def test_order_of_keys_and_white_space() -> None:
    choice = orjson.loads(_body())["choices"][0]
    routes = choice["routed_experts"]
    turned = {key: choice[key] for key in reversed(choice)} | {
        "routed_experts": {key: routes[key] for key in ("shape", "dtype", "data")}
    }
    compact = json.dumps({"choices": [choice]}, separators=(",", ":"))
    for text in (
        json.dumps({"choices": [turned]}),
        json.dumps({"choices": [turned]}, indent=4),
        json.dumps({"choices": [choice]}, separators=(" , ", " : ")),
        "\n\t " + json.dumps({"model": "m", "choices": [turned], "x": None}) + "\r\n",
        json.dumps({"choices": [choice]}).replace("routed_experts", "\\u0072outed_experts"),
        json.dumps({"choices": [choice]}).replace("AAEC", "\\u0041AEC").replace("/", "\\/"),
        compact.replace("AAEC", "\\u0041AEC"),
        compact.replace("AAEC", "AAE\\u0043"),
        compact.replace("routed_experts", "\\u0072outed_experts"),
    ):
        _loads_like_json(text.encode())


@pytest.mark.case("R44")
def test_base64_with_escaped_slashes() -> None:
    """Some writers of JSON escape every slash."""
    body = _body(routed_experts=oracle.envelope(np.full((4, 2, 3), 255, np.uint8)))
    assert b"/" in body
    _loads_like_json(body.replace(b"/", b"\\/"))


@pytest.mark.case("R44")
def test_keys_that_look_like_routes() -> None:
    choice = orjson.loads(_body())["choices"][0]
    decoy = oracle.envelope(np.zeros((4, 2, 3), np.uint8))
    for extra in (
        {"x_routed_experts": decoy},
        {'a"routed_experts': decoy},
        {"finish_reason": '"routed_experts":{"data":"'},
        {"note": ',"routed_experts":{"data":"AAAA"'},
        {"note": {"routed_experts": decoy}},
        {"note": [{"routed_experts": decoy}]},
    ):
        _loads_like_json(orjson.dumps({"choices": [{**extra, **choice, **extra}]}))
        _loads_like_json(orjson.dumps({**extra, "choices": [choice]}))
        _loads_like_json(orjson.dumps({"choices": [choice, {**choice, **extra}], **extra}))


def test_the_routes_are_those_of_the_first_choice() -> None:
    other = orjson.loads(_body(routed_experts=oracle.envelope(IDS + 1)))["choices"][0]
    first = orjson.loads(_body())["choices"][0]
    _loads_like_json(orjson.dumps({"choices": [first, other]}))
    for wrong in (None, "#", {"data": "#", "shape": [4, 2, 3], "dtype": "uint8"}):
        spaced = json.dumps(first | {"routed_experts": wrong}).encode()
        assert _refused(b'{"choices":[' + spaced + b"," + orjson.dumps(other) + b"]}").field.startswith("routed_expert")


def test_keys_that_come_twice() -> None:
    """JSON parsers take the last one; so do we, for the tokens and the routes alike."""
    last = orjson.dumps(oracle.envelope(IDS))
    first = orjson.dumps(oracle.envelope(IDS + 1))
    tokens = b'{"choices":[],"choices":[{"finish_reason":"stop","token_ids":[1],'
    body = tokens + b'"routed_experts":%s,"routed_experts":%s,"token_ids":[1,2]}]}'
    _loads_like_json(body % (first, last))
    assert _routes(body % (first, last)).tolist() == IDS.tolist()
    assert type(_refused(body % (first, b"null"))) is MissingRoutesError
    assert _refused(body % (first, b'{"data":"#",' + last.split(b",", 1)[1])).field == "routed_experts.data"
    twice = b'{"choices":[{"finish_reason":null,"token_ids":[1,2],"routed_experts":{"data":"AA==",' + last[1:] + b"}]}"
    assert _routes(twice).tolist() == IDS.tolist()


# Fuzzing: whatever the bytes, routes of the right number of rows or a ReplyError.


def _attempt(body: bytes, prompt: int) -> tuple[Reply, str] | R3Error:
    try:
        return _load(body, prompt)
    except R3Error as error:
        return error


def _check(body: bytes, prompt: int = PROMPT) -> r3st.Array | None:
    loaded = _attempt(body, prompt)
    if isinstance(loaded, R3Error):
        assert isinstance(loaded, ReplyError)
        return None
    reply, encoding = loaded
    assert encoding in WRITTEN
    routes = reply.routes_for(prompt=prompt)
    assert routes.dtype.name == oracle.smallest(int(routes.max(initial=0)))
    assert routes.dtype.isnative
    assert routes.min(initial=0) >= 0
    rows = prompt + len(reply.token_ids) - 1
    assert len(routes) == rows if len(reply.token_ids) else len(routes) <= prompt
    assert reply.token_ids.dtype == np.int32
    assert reply.token_ids.min(initial=0) >= 0
    assert reply.finish_reason is None or type(reply.finish_reason) is str
    if reply.logprobs is not None:
        assert len(reply.logprobs) == len(reply.token_ids)
        assert np.isfinite(reply.logprobs).all()
    return routes


REPLY = Reply(
    token_ids=np.array(RESPONSE, np.int32), finish_reason="stop", logprobs=np.full(2, -1.0), routed_experts=IDS
)
BODIES = [
    _body(),
    _body(routed_experts=oracle.envelope(IDS.astype(np.int16) + 250)),
    _body(routed_experts=IDS.tolist()),
    _body(routed_experts=[]),
    _body(token_ids=[]),
    packed.dump(REPLY),
    frame.dump(REPLY),
]


@given(st.data())
def test_a_mutated_reply_is_refused_or_valid(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(BODIES))
    _check(data.draw(corruption.bytes_of(body)))


@pytest.mark.parametrize("body", [*BODIES[:3], BODIES[6]], ids=["uint8", "int16", "nested", "frame"])
def test_every_cut_and_every_flipped_bit(body: bytes) -> None:
    """All single accidents of a small reply: cut short, a byte lost, a bit flipped."""
    survivors = 0
    for at in range(len(body)):
        assert _check(body[:at]) is None
        survivors += _check(body[:at] + body[at + 1 :]) is not None
        for bit in range(8):
            survivors += _check(body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]) is not None
    assert survivors  # flips inside the ids and other fields cannot be seen here


@given(st.binary(max_size=200))
def test_any_bytes(body: bytes) -> None:
    _check(body)


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
            finish_reason=st.none() | JSON,
            logprobs=st.none()
            | JSON
            | st.fixed_dictionaries({"content": st.lists(st.fixed_dictionaries({"logprob": JSON}), max_size=3) | JSON}),
        ),
    ),
    st.integers(0, 3),
)
def test_any_json(value: Any, prompt: int) -> None:
    _check(orjson.dumps(value), prompt)


# Inputs that were once let through, or raised something else.


@pytest.mark.case("R46")
@pytest.mark.parametrize("shape", [[2**63, 0, 8], [2**62, 0, 8], [4, 0, 2**63]], ids=repr)
@pytest.mark.parametrize("token_ids", [RESPONSE, []], ids=["tokens", "no-tokens"])
def test_huge_dimensions_of_no_bytes(shape: list[int], token_ids: list[int]) -> None:
    """orjson reads integers of 64 bits."""
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
        _body(routed_experts=oracle.envelope(IDS) | {"dtype": long}),
        _body(token_ids=long),
        orjson.dumps({"choices": long}),
        orjson.dumps({long: long}),
        orjson.dumps([long] * 4),
        long.encode(),
    ):
        assert len(str(_refused(body))) < 2_000


@pytest.mark.parametrize("depth", [100, 1_000])
@pytest.mark.parametrize("form", ["%s", '{"a":%s}', '{"choices":[{"token_ids":[1],"finish_reason":%s}]}'])
def test_deeply_nested_replies(form: str, depth: int) -> None:
    _refused((form % ("[" * depth + "]" * depth)).encode())
