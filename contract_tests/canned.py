"""What the tests put in the place of a running engine: real vLLM output objects with made-up routes.

A double for the engine alone. SkyRL's handler, client, generator and preprocessing around it are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYERS, TOPK, EXPERTS = 3, 2, 16


def routes_of(token_ids: list[int], *, layers: int = LAYERS, topk: int = TOPK, experts: int = EXPERTS) -> np.ndarray:
    """Routes [tokens, layers, topk] that tell which token they belong to, distinct within a row."""
    tokens = np.asarray(token_ids, dtype=np.int64).reshape(-1, 1, 1)
    base = tokens * 131 + np.arange(layers).reshape(1, -1, 1) * 3 + np.arange(len(token_ids)).reshape(-1, 1, 1)
    return ((base + np.arange(topk)) % experts).astype(np.uint16 if experts > 256 else np.uint8)


class CannedEngine:
    """Has vLLM's ``generate``: yields what ``complete(prompt_token_ids, sampling_params)`` returns."""

    def __init__(self, complete: Callable[[list[int], Any], Any]) -> None:
        self.complete = complete
        self.requests: list[tuple[Any, Any]] = []
        self.options: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        """``more`` is what a SkyRL line passes on top: ``lora_request`` in 0.4."""
        self.requests.append((prompt, sampling_params))
        self.options.append(more)
        await asyncio.sleep(0)
        completion = self.complete(list(prompt["prompt_token_ids"]), sampling_params)
        if completion is not None:
            yield request_output(request_id, prompt["prompt_token_ids"], completion)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        self.requests.append(("reset", reset_running_requests))


def completion(
    token_ids: list[int], *, prompt: list[int], logprobs: Any = None, routed_experts: Any = "of the tokens", **more: Any
) -> Any:
    """A vLLM completion whose routes are those of the tokens that were fed to the model."""
    from vllm.outputs import CompletionOutput

    if isinstance(routed_experts, str):
        routed_experts = routes_of([*prompt, *token_ids][:-1], **more)
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="stop" if token_ids else "abort",
    )
    output.routed_experts = routed_experts
    return output


def request_output(request_id: str, prompt_token_ids: list[int], output: Any) -> Any:
    """The vLLM output of a finished request."""
    from vllm.outputs import RequestOutput

    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=None,
        outputs=[output],
        finished=True,
    )


def logprob(value: float | None) -> Any:
    """A vLLM logprob entry."""
    from vllm.logprobs import Logprob

    return Logprob(logprob=value)  # pyright: ignore[reportArgumentType]


def logprobs_as_asked(params: Any, positions: list[list[tuple[int, float | None]] | None]) -> Any:
    """vLLM's logprobs in the form that ``params`` ask for: for each position, token ids with their logprobs."""
    from vllm.logprobs import FlatLogprobs

    by_token = [None if row is None else {token: logprob(value) for token, value in row} for row in positions]
    if not getattr(params, "flat_logprobs", False):
        return by_token
    flat = FlatLogprobs()
    flat.extend(by_token)
    return flat


def skyrl_app(engine: Any, *, models: Any = None, **cli_args: Any) -> Any:
    """A FastAPI app with SkyRL's own endpoints on ``engine``, patched if the overlay is applied.

    Args:
        models: What stands for vLLM's registry of adapters.
        cli_args: The server's, with routes switched on.
    """
    from fastapi import FastAPI
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

    app = FastAPI()
    app.state.openai_serving_models = models
    args = SimpleNamespace(**{"enable_return_routed_experts": True, "enable_lora": False, **cli_args})
    VLLMServerActor._add_custom_endpoints(app, engine, args)
    return app


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve ``app`` with uvicorn on 127.0.0.1 and give its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    try:
        for _ in range(1000):
            if server.started:
                break
            await asyncio.sleep(0.01)
        assert server.started, "uvicorn did not start within 10 s"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(60):
            await task
