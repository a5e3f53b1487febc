"""What is true of SkyRL's real remote client with the overlay, in every SkyRL line.

A line's tests derive from :class:`ClientContract` and say what its SkyRL does by itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay import server_suite
from contract_tests.overlay.server_suite import ENCODINGS, PROMPT, RESPONSE, ROUTES
from contract_tests.replies import ASKS, FRAME, FRAME_TYPE, NESTED, PACKED, envelope, write
from contract_tests.skyrl_server import Server, client_at, client_of, json_reply
from skyrl_r3 import notes
from skyrl_r3.errors import MissingRoutesError, ReplyError
from skyrl_r3.hooks import client as client_hook


async def generate(client: Any, prompts: list[list[int]] | None = None, **sampling: Any) -> Any:
    prompts = [PROMPT] if prompts is None else prompts
    batch = {
        "prompt_token_ids": prompts,
        "sampling_params": sampling,
        "session_ids": [f"t{i}" for i in range(len(prompts))],
    }
    return await client.generate(batch)


async def outcome_of(call: Any) -> Any:
    """What a call comes to, in a form that two calls can be compared in."""
    try:
        return await call
    except Exception as error:
        return type(error), getattr(error, "status", None), getattr(error, "message", None), str(error)


def of_prompt(body: dict[str, Any], encoding: str = FRAME) -> bytes:
    """The reply to the request ``body``, with routes that tell its tokens."""
    return write(encoding, RESPONSE, canned.routes_of([*body["token_ids"], *RESPONSE][:-1]))


def json_with(routes: Any, **more: Any) -> dict[str, Any]:
    choice = {"token_ids": RESPONSE, "finish_reason": "stop", "logprobs": None, "routed_experts": routes}
    return {"choices": [choice | more]}


class NoPause:
    """Stands for asyncio in SkyRL's client, without the seconds between attempts."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def bad_gateway(request: web.Request) -> web.Response:
    return web.Response(status=502, text="no backend", content_type="text/plain")


async def cut_off(request: web.Request) -> web.StreamResponse:
    body = write(FRAME, RESPONSE, ROUTES)
    response = web.StreamResponse(headers={"Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


FAULTS: dict[str, Any] = {"reset": reset, "bad gateway": bad_gateway}

_FRAME = write(FRAME, RESPONSE, ROUTES)

# Replies that arrived whole and are wrong, with the field that is.
WRONG: dict[str, tuple[Any, str]] = {
    "no dtype": (json_with({"data": "AAEC", "shape": [1, 1, 3]}), "routed_experts"),
    "bytes missing": (json_with({"data": "AAEC", "shape": [7, 3, 2], "dtype": "uint8"}), "routed_experts.data"),
    "not canonical": (json_with({"data": "AQA=", "shape": [1, 1, 1], "dtype": "int16"}), "routed_experts.dtype"),
    "ragged lists": (json_with([[[1, 2]], [[1]]]), "routed_experts"),
    ".npy": (json_with("k05VTVBZAQB2AHsn"), "routed_experts"),
    "no choices": ({"error": "none"}, "choices"),
    "empty choices": ({"choices": []}, "choices"),
    "token ids as text": (json_with(envelope(ROUTES), token_ids="926"), "token_ids"),
    "a logprob of null": (json_with(envelope(ROUTES), logprobs={"content": [{"logprob": None}]}), "logprobs.content"),
    "frame cut off": (_FRAME[:-1], "routed_experts.data_offsets"),
    "frame with more behind it": (_FRAME + b"\0", "frame"),
    "frame of which only the start is there": (_FRAME[:100], "frame"),
    "frame of another version": (write(FRAME, RESPONSE, ROUTES, format="skyrl-r3/2"), "__metadata__.format"),
    "frame not canonical": (write(FRAME, RESPONSE, ROUTES.astype(np.int16)), "routed_experts.dtype"),
    "frame with a negative id": (write(FRAME, RESPONSE, ROUTES.astype(np.int16) - 999), "routed_experts"),
    "frame with NaN": (write(FRAME, RESPONSE, ROUTES, [-0.5, float("nan"), -1.0]), "logprobs"),
    "frame for another prompt": (write(FRAME, RESPONSE, ROUTES, prompt_tokens=4), "prompt_tokens"),
    "frame for another start": (write(FRAME, RESPONSE, ROUTES, start=2), "start"),
}
for _encoding in ENCODINGS:
    WRONG |= {
        f"{_encoding}: one row too few": (write(_encoding, RESPONSE, ROUTES[:-1]), "routed_experts.shape"),
        f"{_encoding}: one row too many": (
            write(_encoding, RESPONSE, np.concatenate([ROUTES, ROUTES[:1]])),
            "routed_experts.shape",
        ),
        f"{_encoding}: rows of another prompt length": (
            write(_encoding, RESPONSE, canned.routes_of([1, 2])),
            "routed_experts.shape",
        ),
        f"{_encoding}: no layers": (
            write(_encoding, RESPONSE, np.zeros((7, 0, 2), np.uint8)),
            "routed_experts.shape",
        ),
        f"{_encoding}: one logprob too few": (write(_encoding, RESPONSE, ROUTES, [-0.5, -1.0]), "logprobs"),
        f"{_encoding}: a negative token": (write(_encoding, [9, -2, 6], ROUTES), "token_ids"),
    }


class ClientContract:
    """Tests that hold in every line.

    Attributes:
        stock: The encoding that this SkyRL reads and writes by itself.
    """

    stock: str

    @pytest.fixture(autouse=True)
    def overlay(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.asyncio = NoPause()
        monkeypatch.setattr(remote_inference_client, "asyncio", self.asyncio)
        monkeypatch.setattr(client_hook, "_RETRY_PAUSE_S", 0.0)
        monkeypatch.setattr(client_hook, "_slow_servers", set())
        skyrl_r3.enable()
        yield
        skyrl_r3.disable()

    def ids(self, routes: Any) -> np.ndarray:
        """The array in what this SkyRL has as the routes of a sample."""
        raise NotImplementedError

    # Where a method is somebody else's

    def sender(self) -> Any:
        """The class of this SkyRL whose ``_post`` sends the requests."""
        raise NotImplementedError

    async def test_a_wrapper_around_our_method_that_outlives_it_does_no_harm(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = Server(
            lambda number, body: write(FRAME if ASKS in body else self.stock, RESPONSE, ROUTES, [-0.5, -1.0, -1.5])
        )
        ours, calls = self.sender()._post, []

        @functools.wraps(ours)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return await ours(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(self.sender(), "_post", traced)
            skyrl_r3.disable()
            async with client_of(server) as client:
                output = await generate(client, logprobs=0)
        assert calls
        assert output["response_logprobs"] == [[-0.5, -1.0, -1.5]]
        np.testing.assert_array_equal(np.asarray(output["rollout_expert_indices"][0]), ROUTES)
        # Without the wrapper it is SkyRL's own method again, which the next enable() replaces like every other.
        self.sender()._post = ours.__wrapped__
        assert "superseded" not in {row.state for row in skyrl_r3.enable()}
        async with client_of(server) as client:
            output = await generate(client, logprobs=0)
        assert output["response_logprobs"] == [[-0.5, -1.0, -1.5]]
        assert ASKS in server.requests[-1]

    async def test_a_note_is_said_once_when_routes_are_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        monkeypatch.setattr(notes.logger, "warning", said.append)
        monkeypatch.setattr(notes, "_noted", ["SkyRL was edited"])
        monkeypatch.setattr(notes, "_said", set())
        server = Server(
            lambda number, body: write(FRAME if ASKS in body else self.stock, RESPONSE, ROUTES, [-0.5, -1.0, -1.5])
        )
        async with client_of(server) as client:
            assert said == []
            for _ in range(2):
                await generate(client, logprobs=0)
        assert said == ["SkyRL was edited"]

    # What arrives

    @pytest.mark.case("R89")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_routes_arrive_as_an_array(self, encoding: str) -> None:
        server = Server(lambda number, body: write(encoding, RESPONSE, ROUTES, [-0.5, -1.0, -1.5]))
        async with client_of(server) as client:
            output = await generate(client, logprobs=0)
        (routes,) = output["rollout_expert_indices"]
        np.testing.assert_array_equal(self.ids(routes), ROUTES, strict=True)
        # Those of a frame are a view of the body's bytes, which nobody may write.
        assert self.ids(routes).flags.writeable is (encoding == PACKED)
        assert self.ids(routes).flags.c_contiguous
        assert output["response_ids"] == [RESPONSE]
        assert output["response_logprobs"] == [[-0.5, -1.0, -1.5]]
        assert output["stop_reasons"] == ["stop"]
        for values, kind in ((output["response_ids"][0], int), (output["response_logprobs"][0], float)):
            assert type(values) is list
            assert {type(value) for value in values} == {kind}

    @pytest.mark.case("R34")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("dtype", [np.int16, np.int32])
    async def test_large_ids_arrive_in_their_dtype(self, encoding: str, dtype: type) -> None:
        routes = ROUTES.astype(dtype) + {np.int16: 300, np.int32: 40_000}[dtype]
        async with client_of(Server(lambda number, body: write(encoding, RESPONSE, routes))) as client:
            output = await generate(client)
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), routes, strict=True)

    @pytest.mark.parametrize("server_patched", [True, False])
    @pytest.mark.parametrize("logprobs", [None, 0, 3])
    async def test_every_pair_of_patched_and_stock_gives_what_stock_gives(
        self, server_patched: bool, logprobs: int | None
    ) -> None:
        """SkyRL's own handler, over HTTP, to SkyRL's own client."""
        positions: Any = [[(token, -token / 3), (77, -9.5)] for token in RESPONSE]
        float32: Any = [[(token, float(np.float32(value))) for token, value in row] for row in positions]
        if not server_patched:
            skyrl_r3.disable()
        app = canned.skyrl_app(server_suite.engine(None if logprobs is None else float32))
        outputs = []
        async with canned.served(app) as address, client_at(address) as client:
            for enable in (True, False):
                if enable:
                    skyrl_r3.enable()
                outputs.append(await generate(client, logprobs=logprobs, max_tokens=3))
                skyrl_r3.disable()
        patched, stock = outputs
        ours, theirs = patched.pop("rollout_expert_indices"), stock.pop("rollout_expert_indices")
        assert patched == stock
        np.testing.assert_array_equal(self.ids(ours[0]), ROUTES, strict=True)
        np.testing.assert_array_equal(self.ids(ours[0]), np.array(theirs[0]))

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_without_logprobs_there_are_none(self, encoding: str) -> None:
        async with client_of(Server(lambda number, body: write(encoding, RESPONSE, ROUTES))) as client:
            asked = await generate(client, logprobs=0)
            not_asked = await generate(client)
        assert (asked["response_logprobs"], not_asked["response_logprobs"]) == ([None], None)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_reply_without_tokens_has_no_logprobs_as_in_stock(self, encoding: str) -> None:
        rows = canned.routes_of(PROMPT[:-1])
        async with client_of(Server(lambda number, body: write(encoding, [], rows, []))) as client:
            output = await generate(client, logprobs=0)
        assert (output["response_ids"], output["response_logprobs"]) == ([[]], [None])
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), rows, strict=True)

    # What is asked for

    async def test_the_request_is_stock_s_plus_one_field(self) -> None:
        server = Server(lambda number, body: write(body.get(ASKS, [self.stock])[0], RESPONSE, ROUTES))
        async with client_of(server) as client:
            await generate(client, max_tokens=3)
            skyrl_r3.disable()
            await generate(client, max_tokens=3)
        patched, stock = server.requests
        assert patched.pop(ASKS) == [FRAME, PACKED, NESTED]
        assert patched == stock
        (path, headers, _), (stock_path, stock_headers, _) = server.raw
        assert (path, {**headers, "Content-Length": "?"}) == (stock_path, {**stock_headers, "Content-Length": "?"})

    async def test_the_sampling_params_of_the_caller_are_left_alone(self) -> None:
        batch = {"prompt_token_ids": [PROMPT], "sampling_params": {"max_tokens": 3}, "session_ids": [1]}
        before = repr(batch)
        async with client_of(Server(lambda number, body: of_prompt(body))) as client:
            await client.generate(batch)
        assert repr(batch) == before

    async def test_nested_lists_of_an_old_server_are_decoded_with_one_warning_that_names_it(self, caplog: Any) -> None:
        server = Server(lambda number, body: write(NESTED, RESPONSE, ROUTES))
        async with client_of(server) as client:
            with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
                outputs = [await generate(client) for _ in range(3)]
        for output in outputs:
            np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), ROUTES, strict=True)
        assert [record.args for record in caplog.records if record.name.startswith("skyrl_r3")] == [(server.address,)]

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_no_warning_about_a_fast_server(self, encoding: str, caplog: Any) -> None:
        with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
            async with client_of(Server(lambda number, body: write(encoding, RESPONSE, ROUTES))) as client:
                await generate(client)
        assert [record for record in caplog.records if record.name.startswith("skyrl_r3")] == []

    async def test_flag_off_uses_skyrl_s_own_endpoint_and_request(self) -> None:
        server = Server(lambda number, body: write(NESTED, RESPONSE, None))
        async with client_of(server, enable_return_routed_experts=False) as client:
            patched = await generate(client)
            skyrl_r3.disable()
            assert patched == await generate(client)
        assert patched["rollout_expert_indices"] is None
        assert server.raw[0] == server.raw[1]
        assert server.raw[0][0] == "/inference/v1/generate"

    # What is wrong

    @pytest.mark.case("R22", "R35", "R46", "R48", "R60")
    @pytest.mark.parametrize("case", WRONG)
    async def test_a_wrong_reply_is_an_error_at_once_and_not_generated_again(self, case: str) -> None:
        body, field = WRONG[case]
        server = Server(lambda number, _: json_reply(body))
        async with client_of(server) as client:
            with pytest.raises(ReplyError) as caught:
                await generate(client)
        assert caught.value.field == field
        assert caught.value.where.endswith(f"{server.address}, session t0")
        assert len(server.requests) == 1
        assert self.asyncio.pauses == []

    @pytest.mark.case("R07", "R54")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_no_routes_is_an_error_that_names_the_server_flag_and_the_trajectory(self, encoding: str) -> None:
        def answer(number: int, body: dict[str, Any]) -> Any:
            return write(encoding, RESPONSE, None) if body["token_ids"][0] == 5 else of_prompt(body, encoding)

        server = Server(answer)
        async with client_of(server) as client:
            with pytest.raises(MissingRoutesError) as caught:
                await generate(client, [[i, 1, 2] for i in range(8)])
        assert "--enable-return-routed-experts" in caught.value.hint
        assert "'stop'" in caught.value.got
        assert "session t5" in caught.value.where

    async def test_credentials_of_the_proxy_are_not_in_the_error(self) -> None:
        server = Server(lambda number, body: write(FRAME, RESPONSE, None))
        async with client_of(server) as first:
            address = server.address.replace("http://", "http://user:SECRET@")
            async with client_at(address) as client:
                with pytest.raises(MissingRoutesError) as caught:
                    await generate(client)
            assert first.proxy_url == server.address
        assert "SECRET" not in str(caught.value)
        assert server.address in caught.value.where

    @pytest.mark.parametrize("fault", FAULTS)
    async def test_connection_faults_are_tried_again(self, fault: str) -> None:
        server = Server(lambda number, body: FAULTS[fault] if number < 4 else of_prompt(body))
        async with client_of(server) as client:
            output = await generate(client)
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), ROUTES)
        assert len(server.requests) == 4

    @pytest.mark.case("R55")
    async def test_the_client_waits_for_ever_as_in_stock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The longest rollouts are not the ones to lose. No request has a timeout of its own either."""
        given, request = [], aiohttp.ClientSession._request

        async def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
            given.append((self.timeout, kwargs.get("timeout")))
            return await request(self, *args, **kwargs)

        monkeypatch.setattr(aiohttp.ClientSession, "_request", seen)
        async with client_of(Server(lambda number, body: of_prompt(body))) as client:
            await generate(client)
        ((session, own),) = given
        assert (session.total, session.sock_read, own) == (None, None, None)

    @pytest.mark.case("R71")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_one_corrupt_reply_among_many_is_named(self, encoding: str) -> None:
        def answer(number: int, body: dict[str, Any]) -> bytes:
            prompt = body["token_ids"]
            routes = canned.routes_of([*prompt, *RESPONSE][:-1])
            return write(encoding, RESPONSE, routes[:-1] if prompt[0] == 37 else routes)

        async with client_of(Server(answer)) as client:
            with pytest.raises(ReplyError) as caught:
                await generate(client, [[i, 1, 2] for i in range(64)])
        assert caught.value.where.endswith(", session t37")
        assert caught.value.field == "routed_experts.shape"

    @pytest.mark.case("R18")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_request_that_fails_takes_no_other_with_it(self, encoding: str) -> None:
        """In calls of their own, as trajectories make them: one batch fails as a whole, as in stock."""

        def answer(number: int, body: dict[str, Any]) -> Any:
            if body["token_ids"][0] == 5:
                return json_reply({"error": {"message": "a worker died"}}, 500)
            return of_prompt(body, encoding)

        prompts = [[i, i + 1] for i in range(16)]
        async with client_of(Server(answer)) as client:
            calls = [generate(client, [prompt]) for prompt in prompts]
            outputs: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        failed = outputs.pop(5)
        assert (type(failed), failed.message) == (aiohttp.ClientResponseError, "a worker died")
        for prompt, output in zip(prompts[:5] + prompts[6:], outputs, strict=True):
            (routes,) = output["rollout_expert_indices"]
            np.testing.assert_array_equal(self.ids(routes), canned.routes_of([*prompt, *RESPONSE][:-1]), strict=True)

    @pytest.mark.parametrize("status", [400, 404, 422, 500])
    async def test_errors_that_the_server_explains_are_raised_with_its_words(self, status: int) -> None:
        server = Server(lambda number, body: json_reply({"error": {"message": "no such model"}}, status))
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await generate(client)
        assert (caught.value.status, caught.value.message) == (status, "no such model")
        assert len(server.requests) == 1

    async def test_a_client_error_in_plain_text_is_raised_with_its_text(self) -> None:
        server = Server(lambda number, body: web.Response(status=422, text="unknown field"))
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await generate(client)
        assert (caught.value.status, caught.value.message) == (422, "unknown field")
        assert len(server.requests) == 1

    # What lies between

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream", FRAME_TYPE, "application/json"])
    async def test_a_router_that_changes_the_content_type_does_no_harm(self, encoding: str, content_type: str) -> None:
        body = write(encoding, RESPONSE, ROUTES)
        async with client_of(Server(lambda number, _: web.Response(body=body, content_type=content_type))) as client:
            output = await generate(client)
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), ROUTES)

    @pytest.mark.case("R31")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_compressed_reply_is_read(self, encoding: str) -> None:
        def answer(number: int, body: dict[str, Any]) -> web.Response:
            response = json_reply(write(encoding, RESPONSE, ROUTES))
            response.enable_compression(web.ContentCoding.gzip)
            return response

        async with client_of(Server(answer)) as client:
            output = await generate(client)
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), ROUTES)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_reply_in_chunks_is_read(self, encoding: str) -> None:
        """As the router sends it, without a length."""
        body = write(encoding, RESPONSE, ROUTES)

        async def in_chunks(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            for start in range(0, len(body), 50):
                await response.write(body[start : start + 50])
            await response.write_eof()
            return response

        async with client_of(Server(lambda number, _: in_chunks)) as client:
            output = await generate(client)
        np.testing.assert_array_equal(self.ids(output["rollout_expert_indices"][0]), ROUTES)

    @pytest.mark.case("R18")
    @pytest.mark.parametrize("encoding", [*ENCODINGS, NESTED])
    async def test_many_replies_at_once_stay_with_their_prompts(self, encoding: str) -> None:
        prompts = [[i, i + 1, *range(i % 5)] for i in range(64)]
        async with client_of(Server(lambda number, body: of_prompt(body, encoding))) as client:
            output = await generate(client, prompts)
        for prompt, routes in zip(prompts, output["rollout_expert_indices"], strict=True):
            np.testing.assert_array_equal(self.ids(routes), canned.routes_of([*prompt, *RESPONSE][:-1]))

    @pytest.mark.case("R54")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_every_reply_of_one_connection_has_its_routes(self, encoding: str) -> None:
        connections = set()

        async def noting(request: web.Request) -> web.Response:
            connections.add(request.get_extra_info("peername"))
            return json_reply(of_prompt(await request.json(), encoding))

        async with client_of(Server(lambda number, body: noting)) as client:
            outputs = [await generate(client, [[i, i + 1]]) for i in range(3)]
        assert len(connections) == 1
        for i, output in enumerate(outputs):
            (routes,) = output["rollout_expert_indices"]
            np.testing.assert_array_equal(self.ids(routes), canned.routes_of([i, i + 1, *RESPONSE][:-1]), strict=True)

    @pytest.mark.case("R58")
    async def test_many_large_replies_arrive_and_no_more_are_under_way_than_skyrl_allows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_inference_client, "SKYRL_GENERATE_CONCURRENCY_PER_ENGINE", 16)
        under_way, most = set(), []

        async def large(request: web.Request) -> web.Response:
            (index, *_) = (await request.json())["token_ids"]
            under_way.add(index)
            most.append(len(under_way))
            await asyncio.sleep(0.01)  # Without it, each is answered before the next one comes.
            ids = np.broadcast_to(np.arange(index, index + 16, dtype=np.uint8), (4, 2**14, 16))
            body = write(FRAME, RESPONSE, ids)
            under_way.remove(index)
            return json_reply(body)

        server = Server(lambda number, body: large)
        async with client_of(server) as client:
            output = await generate(client, [[index, 1] for index in range(200)])
        assert len(server.requests) == 200
        assert 2 < max(most) <= 16
        for index, routes in enumerate(output["rollout_expert_indices"]):
            ids = self.ids(routes)
            assert (ids.shape, ids.min(), ids.max()) == ((4, 2**14, 16), index, index + 15)

    async def test_cancelling_a_request_does_not_retry_it(self) -> None:
        async def slow(request: web.Request) -> web.Response:
            await asyncio.sleep(10)
            return json_reply(write(FRAME, RESPONSE, ROUTES))

        server = Server(lambda number, body: slow)
        async with client_of(server) as client:
            task = asyncio.create_task(generate(client))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(server.requests) == 1
