"""The client under test, with replies of status 200 that arrive whole and are wrong."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract_tests import corruption
from contract_tests.adapter import Http, Reply
from contract_tests.corruption import fed
from contract_tests.http.broken import BROKEN
from contract_tests.http.exchange import (
    PROMPT,
    REFUSAL,
    Answer,
    Exchange,
    always,
    answering,
    assert_same,
    at_first,
    body_of,
    exchange,
    reply_to,
    right_answers,
    told_by,
)

pytestmark = pytest.mark.capability("http")

PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def wrong(case: str) -> Answer:
    """The answer with the body of ``case``, and the content type that belongs to it."""
    return answering(fed(f"http: {case}", BROKEN[case]), case.partition(":")[0])


@pytest.mark.case("R07", "R22", "R35", "R46", "R48")
@pytest.mark.parametrize("case", BROKEN)
async def test_a_whole_reply_that_is_wrong_never_yields_data(http: Http, case: str) -> None:
    """A reply of status 200 that is not the reply to the request is an error."""
    # The second answer ends it for a client that asks again.
    async with exchange(http, at_first(wrong(case), REFUSAL)) as on:
        await on.refused()


@pytest.mark.case("R22", "R46")
@pytest.mark.parametrize("case", BROKEN)
async def test_a_whole_reply_that_is_wrong_is_asked_for_once(http: Http, case: str) -> None:
    """A reply of status 200 that is wrong is not generated again: it would be wrong again, or hide the fault."""
    async with exchange(http, always(wrong(case))) as on:
        await on.ask()
        assert on.server.hits == 1


async def test_a_client_works_on_after_a_wrong_reply(on: Exchange, encoding: str) -> None:
    """After a wrong reply, the next request with the same client gets its own right one."""
    for number, case in enumerate(BROKEN):
        on.begin(at_first(wrong(case), REFUSAL))
        await on.ask()
        on.begin(right_answers(encoding))
        await on.right([number, *PROMPT])
        assert on.server.hits == 1, case


def parts(body: bytes) -> list[slice]:
    """Where a small accident does most harm: in the tokens and logprobs of JSON, and in the header of a frame."""
    if body[:1] != b"{":
        header = 8 + int.from_bytes(body[:8], "little")
        return [slice(0, 8), slice(8, header), slice(header, None)]
    starts = [body.find(key) + len(key) for key in (b'"token_ids":', b'"logprobs":', b'"routed_experts":')]
    return [slice(start, body.find(b"]", start) + 1) for start in starts]


@st.composite
def corrupted(draw: st.DrawFn, encoding: str) -> bytes:
    """The right body after one to three accidents anywhere, or after a small one that a parser may not notice."""
    body = body_of(reply_to(PROMPT), encoding)
    if draw(st.booleans()):
        return fed("http: mutated", draw(corruption.bytes_of(body)))
    start, end, _ = draw(st.sampled_from(parts(body))).indices(len(body))
    at = draw(st.integers(start, end - 1))
    return fed("http: mutated", body[:at] + bytes([draw(st.sampled_from(b"0123456789,.-"))]) + body[at + 1 :])


@PER_EXAMPLE
@given(data=st.data())
async def test_a_corrupted_reply_never_yields_what_is_not_in_it(
    on: Exchange, encoding: str, data: st.DataObject
) -> None:
    """A reply with bytes changed, lost or added is an error, unless it still is a right reply, which is then taken."""
    body = data.draw(corrupted(encoding))
    on.begin(at_first(answering(body, encoding), REFUSAL))
    found = await on.ask()
    if isinstance(found, Reply):
        told = told_by(body, prompt=len(PROMPT))
        assert told is not None, f"{found} from {body!r}"
        assert_same(found, told)


@PER_EXAMPLE
@given(data=st.data())
async def test_a_corrupted_reply_is_asked_for_once(on: Exchange, encoding: str, data: st.DataObject) -> None:
    """A reply with bytes changed, lost or added is asked for once."""
    on.begin(at_first(answering(data.draw(corrupted(encoding)), encoding), REFUSAL))
    await on.ask()
    assert on.server.hits == 1
