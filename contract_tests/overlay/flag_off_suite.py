"""SkyRL's flag off: the overlay is installed, and requests and results are SkyRL's own, byte for byte.

A line's tests derive from :class:`FlagOffContract` and say what is replaced in its client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import run_python
from contract_tests.overlay.fake_skyrl import CLIENT

# Real client, real sockets. The server keeps what it got as raw bytes and answers as vLLM's endpoint does.
CODE = f"""
import asyncio, json, sys
from aiohttp import web
from {CLIENT} import RemoteInferenceClient
import {CLIENT} as module

seen = []
SEQUENCES = {{"n": 0}}

async def generate(request):
    body = await request.read()
    headers = [[k.decode(), v.decode()] for k, v in request.raw_headers if k.decode().lower() != "host"]
    seen.append([request.method, request.raw_path, headers, body.decode()])
    SEQUENCES["n"] += 1
    if SEQUENCES["n"] == 3:
        return web.json_response({{"error": {{"message": "told off"}}}}, status=400)
    if SEQUENCES["n"] == 4:
        return web.Response(text="not json", status=422)
    return web.json_response({{"choices": [{{
        "token_ids": [7, 8, 9], "finish_reason": "stop",
        "logprobs": {{"content": [{{"logprob": -0.25}}, {{"logprob": -1.5}}, {{"logprob": -2.0}}]}},
    }}]}})

async def detokenize(request):
    seen.append([request.method, request.raw_path, None, (await request.read()).decode()])
    return web.json_response({{"prompt": "text"}})

async def outcome(call):
    try:
        return ["result", await call]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status", None), getattr(error, "message", str(error))]

async def main():
    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/skyrl/v1/generate", generate)
    app.router.add_post("/detokenize", detokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{{port}}"
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="m",
                                   enable_return_routed_experts=False)
    params = {{"temperature": 0.5, "max_tokens": 3, "logprobs": 0, "stop": ["é\\u2028"]}}
    results = []
    for session, ids in (("s-1", [1, 2, 3]), (None, [4]), ("refused", [5]), ("plain", [6])):
        batch = {{"prompt_token_ids": [ids], "sampling_params": params}}
        if session:
            batch["session_ids"] = [session]
        results.append(await outcome(client.generate(batch)))
    await client.teardown() if hasattr(client, "teardown") else None
    session = getattr(client, "_session", None)
    if session is not None:
        await session.close()
    await runner.cleanup()
    patched = hasattr(module.REPLACED, "__wrapped__")
    report = json.dumps({{"results": results, "seen": seen, "patched": patched}})
    print("\\nREPORT " + report.replace(str(port), "PORT"))

asyncio.run(main())
"""


Both = tuple[dict[str, Any], dict[str, Any]]


class FlagOffContract:
    """Tests that hold in every line.

    Attributes:
        replaced: A target in the client's module.
    """

    replaced: str

    @pytest.fixture(scope="class")
    def both(self, wheel_python: Path) -> Both:
        """What a client does with the overlay in it, and with the overlay switched off."""
        command = [str(wheel_python), "-c", CODE.replace("REPLACED", self.replaced)]
        return run_python(command).values, run_python(command, env={"SKYRL_R3": "off"}).values

    def test_the_two_sides_are_what_they_should_be(self, both: Both) -> None:
        on, off = both
        assert (on["patched"], off["patched"]) == (True, False)

    def test_requests_are_the_same_bytes(self, both: Both) -> None:
        """Path, headers in their order, and body."""
        on, off = both
        assert [request[1] for request in on["seen"]].count("/inference/v1/generate") == 4
        assert on["seen"] == off["seen"]
        assert all("routed_experts" not in request[3] for request in on["seen"])

    def test_results_and_errors_are_the_same(self, both: Both) -> None:
        on, off = both
        assert on["results"] == off["results"]
        kinds = [result[0] for result in on["results"]]
        assert kinds == ["result", "result", "ClientResponseError", "ClientResponseError"]
        assert on["results"][0][1]["response_ids"] == [[7, 8, 9]]
        assert on["results"][0][1]["rollout_expert_indices"] is None
