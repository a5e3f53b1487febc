"""Wrong payloads: envelopes, JSON texts and frames after accidents, and a count of how many were tried.

Every accident is made of numbers that hypothesis draws, so that it can shrink them, and what it prints can be pasted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

FED: Counter[str] = Counter()
"""How many corrupted payloads of each kind an implementation was given in this process."""


def fed[T](kind: str, payload: T) -> T:
    """``payload``, counted."""
    FED[kind] += 1
    return payload


# Bytes.

_MEANINGFUL = b'0123456789AZaz+/=[]{}",:-. \n\\#\0\xff'
"""Bytes that mean something to JSON, base64 or a length get further than random ones."""


@st.composite
def bytes_of(draw: st.DrawFn, body: bytes) -> bytes:
    """``body`` after one to three accidents: a flip, a cut, an insertion, a piece sent twice or moved."""
    for _ in range(draw(st.integers(1, 3))):
        at, to = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
        kind = draw(st.sampled_from(["flip", "cut", "end", "insert", "duplicate", "replace", "swap", "zero"]))
        if kind == "flip" and at < len(body):
            body = body[:at] + bytes([body[at] ^ (1 << draw(st.integers(0, 7)))]) + body[at + 1 :]
        elif kind == "cut":
            body = body[:at] + body[to:]
        elif kind == "end":
            body = body[:at]
        elif kind == "insert":
            body = body[:at] + draw(st.binary(min_size=1, max_size=4)) + body[at:]
        elif kind == "duplicate":
            body = body[:to] + body[at:to] + body[to:]
        elif kind == "swap":
            body = body[to:] + body[at:to] + body[:at]
        elif kind == "zero":
            body = body[:at] + bytes(to - at) + body[to:]
        else:
            body = body[:at] + bytes([draw(st.sampled_from(_MEANINGFUL))]) + body[at + 1 :]
    return body


# Texts.

WRONG_LAYERS = [
    "", " ", ",", "-", "0,", ",0", "0,,1", "1-", "-1", "0 ", " 0", "0\n", "+1", "00", "01", "1-1", "0,1", "0-1,2",
    "0-2,2", "0-2,3", "2,0", "3-0", "0,0", "0-3-5", "0--3", "8", "7-8", "0-8", "1.0", "0x1", "1_0", "[0]", "0;2", "all",
    "\uff11", "\u0663", "\u00b2", "9" * 5_000, "0-" + "9" * 20, "12345",
]  # fmt: skip
"""What a frame may not say of which layers route, where there are 8. Each set of layers has one text."""

# Structure.

_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 2**15, 2**31 - 1, 2**31, 2**40, 2**63, 2**64 - 1, -(2**63), 0.5, 7.0,
    -0.0, 1e300, "", "0", "742", "uint8", "int16", "int32", "int64", "uint16", "<i2", "float32", "U8", "I16", "I32",
    "3-60", "0-2,5", "4-2",
    "AAAA", "AA==", "é", "€\U0001f600", "\x00", "\x93NUMPY", [], {}, [0], [[0]], [None], {"data": "AAAA"},
)  # fmt: skip
_NAMES = ("data", "shape", "dtype", "start", "Data", "", "routed_experts", "x_routed_experts", "choices", "#", "é")
_AGAIN = "\N{SECTION SIGN}"
"""Behind a key: it is to be written once more. JSON can say that, and a dict cannot."""


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in ``node``, itself first."""
    found = [path]
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        found += _places(value, (*path, key))
    return found


def _changed(node: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of ``node`` in which what is at ``path`` is what ``change`` makes of it."""
    if not path:
        return change(node)
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _changed(copy[path[0]], path[1:], change)
    return copy


def _accident(node: Any, *, kind: str, leaf: Any, name: str, at: int) -> Any:
    """``node`` after an accident, or ``leaf`` where that accident cannot happen to it."""
    if kind == "deep":
        for level in range(at % 40):
            node = [node] if level % 2 else {name: node}
        return node
    if isinstance(node, dict):
        pairs = list(node.items())
        at %= len(pairs) + 1
        match kind:
            case "drop":
                return dict(pairs[:at] + pairs[at + 1 :])
            case "add":
                return dict([*pairs[:at], (name, leaf), *pairs[at:]])
            case "rename" if at < len(pairs):
                return dict([*pairs[:at], (name, pairs[at][1]), *pairs[at + 1 :]])
            case "twice" if at < len(pairs):
                return {**node, pairs[at][0] + _AGAIN: leaf}
            case "turn":
                return dict(pairs[at:] + pairs[:at])
    if isinstance(node, list):
        at %= len(node) + 1
        match kind:
            case "drop":
                return node[:at] + node[at + 1 :]
            case "add":
                return [*node[:at], leaf, *node[at:]]
            case "twice":
                return node[: at + 1] + node[at:]
            case "turn":
                return node[at:] + node[:at]
    if isinstance(node, str) and kind in ("drop", "add", "turn"):
        at %= len(node) + 1
        return {
            "drop": node[:at] + node[at + 1 :],
            "add": node[:at] + name + node[at:],
            "turn": node[at:] + node[:at],
        }[kind]
    if type(node) is int and kind in ("add", "drop", "turn"):
        return {"add": node + 1, "drop": node - 1, "turn": -node}[kind]
    return leaf


_KINDS = ("value", "drop", "add", "rename", "twice", "turn", "deep")


@st.composite
def structure_of(draw: st.DrawFn, right: Any) -> Any:
    """``right``, as a JSON parser gives it, after one or two accidents: values of another type or size, keys that are
    missing, added, renamed or twice, items in another order, nesting. For :func:`text_of`, if keys may be twice.
    """
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(_places(right)))
        change = partial(
            _accident,
            kind=draw(st.sampled_from(_KINDS)),
            leaf=draw(st.sampled_from(_LEAVES)),
            name=draw(st.sampled_from(_NAMES)),
            at=draw(st.integers(0, 60)),
        )
        right = _changed(right, path, change)
    return right


def without_twice(node: Any) -> Any:
    """``node`` as a parser would read its text: of keys that are there twice, the last value."""
    if isinstance(node, dict):
        return {key.removesuffix(_AGAIN): without_twice(value) for key, value in node.items()}
    return [without_twice(item) for item in node] if isinstance(node, list) else node


@st.composite
def text_of(draw: st.DrawFn, value: Any) -> bytes:
    """``value`` as JSON, in one of several ways to write the same."""
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": "), (" ,", " :")]))
    text = json.dumps(value, separators=separators, ensure_ascii=draw(st.booleans()))
    text = text.replace(_AGAIN + '"', '"').replace(json.dumps(_AGAIN)[1:-1] + '"', '"')
    if draw(st.integers(0, 7)) == 0:
        text = text.replace("/", "\\/")
    return text.encode()
