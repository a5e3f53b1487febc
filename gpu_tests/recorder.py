"""An engine whose outputs are kept, so that several passes of requests get the very same ones."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from skyrl_r3.wire import START_FIELD

WAIT_S = 60


class Recorder:
    """An engine that keeps its last output for each prompt, and on request gives it again instead of generating.

    Prompts tell requests apart, so no two in a pass may have the same one. What is given again comes as what was
    generated did, many at once: none until as many are asked for as were in flight then, and in another order than they
    were. Otherwise each would be answered before the next one is read, and nothing could be mixed up.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._kept: dict[tuple[int, ...], Any] = {}
        self._asked: set[tuple[int, ...]] = set()
        self._waiting: list[tuple[int, ...]] = []
        self._changed = asyncio.Condition()
        self._together = 0
        self.again = False
        self.in_flight = self.most_in_flight = 0
        self.failed: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)
        return getattr(self._engine, name)

    def begin(self, *, again: bool) -> None:
        """Begin a pass: one that generates and is kept, or one that gets what was kept, ``again``."""
        if again and not self.again:
            self._together = self.most_in_flight
        elif not again:
            self._kept = {}
        self.again, self._asked, self.most_in_flight, self.failed = again, set(), 0, None

    async def generate(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As the engine's. Of what was kept, rows before the request's start are left out, as vLLM does."""
        key = tuple(prompt["prompt_token_ids"])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if key in self._asked:
                raise ValueError(f"prompt: expected another one for each request, got one of {len(key)} tokens twice")
            self._asked.add(key)
            if self.again:
                yield await self._kept_for(key, getattr(sampling_params, START_FIELD, None) or 0)
                return
            async for output in self._engine.generate(prompt, sampling_params, **kwargs):
                self._kept[key] = output
                yield output
        except Exception as error:
            self.failed = self.failed or error  # The client gets a 500 that does not say why.
            raise
        finally:
            self.in_flight -= 1

    async def _kept_for(self, key: tuple[int, ...], start: int) -> Any:
        if key not in self._kept:
            raise ValueError(f"prompt: expected one that was generated for, got one of {len(key)} tokens")
        self._waiting.append(key)
        async with self._changed:
            self._changed.notify_all()
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._changed.wait_for(
                        lambda: self.most_in_flight >= self._together and min(self._waiting, key=hash) == key
                    )
            except TimeoutError:
                expected = f"{self._together} at once, as when they were generated"
                raise ValueError(f"requests: expected {expected}, got {self.most_in_flight}") from None
            finally:
                self._waiting.remove(key)
                self._changed.notify_all()
        kept = copy.copy(self._kept[key])
        kept.outputs = [copy.copy(kept.outputs[0])]
        kept.outputs[0].routed_experts = kept.outputs[0].routed_experts[start:].copy()
        return kept
