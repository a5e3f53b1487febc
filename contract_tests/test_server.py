"""SkyRL's real generate endpoint with the overlay: packed for those who ask, stock for everybody else."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

import skyrl_r3
from contract_tests import canned
from skyrl_r3 import codec

PROMPT = [3, 1, 4, 1, 5]
RESPONSE = [9, 2, 6]
URL = "/skyrl/v1/generate"


@pytest.fixture(autouse=True)
def overlay() -> Iterator[None]:
    skyrl_r3.enable()
    yield
    skyrl_r3.disable()


def engine(**more: Any) -> canned.CannedEngine:
    return canned.CannedEngine(lambda prompt, params: canned.completion(RESPONSE, prompt=prompt, **more))


async def post(app: Any, body: Any, *, raw: bytes | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"content-type": "application/json"}
        return await client.post(URL, content=orjson.dumps(body) if raw is None else raw, headers=headers)


def request(**more: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "logprobs": 0}, "model": "m", **more}


async def test_packed_reply_holds_the_engine_s_routes_bit_for_bit() -> None:
    reply = await post(canned.skyrl_app(engine()), request(routed_experts_encodings=["packed"]))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    choice = reply.json()["choices"][0]
    expected = canned.routes_of([*PROMPT, *RESPONSE][:-1])
    ids = codec.unpack(choice.pop("routed_experts"))
    assert ids.dtype == np.uint8
    np.testing.assert_array_equal(ids, expected, strict=True)
    assert choice == {"token_ids": RESPONSE, "finish_reason": "stop", "logprobs": None}


async def test_more_than_256_experts_travel_as_int16() -> None:  # R34
    reply = await post(canned.skyrl_app(engine(experts=512)), request(routed_experts_encodings=["packed"]))
    envelope = reply.json()["choices"][0]["routed_experts"]
    expected = canned.routes_of([*PROMPT, *RESPONSE][:-1], experts=512)
    assert expected.max() > 255
    assert envelope["dtype"] == "int16"
    np.testing.assert_array_equal(codec.unpack(envelope), expected.astype(np.int16), strict=True)


@pytest.mark.parametrize("wanted", [[], {"routed_experts_encodings": ["nested"]}, {"routed_experts_encodings": None}])
async def test_requests_that_do_not_ask_are_answered_as_stock(wanted: Any) -> None:
    logprobs = [{token: canned.logprob(-0.5)} for token in RESPONSE]
    patched = await post(canned.skyrl_app(engine(logprobs=logprobs)), request(**dict(wanted)))
    skyrl_r3.disable()
    stock = await post(canned.skyrl_app(engine(logprobs=logprobs)), request())
    assert patched.content == stock.content
    assert patched.headers == stock.headers
    assert isinstance(stock.json()["choices"][0]["routed_experts"], list)


async def test_a_server_without_the_flag_is_not_touched() -> None:
    app = canned.skyrl_app(engine(routed_experts=None), enable_return_routed_experts=False)
    endpoints = [route.endpoint for route in app.router.routes if getattr(route, "path", "") == URL]
    assert [endpoint.__module__.split(".")[0] for endpoint in endpoints] == ["skyrl"]
    reply = await post(app, request(routed_experts_encodings=["packed"]))
    assert reply.json()["choices"][0]["routed_experts"] is None


async def test_logprobs_that_json_has_no_number_for_are_floored_and_counted(caplog: Any) -> None:  # R20
    tokens = [10, 11, 12, 13, 14, 15]
    values = [-0.1, math.nan, -math.inf, math.inf]
    logprobs: list[Any] = [{token: canned.logprob(v)} for token, v in zip(tokens[:4], values, strict=True)]
    logprobs += [{14: None}, {}]
    app = canned.skyrl_app(
        canned.CannedEngine(lambda prompt, params: canned.completion(tokens, prompt=prompt, logprobs=logprobs))
    )
    with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
        reply = await post(app, request(routed_experts_encodings=["packed"]))
    choice = reply.json()["choices"][0]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.1] + [-9999.0] * 5
    assert len(codec.unpack(choice["routed_experts"])) == len(PROMPT) + len(tokens) - 1
    warnings = [record for record in caplog.records if record.name.startswith("skyrl_r3")]
    assert [record.args[:2] for record in warnings] == [(5, 6)]


async def test_request_fields_reach_the_engine_as_in_stock() -> None:
    seen = []
    for _ in range(2):
        canned_engine = engine()
        body = request(cache_salt="v7", routed_experts_encodings=["packed"], unknown_field=1)
        body["sampling_params"] |= {"temperature": 0.5, "seed": 7, "stop_token_ids": [2]}
        reply = await post(canned.skyrl_app(canned_engine), body)
        assert reply.status_code == 200
        seen.append(canned_engine.requests)
        skyrl_r3.disable()
    (patched_prompt, patched_params), (stock_prompt, stock_params) = seen[0][0], seen[1][0]
    assert patched_prompt == stock_prompt
    assert patched_prompt["cache_salt"] == "v7"
    assert repr(patched_params) == repr(stock_params)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"enable_lora": True}, {}),
    "no output": ({}, {"no_output": True}),
    "no token ids": ({}, {"token_ids": None}),
    "bad sampling params": ({}, {"sampling_params": {"temperature": -1.0}}),
    "unknown sampling param": ({}, {"sampling_params": {"no_such_param": 1}}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_errors_are_those_of_stock(case: str) -> None:
    cli_args, change = REFUSED[case]
    replies = []
    for asks in ({"routed_experts_encodings": ["packed"]}, {}):
        body = request(**asks, **{key: value for key, value in change.items() if value is not None})
        if case == "no token ids":
            del body["token_ids"]
        served = canned.CannedEngine(lambda prompt, params: None) if "no_output" in change else engine()
        replies.append(await post(canned.skyrl_app(served, **cli_args), body))
        skyrl_r3.disable()
    assert replies[0].status_code == replies[1].status_code >= 400
    assert replies[0].content == replies[1].content


async def test_a_body_that_is_not_json_fails_as_in_stock() -> None:
    patched = await post(canned.skyrl_app(engine()), None, raw=b"{")
    skyrl_r3.disable()
    stock = await post(canned.skyrl_app(engine()), None, raw=b"{")
    assert (patched.status_code, patched.content) == (stock.status_code, stock.content)
    assert patched.status_code >= 400


@pytest.mark.parametrize("wanted", ["packed", ["frame/99"], [], [1], {"packed": 1}])
async def test_encodings_that_the_server_does_not_know_are_a_client_error(wanted: Any) -> None:
    reply = await post(canned.skyrl_app(engine()), request(routed_experts_encodings=wanted))
    assert reply.status_code == 400
    assert "routed_experts_encodings" in reply.text


async def test_the_first_known_encoding_is_taken() -> None:
    reply = await post(canned.skyrl_app(engine()), request(routed_experts_encodings=["frame/99", "packed", "nested"]))
    assert set(reply.json()["choices"][0]["routed_experts"]) == {"data", "shape", "dtype"}


async def test_missing_routes_are_null() -> None:  # R15
    reply = await post(canned.skyrl_app(engine(routed_experts=None)), request(routed_experts_encodings=["packed"]))
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["routed_experts"] is None


@pytest.mark.parametrize("routes", [np.full((7, 3, 2), -1, np.int16), np.zeros((7, 6), np.uint8), "AAEC"])  # R10, R25
async def test_an_engine_that_hands_over_something_else_is_a_server_error_that_says_so(routes: Any) -> None:
    app = canned.skyrl_app(
        canned.CannedEngine(lambda prompt, params: _with(canned.completion(RESPONSE, prompt=prompt), routes))
    )
    reply = await post(app, request(routed_experts_encodings=["packed"]))
    assert reply.status_code == 500
    assert "routed_experts" in reply.json()["detail"]


def _with(output: Any, routes: Any) -> Any:
    output.routed_experts = routes
    return output


async def test_concurrent_requests_keep_their_own_routes() -> None:
    import asyncio

    async def reply_for(app: Any, index: int) -> None:
        prompt = [index, index + 1, index + 2]
        asks = {"routed_experts_encodings": ["packed"]} if index % 3 else {}
        reply = await post(app, {"token_ids": prompt, "sampling_params": {}, **asks})
        routes = reply.json()["choices"][0]["routed_experts"]
        ids = codec.unpack(routes) if index % 3 else codec.from_nested(routes)
        np.testing.assert_array_equal(ids, canned.routes_of([*prompt, *RESPONSE][:-1]))

    app = canned.skyrl_app(engine())
    await asyncio.gather(*(reply_for(app, index) for index in range(40)))


async def test_a_request_made_in_the_context_of_another_is_answered_by_itself() -> None:
    """A task inherits the context of the request that started it, and may make requests of its own."""
    import asyncio

    tasks: list[asyncio.Task[Any]] = []

    def complete(prompt: list[int], params: Any) -> Any:
        if prompt == PROMPT and not tasks:
            tasks.append(asyncio.create_task(post(app, {"token_ids": [7, 8], "sampling_params": {}})))
        return canned.completion(RESPONSE, prompt=prompt)

    app = canned.skyrl_app(canned.CannedEngine(complete))
    packed = await post(app, request(routed_experts_encodings=["packed"]))
    inner = await tasks[0]
    assert inner.json()["choices"][0]["token_ids"] == RESPONSE
    assert inner.json()["choices"][0]["routed_experts"] == canned.routes_of([7, 8, *RESPONSE][:-1]).tolist()
    ids = codec.unpack(packed.json()["choices"][0]["routed_experts"])
    np.testing.assert_array_equal(ids, canned.routes_of([*PROMPT, *RESPONSE][:-1]))


async def test_the_order_of_routes_is_that_of_stock() -> None:
    """The first route of a path answers: an app's own, or that of the engine that was added first."""
    from types import SimpleNamespace

    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    first, second = engine(), engine()
    app = canned.skyrl_app(first)
    args = SimpleNamespace(enable_return_routed_experts=True, enable_lora=False)
    VLLMServerActor._add_custom_endpoints(app, second, args)
    for asks in ({}, {"routed_experts_encodings": ["packed"]}):
        reply = await post(app, request(**asks))
        assert isinstance(reply.json()["choices"][0]["routed_experts"], dict if asks else list)
    assert (len(first.requests), len(second.requests)) == (2, 0)


async def test_the_api_s_description_is_that_of_stock() -> None:
    patched = canned.skyrl_app(engine()).openapi()
    skyrl_r3.disable()
    assert patched == canned.skyrl_app(engine()).openapi()


async def test_numpy_numbers_of_an_engine_are_written() -> None:
    logprobs = [{token: canned.logprob(np.float64(-0.5))} for token in RESPONSE]  # pyright: ignore[reportArgumentType]
    reply = await post(canned.skyrl_app(engine(logprobs=logprobs)), request(routed_experts_encodings=["packed"]))
    assert [entry["logprob"] for entry in reply.json()["choices"][0]["logprobs"]["content"]] == [-0.5] * 3


async def test_other_endpoints_still_reach_the_engine() -> None:
    canned_engine = engine()
    transport = httpx.ASGITransport(app=canned.skyrl_app(canned_engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        reply = await client.post("/reset_prefix_cache", json={"reset_running_requests": True})
    assert reply.json() == {"status": "ok"}
    assert canned_engine.requests == [("reset", True)]
