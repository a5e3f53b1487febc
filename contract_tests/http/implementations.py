"""SkyRL's own endpoint and client, with the overlay and without."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from contract_tests.adapter import FRAME, NESTED, PACKED, Client, Reply


class Impatient:
    """Stands for asyncio in SkyRL's client, without the seconds between attempts."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


class SkyRLHttp:
    """SkyRL as it is."""

    read_only: tuple[str, ...] = ()

    def encodings(self) -> tuple[str, ...]:
        return (PACKED,)

    @contextmanager
    def active(self) -> Iterator[None]:
        """SkyRL in the state that is tested, and as it was before afterwards."""
        import skyrl_r3

        skyrl_r3.disable()
        yield

    def app(self, engine: Any) -> Any:
        from contract_tests import canned

        with self.active():
            return canned.skyrl_app(engine)

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Client]:
        from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

        from contract_tests.skyrl_server import client_at

        with self.active(), mock.patch.object(remote_inference_client, "asyncio", Impatient()):
            async with client_at(address) as client:
                yield SkyRLClient(client)


class OverlayHttp(SkyRLHttp):
    """SkyRL with the overlay."""

    read_only: tuple[str, ...] = (FRAME,)
    _in_use: ClassVar[int] = 0

    def encodings(self) -> tuple[str, ...]:
        return (FRAME, PACKED, NESTED)

    @contextmanager
    def active(self) -> Iterator[None]:
        import skyrl_r3
        from skyrl_r3.hooks import client

        skyrl_r3.enable()
        # An app that is made while a client is open must not take the overlay from it.
        OverlayHttp._in_use += 1
        try:
            # Servers that were warned about would be kept for as long as the process lives.
            with mock.patch.object(client, "_RETRY_PAUSE_S", 0.0), mock.patch.object(client, "_slow_servers", set()):
                yield
        finally:
            OverlayHttp._in_use -= 1
            if not OverlayHttp._in_use:
                skyrl_r3.disable()


class SkyRLClient:
    """SkyRL's ``RemoteInferenceClient``, asked for one sample at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._sessions = itertools.count()

    async def generate(self, prompt_token_ids: list[int], *, logprobs: bool = False) -> Reply:
        batch = {
            "prompt_token_ids": [prompt_token_ids],
            "sampling_params": {"logprobs": 0} if logprobs else {},
            "session_ids": [f"s{next(self._sessions)}"],
        }
        output = await self._client.generate(batch)
        (token_ids,), (reason,) = output["response_ids"], output["stop_reasons"]
        values, (routes,) = output["response_logprobs"], output["rollout_expert_indices"]
        # With SkyRL 0.3 the overlay gives a sequence that knows its tokens, and has the array within.
        ids = getattr(routes, "ids", routes)
        return Reply(token_ids, reason, values[0] if values else None, ids if isinstance(ids, np.ndarray) else routes)
