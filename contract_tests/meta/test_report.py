"""What is counted as done, and what the report says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import REPO, Ran, run_python
from contract_tests.meta.suite import run_suite, test_file

ROWS = test_file("codec/test_rows.py")
CUT = "codec/test_rows.py::test_a_cut_keeps_the_first_rows"


def markdown(path: Path) -> Ran:
    """The report as Markdown."""
    return run_python([sys.executable, "-m", "contract_tests.report", str(path)], path=[REPO], check=False)


@pytest.fixture
def cutting(tmp_path: Path) -> Any:
    """Runs a test of an implementation whose ``cut`` is ``code``, and gives the report too."""

    def run(code: str, *arguments: str, test: str = CUT) -> tuple[Ran, dict[str, Any]]:
        (tmp_path / "my_adapter.py").write_text(
            "import unittest\nimport pytest\nfrom contract_tests.implementations import Overlay\n"
            f"class Mine(Overlay):\n    def cut(self, ids, rows):\n        {code}\n"
        )
        report = tmp_path / "report.json"
        options = ("--impl", "my_adapter:Mine", "-q", "--report", str(report), *arguments)
        return run_suite(test_file(test), *options, path=tmp_path), json.loads(report.read_text())

    return run


@pytest.mark.parametrize(
    "code",
    [
        "pytest.skip('no time')",
        "pytest.importorskip('no_such_module')",
        "pytest.xfail('known')",
        "raise unittest.SkipTest('no time')",
    ],
)
def test_a_skip_by_the_implementation_is_a_failure(code: str, cutting: Any) -> None:
    ran, report = cutting(code)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "skipped by what is tested" in ran.stdout
    (row,) = report["properties"]
    assert (row["passed"], row["failed"], row["deviations"]) == (0, [CUT], [])


def test_a_skip_by_a_mark_is_none_that_passed(tmp_path: Path) -> None:
    """It is named at the end of the run."""
    (tmp_path / "marks.py").write_text(
        "import pytest\nelsewhere = pytest.mark.skipif(True, reason='elsewhere')\n"
        "def pytest_itemcollected(item):\n    item.add_marker(elsewhere)\n"
    )
    path = tmp_path / "report.json"
    ran = run_suite(test_file(CUT), "-q", "-p", "marks", "--report", str(path), path=tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "left out (Skipped: elsewhere): 1 property" in ran.stdout
    (row,) = json.loads(path.read_text())["properties"]
    assert (row["passed"], row["left_out"]) == (0, "Skipped: elsewhere")


def test_an_implementation_cannot_end_the_run_as_a_success(cutting: Any) -> None:
    ran, report = cutting("pytest.exit('done', returncode=0)", test="codec/test_rows.py")
    assert ran.returncode == report["exit_status"] == pytest.ExitCode.INTERRUPTED
    assert not report["complete"]


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ([test_file("codec"), "-k", "a_cut_keeps"], ["-k a_cut_keeps"]),
        ([test_file("codec"), "-x", "--impl", "contract_tests.planted:HalfLogprobs"], []),
        ([test_file(CUT)], [test_file(CUT)]),
        ([ROWS], [ROWS]),
        ([test_file("codec"), "--collect-only", "--ignore-glob", "*dtypes*"], ["--ignore-glob ['*dtypes*']"]),
        ([test_file("codec"), "--collect-only"], []),
    ],
    ids=["-k", "-x", "a test", "a file", "--ignore-glob", "--collect-only"],
)
def test_less_than_everything_is_not_complete(arguments: list[str], selected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ran = run_suite(*arguments, "-q", "--report", str(path))
    report = json.loads(path.read_text())
    assert report["exit_status"] == ran.returncode
    assert (report["complete"], report["selected"]) == (False, selected)
    made = markdown(path)
    assert made.returncode == 1
    assert made.stderr.startswith(f"{path}: the run was not complete: asked for ")
    assert len(made.stderr.splitlines()) == 1


def test_a_report_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "report.json", "No such file or directory")):
        ran = run_suite(ROWS, "-q", "--report", str(path))
        assert ran.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"--report {path}: {why}" in ran.stderr
        assert "passed" not in ran.stdout


def test_a_run_that_ends_early_leaves_no_report_of_another(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    assert run_suite(ROWS, "--report", str(path), "--impl", "nobody").returncode == pytest.ExitCode.USAGE_ERROR
    assert not path.exists()


def test_the_report_says_what_deviates(tmp_path: Path) -> None:
    path = tmp_path / "naive.json"
    run_suite(test_file("codec/test_dtypes.py"), "--impl", "naive", "-q", "--report", str(path))
    report = json.loads(path.read_text())
    (row,) = [row for row in report["properties"] if row["test"].endswith("test_what_is_no_array_of_ids")]
    said = "What is no integer array of three axes is refused by name, and nothing of it is guessed."
    assert row["property"] == said
    inputs = ["np.arange(12).reshape(2, 3, 2).astype(object)", "np.zeros((0, 3, 2))"]
    assert sorted(entry["input"] for entry in row["deviations"]) == inputs
    assert row["failed"] == []
    path.write_text(json.dumps(report | {"complete": True}))
    made = markdown(path)
    assert made.returncode == 0
    assert f"| {said} | 2 of {row['passed'] + 2} deviate |" in made.stdout
    assert "`np.zeros((0, 3, 2))`" in made.stdout
