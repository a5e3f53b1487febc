"""``skyrl_r3.policy``: what becomes of a sample whose routes are wrong."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import skyrl_r3
from contract_tests.overlay.test_checks import EXPERTS, LAYERS, SPEC, TOPK, clean
from skyrl_r3 import frame, metrics, packed, policy, wire
from skyrl_r3.errors import BrokenRoutesError, MissingRoutesError, OverlayError, ReplyError, RoutesError
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec

PROMPT, RESPONSE = 5, 4
ROWS = PROMPT + RESPONSE - 1


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every test starts with a policy that nobody has set, in a process that has seen no reply."""
    caplog.set_level(logging.WARNING)  # vLLM, where another test has imported it, has the root logger drop them.
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    monkeypatch.setattr(policy, "_warned", set())
    monkeypatch.setattr(policy, "_shape", None)
    policy.use(None)
    metrics.report()
    yield
    policy.use(None)


def reply(ids: np.ndarray | None, *, response: int = RESPONSE, spec: RouteSpec = SPEC, **more: Any) -> Reply:
    tokens = np.arange(response, dtype=np.int32)
    return Reply(token_ids=tokens, finish_reason="stop", logprobs=None, routed_experts=ids, spec=spec, **more)


def settle(given: Reply, *, start: int = 0, prompt: int = PROMPT) -> np.ndarray:
    got, encoding, ids = policy.settle(lambda: (given, "frame/1"), prompt=prompt, start=start)
    assert (got.token_ids is given.token_ids, encoding) == (True, "frame/1")
    return ids


PLANTED = {
    "out_of_range": lambda ids: ids.__setitem__((3, 1, 0), EXPERTS),
    "all_equal": lambda ids: ids.__setitem__((3, 1), 0),
    "repeated": lambda ids: ids.__setitem__((3, 1), [4, 4, 5]),
}


def planted(kind: str) -> Reply:
    ids = clean(ROWS)
    PLANTED[kind](ids)
    return reply(ids)


# Words of a policy.


def test_the_defaults() -> None:
    assert policy.parse("") == {
        **dict.fromkeys(policy.ACTIONS, "error"),
        "identical_rows": "count",
        "changed": "count",
    }


@pytest.mark.parametrize("text", ["off", "OFF", " 0 ", "false", "no"])
def test_off(text: str) -> None:
    assert policy.parse(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mask", dict.fromkeys(policy.ACTIONS, "mask") | {"changed": "count"}),
        ("error", dict.fromkeys(policy.ACTIONS, "error")),
        # What cannot be used at all cannot only be counted.
        (
            "count",
            dict(policy.DEFAULTS) | dict.fromkeys(["all_equal", "repeated", "identical_rows", "changed"], "count"),
        ),
        ("repeated=count", dict(policy.DEFAULTS) | {"repeated": "count"}),
        (" repeated = count , missing=mask,", dict(policy.DEFAULTS) | {"repeated": "count", "missing": "mask"}),
        ("mask,repeated=error", dict.fromkeys(policy.ACTIONS, "mask") | {"changed": "count", "repeated": "error"}),
    ],
)
def test_words(text: str, expected: dict[str, str]) -> None:
    assert policy.parse(text) == dict(expected)


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "masked",
        "repeated",
        "repeated=",
        "repeated=drop",
        "all_zero=mask",
        "missing=count",
        "out_of_range=count",
        "=mask",
    ],
)
def test_words_that_mean_nothing(text: str) -> None:
    with pytest.raises(OverlayError) as caught:
        policy.parse(text)
    assert (caught.value.field, caught.value.got) == ("SKYRL_R3_CHECKS", repr(text))
    assert "repeated=error|mask|count" in caught.value.expected


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policy.VARIABLE, "repeated=count")
    assert policy.current() == {**policy.DEFAULTS, "repeated": "count"}
    monkeypatch.setenv(policy.VARIABLE, "off")
    assert policy.current() is not None
    policy.use("off")
    assert policy.current() is None
    policy.use(None)
    assert policy.current() is None  # Of the environment again.


def test_enable_takes_a_policy() -> None:
    with pytest.raises(OverlayError):
        skyrl_r3.enable(checks="sometimes")
    try:
        skyrl_r3.enable(checks="repeated=count")
        assert policy.current() == {**policy.DEFAULTS, "repeated": "count"}
        skyrl_r3.enable()
        assert policy.current() == {**policy.DEFAULTS, "repeated": "count"}
    finally:
        skyrl_r3.disable()


# Rows.


@pytest.mark.parametrize("kind", PLANTED)
def test_error(kind: str) -> None:
    with pytest.raises(RoutesError) as caught:
        settle(planted(kind))
    error = caught.value
    assert error.kind == kind
    assert error.where.startswith("row 3, 1 of 8 rows, of the prompt, in layer 1, finish_reason 'stop'")
    assert metrics.report() == {f"findings/{kind}": 1}


@pytest.mark.parametrize("kind", PLANTED)
def test_mask(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    policy.use("mask")
    given = planted(kind)
    assert given.routed_experts is not None
    given.routed_experts.flags.writeable = False
    for _ in range(2):
        ids = settle(given)
        assert not ids[3].any()
        others = np.arange(ROWS) != 3
        assert np.array_equal(ids[others], given.routed_experts[others])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # Once.
    assert f"masked and counted, and so is what follows of its kind, {kind}" in caplog.text


@pytest.mark.case("R90")
def test_masked_rows_are_no_load() -> None:
    policy.use("mask")
    settle(planted("all_equal"))
    masked = metrics.report()
    ids = np.delete(clean(ROWS), 3, axis=0)
    settle(reply(ids, response=RESPONSE - 1))
    expected = {key: value for key, value in metrics.report().items() if key.startswith("expert_load")}
    assert {key: value for key, value in masked.items() if key.startswith("expert_load")} == expected != {}


@pytest.mark.parametrize("kind", ["all_equal", "repeated"])
def test_count(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    policy.use("count")
    given = planted(kind)
    for _ in range(2):
        assert settle(given) is given.routed_experts
    assert caplog.text.count("let through and counted") == 1


def test_identical_rows_are_counted() -> None:
    ids = clean(40)
    ids[10:30] = ids[10]
    given = reply(ids, response=41 - PROMPT)
    assert settle(given) is ids
    policy.use("identical_rows=error")
    with pytest.raises(RoutesError) as caught:
        settle(given)
    assert caught.value.kind == "identical_rows"
    policy.use("identical_rows=mask")
    assert np.flatnonzero(~settle(given).any(axis=(1, 2))).tolist() == list(range(10, 30))


def test_kinds_have_policies_of_their_own() -> None:
    ids = clean(ROWS)
    for plant in ("all_equal", "repeated"):
        PLANTED[plant](ids[{"all_equal": 0, "repeated": 3}[plant] :])
    policy.use("all_equal=mask,repeated=count")
    masked = settle(reply(ids))
    assert np.flatnonzero(~masked.any(axis=(1, 2))).tolist() == [3]
    assert np.array_equal(masked[6], ids[6])


def test_off_looks_at_no_ids() -> None:
    policy.use("off")
    for kind in PLANTED:
        given = planted(kind)
        assert settle(given) is given.routed_experts
    with pytest.raises(MissingRoutesError):
        settle(reply(None))
    for wrong in (clean(ROWS + 1), clean(ROWS, layers=LAYERS + 1), clean(ROWS, topk=TOPK + 1)):
        with pytest.raises(RoutesError):
            settle(reply(wrong))


# The whole reply.


def broken(encoding: str) -> bytes:
    given = reply(clean(ROWS), spec=RouteSpec())
    body = (frame if encoding == wire.FRAME else packed).dump(given)
    return body.replace(b'"U8"', b'"U9"').replace(b'"uint8"', b'"uint9"')


WHOLE = {
    "missing": reply(None),
    "rows": reply(clean(ROWS + 2)),
    "prompt": reply(clean(ROWS), prompt_tokens=PROMPT + 1),
    "shape": reply(clean(ROWS, topk=TOPK + 1)),
}


@pytest.mark.case("R07", "R12", "R60")
@pytest.mark.parametrize("kind", WHOLE)
def test_a_reply_of_which_no_row_can_be_trusted(kind: str) -> None:
    with pytest.raises(RoutesError) as caught:
        settle(WHOLE[kind])
    assert caught.value.kind == kind
    assert str(caught.value).count("finish_reason 'stop'") == 1
    policy.use(f"{kind}=mask")
    ids = settle(WHOLE[kind])
    assert (ids.shape, ids.dtype, ids.any()) == ((ROWS, LAYERS, TOPK), np.uint8, False)
    assert settle(WHOLE[kind], start=2).shape == (ROWS - 2, LAYERS, TOPK)


@pytest.mark.case("R71")
@pytest.mark.parametrize("encoding", [wire.FRAME, wire.PACKED])
def test_broken_routes(encoding: str) -> None:
    """One of many: the run ends, or this sample is lost and nothing else."""
    body = broken(encoding)
    with pytest.raises(BrokenRoutesError) as caught:
        policy.settle(lambda: wire.load(body), prompt=PROMPT)
    assert caught.value.field == "routed_experts.dtype"
    policy.use("broken=mask")
    with pytest.raises(BrokenRoutesError):
        policy.settle(lambda: wire.load(body), prompt=PROMPT)  # Nobody has told yet what routes look like.
    assert np.array_equal(settle(reply(clean(ROWS), spec=RouteSpec())), clean(ROWS))
    got, _, ids = policy.settle(lambda: wire.load(body), prompt=PROMPT)
    assert (ids.shape, ids.any()) == ((ROWS, LAYERS, TOPK), False)
    assert got.token_ids.tolist() == list(range(RESPONSE))


@pytest.mark.parametrize("text", ["", "mask"])
def test_a_body_that_cannot_be_read_is_an_error(text: str) -> None:
    """It has no tokens, so that there is no sample to mask."""
    policy.use(text)
    for body in (b"", b"{}", broken(wire.FRAME)[:-3], b'{"choices":[{"token_ids":["a"],"finish_reason":"stop"}]}'):
        with pytest.raises(ReplyError) as caught:
            policy.settle(lambda body=body: wire.load(body), prompt=PROMPT)
        assert not isinstance(caught.value, RoutesError)


@pytest.mark.parametrize("text", ["", "mask", "count", "error"])
@pytest.mark.parametrize("ids", [None, np.zeros((3, LAYERS, TOPK), np.uint8), np.zeros((0, 0, 0), np.uint8)])
def test_an_aborted_request_is_no_finding(text: str, ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy.use(text)
    given = reply(ids, response=0)
    assert len(settle(given)) == (0 if ids is None else len(ids))
    assert not caplog.records


def test_one_expert_a_token_cannot_be_masked() -> None:
    """Zero may be its route."""
    spec = RouteSpec(layers=2, topk=1, num_experts=4, moe_layers=(0, 1))
    policy.use("mask")
    ids = np.arange(ROWS * 2, dtype=np.uint8).reshape(ROWS, 2, 1) % 4
    assert settle(reply(ids, spec=spec)) is ids
    still = np.full((30, 2, 1), 3, np.uint8)
    assert settle(reply(still, spec=spec, response=31 - PROMPT)) is still  # Counted, as by default.
    assert metrics.report()["findings/identical_rows"] == 1
    ids[1] = 4
    with pytest.raises(RoutesError):
        settle(reply(ids, spec=spec))
    with pytest.raises(MissingRoutesError):
        settle(reply(None, spec=spec))


@pytest.mark.parametrize("claim", [2**16, 2**31, 9_999_999_999])
def test_a_claim_is_not_allocated(claim: int) -> None:
    """A frame of a few bytes that has no routes, and says how large they would be."""
    policy.use("mask")
    with pytest.raises(MissingRoutesError):
        settle(reply(None, spec=RouteSpec(layers=claim, topk=claim)))


def test_turns_have_the_shape_of_those_before() -> None:
    held = clean(3)
    other = clean(ROWS - 3, layers=LAYERS + 2)
    for given in (other, None):
        policy.use("shape=mask,missing=mask")
        got, _, ids = policy.settle(
            lambda given=given: (reply(given, spec=RouteSpec()), "packed"), prompt=PROMPT, held=held
        )
        assert (ids.shape, ids.any(), got.rows) == ((ROWS - 3, LAYERS, TOPK), False, 0)
    policy.use("error")
    with pytest.raises(RoutesError) as caught:
        policy.settle(lambda: (reply(other, spec=RouteSpec()), "packed"), prompt=PROMPT, held=held)
    assert (caught.value.kind, caught.value.expected) == ("shape", f"{LAYERS} layers, as the model has")


def test_errors_survive_ray() -> None:
    for kind in PLANTED:
        with pytest.raises(RoutesError) as caught:
            settle(planted(kind))
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.kind, str(again)) == (RoutesError, kind, str(caught.value))
    with pytest.raises(BrokenRoutesError) as caught:
        policy.settle(lambda: wire.load(broken(wire.FRAME)), prompt=PROMPT)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, again.reply, str(again)) == ("broken", None, str(caught.value))


# Rows that come again.


def test_other_ids_for_rows_that_are_held(caplog: pytest.LogCaptureFixture) -> None:
    held = clean(6)
    again = held.copy()
    policy.changed(held, again)
    assert not caplog.records
    again[4, 1, 0] += 1
    policy.changed(held, again)
    assert "1 of 6 with others, the first is row 4" in caplog.text
    policy.use("changed=error")
    with pytest.raises(RoutesError):
        policy.changed(held, again)
    again[4] = 0
    policy.changed(held, again)  # Masked: there is nothing to compare.
    policy.changed(again, held)
    policy.changed(held[:0], again[:0])
    policy.use("off")
    policy.changed(held, again)
