"""What stands in for a hook where the overlay cannot be applied: SkyRL's own function, unless routes are asked for.

Standard library only: that a package is missing may be why it cannot be applied.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["custom_endpoints", "generate", "post"]

_GENERATE_PATH = "/skyrl/v1/generate"  # That of skyrl_r3.wire, which needs numpy.


def custom_endpoints(original: Callable[..., None], error: Exception) -> Callable[..., None]:
    """``VLLMServerActor._add_custom_endpoints`` that raises ``error`` in a server that was started with the flag."""

    @functools.wraps(original)
    def _add_custom_endpoints(*args: Any, **kwargs: Any) -> None:
        if any(getattr(arg, "enable_return_routed_experts", False) is True for arg in (*args, *kwargs.values())):
            raise error
        return original(*args, **kwargs)

    return _add_custom_endpoints


def post(original: Callable[..., Awaitable[Any]], error: Exception) -> Callable[..., Awaitable[Any]]:
    """SkyRL 0.3's ``RemoteInferenceClient._post`` that raises ``error`` where it is to fetch routes."""

    @functools.wraps(original)
    async def _post(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, str) and arg.endswith(_GENERATE_PATH) for arg in (*args, *kwargs.values())):
            raise error
        return await original(*args, **kwargs)

    return _post


def generate(original: Callable[..., Awaitable[Any]], error: Exception) -> Callable[..., Awaitable[Any]]:
    """SkyRL 0.4's ``RemoteGenerateClient.generate`` that raises ``error`` where it is to return routes."""

    @functools.wraps(original)
    async def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_routed_experts"):
            raise error
        return await original(*args, **kwargs)

    return generate
