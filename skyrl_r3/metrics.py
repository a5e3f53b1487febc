"""Counters and timers of routed experts, in the process that they happen in.

``skyrl_r3.metrics.snapshot()`` has the totals. In the trainer, what was added since the generator's last call is in
SkyRL's ``rollout_metrics``, as ``r3/...``. A server has the same as ``skyrl_r3_..._total`` at vLLM's ``/metrics``.

``SKYRL_R3_METRICS=off`` switches it off in a process; for those of Ray set it in the job's ``runtime_env``.

SkyRL adds up the metrics of several groups of samples, unless their name contains avg or mean, min or max. So counters
and what they are labelled with must not contain these; the load's name does, and is averaged. From few samples it is
too high: of 100 hits of 100 equally good experts, the most on one are 4 or 5.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from skyrl_r3.autoload import OFF

__all__ = ["COUNTERS", "LOAD", "Metric", "snapshot"]

SWITCH = "SKYRL_R3_METRICS"


@dataclass(frozen=True)
class Metric:
    """What is measured.

    Attributes:
        name: In Prometheus ``skyrl_r3_{name}_total``.
        help: For people.
        unit: What one of it is.
        labels: What there is a separate value for. :func:`snapshot` has them behind the name: ``replies/frame``.
        server: Whether inference servers count it.
    """

    name: str
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    server: bool = False


COUNTERS = (
    Metric("replies", "Replies to requests for routes.", "replies", ("encoding",), server=True),
    Metric("slow_replies", "Replies in nested lists: skyrl-r3 is not active at the other end.", "replies", server=True),
    Metric("body_bytes", "Bodies of replies, where their length is known.", "bytes", ("encoding",), server=True),
    Metric("replies_of", "Replies with rows, by the dtype of their ids.", "replies", ("dtype",), server=True),
    Metric("rows_captured", "Rows of routes in replies.", "rows", server=True),
    Metric("encode_seconds", "From an engine's output to the body of the reply.", "seconds", server=True),
    Metric("floored_logprobs", "Logprobs that there was no number for.", "logprobs", server=True),
    Metric("wait_seconds", "From sending a request to its whole body; SkyRL 0.4 parses JSON in this time.", "seconds"),
    Metric("decode_seconds", "From the body of a reply to arrays; without SkyRL 0.4's JSON parser.", "seconds"),
    Metric("rows_masked", "Rows that the policy has made padding of.", "rows"),
    Metric("rows_saved", "Rows that were held already and not requested again.", "rows"),
    Metric("findings", "What the checks of routes have found.", "findings", ("kind",)),
)
LOAD = Metric(
    "expert_load_max_over_mean", "Load of the busiest expert over that of the average one.", "ratio", ("layer",)
)

_COUNTERS = {metric.name: metric for metric in COUNTERS}
_DTYPES = {1: "uint8", 2: "int16", 4: "int32"}
_HELD_SAMPLES = 32  # Replies whose load is counted at once: in a third of the time that it takes one by one.
_MOST_CELLS = 2**20
"""Layers times experts whose load is counted: 20 times as many as any model has. A reply may claim more."""

type _Key = tuple[str, ...]  # A counter's name, and the value of its label where it has one.


class _Counted:
    """Counters by key, and hits of experts, int64 ``[layers, experts]``."""

    def __init__(self) -> None:
        self.counters: dict[_Key, float] = {}
        self.hits = np.zeros((0, 0), dtype=np.int64)

    def count(self, counted: Iterable[tuple[_Key, float]]) -> None:
        for key, value in counted:
            self.counters[key] = self.counters.get(key, 0) + value

    def hit(self, hits: np.ndarray) -> None:
        """Add ``hits`` ``[layers, experts]``, which may be more or fewer than before; not if both claim too many."""
        shape = tuple(max(sizes) for sizes in zip(hits.shape, self.hits.shape, strict=True))
        if shape[0] * shape[1] > _MOST_CELLS:
            return
        if shape != self.hits.shape:
            before, self.hits = self.hits, np.zeros(shape, dtype=np.int64)
            self.hits[: before.shape[0], : before.shape[1]] += before
        self.hits[: hits.shape[0], : hits.shape[1]] += hits

    def values(self) -> dict[str, float]:
        # A dense layer's ids are all zero: one expert, as there is no choice.
        chosen = ((layer, row) for layer, row in enumerate(self.hits) if np.count_nonzero(row) > 1)
        loads = {f"{LOAD.name}/layer_{layer:02}": float(row.max() / row.mean()) for layer, row in chosen}
        return {"/".join(key): value for key, value in self.counters.items()} | loads


_lock = Lock()
_before, _since = _Counted(), _Counted()
"""What was counted before and since the last :func:`report`."""
_samples: list[tuple[np.ndarray, int]] = []
"""ids and number of experts of replies whose load is still to be counted."""
_exported: dict[_Key, Any] = {}
"""Prometheus' counters, and those of one label value that were used."""


def enabled() -> bool:
    """Whether anything is counted in this process."""
    # Two steps, because a `get` of what is not there takes three times as long.
    return SWITCH not in os.environ or os.environ[SWITCH].strip().lower() not in OFF


def add(name: str, value: float = 1, **labels: str) -> None:
    """Add ``value`` to a counter, unless it is 0. Any thread may.

    Raises:
        ValueError: No such counter, or not its labels.
    """
    if not value or not enabled():
        return
    metric = _COUNTERS.get(name)
    if metric is None or metric.labels != tuple(labels):
        expected = "one of " + ", ".join(_COUNTERS) if metric is None else f"the labels {metric.labels}"
        raise ValueError(f"{name}: expected {expected}, got {name if metric is None else tuple(labels)}")
    _add([((name, *labels.values()), value)])


def _add(counted: list[tuple[_Key, float]]) -> None:
    with _lock:
        _since.count(counted)
    for key, value in counted if _exported else ():
        counter = _exported.get(key)
        if counter is None and (named := _exported.get(key[:1])):
            counter = _exported[key] = named.labels(*key[1:])
        if counter is not None:
            counter.inc(value)


class Reply:
    """Times one reply, and counts it when it is known to be right; nothing where ``on`` is False."""

    def __init__(self) -> None:
        self._counted: list[tuple[_Key, float]] = []
        self.on: bool = enabled()
        self._began = time.perf_counter() if self.on else 0.0

    def lap(self, name: str) -> None:
        """Have the seconds since the last lap, or the start, counted under ``name``."""
        if self.on:
            now = time.perf_counter()
            self._counted.append(((name,), now - self._began))
            self._began = now

    def count(self, encoding: str, *, rows: int = 0, itemsize: int = 0, body_bytes: int | None = None) -> None:
        """Count the reply and its laps.

        Args:
            encoding: Its name on the wire; a frame's version is left out.
            rows: Of routes; with them ``itemsize``, the bytes of an id on the wire.
            body_bytes: None where unknown.
        """
        if not self.on:
            return
        kind = encoding.partition("/")[0]
        counted = [*self._counted, (("replies", kind), 1)]
        if kind == "nested":
            counted.append((("slow_replies",), 1))
        if body_bytes is not None:
            counted.append((("body_bytes", kind), body_bytes))
        if rows:
            counted += [(("rows_captured",), rows), (("replies_of", _DTYPES[itemsize]), 1)]
        _add(counted)


def load(ids: np.ndarray, num_experts: int | None) -> None:
    """Count which experts ids ``[rows, layers, topk]`` of 0 or more hit, in a few rows: in all, it would take too long.

    Evenly spaced, one in 512, but at least 8 and at most 64.

    Args:
        ids: Captured rows: none that were filled in.
        num_experts: Of the model; None where unknown, for the largest id and one.
    """
    if not ids.size or not enabled():
        return
    sampled = min(max(len(ids) // 512, 8), 64)
    with _lock:
        _samples.append((ids[:: -(-len(ids) // sampled)].copy(), num_experts or 0))
        if len(_samples) == _HELD_SAMPLES:
            _count_samples()


def _count_samples() -> None:
    by_shape: dict[tuple[int, ...], list[tuple[np.ndarray, int]]] = {}
    for ids, experts in _samples:
        experts = max(experts, int(ids.max()) + 1)
        if ids.shape[1] * experts <= _MOST_CELLS:
            by_shape.setdefault(ids.shape[1:], []).append((ids, experts))
    _samples.clear()
    for (layers, _), samples in by_shape.items():
        experts = max(experts for _, experts in samples)
        first = np.arange(layers)[:, None] * experts
        cells = np.add(np.concatenate([ids for ids, _ in samples]), first, dtype=np.intp)
        _since.hit(np.bincount(cells.ravel(), minlength=layers * experts).reshape(layers, experts))


def snapshot() -> dict[str, float]:
    """What was counted in this process since its start, by name and label; empty where metrics are off."""
    with _lock:
        _count_samples()
        total = _Counted()
        for counted in (_before, _since) if enabled() else ():
            total.count(counted.counters.items())
            total.hit(counted.hits)
        return total.values()


def report() -> dict[str, float]:
    """What was counted since the last report. What was not is not in it."""
    global _since
    with _lock:
        _count_samples()
        latest, _since = _since, _Counted()
        _before.count(latest.counters.items())
        _before.hit(latest.hits)
        return latest.values() if enabled() else {}


def export() -> None:
    """Have the counters of a server in Prometheus' default registry as well, where there is a ``prometheus_client``.

    Real counters and not a collector of our own, because vLLM with several API servers collects them from files.
    """
    if _exported or not enabled():
        return
    try:
        prometheus = import_module("prometheus_client")
    except ImportError:
        return
    for metric in COUNTERS:
        if metric.server:
            _exported[(metric.name,)] = prometheus.Counter(f"skyrl_r3_{metric.name}", metric.help, metric.labels)
