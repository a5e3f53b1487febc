"""What the ids of a reply say about themselves.

The worst faults have a valid dtype and shape: an engine that captured nothing, a layer that another wrote over, ids of
physical slots. A top-k router picks k different experts of those it has, so that much can be seen. What cannot: rows
that were computed again under other weights, or left over from another request in the same slot.

Looking has to cost next to nothing, because a client reads every reply in one event loop. The range is checked of
every id; the rest of evenly spaced rows: the first two ids of a row against each other in :data:`LOOKED_AT` rows, all
of them in :data:`COMPARED`, and each :data:`RUN` rows once a row against its neighbour. Faults come in runs and in
whole layers. Where a look finds something, all rows are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from skyrl_r3.errors import RoutesError
from skyrl_r3.spec import RouteSpec

__all__ = ["COMPARED", "LOOKED_AT", "RUN", "Finding", "check_shape", "find"]

LOOKED_AT = 2048
COMPARED = 64
RUN = 16
"""Equal rows one after the other that are a finding: as many as a block of vLLM's cache has."""

_MOST_RANGES = 8
"""Of layers, in an error."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the ids of a reply.

    Attributes:
        error: What, as an error. Its ``kind`` is the finding's.
        rows: bool ``[rows]``, those that it is true of.
    """

    error: RoutesError
    rows: np.ndarray


def check_shape(ids: np.ndarray, spec: RouteSpec) -> None:
    """Check that ids ``[rows, layers, topk]`` have the layers and the top-k of the model, or of the turns before.

    Raises:
        RoutesError: They have not.
    """
    for name, size, known in (("layers", ids.shape[1], spec.layers), ("topk", ids.shape[2], spec.topk)):
        if len(ids) and known is not None and size != known:
            expected, got = f"{known} {name}, as the model has", f"{size} in {list(ids.shape)}"
            raise RoutesError("routed_experts.shape", kind="shape", expected=expected, got=got)


def find(ids: np.ndarray, spec: RouteSpec, *, first: int = 0, prompt: int | None = 0) -> Iterator[Finding]:
    """Look for ids that no router can have picked.

    Args:
        ids: ``[rows, layers, topk]``, as the codec decodes them.
        spec: The model's. What is unknown in it is not checked.
        first: The token that the first row belongs to.
        prompt: Length of the prompt, to say where something was found; None where unknown.

    Yields:
        One finding for each kind.
    """
    if not ids.size:
        return
    layers = _layers_that_route(ids, spec)

    def finding(kind: str, expected: str, got: str, wrong: Any, layers: Sequence[int], hint: str = "") -> Finding:
        """``wrong`` is bool ``[rows, layers]``, ``layers`` which these are."""
        rows = wrong.any(axis=1)
        where = _place(np.flatnonzero(rows) + first, len(ids), prompt)
        where += f", in {_ranges([layers[i] for i in np.flatnonzero(wrong.any(axis=0))])}"
        error = RoutesError("routed_experts", kind=kind, expected=expected, got=got, where=where, hint=hint)
        return Finding(error, rows)

    count = spec.num_experts
    if count and np.iinfo(ids.dtype).max >= count and int(ids.max()) >= count:
        wrong = (ids >= count).any(axis=2)
        hint = "Physical slots, as expert load balancing has them, are no experts."
        got = str(int(ids[wrong].max()))
        yield finding("out_of_range", f"ids below {count}", got, wrong, range(ids.shape[1]), hint)
    equal: Any = np.zeros((len(ids), 1), dtype=bool)
    if ids.shape[2] > 1 and _repeats(ids, layers):
        routed = _sliced(ids, layers)
        equal = (routed == routed[..., :1]).all(axis=2)
        if equal.any():
            what = int(routed[equal][0, 0])
            hint = "" if what else "The engine captured nothing there: some MoE kernels pass vLLM's recorder by."
            yield finding("all_equal", "different experts", f"{what}, {ids.shape[2]} times", equal, layers, hint)
        ordered = np.sort(routed, axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2) & ~equal
        if twice.any():
            yield finding("repeated", "different experts", str(routed[twice][0].tolist()), twice, layers)
    # Where all experts are picked each time, rows are alike.
    if spec.num_experts != ids.shape[2] and _stands_still(ids[:, layers[-1]]):
        same: Any = (ids[1:] == ids[:-1]).all(axis=(1, 2))
        rows = _runs(same) & ~equal.any(axis=1)  # Those are told already.
        if rows.any():
            wrong = np.broadcast_to(rows[:, None], ids.shape[:2])
            got, expected = f"{int(rows.sum())}", f"less than {RUN} rows that are as their neighbours"
            yield finding("identical_rows", expected, got, wrong, range(ids.shape[1]))


def _layers_that_route(ids: np.ndarray, spec: RouteSpec) -> list[int]:
    """Dense layers are all zero by design. Where it is unknown which they are, they are those that are all zero here.

    Unless every layer is: a model has to route somewhere.
    """
    layers = ids.shape[1]
    if spec.moe_layers and spec.moe_layers[0] < layers:
        return [layer for layer in spec.moe_layers if layer < layers]
    some: Any = _spaced(ids, LOOKED_AT)[:, :, :2].any(axis=0)
    return np.flatnonzero(some.any(axis=1)).tolist() or list(range(layers))


def _spaced(ids: np.ndarray, rows: int) -> np.ndarray:
    return ids[:: -(-len(ids) // rows)]


def _sliced(ids: np.ndarray, layers: list[int]) -> np.ndarray:
    """``ids`` of these layers. A view where they follow each other, as they do in most models."""
    if layers[-1] - layers[0] == len(layers) - 1:
        return ids[:, layers[0] : layers[-1] + 1]
    return ids[:, layers]


def _repeats(ids: np.ndarray, layers: list[int]) -> bool:
    """Whether an id is twice in a row of one of ``layers``, as far as is looked at."""
    some = _sliced(_spaced(ids, LOOKED_AT), layers)
    if (some[..., 0] == some[..., 1]).any():
        return True
    # By slot: to sort the ids of each row takes 4 times as long.
    slots = np.ascontiguousarray(np.moveaxis(_spaced(some, COMPARED), 2, 0))
    return any((slots[distance:] == slots[:-distance]).any() for distance in range(1, len(slots)))


def _stands_still(ids: np.ndarray) -> bool:
    """Whether there may be a run of equal rows in ``ids`` ``[rows, topk]``: each run holds one of these pairs."""
    pairs = np.arange(0, len(ids) - 1, RUN - 1)
    pairs = pairs[ids[pairs, 0] == ids[pairs + 1, 0]]
    return bool((ids[pairs] == ids[pairs + 1]).all(axis=1).any())


def _runs(same: np.ndarray) -> np.ndarray:
    """bool ``[rows]``: which rows are in a run of at least :data:`RUN` equal ones.

    Args:
        same: bool ``[rows - 1]``, whether a row is followed by its like.
    """
    rows = np.zeros(len(same) + 1, dtype=bool)
    borders = np.flatnonzero(np.diff(same.astype(np.int8), prepend=0, append=0))
    for begin, end in borders.reshape(-1, 2):
        rows[begin : end + 1] |= end - begin >= RUN - 1
    return rows


def _place(bad: np.ndarray, rows: int, prompt: int | None) -> str:
    """The first of the tokens ``bad``, and how many they are of ``rows``, in which region."""
    place = f"row {int(bad[0])}, {len(bad)} of {rows} rows"
    if prompt is None:
        return place
    generated = int((bad >= prompt).sum())
    region = "prompt" if not generated else "response" if generated == len(bad) else "prompt and response"
    return f"{place}, of the {region}"


def _ranges(layers: list[int]) -> str:
    """As "layers 0 to 2, 5"."""
    breaks = [-1, *(i for i, (a, b) in enumerate(pairwise(layers)) if b != a + 1), len(layers) - 1]
    parts = [(layers[a + 1], layers[b]) for a, b in pairwise(breaks)]
    text = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts[:_MOST_RANGES])
    text += f" and {len(parts) - _MOST_RANGES} more ranges" if len(parts) > _MOST_RANGES else ""
    return f"layer{'s' if len(layers) > 1 else ''} {text}"
