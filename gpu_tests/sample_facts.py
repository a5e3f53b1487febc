"""One of everything that a run can find, for the tests of the report."""

from __future__ import annotations

from typing import Any

from gpu_tests.facts import Facts, Gap, Load, Parity, Replay, Transport

WITHOUT = Gap(mean_abs=0.0123, max_abs=0.456, k3=7.89e-5)
REPLAYED = Gap(mean_abs=1.23e-7, max_abs=4.56e-6, k3=0.0)
BENCH = {
    "date": "2026-01-02 03:04:05 +0000",
    "machine": {"cpu": "A Processor", "cores": 17, "system": "Linux"},
    "targets": [
        {"what": "frame", "limit": 1000, "at_least": True, "value": 861.4, "unit": "x faster", "note": "direct"}
        | {"reached": False, "verdict": "missed by 14%"},
        {"what": "stalls", "limit": 20, "at_least": False, "value": None, "unit": "ms", "note": "no cell"}
        | {"reached": None, "verdict": "not measured"},
    ],
}


def replay(**changes: Any) -> Replay:
    about: dict[str, Any] = {"model": "tiny", "engine": "vllm", "trainer": "transformers", "tokens": 4321}
    gaps = {"without": WITHOUT, "replayed": REPLAYED, "agreement": {1: 0.875, 2: 0.9375}}
    return Replay(**about | gaps | changes)


def facts(**changes: Any) -> Facts:
    """One of everything."""
    everything: dict[str, Any] = {
        "title": "A run",
        "machine": {"device": "a CPU"},
        "versions": {"torch": "9.8.7"},
        "replays": [replay()],
        "transports": [
            Transport(
                case="one turn",
                encoding="nested",
                replies=3,
                body_bytes=5_480_000,
                milliseconds=2035.4,
                generation=False,
            ),
            Transport(
                case="one turn", encoding="frame", replies=3, body_bytes=1_602_345, milliseconds=3.84, generation=False
            ),
        ],
        "parities": [Parity(scenario="abort", model="tiny", replies=29, rows=31_337, seen="2 aborted")],
        "loads": [Load(model="tiny", engine="vLLM 1.2.3", layers=[1, 2], counts=[[5, 2, 1, 0], [1, 1, 1, 1]])],
        "not_run": ["CUDA: there is no GPU here."],
        "bench": BENCH,
    }
    return Facts(**everything | changes)
