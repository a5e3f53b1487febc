"""The report of several runs, its verdict, and its command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_tests import report
from gpu_tests.facts import Facts, Gap
from gpu_tests.sample_facts import BENCH, WITHOUT, facts, replay
from gpu_tests.verdict import verdict

ZERO = Gap(mean_abs=0.0, max_abs=0.0, k3=0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "in 1 scenario with 1 model (29 replies, 31,337 rows of routes)"),
        ({}, "lowers the mean absolute logprob gap between trainer and engine for tiny, by a factor of 100,000"),
        ({}, "1 part of the run did not run or failed"),
        ({"replays": [replay(), replay(replayed=WITHOUT)]}, "does not lower"),
        ({"replays": [replay(without=ZERO, replayed=ZERO)]}, "does not lower"),
        ({"replays": [replay(replayed=ZERO)]}, "for tiny, to zero."),
        ({"replays": [replay(), replay(replayed=ZERO)]}, "by a factor of 100,000 and to zero in 1."),
    ],
)
def test_the_verdict_says_what_replay_does(changes: dict[str, Any], said: str) -> None:
    assert said in verdict(facts(**{"not_run": []} | changes) if changes else facts())


def test_runs_are_merged() -> None:
    other = Facts(
        title="Another",
        machine={"device": "a GPU", "cores": "2"},
        versions={"torch": "9.8.7", "vllm": "1"},
        replays=[replay(engine="transformers")],
        not_run=["vLLM."],
    )
    merged = report.merge({"a.json": facts(), "b.json": other})
    assert merged == facts(
        machine={"device": "a CPU; a GPU", "cores": "2"},
        versions={"torch": "9.8.7", "vllm": "1"},
        replays=[replay(), replay(engine="transformers")],
        not_run=["CUDA: there is no GPU here.", "vLLM."],
    )


def test_other_versions_are_an_error_that_names_both() -> None:
    runs = {"a.json": facts(), "b.json": Facts(title="", versions={"torch": "9.9"})}
    with pytest.raises(ValueError, match=re.escape("torch: expected one, got 9.8.7 in a.json and 9.9 in b.json")):
        report.merge(runs)


def test_two_benches_are_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=re.escape("expected one result, got one in a.json and one in b.json")):
        report.merge({"a.json": facts(), "b.json": facts()})


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts(bench=None).save(tmp_path / "a.json")
    Facts(title="Another", not_run=["B."]).save(tmp_path / "b.json")
    (tmp_path / "bench.json").write_text(json.dumps(BENCH), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    out = ["--out", str(tmp_path / "out")]
    assert report.main([*files, *out]) == 0
    assert Facts.load(tmp_path / "out" / "report.json") == facts(bench=None, not_run=[*facts().not_run, "B."])
    more = ["--bench", str(tmp_path / "bench.json"), "--not-run", "C.", "--not-run", "D.", "--title", "T"]
    assert report.main([*files, *out, *more]) == 0
    found = Facts.load(tmp_path / "out" / "report.json")
    assert (found.title, found.bench, found.not_run) == ("T", BENCH, ["C.", "D.", *facts().not_run, "B."])
    assert report.main(["--title", "None of it ran", *out]) == 0
    capsys.readouterr()
    facts(versions={"torch": "1"}, bench=None).save(tmp_path / "b.json")
    assert report.main([*files, *out]) == 1
    assert f"got 9.8.7 in {files[0]} and 1 in {files[1]}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        report.main(out)
