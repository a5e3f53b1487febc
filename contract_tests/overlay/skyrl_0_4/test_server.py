"""SkyRL 0.4's real generate endpoint with the overlay: frames for those who ask, stock for everybody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay import server_suite
from contract_tests.overlay.server_suite import (
    LOGPROBS,
    POSITIONS,
    RESPONSE,
    ROUTES,
    asking,
    assert_reply,
    assert_same,
    engine,
    post,
    request,
    with_and_without,
)
from contract_tests.replies import ASKS, FRAME, NESTED, PACKED, read

ADAPTER = SimpleNamespace(lora_name="adapter", lora_int_id=1)
REGISTRY = SimpleNamespace(
    lora_requests={"adapter": ADAPTER}, is_base_model=lambda name: name in ("org/base", "served-alias")
)
MODELS = {"base model": "org/base", "served alias": "served-alias", "empty": "", "null": None}


class TestServer(server_suite.ServerContract):
    stock = PACKED
    floors = True

    # What SkyRL writes itself

    async def test_nested_lists_alone_are_a_client_error_that_names_the_field(self) -> None:
        served = engine()
        reply = await post(self.app(served), asking(NESTED))
        assert reply.status_code == 400
        assert ASKS in reply.json()["detail"]
        assert served.requests == []

    @pytest.mark.parametrize("case", POSITIONS)
    async def test_packed_replies_are_stock_s_whatever_the_logprobs(self, case: str) -> None:
        patched, stock = await with_and_without(
            lambda: self.app(engine(POSITIONS[case])), asking(PACKED), plain=request()
        )
        assert_same(patched, stock)
        assert stock.status_code == 200

    @pytest.mark.parametrize("case", POSITIONS)
    async def test_a_frame_holds_what_stock_s_reply_holds(self, case: str) -> None:
        frame, stock = await with_and_without(lambda: self.app(engine(POSITIONS[case])), asking(FRAME), plain=request())
        ours, theirs = read(frame.content), read(stock.content)
        assert (ours.token_ids, ours.finish_reason, ours.logprobs) == (
            theirs.token_ids,
            theirs.finish_reason,
            theirs.logprobs,
        )
        np.testing.assert_array_equal(ours.routes, theirs.routes, strict=True)

    # Sample support

    @staticmethod
    def supporting(**change: Any) -> dict[str, Any]:
        params = {"max_tokens": 3, "top_k": 2, "logprobs": 0, **change}
        return {"sampling_params": params, "return_sample_support": True}

    @pytest.mark.parametrize("asks", [[FRAME, PACKED, NESTED], [PACKED], [FRAME]])
    async def test_sample_support_is_answered_as_stock(self, asks: list[str]) -> None:
        ranks: Any = [[(token, -0.5), (token + 40, -0.25), (token + 50, -0.75)] for token in RESPONSE]
        served = [engine(ranks), engine(ranks)]
        apps = iter(served)
        body = request(**self.supporting())
        patched, stock = await with_and_without(
            lambda: self.app(next(apps)), asking(*asks, **self.supporting()), plain=body
        )
        assert_same(patched, stock)
        assert stock.status_code == 200
        assert stock.json()["choices"][0]["rollout_sample_support"]["shape"] == [3, 2]
        assert served[0].requests == served[1].requests

    @pytest.mark.parametrize("top_k", [None, 1, "many"])
    async def test_sample_support_without_top_k_is_refused_as_in_stock(self, top_k: Any) -> None:
        change = self.supporting(top_k=top_k)
        patched, stock = await with_and_without(
            lambda: self.app(engine()), asking(FRAME, **change), plain=request(**change)
        )
        assert_same(patched, stock)
        assert stock.status_code == 400
        assert "top_k" in stock.json()["detail"]

    async def test_a_request_that_says_no_to_sample_support_gets_its_frame(self) -> None:
        reply = await post(self.app(engine(LOGPROBS)), asking(FRAME, return_sample_support=False))
        assert_reply(read(reply.content), logprobs=[-4.5, -1.0, -3.0])

    # Adapters

    def lora_app(self, served: canned.CannedEngine) -> Any:
        return self.app(served, enable_lora=True, models=REGISTRY)

    async def test_the_adapter_reaches_the_engine(self) -> None:
        served = engine()
        reply = await post(self.lora_app(served), asking(FRAME, model="adapter"))
        assert served.options == [{"lora_request": ADAPTER}]
        assert served.options[0]["lora_request"] is ADAPTER
        assert_reply(read(reply.content))
        assert read(reply.content).metadata["model"] == "adapter"

    @pytest.mark.case("R59")
    @pytest.mark.parametrize("case", [*MODELS, "missing"])
    async def test_every_name_of_the_base_model_is_accepted(self, case: str) -> None:
        served = engine()
        body = asking(FRAME, model=MODELS.get(case))
        if case == "missing":
            del body["model"]
        reply = await post(self.lora_app(served), body)
        assert served.options == [{"lora_request": None}]
        assert_reply(read(reply.content))
        assert read(reply.content).metadata.get("model", "") == (MODELS.get(case) or "")

    @pytest.mark.case("R59")
    async def test_an_unknown_model_is_refused_as_in_stock(self) -> None:
        served = engine()
        patched, stock = await with_and_without(
            lambda: self.lora_app(served), asking(FRAME, model="nobody"), plain=request(model="nobody")
        )
        assert_same(patched, stock)
        assert stock.status_code == 404
        assert "nobody" in stock.json()["detail"]
        assert served.requests == []

    async def test_without_adapters_any_model_is_the_base_model_as_in_stock(self) -> None:
        served = engine()
        assert_reply(read((await post(self.app(served), asking(FRAME, model="nobody"))).content))
        assert served.options == [{"lora_request": None}]

    # The rest

    async def test_the_start_row_of_a_packed_request_is_stock_s_business(self) -> None:
        body = request()
        body["sampling_params"]["routed_experts_prompt_start"] = 4
        patched, stock = await with_and_without(
            lambda: self.app(engine(routed_experts=ROUTES[4:])), {**body, ASKS: [PACKED]}, plain=body
        )
        assert_same(patched, stock)

    async def test_the_other_endpoints_are_stock_s(self) -> None:
        app = self.app(engine())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            patched = [await client.post(path, json={}) for path in ("/fetch_weights", "/skyrl/v1/load_lora_adapter")]
        skyrl_r3.disable()
        transport = httpx.ASGITransport(app=self.app(engine()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            stock = [await client.post(path, json={}) for path in ("/fetch_weights", "/skyrl/v1/load_lora_adapter")]
        assert [reply.status_code for reply in stock] == [400, 400]
        for ours, theirs in zip(patched, stock, strict=True):
            assert_same(ours, theirs)
