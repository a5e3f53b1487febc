"""Golden files that are lost, and those who would write over them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from contract_tests import golden
from contract_tests.child import REPO, finish


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, which is read in their place."""
    shutil.copytree(golden.FOLDER, tmp_path / "golden")
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "golden")
    return tmp_path / "golden"


def test_a_lost_version_is_an_error(folder: Path) -> None:
    shutil.rmtree(folder / "v1")
    for version in golden.versions():
        with pytest.raises(ValueError, match=r"v1: expected the cases \['int16', .* got \[\]"):
            golden.read(version)


def test_a_lost_case_is_an_error(folder: Path) -> None:
    """Even if its digests go with it."""
    for path in (folder / "v1").glob("told.*"):
        path.unlink()
    sums = folder / "v1" / golden.SUMS
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "  told." not in line))
    assert golden.sums("v1") == golden.recorded("v1")
    with pytest.raises(ValueError, match="expected the cases"):
        golden.read("v1")


def test_stray_folders_are_none_of_them(folder: Path) -> None:
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "v1" / ".ipynb_checkpoints").mkdir()
    assert golden.versions() == ["v1"]
    assert golden.sums("v1") == golden.recorded("v1")
    assert len(golden.read("v1")) == len(golden.VERSIONS["v1"])


def test_git_leaves_their_bytes_alone() -> None:
    assert "contract_tests/golden/** -text" in (REPO / ".gitattributes").read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", ["", "../v2", "/tmp/v2", "v2/x", "2", "v", "v1"])
def test_what_is_no_new_version_is_refused_in_a_line(name: str) -> None:
    before = sorted(golden.FOLDER.parent.iterdir())
    ran = finish([sys.executable, "-m", "contract_tests.golden", *filter(None, [name])], cwd=REPO)
    assert ran.returncode == 1
    said = "v1 is there, and is never written anew" if name == "v1" else "usage: python -m contract_tests.golden v2"
    assert ran.stderr.splitlines() == [said]
    assert sorted(golden.FOLDER.parent.iterdir()) == before


def test_a_new_version_has_the_same_cases(folder: Path) -> None:
    golden.write("v2")
    assert golden.sums("v2") == golden.recorded("v2") == golden.recorded("v1")
