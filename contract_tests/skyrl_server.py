"""A server on 127.0.0.1 that answers as told, and SkyRL's real remote client on it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

from contract_tests import replies


class Server:
    """Counts requests and answers each with what ``answer(number, request)`` gives.

    ``requests`` are parsed bodies; ``raw`` has path, headers without the address, and body of each.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.raw: list[tuple[str, dict[str, str], bytes]] = []
        self.address = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/v1/generate"):
            return web.json_response({})
        body = await request.json()
        self.requests.append(body)
        headers = {name: value for name, value in request.headers.items() if name != "Host"}
        self.raw.append((request.path, headers, await request.read()))
        answer: Any = self.answer(len(self.requests), body)
        if isinstance(answer, web.StreamResponse):
            return answer
        return await answer(request) if inspect.iscoroutinefunction(answer) else json_reply(answer)


def json_reply(body: Any, status: int = 200) -> web.Response:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return web.Response(body=content, status=status, content_type="application/json")


class Tokenizer:
    """Stands for the tokenizer, so that nothing is sent to detokenize."""

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, sample)) for sample in ids]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@asynccontextmanager
async def client_of(server: Server, tokenizer: Any = None, **options: Any) -> AsyncIterator[Any]:
    """A ``RemoteInferenceClient`` with the flag on, whose router and only engine is ``server``."""
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with client_at(server.address, tokenizer, **options) as client:
            yield client
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_at(address: str, tokenizer: Any = None, **options: Any) -> AsyncIterator[Any]:
    """The same for the server at ``address``."""
    given = {"enable_return_routed_experts": True, "tokenizer": tokenizer or Tokenizer(), **options}
    client = remote_inference_client.RemoteInferenceClient(
        proxy_url=address, server_urls=[address], data_parallel_size=1, **given
    )
    try:
        yield client
    finally:
        await (await client._get_session()).close()


def reply_to(request: dict[str, Any], token_ids: list[int], routes: Any, logprobs: Any = None) -> bytes:
    """What a server with the overlay answers, or one without if the request does not ask for an encoding.

    ``routes`` are those of all tokens, of which vLLM returns those from the request's start on.
    """
    encoding = request.get(replies.ASKS, [replies.NESTED])[0]
    start = (request.get("sampling_params") or {}).get(replies.START) or 0
    return replies.write(encoding, token_ids, replies.compacted(routes[start:]), logprobs)
