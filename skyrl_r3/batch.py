"""Routes of a batch -> the training tensor and its padding mask.

The tensor is ``[batch, tokens, layers, topk]``, left-padded as SkyRL lays out sequences, in the smallest dtype that
holds the batch. Every row is written once, straight into the final buffer.

Rows without a captured route (left padding, the last sampled token, a synthetic end-of-sequence token, rows that the
policy has masked) hold what :mod:`skyrl_r3.padding` puts there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skyrl_r3 import codec, padding
from skyrl_r3.codec import smallest_dtype
from skyrl_r3.errors import CodecError, RouteError, describe
from skyrl_r3.routes import RoutedExperts

__all__ = ["pad_routes", "router_padding_mask"]

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger(__name__)

_FIELD = "rollout_expert_indices"


def pad_routes(
    routes: Sequence[RoutedExperts | np.ndarray | None],
    sequences: torch.Tensor,
    lengths: Sequence[int],
    loss_masks: Sequence[Sequence[float]],
) -> torch.Tensor | None:
    """Lay the routes of a batch out as the training tensor.

    Args:
        routes: Per sample, rows ``[rows, layers, topk]`` of its leading tokens. :class:`RoutedExperts` are checked
            against the sample's tokens; a plain array, which names no tokens, is only checked for what it holds.
        sequences: Token ids ``[batch, tokens]``, left-padded.
        lengths: Per sample, its number of tokens, prompt and response.
        loss_masks: Per sample, ``[response]``, which of its tokens count in the loss. Where more of them than the last
            one do, the sample must have routes. Those that have none are counted in a warning. A sample without a
            response has no routes, whatever was captured of its prompt.

    Returns:
        ids ``[batch, tokens, layers, topk]`` (uint8, int16 or int32), or None where no sample has a route and none
        is trained on.

    Raises:
        RouteError: Names the sample: not an array, another dtype or [layers, topk] than the batch, no rows, more rows
            than tokens, or rows that were captured for other tokens.
    """
    import torch

    batch, tokens = sequences.shape
    if not len(routes) == len(lengths) == len(loss_masks) == batch:
        got = f"{len(routes)} with {len(lengths)} lengths and {len(loss_masks)} masks"
        raise RouteError(_FIELD, expected=f"{batch} entries, one for each sequence", got=got)
    # What was captured for a request that was aborted before its first token is nothing to go by, and nobody has looked
    # at it.
    routes = [entry if len(mask) else None for entry, mask in zip(routes, loss_masks, strict=True)]
    arrays = [_checked_array(entry, i) for i, entry in enumerate(routes)]
    uncovered = [0] * batch
    for i, (ids, length) in enumerate(zip(arrays, lengths, strict=True)):
        if not 0 <= length <= tokens:
            raise RouteError(f"lengths[{i}]", expected=f"0 to {tokens} tokens", got=str(length), where=_sample(i))
        rows = 0 if ids is None else len(ids)
        if rows > length:
            raise RouteError(f"{_FIELD}[{i}]", expected=f"at most {length} rows", got=f"{rows}", where=_sample(i))
        uncovered[i] = _trained_without_route(loss_masks[i], length, rows)
        if uncovered[i] and not rows:
            hint = "A generator has returned no routes for a sample that is trained on."
            raise RouteError(f"{_FIELD}[{i}]", expected="captured routes", got="none", where=_sample(i), hint=hint)
    if any(uncovered):
        logger.warning(
            "%d trained tokens have no captured route (samples %s): their rows are made up, and marked as padding",
            sum(uncovered),
            ", ".join(str(i) for i, count in enumerate(uncovered) if count),
        )
    captured = [ids for ids in arrays if ids is not None]
    if not captured:
        return None
    _check_one_shape(arrays, captured[0].shape[1:])

    layers, topk = captured[0].shape[1:]
    num_seen = max(int(max(ids.max(initial=0) for ids in captured)) + 1, topk)
    dtype = smallest_dtype(num_seen - 1)
    tensor = torch.empty((batch, tokens, layers, topk), dtype=getattr(torch, dtype.name))
    out = tensor.numpy()
    sequence_ids = sequences.numpy()
    filled = 0
    for i, (ids, entry, length) in enumerate(zip(arrays, routes, lengths, strict=True)):
        start = tokens - length
        end = start if ids is None else start + len(ids)
        if ids is not None:
            if isinstance(entry, RoutedExperts):
                _check_tokens(entry, sequence_ids[i, start:], i)
            out[i, start:end] = ids
            filled = padding.fill_masked(out[i, start:end], filled, num_seen)
        for gap in (out[i, :start], out[i, end:]):
            filled = padding.fill(gap, filled, num_seen)
    return tensor


def router_padding_mask(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> torch.Tensor:
    """Which rows of the training tensor are not captured routes.

    The name and meaning are those of SkyRL 0.4.0's batch entry.

    Args:
        rows: Per sample, its number of captured rows.
        lengths: Per sample, its number of tokens, prompt and response.
        tokens: Length of the left-padded sequences.

    Returns:
        bool ``[batch, tokens]``, True where there is no captured route.
    """
    import torch

    starts = tokens - torch.tensor(list(lengths)).unsqueeze(1)
    position = torch.arange(tokens).unsqueeze(0)
    return (position < starts) | (position >= starts + torch.tensor(list(rows)).unsqueeze(1))


def _trained_without_route(loss_mask: Sequence[float], length: int, rows: int) -> int:
    """How many trained tokens follow a token that has no route, so that their logits are not those of the rollout.

    The last token does not count: where it is a synthetic end-of-sequence token, the one before it was sampled last and
    has no route either.
    """
    first_response = length - len(loss_mask)
    return int(sum(1 for weight in loss_mask[max(rows + 1 - first_response, 0) : -1] if weight))


def _sample(index: int) -> str:
    return f"sample {index}"


def _checked_array(entry: object, index: int) -> np.ndarray | None:
    """The ids of one sample, or None where nothing was captured: SkyRL's generator leaves an empty list there."""
    if entry is None or (isinstance(entry, RoutedExperts | list) and not len(entry)):
        return None
    if isinstance(entry, RoutedExperts):
        return entry.ids
    field, where = f"{_FIELD}[{index}]", _sample(index)
    try:
        codec.check(entry)
    except CodecError as error:
        suffix = error.field.removeprefix("routed_experts")
        raise RouteError(field + suffix, expected=error.expected, got=error.got, where=where) from error
    assert isinstance(entry, np.ndarray)
    if not entry.size:
        raise RouteError(field, expected="at least one row, layer and expert", got=describe(entry), where=where)
    return entry


def _check_one_shape(arrays: Sequence[np.ndarray | None], shape: tuple[int, ...]) -> None:
    for i, ids in enumerate(arrays):
        if ids is not None and ids.shape[1:] != shape:
            raise RouteError(
                f"{_FIELD}[{i}].shape",
                expected=f"[layers, topk] = {list(shape)} as in the rest of the batch",
                got=str(list(ids.shape[1:])),
                where=_sample(i),
            )


def _check_tokens(entry: RoutedExperts, token_ids: np.ndarray, index: int) -> None:
    same = entry.common_prefix(token_ids)
    if same < len(entry):
        raise RouteError(
            f"{_FIELD}[{index}]",
            expected=f"the route of token {int(token_ids[same])} in row {same}",
            got=f"that of token {int(entry.token_ids[same])}",
            where=_sample(index),
            hint="These routes were captured for other tokens than the sample holds: something has moved samples "
            "without their routes.",
        )
