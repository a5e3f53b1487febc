"""Inference server: answer ``/skyrl/v1/generate`` with packed routes.

SkyRL's own handler keeps reading the request: it refuses LoRA, builds the sampling params and the prompt, runs the
engine and answers 500 where there is no output. The engine that it is given is tapped, so that the output is at hand
when the handler has done its work, and only the reply is written anew.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException, Request, Response

from skyrl_r3 import reply
from skyrl_r3.errors import CodecError, R3Error

logger = logging.getLogger(__name__)

_tapped: ContextVar[list[Any] | None] = ContextVar("skyrl_r3_tapped", default=None)
"""Where the outputs of the current request go; None while SkyRL answers by itself."""


class EngineTap:
    """An engine whose ``generate`` hands its outputs over to the request that asked for them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As the engine's. SkyRL's handler gets an empty completion where the reply is written by this module."""
        tapped = _tapped.get()
        async for output in self._engine.generate(*args, **kwargs):
            if tapped is None:
                yield output
            else:
                tapped[:] = [output]
        if tapped:
            nothing = SimpleNamespace(token_ids=[], finish_reason=None, logprobs=None, routed_experts=None)
            yield SimpleNamespace(outputs=[nothing])


def add_custom_endpoints(original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``VLLMServerActor._add_custom_endpoints``: let it add its endpoints, then put ours before its own."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not getattr(bound.arguments["cli_args"], "enable_return_routed_experts", False):
            return original(*args, **kwargs)
        app = bound.arguments["app"]
        bound.arguments["engine"] = EngineTap(bound.arguments["engine"])
        original(*bound.args, **bound.kwargs)
        _put_before(app, reply.GENERATE_PATH)

    return _add_custom_endpoints


def refuse_custom_endpoints(original: Callable[..., None], error: R3Error) -> Callable[..., None]:
    """Stand in for the above where the overlay cannot be applied: raise ``error`` if the flag is on."""

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        if any(getattr(arg, "enable_return_routed_experts", False) is True for arg in (*args, *kwargs.values())):
            raise error
        return original(*args, **kwargs)

    return _add_custom_endpoints


def _put_before(app: Any, path: str) -> None:
    """Serve ``path`` of ``app`` ourselves, with its present endpoint for the requests that are not ours."""
    route = next(route for route in app.router.routes if getattr(route, "path", None) == path)
    stock = route.endpoint

    async def generate(request: Request) -> Any:
        wanted = await _wanted_encodings(request)
        if wanted is None:
            return await stock(request)
        try:
            encoding = reply.choose_encoding(wanted)
        except R3Error as error:
            raise HTTPException(status_code=400, detail=str(error)) from error
        if encoding == reply.NESTED:
            return await stock(request)
        tapped: list[Any] = []
        token = _tapped.set(tapped)
        try:
            await stock(request)
        finally:
            _tapped.reset(token)
        try:
            body = _packed_body(tapped[0])
        except CodecError as error:
            detail = f"the engine's {error}"
            raise HTTPException(status_code=500, detail=detail) from error
        return Response(content=body, media_type="application/json")

    app.router.routes.remove(route)
    # Without a response model, as SkyRL's: one would send stock replies through pydantic and change their bytes.
    app.post(path, response_model=None, name=route.name)(generate)


async def _wanted_encodings(request: Request) -> Any:
    try:
        body = await request.json()
    except ValueError:
        return None  # Not JSON: SkyRL's handler fails on it in its own way.
    return body.get(reply.ENCODINGS_FIELD) if isinstance(body, dict) else None


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
