"""Generator and dynamic sampling: routes stay with their trajectory, and what was counted reaches the tracker.

Nearly all of SkyRL 0.3's generator handles :class:`~skyrl_r3.routes.RoutedExperts` as it is. Hooked are the places
where routes would come to belong to other tokens, and where SkyRL moves samples without their routes.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_r3 import metrics
from skyrl_r3.errors import RouteError
from skyrl_r3.routes import RoutedExperts, as_token_array
from skyrl_r3.trace import Traces, trajectory

logger: logging.Logger = logging.getLogger(__name__)

_ROUTES = "rollout_expert_indices"


def agent_loop(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap ``SkyRLGymGenerator.agent_loop``: the requests of one trajectory share what they hold of its routes.

    It ends with the loop, however that ends, and so do the rows that it holds.
    """

    @functools.wraps(original)
    async def agent_loop(*args: Any, **kwargs: Any) -> Any:
        before, traces = trajectory.get(), Traces()
        trajectory.set(traces)
        try:
            return await original(*args, **kwargs)
        finally:
            # Connections that were opened meanwhile keep this context, and with it the traces, as long as they live.
            traces.clear()
            trajectory.set(before)  # No reset: a loop that is given up may be closed in another context.

    return agent_loop


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


def generate(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap ``SkyRLGymGenerator.generate``: what was counted since the last call that ended is in ``rollout_metrics``.

    Calls may overlap, as SkyRL's asynchronous trainer has them: each count is in the output of one of them.
    """

    @functools.wraps(original)
    async def generate(*args: Any, **kwargs: Any) -> Any:
        output = await original(*args, **kwargs)
        if counted := metrics.report():
            given = output.get("rollout_metrics") or {}
            output["rollout_metrics"] = given | {f"r3/{name}": value for name, value in counted.items()}
        return output

    return generate


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
