"""The endpoint under test, with an engine that hands over routes in every form."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from starlette.middleware.gzip import GZipMiddleware

from contract_tests import canned, strategies
from contract_tests.adapter import Http
from contract_tests.corruption import fed
from contract_tests.http.endpoint import WAYS, assert_routes, calling, engine_of, of_tokens
from contract_tests.http.exchange import LOGPROBS, PROMPT, RESPONSE
from contract_tests.replies import ASKS, URL, read

pytestmark = pytest.mark.capability("http")

LARGEST = (0, 255, 256, 383, 511, 32_767, 32_768, 2**31 - 1)
SHAPES: dict[str, tuple[list[int], list[int], tuple[int, int]]] = {
    "one row": ([7], [9], (3, 2)),
    "one layer": (PROMPT, RESPONSE, (1, 2)),
    "top-1": (PROMPT, RESPONSE, (3, 1)),
    "many layers": (PROMPT, RESPONSE, (61, 8)),
    "aborted": (PROMPT, [], (3, 2)),
}
NOT_ROUTES: dict[str, Any] = {
    "a negative id": np.full((7, 3, 2), -1, np.int16),
    "an id beyond int32": np.full((7, 3, 2), 2**31, np.int64),
    "floats": np.zeros((7, 3, 2), np.float32),
    "two dimensions": np.zeros((7, 6), np.uint8),
    "base64": "AAECAwQF",
    "bytes": b"AAEC",
}


def ids_up_to(largest: int) -> np.ndarray:
    ids = np.arange(42, dtype=np.int64) * 2_654_435_761 % (largest + 1)
    ids[-1] = largest
    return ids.reshape(7, 3, 2)


@pytest.mark.parametrize("way", WAYS)
async def test_the_reply_is_the_engine_s(http: Http, encoding: str, way: str) -> None:
    """The reply has the engine's tokens, finish reason and logprobs, and its routes bit for bit."""
    async with calling(http, http.app(engine_of()), way=way, encoding=encoding) as endpoint:
        found = await endpoint.read()
    assert (found.token_ids, found.finish_reason, found.logprobs) == (RESPONSE, "stop", LOGPROBS)
    assert_routes(found, of_tokens(PROMPT))


async def test_the_reply_is_the_same_over_a_socket(http: Http, encoding: str) -> None:
    """The body and its content type over a socket are those of a call in process, byte for byte."""
    app = http.app(engine_of())
    answers = []
    for way in WAYS:
        async with calling(http, app, way=way, encoding=encoding) as endpoint:
            answers.append(await endpoint.post())
    in_process, socket = answers
    assert in_process.status_code == socket.status_code == 200
    assert in_process.content == socket.content
    assert in_process.headers["content-type"] == socket.headers["content-type"]


@pytest.mark.parametrize("way", WAYS)
async def test_the_reply_tells_its_length(http: Http, encoding: str, way: str) -> None:
    """The content length is the number of bytes of the body, and the body is not chunked."""
    async with calling(http, http.app(engine_of()), way=way, encoding=encoding) as endpoint:
        answer = await endpoint.post()
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize("case", SHAPES)
async def test_routes_of_any_shape_are_sent(http: Http, encoding: str, case: str) -> None:
    """Routes of one row, one layer or one expert, and of a request that was aborted, are those of the engine."""
    prompt, response, (layers, topk) = SHAPES[case]
    routes = canned.routes_of([*prompt, *response][:-1], layers=layers, topk=topk)
    app = http.app(engine_of(routes, response))
    async with calling(http, app, way="in process", encoding=encoding) as endpoint:
        found = await endpoint.read(prompt)
    assert found.token_ids == response
    assert_routes(found, routes)


async def test_routes_without_rows_are_sent(http: Http, encoding: str) -> None:
    """Of a request that was aborted before anything was computed, no rows are sent, and none are made up."""
    routes = np.empty((0, 3, 2), np.uint8)
    app = http.app(engine_of(routes, []))
    async with calling(http, app, way="in process", encoding=encoding) as endpoint:
        found = await endpoint.read([7])
    assert found.token_ids == []
    assert_routes(found, routes)


@pytest.mark.case("R34")
@pytest.mark.parametrize("largest", LARGEST)
async def test_ids_are_sent_in_the_smallest_dtype(http: Http, encoding: str, largest: int) -> None:
    """Ids up to 2**31 - 1 are sent as they are, in the smallest dtype of the wire."""
    routes = ids_up_to(largest)
    app = http.app(engine_of(routes))
    async with calling(http, app, way="in process", encoding=encoding) as endpoint:
        assert_routes(await endpoint.read(), routes)


@pytest.mark.case("R26")
@pytest.mark.parametrize("largest", [200, 40_000])
@pytest.mark.parametrize("layout", strategies.ALL_LAYOUTS)
async def test_an_engine_s_array_may_have_any_layout(http: Http, encoding: str, layout: str, largest: int) -> None:
    """Strided, read-only, big-endian and torch arrays of the engine are sent with their values."""
    routes = strategies.lay_out(ids_up_to(largest).astype(np.int32), layout)
    app = http.app(engine_of(routes.given))
    async with calling(http, app, way="in process", encoding=encoding) as endpoint:
        assert_routes(await endpoint.read(), routes.values)


@pytest.mark.case("R14")
@pytest.mark.parametrize("layout", ["c", "tail", "reversed_rows", "read_only", "tensor"])
async def test_a_buffer_that_the_engine_uses_again_does_not_change_the_reply(
    http: Http, encoding: str, layout: str
) -> None:
    """What the engine writes into a buffer of its own once the reply has begun does not show in the reply."""
    ids = of_tokens(PROMPT)
    buffer = np.concatenate([ids, np.zeros_like(ids)])
    routes = strategies.lay_out(buffer, layout)
    app = http.app(engine_of(routes.given[: len(ids)]))

    async def overwriting(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_overwrite(message: Any) -> None:
            if message["type"] == "http.response.start":
                routes.overwrite()
            await send(message)

        await app(scope, receive, send_and_overwrite)

    async with calling(http, overwriting, way="in process", encoding=encoding) as endpoint:
        assert_routes(await endpoint.read(), ids)


@pytest.mark.case("R20")
async def test_logprobs_that_are_no_numbers_are_floored(http: Http, encoding: str) -> None:
    """Missing, NaN and infinite logprobs are sent as -9999, with the routes and the other logprobs intact."""
    tokens = [10, 11, 12, 13, 14, 15]
    numbers = zip(tokens, [-0.5, math.nan, -math.inf, math.inf], strict=False)
    logprobs: list[Any] = [{token: canned.logprob(value)} for token, value in numbers]
    logprobs += [{14: None}, {}]
    engine = canned.CannedEngine(lambda prompt, params: canned.completion(tokens, prompt=prompt, logprobs=logprobs))
    async with calling(http, http.app(engine), way="in process", encoding=encoding) as endpoint:
        found = await endpoint.read()
    assert found.logprobs == [-0.5, *[-9999.0] * 5]
    assert found.token_ids == tokens
    assert_routes(found, canned.routes_of([*PROMPT, *tokens][:-1]))


@pytest.mark.case("R15")
async def test_routes_that_the_engine_did_not_capture_are_not_made_up(http: Http, encoding: str) -> None:
    """Where the engine has no routes, the reply has none, or is an error."""
    async with calling(http, http.app(engine_of(None)), way="in process", encoding=encoding) as endpoint:
        answer = await endpoint.post()
    assert answer.status_code == 200 or answer.status_code >= 500
    if answer.status_code == 200:
        assert read(answer.content).routes is None


@pytest.mark.case("R25")
@pytest.mark.parametrize("case", NOT_ROUTES)
async def test_an_engine_that_hands_over_no_routes_is_a_server_error(http: Http, encoding: str, case: str) -> None:
    """What the engine hands over in the place of routes is not sent on, but answered with 5xx."""
    app = http.app(_plain_engine(fed(f"http: engine: {case}", NOT_ROUTES[case])))
    async with calling(http, app, way="in process", encoding=encoding) as endpoint:
        assert (await endpoint.post()).status_code >= 500


def _plain_engine(routes: Any) -> canned.CannedEngine:
    def complete(prompt: list[int], params: Any) -> Any:
        made = canned.completion(RESPONSE, prompt=prompt)
        made.routed_experts = routes
        return made

    return canned.CannedEngine(complete)


@pytest.mark.case("R31")
@pytest.mark.parametrize("way", WAYS)
async def test_a_compressing_server_sends_the_right_reply(http: Http, encoding: str, way: str) -> None:
    """Behind a middleware that compresses, the reply is still the engine's."""
    app = GZipMiddleware(http.app(engine_of()), minimum_size=1)
    async with calling(http, app, way=way, encoding=encoding) as endpoint:
        answer = await endpoint.post()
    assert answer.headers["content-encoding"] == "gzip"
    found = read(answer.content)
    assert (found.token_ids, found.logprobs) == (RESPONSE, LOGPROBS)
    assert_routes(found, of_tokens(PROMPT))


@pytest.mark.case("R33")
async def test_a_prompt_of_200_000_tokens_is_answered(http: Http, encoding: str) -> None:
    """A request of more than a megabyte is answered with a row for each of its tokens."""
    prompt = [token % 100_000 for token in range(200_000)]
    routes = canned.routes_of([*prompt, *RESPONSE][:-1], layers=1, topk=1)
    async with calling(http, http.app(engine_of(routes)), way="socket", encoding=encoding) as endpoint:
        assert_routes(await endpoint.read(prompt), routes)


# Several requests


@pytest.mark.case("R18")
@pytest.mark.parametrize("way", WAYS)
async def test_requests_at_the_same_time_keep_their_own_routes(http: Http, encoding: str, way: str) -> None:
    """Of many requests at once, each is answered with the routes of its own tokens."""
    prompts = [[number, number + 1, *range(number % 5)] for number in range(32)]
    async with calling(http, http.app(engine_of()), way=way, encoding=encoding) as endpoint:
        found = await asyncio.gather(*map(endpoint.read, prompts))
    for prompt, reply in zip(prompts, found, strict=True):
        assert_routes(reply, of_tokens(prompt))


@pytest.mark.case("R18")
@pytest.mark.parametrize(
    ("failure", "way"), [("raises", "in process"), ("raises", "socket"), ("samples nothing", "in process")]
)
async def test_one_request_that_fails_among_16_fails_alone(http: Http, encoding: str, failure: str, way: str) -> None:
    """Of 16 requests at once the one that the engine fails on is an error, and the others get their own routes."""

    def complete(prompt: list[int], params: Any) -> Any:
        if prompt[0] != 5:
            return canned.completion(RESPONSE, prompt=prompt)
        if failure == "raises":
            raise RuntimeError("worker died")
        return None

    prompts = [[number, 8, 9] for number in range(16)]
    app = http.app(canned.CannedEngine(complete))
    async with calling(http, app, way=way, encoding=encoding) as endpoint:
        answers = await asyncio.gather(*map(endpoint.post, prompts))
    assert [number for number, answer in enumerate(answers) if answer.status_code != 200] == [5]
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.status_code == 200:
            assert_routes(read(answer.content), of_tokens(prompt))


@pytest.mark.case("R54")
async def test_every_reply_on_a_connection_has_its_routes(http: Http, encoding: str) -> None:
    """The second and third reply on a connection are as complete as the first."""
    engine = engine_of()
    async with calling(http, http.app(engine), way="socket", encoding=encoding) as endpoint:
        for number in range(1, 5):
            assert_routes(await endpoint.read([number, *PROMPT]), of_tokens([number, *PROMPT]))
            assert len(engine.requests) == number


async def test_a_request_that_names_no_encoding_is_answered(http: Http) -> None:
    """A client that knows of no encodings gets the engine's routes as well."""
    async with calling(http, http.app(engine_of()), way="in process") as endpoint:
        answer = await endpoint.client.post(URL, json={"token_ids": PROMPT, "sampling_params": {"logprobs": 0}})
        unknown = await endpoint.post(**{ASKS: [*endpoint.encodings, "frame/99"], "no_such_field": 1})
    for reply in (answer, unknown):
        assert reply.status_code == 200
        assert_routes(read(reply.content), of_tokens(PROMPT))
