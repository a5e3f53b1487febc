"""Preprocessing: routes become the training tensor, and the batch learns which of its rows are padding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from skyrl_r3 import batch

_ROUTES = "rollout_expert_indices"


def convert_prompts_responses(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``convert_prompts_responses_to_batch_tensors`` where routes come as arrays."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert_prompts_responses_to_batch_tensors(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        routes = bound.arguments.get(_ROUTES)
        if routes is None or not len(routes) or _all_nested(routes):
            return original(*args, **kwargs)
        bound.arguments[_ROUTES] = None
        tensors = original(*bound.args, **bound.kwargs)
        given = bound.arguments
        ids = batch.pad_routes(
            routes,
            sequences=tensors[0],
            lengths=_lengths(given["prompts"], given["responses"]),
            loss_masks=given["loss_masks"],
        )
        return (*tensors[:-1], ids)

    return convert_prompts_responses_to_batch_tensors


def convert_to_training_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RayPPOTrainer.convert_to_training_input``: add ``router_padding_mask`` to the batch.

    bool ``[batch, tokens]``, True where there is no captured route: the entry that SkyRL 0.4.0's batches have.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert_to_training_input(*args: Any, **kwargs: Any) -> Any:
        training_input = original(*args, **kwargs)
        output = signature.bind(*args, **kwargs).arguments["generator_output"]
        routes = output.get(_ROUTES)
        if routes is not None and len(routes) and not _all_nested(routes) and training_input.get(_ROUTES) is not None:
            mask = batch.router_padding_mask(
                [0 if entry is None else len(entry) for entry in routes],
                _lengths(output["prompt_token_ids"], output["response_ids"]),
                tokens=training_input["sequences"].shape[1],
            )
            # SkyRL makes up a full batch with copies of its first sample, so their mask is that of the first too.
            copies = training_input.batch_size - len(mask)
            training_input["router_padding_mask"] = mask[[*range(len(mask)), *[0] * copies]]
        return training_input

    return convert_to_training_input


def _all_nested(routes: Any) -> bool:
    """Whether a custom generator made the routes: nested lists, which SkyRL's own code turns into a tensor."""
    kinds = {type(entry) for entry in routes if entry is not None and not (isinstance(entry, list) and not entry)}
    return kinds == {list}


def _lengths(prompts: Any, responses: Any) -> list[int]:
    return [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
