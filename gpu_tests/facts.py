"""What a run found, for the report: plain data, written as JSON and read again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far the trainer's logprobs of sampled tokens are from the engine's.

    Attributes:
        mean_abs: Mean of ``|trainer - engine|`` in nats.
        max_abs: The largest of them.
        k3: Mean of ``exp(d) - 1 - d`` with ``d = trainer - engine``: Schulman's k3 estimate of KL(engine || trainer).
    """

    mean_abs: float
    max_abs: float
    k3: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One model's generations, computed again by the trainer's side, with the captured routes and without.

    Attributes:
        agreement: Layer -> share of tokens for which the trainer, left alone, chooses the same set of experts.
    """

    model: str
    engine: str
    trainer: str
    tokens: int
    without: Gap
    replayed: Gap
    agreement: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Some replies in one encoding: bytes on the wire, and the time from the request to the client's arrays.

    Attributes:
        generation: Whether an engine generated them in that time; else they were there before.
    """

    case: str
    encoding: str
    replies: int
    body_bytes: int
    milliseconds: float
    generation: bool


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One scenario in which stock SkyRL and the overlay gave the same, bit for bit."""

    scenario: str
    model: str
    replies: int
    rows: int
    seen: str


@dataclass(frozen=True, kw_only=True)
class Load:
    """How often each expert was chosen: ``counts`` [layers][experts], layers without experts left out."""

    model: str
    engine: str
    layers: list[int]
    counts: list[list[int]]


@dataclass(kw_only=True)
class Facts:
    """Everything that a report is made of.

    Attributes:
        title: What was run.
        machine: Name -> value: device, cores, date.
        versions: Package -> version.
        not_run: What was left out, and why, in sentences.
        bench: The result of ``skyrl-r3 bench --json``, if there is one.
    """

    title: str
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    replays: list[Replay] = field(default_factory=list)
    transports: list[Transport] = field(default_factory=list)
    parities: list[Parity] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    bench: dict[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Facts:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: Another file.
        """
        raw = json.loads(path.read_text(encoding="utf-8"))
        names = {each.name for each in dataclasses.fields(cls)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise ValueError(f"{path}: expected what --r3-report writes, with {', '.join(sorted(names))}")
        raw["replays"] = [
            Replay(
                **replay
                | {side: Gap(**replay[side]) for side in ("without", "replayed")}
                | {"agreement": {int(layer): share for layer, share in replay["agreement"].items()}}
            )
            for replay in raw["replays"]
        ]
        for name, kind in (("transports", Transport), ("parities", Parity), ("loads", Load)):
            raw[name] = [kind(**one) for one in raw[name]]
        return cls(**raw)
