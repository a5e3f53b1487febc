"""SkyRL 0.4's real remote client with the overlay: what stock gives, by way of a frame."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay import client_suite, server_suite
from contract_tests.overlay.client_suite import FAULTS, cut_off, generate, json_with, of_prompt, outcome_of
from contract_tests.overlay.server_suite import ENCODINGS, PROMPT, RESPONSE, ROUTES
from contract_tests.replies import ASKS, FRAME, NESTED, PACKED, URL, envelope, write
from contract_tests.skyrl_server import Server, client_of, json_reply
from skyrl_r3.errors import MissingRoutesError, ReplyError

# Any: types are checked where SkyRL 0.3 is installed.
RemoteGenerateClient: Any = vars(remote_inference_client)["RemoteGenerateClient"]
SUPPORT = np.array([[9, 1], [2, -1], [6, 3]], np.int32)


def text(status: int, body: str) -> Any:
    return lambda number, request: web.Response(status=status, text=body)


def json(body: Any, status: int = 200) -> Any:
    return lambda number, request: json_reply(body, status)


def always(answer: Any) -> Any:
    return lambda number, request: answer


def from_the_third_on(request: dict[str, Any], number: int, answer: Any) -> Any:
    return answer if number < 3 else write(request.get(ASKS, [PACKED])[0], RESPONSE, ROUTES)


# Answers that are not the overlay's business. What comes of them, and after how many requests, is what stock does.
FAILURES: dict[str, Any] = {
    "400 in plain text": text(400, "bad request"),
    "404 in plain text": text(404, "not found"),
    "422 without text": text(422, ""),
    "500 in plain text": text(500, "Internal Server Error"),
    "502 in plain text": text(502, "no backend"),
    "503 without text": text(503, ""),
    "500 twice, then a reply": lambda number, request: from_the_third_on(request, number, web.Response(status=500)),
    "400 explained": json({"error": {"message": "told off"}}, 400),
    "404 of FastAPI": json({"detail": "The model `x` does not exist."}, 404),
    "500 explained": json({"error": {"message": "engine died"}}, 500),
    "500 with error as text": json({"error": "engine died"}, 500),
    "500 with null": json(b"null", 500),
    "reset": always(FAULTS["reset"]),
    "reset twice, then a reply": lambda number, request: from_the_third_on(request, number, FAULTS["reset"]),
    "cut off in mid body": always(cut_off),
    "not JSON": json(b"<html>"),
    "nothing": json(b""),
    "bare NaN": json(b'{"choices":[{"token_ids":[9],"logprobs":{"content":[{"logprob":NaN}]}}]}'),
    "base64 without an end": json(b'{"choices":[{"routed_experts":{"data":"AAEC'),
    "null routes and no tokens": json(write(PACKED, [], None)),
}


class TestClient(client_suite.ClientContract):
    stock = PACKED

    def ids(self, routes: Any) -> np.ndarray:
        assert type(routes) is np.ndarray
        return routes

    def sender(self) -> Any:
        return remote_inference_client.RemoteGenerateClient  # pyright: ignore[reportAttributeAccessIssue]

    @pytest.mark.parametrize("case", FAILURES)
    async def test_failures_are_those_of_stock(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same exception with the same words, after the same requests and pauses."""
        monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 4)
        seen = []
        server = Server(FAILURES[case])
        async with client_of(server) as client:
            for _ in range(2):
                seen.append((repr(await outcome_of(generate(client))), len(server.requests), list(self.asyncio.pauses)))
                server.requests.clear()
                self.asyncio.pauses.clear()
                skyrl_r3.disable()
        assert seen[0] == seen[1]
        assert ("response_ids" in seen[0][0]) is ("then a reply" in case)

    async def test_tokens_without_routes_are_an_error_of_ours_where_stock_s_says_less(self) -> None:
        async with client_of(Server(lambda number, body: write(PACKED, RESPONSE, None))) as client:
            with pytest.raises(MissingRoutesError):
                await generate(client)
            skyrl_r3.disable()
            with pytest.raises(ValueError, match="must return packed"):
                await generate(client)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_neither_tokens_nor_routes_fail_as_in_stock(self, encoding: str) -> None:
        server = Server(lambda number, body: write(encoding if ASKS in body else PACKED, [], None))
        async with client_of(server) as client:
            patched = await outcome_of(generate(client))
            skyrl_r3.disable()
            assert patched == await outcome_of(generate(client))
        assert patched[0] is ValueError

    # One request

    @pytest.mark.case("R24")
    @pytest.mark.parametrize("encoding", [*ENCODINGS, NESTED])
    async def test_rows_are_counted_from_the_start_that_was_asked_for(self, encoding: str) -> None:
        rows = ROUTES[4:]
        server = Server(lambda number, body: write(encoding, RESPONSE, rows))
        async with client_of(server) as client:
            result = await one(client, routed_experts_prompt_start=4)
        assert server.requests[0]["sampling_params"]["routed_experts_prompt_start"] == 4
        np.testing.assert_array_equal(result.routed_experts, rows, strict=True)

    @pytest.mark.case("R24")
    @pytest.mark.parametrize("start", range(len(PROMPT) + 1))
    async def test_every_start_gives_what_stock_gives(self, start: int) -> None:
        """SkyRL's own handler, which gives the start to the engine."""

        def complete(prompt: list[int], params: Any) -> Any:
            return canned.completion(
                RESPONSE, prompt=prompt, routed_experts=ROUTES[params.routed_experts_prompt_start :]
            )

        app = canned.skyrl_app(canned.CannedEngine(complete))
        results = []
        async with canned.served(app) as address:
            for _ in range(2):
                client = RemoteGenerateClient(proxy_url=address)
                results.append(await one(client, routed_experts_prompt_start=start))
                await client.aclose()
                skyrl_r3.disable()
        np.testing.assert_array_equal(results[0].routed_experts, results[1].routed_experts, strict=True)
        assert len(results[0].routed_experts) == len(ROUTES) - start

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("rows", [0, 2, 4, 6, 8])
    async def test_rows_for_another_start_are_an_error_that_names_server_and_session(
        self, encoding: str, rows: int
    ) -> None:
        given = canned.routes_of(list(range(rows)))
        server = Server(lambda number, body: write(encoding, RESPONSE, given))
        async with client_of(server) as client:
            with pytest.raises(ReplyError) as caught:
                await one(client, routed_experts_prompt_start=4)
        assert caught.value.field == "routed_experts.shape"
        assert caught.value.expected.startswith("3 rows")
        assert caught.value.where == f"finish_reason 'stop', {server.address}, session s-1"

    @pytest.mark.case("R78")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_an_engine_that_knows_no_start(self, encoding: str) -> None:
        """It sends all rows, and SkyRL's trace gets those that it asked for."""
        server = Server(lambda number, body: write(encoding, RESPONSE, ROUTES))
        async with client_of(server) as client:
            result = await one(client, routed_experts_prompt_start=4)
        np.testing.assert_array_equal(result.routed_experts, ROUTES[4:], strict=True)
        assert len(server.requests) == 1

    @pytest.mark.parametrize("start", [4, 0, None])
    async def test_a_frame_that_tells_another_start_is_an_error(self, start: int | None) -> None:
        """A router that answers from a cache, say. Rows in the right number would shift."""
        server = Server(lambda number, body: write(FRAME, RESPONSE, ROUTES[(start or 0) :], start=3, prompt_tokens=5))
        async with client_of(server) as client:
            with pytest.raises(ReplyError) as caught:
                await one(client, routed_experts_prompt_start=start)
        assert (caught.value.field, caught.value.got) == ("start", "3")

    @pytest.mark.parametrize("logprobs", [None, 0])
    async def test_the_result_is_stock_s_in_every_field(self, logprobs: int | None) -> None:
        positions = None if logprobs is None else server_suite.LOGPROBS
        async with canned.served(canned.skyrl_app(server_suite.engine(positions))) as address:
            results = []
            for _ in range(2):
                client = RemoteGenerateClient(proxy_url=address)
                results.append(await one(client, sampling_params={"logprobs": logprobs, "max_tokens": 3}))
                await client.aclose()
                skyrl_r3.disable()
        patched, stock = [
            {field.name: getattr(result, field.name) for field in dataclasses.fields(result)} for result in results
        ]
        np.testing.assert_array_equal(patched.pop("routed_experts"), stock.pop("routed_experts"), strict=True)
        # Nobody reads it; its routes are an object of ours, and its logprobs are in response_logprobs.
        raw, stock_raw = patched.pop("raw_response")["choices"][0], stock.pop("raw_response")["choices"][0]
        assert {raw[key] == stock_raw[key] for key in ("token_ids", "finish_reason")} == {True}
        assert patched == stock
        assert patched["response_logprobs"] == (None if logprobs is None else [-4.5, -1.0, -3.0])

    @pytest.mark.case("R89")
    async def test_skyrl_s_trace_makes_the_routes_of_a_frame_writable(self) -> None:
        from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace

        async with client_of(Server(lambda number, body: write(FRAME, RESPONSE, ROUTES))) as client:
            (routes,) = (await generate(client))["rollout_expert_indices"]
        assert not routes.flags.writeable
        trace = RoutedExpertTrace()
        trace.record_generation(
            prompt_token_count=len(PROMPT), generated_token_count=len(RESPONSE), routed_experts=routes
        )
        tokens = len(PROMPT) + len(RESPONSE)
        kept = trace.finalize(token_count=tokens, loss_mask=[0] * len(PROMPT) + [1] * len(RESPONSE))
        assert kept.flags.writeable
        np.testing.assert_array_equal(kept, ROUTES, strict=True)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_results_can_be_pickled(self, encoding: str) -> None:
        """Ray sends them to other processes."""
        server = Server(lambda number, body: write(encoding, RESPONSE, ROUTES, [-0.5, -1.0, -1.5]))
        async with client_of(server) as client:
            result = await one(client, sampling_params={"logprobs": 0})
            output = await generate(client, logprobs=0)
        again = pickle.loads(pickle.dumps(result))
        np.testing.assert_array_equal(again.routed_experts, ROUTES, strict=True)
        assert (again.response_ids, again.response_logprobs) == (RESPONSE, [-0.5, -1.0, -1.5])
        (routes,) = pickle.loads(pickle.dumps(output))["rollout_expert_indices"]
        np.testing.assert_array_equal(routes, ROUTES, strict=True)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_errors_can_be_pickled(self, encoding: str) -> None:
        async with client_of(Server(lambda number, body: write(encoding, RESPONSE, None))) as client:
            with pytest.raises(MissingRoutesError) as caught:
                await generate(client)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.where, str(again)) == (MissingRoutesError, caught.value.where, str(caught.value))

    async def test_a_packed_reply_of_a_stock_server_is_decoded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the overlay, which has to see the rows: SkyRL's decoder is left out."""
        skyrl_r3.disable()
        decoded = []

        def decode(payload: Any) -> Any:
            decoded.append(payload)
            return "stock"

        monkeypatch.setattr(remote_inference_client, "decode_packed_routed_experts", decode)
        skyrl_r3.enable()
        async with client_of(Server(lambda number, body: write(PACKED, RESPONSE, ROUTES))) as client:
            output = await generate(client)
            np.testing.assert_array_equal(output["rollout_expert_indices"][0], ROUTES, strict=True)
            assert decoded == []
            skyrl_r3.disable()
            assert (await generate(client))["rollout_expert_indices"] == ["stock"]
        assert len(decoded) == 1

    async def test_the_payload_of_whoever_calls_post_is_left_alone(self) -> None:
        payload = {"token_ids": PROMPT, "sampling_params": {}, "model": "m"}
        async with client_of(Server(lambda number, body: of_prompt(body))) as client:
            post = client._get_generate_client()._post
            await post(f"{client.proxy_url}{URL}", json=payload, packed_side_channels=True)
        assert payload == {"token_ids": PROMPT, "sampling_params": {}, "model": "m"}

    async def test_multimodal_features_and_salt_are_sent_as_in_stock(self) -> None:
        server = Server(lambda number, body: write(body.get(ASKS, [PACKED])[0], RESPONSE, ROUTES))
        more: Any = {"mm_features": {"mm_hashes": {"image": ["x"]}}, "cache_salt": "v7"}
        async with client_of(server) as client:
            await one(client, **more)
            skyrl_r3.disable()
            await one(client, **more)
        patched, stock = server.requests
        assert patched.pop(ASKS)
        assert patched == stock
        assert stock["cache_salt"] == "v7"
        assert list(patched) == list(stock)

    @pytest.mark.case("R24")
    @pytest.mark.parametrize("change", [{"routed_experts_prompt_start": 9}, {"routed_experts_prompt_start": True}])
    async def test_arguments_that_stock_refuses_are_refused(self, change: dict[str, Any]) -> None:
        server = Server(lambda number, body: of_prompt(body))
        async with client_of(server) as client:
            patched = await outcome_of(one(client, **change))
            skyrl_r3.disable()
            assert patched == await outcome_of(one(client, **change))
        assert patched[0] is ValueError
        assert server.requests == []

    async def test_a_client_in_several_event_loops(self) -> None:
        """SkyRL keeps a session for each loop."""
        server = Server(lambda number, body: of_prompt(body))
        async with client_of(server) as client:

            def in_another_loop() -> Any:
                async def call() -> Any:
                    result = await one(client)
                    await client._get_generate_client().aclose()
                    return result

                return asyncio.run(call())

            result = await asyncio.to_thread(in_another_loop)
            again = await one(client)
        np.testing.assert_array_equal(result.routed_experts, ROUTES, strict=True)
        np.testing.assert_array_equal(again.routed_experts, ROUTES, strict=True)

    # Sample support, which is SkyRL's alone

    def with_support(self) -> Server:
        logprobs = {"content": [{"logprob": -0.5}] * 3}
        return Server(json(json_with(envelope(ROUTES), rollout_sample_support=envelope(SUPPORT), logprobs=logprobs)))

    @pytest.mark.parametrize("routes", [True, False], ids=["with routes", "alone"])
    async def test_requests_for_sample_support_are_stock_s_to_the_byte(self, routes: bool) -> None:
        server = self.with_support()
        results = []
        async with client_of(server) as client:
            for _ in range(2):
                params = {"top_k": 2, "logprobs": 0}
                results.append(
                    await one(client, sampling_params=params, return_sample_support=True, return_routed_experts=routes)
                )
                skyrl_r3.disable()
        assert server.raw[0] == server.raw[1]
        assert server.raw[0][0] == URL
        patched, stock = results
        np.testing.assert_array_equal(patched.sample_support, stock.sample_support, strict=True)
        np.testing.assert_array_equal(patched.sample_support, SUPPORT, strict=True)
        if routes:
            np.testing.assert_array_equal(patched.routed_experts, ROUTES, strict=True)
        else:
            assert patched.routed_experts is stock.routed_experts is None
        assert patched.response_logprobs == stock.response_logprobs == [-0.5] * 3

    async def test_a_batch_with_sample_support_gives_what_stock_gives(self) -> None:
        ranks: Any = [[(token, -0.5), (token + 40, -0.25), (token + 50, -0.75)] for token in RESPONSE]
        batch = {
            "prompt_token_ids": [PROMPT],
            "sampling_params": {"top_k": 2, "logprobs": 0},
            "return_sample_support": True,
        }
        outputs = []
        app = canned.skyrl_app(server_suite.engine(ranks))
        async with canned.served(app) as address:
            for _ in range(2):
                async with client_suite.client_at(address, enable_return_sample_support_set=True) as client:
                    outputs.append(await client.generate(batch))
                skyrl_r3.disable()
        patched, stock = outputs
        for key in ("rollout_expert_indices", "rollout_sample_support"):
            np.testing.assert_array_equal(patched.pop(key)[0], stock.pop(key)[0], strict=True)
        assert patched == stock


async def one(client: Any, **change: Any) -> Any:
    """One request of SkyRL's ``RemoteGenerateClient``, with routes."""
    given = {
        "prompt_token_ids": PROMPT,
        "sampling_params": {"max_tokens": 3},
        "session_id": "s-1",
        "model": "m",
        "return_routed_experts": True,
        **change,
    }
    client = client if isinstance(client, RemoteGenerateClient) else client._get_generate_client()
    return await client.generate(**given)
