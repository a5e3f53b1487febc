"""Inference server: answer ``/skyrl/v1/generate`` in the encoding that the request asks for.

SkyRL's own handler keeps reading the request: it finds or refuses the LoRA adapter, builds the sampling params and the
prompt, runs the engine and answers 500 where there is no output. The engine that it is given is tapped, so that the
output is at hand when the handler has done its work, and only the reply is written anew. What SkyRL writes itself,
nested lists in 0.3 and packed routes in 0.4, is left to it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from array import array
from collections.abc import AsyncIterator, Buffer, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi import HTTPException, Request, Response

from skyrl_r3 import codec, frame, packed, wire
from skyrl_r3.errors import OverlayError, R3Error
from skyrl_r3.hooks.engine import check_start, refuse_combinations, route_spec
from skyrl_r3.reply import FLOORED_LOGPROB, Reply, sampled_logprobs
from skyrl_r3.spec import RouteSpec

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


class PiecesResponse(Response):
    """A body in pieces, sent one by one. The first is bytes: vLLM's log of replies decodes it.

    To join them would be to copy the routes: 24 of the 29 ms that the server took for 18 MB of packed JSON, and most
    of that for memory that is new.
    """

    def __init__(self, pieces: Sequence[Buffer], media_type: str) -> None:
        self._pieces = pieces
        length = sum(memoryview(piece).nbytes for piece in pieces)
        super().__init__(media_type=media_type, headers={"content-length": str(length)})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the body, as ASGI has it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self._pieces[-1], "more_body": False})


def add_custom_endpoints(original: Callable[..., None]) -> Callable[..., None]:
    """Replace SkyRL 0.3's ``VLLMServerActor._add_custom_endpoints``: its endpoints, with ours in front of one."""
    return _replacement(original, (frame.FRAME, packed.PACKED, packed.NESTED))


def add_packing_endpoints(original: Callable[..., None]) -> Callable[..., None]:
    """Replace SkyRL 0.4's ``VLLMServerActor._add_custom_endpoints``, as above."""
    return _replacement(original, (frame.FRAME, packed.PACKED))


def _replacement(original: Callable[..., None], encodings: Sequence[str]) -> Callable[..., None]:
    """``encodings`` are those that the server can write, SkyRL's own last."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not getattr(bound.arguments["cli_args"], "enable_return_routed_experts", False):
            return original(*args, **kwargs)
        engine = bound.arguments["engine"]
        refuse_combinations(bound.arguments["cli_args"], engine)
        routes = bound.arguments["app"].router.routes
        there = list(routes)
        tap = bound.arguments["engine"] = EngineTap(engine)
        original(*bound.args, **bound.kwargs)
        added = (route for route in routes if route not in there)
        stock = next((route for route in added if getattr(route, "path", None) == wire.GENERATE_PATH), None)
        if stock is None:
            expected = f"an endpoint at {wire.GENERATE_PATH}"
            raise OverlayError("VLLMServerActor._add_custom_endpoints", expected=expected, got="none")
        _replace_endpoint(bound.arguments["app"], stock, tap, encodings, route_spec(engine))

    return _add_custom_endpoints


def refuse_custom_endpoints(original: Callable[..., None], error: R3Error) -> Callable[..., None]:
    """Stand in for the above where the overlay cannot be applied: raise ``error`` if the flag is on."""

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        if any(getattr(arg, "enable_return_routed_experts", False) is True for arg in (*args, *kwargs.values())):
            raise error
        return original(*args, **kwargs)

    return _add_custom_endpoints


def _replace_endpoint(app: Any, route: Any, tap: EngineTap, encodings: Sequence[str], spec: RouteSpec) -> None:
    """Serve ``route`` of ``app`` ourselves, with its present endpoint for the requests that are not ours."""
    stock = route.endpoint

    @functools.wraps(stock)
    async def generate(request: Request) -> Any:
        body = await _json_object(request)
        wanted, token_ids = body.get(wire.ENCODINGS_FIELD), body.get("token_ids")
        try:
            check_start(body)  # Of every request: they share the engine.
            encoding = wire.choose_encoding(wanted, encodings) if wanted is not None else encodings[-1]
        except R3Error as error:
            raise HTTPException(status_code=400, detail=str(error)) from error
        # Sample support is SkyRL 0.4's, and so is the reply that has it.
        if encoding == encodings[-1] or not isinstance(token_ids, list) or body.get("return_sample_support"):
            return await stock(request)
        with tap.outputs_for(token_ids) as outputs:
            answer = await stock(request)
        if not outputs:
            return answer  # The handler did not give these token ids to the engine. Its answer is right, but stock.
        try:
            reply = _reply(outputs[0], body, spec)
            if encoding == frame.FRAME:
                return PiecesResponse(frame.pieces(reply), frame.CONTENT_TYPE)
            return PiecesResponse(packed.pieces(reply), "application/json")
        except (R3Error, TypeError, OverflowError) as error:
            raise HTTPException(status_code=500, detail=f"the engine's reply: {error}") from error

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


def _reply(output: Any, request: dict[str, Any], spec: RouteSpec) -> Reply:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = None
    if completion.logprobs is not None:
        logprobs, floored = sampled_logprobs(token_ids, completion.logprobs)
        if floored:
            logger.warning(
                "Set %d of %d missing or non-finite logprobs to %s (request %s)",
                floored,
                len(token_ids),
                FLOORED_LOGPROB,
                getattr(output, "request_id", "unknown"),
            )
    # A vLLM that knows no routes has no such attribute. The client's error names the flag; a 500 would be tried again.
    routes = getattr(completion, "routed_experts", None)
    if routes is not None and not getattr(getattr(routes, "flags", None), "owndata", False):
        # The reply is sent from the array's own memory. One that vLLM has made for this request owns it (0.30.0
        # concatenates chunks); what is a view may be written again before the last byte is out.
        routes = codec.compact(routes)
    prompt, start = len(request["token_ids"]), (request.get("sampling_params") or {}).get(wire.START_FIELD, 0)
    if routes is not None and len(routes) == prompt + len(token_ids) - 1:
        start = 0  # A vLLM that does not know it has returned all rows.
    return Reply(
        token_ids=np.frombuffer(array("i", token_ids), dtype=np.int32),
        finish_reason=completion.finish_reason,
        logprobs=logprobs,
        routed_experts=routes,
        prompt_tokens=prompt,
        start=start,
        spec=spec,
        model=request.get("model") or "",
    )
