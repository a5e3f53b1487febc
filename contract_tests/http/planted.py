"""Faults put in on purpose. Each is found by the test that it names, or that test is worth nothing.

``pytest contract_tests/http --impl contract_tests.http.planted:SwapsReplies`` runs the suite on one of them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import aiohttp
import numpy as np

from contract_tests.adapter import Client, Http, Reply
from contract_tests.http.implementations import OverlayHttp
from contract_tests.implementations import Overlay
from contract_tests.planted import Planted
from contract_tests.replies import ASKS, URL


class PlantedHttp(Planted):
    """The overlay with another client or endpoint."""

    broken: ClassVar[type[OverlayHttp]]

    def http(self) -> Http:
        return self.broken()


class _Around:
    """A client around the overlay's."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        return await self.client.generate(prompt_token_ids, logprobs=logprobs)


class _ClientHttp(OverlayHttp):
    around: ClassVar[type[_Around]]

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Client]:
        async with super().client(address) as client:
            yield self.around(client)


class _Retrying(_Around):
    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        for _ in range(2):
            try:
                return await super().generate(prompt_token_ids, logprobs=logprobs)
            except aiohttp.ClientError:
                raise
            except Exception:
                await asyncio.sleep(0)
        return await super().generate(prompt_token_ids, logprobs=logprobs)


class _RetryingHttp(_ClientHttp):
    around = _Retrying


class RetriesWrongReplies(PlantedHttp):
    """A client that has a reply generated again because it could not be read."""

    caught_by = "http/test_broken.py::test_a_whole_reply_that_is_wrong_is_asked_for_once"
    broken = _RetryingHttp


class _Swapping(_Around):
    """Hands out the replies in the order in which they came, not in that of the requests."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.waiting: list[asyncio.Future[Reply]] = []

    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        mine: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        reply = await super().generate(prompt_token_ids, logprobs=logprobs)
        self.waiting.pop(0).set_result(reply)
        return await mine


class _SwappingHttp(_ClientHttp):
    around = _Swapping


class SwapsReplies(PlantedHttp):
    """A client that matches replies to requests by order."""

    caught_by = "http/test_client.py::test_replies_at_the_same_time_stay_with_their_requests"
    broken = _SwappingHttp


class _Filling:
    """Reads into a buffer of the length that the server told, and does not ask how much of it has come."""

    def __init__(self, address: str) -> None:
        self.url = address + URL

    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        sampling = {"logprobs": 0} if logprobs else {}
        request = {"token_ids": prompt_token_ids, "sampling_params": sampling, ASKS: ["frame/1", "packed", "nested"]}
        async with aiohttp.ClientSession() as session, session.post(self.url, json=request) as response:
            response.raise_for_status()
            body, come = bytearray(response.content_length or 0), 0
            try:
                async for piece in response.content.iter_any():
                    body[come : come + len(piece)] = piece
                    come += len(piece)
            except aiohttp.ClientPayloadError:
                await asyncio.sleep(0)
        return Overlay().load(bytes(body))


class _FillingHttp(OverlayHttp):
    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Client]:
        yield _Filling(address)


class FillsUpLostRows(PlantedHttp):
    """A client that takes a reply that broke off for a whole one: the rows that are missing are expert 0."""

    caught_by = "http/test_faults.py::test_a_connection_that_always_breaks_never_yields_data"
    broken = _FillingHttp


class _Handing:
    """An engine whose completions are changed on the way to the endpoint."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def change(self, routes: Any) -> Any:
        raise NotImplementedError

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in self.engine.generate(*args, **kwargs):
            changed = copy.copy(output)
            changed.outputs = [copy.copy(output.outputs[0])]
            changed.outputs[0].routed_experts = self.change(output.outputs[0].routed_experts)
            yield changed


class _Dropping(_Handing):
    def change(self, routes: Any) -> Any:
        return routes if routes is None else routes[:-1]


class _DroppingHttp(OverlayHttp):
    def app(self, engine: Any) -> Any:
        return super().app(_Dropping(engine))


class DropsTheLastRow(PlantedHttp):
    """An endpoint that sends a row for each token but the last two."""

    caught_by = "http/test_endpoint.py::test_the_reply_is_the_engine_s"
    broken = _DroppingHttp


class _Owned(np.ndarray):
    """A view that says of itself that it owns its memory."""

    @property
    def flags(self) -> Any:
        return _OwnedFlags(super().flags)


class _OwnedFlags:
    owndata = True

    def __init__(self, flags: Any) -> None:
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flags, name)


class _Aliasing(_Handing):
    def change(self, routes: Any) -> Any:
        return routes.view(_Owned) if isinstance(routes, np.ndarray) else routes


class _AliasingHttp(OverlayHttp):
    def app(self, engine: Any) -> Any:
        return super().app(_Aliasing(engine))


class SendsTheEnginesBuffer(PlantedHttp):
    """An endpoint that sends the engine's own memory, whatever the engine has written there since."""

    caught_by = "http/test_endpoint.py::test_a_buffer_that_the_engine_uses_again_does_not_change_the_reply"
    broken = _AliasingHttp
