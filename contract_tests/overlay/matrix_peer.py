"""SkyRL's real server or client in a process of its own, stock or patched; test_matrix.py starts this script.

The engine is the only double. What it generates follows from the prompt, so that every process knows what is right.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import skyrl_r3
from contract_tests import canned
from contract_tests.peer import serve, take_stdout

# By the first token of a prompt: experts of the model. One of 256 takes uint8, one of 512 int16.
EXPERTS = {1: 256, 2: 512}


def expected(prompt: list[int], start: int = 0) -> dict[str, Any]:
    """What is right for ``prompt``: token_ids, logprobs and routes from ``start`` on."""
    token_ids = [100_000 + prompt[1] + i for i in range(3 + prompt[1] % 5)]
    # vLLM's logprobs are float32.
    logprobs = np.sin(np.arange(len(token_ids)) + prompt[1], dtype=np.float32).astype(float).tolist()
    routes = canned.routes_of([*prompt, *token_ids][:-1], experts=EXPERTS[prompt[0]])[start:]
    return {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "routes": routes.astype(np.uint8 if EXPERTS[prompt[0]] <= 256 else np.int16),
    }


def _complete(prompt: list[int], params: Any) -> Any:
    from vllm.logprobs import FlatLogprobs

    right = expected(prompt, params.routed_experts_prompt_start)
    logprobs = None
    if params.logprobs is not None:
        # As vLLM does: the sampled token first, then one more where it was asked for more.
        logprobs = FlatLogprobs() if params.flat_logprobs else []
        for token, value in zip(right["token_ids"], right["logprobs"], strict=True):
            others = {token + 1: canned.logprob(-0.5)} if params.logprobs > 1 else {}
            logprobs.append({token: canned.logprob(value), **others})
    routes = right["routes"].view(np.uint16) if right["routes"].dtype == np.int16 else right["routes"]
    return canned.completion(right["token_ids"], prompt=prompt, logprobs=logprobs, routed_experts=routes)


class Recorder:
    """Middleware that notes which encoding each generate reply had."""

    seen: list[str]

    def __init__(self, app: Any) -> None:
        self.app = app
        self.seen = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/skyrl/v1/generate":
            return await self.app(scope, receive, send)
        body = b""

        async def record(message: Any) -> None:
            nonlocal body
            body += bytes(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                packed = b'"routed_experts":{"data"' in body
                self.seen.append("frame/1" if body[7:8] == b"\0" else "packed" if packed else "nested")
            await send(message)

        await self.app(scope, receive, record)


def run_server() -> None:
    answers = take_stdout()
    import uvicorn

    app = canned.skyrl_app(canned.CannedEngine(_complete))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    recorder = Recorder(app)
    server = uvicorn.Server(uvicorn.Config(recorder, host="127.0.0.1", port=0, log_level="warning"))
    threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True).start()

    def address(_: None) -> str:
        while not server.started:
            threading.Event().wait(0.05)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def encodings(_: None) -> list[str]:
        seen, recorder.seen = recorder.seen, []
        return seen

    serve({"address": address, "encodings": encodings}, answers)
    server.should_exit = True


def run_client() -> None:
    answers = take_stdout()
    from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

    from contract_tests.skyrl_server import Tokenizer

    @asynccontextmanager
    async def client(url: str) -> AsyncIterator[Any]:
        made = remote_inference_client.RemoteInferenceClient(
            proxy_url=url,
            server_urls=[url],
            data_parallel_size=1,
            enable_return_routed_experts=True,
            tokenizer=Tokenizer(),
        )
        try:
            yield made
        finally:
            await (await made._get_session()).close()

    async def generate(asked: dict[str, Any]) -> dict[str, Any]:
        async with client(asked["url"]) as one:
            output = await one.generate(asked["batch"])
            routes = [getattr(entry, "ids", entry) for entry in output["rollout_expert_indices"]]
            return {
                "token_ids": output["response_ids"],
                "logprobs": output["response_logprobs"],
                "stop_reasons": output["stop_reasons"],
                "routes": routes,
            }

    serve({"generate": lambda asked: asyncio.run(generate(asked))}, answers)


if __name__ == "__main__":
    if os.environ.get("SKYRL_R3") != "off":
        skyrl_r3.enable()
    {"server": run_server, "client": run_client}[sys.argv[1]]()
