"""The run: every side of every cell in turn, checked, timed and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl_r3 import frame
from skyrl_r3.bench import environments, plan, preprocess, processes, targets
from skyrl_r3.bench.cases import SHAPES, Case
from skyrl_r3.bench.pipe import BenchError
from skyrl_r3.bench.plan import Cell, Side
from skyrl_r3.bench.processes import Pair, Pairs

_CALL_S = 900
_SAMPLES, _REPEATS = 8, {"overlay": 15, "stock": 3}
"""Samples of the batch that is preprocessed, and how often; stock takes a second each time."""

Progress = Callable[[int, int, str], None]
"""Is told how many cells are done, of how many, and what is being done."""


def run(
    pythons: Sequence[str], *, router: str | None, tokens: Sequence[int], repeats: int, full: bool, progress: Progress
) -> dict[str, Any]:
    """Measure, and give back everything that there is to report.

    Args:
        pythons: Interpreters, each with a SkyRL line of its own, vLLM and this package.
        router: The vllm-router, if not the one beside the interpreters.
        tokens: Rows of the replies.
        repeats: Timed calls of each side with one reply in flight; with 32 it is a third of that.
        full: Whether to measure what takes long, too.

    Raises:
        BenchError: No interpreter can be measured, a process failed, or a side delivered something else than the
            engine gave out.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-r3-bench-")))
        progress(0, 1, "looking at the environments")
        found = [environments.look_at(python, folder) for python in pythons]
        lines = environments.by_line(found)
        missing = {side.key: _missing(side.line, found) for side in plan.SIDES if side.line not in lines}
        if not lines:
            raise BenchError("nothing to measure: " + "; ".join(environment["missing"] for environment in found))
        router = router or environments.find_router(pythons)
        progress(0, 1, "starting servers and clients")
        pairs = processes.start(stack, lines, router, folder)
        cells = list(plan.cells(tokens, router=router is not None, full=full))
        rows: list[dict[str, Any]] = []
        for i, cell in enumerate(cells):
            times = repeats if cell.in_flight == 1 else max(1, repeats // 3)
            tell = lambda key, i=i, cell=cell: progress(i, len(cells), f"{cell}: {key}")  # noqa: E731
            rows += measure(cell, pairs, repeats=times, full=full, tell=tell)
        progress(len(cells), len(cells), "preprocessing")
        preprocessing = measure_preprocessing(pairs, tokens=max(tokens))
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": environments.machine(),
        "environments": found,
        "router": router,
        "missing": missing
        | ({} if router else {"router": "no vllm-router beside the interpreters or on the path (--router PATH)"}),
        "rows": rows,
        "preprocessing": preprocessing,
        "targets": [
            asdict(verdict) | {"reached": verdict.reached, "verdict": verdict.verdict}
            for verdict in targets.judge(rows, preprocessing)
        ],
    }


def measure(cell: Cell, pairs: Pairs, *, repeats: int, full: bool, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """All sides of one cell, in turn: one row for each side that there is.

    Raises:
        BenchError: A side delivered something else than the engine gave out, or not in its encoding.
    """
    digest = cell.case.digest()
    about = {"shape": cell.case.shape, "tokens": cell.case.tokens, "route": cell.route, "in_flight": cell.in_flight}
    rows, runs, frame_bytes = [], {}, {}
    for side in plan.SIDES:
        if (pair := pairs.get((side.line, side.overlay))) is None:
            continue
        row: dict[str, Any] = about | {"side": side.key}
        rows.append(row)
        if reason := plan.why_not(side, cell, full=full):
            row["not_run"] = reason
            continue
        tell(side.key)
        runs[side.key] = run = _Run(side, pair, cell, frame_bytes.get(side.line))
        if side.slow:  # Warmed up by a small reply, and its only call is the one that is checked.
            run.call(Cell(Case(256, *astuple(cell.case)[1:]), cell.route, 1))
            processes.prepare(pair, cell.case)
            run.restart()
        run.call(cell, keep=True)
        row["reply_bytes"] = run.check(digest)
        if not side.slow:
            run.restart()
        if side.encodings == (frame.FRAME,):
            frame_bytes[side.line] = row["reply_bytes"]
    for i in range(repeats):
        for run in [*runs.values()][:: -1 if i % 2 else 1]:
            if not run.side.slow:
                tell(run.side.key)
                run.call(cell)
    for row in rows:
        if row["side"] in runs:
            row |= runs[row["side"]].result()
    return rows


class _Run:
    """The calls of one side in one cell, and what they cost each process."""

    def __init__(self, side: Side, pair: Pair, cell: Cell, bare_bytes: int | None) -> None:
        self.side = side
        self._bare_bytes = bare_bytes if side.encodings is None else None
        self._client, self._url, self._processes = pair.client, pair.urls[cell.route], pair.on(cell.route)
        self._in_flight = cell.in_flight
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        self._seconds: list[float] = []
        self._stalls_ms: list[float] = []
        self._bodies: list[dict[str, Any]] = []
        self._cpu_s = dict.fromkeys(self._processes, 0.0)
        self._peak_bytes = dict.fromkeys(self._processes, 0)

    def call(self, cell: Cell, *, keep: bool = False) -> None:
        """One call, with as many replies in flight as ``cell`` has; ``keep`` it for :meth:`check`."""
        for process in self._processes.values():
            process.reset_peak()
        before = {name: process.cpu_s() for name, process in self._processes.items()}
        case, encodings = astuple(cell.case), self.side.encodings
        what = {"case": case, "in_flight": cell.in_flight, "encodings": encodings, "bare_bytes": self._bare_bytes}
        self._client.send(do="call", url=self._url, keep=keep, **what)
        answer = self._client.answer(_CALL_S)
        for name, process in self._processes.items():
            self._cpu_s[name] += process.cpu_s() - before[name]
            self._peak_bytes[name] = max(self._peak_bytes[name], process.peak_bytes())
        self._seconds.append(answer["seconds"])
        self._stalls_ms += answer["stalls_ms"]
        self._bodies += answer["bodies"]

    def check(self, digest: str) -> int:
        """Compare what was kept of the last call with what the engine gave out. Returns the bytes of one reply."""
        self._client.send(do="digests")
        found = self._client.answer(_CALL_S)
        wanted = {"digests": [digest]} if self._bare_bytes is None else {"sizes": [self._bare_bytes]}
        if found != wanted:
            raise BenchError(f"{self.side.key} delivered not what the engine gave out: {found} instead of {wanted}")
        sizes, types = ({body[key] for body in self._bodies} for key in ("bytes", "content_type"))
        if len(self._bodies) != self._in_flight or len(sizes) != 1 or types != {self.side.content_type}:
            got = f"{len(self._bodies)} of the types {types} and sizes {sizes}"
            raise BenchError(f"{self.side.key}: expected {self._in_flight} {self.side.content_type}, got {got}")
        return sizes.pop()

    def result(self) -> dict[str, Any]:
        """What goes into the row. CPU is per reply, memory the most of one call."""
        replies = len(self._seconds) * self._in_flight
        return {
            **targets.milliseconds(self._seconds),
            "seconds": self._seconds,
            "stall_ms": targets.stalls(self._stalls_ms),
            "cpu_ms": {name: 1000 * used / replies for name, used in self._cpu_s.items()},
            "peak_bytes": self._peak_bytes,
        }


def measure_preprocessing(pairs: Pairs, *, tokens: int) -> dict[str, Any]:
    """SkyRL 0.3's preprocessing of one batch, stock and overlay; empty where there is no SkyRL 0.3.

    Raises:
        BenchError: The captured rows of the tensor are not those that went in.
    """
    case = Case(min(4096, tokens), *SHAPES[0])
    found: dict[str, Any] = {}
    for name, overlay in (("overlay", True), ("stock", False)):
        if pair := pairs.get(("0.3", overlay)):
            command = {"repeats": _REPEATS[name], "nested": not overlay}
            pair.client.send(do="preprocess", case=astuple(case), samples=_SAMPLES, **command)
            found[name] = side = pair.client.answer(_CALL_S)
            if side["digest"] != preprocess.expected_digest(case, _SAMPLES):
                raise BenchError(f"preprocessing, {name}: the tensor holds other rows than those that went in")
            found["what"] = f"{_SAMPLES} samples of {case.tokens:,} x {case.shape}"
    return found


def _missing(line: str, found: Sequence[dict[str, Any]]) -> str:
    reasons = [environment["missing"] for environment in found if "missing" in environment]
    return "; ".join([f"no environment with SkyRL {line} (--python PATH)", *reasons])
