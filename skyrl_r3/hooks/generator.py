"""Generator and dynamic sampling: routes stay with their trajectory.

Nearly all of SkyRL 0.3's generator handles :class:`~skyrl_r3.routes.RoutedExperts` as it is. Hooked are the places
where routes would come to belong to other tokens, and where SkyRL moves samples without their routes.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from skyrl_r3.errors import RouteError
from skyrl_r3.routes import RoutedExperts, as_token_array

logger = logging.getLogger(__name__)

_ROUTES = "rollout_expert_indices"


def update_agent_loop_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``SkyRLGymGenerator._update_agent_loop_state_with_*``: check a turn's routes before they are kept.

    A turn without a response, as of a request that was aborted before its first token, must not replace the routes of
    the turns before it: whatever it captured of its prompt is less. And an environment may return a
    ``postprocessed_action``, which SkyRL encodes again: from the first token that differs, the routes are those of
    other tokens, and are cut off with a warning.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _update_agent_loop_state(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        turn, state = bound.arguments["turn_output"], bound.arguments["agent_loop_state"]
        if not turn.output_ids:
            turn.rollout_expert_indices = None
        elif isinstance(turn.rollout_expert_indices, RoutedExperts):
            turn.rollout_expert_indices = _of_these_tokens(
                turn.rollout_expert_indices, state.input_ids, turn.output_ids
            )
        return original(*args, **kwargs)

    return _update_agent_loop_state


def _of_these_tokens(routes: RoutedExperts, prompt: list[int], response: list[int]) -> RoutedExperts | None:
    same = routes.common_prefix(as_token_array([*prompt, *response]))
    if same < min(len(prompt), len(routes)):
        raise RouteError(
            f"{_ROUTES}.token_ids",
            expected=f"token {prompt[same]} in row {same} of the prompt",
            got=f"token {int(routes.token_ids[same])}",
            hint="These routes were captured for another prompt.",
        )
    if same < len(routes):
        logger.warning(
            "The environment changed the response after it was generated: the routes of its last %d of %d tokens "
            "are those of other tokens and are dropped",
            len(routes) - same,
            len(response),
        )
    return routes[:same] if same else None


def filter_generator_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``filter_generator_output``, which copies a fixed list of fields that routes are not in."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def filter_generator_output(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        output = bound.arguments["output"]
        if output.get(_ROUTES) is None:
            return original(*args, **kwargs)
        routes = _one_for_each_sample(output)
        kept = bound.arguments["kept_indices"] = list(bound.arguments["kept_indices"])
        filtered = original(*bound.args, **bound.kwargs)
        filtered[_ROUTES] = [routes[i] for i in kept]
        return filtered

    return filter_generator_output


def handle_replace_sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``handle_replace_sampling``, which overwrites bad samples with good ones but leaves their routes.

    Which sample replaced which is drawn at random inside and not returned. So sample numbers take the place of the
    stop reasons, which move with their samples, and tell afterwards where each sample came from.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def handle_replace_sampling(*args: Any, **kwargs: Any) -> Any:
        output = signature.bind(*args, **kwargs).arguments["generator_output"]
        if output.get(_ROUTES) is None:
            return original(*args, **kwargs)
        routes = _one_for_each_sample(output)
        stop_reasons = output.get("stop_reasons")
        origin = list(range(len(routes)))
        output["stop_reasons"] = origin
        try:
            result = original(*args, **kwargs)
        finally:
            output["stop_reasons"] = stop_reasons and [stop_reasons[i] for i in origin]
            output[_ROUTES] = [routes[i] for i in origin]
        return result

    return handle_replace_sampling


def _one_for_each_sample(output: Any) -> list[Any]:
    routes, samples = output[_ROUTES], len(output["response_ids"])
    if len(routes) != samples:
        raise RouteError(_ROUTES, expected=f"{samples} entries, one for each response", got=str(len(routes)))
    return routes
