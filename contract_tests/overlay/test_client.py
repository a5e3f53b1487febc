"""SkyRL 0.3's real remote client with the overlay, against a server on 127.0.0.1 that answers as told."""

from __future__ import annotations

import functools
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay import client_suite
from contract_tests.overlay.client_suite import FAULTS, cut_off, generate, of_prompt
from contract_tests.overlay.server_suite import ENCODINGS, PROMPT, RESPONSE, ROUTES
from contract_tests.replies import FRAME, NESTED, PACKED, START, write
from contract_tests.skyrl_server import Server, client_of, json_reply
from skyrl_r3 import RoutedExperts, autoload
from skyrl_r3.errors import OverlayError, ReplyError
from skyrl_r3.trace import Traces, trajectory

NO_REPLY = {
    "bare NaN": b'{"choices":[{"token_ids":[9],"logprobs":{"content":[{"logprob":NaN}]}}]}',
    "not JSON": b"<html>",
    "nothing": b"",
    "null": b"null",
}
ALL_FAULTS = {**FAULTS, "cut off in mid body": cut_off}


class OwnGenerateSingle(remote_inference_client.RemoteInferenceClient):
    """A client that picks the reply apart by itself, as SkyRL does."""

    async def _generate_single(self, prompt_token_ids: Any, sampling_params: Any, *_: Any, **__: Any) -> Any:
        request = {"sampling_params": sampling_params, "token_ids": prompt_token_ids}
        choice = (await self._post(f"{self.proxy_url}/skyrl/v1/generate", json=request))["choices"][0]
        return {
            "stop_reason": choice["finish_reason"],
            "response_ids": choice["token_ids"],
            "response_logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            "routed_experts": choice["routed_experts"],
        }


class TestClient(client_suite.ClientContract):
    stock = NESTED

    def ids(self, routes: Any) -> np.ndarray:
        assert type(routes) is RoutedExperts
        return routes.ids

    @pytest.mark.parametrize("encoding", [*ENCODINGS, NESTED])
    async def test_routes_come_with_their_tokens(self, encoding: str) -> None:
        async with client_of(Server(lambda number, body: write(encoding, RESPONSE, ROUTES))) as client:
            output = await generate(client)
        (routes,) = output["rollout_expert_indices"]
        assert routes.token_ids.tolist() == [*PROMPT, *RESPONSE][:-1]

    @pytest.mark.case("R22", "R46")
    @pytest.mark.parametrize("case", NO_REPLY)
    async def test_a_body_that_is_no_reply_is_an_error_at_once(self, case: str) -> None:
        """Stock generates it again, up to 30 times."""
        server = Server(lambda number, body: json_reply(NO_REPLY[case]))
        async with client_of(server) as client:
            with pytest.raises(ReplyError) as caught:
                await generate(client)
        assert server.address in caught.value.where
        assert len(server.requests) == 1

    def sender(self) -> Any:
        return remote_inference_client.RemoteInferenceClient

    async def test_a_subclass_that_picks_the_reply_apart_gets_it_in_skyrl_s_form(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = Server(lambda number, body: write(FRAME, RESPONSE, ROUTES, [-0.5, -1.0, -1.5]))
        with monkeypatch.context() as patch:
            patch.setattr(remote_inference_client, "RemoteInferenceClient", OwnGenerateSingle)
            async with client_of(server) as client:
                output = await generate(client, logprobs=0)
        assert output["response_logprobs"] == [[-0.5, -1.0, -1.5]]
        np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES, strict=True)

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_request_aborted_before_its_first_token_is_no_error(self, encoding: str) -> None:
        async with client_of(Server(lambda number, body: write(encoding, [], None))) as client:
            output = await generate(client)
        (routes,) = output["rollout_expert_indices"]
        assert len(routes) == 0
        assert not routes
        assert output["response_ids"] == [[]]

    async def test_a_reply_that_breaks_off_is_tried_again(self) -> None:
        server = Server(lambda number, body: cut_off if number < 4 else of_prompt(body))
        async with client_of(server) as client:
            output = await generate(client)
        np.testing.assert_array_equal(output["rollout_expert_indices"][0].ids, ROUTES)
        assert len(server.requests) == 4

    @pytest.mark.parametrize("fault", ALL_FAULTS)
    async def test_faults_that_stay_end_after_skyrl_s_number_of_attempts(self, fault: str, monkeypatch: Any) -> None:
        monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 3)
        server = Server(lambda number, body: ALL_FAULTS[fault])
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientError):
                await generate(client)
        assert len(server.requests) == 3

    @pytest.mark.case("R55")
    async def test_a_gateway_that_gives_up_waiting_is_named_in_the_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 2)
        server = Server(lambda number, body: web.Response(status=504, text="no answer of the backend within 1800 s"))
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await generate(client)
        assert (caught.value.status, caught.value.message) == (504, "no answer of the backend within 1800 s")
        assert server.address in str(caught.value)

    @pytest.mark.case("R24")
    async def test_a_start_row_is_refused_because_rows_would_shift(self) -> None:
        server = Server(lambda number, body: of_prompt(body, PACKED))
        async with client_of(server) as client:
            with pytest.raises(ReplyError) as caught:
                await generate(client, routed_experts_prompt_start=2)
        assert caught.value.field == "sampling_params.routed_experts_prompt_start"
        assert server.requests == []

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    async def test_an_error_that_is_nested_too_deep_to_read_is_raised_as_any_other(self, opening: bytes) -> None:
        server = Server(lambda number, body: web.Response(status=400, body=opening * 100_000))
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await generate(client)
        assert caught.value.status == 400
        assert len(server.requests) == 1

    @pytest.mark.case("R67")
    async def test_what_an_environment_asks_another_model_is_no_turn(self) -> None:
        """About the same tokens, in the same agent loop."""

        def answer(number: int, request: dict[str, Any]) -> bytes:
            ids = canned.routes_of([*request["token_ids"], *RESPONSE][:-1]) + 30 * (request["model"] == "judge")
            return write(FRAME, RESPONSE, ids[request["sampling_params"].get(START, 0) :])

        server = Server(answer)
        async with client_of(server) as client:
            before = trajectory.get()
            trajectory.set(Traces())
            try:
                prompt, got = PROMPT, []
                for _ in range(2):
                    for model in ("policy", "judge"):
                        batch = {"prompt_token_ids": [prompt], "sampling_params": {}, "session_ids": ["t"]}
                        got.append((await client.generate(batch, model=model))["rollout_expert_indices"][0].ids)
                    prompt = [*prompt, *RESPONSE, 1, 2]
            finally:
                trajectory.set(before)
        starts = [request["sampling_params"].get(START, 0) for request in server.requests]
        assert starts == [0, 0, len(PROMPT) + 2, len(PROMPT) + 2]
        for one, other in ((got[0], got[1]), (got[2], got[3])):
            np.testing.assert_array_equal(one + 30, other)

    @pytest.mark.case("R77")
    async def test_a_turn_that_is_aborted_leaves_what_the_trajectory_holds(self) -> None:
        """What was captured of its prompt are rows of later tokens than the first."""

        def answer(number: int, request: dict[str, Any]) -> bytes:
            start = request["sampling_params"].get(START, 0)
            response = RESPONSE if number != 2 else []
            ids = canned.routes_of([*request["token_ids"], *response][:-1])
            return write(FRAME, response, ids[start:], finish_reason="stop" if response else "abort")

        server = Server(answer)
        async with client_of(server) as client:
            trajectory.set(Traces())
            try:
                prompts = [PROMPT, [*PROMPT, *RESPONSE, 1, 2], [*PROMPT, *RESPONSE, 1, 2]]
                got = [(await generate(client, [prompt]))["rollout_expert_indices"][0] for prompt in prompts]
            finally:
                trajectory.set(None)
        assert [request["sampling_params"].get(START, 0) for request in server.requests] == [0, 7, 7]
        for routes, tokens in zip(
            got, ([*PROMPT, *RESPONSE], [*PROMPT, *RESPONSE], [*prompts[2], *RESPONSE]), strict=True
        ):
            np.testing.assert_array_equal(routes.ids, canned.routes_of(tokens[:-1]))
            assert routes.token_ids.tolist() == tokens[:-1]

    @pytest.mark.parametrize("body", [b"", b'["no"]', b'{"error":{"message":"m"},"x":NaN}'])
    async def test_a_server_error_that_is_empty_or_json_is_raised_at_once_as_in_stock(self, body: bytes) -> None:
        server = Server(lambda number, request: json_reply(body, 503))
        async with client_of(server) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await generate(client)
        assert caught.value.status == 503
        assert len(server.requests) == 1

    @pytest.mark.parametrize("keep", [True, False], ids=["functools.wraps", "plain"])
    def test_a_method_that_somebody_else_wrapped_before_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, keep: bool
    ) -> None:
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
