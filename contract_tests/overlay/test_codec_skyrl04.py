"""Byte compatibility, both ways, with the packed codec that SkyRL 0.4.0 ships."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import strategies as r3st
from contract_tests.peer import VARIABLE, Peer, PeerError, python_04
from skyrl_r3 import codec, packed, wire
from skyrl_r3.errors import CodecError, ReplyError
from skyrl_r3.reply import Reply


@pytest.fixture(scope="session")
def skyrl04() -> Iterator[Peer]:
    with Peer(python_04(), Path(__file__).with_name("skyrl04_peer.py")) as peer:
        yield peer


def test_the_peer_is_skyrl_040(skyrl04: Peer) -> None:
    assert skyrl04.ask("version") == "0.4.0"


def test_a_missing_interpreter_is_a_failure_and_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pytest.fail.Exception) as caught:
        python_04()
    assert VARIABLE in str(caught.value)


@given(routes=r3st.routes(tuple(r3st.LAYOUTS)))
def test_both_write_the_same_envelope(skyrl04: Peer, routes: r3st.Routes) -> None:
    theirs = skyrl04.ask("pack", np.array(routes.given, subok=False))
    ours = codec.pack(routes.given)
    assert ours == theirs
    assert list(ours) == list(theirs)
    assert b"".join(codec.packed_pieces(routes.given)) == orjson.dumps(theirs)


@pytest.mark.parametrize("max_id", r3st.EDGE_IDS)
def test_both_choose_the_same_dtype(skyrl04: Peer, max_id: int) -> None:
    """R34"""
    ids = np.array([[[0, max_id]], [[max_id, 1]]], np.int64)
    assert codec.pack(ids) == skyrl04.ask("pack", ids)


@given(routes=r3st.routes())
def test_they_decode_ours(skyrl04: Peer, routes: r3st.Routes) -> None:
    r3st.assert_canonical(skyrl04.ask("decode", codec.pack(routes.given)), routes.values)


@given(ids=r3st.ids())
def test_we_decode_theirs(skyrl04: Peer, ids: r3st.Array) -> None:
    r3st.assert_canonical(codec.unpack(skyrl04.ask("pack", ids)), ids.astype(np.int64))


@pytest.mark.parametrize("max_id", [-1, -(2**31), 2**31, 2**63 - 1])
def test_both_refuse_the_same_ids(skyrl04: Peer, max_id: int) -> None:
    ids = np.array([[[0, max_id]]], np.int64)
    with pytest.raises(PeerError):
        skyrl04.ask("pack", ids)
    with pytest.raises(CodecError):
        codec.pack(ids)


@given(
    ids=r3st.ids(),
    tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-9999, 0)), max_size=4),
    scored=st.booleans(),
    # A text that looks like the start of an envelope must not confuse a reader that looks for one (R44).
    finish_reason=st.sampled_from([None, "stop", "length", "é", '"routed_experts":{"data":"', '\\":{"data":"AA=="']),
)
def test_load_packed_body_reads_our_replies(
    skyrl04: Peer, ids: r3st.Array, tokens: list[tuple[int, float]], scored: bool, finish_reason: str | None
) -> None:
    body = packed.dump(
        Reply(
            token_ids=np.array([token for token, _ in tokens], np.int32),
            finish_reason=finish_reason,
            logprobs=np.array([logprob for _, logprob in tokens], np.float64) if scored else None,
            routed_experts=ids,
        )
    )
    r3st.assert_canonical(skyrl04.ask("load_and_decode", body), ids.astype(np.int64))
    theirs = skyrl04.ask("load", body)
    envelope = theirs["choices"][0]["routed_experts"]
    envelope["data"] = envelope["data"].decode()
    assert theirs == orjson.loads(body)


def test_load_packed_body_reads_a_reply_without_routes(skyrl04: Peer) -> None:
    body = packed.dump(
        Reply(token_ids=np.array([1], np.int32), finish_reason="stop", logprobs=None, routed_experts=None)
    )
    assert skyrl04.ask("load_and_decode", body) is None
    assert skyrl04.ask("load", body) == orjson.loads(body)


@given(ids=r3st.ids(), response=st.lists(st.integers(0, 150000), min_size=1, max_size=3), spaced=st.booleans())
def test_we_load_a_reply_with_their_envelope(skyrl04: Peer, ids: r3st.Array, response: list[int], spaced: bool) -> None:
    """A reply of theirs is the same object, written by orjson."""
    prompt = max(len(ids) + 1 - len(response), 0)
    whole = {"choices": [{"finish_reason": "stop", "token_ids": response, "routed_experts": skyrl04.ask("pack", ids)}]}
    reply, encoding = wire.load(json.dumps(whole).encode() if spaced else orjson.dumps(whole))
    assert encoding == "packed"
    r3st.assert_canonical(reply.routed_experts, ids.astype(np.int64))
    if prompt + len(response) - 1 == len(ids) and (ids.size or not len(ids)):
        assert reply.routes_for(prompt=prompt) is reply.routed_experts
    else:
        with pytest.raises(ReplyError):
            reply.routes_for(prompt=prompt)


# Where their decoder takes more than ours.


def _envelope(**changes: Any) -> dict[str, Any]:
    return {"data": "AA==", "shape": [1, 1, 1], "dtype": "uint8"} | changes


@pytest.mark.parametrize(
    ("envelope", "field"),
    [
        pytest.param(_envelope(data="AB=="), "routed_experts.data", id="pad-bits"),
        pytest.param(_envelope(start=0), "routed_experts", id="extra-key"),
        pytest.param(
            _envelope(shape=dict.fromkeys((1, 2, 3)), data="AAAAAAAA"), "routed_experts.shape", id="shape-object"
        ),
    ],
)
def test_known_leniencies(skyrl04: Peer, envelope: dict[str, Any], field: str) -> None:
    skyrl04.ask("decode", envelope)
    with pytest.raises(CodecError) as caught:
        codec.unpack(envelope)
    assert caught.value.field == field


@given(malformed=r3st.malformed_envelopes())
def test_what_they_refuse_we_refuse(skyrl04: Peer, malformed: r3st.Malformed) -> None:
    """Every envelope here is refused by us; theirs may be laxer, but only in ways that are known."""
    with pytest.raises(CodecError):
        codec.unpack(malformed.envelope)
    try:
        decoded = skyrl04.ask("decode", malformed.envelope)
    except PeerError:
        return
    assert _known_leniency(malformed.envelope), malformed
    assert decoded.dtype.name in ("uint8", "int16", "int32")


def _known_leniency(envelope: dict[str, Any]) -> bool:
    """Pad bits that are set, other keys, and shapes that are a container of three integers but no list."""
    data = envelope["data"]
    text = data if isinstance(data, str) else data.decode()
    set_pad_bits = base64.b64encode(base64.b64decode(text)).decode() != text
    odd_shape = not isinstance(envelope["shape"], list) or any(type(dim) is not int for dim in envelope["shape"])
    return set_pad_bits or len(envelope) > 3 or odd_shape
