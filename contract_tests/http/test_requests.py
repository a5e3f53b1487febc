"""The endpoint under test, with requests that are none, and clients that go away."""

from __future__ import annotations

import asyncio

import pytest

from contract_tests.adapter import Http
from contract_tests.corruption import fed
from contract_tests.http.endpoint import BOUND_S, WAYS, assert_routes, calling, engine_of, of_tokens
from contract_tests.http.exchange import PROMPT
from contract_tests.replies import URL

pytestmark = pytest.mark.capability("http")

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"token_ids":[1],"model":"\xff"}',
    "null": b"null",
    "a number": b"5",
    "a string": b'"text"',
    "a list": b"[]",
    "an empty object": b"{}",
    "no token ids": b'{"sampling_params":{"max_tokens":3}}',
    "a temperature below 0": b'{"token_ids":[1,2],"sampling_params":{"temperature":-1.0}}',
    "an unknown sampling parameter": b'{"token_ids":[1,2],"sampling_params":{"no_such_param":1}}',
    "sampling parameters as text": b'{"token_ids":[1,2],"sampling_params":"hot"}',
    "sampling parameters as a list": b'{"token_ids":[1,2],"sampling_params":[1]}',
}


@pytest.mark.parametrize("way", WAYS)
async def test_malformed_requests_are_answered_with_errors(http: Http, way: str) -> None:
    """Requests that are none are answered with errors, reach no engine, and the next one is answered."""
    engine = engine_of()
    async with calling(http, http.app(engine), way=way) as endpoint:
        for case, body in MALFORMED.items():
            answer = await endpoint.send(fed(f"http: request: {case}", body))
            assert answer.status_code >= 400, case
            assert engine.requests == [], case
            assert_routes(await endpoint.read(), of_tokens(PROMPT))
            engine.requests.clear()


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_request_is_told_to_be_the_client_s_fault(http: Http, case: str) -> None:
    """A request that is none is answered with 4xx, so that nobody sends it again."""
    async with calling(http, http.app(engine_of()), way="in process") as endpoint:
        answer = await endpoint.send(fed(f"http: request: {case}", MALFORMED[case]))
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize("sent", ["half of the headers", "no body", "half of the body", "a body without an end"])
async def test_a_client_that_goes_away_does_no_harm(http: Http, sent: str) -> None:
    """After a client that breaks off its request, the next request is answered."""
    body = b'{"token_ids":[3,1,4],"sampling_params":{}}'
    head = f"POST {URL} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n".encode()
    lengths = head + f"Content-Length: {len(body)}\r\n\r\n".encode()
    pieces = {
        "half of the headers": head,
        "no body": lengths,
        "half of the body": lengths + body[:20],
        "a body without an end": head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body),
    }
    engine = engine_of()
    async with calling(http, http.app(engine), way="socket") as endpoint:
        url = endpoint.client.base_url
        async with asyncio.timeout(BOUND_S):
            for _ in range(3):
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(fed(f"http: request: {sent}", pieces[sent]))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        assert_routes(await endpoint.read(), of_tokens(PROMPT))
    # What came in pieces was never a request.
    assert len(engine.requests) == 1
