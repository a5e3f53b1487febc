"""What is true of SkyRL's real generate endpoint with the overlay, in every SkyRL line.

A line's tests derive from :class:`ServerContract` and say what its SkyRL writes by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

import skyrl_r3
from contract_tests import canned
from contract_tests.replies import ASKS, FRAME, FRAME_TYPE, NESTED, PACKED, URL, Read, read
from skyrl_r3 import notes

PROMPT = [3, 1, 4, 1, 5]
RESPONSE = [9, 2, 6]
ROUTES = canned.routes_of([*PROMPT, *RESPONSE][:-1])
LOGPROBS: list[list[tuple[int, float | None]] | None] = [[(token, -0.5 * token)] for token in RESPONSE]
ENCODINGS = [FRAME, PACKED]
TYPES = {FRAME: FRAME_TYPE, PACKED: "application/json"}
UNTOLD = {"missing": {}, "null": {ASKS: None}}


def engine(positions: Any = None, **more: Any) -> canned.CannedEngine:
    """Samples :data:`RESPONSE` with the logprobs ``positions`` in the form that is asked for."""

    def complete(prompt: list[int], params: Any) -> Any:
        logprobs = None if positions is None else canned.logprobs_as_asked(params, positions)
        return canned.completion(RESPONSE, prompt=prompt, logprobs=logprobs, **more)

    return canned.CannedEngine(complete)


async def post(app: Any, body: Any, *, raw: bytes | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"content-type": "application/json"}
        return await client.post(URL, content=orjson.dumps(body) if raw is None else raw, headers=headers)


async def sent(app: Any, body: Any, *, on_start: Callable[[], None] = lambda: None) -> list[Any]:
    """The pieces of the body that ``app`` gives to the server it runs in, the empty one of the start included."""
    content, pieces = orjson.dumps(body), []

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            on_start()
        pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": URL, "raw_path": URL.encode(), "headers": headers}
    await app(scope | {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}, receive, send)
    return pieces


def request(**more: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "logprobs": 0}, "model": "m", **more}


def asking(*encodings: str, **more: Any) -> dict[str, Any]:
    return request(**{ASKS: list(encodings)}, **more)


def starting(start: Any, *encodings: str) -> dict[str, Any]:
    """A request for the rows from ``start`` on, as a stock client's without ``encodings``."""
    body = asking(*encodings) if encodings else request()
    body["sampling_params"]["routed_experts_prompt_start"] = start
    return body


async def with_and_without(
    app: Callable[[], Any], body: Any, *, plain: Any = None, raw: bytes | None = None
) -> tuple[httpx.Response, httpx.Response]:
    """The answers of SkyRL with the overlay to ``body``, and of stock to ``plain``, if that is not the same."""
    patched = await post(app(), body, raw=raw)
    skyrl_r3.disable()
    return patched, await post(app(), body if plain is None else plain, raw=raw)


def assert_same(patched: httpx.Response, stock: httpx.Response) -> None:
    """Byte for byte, headers included."""
    assert (patched.status_code, patched.content) == (stock.status_code, stock.content)
    assert patched.headers == stock.headers


def assert_reply(found: Read, *, logprobs: list[float] | None = None) -> None:
    """What :func:`engine` samples, with its own routes bit for bit."""
    assert (found.token_ids, found.finish_reason, found.logprobs) == (RESPONSE, "stop", logprobs)
    np.testing.assert_array_equal(found.routes, ROUTES, strict=True)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no output": ({}, {}),
    "no token ids": ({}, {"token_ids": None}),
    "bad sampling params": ({}, {"sampling_params": {"temperature": -1.0}}),
    "unknown sampling param": ({}, {"sampling_params": {"no_such_param": 1}}),
    "sampling params as text": ({}, {"sampling_params": "hot"}),
}

# What an engine may say about the logprobs of three sampled tokens. The sampled one comes first, as vLLM has it, or
# last, or not at all; several ranks of a position may hold the next position's token.
POSITIONS: dict[str, list[list[tuple[int, float | None]] | None]] = {
    "one a position": [[(9, -0.5)], [(2, -1.5)], [(6, -2.5)]],
    "five ranks": [[(token, -0.25), *((40 + rank, -1.0 - rank) for rank in range(5))] for token in RESPONSE],
    "sampled token not first": [[(1, -0.1), (9, -0.5)], [(0, -0.1), (3, -0.2), (2, -1.5)], [(6, -2.5), (7, -3.5)]],
    "another number of ranks each": [[(9, -0.5)], [(2, -1.5), (1, -1.75)], [(4, -0.5), (6, -2.5)]],
    "sampled token missing": [[(9, -0.5)], [(1, -1.5)], [(6, -2.5)]],
    "position without entries": [[(9, -0.5)], [], [(6, -2.5)]],
    "position of None": [[(9, -0.5)], None, [(6, -2.5)]],
    "no position has entries": [[], None, []],
    "two ranks here and none there": [[(9, -0.5), (2, -1.0)], [], [(6, -2.5)]],
    "None": [[(9, None)], [(2, -1.5)], [(6, None)]],
    "NaN": [[(9, math.nan)], [(2, -1.5)], [(6, -2.5)]],
    "infinite": [[(9, -math.inf)], [(2, math.inf)], [(6, -2.5)]],
    "zero": [[(9, 0.0)], [(2, -0.0)], [(6, -2.5)]],
}


class ServerContract:
    """Tests that hold in every line.

    Attributes:
        stock: The encoding that this SkyRL writes by itself.
        floors: Whether SkyRL itself has a number for logprobs that are missing or not finite.
    """

    stock: str
    floors: bool

    @pytest.fixture(autouse=True)
    def overlay(self) -> Iterator[None]:
        skyrl_r3.enable()
        yield
        skyrl_r3.disable()

    def app(self, served: Any, **cli_args: Any) -> Any:
        return canned.skyrl_app(served, **cli_args)

    # Who gets what

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_the_reply_holds_the_engine_s_routes_bit_for_bit(self, encoding: str) -> None:
        reply = await post(self.app(engine(LOGPROBS)), asking(encoding))
        assert reply.status_code == 200
        assert reply.headers["content-type"] == TYPES[encoding]
        assert int(reply.headers["content-length"]) == len(reply.content)
        found = read(reply.content)
        assert found.encoding == encoding
        assert found.routes is not None
        assert found.routes.dtype == np.uint8
        assert_reply(found, logprobs=[-4.5, -1.0, -3.0])

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_without_logprobs_there_are_none(self, encoding: str) -> None:
        reply = await post(self.app(engine()), asking(encoding, sampling_params={"max_tokens": 3}))
        assert_reply(read(reply.content))
        assert "logprobs" not in read(reply.content).tensors

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_reply_without_tokens(self, encoding: str) -> None:
        def complete(prompt: list[int], params: Any) -> Any:
            return canned.completion([], prompt=prompt, logprobs=canned.logprobs_as_asked(params, []))

        reply = await post(self.app(canned.CannedEngine(complete)), asking(encoding))
        found = read(reply.content)
        assert (found.token_ids, found.finish_reason, found.logprobs) == ([], "abort", [])
        np.testing.assert_array_equal(found.routes, canned.routes_of(PROMPT[:-1]), strict=True)

    async def test_the_frame_tells_what_the_request_was(self) -> None:
        body = asking(FRAME, model="org/model")
        found = read((await post(self.app(engine()), body)).content)
        assert found.metadata == {
            "format": "skyrl-r3/1",
            "finish_reason": "stop",
            "prompt_tokens": "5",
            "start": "0",
            "model": "org/model",
        }

    async def test_the_frame_tells_what_the_model_s_routes_look_like(self) -> None:
        served: Any = engine()
        fields = {"num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        config = SimpleNamespace(model_type="deepseek_v3", **fields)
        served.model_config = SimpleNamespace(hf_text_config=config, get_num_experts=lambda: 16)
        app = self.app(served)
        config.num_hidden_layers = 5  # It was read when the endpoint was installed.
        told = {"num_experts": "16", "topk": "2", "layers": "3", "moe_layers": "1-2"}
        for _ in range(2):
            found = read((await post(app, asking(FRAME))).content)
            assert {name: found.metadata.get(name) for name in told} == told
            assert_reply(found)

    @pytest.mark.parametrize(("tells", "number"), [(16, "16"), (None, None)])
    async def test_the_frame_tells_how_many_experts_the_engine_says_there_are(self, tells: Any, number: Any) -> None:
        served: Any = engine()
        served.model_config = SimpleNamespace(get_num_experts=lambda: tells)
        found = read((await post(self.app(served), asking(FRAME))).content)
        assert found.metadata.get("num_experts") == number
        assert {"topk", "layers", "moe_layers"} & set(found.metadata) == set()

    @pytest.mark.case("R14")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("kind", ["array", "tensor"])
    async def test_a_buffer_that_is_written_again_does_not_change_a_reply_on_its_way(
        self, kind: str, encoding: str
    ) -> None:
        import torch

        buffer: Any = np.zeros((100, *ROUTES.shape[1:]), np.uint8)
        buffer[: len(ROUTES)] = ROUTES
        if kind == "tensor":
            buffer = torch.from_numpy(buffer)

        def overwrite() -> None:
            buffer[:] = 7

        app = self.app(engine(routed_experts=buffer[: len(ROUTES)]))
        pieces = await sent(app, asking(encoding), on_start=overwrite)
        np.testing.assert_array_equal(read(b"".join(pieces)).routes, ROUTES, strict=True)
        # What vLLM decodes when it is told to log replies.
        assert {type(piece) for piece in pieces[:2]} == {bytes}

    @pytest.mark.case("R23", "R30")
    async def test_a_frame_is_sent_from_the_engine_s_own_memory(self) -> None:
        """However large they are, routes cost the event loop nothing but the one scan for the largest id."""
        routes = ROUTES.copy()
        *_, last = await sent(self.app(engine(routed_experts=routes)), asking(FRAME))
        assert np.shares_memory(np.frombuffer(last, np.uint8), routes)

    @pytest.mark.case("R23", "R30")
    async def test_a_large_body_is_sent_in_as_many_pieces_as_a_small_one_and_never_joined(self) -> None:
        """What it needs besides the engine's array is nothing in a frame, and the base64 once where it is packed."""
        large = np.zeros((7, 2**16, 16), np.uint8)
        for encoding in set(ENCODINGS) - {self.stock}:
            few = await sent(self.app(engine()), asking(encoding))
            app, body = self.app(engine(routed_experts=large)), asking(encoding)
            tracemalloc.start()
            try:
                many = await sent(app, body)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            sizes = [memoryview(piece).nbytes for piece in many]
            assert len(sizes) == len(few)
            assert max(sizes) >= large.nbytes
            assert peak <= (0 if encoding == FRAME else max(sizes)) + 200_000

    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_the_reply_tells_its_length(self, encoding: str) -> None:
        reply = await post(self.app(engine()), asking(encoding))
        assert int(reply.headers["content-length"]) == len(reply.content)
        assert "transfer-encoding" not in reply.headers

    async def test_the_start_row_reaches_the_engine_and_the_frame(self) -> None:
        served = engine(routed_experts=ROUTES[4:])
        body = asking(FRAME)
        body["sampling_params"]["routed_experts_prompt_start"] = 4
        found = read((await post(self.app(served), body)).content)
        ((_, params),) = served.requests
        assert params.routed_experts_prompt_start == 4
        assert found.metadata["start"] == "4"
        np.testing.assert_array_equal(found.routes, ROUTES[4:], strict=True)

    @pytest.mark.case("R78")
    @pytest.mark.parametrize("start", [1, 4, 5])
    async def test_a_start_that_the_engine_ignores_is_0_in_the_frame(self, start: int) -> None:
        found = read((await post(self.app(engine()), starting(start, FRAME))).content)
        assert found.metadata["start"] == "0"
        assert_reply(found)

    # A start that an engine would die of

    @pytest.mark.case("R24")
    @pytest.mark.parametrize("asks", [[FRAME], [PACKED], [FRAME, PACKED, NESTED], []])
    @pytest.mark.parametrize(
        "start",
        [6, 7, 2**70, -1, True, False, None, 2.0, "2", [2], {}, math.nan, "2" * 5000],
        ids=lambda v: repr(v)[:9],
    )
    async def test_a_start_outside_of_the_prompt_never_reaches_the_engine(self, start: Any, asks: Any) -> None:
        served = engine()
        app = self.app(served)
        body = starting(start, *asks)
        # The standard library writes what orjson does not: a number of 70 bits, and NaN.
        reply = await post(app, None, raw=json.dumps(body).encode())
        assert reply.status_code == 400
        detail = reply.json()["detail"]
        field, expected = (
            "sampling_params.routed_experts_prompt_start",
            "an integer from 0 to 5 for a prompt of 5 tokens",
        )
        assert detail.startswith(f"{field}: expected {expected}, got ")
        assert len(detail) < 300
        assert served.requests == []
        assert_reply(read((await post(app, asking(FRAME))).content))

    @pytest.mark.case("R24")
    @pytest.mark.parametrize("asks", [[FRAME], []])
    @pytest.mark.parametrize(
        ("version", "right"),
        [("0.22.0", False), ("0.23.0", False), ("0.29.0", False), ("0.30.0rc1", False), ("dev", False), (None, False),
         ("0.30.0", True), ("0.30.0+cpu", True), ("0.30.1.dev3", True), ("0.33.0", True)],
    )  # fmt: skip
    async def test_the_end_of_the_prompt_is_a_start_for_a_vllm_that_survives_it(
        self, version: str | None, right: bool, asks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import vllm

        if version is None:
            monkeypatch.delattr(vllm, "__version__")
        else:
            monkeypatch.setattr(vllm, "__version__", version)
        served = engine(routed_experts=ROUTES[5:])
        app = self.app(served)
        body = starting(5, *asks)
        reply = await post(app, body)
        assert (reply.status_code == 200) is (len(served.requests) == 1) is right
        if right:
            np.testing.assert_array_equal(read(reply.content).routes, ROUTES[5:])
        else:
            assert "expected an integer from 0 to 4 for a prompt of 5 tokens, got 5" in reply.json()["detail"]
            assert "0.30.0" in reply.json()["detail"]
        assert (await post(app, starting(4, FRAME))).status_code == 200

    @pytest.mark.parametrize(
        "change",
        [{"token_ids": None}, {"token_ids": "12"}, {"sampling_params": None}, {"sampling_params": [["x", 1]]}],
        ids=repr,
    )
    async def test_the_guard_leaves_other_wrong_requests_to_stock(self, change: dict[str, Any]) -> None:
        body = starting(99, FRAME) | change
        plain = {name: value for name, value in body.items() if name != ASKS}
        patched, stock = await with_and_without(lambda: self.app(engine()), body, plain=plain)
        assert_same(patched, stock)

    async def test_a_server_without_the_flag_guards_nothing(self) -> None:
        served = engine(routed_experts=None)
        body = starting(99, FRAME)
        patched, stock = await with_and_without(
            lambda: self.app(served, enable_return_routed_experts=False), body, plain=body
        )
        assert_same(patched, stock)
        assert patched.status_code == 200

    @pytest.mark.case("R33")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_long_request_is_parsed_once_as_in_stock(
        self, encoding: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed: list[str] = []

        def counted(loads: Any) -> Any:
            def count(text: Any, *args: Any, **kwargs: Any) -> Any:
                parsed.append(loads.__module__)
                return loads(text, *args, **kwargs)

            return count

        prompt = list(range(200_000))
        app, body = self.app(engine()), asking(encoding, token_ids=prompt)
        with monkeypatch.context() as patch:
            for module in (json, orjson):
                patch.setattr(module, "loads", counted(module.loads))
            reply = await post(app, body)
            once = list(parsed)
            skyrl_r3.disable()
            await post(self.app(engine(routed_experts=None)), body)  # Its nested lists would take seconds.
        assert once == parsed[1:] == ["json"]
        np.testing.assert_array_equal(read(reply.content).routes, canned.routes_of([*prompt, *RESPONSE][:-1]))

    @pytest.mark.case("R53")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_request_to_stream_gets_one_whole_reply(self, encoding: str) -> None:
        """SkyRL's endpoint does not know the field, so that no reply may come without its routes because of it."""
        streamed, whole = [
            await post(self.app(engine(LOGPROBS)), asking(encoding, **more)) for more in ({"stream": True}, {})
        ]
        assert_same(streamed, whole)
        assert_reply(read(streamed.content), logprobs=[-4.5, -1.0, -3.0])

    @pytest.mark.case("R31")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_an_app_that_compresses_its_replies(self, encoding: str) -> None:
        from fastapi.middleware.gzip import GZipMiddleware

        app = self.app(engine())
        app.add_middleware(GZipMiddleware, minimum_size=1)
        reply = await post(app, asking(encoding))
        assert reply.headers["content-encoding"] == "gzip"
        assert_reply(read(reply.content))

    @pytest.mark.case("R34")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_more_than_256_experts_travel_as_int16(self, encoding: str) -> None:
        found = read((await post(self.app(engine(experts=512)), asking(encoding))).content)
        expected = canned.routes_of([*PROMPT, *RESPONSE][:-1], experts=512)
        assert expected.max() > 255
        np.testing.assert_array_equal(found.routes, expected.astype(np.int16), strict=True)

    @pytest.mark.parametrize("told", UNTOLD)
    async def test_requests_that_do_not_ask_are_answered_as_stock(self, told: str) -> None:
        patched, stock = await with_and_without(
            lambda: self.app(engine(LOGPROBS)), request(**UNTOLD[told]), plain=request()
        )
        assert_same(patched, stock)
        assert read(stock.content).encoding == self.stock

    async def test_requests_for_stock_s_own_encoding_are_answered_as_stock(self) -> None:
        patched, stock = await with_and_without(
            lambda: self.app(engine(LOGPROBS)), asking(self.stock, FRAME), plain=request()
        )
        assert_same(patched, stock)
        assert read(stock.content).encoding == self.stock

    async def test_a_server_without_the_flag_is_not_touched(self) -> None:
        served = engine(LOGPROBS, routed_experts=None)
        app = self.app(served, enable_return_routed_experts=False)
        endpoints = [route.endpoint for route in app.router.routes if getattr(route, "path", "") == URL]
        assert [endpoint.__module__.split(".")[0] for endpoint in endpoints] == ["skyrl"]
        found = read((await post(app, asking(FRAME, PACKED))).content)
        assert found.routes is None
        assert found.encoding != FRAME
        assert not served.requests[0][1].flat_logprobs

    async def test_a_note_is_said_by_a_server_with_the_flag_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        monkeypatch.setattr(notes.logger, "warning", said.append)  # vLLM, when it is imported, changes logging.
        monkeypatch.setattr(notes, "_noted", ["SkyRL was edited"])
        monkeypatch.setattr(notes, "_said", set())
        self.app(engine(LOGPROBS, routed_experts=None), enable_return_routed_experts=False)
        assert said == []
        self.app(engine(LOGPROBS))
        assert said == ["SkyRL was edited"]

    @pytest.mark.parametrize("wanted", ["packed", ["frame/99"], [], [1], {"packed": 1}, ["FRAME/1"], 5, True])
    async def test_encodings_that_the_server_does_not_know_are_a_client_error(self, wanted: Any) -> None:
        served = engine()
        reply = await post(self.app(served), request(**{ASKS: wanted}))
        assert reply.status_code == 400
        assert ASKS in reply.json()["detail"]
        assert served.requests == []

    @pytest.mark.parametrize(
        ("wanted", "encoding"),
        [
            (["frame/99", FRAME, PACKED, NESTED], FRAME),
            (["frame/99", PACKED, FRAME, NESTED], PACKED),
            ([FRAME, FRAME], FRAME),
        ],
    )
    async def test_the_first_known_encoding_is_taken(self, wanted: list[str], encoding: str) -> None:
        reply = await post(self.app(engine()), asking(*wanted))
        assert read(reply.content).encoding == encoding

    # Logprobs

    @pytest.mark.case("R20")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_logprobs_that_json_has_no_number_for_are_floored_and_counted(
        self, encoding: str, caplog: Any
    ) -> None:
        tokens = [10, 11, 12, 13, 14, 15]
        values = [-0.1, math.nan, -math.inf, math.inf]
        logprobs: list[Any] = [{token: canned.logprob(v)} for token, v in zip(tokens[:4], values, strict=True)]
        logprobs += [{14: None}, {}]
        served = canned.CannedEngine(lambda prompt, params: canned.completion(tokens, prompt=prompt, logprobs=logprobs))
        with caplog.at_level(logging.WARNING):
            reply = await post(self.app(served), asking(encoding))
        found = read(reply.content)
        assert found.logprobs == [pytest.approx(-0.1)] + [-9999.0] * 5
        assert found.routes is not None
        assert len(found.routes) == len(PROMPT) + len(tokens) - 1
        warnings = [record for record in caplog.records if record.name.startswith("skyrl")]
        assert len(warnings) == 1
        if encoding != self.stock:
            assert warnings[0].args[:2] == (5, 6)

    @pytest.mark.parametrize("case", POSITIONS)
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_flat_logprobs_give_the_reply_of_logprobs_by_token(self, encoding: str, case: str) -> None:
        """The engine is asked for the flat form; one that keeps to the other must not be told apart."""
        asked = []

        def served(flat: bool) -> canned.CannedEngine:
            def complete(prompt: list[int], params: Any) -> Any:
                asked.append(params.flat_logprobs)
                form = SimpleNamespace(flat_logprobs=flat)
                given = canned.logprobs_as_asked(form, POSITIONS[case])
                return canned.completion(RESPONSE, prompt=prompt, logprobs=given)

            return canned.CannedEngine(complete)

        flat, by_token = [await post(self.app(served(form)), asking(encoding)) for form in (True, False)]
        assert flat.status_code == by_token.status_code == 200
        assert flat.content == by_token.content
        assert asked == [encoding != self.stock] * 2
        if encoding != self.stock or self.floors:
            assert read(flat.content).logprobs == [
                value if value is not None and math.isfinite(value) else -9999.0
                for value in (
                    dict(entries or []).get(token) for token, entries in zip(RESPONSE, POSITIONS[case], strict=True)
                )
            ]

    @pytest.mark.parametrize("asked", [0, 5, -1])
    async def test_the_engine_sees_stock_s_params_but_for_the_form_of_logprobs(self, asked: int) -> None:
        seen = []
        for _ in range(2):
            served = engine()
            body = asking(FRAME, cache_salt="v7", unknown_field=1)
            body["sampling_params"] = {
                "temperature": 0.5,
                "seed": 7,
                "stop_token_ids": [2],
                "logprobs": asked,
                "routed_experts_prompt_start": 1,
            }
            reply = await post(self.app(served), body)
            assert reply.status_code == 200
            seen.append((*served.requests[0], served.options[0]))
            skyrl_r3.disable()
        (patched_prompt, patched, patched_options), (stock_prompt, stock, stock_options) = seen
        assert patched_prompt == stock_prompt
        assert patched_prompt["cache_salt"] == "v7"
        assert patched_options == stock_options
        assert (patched.flat_logprobs, stock.flat_logprobs) == (True, False)
        assert (patched.logprobs, patched.routed_experts_prompt_start) == (asked, 1)
        patched.flat_logprobs = False
        assert patched == stock
        assert repr(patched) == repr(stock)

    @pytest.mark.parametrize("body", [asking(FRAME, sampling_params={"prompt_logprobs": 1}), request()])
    async def test_the_form_of_logprobs_stays_where_it_is_of_no_use(self, body: dict[str, Any]) -> None:
        """No logprobs, or a request that is stock's alone: the params are stock's in everything."""
        patched, stock = engine(), engine()
        await post(self.app(patched), body)
        skyrl_r3.disable()
        await post(self.app(stock), body)
        assert patched.requests == stock.requests
        assert patched.requests[0][1].flat_logprobs is False

    async def test_a_vllm_that_knows_one_form_of_logprobs_still_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor

        monkeypatch.setattr(vllm_server_actor, "VLLMSamplingParams", SimpleNamespace)
        served = engine(LOGPROBS)
        found = read((await post(self.app(served), asking(FRAME))).content)
        assert vars(served.requests[0][1]) == request()["sampling_params"]
        assert_reply(found, logprobs=[-4.5, -1.0, -3.0])

    async def test_numpy_numbers_of_an_engine_are_written(self) -> None:
        logprobs = [{token: canned.logprob(np.float64(-0.5))} for token in RESPONSE]  # pyright: ignore[reportArgumentType]
        served = canned.CannedEngine(
            lambda prompt, params: canned.completion(RESPONSE, prompt=prompt, logprobs=logprobs)
        )
        for encoding in set(ENCODINGS) - {self.stock}:
            assert read((await post(self.app(served), asking(encoding))).content).logprobs == [-0.5] * 3

    # What is wrong

    @pytest.mark.parametrize("case", REFUSED)
    async def test_errors_are_those_of_stock(self, case: str) -> None:
        cli_args, change = REFUSED[case]
        bodies = [asking(FRAME, **change), request(**change)]
        for body in bodies if case == "no token ids" else []:
            del body["token_ids"]
        served = canned.CannedEngine(lambda prompt, params: None) if case == "no output" else engine()
        patched, stock = await with_and_without(lambda: self.app(served, **cli_args), bodies[0], plain=bodies[1])
        assert_same(patched, stock)
        assert stock.status_code >= 400

    @pytest.mark.parametrize("raw", [b"{", b"", b"[]", b"5", b'"text"', b"null"])
    async def test_a_body_that_is_no_request_fails_as_in_stock(self, raw: bytes) -> None:
        patched, stock = await with_and_without(lambda: self.app(engine()), None, raw=raw)
        assert_same(patched, stock)
        assert patched.status_code >= 400

    async def test_an_engine_that_fails_is_an_error_as_in_stock_and_the_next_request_works(self) -> None:
        def complete(prompt: list[int], params: Any) -> Any:
            if len(served.requests) < 2:
                raise RuntimeError("no more blocks")
            return canned.completion(RESPONSE, prompt=prompt)

        served = canned.CannedEngine(complete)
        app = self.app(served)
        failed, fine = await post(app, asking(FRAME)), await post(app, asking(FRAME))
        skyrl_r3.disable()
        served.requests.clear()
        assert_same(failed, await post(self.app(served), request()))
        assert_reply(read(fine.content))

    @pytest.mark.case("R15")
    async def test_missing_routes_are_left_out_or_null(self) -> None:
        app = self.app(engine(routed_experts=None))
        frame, packed = await post(app, asking(FRAME)), await post(app, asking(PACKED))
        assert frame.status_code == packed.status_code == 200
        assert read(frame.content).tensors == ["token_ids"]
        assert "topk" not in read(frame.content).metadata
        assert packed.json()["choices"][0]["routed_experts"] is None

    @pytest.mark.case("R15")
    async def test_an_engine_that_knows_no_routes_is_one_that_captured_none(self) -> None:
        """A vLLM of before they came, say. The client's error names the flag, where an AttributeError would not."""

        def complete(prompt: list[int], params: Any) -> Any:
            return SimpleNamespace(token_ids=RESPONSE, finish_reason="stop", logprobs=None)

        for encoding in set(ENCODINGS) - {self.stock}:
            reply = await post(self.app(canned.CannedEngine(complete)), asking(encoding))
            assert reply.status_code == 200
            assert read(reply.content).routes is None

    @pytest.mark.case("R10", "R25")
    @pytest.mark.parametrize(
        "routes",
        [np.full((7, 3, 2), -1, np.int16), np.zeros((7, 6), np.uint8), np.zeros((7, 3, 2)), "AAEC", [[[1, 2]]]],
        ids=["negative", "two dimensions", "floats", "text", "lists"],
    )
    async def test_an_engine_that_hands_over_something_else_is_a_server_error_that_says_so(self, routes: Any) -> None:
        def complete(prompt: list[int], params: Any) -> Any:
            output = canned.completion(RESPONSE, prompt=prompt)
            output.routed_experts = routes
            return output

        for encoding in set(ENCODINGS) - {self.stock}:
            reply = await post(self.app(canned.CannedEngine(complete)), asking(encoding))
            assert reply.status_code == 500
            assert "routed_experts" in reply.json()["detail"]

    # Whose reply is whose

    async def test_concurrent_requests_keep_their_own_routes(self) -> None:
        async def reply_for(app: Any, index: int, encoding: str) -> None:
            prompt = [index, index + 1, index + 2]
            asks = {} if index % 2 else {ASKS: [encoding]}
            reply = await post(app, {"token_ids": prompt, "sampling_params": {}, **asks})
            found = read(reply.content)
            assert found.encoding == (encoding if asks else self.stock)
            np.testing.assert_array_equal(found.routes, canned.routes_of([*prompt, *RESPONSE][:-1]))

        app = self.app(engine())
        await asyncio.gather(*(reply_for(app, index, encoding) for index in range(30) for encoding in ENCODINGS))

    @pytest.mark.case("R18")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    async def test_a_request_that_fails_takes_no_other_with_it(self, encoding: str) -> None:
        def complete(prompt: list[int], params: Any) -> Any:
            if prompt[0] == 5:
                raise RuntimeError("a worker died")
            return canned.completion(RESPONSE, prompt=prompt)

        class Busy(canned.CannedEngine):
            async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                async for output in super().generate(*args, **kwargs):
                    yield output
                    await asyncio.sleep(0)  # The others go on between an output and its reply.

        app = self.app(Busy(complete))
        prompts = [[index, index + 1] for index in range(16)]
        replies = await asyncio.gather(*(post(app, asking(encoding, token_ids=prompt)) for prompt in prompts))
        assert [index for index, reply in enumerate(replies) if reply.status_code != 200] == [5]
        for prompt, reply in zip(prompts, replies, strict=True):
            if reply.status_code == 200:
                routes = canned.routes_of([*prompt, *RESPONSE][:-1])
                np.testing.assert_array_equal(read(reply.content).routes, routes, strict=True)

    async def test_a_request_made_in_the_context_of_another_is_answered_by_itself(self) -> None:
        """A task inherits the context of the request that started it, and may make requests of its own."""
        tasks: list[asyncio.Task[Any]] = []

        def complete(prompt: list[int], params: Any) -> Any:
            if prompt == PROMPT and not tasks:
                tasks.append(asyncio.create_task(post(app, {"token_ids": [7, 8], "sampling_params": {}})))
            return canned.completion(RESPONSE, prompt=prompt)

        app = self.app(canned.CannedEngine(complete))
        outer = await post(app, asking(FRAME))
        inner = read((await tasks[0]).content)
        assert (inner.encoding, inner.token_ids) == (self.stock, RESPONSE)
        np.testing.assert_array_equal(inner.routes, canned.routes_of([7, 8, *RESPONSE][:-1]))
        assert_reply(read(outer.content))

    async def test_an_engine_that_streams_is_read_to_its_last_output(self) -> None:
        """The reply is that of the finished request, and the engine's generator is run to its end."""
        ended = []

        class Streaming(canned.CannedEngine):
            async def generate(
                self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
            ) -> AsyncIterator[Any]:
                for size in (1, 2, 3):
                    part = canned.completion(RESPONSE[:size], prompt=PROMPT)
                    yield canned.request_output(request_id, PROMPT, part)
                ended.append(request_id)

        reply = await post(self.app(Streaming(lambda prompt, params: None)), asking(FRAME))
        assert_reply(read(reply.content))
        assert len(ended) == 1

    # The rest of the app

    async def test_the_order_of_routes_is_that_of_stock(self) -> None:
        """The first route of a path answers: an app's own, or that of the engine that was added first."""
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

        first, second = engine(), engine()
        app = self.app(first)
        args = SimpleNamespace(enable_return_routed_experts=True, enable_lora=False)
        VLLMServerActor._add_custom_endpoints(app, second, args)
        for body, encoding in ((request(), self.stock), (asking(FRAME), FRAME), (asking(PACKED), PACKED)):
            assert read((await post(app, body)).content).encoding == encoding
        assert (len(first.requests), len(second.requests)) == (3, 0)

    async def test_the_api_s_description_is_that_of_stock(self) -> None:
        patched = self.app(engine())
        skyrl_r3.disable()
        stock = self.app(engine())
        assert orjson.dumps(patched.openapi()) == orjson.dumps(stock.openapi())
        assert [route.path for route in patched.router.routes] == [route.path for route in stock.router.routes]

    async def test_other_endpoints_still_reach_the_engine(self) -> None:
        served = engine()
        transport = httpx.ASGITransport(app=self.app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            reply = await client.post("/reset_prefix_cache", json={"reset_running_requests": True})
        assert reply.json() == {"status": "ok"}
        assert served.requests == [("reset", True)]
