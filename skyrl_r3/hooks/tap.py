"""Inference engine: its outputs, for the request that they belong to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class EngineTap:
    """An engine whose ``generate`` hands its outputs over to the request that asked for them.

    Requests are told apart by the list of token ids that SkyRL's handler takes from the parsed body and gives to the
    engine: the same object. A context variable would not do, because every task that is started while a request runs
    inherits its context.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._requests: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # A copy asks for attributes before it has any.
            raise AttributeError(name)
        return getattr(self._engine, name)

    @contextmanager
    def outputs_for(self, token_ids: list[int]) -> Iterator[list[Any]]:
        """A list that holds the last output for this very ``token_ids`` once the handler has run the engine."""
        outputs = self._requests[id(token_ids)] = []
        try:
            yield outputs
        finally:
            del self._requests[id(token_ids)]

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As the engine's. SkyRL's handler gets an empty completion where the reply is ours to write."""
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        outputs = self._requests.get(id(token_ids)) if token_ids is not None else None
        if outputs is not None:
            for params in (*args, *kwargs.values()):
                # The same logprobs as lists of numbers, where this vLLM can: no object for each token.
                if getattr(params, "flat_logprobs", None) is False and params.logprobs is not None:
                    params.flat_logprobs = True
        async for output in self._engine.generate(prompt, *args, **kwargs):
            if outputs is None:
                yield output
            else:
                outputs[:] = [output]
        if outputs:
            nothing = SimpleNamespace(token_ids=[], finish_reason=None, logprobs=None, routed_experts=None)
            yield SimpleNamespace(outputs=[nothing])
