"""The client process: SkyRL's own remote client, told in JSON lines what to fetch. Ends when its stdin does."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import aiohttp
import numpy as np

import skyrl_r3
from skyrl_r3 import wire
from skyrl_r3.bench.cases import Case, digest
from skyrl_r3.bench.pipe import answers
from skyrl_r3.bench.preprocess import preprocess

_PROBE_S = 0.001


class _Tokenizer:
    """Stands for the tokenizer, so that nothing is sent to detokenize."""

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return [""] * len(ids)

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


class Client:
    """SkyRL's clients by address, and what the last call that was to be kept has brought."""

    def __init__(self) -> None:
        skyrl_r3.enable()  # Only warns where SKYRL_R3=off.
        self._module = import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
        self._clients: dict[str, Any] = {}
        self._kept: Any = None
        self._encodings = wire.ENCODINGS

    def _client(self, url: str) -> Any:
        if url not in self._clients:
            self._clients[url] = self._module.RemoteInferenceClient(
                proxy_url=url,
                server_urls=[url],
                data_parallel_size=1,
                enable_return_routed_experts=True,
                tokenizer=_Tokenizer(),
            )
        return self._clients[url]

    async def call(
        self,
        *,
        url: str,
        case: list[int],
        in_flight: int,
        encodings: list[str] | None = None,
        bare_bytes: int | None = None,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Fetch ``in_flight`` replies at once: with SkyRL's client, or ``bare_bytes`` each with its HTTP session.

        Args:
            encodings: What the overlay asks for in this call, if not for everything it reads.
            keep: Note the bodies' sizes, and keep the result for :meth:`digests`.

        Returns:
            ``seconds``, ``stalls_ms`` (how much later than after 1 ms a sleep of 1 ms returned), and with ``keep``
            ``bodies``, of each its ``bytes`` and ``content_type``.
        """
        client, asked = self._client(url), Case(*case)
        prompt, params = asked.prompt(), {"logprobs": 0, "max_tokens": len(asked.response())}
        wire.ENCODINGS = tuple(encodings or self._encodings)
        session = await client._get_session()
        bodies: list[dict[str, Any]] = []
        if keep:
            session.trace_configs.append(_tracing(bodies))
        fetch: Callable[[], Awaitable[Any]]
        if bare_bytes is None:
            batch = {
                "prompt_token_ids": [prompt] * in_flight,
                "sampling_params": params,
                "session_ids": [f"bench-{i}" for i in range(in_flight)],
            }
            fetch = lambda: client.generate(batch)  # noqa: E731
        else:
            request = {"sampling_params": params, "model": client.model_name, "token_ids": prompt}
            address = f"{url}/bench/bare/{bare_bytes}"
            fetch = lambda: asyncio.gather(*(_bare(session, address, request) for _ in range(in_flight)))  # noqa: E731
        stalls_ms: list[float] = []
        probe = asyncio.create_task(_probe(stalls_ms))
        await asyncio.sleep(2 * _PROBE_S)
        try:
            began = time.perf_counter()
            result = await fetch()
            seconds = time.perf_counter() - began
            # What held the loop until the end is only seen by the probe's next turn.
            await asyncio.sleep(2 * _PROBE_S)
        finally:
            probe.cancel()
            session.trace_configs.clear()
        self._kept = result if keep else None
        return {"seconds": seconds, "stalls_ms": stalls_ms, "bodies": bodies}

    async def digests(self) -> dict[str, Any]:
        """The different digests of the replies that were kept, or the different sizes of bare ones; drops them."""
        kept, self._kept = self._kept, None
        if isinstance(kept, list):
            return {"sizes": sorted(set(map(len, kept)))}
        replies = zip(kept["response_ids"], kept["response_logprobs"], kept["rollout_expert_indices"], strict=True)
        return {"digests": sorted({digest(tokens, logprobs, _ids(routes)) for tokens, logprobs, routes in replies})}

    async def preprocess(self, **command: Any) -> dict[str, Any]:
        """As :func:`skyrl_r3.bench.preprocess.preprocess`."""
        return preprocess(**command)

    async def close(self) -> None:
        """Close SkyRL's sessions."""
        for client in self._clients.values():
            await (await client._get_session()).close()


def _ids(routes: Any) -> Any:
    return np.array(routes, dtype=np.int32) if isinstance(routes, list) else getattr(routes, "ids", routes)


async def _bare(session: Any, url: str, request: dict[str, Any]) -> bytes:
    """The body itself, so that all of them are held until the last has come, as replies are."""
    async with session.post(url, json=request) as response:
        body = await response.read()
        response.raise_for_status()
        return body


async def _probe(stalls_ms: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_PROBE_S)
        stalls_ms.append(round((time.perf_counter() - began - _PROBE_S) * 1000, 3))


def _tracing(bodies: list[dict[str, Any]]) -> aiohttp.TraceConfig:
    """Notes the size and type of every body that the session receives."""

    async def on_end(_: Any, context: Any, params: aiohttp.TraceRequestEndParams) -> None:
        context.content_type = params.response.content_type

    async def on_chunk(_: Any, context: Any, params: aiohttp.TraceResponseChunkReceivedParams) -> None:
        bodies.append({"bytes": len(params.chunk), "content_type": context.content_type})

    tracing = aiohttp.TraceConfig()
    tracing.on_request_end.append(on_end)
    tracing.on_response_chunk_received.append(on_chunk)
    tracing.freeze()
    return tracing


async def _answer_all() -> None:
    stream, client = answers(), Client()
    print(json.dumps({}), file=stream)
    # The loop must run while nothing is asked: it closes connections that idled before the server does.
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        try:
            answer = await getattr(client, command.pop("do"))(**command)
        except Exception:
            answer = {"error": traceback.format_exc(limit=-4)}
        print(json.dumps(answer), file=stream)
    await client.close()


if __name__ == "__main__":
    asyncio.run(_answer_all())
