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

from skyrl_r3 import frame, metrics, notes, packed, policy
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
        notes.say()
        given["json"] = asking(request)
        policy.current()  # One that cannot be read is an error now, before anything is generated in vain.
        counted = metrics.Reply()
        try:
            body = await original(*bound.args, **bound.kwargs)
            counted.lap("wait_seconds")
            prompt, asked = len(request["token_ids"]), start(request)
            reply, encoding, ids = policy.settle(lambda: _read(body), prompt=prompt, start=asked)
        except R3Error as error:
            raise error.at(where(given)) from error
        counted.lap("decode_seconds")
        # SkyRL has parsed the others and keeps no length.
        body_bytes = len(body.raw) if isinstance(body, FrameBody) else None
        counted.count(encoding, rows=reply.rows, itemsize=ids.itemsize, body_bytes=body_bytes)
        warn_if_slow(encoding, url)
        if len(reply.token_ids):
            first = prompt + len(reply.token_ids) - 1 - len(ids)
            metrics.add("rows_saved", first)
            ids = ids[asked - first :]  # An engine that knows no start sends all rows.
        elif reply.routed_experts is None:
            # Without routes SkyRL raises an error of its own.
            return {"choices": [{"token_ids": [], "finish_reason": reply.finish_reason, "routed_experts": None}]}
        return body_of(reply, ids)

    return _post


class FrameBody(dict[str, Any]):
    """A frame, where SkyRL expects parsed JSON."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw


def _read(body: Any) -> tuple[Reply, str]:
    return (frame.load(body.raw), frame.FRAME) if isinstance(body, FrameBody) else packed.read(body)


def load_packed_body(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SkyRL 0.4's ``load_packed_body``, which parses every body: read frames, leave it the rest."""

    @functools.wraps(original)
    def load_packed_body(raw: bytes, *args: Any, **kwargs: Any) -> Any:
        # The routes stay a view of the body, and so read-only. SkyRL's trace of a trajectory copies those by itself; a
        # copy here too would cost as much as all the rest (8 ms for 12 MB, most of it for memory that is new).
        return FrameBody(raw) if frame.is_frame(raw) else original(raw, *args, **kwargs)

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
        before = taken_out.get()
        taken_out.set(True)
        try:
            result = await original(*args, **kwargs)
        finally:
            taken_out.set(before)  # No reset: what is given up may be closed in another context.
        received = result.routed_experts
        if isinstance(received, Received):
            result = dataclasses.replace(result, routed_experts=received.routes, response_logprobs=received.logprobs)
        return result

    return generate
