"""``skyrl_r3.packed``: the JSON encodings, written as SkyRL 0.4 writes them, and parsed as any JSON."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, oracle
from contract_tests import strategies as r3st
from skyrl_r3 import packed
from skyrl_r3.errors import CodecError, ReplyError
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec

IDS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)


def _reply(**changes: Any) -> Reply:
    fields: dict[str, Any] = {
        "token_ids": np.array([5, 6], np.int32),
        "finish_reason": "stop",
        "logprobs": None,
        "routed_experts": IDS,
    }
    return Reply(**(fields | changes))


def _skyrl(fields: dict[str, Any], envelope: Any) -> dict[str, Any]:
    """The reply of SkyRL 0.4's server, which it gives to orjson."""
    logprobs = fields["logprobs"]
    return {
        "choices": [
            {
                "token_ids": fields["token_ids"].tolist(),
                "finish_reason": fields["finish_reason"],
                "logprobs": None
                if logprobs is None
                else {"content": [{"logprob": value} for value in logprobs.tolist()]},
                "routed_experts": envelope,
            }
        ]
    }


def _envelope(routes: r3st.Routes | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    return oracle.envelope(routes.values.astype(oracle.smallest(int(routes.values.max(initial=0)))))


# Writing.


def test_exact_bytes_of_a_reply() -> None:
    ids = np.array([[[256, 32767]]], np.uint16)
    assert packed.dump(_reply(logprobs=np.array([-0.5, -9999.0]), routed_experts=ids)) == (
        b'{"choices":[{"token_ids":[5,6],"finish_reason":"stop",'
        b'"logprobs":{"content":[{"logprob":-0.5},{"logprob":-9999.0}]},'
        b'"routed_experts":{"data":"AAH/fw==","shape":[1,1,2],"dtype":"int16"}}]}'
    )


def test_exact_bytes_without_logprobs_and_routes() -> None:
    none = np.empty(0, np.int32)
    body = packed.dump(_reply(token_ids=none, finish_reason=None, routed_experts=None))
    assert body == b'{"choices":[{"token_ids":[],"finish_reason":null,"logprobs":null,"routed_experts":null}]}'
    body = packed.dump(_reply(token_ids=none, finish_reason="abort", logprobs=np.empty(0), routed_experts=None))
    assert b'"finish_reason":"abort","logprobs":{"content":[]},' in body


FLOATS = st.floats(-3.4e38, 3.4e38) | st.sampled_from([-9999.0, -0.0, 5e-324, -1e-7, 1e16])


@given(r3st.reply_fields(layouts=r3st.NATIVE_LAYOUTS, logprobs=FLOATS, dtypes=("float64",)))
def test_a_reply_is_what_orjson_writes(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    """Logprobs are written all at once: each number has to look as it does by itself."""
    fields, routes = made
    assert packed.dump(Reply(**fields)) == orjson.dumps(_skyrl(fields, _envelope(routes)))


@pytest.mark.parametrize("value", [-9999.0, -0.0, 0.0, 5e-324, -5e-324, 2.2250738585072014e-308, -3.4e38, 1e16, 1e21,
                                   -1e-5, -1e-7, 0.1, 1 / 3, -123456789.125, 2.0**53, -5.0])  # fmt: skip
def test_each_logprob_is_what_orjson_writes(value: float) -> None:
    for count in (1, 2, 3):
        values = np.full(count, value)
        body = packed.dump(_reply(token_ids=np.zeros(count, np.int32), logprobs=values))
        content = [{"logprob": number} for number in values.tolist()]
        assert b'"logprobs":' + orjson.dumps({"content": content}) + b"," in body


def test_float32_logprobs_come_back() -> None:
    """A frame's, written anew: shorter texts, of the same float32."""
    values = np.array([-0.1, -1 / 3], np.float32)
    reply, _ = packed.read(packed.parse(packed.dump(_reply(logprobs=values))))
    assert reply.logprobs is not None
    assert reply.logprobs.astype(np.float32).tolist() == values.tolist()


@pytest.mark.case("R25")
@pytest.mark.parametrize(
    "wrong", ["AAEC", [[[1]]], np.zeros((2, 2)), np.full((1, 1, 1), -1)], ids=["str", "list", "2d", "-1"]
)
def test_routes_that_are_none_are_not_written(wrong: Any) -> None:
    """No double base64."""
    with pytest.raises(CodecError) as caught:
        packed.dump(_reply(routed_experts=wrong))
    assert caught.value.field == "routed_experts"


# Round trips.


@given(r3st.reply_fields(layouts=r3st.NATIVE_LAYOUTS))
def test_what_is_written_is_read(made: tuple[dict[str, Any], r3st.Routes | None]) -> None:
    fields, routes = made
    reply, encoding = packed.read(packed.parse(packed.dump(Reply(**fields))))
    assert encoding == "packed"
    assert reply.token_ids.dtype == np.int32
    assert reply.token_ids.tolist() == fields["token_ids"].tolist()
    assert reply.finish_reason == fields["finish_reason"]
    if fields["logprobs"] is None:
        assert reply.logprobs is None
    else:
        assert reply.logprobs is not None
        assert reply.logprobs.dtype == np.float64
        assert reply.logprobs.astype(np.float32).tolist() == fields["logprobs"].astype(np.float32).tolist()
    if routes is None:
        assert reply.routed_experts is None
    else:
        oracle.assert_canonical(reply.routed_experts, routes.values)
    # JSON has no place for these.
    assert (reply.prompt_tokens, reply.start, reply.spec, reply.model) == (None, None, RouteSpec(), "")


def test_a_reply_of_skyrl_is_read_with_what_else_it_holds() -> None:
    """SkyRL 0.4's own replies may have more in them than ours."""
    body = _skyrl({"token_ids": np.array([5, 6]), "finish_reason": "stop", "logprobs": None}, oracle.envelope(IDS))
    body["choices"][0] |= {"sample_support": {"data": "AAAA"}, "index": 0}
    reply, encoding = packed.read(packed.parse(orjson.dumps(body | {"model": "m"})))
    assert encoding == "packed"
    oracle.assert_canonical(reply.routed_experts, IDS.astype(np.int64))


@pytest.mark.parametrize(("routes", "encoding"), [(IDS.tolist(), "nested"), ([], "nested"), (None, "packed")])
def test_the_encoding_is_that_of_the_routes(routes: Any, encoding: str) -> None:
    choice = {"token_ids": [5], "finish_reason": None, "routed_experts": routes}
    assert packed.read({"choices": [choice]})[1] == encoding


# Parsing. The base64 is not copied.


def test_the_base64_is_a_view_of_the_body() -> None:
    body = packed.dump(_reply())
    data = packed.parse(body)["choices"][0]["routed_experts"]["data"]
    assert type(data) is memoryview
    assert data.obj is body
    assert bytes(data) == oracle.envelope(IDS)["data"].encode()


def test_parsing_and_reading_need_the_ids_and_little_more() -> None:
    body = packed.dump(_reply(routed_experts=np.full((4000, 48, 8), 300, np.int16)))
    packed.parse(body)
    tracemalloc.start()
    try:
        parsed = packed.parse(body)
        peak = tracemalloc.get_traced_memory()[1]
        routes = packed.read(parsed)[0].routed_experts
        peak_reading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert routes is not None
    assert peak_reading <= 1.25 * routes.nbytes + 100_000


# The same as parsing the whole, whatever it looks like.


def _plain(parsed: Any) -> Any:
    """``parsed`` with a str for the view."""
    if isinstance(parsed, dict):
        return {key: _plain(value) for key, value in parsed.items()}
    if isinstance(parsed, list):
        return [_plain(value) for value in parsed]
    return bytes(parsed).decode() if isinstance(parsed, memoryview) else parsed


def _result(call: Any, value: Any) -> Any:
    """What ``call`` returns, or the error. Every other exception goes through."""
    try:
        return call(value)
    except ReplyError as error:
        return error


def _same(body: bytes) -> Any:
    """Check that ``body`` is parsed, or refused, as orjson does it, and return what orjson reads."""
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        # Which field it names depends on what else is wrong: the base64 is looked at last.
        with pytest.raises(ReplyError):
            packed.read(packed.parse(body))
        return None
    ours = packed.parse(body)
    assert orjson.dumps(_plain(ours)) == orjson.dumps(whole)
    read, want = _result(packed.read, ours), _result(packed.read, whole)
    if isinstance(want, ReplyError) or isinstance(read, ReplyError):
        assert (type(read), read.field) == (type(want), want.field)
    else:
        (reply, encoding), (right, name) = read, want
        assert encoding == name
        assert (reply.routed_experts is None) is (right.routed_experts is None)
        assert reply.routed_experts is None or reply.routed_experts.tolist() == right.routed_experts.tolist()
    return whole


ANCHOR = '"routed_experts":{"data":"'
ENVELOPE = json.dumps(oracle.envelope(IDS), separators=(",", ":"))
CHOICE = f'{{"token_ids":[5,6],"finish_reason":"stop","logprobs":null,"routed_experts":{ENVELOPE}}}'
BODY = f'{{"choices":[{CHOICE}]}}'
ESCAPED_ANCHOR = json.dumps(ANCHOR)[1:-1]


@pytest.mark.case("R44")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(BODY, id="right"),
        pytest.param(BODY.replace('"routed_experts"', '"x_routed_experts"'), id="prefix"),
        pytest.param(BODY.replace('"routed_experts"', '"a\\"routed_experts"'), id="escaped-quote"),
        pytest.param(BODY.replace('"routed_experts"', '"a,\\"routed_experts"'), id="escaped-quote-after-comma"),
        pytest.param(BODY.replace('"routed_experts"', '"\\u0072outed_experts"'), id="escaped-key"),
        pytest.param(BODY.replace("stop", ESCAPED_ANCHOR), id="in-a-string"),
        pytest.param(BODY.replace("stop", "," + ESCAPED_ANCHOR), id="in-a-string-after-comma"),
        pytest.param(BODY.replace("stop", ESCAPED_ANCHOR.replace("\\", "\\\\")), id="in-a-string-that-ends"),
        pytest.param(BODY.replace("stop", "#"), id="placeholder"),
        pytest.param(BODY.replace("stop", "\\u0023"), id="escaped-placeholder"),
        pytest.param(BODY.replace(ENVELOPE, ENVELOPE.replace('"data"', '"Data"')), id="other-key"),
        pytest.param(BODY.replace(ENVELOPE, ENVELOPE.replace('{"data"', '{ "data"')), id="space-before"),
        pytest.param(BODY.replace(ENVELOPE, ENVELOPE.replace('"data":', '"data": ')), id="space-after"),
        pytest.param(BODY.replace(',"routed_experts"', ', "routed_experts"'), id="space-after-comma"),
        pytest.param(BODY.replace('{"data"', '{"dtype":"uint8","data"').replace(',"dtype":"uint8"}', "}"), id="order"),
        pytest.param(BODY.replace(":", ": ").replace(",", ", "), id="spaces"),
        pytest.param(" \n" + BODY + "\t ", id="around"),
        pytest.param(BODY.replace("AAEC", "\\u0041AEC"), id="escape"),
        pytest.param(BODY.replace("AAEC", "\\/AEC"), id="escaped-slash"),
        pytest.param(BODY.replace("AAEC", 'AA\\"C'), id="quote-in-data"),
        pytest.param(BODY.replace("AAEC", "AAE\\"), id="backslash"),
        pytest.param(BODY.replace("AAEC", "AA\\xC"), id="wrong-escape"),
        pytest.param(BODY.replace("AAEC", "A\\uAEC"), id="cut-escape"),
        pytest.param(BODY.replace("AAEC", "AA\nC"), id="newline"),
        pytest.param(BODY.replace("AAEC", "AA\0C"), id="nul"),
        pytest.param(BODY.replace("AAEC", "AA!C"), id="foreign"),
        pytest.param(BODY.replace("AAEC", "AAéC"), id="not-ascii"),
        pytest.param(BODY.replace("AAEC", '","'), id="more-strings"),
        pytest.param(BODY.replace("AAEC", '","shape":[1,1,3],"dtype":"uint8"},"y":{"z":"'), id="ends-before"),
        pytest.param(BODY.replace(f'"routed_experts":{ENVELOPE}', f'{ANCHOR}"}}'), id="empty"),
        pytest.param(BODY[: BODY.index("AAEC") + 9], id="unterminated"),
        pytest.param(BODY[: BODY.index("AAEC")], id="unterminated-empty"),
        pytest.param(BODY[:-1], id="cut"),
        pytest.param(BODY + "}", id="more"),
        pytest.param(BODY + BODY, id="twice"),
        pytest.param(ANCHOR + 'AA"', id="anchor"),
        pytest.param("{" + ANCHOR + 'AA"}}', id="no-choices"),
        pytest.param("," + ANCHOR + 'AA"}', id="comma"),
        pytest.param(f'{{"routed_experts":{ENVELOPE},"choices":[{CHOICE}]}}', id="top-level"),
        pytest.param(f'{{"choices":[{CHOICE}],"routed_experts":{ENVELOPE}}}', id="top-level-later"),
        pytest.param(f'{{"choices":[{CHOICE},{CHOICE}]}}', id="two"),
        pytest.param(f'{{"choices":[null,{CHOICE}]}}', id="second"),
        pytest.param(f'{{"choices":[[{CHOICE}]]}}', id="nested"),
        pytest.param(f'{{"choices":{CHOICE}}}', id="no-list"),
        pytest.param(f'{{"choices":[],"y":{CHOICE}}}', id="empty-list"),
        pytest.param(f'{{"choices":"x","y":{CHOICE}}}', id="string-of-choices"),
        pytest.param(f'[{CHOICE}]', id="list"),
        pytest.param(CHOICE, id="choice"),
        pytest.param(f'{{"choices":[{{"routed_experts":null,{CHOICE[1:]}]}}', id="key-twice"),
        pytest.param(f'{{"choices":[{CHOICE[:-1]},"routed_experts":null}}]}}', id="key-twice-null"),
        pytest.param(f'{{"choices":[{CHOICE[:-1]},"routed_experts":{{"data":"#"}}}}]}}', id="key-twice-placeholder"),
        pytest.param(f'{{"choices":[{CHOICE[:-1]},"routed_experts":"#"}}]}}', id="key-twice-string"),
        pytest.param(BODY.replace('{"data":', '{"data":"#","data":'), id="data-twice-placeholder-first"),
        pytest.param(BODY.replace(',"shape"', ',"data":"#","shape"'), id="data-twice-placeholder"),
        pytest.param(BODY.replace(',"shape"', ',"data":"\\u0023","shape"'), id="data-twice-escaped-placeholder"),
        pytest.param(BODY.replace(',"shape"', ',"data":"AAAA","shape"'), id="data-twice"),
        pytest.param(
            f'{{"choices":[{{"token_ids":[5,6],"finish_reason":"stop","routed_experts": {{"data": "#", '
            f'"shape":[4,2,3],"dtype":"uint8"}}}},{CHOICE}]}}',
            id="placeholder-of-another-choice",
        ),
        pytest.param(
            f'{{"choices":[{{"token_ids":[5,6],"finish_reason":"stop","routed_experts": {{"data": "\\u0023", '
            f'"shape":[4,2,3],"dtype":"uint8"}}}},{CHOICE}]}}',
            id="escaped-placeholder-of-another-choice",
        ),
    ],
)  # fmt: skip
def test_a_body_is_parsed_as_orjson_parses_it(body: str) -> None:
    _same(body.encode())


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x80AAA"])
def test_data_that_is_no_utf_8(raw: bytes) -> None:
    _same(BODY.encode().replace(b"AAEC", raw))


JSON = r3st.json_values(
    st.none()
    | st.integers(0, 300)
    | st.sampled_from([ANCHOR, "#", "AAAA", "routed_experts", f",{ANCHOR}AAAA", "\\", "/", '"', "é", "\n"])
)
KEYS = st.sampled_from(["routed_experts", "x_routed_experts", 'a"routed_experts', "choices", "data", "#", "note"])
LAYOUT = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")])


@st.composite
def _odd_bodies(draw: st.DrawFn) -> bytes:
    """Replies with other things around and in the place of the routes, written in one of several ways."""
    envelope = oracle.envelope(IDS) | draw(st.dictionaries(st.sampled_from(["data", "shape", "x"]), JSON, max_size=1))
    envelope = {key: envelope[key] for key in draw(st.permutations(list(envelope)))}
    choice = {"token_ids": [5, 6], "finish_reason": "stop", "routed_experts": envelope}
    choice |= draw(st.dictionaries(KEYS, JSON | st.just({"data": "AAAA"}), max_size=2))
    choice = {key: choice[key] for key in draw(st.permutations(list(choice)))}
    choices = draw(
        st.sampled_from([[choice], [choice, choice], [{"routed_experts": {"data": "#"}}, choice], [choice, 1]])
    )
    body = draw(st.dictionaries(KEYS, JSON | st.just(envelope), max_size=2)) | {"choices": choices}
    body = {key: body[key] for key in draw(st.permutations(list(body)))}
    text = json.dumps(body, separators=draw(LAYOUT), ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        text = text.replace("/", "\\/")
    return text.encode()


@pytest.mark.case("R44")
@given(_odd_bodies())
def test_any_reply_is_parsed_as_orjson_parses_it(body: bytes) -> None:
    assert _same(body) is not None


@given(st.data())
def test_a_mutated_body_is_parsed_as_orjson_parses_it(data: st.DataObject) -> None:
    _same(
        data.draw(
            corruption.bytes_of(data.draw(st.sampled_from([BODY.encode(), BODY.replace("AAEC", "\\/AEC").encode()])))
        )
    )


def test_every_byte_of_a_body_changed() -> None:
    """To what JSON and base64 make something of."""
    body = BODY.encode()
    for at in range(len(body)):
        for value in b'"\\,:{}[]#A/ u\0\xff':
            _same(body[:at] + bytes([value]) + body[at + 1 :])
        _same(body[:at])


# Wrong objects, also such as a caller parsed by itself.


@pytest.mark.parametrize("parsed", [None, [], {}, "x", b"x", 5, {"choices": ()}, {"choices": ({},)}, {1: 2}], ids=repr)
def test_what_is_no_reply(parsed: Any) -> None:
    with pytest.raises(ReplyError) as caught:
        packed.read(parsed)
    assert caught.value.field == "choices"


def test_a_body_in_the_place_of_a_reply_is_not_written_out_to_be_quoted() -> None:
    parsed = {"error": [[{"message": "x" * 100}] * 1_000] * 1_000}
    tracemalloc.start()
    try:
        with pytest.raises(ReplyError) as caught:
            packed.read(parsed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "error" in caught.value.got
    assert peak < 100_000
