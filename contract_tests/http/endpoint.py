"""The endpoint under test, called in process and over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import orjson

from contract_tests import canned, replies
from contract_tests.adapter import NESTED, Http
from contract_tests.http.exchange import LOGPROBS, PROMPT, RESPONSE
from contract_tests.replies import ASKS, URL, Read, read

WAYS = ("in process", "socket")
# An endpoint that has not answered by then is taken for one that hangs.
BOUND_S = 60.0


def engine_of(routes: Any = "of the tokens", response: list[int] | None = None) -> canned.CannedEngine:
    """An engine that samples ``response``, by default :data:`RESPONSE`, with its logprobs and with ``routes``."""
    tokens = RESPONSE if response is None else response
    positions: Any = [[(token, value)] for token, value in zip(tokens, LOGPROBS, strict=False)]

    def complete(prompt: list[int], params: Any) -> Any:
        logprobs = None if params.logprobs is None else canned.logprobs_as_asked(params, positions)
        return canned.completion(tokens, prompt=prompt, logprobs=logprobs, routed_experts=routes)

    return canned.CannedEngine(complete)


class Endpoint:
    """An application that can be asked for a reply in ``encoding``."""

    def __init__(self, client: httpx.AsyncClient, encodings: list[str]) -> None:
        self.client = client
        self.encodings = encodings

    async def post(self, prompt: list[int] | None = None, **change: Any) -> httpx.Response:
        """The answer to a request for the routes of ``prompt``."""
        body = {"token_ids": prompt or PROMPT, "sampling_params": {"logprobs": 0}, "model": "m", ASKS: self.encodings}
        return await self.send(orjson.dumps({**body, **change}))

    async def send(self, body: bytes) -> httpx.Response:
        """The answer to a request with ``body``."""
        async with asyncio.timeout(BOUND_S):
            return await self.client.post(URL, content=body, headers={"content-type": "application/json"})

    async def read(self, prompt: list[int] | None = None) -> Read:
        """The reply to a request for the routes of ``prompt``, read apart from every implementation."""
        answer = await self.post(prompt)
        assert answer.status_code == 200, answer.text
        found = read(answer.content)
        assert found.encoding in self.encodings
        return found


@asynccontextmanager
async def calling(http: Http, app: Any, *, way: str, encoding: str = "") -> AsyncIterator[Endpoint]:
    """``app`` in one of the :data:`WAYS`, asked for ``encoding`` before the others that the client reads."""
    wanted = sorted(http.encodings(), key=lambda name: name != encoding)
    if way == "in process":
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=BOUND_S) as client:
            yield Endpoint(client, wanted)
    else:
        async with (
            canned.served(app) as address,
            httpx.AsyncClient(base_url=address, timeout=BOUND_S) as client,
        ):
            yield Endpoint(client, wanted)


def assert_routes(found: Read, engine_s: np.ndarray) -> None:
    """``found`` has the ids of the engine, and where the encoding tells a dtype, the smallest."""
    assert found.routes is not None
    expected = replies.compacted(engine_s)
    if found.encoding == NESTED:
        # Lists without rows do not tell how many layers there are.
        assert len(found.routes) == len(expected)
        np.testing.assert_array_equal(found.routes.reshape(expected.shape), expected)
    else:
        np.testing.assert_array_equal(found.routes, expected, strict=True)


def of_tokens(prompt: list[int]) -> np.ndarray:
    """The routes that :func:`engine_of` captures for ``prompt``."""
    return canned.routes_of([*prompt, *RESPONSE][:-1])
