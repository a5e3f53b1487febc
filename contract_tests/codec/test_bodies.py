"""Whole replies: token ids, logprobs and routes in one body."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import corruption, golden, oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import ENCODINGS, FRAME, NESTED, PACKED, Adapter, Reply
from contract_tests.codec.attempts import attempt, refused
from contract_tests.codec.test_golden import assert_same
from contract_tests.corruption import fed

BODIES = {name: [case.bodies[name] for case in golden.read("v1")] for name in ENCODINGS}
BODIES[FRAME].append(
    oracle.write(
        Reply([7], routes=np.array([[[4, 9]] * 9], np.uint8), metadata={"layers": 9, "moe_layers": (1, 3, 4, 8)}), FRAME
    )
)


@given(reply=r3st.replies())
def test_whole_replies(impl: Adapter, reads: str, reply: Reply) -> None:
    """Any reply is read as it was written: tokens, reason, logprobs, and routes in the smallest dtype."""
    assert_same(impl.load(oracle.write(reply, reads)), reply, reads)


@given(reply=r3st.replies())
def test_whole_replies_to_the_byte(impl: Adapter, writes: str, reply: Reply) -> None:
    """Any reply is written as the oracle writes it, byte for byte."""
    assert impl.dump(reply, writes) == oracle.write(reply, writes)


@pytest.mark.parametrize("tokens", [1, 9, 1_000, 5_000])
def test_long_replies(impl: Adapter, writes: str, tokens: int) -> None:
    """A reply of thousands of tokens is written as the oracle writes it, and none of them changes places."""
    reply = long_reply(tokens)
    assert impl.dump(reply, writes) == oracle.write(reply, writes)


@pytest.mark.parametrize("tokens", [1, 9, 1_000, 5_000])
def test_long_replies_are_read(impl: Adapter, reads: str, tokens: int) -> None:
    """A reply of thousands of tokens is read as it was written."""
    assert_same(impl.load(oracle.write(long_reply(tokens), reads)), long_reply(tokens), reads)


def long_reply(tokens: int) -> Reply:
    """Tokens, logprobs and routes that are all different, and in no order; 11 experts a token."""
    order = np.random.default_rng(tokens).permutation(tokens)
    ids = (np.arange(tokens).reshape(-1, 1, 1) * 7 + np.arange(3).reshape(1, -1, 1) * 11 + np.arange(11)) % 300
    return Reply((order * 29).tolist(), "length", (order / -8.0).tolist(), oracle.canonical(ids))


@pytest.mark.parametrize("shape", [(0, 3, 2), (0, 1, 1), (0, 48, 8)])
def test_replies_without_rows(impl: Adapter, writes: str, shape: tuple[int, int, int]) -> None:
    """Routes without rows are written as such, not as none."""
    reply = Reply([], "abort", [], np.zeros(shape, np.uint8))
    assert impl.dump(reply, writes) == oracle.write(reply, writes)


@pytest.mark.capability("reads packed")
@given(logprobs=st.lists(st.floats(-9999, 0), min_size=1, max_size=9))
def test_logprobs_of_json_are_not_rounded(impl: Adapter, logprobs: list[float]) -> None:
    """A logprob in JSON is read to the last bit of its double."""
    reply = Reply([7] * len(logprobs), "stop", logprobs, np.ones((1, 1, 1), np.uint8))
    assert_same(impl.load(oracle.write(reply, PACKED)), reply, PACKED)


@pytest.mark.capability("writes packed")
@given(logprobs=st.lists(st.floats(-9999, 0), min_size=1, max_size=9))
def test_logprobs_in_json_are_not_rounded(impl: Adapter, logprobs: list[float]) -> None:
    """A logprob is written into JSON to the last bit of its double."""
    reply = Reply([7] * len(logprobs), "stop", logprobs, np.ones((1, 1, 1), np.uint8))
    assert impl.dump(reply, PACKED) == oracle.write(reply, PACKED)


_IDS = np.arange(12).reshape(2, 3, 2)
UNWRITABLE: dict[str, tuple[str, Reply]] = {
    "a negative id": ("", Reply([5], routes=np.where(_IDS == 11, -1, _IDS))),
    "an id beyond int32": ("", Reply([5], routes=np.where(_IDS == 11, 2**31, _IDS))),
    "floats": ("", Reply([5], routes=_IDS.astype(float))),
    "two axes": ("", Reply([5], routes=_IDS.reshape(2, 6))),
    "a logprob missing": ("logprobs", Reply([5, 6], logprobs=[-0.5])),
    "a logprob too many": ("logprobs", Reply([5], logprobs=[-0.5, -0.5])),
    "a negative token": ("token_ids", Reply([5, -1])),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_wrong_replies_are_not_written(impl: Adapter, writes: str, kind: str) -> None:
    """What is no reply is refused where it is written, and not repaired."""
    field, reply = UNWRITABLE[kind]
    found = attempt(impl, lambda given: impl.dump(given, writes), reply)
    assert isinstance(found, Exception) or field in impl.quirks.lenient


@given(routes=r3st.routes(tuple(r3st.LAYOUTS), empty=False))
def test_layouts_of_whole_replies(impl: Adapter, writes: str, routes: r3st.Routes) -> None:
    """No memory layout of the engine's array changes the bytes of a reply."""
    body = impl.dump(Reply([5], routes=routes.given), writes)
    assert body == oracle.write(Reply([5], routes=oracle.canonical(routes.values)), writes)


@given(reply=r3st.replies())
def test_encodings_agree(impl: Adapter, reply: Reply) -> None:
    """Packed, frame and nested lists of the same reply are read as the same, each as far as it can say it."""
    found = [impl.load(oracle.write(reply, encoding)) for encoding in impl.quirks.reads]
    for one, encoding in zip(found, impl.quirks.reads, strict=True):
        for other in found:
            assert_same(one, replace(other, metadata=one.metadata), encoding)


@pytest.mark.case("R89")
@pytest.mark.parametrize("max_id", [255, 256, 32768])
def test_the_routes_of_a_body_are_not_shared(impl: Adapter, reads: str, max_id: int) -> None:
    """Routes are memory of their own that can be written, or a view that cannot."""
    ids = np.resize(np.array([0, max_id, 1, 2, 3]), (300, 2, 2))
    body = oracle.write(Reply([5], routes=oracle.canonical(ids)), reads)
    first, second = impl.load(body).routes, impl.load(body).routes
    assert first is not None
    assert second is not None
    if first.flags.writeable:
        first[...] = 1
        assert second.tolist() == ids.tolist()
    assert not np.frombuffer(body, np.uint8).flags.writeable
    assert oracle.read(body).routes.tolist() == ids.tolist()  # type: ignore[union-attr]


# Wrong bodies.


def judge(impl: Adapter, body: bytes) -> None:
    """Check that ``impl`` reads ``body`` as the oracle does, or refuses it."""
    found = attempt(impl, impl.load, body)
    if isinstance(found, Exception):
        return
    if "logprobs" in impl.quirks.lenient and found.logprobs is not None:
        found = replace(found, logprobs=[float(value) if type(value) is int else value for value in found.logprobs])
    if "keys twice" in impl.quirks.lenient and oracle.says_twice(body):
        return
    want = _read(body)
    if isinstance(want, oracle.UnreadableError):
        lenient = want.violations <= impl.quirks.lenient if want.violations else False
        assert lenient, f"read, although wrong ({want}): {found}"
        return
    assert_same(found, want, FRAME if body[7:8] == b"\0" else NESTED if _is_nested(body) else PACKED)


def _read(body: bytes) -> Reply | oracle.UnreadableError:
    try:
        return oracle.read(body)
    except oracle.UnreadableError as error:
        return error


def _is_nested(body: bytes) -> bool:
    return isinstance(orjson.loads(body)["choices"][0].get("routed_experts"), list)


def test_what_the_oracle_writes_is_read(impl: Adapter, reads: str) -> None:
    """Bodies without a fault are not refused: what is asserted of wrong ones would be empty otherwise."""
    for body in BODIES[reads]:
        impl.load(body)


@pytest.mark.case("R46")
def test_every_cut(impl: Adapter, reads: str) -> None:
    """A body that ends early is refused, wherever it ends."""
    for body in BODIES[reads]:
        for end in range(len(body)):
            refused(impl, impl.load, fed("cut", body[:end]))


def test_every_byte_changed(impl: Adapter, reads: str) -> None:
    """Whatever a single byte becomes, the body is refused or read as the oracle reads it."""
    body = next(case.bodies[reads] for case in golden.read("v1") if case.name == "told")
    for at in range(len(body)):
        for value in b'"\\,:{}[]#A/ u0\0\xff\x01':
            judge(impl, fed("byte", body[:at] + bytes([value]) + body[at + 1 :]))


@r3st.more(5)
@given(data=st.data())
def test_accidents_of_bytes(impl: Adapter, reads: str, data: st.DataObject) -> None:
    """After accidents to its bytes, a body is refused or read as the oracle reads it."""
    body = data.draw(st.sampled_from(BODIES[reads]).flatmap(corruption.bytes_of))
    judge(impl, fed(f"{reads} bytes", body))


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Frames whose header, or the bytes behind it, had an accident; the header's length is right most of the time."""
    body = draw(st.sampled_from(BODIES[FRAME]))
    size = int.from_bytes(body[:8], "little")
    header = draw(corruption.structure_of(orjson.loads(body[8 : 8 + size])).flatmap(corruption.text_of))
    data = body[8 + size :]
    made = oracle.frame(header, data if draw(st.booleans()) else draw(corruption.bytes_of(data)))
    if draw(st.integers(0, 9)) == 0:
        length = draw(st.sampled_from([0, 1, 7, size - 8, size + 8, len(body), 2**31, 2**63, 2**64 - 1]))
        return length.to_bytes(8, "little") + made[8:]
    return made


@r3st.more(5)
@given(data=st.data())
def test_accidents_of_structure(impl: Adapter, reads: str, data: st.DataObject) -> None:
    """After accidents to the structure of its JSON, a body is refused or read as the oracle reads it."""
    if reads == FRAME:
        body = data.draw(frames())
    else:
        right = orjson.loads(data.draw(st.sampled_from(BODIES[reads])))
        body = data.draw(corruption.structure_of(right).flatmap(corruption.text_of))
    judge(impl, fed(f"{reads} structure", body))


@given(value=r3st.json_values())
def test_any_json(impl: Adapter, reads: str, value: Any) -> None:
    """Whatever JSON can say is no reply, or is read as the oracle reads it."""
    judge(impl, fed("any JSON", orjson.dumps(value)))


@given(body=st.binary(max_size=64))
def test_any_bytes(impl: Adapter, reads: str, body: bytes) -> None:
    """Any bytes are refused, or read as the oracle reads them."""
    judge(impl, fed("any bytes", body))


def _frame(change: Callable[[dict[str, Any]], Any], data: bytes = b"") -> bytes:
    """A golden frame after ``change`` of its header, and ``data`` behind it."""
    body = next(case.bodies[FRAME] for case in golden.read("v1") if case.name == "told")
    size = int.from_bytes(body[:8], "little")
    header = orjson.loads(body[8 : 8 + size])
    made = change(header)
    return oracle.frame(header if made is None else made, body[8 + size :] + data)


def _of(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


def _twice(header: dict[str, Any]) -> bytes:
    text = orjson.dumps(header)
    return text[:-1] + b',"token_ids":' + orjson.dumps(header["token_ids"]) + b"}"


WRONG_FRAMES = {
    "bytes that belong to no tensor": _frame(lambda header: None, b"\0"),
    "a tensor twice": _frame(_twice),
    "overlapping tensors": _frame(_of("logprobs", data_offsets=[4, 12])),
    "a gap": _frame(_of("logprobs", data_offsets=[12, 20]), bytes(4)),
    "offsets that go backwards": _frame(_of("token_ids", data_offsets=[8, 0])),
    "offsets behind the end": _frame(_of("routed_experts", data_offsets=[16, 23])),
    "three offsets": _frame(_of("token_ids", data_offsets=[0, 4, 8])),
    "offsets that are bools": _frame(_of("token_ids", data_offsets=[False, 8])),
    "another dtype": _frame(_of("routed_experts", dtype="U16")),
    "tokens of another dtype": _frame(_of("token_ids", dtype="F32")),
    "a rank of two": _frame(_of("routed_experts", shape=[3, 2])),
    "a rank of four": _frame(_of("routed_experts", shape=[3, 1, 2, 1])),
    "a shape that its bytes do not fill": _frame(_of("routed_experts", shape=[2, 1, 2])),
    "a negative dimension": _frame(_of("routed_experts", shape=[-3, 1, -2])),
    "a dimension of 2**62": _frame(_of("routed_experts", shape=[2**62, 1, 2])),
    "wider than needed": oracle.write(Reply([5]), FRAME, np.array([[[255]]], np.int16)),
    "a negative id": oracle.write(Reply([5]), FRAME, np.array([[[300, -1]]], np.int16)),
    "a key more": _frame(_of("token_ids", start=0)),
    "an unknown tensor": _frame(lambda header: header.update(x=header.pop("logprobs"))),
    "no tokens": _frame(lambda header: header.pop("token_ids") and None),
    "another format": _frame(_of("__metadata__", format="skyrl-r3/2")),
    "no format": _frame(lambda header: header["__metadata__"].pop("format") and None),
    "no metadata": _frame(lambda header: header.pop("__metadata__") and None),
    "metadata that is no text": _frame(_of("__metadata__", prompt_tokens=4)),
    "a newer format": _frame(_of("__metadata__", format="skyrl-r3/10")),
    "a number below 0": _frame(_of("__metadata__", start="-4")),
    "layers that no array can have": oracle.frame(
        {
            "__metadata__": {"format": oracle.FORMAT},
            "token_ids": {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]},
            "routed_experts": {"dtype": "U8", "shape": [0, 2**62, 8], "data_offsets": [0, 0]},
        },
        b"",
    ),
    "metadata that is no number": _frame(_of("__metadata__", prompt_tokens="4.0")),
    "layers that are no number": _frame(_of("__metadata__", layers="many")),
    "another topk than that of the routes": _frame(_of("__metadata__", topk="3")),
    "a topk that is no number": _frame(_of("__metadata__", topk="two")),
    **{
        f"moe_layers {text[:12]!a}": _frame(_of("__metadata__", layers="8", moe_layers=text))
        for text in corruption.WRONG_LAYERS
    },
    "moe_layers without end": _frame(_of("__metadata__", moe_layers="0-4096")),
    "moe_layers that repeat": _frame(_of("__metadata__", moe_layers=",".join(["0-4095"] * 4_000))),
    "a header that is a list": _frame(lambda header: b"[]"),
    "a header of another encoding": _frame(lambda header: orjson.dumps(header).decode().encode("utf-16")),
    "a header with NaN": _frame(lambda header: orjson.dumps(header).replace(b"[2]", b"[NaN]", 1)),
    "no header": (0).to_bytes(8, "little") + bytes(8),
    "nothing": b"",
}


@pytest.mark.capability("reads frame/1")
@pytest.mark.case("R50")
@pytest.mark.parametrize("kind", WRONG_FRAMES)
def test_wrong_frames(impl: Adapter, kind: str) -> None:
    """Each of a list of wrong frames is refused in few words."""
    refused(impl, impl.load, fed("list", WRONG_FRAMES[kind]))


def test_right_frames(impl: Adapter) -> None:
    """What the list of wrong frames is made from is right."""
    assert oracle.read(_frame(lambda header: None)).routes is not None


_PACKED = next(case.bodies[PACKED] for case in golden.read("v1") if case.name == "uint8").decode()
_SCORED = next(case.bodies[PACKED] for case in golden.read("v1") if case.name == "int16").decode()
DEEP = {
    "lists": "[" * 100_000,
    "closed lists": "[" * 100_000 + "]" * 100_000,
    "objects": '{"choices":' * 50_000,
    "in the routes": _PACKED.replace('"shape":[', '"shape":[' + "[" * 5_000 + "]" * 5_000 + ","),
    # As deep as orjson goes, and deeper than Python does.
    "1,000 lists in the choices": '{"choices":[' + "[" * 1_000 + "]" * 1_000 + "]}",
    "in the choices": '{"choices":[' + "[" * 5_000 + "]" * 5_000 + "]}",
    "a number of 10,000 digits": _PACKED.replace('"shape":[', '"shape":[' + "9" * 10_000 + ","),
    "a token of 10,000 digits": _PACKED.replace('"token_ids":[', '"token_ids":[' + "9" * 10_000 + ","),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_and_long(impl: Adapter, reads: str, kind: str) -> None:
    """Nesting and numbers without end are refused: no recursion error, and no crash."""
    text = DEEP[kind].encode()
    refused(impl, impl.load, fed("deep", oracle.frame(text, b"") if reads == FRAME else text))


# R44: readers that look for the routes in the bytes.
_ANCHOR = '"routed_experts":{"data":"'
_OTHER = '{"data":"AAAA","shape":[1,1,3],"dtype":"uint8"}'
_TEXTS = {"in a text": _ANCHOR, "in a text after a comma": f",{_ANCHOR}AA"}
LOOKALIKES = {
    "another key that ends like it": _PACKED.replace('{"choices"', f'{{"x_routed_experts":{_OTHER},"choices"'),
    "data behind shape": _PACKED.replace('"shape":[3,2,2],', "").replace('{"data":', '{"shape":[3,2,2],"data":'),
    "white space": _PACKED.replace(":", ": ").replace(",", ", "),
    "escaped key": _PACKED.replace('"routed_experts"', '"\\u0072outed_experts"'),
    "escaped data": _PACKED.replace('"data":"AA', '"data":"\\u0041A'),
    "escaped slash": _PACKED.replace("/", "\\/"),
    "an object above": _PACKED.replace('{"choices"', f'{{"routed_experts":{_OTHER},"choices"'),
    "twice": _PACKED.replace('"routed_experts"', f'"routed_experts":{_OTHER},"routed_experts"'),
    "data twice, the last is null": _PACKED.replace(',"dtype"', ',"data":null,"dtype"'),
    "twice, the last is null": _PACKED.replace("}]}", ',"routed_experts":null}]}'),
    **{
        kind: _PACKED.replace('"finish_reason":null', f'"finish_reason":{orjson.dumps(text).decode()}')
        for kind, text in _TEXTS.items()
    },
}


OTHER_FRAMES = {
    "tensors in another order": _frame(lambda header: dict(reversed(header.items()))),
    "metadata behind": _frame(lambda header: {**header, "__metadata__": header.pop("__metadata__")}),
    "blanks": _frame(lambda header: json.dumps(header).encode()),
    "lines": _frame(lambda header: json.dumps(header, indent=2).encode()),
    "escapes": _frame(lambda header: json.dumps(header).replace("model", "\\u006dodel").encode()),
    "a lot of padding": _frame(lambda header: orjson.dumps(header) + b" " * 1_000),
    "metadata that nobody knows": _frame(_of("__metadata__", note="é", other="")),
    "all layers that there may be": _frame(_of("__metadata__", moe_layers="0-4095")),
    "layers that are 8 of 8": _frame(_of("__metadata__", layers="8", moe_layers="0,2-3,5-7")),
    "more layers than any model has": _frame(_of("__metadata__", layers="9999999999", moe_layers="4095")),
    "no topk": _frame(lambda header: header["__metadata__"].pop("topk") and None),
}


@pytest.mark.capability("reads frame/1")
@pytest.mark.parametrize("kind", OTHER_FRAMES)
def test_other_writers_of_frames(impl: Adapter, kind: str) -> None:
    """A frame is a safetensors document: one that another library has written is read as well."""
    body = OTHER_FRAMES[kind]
    assert_same(impl.load(body), oracle.read(body), FRAME)


@pytest.mark.capability("reads frame/1")
def test_tensors_may_lie_in_another_order(impl: Adapter) -> None:
    """A frame whose buffers come in another order, and whose header has no padding, is read as well."""
    ids, tokens, logprobs = np.array([[[300, 7]]], "<i2"), np.array([9], "<i4"), np.array([-0.5], "<f4")
    header = {
        "logprobs": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        "token_ids": {"dtype": "I32", "shape": [1], "data_offsets": [4, 8]},
        "routed_experts": {"dtype": "I16", "shape": [1, 1, 2], "data_offsets": [0, 4]},
        "__metadata__": {"format": oracle.FORMAT},
    }
    for pad in range(4):
        text = orjson.dumps(header) + b" " * pad
        body = len(text).to_bytes(8, "little") + text + ids.tobytes() + tokens.tobytes() + logprobs.tobytes()
        assert_same(impl.load(body), Reply([9], None, [-0.5], oracle.canonical(ids)), FRAME)


def _members(text: str) -> dict[str, str]:
    """The same reply, as other writers of JSON would have it."""
    parsed = json.loads(text)
    (choice,) = parsed["choices"]
    routes = choice["routed_experts"]
    turned = {"choices": [dict(reversed((choice | {"routed_experts": dict(reversed(routes.items()))}).items()))]}
    return {
        "blanks": json.dumps(parsed),
        "lines": json.dumps(parsed, indent=2),
        "other order": json.dumps(turned, separators=(",", ":")),
        "escaped slashes": text.replace("/", "\\/"),
        "more fields": text.replace("{", '{"id":"x","usage":{"n":1},', 1).replace('{"token', '{"index":0,"token'),
        "more in a logprob": text.replace('"logprob":', '"token":"x","logprob":'),
    }


@pytest.mark.capability("reads packed")
@pytest.mark.parametrize("kind", _members(_SCORED))
def test_other_writers(impl: Adapter, kind: str) -> None:
    """A packed reply that a proxy has read and written again, with blanks or in another order, is still read."""
    body = _members(_SCORED)[kind].encode()
    assert body.decode() != _SCORED
    assert_same(impl.load(body), oracle.read(body), PACKED)


@pytest.mark.case("R44")
@pytest.mark.capability("reads packed")
@pytest.mark.parametrize("kind", LOOKALIKES)
def test_lookalikes(impl: Adapter, kind: str) -> None:
    """A reader that finds the routes by their bytes is not misled by what looks like them."""
    body = LOOKALIKES[kind].encode()
    assert body.decode() != _PACKED
    found, want = attempt(impl, impl.load, fed("lookalike", body)), _read(body)
    if not isinstance(found, Exception):
        assert not isinstance(want, Exception), f"read, although wrong ({want}): {found}"
        assert_same(found, want, PACKED)
