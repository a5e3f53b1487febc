"""The figures that the package is held to, and what a run says about them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]

SHAPE = "48x8 of 128"
IN_FLIGHT = 32


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target and what this run measured.

    Attributes:
        what: The target in words.
        limit: What is to be reached; at least that where ``at_least``, else at most.
        value: What was measured; None where it was not.
        unit: Of both.
        note: The cell, or why there is no value.
    """

    what: str
    limit: float
    at_least: bool
    value: float | None
    unit: str
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether it is; None where it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        """In words, with the distance to the limit in percent of it."""
        if self.value is None:
            return "not measured"
        return f"{'reached' if self.reached else 'missed'} by {abs(self.value / self.limit - 1):.0%}"


def milliseconds(seconds: Sequence[float]) -> Row:
    """Median and spread of repeats."""
    ms = [1000 * value for value in seconds]
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms)}


def stalls(samples_ms: Sequence[float]) -> Row:
    """Percentiles of how late a callback would have been that was due at any moment, from the probe's lateness.

    Of time and not of probes: a stall of 1 s is one late probe, because there is no other meanwhile, so that the
    slower a side, the fewer of its probes are late.
    """
    late = np.asarray(samples_ms)
    counts = np.maximum(np.ceil(late), 1).astype(np.int64)  # Probes that should have been, one each millisecond.
    after_ms = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    p50, p99 = (float(value) for value in np.percentile(np.repeat(late, counts) - after_ms, (50, 99)))
    return {"p50": p50, "p99": p99, "max": float(late.max()), "samples": len(late)}


def judge(rows: Sequence[Row], preprocessing: Row) -> list[Verdict]:
    """Every target, from the measured ``rows`` and the ``preprocessing`` section of one run."""
    measured = [row for row in rows if "median_ms" in row]
    return [*_against_stock(measured), *_against_bare(measured), *_stalls(measured), *_preprocessing(preprocessing)]


def _against_stock(rows: list[Row]) -> Iterator[Verdict]:
    def compare(what: str, ours: str, stock: str, tokens: int, limit: float, route: str) -> Verdict:
        value = _ratio(rows, stock, ours, "median_ms", SHAPE, tokens, route)
        return Verdict(what=what, limit=limit, at_least=True, value=value, unit="x faster", note=_cell(tokens, route))

    tokens = 16_384
    yield compare("frame against stock 0.3", "frame-0.3", "stock-0.3", tokens, 1000, "direct")
    share = _ratio(rows, "frame-0.3", "stock-0.3", "reply_bytes", SHAPE, tokens, "direct")
    value, note = None if share is None else 100 * share, _cell(tokens, "direct")
    yield Verdict(
        what="frame against stock 0.3", limit=30, at_least=False, value=value, unit="% of the bytes", note=note
    )
    for route in ("direct", "router"):
        yield compare("frame against stock 0.4", "frame-0.4", "stock-0.4", 32_768, 5, route)
        yield compare("packed against stock 0.4", "packed-0.3", "stock-0.4", 32_768, 1.5, route)


def _against_bare(rows: list[Row]) -> Iterator[Verdict]:
    """The worst cell each, because the target is for every shape."""
    for line in ("0.3", "0.4"):
        for route in ("direct", "router"):
            cells = [row for row in rows if row["side"] == f"frame-{line}" and row["route"] == route]
            for in_flight in sorted({row["in_flight"] for row in cells}) or [1]:
                found: list[tuple[float, str]] = []
                for row in cells:
                    if row["in_flight"] == in_flight:
                        at = (row["shape"], row["tokens"], route, in_flight)
                        ratio = _ratio(rows, f"frame-{line}", f"bare-{line}", "median_ms", *at)
                        if ratio is not None:
                            found.append((ratio, f"{row['tokens']:,} x {row['shape']}"))
                what = f"frame on {line} against a bare fetch, {_where(route, in_flight)}"
                worst, cell = max(found, default=(None, "no cell"))
                kept = sum(ratio <= 1.5 for ratio, _ in found)
                note = f"worst of {len(found)} cells ({kept} reach it): {cell}" if found else cell
                yield Verdict(what=what, limit=1.5, at_least=False, value=worst, unit="x its time", note=note)


def _stalls(rows: list[Row]) -> Iterator[Verdict]:
    for line in ("0.3", "0.4"):
        for route in ("direct", "router"):
            row = _find(rows, f"frame-{line}", SHAPE, 32_768, route, IN_FLIGHT)
            bare = _find(rows, f"bare-{line}", SHAPE, 32_768, route, IN_FLIGHT)
            note = _cell(32_768, route, IN_FLIGHT) + (f" (a bare fetch: {bare['stall_ms']['p99']:.0f})" if bare else "")
            yield Verdict(
                what=f"event loop of a client, frame on {line}, 99th percentile of stalls",
                limit=20,
                at_least=False,
                value=row["stall_ms"]["p99"] if row else None,
                unit="ms",
                note=note,
            )


def _preprocessing(found: Row) -> Iterator[Verdict]:
    ours, stock = found.get("overlay"), found.get("stock")
    against_copy = against_stock = whole = None
    if ours and (part := routes_part(ours)) > 0:  # A difference of large times: what is left may be their noise.
        against_copy = part / statistics.median(ours["copy"])
        against_stock = routes_part(stock) / part if stock else None
    if ours and stock:
        whole = statistics.median(stock["whole"]) / statistics.median(ours["whole"])
    note = found.get("what", "not run")
    what = "preprocessing, the routes' part, against a copy of their tensor"
    yield Verdict(what=what, limit=2, at_least=False, value=against_copy, unit="x its time", note=note)
    for what, value in (("the routes' part", against_stock), ("the whole function", whole)):
        what = f"preprocessing, {what}, against stock 0.3"
        yield Verdict(what=what, limit=100, at_least=True, value=value, unit="x faster", note=note)


def routes_part(side: Row) -> float:
    """Seconds of a call that the call without routes right after it did not take, median."""
    return statistics.median(a - b for a, b in zip(side["whole"], side["without_routes"], strict=True))


def _find(rows: Sequence[Row], side: str, shape: str, tokens: int, route: str, in_flight: int = 1) -> Row | None:
    wanted = {"side": side, "shape": shape, "tokens": tokens, "route": route, "in_flight": in_flight}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def _ratio(rows: Sequence[Row], above: str, below: str, what: str, *cell: Any) -> float | None:
    """``what`` of side ``above`` through that of side ``below``; None where one of them was not measured."""
    a, b = _find(rows, above, *cell), _find(rows, below, *cell)
    return a[what] / b[what] if a and b else None


def _cell(tokens: int, route: str, in_flight: int = 1) -> str:
    return f"{tokens:,} x {SHAPE}, {_where(route, in_flight)}"


def _where(route: str, in_flight: int) -> str:
    return f"{'through the router' if route == 'router' else 'direct'}, {in_flight} in flight"
