"""The server process: SkyRL's own endpoints on an engine that has its outputs ready. Ends when its stdin does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

import skyrl_r3
from skyrl_r3.bench.cases import Case
from skyrl_r3.bench.pipe import answers


class CannedEngine:
    """Has vLLM's ``generate``: yields the output of the case that the prompt asks for."""

    async def generate(self, prompt: Any, sampling_params: Any, **_: Any) -> AsyncIterator[Any]:
        """One finished output, the same object for every request, with logprobs as ``sampling_params`` wants them."""
        flat = bool(getattr(sampling_params, "flat_logprobs", False))
        yield _output(Case.of_prompt(prompt["prompt_token_ids"]), flat)


@lru_cache(maxsize=2)
def _output(case: Case, flat: bool) -> Any:
    """vLLM's output object. Made when a case is warmed up: a real engine makes it while it generates."""
    outputs, vllm = import_module("vllm.outputs"), import_module("vllm.logprobs")
    token_ids = case.response().tolist()
    logprobs: Any = vllm.FlatLogprobs() if flat else []
    for token, value in zip(token_ids, case.logprobs().tolist(), strict=True):
        logprobs.append({token: vllm.Logprob(logprob=value, rank=1)})
    completion = outputs.CompletionOutput(
        index=0, text="", token_ids=token_ids, cumulative_logprob=None, logprobs=logprobs, finish_reason="length"
    )
    completion.routed_experts = np.concatenate([case.routes()])  # As vLLM: an array that owns its memory.
    return outputs.RequestOutput(
        request_id="bench",
        prompt=None,
        prompt_token_ids=case.prompt(),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


@lru_cache(maxsize=2)
def _body(size: int) -> bytes:
    return b"\xa5" * size  # Not zeros, which the kernel would lend from one page.


def _app() -> FastAPI:
    app = FastAPI()
    servers = import_module("skyrl.backends.skyrl_train.inference_servers.vllm_server_actor")
    options = SimpleNamespace(enable_return_routed_experts=True, enable_lora=False)
    servers.VLLMServerActor._add_custom_endpoints(app, CannedEngine(), options)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/bench/prepare")
    async def prepare(request: Request) -> Response:
        _output(Case(*await request.json()), False)
        return Response()

    @app.post("/bench/bare/{size}")
    async def bare(size: int, request: Request) -> Response:
        await request.json()
        return Response(content=_body(size), media_type="application/octet-stream")

    return app


async def _serve() -> None:
    stream = answers()
    skyrl_r3.enable()  # Only warns where SKYRL_R3=off.
    server = uvicorn.Server(uvicorn.Config(_app(), host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if not task.done():
        print(json.dumps({"port": server.servers[0].sockets[0].getsockname()[1]}), file=stream)
        await asyncio.to_thread(sys.stdin.buffer.read)
        server.should_exit = True
    await task


if __name__ == "__main__":
    asyncio.run(_serve())
