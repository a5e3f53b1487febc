"""One client, one server on 127.0.0.1 that answers as told, and what comes of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from contract_tests import canned, replies
from contract_tests.adapter import FRAME, NESTED, Client, Http, Reply

PROMPT = [3, 1, 4, 1, 5]
RESPONSE = [9, 2, 6]
# In float32 as in float64.
LOGPROBS = [-0.5, -1.25, -2.0]

ATTEMPTS = 30
"""How often SkyRL's own client sends a request whose connection fails."""
BOUND_S = 60
"""Far more than any exchange takes. One that has not ended by then is taken for one that never ends."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Script = Callable[[int, dict[str, Any]], Answer]


def reply_to(prompt: list[int], routes: Any = None) -> Reply:
    """The right reply to ``prompt``, with routes that tell its tokens."""
    ids = canned.routes_of([*prompt, *RESPONSE][:-1]) if routes is None else routes
    return Reply(RESPONSE, "stop", LOGPROBS, replies.compacted(ids))


def body_of(reply: Reply, encoding: str, **metadata: Any) -> bytes:
    """``reply`` as a server writes it."""
    given = {"finish_reason": reply.finish_reason, **metadata}
    return replies.write(encoding, reply.token_ids, reply.routes, reply.logprobs, **given)


def assert_same(found: Reply, right: Reply) -> None:
    """``found`` is ``right`` in tokens, finish reason, logprobs and routes, dtypes included."""
    assert found.token_ids == right.token_ids
    assert {type(token) for token in found.token_ids} <= {int}
    assert found.finish_reason == right.finish_reason
    assert found.logprobs == right.logprobs
    assert right.routes is not None
    np.testing.assert_array_equal(found.routes, right.routes, strict=True)


class Server:
    """Counts the requests, and answers each as ``script(number, request)`` says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.hits = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.hits += 1
        # A redirect may have made it a request without a body.
        answer = self.script(self.hits, json.loads(await request.read() or b"{}"))
        return await answer(request)


@dataclass
class Exchange:
    """A client and the server that it is connected to."""

    client: Client
    server: Server

    def begin(self, script: Script) -> None:
        """Let the server answer by ``script``, and count from 0."""
        self.server.script, self.server.hits = script, 0

    async def ask(self, prompt: list[int] | None = None) -> Reply | Exception:
        """What a request comes to: a reply, or an error."""
        scope = asyncio.timeout(BOUND_S)
        try:
            async with scope:
                return await self.client.generate(prompt or PROMPT, logprobs=True)
        except Exception as error:
            assert not scope.expired(), f"the request did not end within {BOUND_S} s"
            return error

    async def right(self, prompt: list[int] | None = None, routes: Any = None) -> Reply:
        """The reply to a request, which is right."""
        found = await self.ask(prompt)
        if isinstance(found, Exception):
            raise AssertionError(f"expected the reply, got {found!r}") from found
        assert_same(found, reply_to(prompt or PROMPT, routes))
        return found

    async def refused(self) -> Exception:
        """The error that a request ends with."""
        found = await self.ask()
        assert isinstance(found, Exception), f"expected an error, got {found}"
        return found


@asynccontextmanager
async def exchange(http: Http, script: Script) -> AsyncIterator[Exchange]:
    """The client of ``http`` on a server with ``script``."""
    server = Server(script)
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with http.client(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield Exchange(client, server)
    finally:
        await runner.cleanup()


def answering(body: bytes, encoding: str = "", *, status: int = 200) -> Answer:
    """An answer that arrives whole, with the content type of ``encoding``."""

    async def answer(request: web.Request) -> web.StreamResponse:
        content_type = replies.FRAME_TYPE if encoding == FRAME else "application/json"
        return web.Response(body=body, status=status, content_type=content_type)

    return answer


REFUSAL = answering(b'{"error":{"message":"no such model"}}', status=400)
"""Ends the attempts of every client."""


def always(answer: Answer) -> Script:
    return lambda number, request: answer


def at_first(answer: Answer, then: Answer) -> Script:
    """``answer`` to the first request, ``then`` to those behind it."""
    return lambda number, request: answer if number == 1 else then


def right_answers(encoding: str) -> Script:
    """The right reply to each prompt."""
    return lambda number, request: answering(body_of(reply_to(request["token_ids"]), encoding), encoding)


def told_by(body: bytes, *, prompt: int) -> Reply | None:
    """What ``body`` says to a reader who knows the length of the prompt; None if that cannot be a reply to it.

    Written apart from every implementation. Only to be asked about what an implementation has taken.
    """
    try:
        found = replies.read(_with_logprobs(body))
        routes, tokens, logprobs = found.routes, found.token_ids, found.logprobs
        assert routes is not None
        assert found.encoding != FRAME or found.metadata["format"] == "skyrl-r3/1"
        for name, sent in (("prompt_tokens", prompt), ("start", 0)):
            assert int(found.metadata.get(name, sent)) == sent
        assert {type(token) for token in tokens} <= {int}
        assert min(tokens, default=0) >= 0
        assert logprobs is None or len(logprobs) == len(tokens)
        assert logprobs is None or np.isfinite(np.array(logprobs, np.float32)).all()
        assert routes.ndim == 3
        assert len(routes) == prompt + len(tokens) - 1 if tokens else len(routes) <= prompt
        assert routes.min(initial=0) >= 0
        assert found.encoding == NESTED or routes.dtype == replies.compacted(routes).dtype
    except Exception:
        return None
    return Reply(tokens, found.finish_reason, logprobs, replies.compacted(routes))


def _with_logprobs(body: bytes) -> bytes:
    """``body`` with null for logprobs that are not there: SkyRL's client takes the one for the other."""
    if body[:1] != b"{":
        return body
    parsed = json.loads(body)
    for choice in parsed["choices"]:
        if not (choice.get("logprobs") or {}).get("content"):
            choice["logprobs"] = None
    return json.dumps(parsed).encode()
