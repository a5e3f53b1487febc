"""Remote inference client: ask for compact routes, and hand arrays on.

SkyRL keeps building the request and picking the reply apart. The reply that it gets to see is in its own form, but
for the routes, which are a :class:`Received`. It comes out at the end of SkyRL's method, where the lists that SkyRL's
interface promises are put in its place. Where that method is not ours, as in a subclass that has its own, the reply is
in SkyRL's form altogether. Requests to other endpoints pass through untouched.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import aiohttp
import numpy as np
from yarl import URL

from skyrl_r3 import metrics, notes, policy, wire
from skyrl_r3.errors import OverlayError, R3Error, ReplyError
from skyrl_r3.reply import Reply
from skyrl_r3.routes import RoutedExperts, as_token_array
from skyrl_r3.trace import Trace, trajectory
from skyrl_r3.wire import GENERATE_PATH, START_FIELD

logger: logging.Logger = logging.getLogger(__name__)

_SKYRL_CLIENT = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
_RETRY_PAUSE_S = 1.0
"""SkyRL's own pause: long enough for the pool to notice the connections that the server has closed."""

_slow_servers: set[str] = set()

taken_out: ContextVar[bool] = ContextVar("skyrl_r3_taken_out", default=False)
"""Whether the caller of ``_post`` takes a :class:`Received` out of what it returns."""


class Received(dict[str, Any]):
    """A checked reply, in the place of its routes. A dict because SkyRL 0.4 looks for one there.

    Attributes:
        routes: What SkyRL is to have as routes.
        logprobs: Of the sampled tokens; None where there are none, as SkyRL has it.
    """

    def __init__(self, reply: Reply, routes: Any) -> None:
        super().__init__()
        self.routes = routes
        self.logprobs: list[float] | None = None if reply.logprobs is None else reply.logprobs.tolist() or None


def body_of(reply: Reply, routes: Any) -> dict[str, Any]:
    """``reply`` as the body that SkyRL's client picks apart."""
    choice = {"token_ids": reply.token_ids.tolist(), "finish_reason": reply.finish_reason}
    if taken_out.get():
        return {"choices": [choice | {"logprobs": None, "routed_experts": Received(reply, routes)}]}
    logprobs = None if reply.logprobs is None else [{"logprob": value} for value in reply.logprobs.tolist()]
    content = None if logprobs is None else {"content": logprobs}
    return {"choices": [choice | {"logprobs": content, "routed_experts": routes}]}


def post(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Replace SkyRL 0.3's ``RemoteInferenceClient._post`` for ``/skyrl/v1/generate``.

    Raises:
        OverlayError: ``original`` is not SkyRL's, so that replacing it would lose what somebody else does there.
    """
    if original.__module__ != _SKYRL_CLIENT or hasattr(original, "__wrapped__"):
        raise OverlayError(
            "RemoteInferenceClient._post",
            expected="SkyRL's own method",
            got=f"{original.__module__}.{original.__qualname__}",
            hint="Call skyrl_r3.enable() before it is wrapped.",
        )
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def _post(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        url = bound.arguments["url"]
        if not url.endswith(GENERATE_PATH):
            return await original(*args, **kwargs)
        client, request = bound.arguments["self"], bound.arguments["json"]
        if start(request):
            raise ReplyError(
                f"sampling_params.{START_FIELD}",
                expected="0 or nothing",
                got=str(start(request)),
                where=where(bound.arguments),
                hint="SkyRL 0.3 takes row i for token i. What a trajectory holds already is left out by itself.",
            )
        notes.say()
        counted = metrics.Reply()
        policy.current()  # One that cannot be read is an error now, before anything is generated in vain.
        prompt, traces = as_token_array(request["token_ids"]), trajectory.get()
        trace = traces[url, str(request.get("model"))] if traces is not None else None
        held = trace.held_for(prompt) if trace is not None else None
        try:
            body = await _fetch(client, url, asking(request, len(held or ())), bound.arguments.get("headers"))
            counted.lap("wait_seconds")
            read, ids = functools.partial(wire.load, body), held.ids if held else None
            reply, encoding, ids = policy.settle(read, prompt=len(prompt), held=ids)
            routes = _routes(trace, held, ids, prompt, reply.token_ids)
        except R3Error as error:
            raise error.at(where(bound.arguments)) from error
        counted.lap("decode_seconds")
        counted.count(encoding, rows=reply.rows, itemsize=ids.itemsize, body_bytes=len(body))
        warn_if_slow(encoding, url)
        return body_of(reply, routes)

    return _post


def _routes(
    trace: Trace | None, held: RoutedExperts | None, ids: np.ndarray, prompt: np.ndarray, response: np.ndarray
) -> RoutedExperts:
    """The routes of prompt and response, of which ``ids`` are those that came and ``held`` those that were there."""
    tokens = np.concatenate([prompt, response])
    if trace is None:
        return RoutedExperts.of_checked(ids, tokens[: len(ids)])
    if not len(response):
        # Nothing was sampled, so that these rows are no turn's. The trajectory goes on with what it has.
        return held if held is not None else RoutedExperts.of_checked(ids, tokens[: len(ids)])
    first = len(tokens) - 1 - len(ids)
    if held is not None:
        again, ids = ids[: len(held) - first], ids[len(held) - first :]
        policy.changed(held.ids[first:], again)
        metrics.add("rows_saved", first)
    return trace.add(held, ids, tokens[:-1])


def generate_single(original: Callable[..., Awaitable[dict[str, Any]]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Wrap SkyRL 0.3's ``RemoteInferenceClient._generate_single``: take the routes and logprobs out of the reply."""

    @functools.wraps(original)
    async def _generate_single(*args: Any, **kwargs: Any) -> dict[str, Any]:
        before = taken_out.get()
        taken_out.set(True)
        try:
            result = await original(*args, **kwargs)
        finally:
            taken_out.set(before)  # No reset: what is given up may be closed in another context.
        received = result["routed_experts"]
        if isinstance(received, Received):
            result |= {"routed_experts": received.routes, "response_logprobs": received.logprobs}
        return result

    return _generate_single


def asking(request: dict[str, Any], start: int = 0) -> dict[str, Any]:
    """``request`` with the encodings that this client reads, for the rows from ``start`` on."""
    asked = {**request, wire.ENCODINGS_FIELD: list(wire.ENCODINGS)}
    if start:
        asked["sampling_params"] = {**(request.get("sampling_params") or {}), START_FIELD: start}
    return asked


def start(request: dict[str, Any]) -> int:
    """The first token that ``request`` wants a row for."""
    return (request.get("sampling_params") or {}).get(START_FIELD) or 0


def _server(url: str) -> str:
    return str(URL(url.removesuffix(GENERATE_PATH)).with_user(None))  # Errors end up in logs.


def where(arguments: dict[str, Any]) -> str:
    """The server's address and the session of the ``arguments`` of ``_post``, for errors."""
    session_id = (arguments.get("headers") or {}).get("X-Session-ID")
    return _server(arguments["url"]) + (f", session {session_id}" if session_id is not None else "")


def warn_if_slow(encoding: str, url: str) -> None:
    """Say once for each server that it sends nested lists."""
    if encoding == wire.NESTED and (server := _server(url)) not in _slow_servers:
        _slow_servers.add(server)
        logger.warning(
            "The server at %s sends routed experts as nested lists, which is slow: skyrl-r3 is not active there. "
            "Install it in the server's environment too; skyrl-r3 status --server URL tells more.",
            server,
        )


async def _fetch(client: Any, url: str, request: dict[str, Any], headers: Any) -> bytes:
    """POST ``request`` and return the body of a successful reply.

    Connection faults, and server errors in plain text, are tried again as often as SkyRL does. A body that arrived
    whole is returned whatever it holds: to generate it again would hide the fault and bias the data.

    Raises:
        aiohttp.ClientResponseError: The server answered with an error, with its text.
        aiohttp.ClientError: The connection failed every time.
    """
    skyrl = importlib.import_module(_SKYRL_CLIENT)
    session = await client._get_session()
    last: Exception = RuntimeError(f"no attempt was made for {url}")
    for attempt in range(skyrl._DATA_PLANE_RETRIES):
        if attempt:
            logger.debug("Attempt %d for %s after %r", attempt + 1, url, last)
            await asyncio.sleep(_RETRY_PAUSE_S)
        try:
            async with session.post(url, json=request, headers=headers) as response:
                body = await response.read()
                if response.status < 400:
                    return body
                explained = _json(body)
                if explained is None or isinstance(explained, dict):
                    skyrl.raise_for_status(response, explained)
                last = aiohttp.ClientResponseError(
                    response.request_info,
                    response.history,
                    status=response.status,
                    message=body.decode(errors="replace"),
                    headers=response.headers,
                )
                if response.status < 500 or explained is not _PLAIN_TEXT:
                    raise last
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            last = error
    raise last


_PLAIN_TEXT = object()


def _json(body: bytes) -> Any:
    """What an error's body says, None if it is empty. By the standard library, which reads NaN as SkyRL does."""
    try:
        return json.loads(body) if body.strip() else None
    except (ValueError, RecursionError):
        return _PLAIN_TEXT
