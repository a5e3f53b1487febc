"""What the report says, as plain tables and pictures; only what there are facts for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from gpu_tests.facts import Facts, Load, Replay
from gpu_tests.pictures import Picture, bars, by_layer, heat_map, significant
from gpu_tests.verdict import count


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows below named columns.

    Attributes:
        columns: Headers, with the unit.
        numeric: Which columns hold numbers, by their headers.
        once: How many of the first columns are said once for the rows below that have the same.
    """

    columns: Sequence[str]
    numeric: Sequence[str]
    rows: Sequence[Sequence[str]]
    once: int = 0

    def lines(self) -> Iterator[list[tuple[str, str, int]]]:
        """Per row its cells, each with its column and the number of rows that it spans."""
        for _, same in groupby(self.rows, key=lambda row: row[: self.once] if self.once else id(row)):
            group = list(same)
            for i, row in enumerate(group):
                said = self.once if i else 0
                spans = [len(group)] * self.once + [1] * (len(row) - self.once)
                yield list(zip(self.columns, row, spans, strict=True))[said:]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        how: How to read it, in one or two sentences.
    """

    title: str
    how: str
    table: Table
    pictures: Sequence[Picture] = field(default=())


def sections(facts: Facts) -> list[Section]:
    """The parts of the report that there are facts for."""
    parts = (_gaps, _agreement, _parities, _transports, _loads, _bench)
    return [section for part in parts for section in part(facts)]


def _named(one: Replay) -> str:
    return f"{one.model}: {one.engine}; trainer {one.trainer}"


def _gaps(facts: Facts) -> Iterator[Section]:
    if not facts.replays:
        return
    rows = []
    for one in facts.replays:
        about = [one.model, one.engine, one.trainer, f"{one.tokens:,}"]
        sides = {"own": one.without, "replayed": one.replayed}
        for routes, gap in sides.items():
            figures = (significant(value) for value in (gap.mean_abs, gap.max_abs, gap.k3))
            rows.append([*about, routes, *figures, _ratio(one.without.mean_abs, gap.mean_abs)])
    numbers = ["tokens", "mean |d|, nats", "max |d|, nats", "k3, nats", "ratio"]
    columns = ["model", "engine", "trainer", "tokens", "routes", *numbers[1:]]
    pictures = []
    for name, what in (("mean_abs", "Mean |d|"), ("k3", "k3")):
        groups = {
            _named(one): {"own routes": getattr(one.without, name), "replayed routes": getattr(one.replayed, name)}
            for one in facts.replays
        }
        pictures.append(
            bars(groups, unit=f"{what}, nats", caption=f"{what} with and without replay, nats: less is better.")
        )
    yield Section(
        title="Logprob gap with and without replay",
        how="d is the trainer's logprob of a sampled token less the engine's, on its own routes or on the replayed; "
        "k3, the mean of exp(d) - 1 - d, estimates KL(engine || trainer). The ratio is mean |d| on its own routes "
        "over that of the line: above 1, replay helps.",
        table=Table(columns=columns, numeric=numbers, rows=rows, once=4),
        pictures=pictures,
    )


def _ratio(without: float, value: float) -> str:
    return significant(without / value) if value else "no gap left" if without else "no gap"


def _agreement(facts: Facts) -> Iterator[Section]:
    replays = [one for one in facts.replays if one.agreement]
    if not replays:
        return
    rows, pictures = [], []
    for one in replays:
        percent = {layer: 100 * share for layer, share in sorted(one.agreement.items())}
        lowest = min(percent, key=lambda layer: percent[layer])
        mean = sum(percent.values()) / len(percent)
        about = [one.model, one.engine, one.trainer]
        rows.append([*about, str(len(percent)), f"{percent[lowest]:.2f}", str(lowest), f"{mean:.2f}"])
        pictures.append(
            by_layer(percent, unit="tokens that agree, %", caption=f"{_named(one)}: agreement by layer, %.")
        )
    numbers = ["layers", "lowest, %", "in layer", "mean, %"]
    yield Section(
        title="Agreement per layer",
        how="The share of tokens for which the trainer, left alone, chooses the same set of experts as the engine did. "
        "What is missing to 100% is what replay puts right. Layers count from 0.",
        table=Table(columns=["model", "engine", "trainer", *numbers], numeric=numbers, rows=rows),
        pictures=pictures,
    )


def _parities(facts: Facts) -> Iterator[Section]:
    if not facts.parities:
        return
    rows = [[one.scenario, one.model, f"{one.replies:,}", f"{one.rows:,}", one.seen] for one in facts.parities]
    columns = ["scenario", "model", "replies", "rows", "conditions"]
    yield Section(
        title="Parity with stock SkyRL",
        how="The same prompts through stock SkyRL and through the overlay. A scenario is listed only if both gave the "
        "same, bit for bit. A row is the routes of one token; counted are those that stock SkyRL sent.",
        table=Table(columns=columns, numeric=["replies", "rows"], rows=rows, once=1),
    )


def _transports(facts: Facts) -> Iterator[Section]:
    if not facts.transports:
        return
    rows = []
    megabytes: dict[str, dict[str, float]] = {}
    milliseconds: dict[str, dict[str, float]] = {}
    for one in facts.transports:
        group = f"{one.case}, {count(one.replies, 'reply', 'replies')}"
        megabytes.setdefault(group, {})[one.encoding] = one.body_bytes / 1e6
        milliseconds.setdefault(group, {})[one.encoding] = one.milliseconds
        size = [f"{one.body_bytes:,}", significant(one.body_bytes / 1e6)]
        what = "generation and transport" if one.generation else "transport"
        rows.append([one.case, one.encoding, f"{one.replies:,}", *size, significant(one.milliseconds), what])
    numbers = ["replies", "bytes", "MB", "time, ms"]
    yield Section(
        title="Bytes and time per encoding",
        how="All replies of a case together: their bodies as they were on the wire (1 MB is 10⁶ bytes), and the time "
        "from the first request to the client's arrays. nested is stock SkyRL 0.3, packed what stock SkyRL 0.4 has, "
        "and frame is skyrl-r3's own. Where generation is in the time, it is most of it.",
        table=Table(columns=["case", "encoding", *numbers, "time of"], numeric=numbers, rows=rows, once=1),
        pictures=[
            bars(megabytes, unit="MB", caption="Bodies on the wire, MB: less is better."),
            bars(milliseconds, unit="ms", caption="From the first request to the client's arrays, ms: less is better."),
        ],
    )


def _loads(facts: Facts) -> Iterator[Section]:
    if not facts.loads:
        return
    rows, pictures = [], []
    for one in facts.loads:
        share = _over_mean(one)
        busiest = share.max(axis=1)
        at = int(busiest.argmax())
        never = int((share == 0).sum())
        figures = [significant(busiest[at]), str(one.layers[at]), significant(float(busiest.mean())), f"{never:,}"]
        rows.append(
            [one.model, one.engine, *(f"{size:,}" for size in share.shape), f"{np.sum(one.counts):,}", *figures]
        )
        unit = "load over the layer's mean"
        pictures.append(
            heat_map(share, one.layers, unit=unit, caption=f"{one.model}, {one.engine}: {unit}, by layer and expert.")
        )
    numbers = [
        "layers",
        "experts",
        "choices",
        "max/mean, highest",
        "in layer",
        "max/mean, mean of layers",
        "never chosen",
    ]
    yield Section(
        title="Expert load",
        how="How often each expert was chosen, over the mean of its layer: 1 is an even load. The last column counts "
        "pairs of layer and expert that no token took; few tokens leave many. The most that there can be is experts "
        "over top-k: one expert that every token takes.",
        table=Table(columns=["model", "engine", *numbers], numeric=numbers, rows=rows),
        pictures=pictures,
    )


def _over_mean(load: Load) -> np.ndarray:
    """float64 [layers, experts].

    Raises:
        ValueError: Not one line of counts for each layer, all of one length, or a layer in which nothing was chosen.
    """
    sizes = {len(counts) for counts in load.counts}
    if len(load.counts) != len(load.layers) or len(sizes) != 1:
        expected = f"{len(load.layers)} lines of one length"
        raise ValueError(f"loads, {load.model}: counts: expected {expected}, got {len(load.counts)} of {sorted(sizes)}")
    counts = np.asarray(load.counts, dtype=np.float64)
    if empty := [layer for layer, total in zip(load.layers, counts.sum(axis=1), strict=True) if not total]:
        raise ValueError(f"loads, {load.model}: counts: expected choices in every layer, got none in {empty}")
    return counts / counts.mean(axis=1, keepdims=True)


def _bench(facts: Facts) -> Iterator[Section]:
    if facts.bench is None:
        return
    machine, rows = facts.bench["machine"], []
    columns = ["what", "where", "target", "measured", "unit", "verdict"]
    for target in facts.bench["targets"]:
        limit = f"{'≥' if target['at_least'] else '≤'} {target['limit']:,g}"
        rows.append([target["what"], target["note"], limit, _value(target), target["unit"], target["verdict"]])
    yield Section(
        title="Benchmark",
        how=f"The targets of skyrl-r3 bench and what it measured, without a model, on {machine['cores']} cores of "
        f"{machine['cpu']}, {facts.bench['date']}. Both sides of a comparison ran in turn in the same run.",
        table=Table(columns=columns, numeric=["target", "measured"], rows=rows),
    )


def _value(target: dict[str, Any]) -> str:
    return "" if target["value"] is None else significant(target["value"])
