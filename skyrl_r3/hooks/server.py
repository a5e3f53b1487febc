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
import math
from array import array
from collections.abc import Buffer, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import HTTPException, Request, Response

from skyrl_r3 import codec, frame, metrics, notes, packed, wire
from skyrl_r3.errors import OverlayError, R3Error
from skyrl_r3.hooks.engine import check_start, refuse_combinations, route_spec
from skyrl_r3.hooks.tap import EngineTap
from skyrl_r3.reply import FLOORED_LOGPROB, Reply, sampled_logprobs
from skyrl_r3.spec import RouteSpec

logger: logging.Logger = logging.getLogger(__name__)


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
    return _replacement(original, wire.WRITTEN["add_custom_endpoints"])


def add_packing_endpoints(original: Callable[..., None]) -> Callable[..., None]:
    """Replace SkyRL 0.4's ``VLLMServerActor._add_custom_endpoints``, as above."""
    return _replacement(original, wire.WRITTEN["add_packing_endpoints"])


def _replacement(original: Callable[..., None], encodings: Sequence[str]) -> Callable[..., None]:
    """``encodings`` are those that the server can write, SkyRL's own last."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not getattr(bound.arguments["cli_args"], "enable_return_routed_experts", False):
            return original(*args, **kwargs)
        engine = bound.arguments["engine"]
        notes.say()
        refuse_combinations(bound.arguments["cli_args"], engine)
        metrics.export()
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


def _replace_endpoint(app: Any, route: Any, tap: EngineTap, encodings: Sequence[str], spec: RouteSpec) -> None:
    """Serve ``route`` of ``app`` ourselves, with its present endpoint for the requests that are not ours."""
    stock = route.endpoint

    def counted(answer: Any) -> Any:
        """``answer``, which SkyRL has written itself. What FastAPI is still to print has no length yet."""
        body = getattr(answer, "body", None)
        metrics.Reply().count(encodings[-1], body_bytes=None if body is None else len(body))
        return answer

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
            return counted(await stock(request))
        with tap.outputs_for(token_ids) as outputs:
            answer = await stock(request)
        if not outputs:
            # The handler did not give these token ids to the engine. Its answer is right, but stock.
            return counted(answer)
        timed = metrics.Reply()
        try:
            reply = _reply(outputs[0], body, spec)
            pieces = frame.pieces(reply) if encoding == frame.FRAME else packed.pieces(reply)
        except (R3Error, TypeError, OverflowError) as error:
            raise HTTPException(status_code=500, detail=f"the engine's reply: {error}") from error
        timed.lap("encode_seconds")
        _count(timed, encoding, reply.routed_experts, pieces)
        return PiecesResponse(pieces, frame.CONTENT_TYPE if encoding == frame.FRAME else "application/json")

    routes = app.router.routes
    # Without a response model, as SkyRL's: one would send stock replies through pydantic and change their bytes.
    app.post(route.path, response_model=None)(generate)
    routes[routes.index(route)] = routes.pop()


def _count(timed: metrics.Reply, encoding: str, ids: Any, pieces: Sequence[Buffer]) -> None:
    """Count the reply with ``ids`` that ``pieces`` are the body of."""
    if not timed.on:
        return
    sizes, rows, itemsize = [memoryview(piece).nbytes for piece in pieces], 0, 0
    if ids is not None and (count := math.prod(ids.shape)):
        # What the encoder chose, from the bytes that it took: to look at the ids again would cost as much.
        padding = 0 if encoding == frame.FRAME else bytes(memoryview(pieces[1])[-2:]).count(b"=")
        itemsize = (sizes[1] if encoding == frame.FRAME else 3 * sizes[1] // 4 - padding) // count
        rows = len(ids)
    timed.count(encoding, rows=rows, itemsize=itemsize, body_bytes=sum(sizes))


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
            metrics.add("floored_logprobs", floored)
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
