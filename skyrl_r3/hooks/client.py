"""Remote inference client: ask for packed routes, and hand arrays on.

``RemoteInferenceClient._post`` is the one place that every request and reply goes through, so that SkyRL keeps
building the request and picking the reply apart. Requests to other endpoints pass through untouched.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson

from skyrl_r3 import reply
from skyrl_r3.errors import R3Error, ReplyError
from skyrl_r3.reply import GENERATE_PATH

logger = logging.getLogger(__name__)

_START_FIELD = "routed_experts_prompt_start"
_RETRY_PAUSE_S = 1.0
"""SkyRL's own pause: long enough for the pool to notice the connections that the server has closed."""

_slow_servers: set[str] = set()


def post(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Replace ``RemoteInferenceClient._post`` for ``/skyrl/v1/generate``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def _post(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        url = bound.arguments["url"]
        if not url.endswith(GENERATE_PATH):
            return await original(*args, **kwargs)
        client, request = bound.arguments["self"], bound.arguments["json"]
        headers = bound.arguments.get("headers")
        server = url.removesuffix(GENERATE_PATH)
        if (request.get("sampling_params") or {}).get(_START_FIELD):
            raise ReplyError(
                f"sampling_params.{_START_FIELD}",
                expected="0 or nothing",
                got=str(request["sampling_params"][_START_FIELD]),
                hint="SkyRL 0.3 takes row i for token i, so routes that start later would train other tokens.",
            )
        skyrl = sys.modules[original.__module__]
        asking = {**request, reply.ENCODINGS_FIELD: list(reply.ENCODINGS)}
        body = await _fetch(skyrl, client, url, asking, headers)
        session_id = (headers or {}).get("X-Session-ID")
        where = server if session_id is None else f"{server}, session {session_id}"
        parsed, encoding = reply.load(body, prompt_token_ids=request["token_ids"], where=where)
        if encoding == reply.NESTED and server not in _slow_servers:
            _slow_servers.add(server)
            logger.warning(
                "The server at %s sends routed experts as nested lists, which is slow: skyrl-r3 is not active there. "
                "Install it in the server's environment too.",
                server,
            )
        return parsed

    return _post


def refuse_post(original: Callable[..., Awaitable[Any]], error: R3Error) -> Callable[..., Awaitable[Any]]:
    """Stand in for the above where the overlay cannot be applied: raise ``error`` if routes are asked for."""

    @functools.wraps(original)
    async def _post(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, str) and arg.endswith(GENERATE_PATH) for arg in (*args, *kwargs.values())):
            raise error
        return await original(*args, **kwargs)

    return _post


async def _fetch(skyrl: Any, client: Any, url: str, request: dict[str, Any], headers: Any) -> bytes:
    """POST ``request`` and return the body of a successful reply.

    Connection faults, and server errors that no JSON explains, are tried again as often as SkyRL does. A body that
    arrived whole is returned whatever it holds: to generate it again would hide the fault and bias the data.

    Args:
        skyrl: SkyRL's client module, for its number of attempts and its reading of error replies.

    Raises:
        aiohttp.ClientResponseError: The server answered with an error, with its text.
        aiohttp.ClientError: The connection failed every time.
    """
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
                explained = _json_object(body)
                if explained is not None:
                    skyrl.raise_for_status(response, explained)
                last = aiohttp.ClientResponseError(
                    response.request_info,
                    response.history,
                    status=response.status,
                    message=body.decode(errors="replace") or response.reason or "",
                    headers=response.headers,
                )
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            last = error
        if isinstance(last, aiohttp.ClientResponseError) and last.status < 500:
            break
    raise last


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None
