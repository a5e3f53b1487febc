"""The client under test, with connections that break and servers that answer with errors."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract_tests.adapter import Http, Reply
from contract_tests.corruption import fed
from contract_tests.http.exchange import (
    ATTEMPTS,
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
)
from contract_tests.http.faults import LOST, SPOILT, delivering, nowhere, raw, redirecting

pytestmark = pytest.mark.capability("http")

CLIENT_ERRORS = (400, 401, 404, 408, 413, 422, 429)
SERVER_ERRORS = (500, 502, 503, 504)
EXPLANATIONS: dict[str, bytes] = {
    "JSON": b'{"error":{"message":"no such model"}}',
    "detail": b'{"detail":"no such model"}',
    "text": b"no such model",
    "page": b"<html>no such model</html>",
    "nothing": b"",
}


def error_answer(status: int, explained: str) -> Answer:
    return answering(fed(f"http: status {status}", EXPLANATIONS[explained]), status=status)


# Connections


@pytest.mark.parametrize("fault", LOST)
async def test_a_connection_that_always_breaks_never_yields_data(http: Http, encoding: str, fault: str) -> None:
    """A reply whose connection breaks each time ends in an error, after no more requests than SkyRL's client makes."""
    body = body_of(reply_to(PROMPT), encoding)
    async with exchange(http, always(delivering(LOST[fault], body, f"http: {fault}"))) as on:
        await on.refused()
        assert 1 <= on.server.hits <= ATTEMPTS


@pytest.mark.parametrize("fault", LOST)
async def test_a_connection_that_breaks_once_ends_in_the_right_reply(http: Http, encoding: str, fault: str) -> None:
    """A request whose connection breaks is sent once more, and its reply arrives bit for bit."""
    body = body_of(reply_to(PROMPT), encoding)
    script = at_first(delivering(LOST[fault], body, f"http: {fault}"), answering(body, encoding))
    async with exchange(http, script) as on:
        await on.right()
        assert on.server.hits == 2


@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("times", ["always", "once"])
async def test_a_reply_that_is_spoilt_on_its_way_never_yields_other_data(
    http: Http, encoding: str, fault: str, times: str
) -> None:
    """A reply that is damaged on its way comes out right or as an error, after a bounded number of requests."""
    body = body_of(reply_to(PROMPT), encoding)
    spoilt = delivering(SPOILT[fault], body, f"http: {fault}")
    script = always(spoilt) if times == "always" else at_first(spoilt, answering(body, encoding))
    async with exchange(http, script) as on:
        found = await on.ask()
        if isinstance(found, Reply):
            assert_same(found, reply_to(PROMPT))
        assert 1 <= on.server.hits <= (ATTEMPTS if times == "always" else 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
async def test_a_reply_that_ends_at_any_byte_never_yields_other_data(
    on: Exchange, encoding: str, data: st.DataObject
) -> None:
    """A reply that stops at any byte, by a broken connection or with a length that fits, is right or an error."""
    body = body_of(reply_to(PROMPT), encoding)
    cut = fed("http: cut", body[: data.draw(st.integers(0, len(body) - 1))])
    length = data.draw(st.sampled_from([len(body), len(cut)]))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    # No more than two requests, so that a client that tries again is not driven to its limit by each example.
    on.begin(at_first(raw(head.encode(), cut), data.draw(st.sampled_from([answering(body, encoding), REFUSAL]))))
    found = await on.ask()
    if isinstance(found, Reply):
        assert_same(found, reply_to(PROMPT))
    assert on.server.hits <= 2


async def test_a_broken_connection_does_no_harm_to_the_requests_beside_it(http: Http, encoding: str) -> None:
    """Of many requests at once of which some lose their connection, none gets another's reply."""
    prompts = [[number, 8, 9] for number in range(24)]
    faults = list(LOST.values())

    def script(number: int, request: dict[str, list[int]]) -> Answer:
        body = body_of(reply_to(request["token_ids"]), encoding)
        if request["token_ids"][0] % 3:
            return answering(body, encoding)
        return delivering(faults[request["token_ids"][0] // 3], body, "http: beside others")

    async with exchange(http, script) as on:
        found = await asyncio.gather(*map(on.ask, prompts))
    for number, (prompt, reply) in enumerate(zip(prompts, found, strict=True)):
        assert isinstance(reply, Reply) is (number % 3 > 0), reply
        if isinstance(reply, Reply):
            assert_same(reply, reply_to(prompt))


async def test_a_client_works_on_after_a_broken_connection(on: Exchange, encoding: str) -> None:
    """After a request that failed, the next one with the same client gets its reply in one request."""
    body = body_of(reply_to(PROMPT), encoding)
    for fault in LOST:
        on.begin(always(delivering(LOST[fault], body, f"http: {fault}")))
        await on.refused()
        on.begin(right_answers(encoding))
        await on.right([7, *PROMPT])
        assert on.server.hits == 1, fault


# Statuses


@pytest.mark.parametrize("explained", EXPLANATIONS)
@pytest.mark.parametrize("status", CLIENT_ERRORS)
async def test_a_client_error_is_raised_at_once(http: Http, status: int, explained: str) -> None:
    """An answer of 4xx is an error after one request, whatever its body says."""
    async with exchange(http, always(error_answer(status, explained))) as on:
        await on.refused()
        assert on.server.hits == 1


@pytest.mark.parametrize("explained", EXPLANATIONS)
@pytest.mark.parametrize("status", SERVER_ERRORS)
async def test_a_server_error_that_stays_is_raised(http: Http, status: int, explained: str) -> None:
    """An answer of 5xx each time is an error, after no more requests than SkyRL's client makes."""
    async with exchange(http, always(error_answer(status, explained))) as on:
        await on.refused()
        assert 1 <= on.server.hits <= ATTEMPTS


@pytest.mark.parametrize("explained", EXPLANATIONS)
@pytest.mark.parametrize("status", SERVER_ERRORS)
async def test_a_server_error_that_passes_is_raised_or_tried_again(http: Http, status: int, explained: str) -> None:
    """After one answer of 5xx there is an error, or a second request and its right reply."""
    encoding = http.encodings()[0]
    right = answering(body_of(reply_to(PROMPT), encoding), encoding)
    async with exchange(http, at_first(error_answer(status, explained), right)) as on:
        found = await on.ask()
        assert on.server.hits == (2 if isinstance(found, Reply) else 1)
        if isinstance(found, Reply):
            assert_same(found, reply_to(PROMPT))


@pytest.mark.parametrize("status", [*CLIENT_ERRORS, *SERVER_ERRORS])
async def test_a_reply_with_the_status_of_an_error_is_an_error(http: Http, encoding: str, status: int) -> None:
    """A body that looks like the right reply is no data if its status says that the request failed."""
    body = fed(f"http: status {status}", body_of(reply_to(PROMPT), encoding))
    async with exchange(http, always(answering(body, encoding, status=status))) as on:
        await on.refused()
        assert 1 <= on.server.hits <= (1 if status < 500 else ATTEMPTS)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["nowhere", "itself", "missing"])
async def test_a_redirect_that_leads_nowhere_is_an_error(http: Http, status: int, location: str) -> None:
    """A redirect to nobody, to itself or without a target ends in an error after a bounded number of requests."""
    to = {"nowhere": nowhere(), "itself": "/skyrl/v1/generate", "missing": None}[location]
    async with exchange(http, always(redirecting(status, to))) as on:
        await on.refused()
        assert 1 <= on.server.hits <= ATTEMPTS


async def test_a_server_that_is_not_there_is_an_error(http: Http) -> None:
    """A request to an address where nobody listens ends in an error."""
    async with http.client(nowhere().rstrip("/")) as client:
        with pytest.raises(Exception, match=r".") as caught:
            await asyncio.wait_for(client.generate(PROMPT), 60)
    assert not isinstance(caught.value, TimeoutError)
