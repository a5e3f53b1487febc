"""Inference server: answer ``/skyrl/v1/generate`` with packed routes.

SkyRL's own handler keeps reading the request: it refuses LoRA, builds the sampling params and the prompt, runs the
engine and answers 500 where there is no output. The engine that it is given is tapped, so that the output is at hand
when the handler has done its work, and only the reply is written anew.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException, Request, Response

from skyrl_r3 import reply
from skyrl_r3.errors import CodecError, OverlayError, R3Error

logger = logging.getLogger(__name__)


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
        """As the engine's. SkyRL's handler gets an empty completion where the reply is written by this module."""
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        outputs = self._requests.get(id(token_ids)) if token_ids is not None else None
        async for output in self._engine.generate(prompt, *args, **kwargs):
            if outputs is None:
                yield output
            else:
                outputs[:] = [output]
        if outputs:
            nothing = SimpleNamespace(token_ids=[], finish_reason=None, logprobs=None, routed_experts=None)
            yield SimpleNamespace(outputs=[nothing])


def add_custom_endpoints(original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``VLLMServerActor._add_custom_endpoints``: let it add its endpoints, then put ours in front of one."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not getattr(bound.arguments["cli_args"], "enable_return_routed_experts", False):
            return original(*args, **kwargs)
        routes = bound.arguments["app"].router.routes
        there = list(routes)
        tap = bound.arguments["engine"] = EngineTap(bound.arguments["engine"])
        original(*bound.args, **bound.kwargs)
        added = (route for route in routes if route not in there)
        stock = next((route for route in added if getattr(route, "path", None) == reply.GENERATE_PATH), None)
        if stock is None:
            expected = f"an endpoint at {reply.GENERATE_PATH}"
            raise OverlayError("VLLMServerActor._add_custom_endpoints", expected=expected, got="none")
        _replace_endpoint(bound.arguments["app"], stock, tap)

    return _add_custom_endpoints


def refuse_custom_endpoints(original: Callable[..., None], error: R3Error) -> Callable[..., None]:
    """Stand in for the above where the overlay cannot be applied: raise ``error`` if the flag is on."""

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        if any(getattr(arg, "enable_return_routed_experts", False) is True for arg in (*args, *kwargs.values())):
            raise error
        return original(*args, **kwargs)

    return _add_custom_endpoints


def _replace_endpoint(app: Any, route: Any, tap: EngineTap) -> None:
    """Serve ``route`` of ``app`` ourselves, with its present endpoint for the requests that are not ours."""
    stock = route.endpoint

    @functools.wraps(stock)
    async def generate(request: Request) -> Any:
        body = await _json_object(request)
        wanted, token_ids = body.get(reply.ENCODINGS_FIELD), body.get("token_ids")
        if wanted is None:
            return await stock(request)
        try:
            encoding = reply.choose_encoding(wanted)
        except R3Error as error:
            raise HTTPException(status_code=400, detail=str(error)) from error
        if encoding == reply.NESTED or not isinstance(token_ids, list):
            return await stock(request)
        with tap.outputs_for(token_ids) as outputs:
            answer = await stock(request)
        if not outputs:
            return answer  # The handler did not give these token ids to the engine. Its answer is right, but nested.
        try:
            content = _packed_body(outputs[0])
        except (CodecError, TypeError) as error:
            raise HTTPException(status_code=500, detail=f"the engine's reply: {error}") from error
        return Response(content=content, media_type="application/json")

    routes = app.router.routes
    # Without a response model, as SkyRL's: one would send stock replies through pydantic and change their bytes.
    app.post(route.path, response_model=None)(generate)
    routes[routes.index(route)] = routes.pop()


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        return {}  # Not JSON: SkyRL's handler fails on it in its own way.
    return body if isinstance(body, dict) else {}


def _packed_body(output: Any) -> bytes:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = None
    if completion.logprobs is not None:
        logprobs, floored = reply.floored_logprobs(token_ids, completion.logprobs)
        if floored:
            logger.warning(
                "Set %d of %d missing or non-finite logprobs to %s (request %s)",
                floored,
                len(token_ids),
                reply.FLOORED_LOGPROB,
                getattr(output, "request_id", "unknown"),
            )
    return reply.dump_packed(
        token_ids=token_ids,
        finish_reason=completion.finish_reason,
        logprobs=logprobs,
        routed_experts=completion.routed_experts,
    )
