"""What becomes of a sample whose routes are wrong.

A policy names an action for each kind of finding:

- ``error``: raise it, and so end the run.
- ``mask``: the rows it is true of become padding, and the tokens that were sampled from them leave the loss. Where no
  row can be trusted, that is the whole sample. Other samples are not touched.
- ``count``: only count it. The routes go on as they are.

Whatever the action, it is counted in ``skyrl_r3.metrics``. ``SKYRL_R3_CHECKS`` sets the policy: ``off`` looks at no
ids, one action is that of every kind that has it, and ``kind=action,kind=action`` changes some.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from skyrl_r3 import checks, codec, metrics
from skyrl_r3.errors import BrokenRoutesError, OverlayError, RoutesError
from skyrl_r3.reply import Reply

__all__ = ["ACTIONS", "DEFAULTS", "VARIABLE", "changed", "current", "parse", "settle", "use"]

logger: logging.Logger = logging.getLogger(__name__)

VARIABLE = "SKYRL_R3_CHECKS"
ERROR, MASK, COUNT = "error", "mask", "count"

_OF_THE_REPLY = (ERROR, MASK)
_OF_ROWS = (ERROR, MASK, COUNT)
ACTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "missing": _OF_THE_REPLY,
        "broken": _OF_THE_REPLY,
        "prompt": _OF_THE_REPLY,
        "rows": _OF_THE_REPLY,
        "shape": _OF_THE_REPLY,
        "out_of_range": _OF_THE_REPLY,
        "all_equal": _OF_ROWS,
        "repeated": _OF_ROWS,
        "identical_rows": _OF_ROWS,
        "changed": (ERROR, COUNT),
    }
)
"""The kinds of findings, and what can be done about each.

Of the whole reply: tokens but no routes, routes that cannot be decoded, another prompt than was sent, another number of
rows, other layers or top-k. Of rows: an id of no expert, which nobody can replay; one id all along a row, in a layer
that routes (0, where nothing was captured); an id twice in a row; 16 equal rows one after the other; other ids than the
trajectory holds.
"""

DEFAULTS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(ACTIONS, ERROR) | {"identical_rows": COUNT, "changed": COUNT}
)
"""Equal rows may be those of a response that repeats itself, and an engine that computes a prompt again may route it
otherwise. Nothing else of these can come from a router.
"""


def parse(text: str) -> dict[str, str] | None:
    """The policy that ``text`` describes; None for ``off``.

    Raises:
        OverlayError: It describes none.
    """
    if text.strip().lower() in ("off", "0", "false", "no"):
        return None
    policy = dict(DEFAULTS)
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, equals, action = (item.strip() for item in part.rpartition("="))
        if not equals and action in _OF_ROWS:
            policy |= {kind: action for kind, actions in ACTIONS.items() if action in actions}
        elif action in ACTIONS.get(kind, ()):
            policy[kind] = action
        else:
            known = "; ".join(f"{kind}={'|'.join(actions)}" for kind, actions in ACTIONS.items())
            raise OverlayError(VARIABLE, expected=f"off, error, mask, count or some of {known}", got=repr(part))
    return policy


_UNSET: dict[str, str] = {}
_current: dict[str, str] | None = _UNSET
_warned: set[str] = set()
_shape: tuple[int, int] | None = None
"""[layers, topk] of the last right reply, for one that has no routes and comes from a server that does not tell."""


def use(text: str | None) -> None:
    """Set the policy of this process; None for that of the environment."""
    global _current
    _current = _UNSET if text is None else parse(text)


def current() -> dict[str, str] | None:
    """The policy of this process. Read from the environment once."""
    global _current
    if _current is _UNSET:
        _current = parse(os.environ.get(VARIABLE, ""))
    return _current


def settle(
    read: Callable[[], tuple[Reply, str]], *, prompt: int, start: int = 0, held: np.ndarray | None = None
) -> tuple[Reply, str, np.ndarray]:
    """Read a reply and its routes, and do what the policy says about what is wrong with them.

    Args:
        read: Gives the reply and its encoding.
        prompt: Length of the prompt that was sent.
        start: The ``routed_experts_prompt_start`` that was sent.
        held: ids of the rows before it, if they are at hand. Then their number is the start.

    Returns:
        The reply, without routes if none can be used; its encoding; and ids ``[rows, layers, topk]`` as
        :meth:`Reply.routes_for` has them. Rows that are masked are zero in every layer, which no route is;
        :mod:`skyrl_r3.padding` makes padding of them.

    Raises:
        ReplyError: Not a reply, or what the policy has as an error.
    """
    global _shape
    reply, encoding = None, "broken"
    start = start if held is None else len(held)
    try:
        reply, encoding = read()
        ids = reply.routes_for(prompt=prompt, start=start)
        if not len(reply.token_ids):
            # A request that was aborted before its first token trains nothing, whatever it captured.
            return reply, encoding, ids
        spec = reply.spec if held is None else replace(reply.spec, layers=held.shape[1], topk=held.shape[2])
        checks.check_shape(ids, spec)
        first = prompt + len(reply.token_ids) - 1 - len(ids)
        found = list(checks.find(ids, spec, first=first, prompt=prompt)) if current() is not None else []
    except RoutesError as error:
        reply = error.reply if isinstance(error, BrokenRoutesError) else reply
        if reply is None:
            raise
        if error.kind != "missing":  # Which says so itself.
            error = error.at(f"finish_reason {reply.finish_reason!r}")
        _act(error)
        return replace(reply, routed_experts=None), encoding, _no_routes(reply, error, prompt, start, held)
    bad = np.zeros(len(ids), dtype=bool)
    for finding in found:
        error = finding.error.at(f"finish_reason {reply.finish_reason!r}")
        if _act(error) == MASK and _maskable(ids.shape[2], error):
            bad |= finding.rows
    if ids.size:
        _shape = (ids.shape[1], ids.shape[2])
    if not bad.any():
        metrics.load(ids, reply.spec.num_experts)
        return reply, encoding, ids
    metrics.load(ids[~bad], reply.spec.num_experts)
    metrics.add("rows_masked", int(bad.sum()))
    ids = np.array(ids)  # A frame's is read-only.
    ids[bad] = 0
    return reply, encoding, ids


def changed(held: np.ndarray, again: np.ndarray) -> None:
    """Count the rows that a trajectory holds, and that came again with other ids.

    Args:
        held: ids ``[rows, layers, topk]``.
        again: The same rows as they came.
    """
    if current() is None or not len(again):
        return
    # What is masked on either side is not comparable.
    rows = (held != again).any(axis=(1, 2)) & held.any(axis=(1, 2)) & again.any(axis=(1, 2))
    if rows.any():
        got = f"{int(rows.sum())} of {len(rows)} with others, the first is row {int(np.argmax(rows))}"
        _act(RoutesError("routed_experts", kind="changed", expected="the ids that the turns before had", got=got))


def _act(error: RoutesError) -> str:
    """Count ``error``, and do what the policy says: raise it, or say once that such things are only counted."""
    action = (current() or DEFAULTS)[error.kind]
    metrics.add("findings", kind=error.kind)
    if action == ERROR:
        raise error
    if error.kind not in _warned:
        _warned.add(error.kind)
        done = "masked" if action == MASK else "let through"
        logger.warning("%s (%s and counted, and so is what follows of its kind, %s)", error, done, error.kind)
    return action


def _no_routes(reply: Reply, error: RoutesError, prompt: int, start: int, held: np.ndarray | None) -> np.ndarray:
    """Rows that are all masked, for a sample of which no row can be trusted."""
    if not len(reply.token_ids):
        return np.empty((0, 0, 0), dtype=np.uint8)
    spec, shape = reply.spec, _shape
    if held is not None:
        shape = held.shape[1:]
    elif spec.layers is not None and spec.topk is not None:
        shape = (spec.layers, spec.topk)
    rows = prompt + len(reply.token_ids) - 1 - start
    # Nobody has said yet what routes look like, or what was said is no more than a claim.
    if shape is None or not 0 < math.prod(shape) * rows <= codec.MAX_BYTES or not _maskable(shape[1], error):
        raise error
    metrics.add("rows_masked", rows)
    return np.zeros((rows, *shape), dtype=np.uint8)


def _maskable(topk: int, error: RoutesError) -> bool:
    """Whether rows can be masked. Zero is how a masked row travels, and with one expert a token it may be a route.

    Raises:
        RoutesError: ``error``, if that is no less than an error by default.
    """
    if topk < 2 and DEFAULTS[error.kind] == ERROR:
        raise error
    return topk > 1
