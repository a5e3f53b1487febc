"""``skyrl-r3 bench``: the arithmetic on fixed numbers, and small real runs. What takes how long is never tested."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract_tests.child import REPO, Child, finish, run_python
from contract_tests.peer import python_04, router
from skyrl_r3 import frame
from skyrl_r3.bench import environments, plan, processes, targets
from skyrl_r3.bench.cases import SHAPES, Case, digest
from skyrl_r3.bench.pipe import ENDING, BenchError
from skyrl_r3.bench.plan import SIDES, Cell
from skyrl_r3.bench.run import measure, measure_preprocessing

SMALL = Case(256, *SHAPES[0])


# The made-up replies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [256, 4096])
def test_a_case_is_what_a_real_engine_could_have_given(tokens: int, shape: tuple[int, int, int]) -> None:
    case = Case(tokens, *shape)
    ids, prompt, response = case.routes(), case.prompt(), case.response()
    assert Case.of_prompt(prompt) == case
    assert len(prompt) + len(response) - 1 == tokens == len(ids)
    assert len(prompt) == min(512, tokens // 2)
    assert ids.dtype == (np.uint16 if case.experts > 256 else np.uint8)
    assert ids.shape == (tokens, case.layers, case.topk)
    assert len(np.unique(ids)) == case.experts
    assert (np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all()
    logprobs = case.logprobs()
    np.testing.assert_array_equal(logprobs, logprobs.astype(np.float32).astype(np.float64), strict=True)
    assert (logprobs <= 0).all()


def test_digest_depends_on_values_and_shape_but_not_on_types() -> None:
    tokens, logprobs, ids = SMALL.response(), SMALL.logprobs(), SMALL.routes()
    assert digest(tokens.tolist(), logprobs.tolist(), ids.tolist()) == SMALL.digest()
    assert digest(tokens, logprobs.astype(np.float32), ids.astype(np.int16)) == SMALL.digest()
    other = ids.copy()
    other[-1, -1, -1] ^= 1
    for wrong in (other, ids[:-1], ids[:, :, ::-1], ids.swapaxes(1, 2)):
        assert digest(tokens, logprobs, wrong) != SMALL.digest()
    assert digest(tokens, np.nextafter(logprobs, 0), ids) != SMALL.digest()


# The arithmetic


def test_median_and_spread() -> None:
    assert targets.milliseconds([0.003, 0.001, 0.010]) == {"median_ms": 3.0, "min_ms": 1.0, "max_ms": 10.0}
    assert targets.milliseconds([0.001, 0.002])["median_ms"] == 1.5


def test_stall_percentiles() -> None:
    found = targets.stalls([0.0] * 50 + [1.0] * 50)
    assert found == {"p50": 0.5, "p99": 1, "max": 1, "samples": 100}


def test_a_long_stall_counts_as_long_as_it_lasts() -> None:
    found = targets.stalls([0.5] * 999 + [1000.0])
    assert found["max"] == 1000
    assert found["p99"] == pytest.approx(980, abs=1)
    assert found["p50"] == pytest.approx(0.5, abs=1)
    assert targets.stalls([0.5] * 1000)["p99"] == 0.5


def row(side: str, median_ms: float, tokens: int, *, shape: str = targets.SHAPE, **more: Any) -> dict[str, Any]:
    stalls = {"p50": 0.1, "p99": median_ms / 2, "max": median_ms}
    about = {"side": side, "shape": shape, "tokens": tokens, "route": "direct", "in_flight": 1}
    return about | {"median_ms": median_ms, "reply_bytes": 100, "stall_ms": stalls} | more


def verdicts(rows: list[dict[str, Any]], preprocessing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Value and verdict by target."""
    return {
        f"{found.what}, {found.unit}, {found.note}": (found.value, found.verdict)
        for found in targets.judge(rows, preprocessing or {})
    }


def test_targets_against_stock() -> None:
    found = verdicts(
        [
            row("stock-0.3", 12_000, 16_384, reply_bytes=1000),
            row("frame-0.3", 10, 16_384, reply_bytes=310),
            row("stock-0.4", 100, 32_768),
            row("frame-0.4", 25, 32_768),
            row("packed-0.3", 50, 32_768),
        ]
    )
    cell = "x 48x8 of 128, direct, 1 in flight"
    assert found[f"frame against stock 0.3, x faster, 16,384 {cell}"] == (1200, "reached by 20%")
    assert found[f"frame against stock 0.3, % of the bytes, 16,384 {cell}"] == (31, "missed by 3%")
    assert found[f"frame against stock 0.4, x faster, 32,768 {cell}"] == (4, "missed by 20%")
    assert found[f"packed against stock 0.4, x faster, 32,768 {cell}"] == (2, "reached by 33%")
    router = cell.replace("direct", "through the router")
    assert found[f"frame against stock 0.4, x faster, 32,768 {router}"] == (None, "not measured")


def test_target_against_bare_is_that_of_the_worst_cell() -> None:
    sizes = ((4096, 3.0, 2.0), (16_384, 16.0, 8.0))
    rows = [row("frame-0.3", ours, tokens) for tokens, ours, _ in sizes]
    rows += [row("bare-0.3", bare, tokens) for tokens, _, bare in sizes]
    rows += [row("frame-0.3", 1, 32_768, shape="other")]
    what = "frame on 0.3 against a bare fetch, direct, 1 in flight, x its time"
    note = "worst of 2 cells (1 reach it): 16,384 x 48x8 of 128"
    assert verdicts(rows)[f"{what}, {note}"] == (2.0, "missed by 33%")


def test_target_of_stalls() -> None:
    rows = [row("frame-0.4", 38, 32_768, in_flight=32), row("frame-0.4", 90, 32_768)]
    what = "event loop of a client, frame on 0.4, 99th percentile of stalls, ms"
    cell = "32,768 x 48x8 of 128, direct, 32 in flight"
    assert verdicts(rows)[f"{what}, {cell}"] == (19, "reached by 5%")
    rows.append(row("bare-0.4", 60, 32_768, in_flight=32))
    assert verdicts(rows)[f"{what}, {cell} (a bare fetch: 30)"] == (19, "reached by 5%")


def test_targets_of_preprocessing() -> None:
    overlay = {"whole": [0.02, 0.03, 0.02], "without_routes": [0.016] * 3, "copy": [0.004] * 3}
    stock = {"whole": [1.0], "without_routes": [0.02]}
    found = verdicts([], {"what": "a batch", "overlay": overlay, "stock": stock})
    chosen = [verdict for name, verdict in found.items() if "preprocessing" in name]
    assert [value for value, _ in chosen] == pytest.approx([1, 245, 50])
    assert [verdict for _, verdict in chosen] == ["reached by 50%", "reached by 145%", "missed by 50%"]


def test_a_difference_that_is_noise_is_no_verdict() -> None:
    overlay = {"whole": [0.02, 0.02, 0.02], "without_routes": [0.021] * 3, "copy": [0.004] * 3}
    found = verdicts([], {"what": "a batch", "overlay": overlay, "stock": {"whole": [1.0], "without_routes": [0.02]}})
    chosen = [verdict for name, (_, verdict) in found.items() if "preprocessing" in name]
    assert chosen == ["not measured", "not measured", "missed by 50%"]


def test_nothing_measured_is_no_verdict() -> None:
    assert {verdict for _, verdict in verdicts([]).values()} == {"not measured"}


# What is measured


def test_stock_0_3_is_spared_where_it_takes_minutes() -> None:
    side = next(side for side in SIDES if side.slow)
    cells = list(plan.cells([4096, 16_384, 32_768], router=True, full=False))
    assert len(cells) == 3 * 2 * (3 + 1)
    run = {(cell.case.tokens, cell.route, cell.in_flight) for cell in cells if not plan.why_not(side, cell, full=False)}
    assert run == {(4096, "direct", 1), (16_384, "direct", 1)}
    everything = list(plan.cells([4096, 16_384, 32_768], router=True, full=True))
    assert len(everything) == 3 * 2 * 3 * 2
    slow = [cell for cell in everything if plan.why_not(side, cell, full=True)]
    assert {(cell.case.tokens, cell.in_flight) for cell in slow} == {(16_384, 32), (32_768, 32)}


def test_environments_that_cannot_be_measured_say_why(bare_python: Path, tmp_path: Path) -> None:
    found = environments.look_at(str(bare_python), tmp_path)
    assert found["missing"] == f"no skyrl and no vllm in {bare_python}"
    gone = environments.look_at("/no/such/python", tmp_path)
    assert gone["missing"].startswith("/no/such/python does not run")
    assert environments.by_line([found, gone]) == {}


def test_two_environments_of_one_line_are_refused() -> None:
    with pytest.raises(BenchError, match=r"a and b have the same SkyRL, 0\.3"):
        environments.by_line([{"python": "a", "line": "0.3"}, {"python": "b", "line": "0.3"}])


# Real processes


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Pairs]:
    """Servers, clients and routers, overlay on and off, of both lines of SkyRL."""
    lines = {"0.3": {"python": sys.executable}, "0.4": {"python": python_04()}}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))
        yield processes.start(stack, lines, router(), tmp_path_factory.mktemp("bench"))


def measured(pairs: processes.Pairs, cell: Cell, repeats: int = 2) -> list[dict[str, Any]]:
    return measure(cell, pairs, repeats=repeats, full=False, tell=lambda _: None)


@pytest.mark.parametrize("route", ["direct", "router"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_every_side_delivers_what_the_engine_gave_out(
    pairs: processes.Pairs, shape: tuple[int, int, int], route: str, in_flight: int
) -> None:
    rows = measured(pairs, Cell(Case(300, *shape), route, in_flight))
    assert [found["side"] for found in rows] == [side.key for side in SIDES]
    size = {found["side"]: found.get("reply_bytes") for found in rows}
    assert size["frame-0.3"] == size["frame-0.4"] == size["bare-0.3"] == size["bare-0.4"]
    assert size["frame-0.3"] is not None
    assert size["frame-0.3"] > Case(300, *shape).routes().nbytes
    for found in rows:
        if "not_run" not in found:
            assert len(found["seconds"]) == (1 if found["side"] == "stock-0.3" else 2)
            assert set(found["cpu_ms"]) == {"server", "client"} | ({"router"} if route == "router" else set())
            assert all(found["cpu_ms"].values())
            assert all(found["peak_bytes"].values())
            assert found["stall_ms"]["samples"] > 0
    spared = ["stock-0.3"] if (route, in_flight) != ("direct", 1) else []
    assert [found["side"] for found in rows if "not_run" in found] == spared


@pytest.mark.parametrize("side", [side.key for side in SIDES if side.encodings is not None])
def test_a_reply_that_differs_is_noticed(pairs: processes.Pairs, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = SMALL.routes()
    ids[7, 5, 3] ^= 1
    wrong = digest(SMALL.response(), SMALL.logprobs(), ids)
    monkeypatch.setattr(Case, "digest", lambda self: wrong)
    monkeypatch.setattr(plan, "SIDES", [each for each in SIDES if each.key == side])
    with pytest.raises(BenchError, match=f"{side} delivered not what the engine gave out"):
        measured(pairs, Cell(SMALL, "direct", 1))


def test_a_reply_in_another_encoding_is_noticed(pairs: processes.Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    side = dataclasses.replace(next(side for side in SIDES if side.overlay), encodings=("packed", "nested"))
    monkeypatch.setattr(plan, "SIDES", [dataclasses.replace(side, content_type=frame.CONTENT_TYPE)])
    with pytest.raises(BenchError, match=r"expected 1 application/vnd\.skyrl-r3\.frame, got 1 of the types"):
        measured(pairs, Cell(SMALL, "direct", 1))


def test_what_a_process_raises_is_shown(pairs: processes.Pairs) -> None:
    client = pairs["0.4", True].client
    client.send(do="call", url="http://127.0.0.1:1", case=[1], in_flight=1)
    with pytest.raises(BenchError, match=r"(?s)client 0\.4 overlay failed.*TypeError"):
        client.answer(60)
    assert measured(pairs, Cell(SMALL, "direct", 1))


def test_preprocessing_is_checked(pairs: processes.Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_preprocessing(pairs, tokens=300)
    assert found["stock"]["digest"] == found["overlay"]["digest"]
    assert found["stock"]["bytes"] == found["overlay"]["bytes"]
    assert {len(found["overlay"][name]) for name in ("whole", "without_routes", "copy")} == {15}
    monkeypatch.setattr("skyrl_r3.bench.preprocess.expected_digest", lambda *_: "other")
    with pytest.raises(BenchError, match="preprocessing, overlay: the tensor holds other rows"):
        measure_preprocessing(pairs, tokens=300)


# The command


def command(*options: str) -> list[str]:
    """The command for one small run."""
    return [sys.executable, "-m", "skyrl_r3", "bench", "--tokens", "256", "--repeats", "1", *options]


def left_behind(mark: str) -> list[str]:
    """Processes that have ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_the_command_reports_what_it_measured_and_what_is_missing(bare_python: Path) -> None:
    mark = uuid.uuid4().hex
    options = ["--python", sys.executable, "--python", str(bare_python), "--json", "-"]
    options += ["--router", router()]
    ran = run_python(command(*options), path=[REPO], env={"BENCH_TEST": mark, "COLUMNS": "120"})
    assert left_behind(mark) == []
    result = json.loads(ran.stdout)
    assert {"cpu", "cores", "system"} <= set(result["machine"])
    here, bare = result["environments"]
    assert here["line"] == "0.3"
    assert {"python_version", "skyrl", "vllm", "numpy", "skyrl_r3"} <= set(here)
    assert bare["missing"] == f"no skyrl and no vllm in {bare_python}"
    other = {side.key for side in SIDES if side.line == "0.4"}
    assert set(result["missing"]) == other
    assert all(str(bare_python) in result["missing"][key] for key in other)
    assert len(result["rows"]) == len(SHAPES) * 2 * 2 * (len(SIDES) - len(other))
    assert {target["verdict"] for target in result["targets"] if target["value"] is None} == {"not measured"}
    assert "skyrl-r3 bench --tokens 256" in result["command"]
    for text in ("Direct, 1 in flight", "MB of one reply", "Targets", "missing: frame-", here["skyrl"]):
        assert text in ran.stderr
    assert max(map(len, ran.stderr.splitlines())) <= 120


def test_nothing_to_measure_is_an_error(bare_python: Path) -> None:
    ran = run_python(command("--python", str(bare_python)), path=[REPO], check=False)
    assert ran.returncode == 1
    assert ran.stderr.replace("\n", "").endswith(f"nothing to measure: no skyrl and no vllm in {bare_python}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json", "/no/such/folder/x.json"], "no folder /no/such/folder"),
        (["--router", "/no/such/router"], "is no program"),
        (["--python", "/bin/true"], "is no Python"),
        (["--python", "/bin/echo"], "is no Python"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(options: list[str], said: str) -> None:
    ran = run_python(command(*options), path=[REPO], env={"COLUMNS": "200"}, check=False)
    assert ran.returncode in (1, 2)
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_paths_may_be_relative(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/bin/echo")
    env = os.environ | {"PYTHONPATH": str(REPO), "COLUMNS": "200"}
    command_line = command("--python", "./python")
    ran = finish(command_line, env=env, cwd=tmp_path)
    assert f"{tmp_path}/python is no Python" in ran.stderr


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_until_the_process_that_is_being_started_is_known(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    class Interrupted(Exception):
        pass

    class Starting:
        def __init__(self, *_: Any) -> None:
            events.append("started")
            signal.raise_signal(number)

        def stop(self) -> None:
            events.append("stopped")

    def interrupt(*_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(processes, "Child", Starting)
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(Interrupted), ExitStack() as stack:
            processes.start(stack, {"0.3": {"python": "python"}}, None, tmp_path)
    finally:
        signal.signal(number, before)
    assert events == ["started", "stopped"]


@pytest.mark.parametrize("number", ENDING)
def test_no_process_outlives_an_interrupted_run(number: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    env = os.environ | {"BENCH_TEST": mark, "PYTHONPATH": str(REPO)}
    with Child(command(), env=env, cwd="/") as running:
        deadline = time.monotonic() + 120
        while not any("bench.client" in line for line in left_behind(mark)):
            assert running.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.process.send_signal(number)
        assert running.wait(60) != 0
        assert left_behind(mark) == []
