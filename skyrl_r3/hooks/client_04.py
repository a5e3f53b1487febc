"""SkyRL 0.4's remote client: ask for frames, and hand arrays on.

SkyRL's own method sends the request, tries again and raises its errors. It packs by itself, and its parser stays in
use for that; each reply is checked against the request, whatever it comes in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_r3 import frame, packed
from skyrl_r3.errors import R3Error
from skyrl_r3.hooks.client import Received, asking, body_of, start, taken_out, warn_if_slow, where
from skyrl_r3.reply import Reply
from skyrl_r3.wire import GENERATE_PATH


def ask_for_frames(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap SkyRL 0.4's ``RemoteGenerateClient._post``: ask for a frame, and check what arrives.

    Requests for sample support are SkyRL's alone, because a frame has no place for it. So are those of a caller that
    is not :func:`generate`: it would find nothing to decode.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def _post(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        url, request = given["url"], given["json"]
        packing = given.get("packed_side_channels") and not request.get("return_sample_support")
        if not packing or not taken_out.get() or not url.endswith(GENERATE_PATH):
            return await original(*args, **kwargs)
        given["json"] = asking(request)
        try:
            body = await original(*bound.args, **bound.kwargs)
            reply, encoding = (body.reply, frame.FRAME) if isinstance(body, FrameBody) else packed.read(body)
            ids = reply.routes_for(prompt=len(request["token_ids"]), start=start(request))
        except R3Error as error:
            raise error.at(where(given)) from error
        warn_if_slow(encoding, url)
        if reply.routed_experts is None:
            # Without routes SkyRL raises an error of its own.
            return {"choices": [{"token_ids": [], "finish_reason": reply.finish_reason, "routed_experts": None}]}
        return body_of(reply, ids)

    return _post


class FrameBody(dict[str, Any]):
    """A reply that came as a frame, where SkyRL expects parsed JSON."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


def load_packed_body(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SkyRL 0.4's ``load_packed_body``, which parses every body: read frames, leave it the rest."""

    @functools.wraps(original)
    def load_packed_body(raw: bytes, *args: Any, **kwargs: Any) -> Any:
        # The routes stay a view of the body, and so read-only. SkyRL's trace of a trajectory copies those by itself; a
        # copy here too would cost as much as all the rest (8 ms for 12 MB, most of it for memory that is new).
        return FrameBody(frame.load(raw)) if frame.is_frame(raw) else original(raw, *args, **kwargs)

    return load_packed_body


def decode_routed_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SkyRL 0.4's ``decode_packed_routed_experts``: what is decoded already passes through."""

    @functools.wraps(original)
    def decode_packed_routed_experts(payload: Any) -> Any:
        return payload if isinstance(payload, Received) else original(payload)

    return decode_packed_routed_experts


def generate(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap SkyRL 0.4's ``RemoteGenerateClient.generate``: take the routes and logprobs out of the reply."""

    @functools.wraps(original)
    async def generate(*args: Any, **kwargs: Any) -> Any:
        token = taken_out.set(True)
        try:
            result = await original(*args, **kwargs)
        finally:
            taken_out.reset(token)
        received = result.routed_experts
        if isinstance(received, Received):
            result = dataclasses.replace(result, routed_experts=received.routes, response_logprobs=received.logprobs)
        return result

    return generate


def refuse_generate(original: Callable[..., Awaitable[Any]], error: R3Error) -> Callable[..., Awaitable[Any]]:
    """Stand in for :func:`generate` where the overlay cannot be applied: raise ``error`` if routes are asked for."""

    @functools.wraps(original)
    async def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_routed_experts"):
            raise error
        return await original(*args, **kwargs)

    return generate
