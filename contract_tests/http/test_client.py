"""The client under test, with servers that deliver the right reply in one way or another."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from contract_tests import canned
from contract_tests.adapter import FRAME, NESTED, PACKED, Http, Reply
from contract_tests.http.exchange import (
    LOGPROBS,
    PROMPT,
    RESPONSE,
    always,
    answering,
    assert_same,
    body_of,
    exchange,
    reply_to,
    right_answers,
)
from contract_tests.http.faults import HARMLESS, delivering

pytestmark = pytest.mark.capability("http")

# One row more than 64 KiB in every encoding.
LONG = [token % 997 for token in range(12_000)]

SHAPES: dict[str, tuple[int, ...]] = {
    "one row": (1, 3, 2),
    "one layer": (7, 1, 2),
    "top-1": (7, 3, 1),
    "one id": (1, 1, 1),
    "many layers": (7, 61, 8),
}
LARGEST = {"uint8": (0, 255), "int16": (256, 32_767), "int32": (32_768, 2**31 - 1)}


def routes_up_to(largest: int, shape: tuple[int, ...] = (7, 3, 2)) -> np.ndarray:
    """Ids of many sizes up to ``largest``."""
    ids = np.arange(int(np.prod(shape)), dtype=np.int64) * 2_654_435_761 % (largest + 1)
    ids[-1] = largest
    return ids.reshape(shape)


@pytest.mark.parametrize("delivery", HARMLESS)
async def test_a_right_reply_arrives_in_one_request_however_it_is_delivered(
    http: Http, encoding: str, delivery: str
) -> None:
    """A right reply arrives bit for bit and in one request, in any chunks, pace, compression or content type."""
    body = body_of(reply_to(PROMPT), encoding)
    async with exchange(http, always(delivering(HARMLESS[delivery], body))) as on:
        await on.right()
        assert on.server.hits == 1


@pytest.mark.case("R31")
@pytest.mark.parametrize("delivery", ["64 KiB chunks", "gzip", "deflate"])
async def test_a_long_reply_arrives_in_one_request(http: Http, encoding: str, delivery: str) -> None:
    """A reply of more than one read arrives bit for bit and in one request."""
    body = body_of(reply_to(LONG), encoding)
    assert len(body) > 2**16
    async with exchange(http, always(delivering(HARMLESS[delivery], body))) as on:
        await on.right(LONG)
        assert on.server.hits == 1


@pytest.mark.case("R34")
@pytest.mark.parametrize(
    "largest", [pytest.param(one, id=f"{dtype} {one}") for dtype, both in LARGEST.items() for one in both]
)
async def test_ids_arrive_in_the_smallest_dtype_that_holds_them(http: Http, encoding: str, largest: int) -> None:
    """Routes arrive with the ids that were sent, in the smallest dtype of the wire."""
    # Of several experts a token, one at least has a higher id than 0.
    routes = routes_up_to(largest) if largest else routes_up_to(0, (len(PROMPT) + len(RESPONSE) - 1, 3, 1))
    body = body_of(reply_to(PROMPT, routes), encoding)
    async with exchange(http, always(answering(body, encoding))) as on:
        found: Any = (await on.right(routes=routes)).routes
    assert found.dtype.name == next(dtype for dtype, both in LARGEST.items() if largest in both)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_routes_of_any_shape_arrive(http: Http, encoding: str, shape: tuple[int, ...]) -> None:
    """Routes of one row, one layer or one expert keep their three dimensions."""
    prompt = PROMPT[: shape[0] - 2] if shape[0] > 2 else [5]
    response = RESPONSE[: shape[0] + 1 - len(prompt)]
    routes = routes_up_to(200, shape)
    sent = Reply(response, "length", LOGPROBS[: len(response)], routes.astype(np.uint8))
    async with exchange(http, always(answering(body_of(sent, encoding), encoding))) as on:
        found = await on.ask(prompt)
    assert isinstance(found, Reply), found
    assert_same(found, sent)


async def test_a_reply_without_logprobs_has_none(http: Http, encoding: str) -> None:
    """Where the server sends no logprobs, none are made up."""
    sent = Reply(RESPONSE, "stop", None, reply_to(PROMPT).routes)
    async with exchange(http, always(answering(body_of(sent, encoding), encoding))) as on:
        found = await on.ask()
    assert isinstance(found, Reply), found
    assert_same(found, sent)


async def test_a_reply_without_tokens_has_none(http: Http, encoding: str) -> None:
    """The reply to a request that was aborted before its first token has no tokens and no logprobs."""
    routes = canned.routes_of(PROMPT[:-1])
    sent = Reply([], "abort", [], routes)
    async with exchange(http, always(answering(body_of(sent, encoding), encoding))) as on:
        found = await on.ask()
    assert isinstance(found, Reply), found
    # SkyRL's client says None where there are no logprobs.
    assert not found.logprobs
    assert_same(found, Reply([], "abort", found.logprobs, routes))


@pytest.mark.case("R89")
async def test_routes_are_writable_or_documented_to_be_read_only(http: Http, encoding: str) -> None:
    """Routes are in C order, and writable unless the implementation documents that they are read-only."""
    async with exchange(http, right_answers(encoding)) as on:
        found: Any = (await on.right()).routes
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert found.flags.writeable is (encoding not in http.read_only)


async def test_replies_share_no_memory(http: Http, encoding: str) -> None:
    """What is written into the routes of one reply shows in no other reply."""
    async with exchange(http, right_answers(encoding)) as on:
        first: Any = (await on.right()).routes
        second: Any = (await on.right()).routes
        assert not np.shares_memory(first, second)
        if first.flags.writeable:
            first[...] = 7
        else:
            with pytest.raises(ValueError, match="read-only"):
                first[...] = 7
        assert_same(Reply(RESPONSE, "stop", LOGPROBS, second), reply_to(PROMPT))
        await on.right()


@pytest.mark.case("R54")
async def test_every_reply_of_a_connection_has_its_routes(http: Http, encoding: str) -> None:
    """The second and third reply to a client are as complete as the first, and each is asked for once."""
    async with exchange(http, right_answers(encoding)) as on:
        for number in range(1, 5):
            await on.right([number, *PROMPT])
            assert on.server.hits == number


@pytest.mark.case("R18")
async def test_replies_at_the_same_time_stay_with_their_requests(http: Http, encoding: str) -> None:
    """Of many requests at once each gets the reply to its own prompt."""
    prompts = [[number, number + 1, *range(number % 5)] for number in range(48)]

    def script(number: int, request: dict[str, Any]) -> Any:
        reply = reply_to(request["token_ids"])
        sent = Reply([*RESPONSE[:-1], request["token_ids"][0]], "stop", LOGPROBS, reply.routes)
        # The later a request comes, the sooner it is answered.
        return delivering(HARMLESS["slow" if number % 3 else "1-byte chunks"], body_of(sent, encoding))

    async with exchange(http, script) as on:
        found = await asyncio.gather(*map(on.ask, prompts))
        assert on.server.hits == len(prompts)
    for prompt, reply in zip(prompts, found, strict=True):
        assert isinstance(reply, Reply), reply
        routes = reply_to(prompt).routes
        assert_same(reply, Reply([*RESPONSE[:-1], prompt[0]], "stop", LOGPROBS, routes))


@pytest.mark.case("R18")
@pytest.mark.parametrize("broken", ["error", "page", "no routes"])
async def test_one_request_that_fails_among_16_fails_alone(http: Http, encoding: str, broken: str) -> None:
    """Of 16 requests at once the one whose reply is wrong fails, and the others get their own replies."""
    wrong = {
        "error": answering(b'{"error":{"message":"worker died"}}', status=400),
        "page": answering(b"<html>"),
        "no routes": answering(body_of(Reply(RESPONSE, "stop", LOGPROBS, None), encoding), encoding),
    }
    prompts = [[number, 8, 9] for number in range(16)]

    def script(number: int, request: dict[str, Any]) -> Any:
        prompt = request["token_ids"]
        return wrong[broken] if prompt[0] == 5 else answering(body_of(reply_to(prompt), encoding), encoding)

    async with exchange(http, script) as on:
        found = await asyncio.gather(*map(on.ask, prompts))
    assert [number for number, reply in enumerate(found) if not isinstance(reply, Reply)] == [5]
    for prompt, reply in zip(prompts, found, strict=True):
        if isinstance(reply, Reply):
            assert_same(reply, reply_to(prompt))


@pytest.mark.case("R30")
async def test_a_body_of_80_mib_arrives(http: Http, encoding: str) -> None:
    """A reply of 80 MiB arrives bit for bit, and is asked for once."""
    # A list of small ids would be a fifth of a gigabyte as objects: ids of ten digits take fewer of them.
    rows = {FRAME: 81_920, PACKED: 61_440, NESTED: 7_500}[encoding]
    shape = (rows, 64, 16)
    first = np.random.default_rng(7).integers(0, 256, (*shape[:2], 1), dtype=np.uint8)
    base = first + np.arange(0, 256, 16, dtype=np.uint8)  # Modulo 256, so that they differ.
    routes = base if encoding != NESTED else base.astype(np.int32) + (2**31 - 256)
    prompt = [token % 1000 for token in range(rows + 1 - len(RESPONSE))]
    sent = Reply(RESPONSE, "stop", LOGPROBS, routes)
    body = body_of(sent, encoding)
    assert 80 * 2**20 <= len(body) < 100 * 2**20
    async with exchange(http, always(answering(body, encoding))) as on:
        found = await on.ask(prompt)
        assert on.server.hits == 1
    assert isinstance(found, Reply), found
    assert_same(found, sent)


async def test_the_client_reads_what_the_endpoint_writes(http: Http) -> None:
    """A reply of the endpoint under test is read by the client under test, with the engine's tokens and routes."""

    def complete(prompt: list[int], params: Any) -> Any:
        logprobs = canned.logprobs_as_asked(
            params, [[(token, value)] for token, value in zip(RESPONSE, LOGPROBS, strict=True)]
        )
        return canned.completion(RESPONSE, prompt=prompt, logprobs=logprobs)

    engine = canned.CannedEngine(complete)
    async with canned.served(http.app(engine)) as address, http.client(address) as client:
        for prompt in (PROMPT, LONG, [5]):
            assert_same(await client.generate(prompt, logprobs=True), reply_to(prompt))
    assert len(engine.requests) == 3
