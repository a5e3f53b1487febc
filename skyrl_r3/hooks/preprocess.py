"""Preprocessing: routes become the training tensor, and the batch learns which of its rows are padding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skyrl_r3 import batch, padding
from skyrl_r3.routes import RoutedExperts

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
        given = bound.arguments
        given[_ROUTES] = None
        given["loss_masks"] = _masked_losses(routes, given)
        tensors = original(*bound.args, **bound.kwargs)
        ids = batch.pad_routes(
            routes,
            sequences=tensors[0],
            lengths=_lengths(given["prompts"], given["responses"]),
            loss_masks=given["loss_masks"],
        )
        return (*tensors[:-1], ids)

    return convert_prompts_responses_to_batch_tensors


def mask_prompts_responses(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SkyRL 0.4's ``convert_prompts_responses_to_batch_tensors``: masked rows become padding without a loss."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert_prompts_responses_to_batch_tensors(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if _all_arrays(given.get(_ROUTES)):
            given["loss_masks"] = _masked_losses(given[_ROUTES], given)
            given[_ROUTES] = padding.without_masked(given[_ROUTES])
        return original(*bound.args, **bound.kwargs)

    return convert_prompts_responses_to_batch_tensors


def mark_masked_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SkyRL 0.4's ``RayPPOTrainer.convert_to_training_input``: ``router_padding_mask`` is True for masked rows."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def convert_to_training_input(*args: Any, **kwargs: Any) -> Any:
        training_input = original(*args, **kwargs)
        output = signature.bind(*args, **kwargs).arguments["generator_output"]
        routes = output.get(_ROUTES)
        mask = training_input.get("router_padding_mask")
        if mask is not None and _all_arrays(routes):
            _mark(mask, routes, _lengths(output["prompt_token_ids"], output["response_ids"]))
        return training_input

    return convert_to_training_input


def _all_arrays(routes: Any) -> bool:
    """Whether there are routes and all are arrays. What else may come, SkyRL 0.4 refuses in its own words."""
    return isinstance(routes, list) and {type(e) for e in routes} == {np.ndarray} and {e.ndim for e in routes} == {3}


def _arrays(routes: Sequence[Any]) -> list[np.ndarray | None]:
    """The ids of each sample. What is no array of ids is refused by others, who say where."""
    arrays = [entry.ids if isinstance(entry, RoutedExperts) else entry for entry in routes]
    return [entry if isinstance(entry, np.ndarray) and entry.ndim == 3 else None for entry in arrays]


def _masked_losses(routes: Sequence[Any], given: dict[str, Any]) -> Any:
    prompts, loss_masks = [len(prompt) for prompt in given["prompts"]], given["loss_masks"]
    if not len(routes) == len(prompts) == len(loss_masks):
        return loss_masks
    return padding.masked_losses(_arrays(routes), prompts, loss_masks)


def _mark(mask: Any, routes: Sequence[Any], lengths: Sequence[int]) -> None:
    """Set ``mask`` bool ``[batch, tokens]`` for the masked rows of left-padded sequences."""
    for i, (ids, length) in enumerate(zip(_arrays(routes), lengths, strict=True)):
        if ids is not None and len(rows := padding.masked_rows(ids)):
            mask[i, mask.shape[1] - length + rows] = True


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
            responses = output["response_ids"]
            lengths = _lengths(output["prompt_token_ids"], responses)
            rows = [len(entry) if entry is not None and of else 0 for entry, of in zip(routes, responses, strict=True)]
            mask = batch.router_padding_mask(rows, lengths, tokens=training_input["sequences"].shape[1])
            _mark(mask, routes, lengths)
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
