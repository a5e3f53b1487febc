"""The suite, run in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from contract_tests.child import REPO, Ran, run_python
from contract_tests.parts import HERE


def run_suite(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> Ran:
    """Plain ``pytest`` with ``arguments``, and the modules in ``path`` to be imported."""
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(REPO)]
    command += ["-c", str(REPO / "pyproject.toml"), *arguments]
    return run_python(command, path=[path] if path else [], check=False, cwd=cwd or "/")


def test_file(name: str) -> str:
    """A file or folder of the suite, for the command line."""
    return str(HERE / name)


test_file.__test__ = False  # type: ignore[attr-defined]
