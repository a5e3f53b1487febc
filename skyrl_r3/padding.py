"""Rows that are no captured routes: what they hold, and that nothing is trained on them.

They hold topk *distinct* ids: a top-k router never picks one expert twice, and repeated ids make the token counts of an
all-to-all dispatch come out short. The ids walk through all experts seen in the batch instead of repeating
``0..topk-1``, which would send every padding token to the rank that holds the first experts.

A row that the policy has masked (:mod:`skyrl_r3.policy`) is zero in every layer until it becomes padding, so that it
needs no companion on its way through generator and batch, SkyRL's or ours. A row that was never captured looks the
same, and must not be trained on either.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from skyrl_r3 import codec

__all__ = ["fill", "fill_masked", "masked_losses", "masked_rows", "without_masked"]

logger: logging.Logger = logging.getLogger(__name__)

_BLOCK_ROWS = 512


def masked_rows(ids: np.ndarray) -> np.ndarray:
    """Which rows of ``ids`` ``[rows, layers, topk]`` are zero in every layer: no route, if topk is above 1."""
    if not ids.size or ids.shape[2] < 2:
        return np.empty(0, dtype=np.int64)
    # By the last layer first, which routes in nearly every model: to look at all takes as long as to copy them.
    rows = np.flatnonzero((ids[:, -1, 0] | ids[:, -1, 1]) == 0)
    return rows[~ids[rows].any(axis=(1, 2))]


def masked_losses(
    routes: Sequence[np.ndarray | None], prompts: Sequence[int], loss_masks: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """``loss_masks`` without the tokens that were sampled from masked rows; what came in if there are none.

    Args:
        routes: Per sample, ids ``[rows, layers, topk]`` of its leading tokens.
        prompts: Per sample, its number of prompt tokens.
        loss_masks: Per sample, ``[response]``.
    """
    changed = list(loss_masks)
    dropped = {}
    for i, (ids, prompt) in enumerate(zip(routes, prompts, strict=True)):
        if ids is None or not len(rows := masked_rows(ids)):
            continue
        mask = np.array(loss_masks[i])
        targets = rows + 1 - prompt
        mask[targets[(targets >= 0) & (targets < len(mask))]] = 0
        if len(rows) == len(ids):
            mask[:] = 0  # Also of the end-of-sequence token that a generator has put behind them.
        changed[i] = mask.tolist()
        dropped[i] = sum(map(bool, loss_masks[i])) - sum(map(bool, changed[i]))
    if not dropped:
        return loss_masks
    logger.warning(
        "%d tokens are left out of the loss, because the rows that they were sampled from are masked (samples %s)",
        sum(dropped.values()),
        ", ".join(map(str, dropped)),
    )
    return changed


def without_masked(routes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The ids of each sample of a batch, with padding in the rows that are masked; copies where there are any."""
    if not any(len(masked_rows(ids)) for ids in routes):
        return list(routes)
    num_experts = max(max(int(ids.max(initial=0)) + 1, ids.shape[2]) for ids in routes)
    filled, made = 0, []
    for ids in routes:
        if len(masked_rows(ids)):
            # More slots than the ids so far need: padding has an id for each.
            ids = np.array(ids, dtype=np.promote_types(ids.dtype, codec.smallest_dtype(num_experts - 1)))
            filled = fill_masked(ids, filled, num_experts)
        made.append(ids)
    return made


def fill_masked(ids: np.ndarray, filled: int, num_experts: int) -> int:
    """:func:`fill` for the masked rows among ``ids``."""
    rows = masked_rows(ids)
    padding = np.empty((len(rows), *ids.shape[1:]), dtype=ids.dtype)
    filled = fill(padding, filled, num_experts)
    ids[rows] = padding
    return filled


def fill(gap: np.ndarray, filled: int, num_experts: int) -> int:
    """Give each row of ``gap`` [rows, layers, topk] distinct ids, going on round all experts after ``filled`` rows.

    In blocks, because the ids are made as int64 and a gap may be as long as the longest sequence.

    Returns:
        The number of rows filled so far.
    """
    topk = gap.shape[-1]
    for start in range(0, len(gap), _BLOCK_ROWS):
        block = gap[start : start + _BLOCK_ROWS]
        ids = np.arange(filled * topk, (filled + len(block)) * topk) % num_experts
        block[:] = ids.astype(gap.dtype).reshape(-1, 1, topk)
        filled += len(block)
    return filled
