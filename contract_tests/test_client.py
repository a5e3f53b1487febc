"""SkyRL's real remote client with the overlay, against a server on 127.0.0.1 that answers as told."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

import skyrl_r3
from contract_tests import canned
from contract_tests.skyrl_server import Server, client_of, json_reply
from skyrl_r3 import autoload, codec, reply
from skyrl_r3.errors import MissingRoutesError, OverlayError, ReplyError
from skyrl_r3.hooks import client as client_hook

PROMPT = [3, 1, 4, 1, 5]
RESPONSE = [9, 2, 6]
ROUTES = canned.routes_of([*PROMPT, *RESPONSE][:-1])


@pytest.fixture(autouse=True)
def overlay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client_hook, "_RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(client_hook, "_slow_servers", set())
    skyrl_r3.enable()
    yield
    skyrl_r3.disable()


async def generate(client: Any, prompts: list[list[int]] | None = None, **sampling: Any) -> Any:
    prompts = [PROMPT] if prompts is None else prompts
    batch = {"prompt_token_ids": prompts, "sampling_params": sampling, "session_ids": list(range(len(prompts)))}
    return await client.generate(batch)


def packed(routes: Any = ROUTES, token_ids: list[int] = RESPONSE, **more: Any) -> bytes:
    return reply.dump_packed(
        token_ids=token_ids, finish_reason="stop", logprobs=more.get("logprobs"), routed_experts=routes
    )


def nested(routes: Any) -> dict[str, Any]:
    choice = {"token_ids": RESPONSE, "finish_reason": "stop", "logprobs": None, "routed_experts": routes}
    return {"choices": [choice]}


async def test_packed_routes_arrive_as_an_array_with_their_tokens() -> None:
    server = Server(lambda number, body: packed(logprobs=[{"logprob": -0.5}] * 3))
    async with client_of(server) as client:
        output = await generate(client, logprobs=0)
    (routes,) = output["rollout_expert_indices"]
    np.testing.assert_array_equal(routes.ids, ROUTES, strict=True)
    assert routes.ids.flags.writeable  # R89
    assert routes.token_ids.tolist() == [*PROMPT, *RESPONSE][:-1]
    assert output["response_ids"] == [RESPONSE]
    assert output["response_logprobs"] == [[-0.5] * 3]
    assert output["stop_reasons"] == ["stop"]


async def test_the_request_is_stock_s_plus_one_field() -> None:
    server = Server(lambda number, body: packed() if reply.ENCODINGS_FIELD in body else nested(ROUTES.tolist()))
    async with client_of(server) as client:
        await generate(client, max_tokens=3)
        skyrl_r3.disable()
        await generate(client, max_tokens=3)
    patched, stock = server.requests
    assert patched.pop(reply.ENCODINGS_FIELD) == ["packed", "nested"]
    assert patched == stock


async def test_nested_lists_of_a_stock_server_are_decoded_with_one_warning_that_names_it(caplog: Any) -> None:
    server = Server(lambda number, body: nested(ROUTES.tolist()))
    async with client_of(server) as client:
        with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
            outputs = [await generate(client) for _ in range(3)]
    for output in outputs:
        np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES, strict=True)
    assert [record.args for record in caplog.records if record.name.startswith("skyrl_r3")] == [(server.address,)]


WRONG: dict[str, Any] = {
    "one row too few": packed(ROUTES[:-1]),
    "one row too many": packed(np.concatenate([ROUTES, ROUTES[:1]])),
    "rows of another prompt length": packed(canned.routes_of([1, 2])),  # R60
    "bytes missing": orjson.dumps(nested({"data": "AAEC", "shape": [7, 3, 2], "dtype": "uint8"})),
    "no dtype": orjson.dumps(nested({"data": "AAEC", "shape": [1, 1, 3]})),  # R35
    "not canonical": orjson.dumps(nested({"data": "AQA=", "shape": [1, 1, 1], "dtype": "int16"})),
    "ragged lists": orjson.dumps(nested([[[1, 2]], [[1]]])),
    ".npy": orjson.dumps(nested("k05VTVBZAQB2AHsn")),  # R48
    "bare NaN": b'{"choices":[{"token_ids":[9],"logprobs":{"content":[{"logprob":NaN}]}}]}',  # R22
    "no choices": orjson.dumps({"error": "none"}),
    "empty choices": orjson.dumps({"choices": []}),
    "token ids as text": orjson.dumps({"choices": [{"token_ids": "926", "routed_experts": codec.pack(ROUTES)}]}),
    "not JSON": b"<html>",
    "nothing": b"",
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_reply_is_an_error_at_once_and_not_generated_again(case: str) -> None:  # R46
    server = Server(lambda number, body: json_reply(WRONG[case]))
    async with client_of(server) as client:
        with pytest.raises(ReplyError) as caught:
            await generate(client)
    assert server.address in caught.value.where
    assert len(server.requests) == 1


async def test_no_routes_is_an_error_that_names_the_server_flag_and_the_trajectory() -> None:  # R07, R54
    def answer(number: int, body: dict[str, Any]) -> Any:
        return packed(None if body["token_ids"][0] == 5 else canned.routes_of([*body["token_ids"], *RESPONSE][:-1]))

    server = Server(answer)
    async with client_of(server) as client:
        with pytest.raises(MissingRoutesError) as caught:
            await generate(client, [[i, 1, 2] for i in range(8)])
    assert "--enable-return-routed-experts" in caught.value.hint
    assert "'stop'" in caught.value.got
    assert "session 5" in caught.value.where


async def test_a_request_aborted_before_its_first_token_is_no_error() -> None:
    server = Server(lambda number, body: packed(None, token_ids=[]))
    async with client_of(server) as client:
        output = await generate(client)
    (routes,) = output["rollout_expert_indices"]
    assert len(routes) == 0
    assert not routes
    assert output["response_ids"] == [[]]


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_off(request: web.Request) -> web.StreamResponse:
    body = packed()
    response = web.StreamResponse(headers={"Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def bad_gateway(request: web.Request) -> web.Response:
    return web.Response(status=502, text="no backend", content_type="text/plain")


FAULTS: dict[str, Any] = {
    "reset": reset,
    "cut off in mid body": cut_off,
    "bad gateway": bad_gateway,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_connection_faults_are_tried_again(fault: str) -> None:
    server = Server(lambda number, body: FAULTS[fault] if number < 4 else packed())
    async with client_of(server) as client:
        output = await generate(client)
    np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES)
    assert len(server.requests) == 4


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_that_stay_end_after_skyrl_s_number_of_attempts(fault: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 3)
    server = Server(lambda number, body: FAULTS[fault])
    async with client_of(server) as client:
        with pytest.raises(aiohttp.ClientError):
            await generate(client)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_errors_that_the_server_explains_are_raised_with_its_words(status: int) -> None:
    server = Server(lambda number, body: json_reply({"error": {"message": "no such model"}}, status))
    async with client_of(server) as client:
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await generate(client)
    assert (caught.value.status, caught.value.message) == (status, "no such model")
    assert len(server.requests) == 1


async def test_a_client_error_in_plain_text_is_raised_with_its_text() -> None:
    server = Server(lambda number, body: web.Response(status=422, text="unknown field"))
    async with client_of(server) as client:
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await generate(client)
    assert (caught.value.status, caught.value.message) == (422, "unknown field")
    assert len(server.requests) == 1


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream"])
async def test_a_router_that_changes_the_content_type_does_no_harm(content_type: str) -> None:
    server = Server(lambda number, body: web.Response(body=packed(), content_type=content_type))
    async with client_of(server) as client:
        output = await generate(client)
    np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES)


async def test_a_compressed_reply_is_read() -> None:  # R31
    def answer(number: int, body: dict[str, Any]) -> web.Response:
        response = json_reply(packed())
        response.enable_compression(web.ContentCoding.gzip)
        return response

    server = Server(answer)
    async with client_of(server) as client:
        output = await generate(client)
    np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES)


async def test_a_start_row_is_refused_because_rows_would_shift() -> None:
    server = Server(lambda number, body: packed())
    async with client_of(server) as client:
        with pytest.raises(ReplyError) as caught:
            await generate(client, routed_experts_prompt_start=2)
    assert caught.value.field == "sampling_params.routed_experts_prompt_start"
    assert server.requests == []


async def test_many_replies_at_once_stay_with_their_prompts() -> None:  # R18
    def answer(number: int, body: dict[str, Any]) -> bytes:
        return packed(canned.routes_of([*body["token_ids"], *RESPONSE][:-1]))

    prompts = [[i, i + 1, *range(i % 5)] for i in range(64)]
    server = Server(answer)
    async with client_of(server) as client:
        output = await generate(client, prompts)
    for prompt, routes in zip(prompts, output["rollout_expert_indices"], strict=True):
        np.testing.assert_array_equal(routes.ids, canned.routes_of([*prompt, *RESPONSE][:-1]))


async def test_flag_off_uses_skyrl_s_own_post() -> None:
    server = Server(lambda number, body: nested(None))
    async with client_of(server) as client:
        client.enable_return_routed_experts = False
        output = await generate(client)
    assert output["rollout_expert_indices"] is None
    assert reply.ENCODINGS_FIELD not in server.requests[0]


@pytest.mark.parametrize("body", [b"", b'["no"]', b'{"error":{"message":"m"},"x":NaN}'])
async def test_a_server_error_that_is_empty_or_json_is_raised_at_once_as_in_stock(body: bytes) -> None:
    server = Server(lambda number, request: json_reply(body, 503))
    async with client_of(server) as client:
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await generate(client)
    assert caught.value.status == 503
    assert len(server.requests) == 1


async def test_credentials_of_the_proxy_are_not_in_the_error() -> None:
    server = Server(lambda number, body: packed(None))
    async with client_of(server) as client:
        client.proxy_url = client.proxy_url.replace("http://", "http://user:SECRET@")
        with pytest.raises(MissingRoutesError) as caught:
            await generate(client)
    assert "SECRET" not in str(caught.value)
    assert server.address in caught.value.where


@pytest.mark.parametrize("keep", [True, False], ids=["functools.wraps", "plain"])
def test_a_method_that_somebody_else_wrapped_before_is_refused(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """Ours would go past theirs without a word."""
    skyrl_r3.disable()
    theirs = remote_inference_client.RemoteInferenceClient._post

    async def authorized(self: Any, url: str, json: Any, headers: Any = None) -> Any:
        return await theirs(self, url, json, {**(headers or {}), "Authorization": "x"})

    wrapper = functools.wraps(theirs)(authorized) if keep else authorized
    monkeypatch.setattr(remote_inference_client.RemoteInferenceClient, "_post", wrapper)
    with pytest.raises(OverlayError) as caught:
        skyrl_r3.enable()
    assert caught.value.field == "RemoteInferenceClient._post"
    assert remote_inference_client.RemoteInferenceClient._post is wrapper
    assert not autoload.installed()


async def test_cancelling_a_request_does_not_retry_it() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(10)
        return json_reply(packed())

    server = Server(lambda number, body: slow)
    async with client_of(server) as client:
        task = asyncio.create_task(generate(client))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.requests) == 1
