"""Compare what two client processes of the demo recorded, bit for bit. Pure functions of arrays; starts nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Run:
    """What one client process wrote: facts by case, and arrays by ``case|kind|index|field``."""

    cases: dict[str, dict[str, Any]]
    arrays: dict[str, np.ndarray]

    @classmethod
    def load(cls, stem: Path) -> Run:
        """Read ``stem.json`` and ``stem.npz``."""
        with np.load(stem.with_suffix(".npz")) as archive:
            return cls(json.loads(stem.with_suffix(".json").read_text()), dict(archive))

    def of(self, case: str) -> dict[str, np.ndarray]:
        """Arrays of one case, without the case in the name."""
        return {key.removeprefix(f"{case}|"): value for key, value in self.arrays.items() if key.startswith(f"{case}|")}


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype, shape and bytes: -0.0 is not 0.0, and a NaN is itself."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def captured_rows(routes: np.ndarray) -> np.ndarray:
    """Which [..., layers, topk] rows hold a route: stock fills the others with zeros, a real one has distinct ids."""
    return np.asarray(routes.any(axis=(-2, -1)))


def rows_with_repeats(routes: np.ndarray, layers: Sequence[int] | None = None) -> int:
    """Number of [topk] rows of [..., layers, topk] in which an id occurs twice, in ``layers`` or all of them."""
    ids = np.sort(routes if layers is None else routes[..., list(layers), :], axis=-1)
    return int((ids[..., 1:] == ids[..., :-1]).any(axis=-1).sum())


def compare_routes(name: str, off: np.ndarray, on: np.ndarray, layers: Sequence[int] | None = None) -> list[str]:
    """Differences between the captured rows of two route arrays [rows, layers, topk] of one sample.

    Uncaptured rows trail, and the overlay need not hold them.
    """
    mask = captured_rows(off)
    count = int(mask.sum())
    if not count or not mask[:count].all():
        return [f"{name}: stock's {len(off)} rows do not begin with captured ones ({count} hold a route)"]
    if rows_with_repeats(off[:count], layers):
        return [f"{name}: stock's captured rows repeat ids, so they are no routes"]
    if len(on) < count or not same_bits(off[:count], on[:count]):
        return [f"{name}: captured rows differ ({count} of {off.shape} off, {on.shape} on)"]
    return []


def compare_training_routes(off: np.ndarray, on: np.ndarray, layers: Sequence[int] | None = None) -> list[str]:
    """Differences between two training tensors [batch, seq, layers, topk]: captured rows equal, the others distinct."""
    if off.dtype != on.dtype or off.shape != on.shape:
        return [f"training routes: {off.dtype} {off.shape} off, {on.dtype} {on.shape} on"]
    mask, found = captured_rows(off), []
    if not mask.any() or rows_with_repeats(off[mask], layers):
        found.append("training routes: stock's captured rows are no routes")
    if not same_bits(off[mask], on[mask]):
        found.append("training routes: captured rows differ")
    if rows_with_repeats(on[~mask], layers):
        found.append("training routes: rows without a captured route repeat an id with the overlay on")
    return found


def keep_first_captures(arrays: dict[str, np.ndarray]) -> int:
    """Put into stock's routes of each trajectory, for each token, the row of the turn that captured it first.

    Stock keeps those of the last turn. vLLM computes what is behind a prompt's last full cache block again, among other
    tokens than before, and now and then rounds to another expert. The overlay keeps the rows that tokens were sampled
    with.

    Returns:
        The number of rows of finished trajectories in which the two differ.
    """
    replies: list[tuple[np.ndarray, np.ndarray]] = []
    keys = [key for key in arrays if key.startswith("reply|") and key.endswith("|routes")]
    for key in sorted(keys, key=lambda key: len(arrays[key])):
        stem = key.removesuffix("routes")
        fed = np.concatenate([arrays[f"{stem}prompt"], arrays[f"{stem}token_ids"]])[:-1]
        arrays[key] = _with_first(replies, arrays[f"{stem}prompt"], arrays[key])
        replies.append((fed, arrays[key]))
    changed = 0
    for key in [key for key in arrays if key.startswith("sample|") and key.endswith("|routes")]:
        stem = key.removesuffix("routes")
        tokens = np.concatenate([arrays[f"{stem}prompt"], arrays[f"{stem}token_ids"]])
        kept = _with_first(replies, tokens, arrays[key])
        changed += int((kept != arrays[key]).any(axis=(1, 2)).sum())
        arrays[key] = kept
        if "tensor|routes" in arrays:
            tensor = arrays["tensor|routes"][int(key.split("|")[1])]
            rows = min(len(kept), len(tokens))
            tensor[len(tensor) - len(tokens) :][:rows] = kept[:rows]
    return changed


def _with_first(replies: list[tuple[np.ndarray, np.ndarray]], tokens: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """``routes`` of ``tokens``, with the rows of the longest of ``replies`` that they go on from."""
    for fed, rows in reversed(replies):
        if len(fed) <= len(tokens) and len(rows) <= len(routes) and np.array_equal(tokens[: len(fed)], fed):
            return np.concatenate([rows, routes[len(rows) :]])
    return routes


JSON = "application/json"
FRAME = "application/vnd.skyrl-r3.frame"
# Route types, overlay off and on, by SkyRL line.
ROUTE_TYPES = {"0.3": ("list", "RoutedExperts"), "0.4": ("ndarray", "ndarray")}


def compare_case(
    case: str, off: Run, on: Run, line: str, *, content_type: str = FRAME, layers: Sequence[int] | None = None
) -> list[str]:
    """Every difference in one case, as sentences; none when the case is equal.

    Args:
        case: Its name in both runs.
        off: The overlay was off.
        on: It was on.
        line: Of SkyRL.
        content_type: Of the replies with the overlay on.
        layers: Those that route, if not all do: the others are all zero.
    """
    left, right = off.of(case), on.of(case)
    if not left or left.keys() != right.keys():
        return [f"{case}: recorded fields differ: {sorted(left.keys() ^ right.keys())[:4]}"]
    found = []
    if line == "0.3":
        off.cases[case]["rows_changed"] = keep_first_captures(left)
    for key in left:
        if key == "tensor|routes":
            found += compare_training_routes(left[key], right[key], layers)
        elif key.startswith("sample|") and key.endswith("|routes"):
            found += compare_routes(key, left[key], right[key], layers)
        elif not same_bits(left[key], right[key]):
            found.append(f"{key}: {left[key].dtype} {left[key].shape} off, {right[key].dtype} {right[key].shape} on")
        elif key.endswith("|routes") and rows_with_repeats(left[key], layers):
            found.append(f"{key}: the replies' rows repeat ids, so they are no routes")
    facts_off, facts_on = off.cases[case], on.cases[case]
    for fact in ("requests", "stop_reasons", "tensor_dtype"):
        if facts_off[fact] != facts_on[fact]:
            found.append(f"{fact}: {facts_off[fact]} off, {facts_on[fact]} on")
    expected = {"content_types": (JSON, content_type)}
    expected |= dict.fromkeys(("reply_route_types", "sample_route_types"), ROUTE_TYPES[line])
    for fact, types in expected.items():
        for state, facts, one in zip(("off", "on"), (facts_off, facts_on), types, strict=True):
            if facts[fact] != [one]:
                found.append(f"{fact}, overlay {state}: expected {one}, got {facts[fact]}")
    if not facts_off["reply_bytes"] or not facts_on["reply_bytes"]:
        found.append("reply bytes: none were counted")
    return [f"{case}: {difference}" for difference in found]


SAMPLED_CASE = "client, sampled"
LONG_CASE = "50 turns"
MOST_ROWS = 1.1
"""Times the rows of the final sequence that 50 turns may send."""


def compare_rows(off: Run, on: Run) -> tuple[str, list[str]]:
    """How many rows the turns of one trajectory sent, and what is wrong with that."""
    final = len(on.of(LONG_CASE)["sample|0|routes"])
    asked = sum(len(ids) for key, ids in off.of(LONG_CASE).items() if key.startswith("reply|") and "|routes" in key)
    sent = on.cases[LONG_CASE]["metrics"].get("r3/rows_captured", 0)
    text = f"{LONG_CASE}, a trajectory of {final} rows in the end: {asked} rows sent with the overlay off, "
    text += f"{sent:.0f} with it on"
    if changed := off.cases[LONG_CASE].get("rows_changed"):
        text += f". The engine routed {changed} rows otherwise when it computed them again; compared are the first ones"
    wrong = [] if final <= sent <= MOST_ROWS * final else [f"{LONG_CASE}: {sent} rows sent for {final}"]
    return text, wrong


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """A plain table: first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for first, *others in [header, ["-" * width for width in widths], *rows]:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _preprocessing(off_ms: float | None, on_ms: float | None) -> list[str]:
    if off_ms is None or on_ms is None:
        return ["-", "-", "-"]
    return [f"{off_ms:.1f}", f"{on_ms:.1f}", f"{off_ms / on_ms:.0f}x"]


def transport_table(off: Run, on: Run, differences: dict[str, list[str]]) -> str:
    """Bytes and milliseconds of each case, off and on."""
    header = ["case", "reply MB off", "on", "size", "generate ms off", "on", "speed", "preprocess ms off", "on"]
    rows = []
    for case, a in off.cases.items():
        b = on.cases[case]
        rows.append(
            [
                case,
                f"{a['reply_bytes'] / 1e6:.2f}",
                f"{b['reply_bytes'] / 1e6:.2f}",
                f"{b['reply_bytes'] / max(a['reply_bytes'], 1):.0%}",
                f"{a['generate_ms']:.0f}",
                f"{b['generate_ms']:.0f}",
                f"{a['generate_ms'] / b['generate_ms']:.1f}x",
                *_preprocessing(a["preprocess_ms"], b["preprocess_ms"]),
                "NOT" if differences[case] else "equal",
            ]
        )
    return format_table([*header, "speed", "equal?"], rows)
