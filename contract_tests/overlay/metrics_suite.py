"""What both ends count, in every SkyRL line: SkyRL's real handler, client and generator.

A line's tests derive from :class:`MetricsContract` and say what its SkyRL writes by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, generate_latest
from skyrl.train.generators.utils import concatenate_generator_outputs

import skyrl_r3
from contract_tests import canned
from contract_tests.overlay.client_suite import generate, of_prompt
from contract_tests.overlay.server_suite import LOGPROBS, PROMPT, RESPONSE, ROUTES, asking, engine, post, request
from contract_tests.overlay.test_generator import QUESTIONS, answer_with, config, run
from contract_tests.replies import ASKS, FRAME, NESTED, PACKED, write
from contract_tests.skyrl_server import Server, client_of, json_reply
from skyrl_r3 import metrics
from skyrl_r3.errors import R3Error
from skyrl_r3.hooks import generator as generator_hook

KINDS = {FRAME: "frame", PACKED: "packed", NESTED: "nested"}
TIMES = ("encode_seconds", "decode_seconds", "wait_seconds")


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was counted, but for what Prometheus has."""
    monkeypatch.delenv(metrics.SWITCH, raising=False)
    monkeypatch.setattr(metrics, "_before", metrics._Counted())
    monkeypatch.setattr(metrics, "_since", metrics._Counted())
    monkeypatch.setattr(metrics, "_samples", [])


def without_times(counted: dict[str, float]) -> dict[str, float]:
    """Counters alone. Times are more than nothing, and the load has tests of its own."""
    assert all(0 < counted[name] < 60 for name in TIMES if name in counted)
    return {name: value for name, value in counted.items() if name not in TIMES and not name.startswith("expert_load")}


def samples(text: str) -> dict[str, float]:
    """Our samples in Prometheus' text, without the time that each series was made at."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("skyrl_r3_"))
    return {name: float(value) for name, value in lines if "_created" not in name}


def added(before: dict[str, float]) -> dict[str, float]:
    """What is more in this process' registry than ``before``."""
    now = samples(generate_latest(REGISTRY).decode())
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


class MetricsContract:
    """Tests that hold in every line.

    Attributes:
        stock: The encoding that this SkyRL writes by itself.
        knows_lengths: Encodings whose bodies the client sees before SkyRL has parsed them.
    """

    stock: str
    knows_lengths: tuple[str, ...]

    @pytest.fixture(autouse=True)
    def overlay(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        fresh(monkeypatch)
        skyrl_r3.enable()
        yield
        skyrl_r3.disable()

    # The server

    @pytest.mark.case("R98")
    async def test_a_server_counts_frames(self) -> None:
        app = canned.skyrl_app(engine(LOGPROBS))
        bodies = [(await post(app, asking(FRAME))).content for _ in range(3)]
        assert without_times(metrics.snapshot()) == {
            "replies/frame": 3,
            "body_bytes/frame": sum(map(len, bodies)),
            "rows_captured": 3 * len(ROUTES),
            "replies_of/uint8": 3,
        }
        assert metrics.snapshot()["encode_seconds"] > 0

    @pytest.mark.parametrize("encoding", [FRAME, PACKED])
    @pytest.mark.parametrize(
        ("largest", "dtype"), [(255, "uint8"), (256, "int16"), (32_767, "int16"), (32_768, "int32")]
    )
    @pytest.mark.parametrize("shape", [(7, 1, 1), (7, 3, 2), (1, 1, 1), (1, 1, 2)])
    async def test_a_server_counts_the_dtype_that_it_chose(
        self, shape: tuple[int, ...], largest: int, dtype: str, encoding: str
    ) -> None:
        """Of the ids on the wire, whatever the engine's are."""
        prompt, response = ([3, 1, 4, 1, 5], RESPONSE) if shape[0] == 7 else ([3], [9])
        routes = np.full(shape, largest, dtype=np.uint16 if largest < 2**16 else np.int64)
        app = canned.skyrl_app(
            canned.CannedEngine(lambda given, _: canned.completion(response, prompt=given, routed_experts=routes))
        )
        reply = await post(app, asking(encoding, token_ids=prompt))
        assert reply.status_code == 200
        # Packed replies of SkyRL 0.4 are its own: what is in them is not looked at.
        ours = {} if encoding == self.stock else {f"replies_of/{dtype}": 1, "rows_captured": shape[0]}
        assert without_times(metrics.snapshot()) == {
            f"replies/{KINDS[encoding]}": 1,
            f"body_bytes/{KINDS[encoding]}": len(reply.content),
            **ours,
        }

    async def test_a_reply_without_rows_has_no_dtype(self) -> None:
        app = canned.skyrl_app(engine(routed_experts=None))
        reply = await post(app, asking(FRAME))
        assert without_times(metrics.snapshot()) == {"replies/frame": 1, "body_bytes/frame": len(reply.content)}

    @pytest.mark.case("R20")
    async def test_a_server_counts_floored_logprobs(self) -> None:
        broken: Any = [[(9, None)], [(2, -1.5)], [(6, float("nan"))]]
        await post(canned.skyrl_app(engine(broken)), asking(FRAME))
        await post(canned.skyrl_app(engine(LOGPROBS)), asking(FRAME))
        assert metrics.snapshot()["floored_logprobs"] == 2

    @pytest.mark.case("R99")
    async def test_a_server_counts_replies_that_skyrl_wrote(self) -> None:
        """One to a client that asks for nothing, beside one to a client that does."""
        app = canned.skyrl_app(engine(LOGPROBS))
        body = (await post(app, request())).content
        frame = (await post(app, asking(FRAME))).content
        counted = without_times(metrics.snapshot())
        assert counted[f"replies/{KINDS[self.stock]}"] == 1
        assert counted["replies/frame"] == 1
        assert counted.get("slow_replies", 0) == (1 if self.stock == NESTED else 0)
        # What FastAPI prints after SkyRL's handler has no length there.
        assert counted.get("body_bytes/packed") == (len(body) if self.stock == PACKED else None)
        assert counted["body_bytes/frame"] == len(frame)

    async def test_a_server_counts_no_reply_for_a_request_that_fails(self) -> None:
        app = canned.skyrl_app(canned.CannedEngine(lambda prompt, params: None))
        for body in (request(), asking(FRAME), asking("smoke signals")):
            assert (await post(app, body)).status_code >= 400
        assert metrics.snapshot() == {}

    @pytest.mark.case("R98")
    async def test_prometheus_has_the_same_numbers(self) -> None:
        """In the registry that vLLM's /metrics is made from, and in that endpoint's own text."""
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router

        app = FastAPI()
        attach_router(app)
        self.add_endpoints(app, engine([[(9, None)], [(2, -1.5)], [(6, -2.5)]]))
        before = samples(generate_latest(REGISTRY).decode())
        body = (await post(app, asking(FRAME))).content
        await post(app, request())
        found = added(before)
        stock = KINDS[self.stock]
        encode_seconds = found.pop("skyrl_r3_encode_seconds_total")
        assert encode_seconds == pytest.approx(metrics.snapshot()["encode_seconds"])
        assert {name: value for name, value in found.items() if stock not in name and "slow" not in name} == {
            'skyrl_r3_replies_total{encoding="frame"}': 1,
            'skyrl_r3_body_bytes_total{encoding="frame"}': len(body),
            'skyrl_r3_replies_of_total{dtype="uint8"}': 1,
            "skyrl_r3_rows_captured_total": len(ROUTES),
            "skyrl_r3_floored_logprobs_total": 1,
        }
        assert found[f'skyrl_r3_replies_total{{encoding="{stock}"}}'] == 1
        assert found.get("skyrl_r3_slow_replies_total", 0) == (1 if self.stock == NESTED else 0)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            shown = await client.get("/metrics")
        assert shown.headers["content-type"].startswith("text/plain")
        assert samples(shown.text) == samples(generate_latest(REGISTRY).decode())
        assert "# HELP skyrl_r3_replies_total Replies to requests for routes." in shown.text
        assert "# TYPE skyrl_r3_replies_total counter" in shown.text

    @staticmethod
    def add_endpoints(app: Any, served: Any) -> None:
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

        args = SimpleNamespace(enable_return_routed_experts=True, enable_lora=False)
        VLLMServerActor._add_custom_endpoints(app, served, args)

    # The client

    @pytest.mark.case("R98")
    @pytest.mark.parametrize("encoding", [FRAME, PACKED])
    async def test_a_client_counts_what_it_received(self, encoding: str) -> None:
        body = write(encoding, RESPONSE, ROUTES, [-0.5, -1.0, -1.5])
        async with client_of(Server(lambda number, asked: body)) as client:
            await generate(client, [PROMPT] * 3)
        lengths = {f"body_bytes/{KINDS[encoding]}": 3 * len(body)} if encoding in self.knows_lengths else {}
        assert without_times(metrics.snapshot()) == {
            f"replies/{KINDS[encoding]}": 3,
            "rows_captured": 3 * len(ROUTES),
            "replies_of/uint8": 3,
            **lengths,
        }
        assert metrics.snapshot()["wait_seconds"] > 0
        assert metrics.snapshot()["decode_seconds"] > 0

    async def test_a_client_waits_as_long_as_the_server_takes(self) -> None:
        async def slow(asked: Any) -> Any:
            await asyncio.sleep(0.2)
            return json_reply(write(FRAME, RESPONSE, ROUTES))

        async with client_of(Server(lambda number, asked: slow)) as client:
            await generate(client)
        found = metrics.snapshot()
        assert found["wait_seconds"] >= 0.2 > found["decode_seconds"]

    @pytest.mark.case("R99")
    async def test_one_reply_in_nested_lists_among_frames_is_counted_as_one(self) -> None:
        server = Server(lambda number, asked: of_prompt(asked, NESTED if number == 3 else FRAME))
        async with client_of(server) as client:
            for _ in range(5):
                await generate(client)
        counted = without_times(metrics.snapshot())
        assert (counted["replies/nested"], counted["slow_replies"], counted["replies/frame"]) == (1, 1, 4)

    async def test_frames_alone_are_no_slow_replies(self) -> None:
        async with client_of(Server(lambda number, asked: of_prompt(asked))) as client:
            await generate(client)
        assert "slow_replies" not in metrics.snapshot()

    async def test_a_wrong_reply_is_not_counted(self) -> None:
        async with client_of(Server(lambda number, asked: write(FRAME, RESPONSE, ROUTES[:-1]))) as client:
            with pytest.raises(R3Error):
                await generate(client)
        assert not {"replies/frame", "rows_captured"} & set(metrics.snapshot())

    @pytest.mark.case("R90")
    async def test_the_load_is_that_of_captured_rows(self) -> None:
        """Layer 0 all on two experts of 8, layer 1 on all alike, layer 2 dense: all zero."""
        ids = np.zeros((8, 3, 1), np.uint8)
        ids[:, 0, 0], ids[:, 1, 0] = np.arange(8) % 2, np.arange(8)
        prompt, response = PROMPT[:3], RESPONSE * 2
        body = write(FRAME, response, ids, num_experts=8)
        async with client_of(Server(lambda number, asked: body)) as client:
            await generate(client, [prompt] * 2)
        load = {name: value for name, value in metrics.snapshot().items() if name.startswith("expert_load")}
        assert load == {
            "expert_load_max_over_mean/layer_00": 4.0,
            "expert_load_max_over_mean/layer_01": 1.0,
        }

    @pytest.mark.case("R90")
    async def test_an_aborted_reply_without_rows_has_no_load(self) -> None:
        empty = np.zeros((0, 3, 2), np.uint8)
        async with client_of(
            Server(lambda number, asked: write(FRAME, [], empty, [], finish_reason="abort"))
        ) as client:
            await generate(client)
        assert without_times(metrics.snapshot()).keys() == {"replies/frame", "body_bytes/frame"}
        assert not [name for name in metrics.snapshot() if name.startswith("expert_load")]

    # Off

    async def test_off_counts_and_times_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: Any) -> None:
            raise AssertionError("metrics are off")

        monkeypatch.setenv(metrics.SWITCH, "off")
        monkeypatch.setattr(metrics, "_add", forbidden)
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=forbidden))
        monkeypatch.setattr(metrics, "np", SimpleNamespace(zeros=np.zeros, int64=np.int64, bincount=forbidden))
        before = samples(generate_latest(REGISTRY).decode())
        app = canned.skyrl_app(engine(LOGPROBS))
        for body in (request(), asking(FRAME)):
            assert (await post(app, body)).status_code == 200
        async with client_of(Server(lambda number, asked: of_prompt(asked))) as client:
            await generate(client)
        assert metrics.snapshot() == metrics.report() == {}
        assert metrics._since.counters == {}
        assert added(before) == {}

    # The trainer

    async def output_of(self, tokenizer: Any, answer: Any = None) -> Any:
        return await run(tokenizer, config(max_turns=2), answer or answer_with(tokenizer.eos_token_id))

    @pytest.mark.case("R98")
    async def test_a_generator_s_metrics_have_what_was_counted(self, tokenizer: Any) -> None:
        output = await self.output_of(tokenizer)
        total = metrics.snapshot()
        assert {name: value for name, value in output["rollout_metrics"].items() if name.startswith("r3/")} == {
            f"r3/{name}": value for name, value in total.items()
        }
        assert total["replies/frame"] == 2 * len(QUESTIONS)
        assert len([name for name in total if name.startswith("expert_load")]) == canned.LAYERS
        assert all(type(value) in (int, float) for value in output["rollout_metrics"].values() if value is not None)
        # SkyRL's own are there as ever.
        assert "generate/avg_num_tokens" in output["rollout_metrics"]

    async def test_each_output_has_what_came_since_the_last_and_skyrl_adds_them_up(self, tokenizer: Any) -> None:
        """As SkyRL's asynchronous trainer has it: many calls at once, each of one group of samples."""
        outputs = await asyncio.gather(*(self.output_of(tokenizer) for _ in range(3)))
        outputs.append(await self.output_of(tokenizer))
        total = without_times(metrics.snapshot())
        joined: Any = concatenate_generator_outputs(outputs)["rollout_metrics"]
        assert total["replies/frame"] == 4 * 2 * len(QUESTIONS)
        assert {name: joined[f"r3/{name}"] for name in total} == total
        seconds = metrics.snapshot()["wait_seconds"]
        assert joined["r3/wait_seconds"] == pytest.approx(seconds)
        for layer in range(canned.LAYERS):
            name = f"r3/expert_load_max_over_mean/layer_{layer:02}"
            loads = [output["rollout_metrics"][name] for output in outputs if name in output["rollout_metrics"]]
            assert joined[name] == pytest.approx(sum(loads) / len(loads))

    @pytest.mark.case("R99")
    async def test_one_fallback_to_nested_lists_reads_one_in_the_tracker(self, tokenizer: Any) -> None:
        plain = answer_with(tokenizer.eos_token_id)

        def answer(number: int, asked: dict[str, Any]) -> bytes:
            return plain(number, {**asked, ASKS: [NESTED]} if number == 4 else asked)

        output = await self.output_of(tokenizer, answer)
        assert output["rollout_metrics"]["r3/slow_replies"] == 1
        assert output["rollout_metrics"]["r3/replies/nested"] == 1

    async def test_with_metrics_off_a_generator_s_are_those_of_stock(
        self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(metrics.SWITCH, "off")
        patched = await self.output_of(tokenizer)
        skyrl_r3.disable()
        plain = answer_with(tokenizer.eos_token_id)
        stock = await self.output_of(tokenizer, lambda number, asked: plain(number, {**asked, ASKS: [self.stock]}))
        assert patched["rollout_metrics"].keys() == stock["rollout_metrics"].keys()

    async def test_an_output_that_nothing_was_counted_for_stays_as_it_is(self) -> None:
        """As with the flag off."""
        metrics.add("rows_saved", 3)
        outputs: list[Any] = [{"rollout_metrics": {"a": 1}}, {"rollout_metrics": None}, {"rollout_metrics": {"a": 1}}]

        async def original() -> Any:
            return outputs.pop(0)

        hooked = generator_hook.generate(original)
        assert await hooked() == {"rollout_metrics": {"a": 1, "r3/rows_saved": 3}}
        assert await hooked() == {"rollout_metrics": None}
        metrics.add("rows_saved", 2)
        assert await hooked() == {"rollout_metrics": {"a": 1, "r3/rows_saved": 2}}
