"""Which sides are measured, and in which cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_r3 import frame, packed
from skyrl_r3.bench import targets
from skyrl_r3.bench.cases import SHAPES, Case

_SLOW_TOKENS, _SLOW_TOKENS_FULL = 16_384, 131_072
"""Of all replies in flight, the most that stock SkyRL 0.3 is asked for. It takes 0.75 ms a token of 48 layers, and in
each process a list for each token and layer."""


@dataclass(frozen=True)
class Side:
    """One way for a reply. ``encodings`` are what the overlay asks for; None for a bare fetch."""

    key: str
    label: str
    line: str
    overlay: bool
    encodings: tuple[str, ...] | None
    content_type: str
    slow: bool = False


_JSON, _BYTES = "application/json", "application/octet-stream"
SIDES = (
    Side("stock-0.3", "stock", "0.3", False, (), _JSON, slow=True),
    Side("stock-0.4", "stock", "0.4", False, (), _JSON),
    Side("packed-0.3", "packed on", "0.3", True, (packed.PACKED,), _JSON),
    Side("frame-0.3", "frame on", "0.3", True, (frame.FRAME,), frame.CONTENT_TYPE),
    Side("frame-0.4", "frame on", "0.4", True, (frame.FRAME,), frame.CONTENT_TYPE),
    Side("bare-0.3", "bare fetch on", "0.3", True, None, _BYTES),
    Side("bare-0.4", "bare fetch on", "0.4", True, None, _BYTES),
)
"""A bare fetch comes after the frame whose bytes it has, from the same server to the same client's HTTP session."""


@dataclass(frozen=True)
class Cell:
    """What all sides are asked for in turn."""

    case: Case
    route: str
    in_flight: int

    def __str__(self) -> str:
        return f"{self.case.tokens:,} x {self.case.shape}, {self.route}, {self.in_flight} in flight"


def cells(tokens: Sequence[int], *, router: bool, full: bool) -> Iterator[Cell]:
    """The cells. 32 replies are in flight for the longest only, unless ``full``."""
    for shape in SHAPES:
        for count in sorted(set(tokens)):
            for route in ("direct", "router") if router else ("direct",):
                yield Cell(Case(count, *shape), route, 1)
                if full or count == max(tokens):
                    yield Cell(Case(count, *shape), route, targets.IN_FLIGHT)


def why_not(side: Side, cell: Cell, *, full: bool) -> str:
    """Why ``side`` is not measured in ``cell``, though it could be; empty where it is."""
    if not side.slow:
        return ""
    if cell.case.tokens * cell.in_flight > (_SLOW_TOKENS_FULL if full else _SLOW_TOKENS):
        return "too slow"
    return "" if full or (cell.route, cell.in_flight) == ("direct", 1) else "too slow"
