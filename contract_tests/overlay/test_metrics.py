"""Counting, and what both ends of SkyRL 0.3 count."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyrl_r3
from contract_tests.child import run
from contract_tests.overlay import metrics_suite
from contract_tests.overlay.metrics_suite import fresh
from contract_tests.replies import FRAME, NESTED, PACKED
from skyrl_r3 import metrics


class TestMetrics(metrics_suite.MetricsContract):
    stock = NESTED
    knows_lengths = (FRAME, PACKED)


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch)


# Counters


def test_counters_add_up_by_label() -> None:
    metrics.add("findings", kind="all_equal")
    metrics.add("findings", 2, kind="all_equal")
    metrics.add("findings", kind="out_of_range")
    metrics.add("rows_masked", 7)
    assert metrics.snapshot() == {"findings/all_equal": 3, "findings/out_of_range": 1, "rows_masked": 7}


def test_a_report_has_what_was_added_since_the_last() -> None:
    metrics.add("rows_saved", 5)
    assert metrics.report() == {"rows_saved": 5}
    assert metrics.report() == {}
    metrics.add("rows_saved", 2)
    metrics.add("rows_masked", 0)  # Nothing.
    assert metrics.snapshot() == {"rows_saved": 7}
    assert metrics.report() == {"rows_saved": 2}
    assert metrics.snapshot() == {"rows_saved": 7}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("finding", {}),
        ("", {}),
        (metrics.LOAD.name, {"layer": "1"}),
        ("findings", {}),
        ("findings", {"kinds": "all_equal"}),
        ("rows_masked", {"kind": "all_equal"}),
    ],
)
def test_what_the_table_does_not_have_is_an_error(name: str, labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        metrics.add(name, **labels)
    assert metrics.snapshot() == {}


def test_threads_lose_nothing() -> None:
    def count() -> None:
        for _ in range(5_000):
            metrics.add("findings", kind="all_equal")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    reported = sum(metrics.report().get("findings/all_equal", 0) for _ in range(200))
    for thread in threads:
        thread.join()
    reported += metrics.report().get("findings/all_equal", 0)
    assert reported == metrics.snapshot()["findings/all_equal"] == 40_000


def test_the_laps_of_a_reply_are_counted_with_it() -> None:
    """And so not at all if it turns out wrong."""
    began = time.perf_counter()
    for count in (True, False, True):
        counted = metrics.Reply()
        time.sleep(0.01)
        counted.lap("wait_seconds")
        counted.lap("decode_seconds")
        if count:
            counted.count("frame/1")
    found = metrics.snapshot()
    assert found["replies/frame"] == 2
    assert found["wait_seconds"] >= 0.02
    assert found["decode_seconds"] > 0
    assert found["wait_seconds"] + found["decode_seconds"] <= time.perf_counter() - began


def test_the_table_is_complete_and_its_names_are_added_up_by_skyrl() -> None:
    """SkyRL takes the average, least or greatest of those whose names say so: avg, mean, min, max."""
    for metric in (*metrics.COUNTERS, metrics.LOAD):
        assert metric.help.endswith(".")
        assert metric.unit
    names = [metric.name for metric in metrics.COUNTERS]
    assert len(names) == len(set(names))
    labels = ("frame", "packed", "nested", "uint8", "int16", "int32")
    assert [name for name in (*names, *labels) if any(word in name for word in ("avg", "mean", "min", "max"))] == []
    assert "mean" in metrics.LOAD.name
    assert all(len(metric.labels) <= 1 for metric in metrics.COUNTERS)


@pytest.mark.parametrize("value", ["off", "0", "false", "no", " OFF "])
def test_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.add("rows_masked")
    monkeypatch.setenv("SKYRL_R3_METRICS", value)
    metrics.add("rows_masked")
    metrics.load(np.array([[[1, 2]]]), 4)
    counted = metrics.Reply()
    counted.lap("wait_seconds")
    counted.count("nested", rows=1, itemsize=1)
    assert metrics.snapshot() == metrics.report() == {}
    monkeypatch.delenv("SKYRL_R3_METRICS")
    assert metrics.snapshot() == {"rows_masked": 1}


@pytest.mark.parametrize("value", ["", "on", "1"])
def test_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_R3_METRICS", value)
    metrics.add("rows_masked")
    assert metrics.snapshot() == {"rows_masked": 1}


def test_by_hand_after_the_import_of_the_package_alone() -> None:
    assert "metrics" in skyrl_r3.__all__
    ran = run(
        """
        import sys
        import skyrl_r3
        before = [name for name in ("numpy", "skyrl_r3.metrics") if name in sys.modules]
        snapshot = skyrl_r3.metrics.snapshot()
        report(before=before, snapshot=snapshot, prometheus="prometheus_client" in sys.modules)
        """
    )
    assert ran.values == {"before": [], "snapshot": {}, "prometheus": False}


# The load of experts


def loads() -> dict[int, float]:
    """By layer."""
    return {int(name[-2:]): value for name, value in metrics.snapshot().items()}


@pytest.mark.case("R90")
def test_load_is_the_most_hits_over_the_average() -> None:
    ids = np.array([[[0, 1], [0, 0]], [[0, 2], [0, 0]], [[0, 3], [0, 0]]], np.uint8)
    metrics.load(ids, 8)
    assert loads() == {0: 3 / (6 / 8)}


@pytest.mark.case("R90")
@pytest.mark.parametrize("shape", [(0, 3, 2), (0, 0, 0), (4, 0, 2), (4, 3, 0)])
def test_without_rows_there_is_no_load(shape: tuple[int, ...]) -> None:
    metrics.load(np.zeros(shape, np.uint8), 8)
    assert metrics.snapshot() == metrics.report() == {}


def test_load_adds_up_over_replies_and_dtypes() -> None:
    for dtype in (np.uint8, np.int16, np.int32):
        metrics.load(np.array([[[5]], [[6]]], dtype), None)
    metrics.load(np.array([[[6]]], np.uint8), 10)
    assert loads() == {0: 4 / (7 / 10)}


def test_unknown_experts_end_with_the_largest_id_seen() -> None:
    metrics.load(np.array([[[1]], [[3]]], np.uint8), None)
    assert loads() == {0: 1 / (2 / 4)}
    metrics.load(np.array([[[7]], [[7]]], np.uint8), None)
    assert loads() == {0: 2 / (4 / 8)}


def test_a_report_of_loads_starts_anew() -> None:
    metrics.load(np.array([[[0]], [[0]], [[1]]], np.uint8), 2)
    assert metrics.report() == {f"{metrics.LOAD.name}/layer_00": 2 / 1.5}
    metrics.load(np.array([[[0]], [[1]]], np.uint8), 2)
    assert metrics.report() == {f"{metrics.LOAD.name}/layer_00": 1.0}
    assert metrics.report() == {}
    assert loads() == {0: 3 / 2.5}


@pytest.mark.parametrize(("rows", "sampled"), [(1, 1), (8, 8), (9, 5), (4_096, 8), (8_192, 16), (40_000, 64)])
def test_rows_are_sampled_evenly(rows: int, sampled: int) -> None:
    ids = np.zeros((rows, 1, 1), np.int32)
    ids[::-2] = 1
    metrics.load(ids, 2)
    metrics.snapshot()
    assert metrics._since.hits.sum() == sampled


def test_a_reply_that_claims_as_many_layers_or_experts_as_no_model_has_is_left_out() -> None:
    metrics.load(np.zeros((1, 2**20 + 1, 1), np.uint8), None)
    metrics.load(np.full((1, 1, 2), 2**31 - 1, np.int32), None)
    metrics.load(np.array([[[0, 1]]], np.uint8), 2**40)
    assert metrics.snapshot() == {}
    assert metrics._since.hits.size == 0
    metrics.load(np.array([[[0, 1]]], np.uint8), 2)
    metrics.load(np.array([[[0, 2**31 - 1]]], np.int32), 2)
    assert loads() == {0: 1.0}


def test_samples_are_counted_before_they_are_many() -> None:
    for number in range(100):
        metrics.load(np.full((20, 2, 1), number % 2, np.uint8), 2)
        assert len(metrics._samples) < 32
    metrics.load(np.full((20, 3, 2), 2, np.uint8), None)
    # 7 rows of each, and so 350 hits of expert 0 and as many of 1. Then 14 of a third, which is alone in a third layer.
    assert loads() == {0: 350 / (714 / 3), 1: 350 / (714 / 3)}


# Prometheus

COUNT = """
import sys
from skyrl_r3 import metrics
for _ in range(2):
    metrics.export()
metrics.Reply().count("frame/1", rows=4, itemsize=1, body_bytes=100)
metrics.Reply().count("nested")
metrics.add("rows_masked", 3)
"""
SHOW = """
lines = prometheus_client.generate_latest(REGISTRY).decode().splitlines()
report(lines=sorted(line for line in lines if line.startswith("skyrl_r3_") and "_created" not in line))
"""
EXPECTED = [
    'skyrl_r3_body_bytes_total{encoding="frame"} 100.0',
    "skyrl_r3_encode_seconds_total 0.0",
    "skyrl_r3_floored_logprobs_total 0.0",
    'skyrl_r3_replies_of_total{dtype="uint8"} 1.0',
    'skyrl_r3_replies_total{encoding="frame"} 1.0',
    'skyrl_r3_replies_total{encoding="nested"} 1.0',
    "skyrl_r3_rows_captured_total 4.0",
    "skyrl_r3_slow_replies_total 1.0",
]


@pytest.mark.case("R98", "R99")
def test_prometheus_has_the_counters_of_a_server() -> None:
    """Exported twice, as where two apps are built in one process."""
    ran = run(f"{COUNT}\nimport prometheus_client\nfrom prometheus_client import REGISTRY\n{SHOW}")
    assert ran.values["lines"] == EXPECTED


def test_prometheus_has_them_from_several_processes(tmp_path: Path) -> None:
    """As vLLM's /metrics has with several API servers: from files, by prometheus_client's own collector."""
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        run(COUNT, env=env)
    ran = run(
        f"""
import prometheus_client
from prometheus_client import multiprocess
REGISTRY = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(REGISTRY)
{SHOW}""",
        env=env,
    )
    name, value = zip(*(line.split(" ") for line in EXPECTED), strict=True)
    doubled = [f"{name} {2 * float(value)}" for name, value in zip(name, value, strict=True)]
    assert ran.values["lines"] == doubled


def test_off_makes_no_counters() -> None:
    ran = run(
        f'{COUNT}\nreport(client="prometheus_client" in sys.modules, counted=metrics.snapshot())',
        env={"SKYRL_R3_METRICS": "off"},
    )
    assert ran.values == {"client": False, "counted": {}}


def test_without_prometheus_all_else_is_counted() -> None:
    ran = run(f'import sys\nsys.modules["prometheus_client"] = None\n{COUNT}\nreport(counted=metrics.snapshot())')
    assert ran.values["counted"]["replies/frame"] == 1


def test_two_claims_are_not_multiplied() -> None:
    """A reply of one layer and many experts, and one of many layers."""
    metrics.report()
    metrics.load(np.full((1, 1, 2), 7, np.int32), 2**20)
    metrics.load(np.arange(8192, dtype=np.int16).reshape(1, 4096, 2) % 64, 64)
    assert metrics.report().keys() <= {f"{metrics.LOAD.name}/layer_{layer:02}" for layer in range(4096)}
