"""Remote inference client: ask for packed routes, and hand arrays on.

``RemoteInferenceClient._post`` is the one place that every request and reply goes through, so that SkyRL keeps
building the request and picking the reply apart. Requests to other endpoints pass through untouched.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from yarl import URL

from skyrl_r3 import reply
from skyrl_r3.errors import OverlayError, R3Error, ReplyError
from skyrl_r3.reply import GENERATE_PATH

logger = logging.getLogger(__name__)

_SKYRL_CLIENT = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
_START_FIELD = "routed_experts_prompt_start"
_RETRY_PAUSE_S = 1.0
"""SkyRL's own pause: long enough for the pool to notice the connections that the server has closed."""

_slow_servers: set[str] = set()


def post(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Replace ``RemoteInferenceClient._post`` for ``/skyrl/v1/generate``.

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
        headers = bound.arguments.get("headers")
        server = str(URL(url.removesuffix(GENERATE_PATH)).with_user(None))  # Errors end up in logs.
        if (request.get("sampling_params") or {}).get(_START_FIELD):
            raise ReplyError(
                f"sampling_params.{_START_FIELD}",
                expected="0 or nothing",
                got=str(request["sampling_params"][_START_FIELD]),
                hint="SkyRL 0.3 takes row i for token i, so routes that start later would train other tokens.",
            )
        asking = {**request, reply.ENCODINGS_FIELD: list(reply.ENCODINGS)}
        body = await _fetch(client, url, asking, headers)
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
    except ValueError:
        return _PLAIN_TEXT
