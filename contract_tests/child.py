"""Run Python code in a process of its own: the overlay changes modules of the process that it is in, for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

REPO = Path(__file__).parent.parent

_WITHOUT_HOOK = "import skyrl_r3.autoload\nskyrl_r3.autoload.uninstall()\n"
_WITH_HOOK = "import skyrl_r3.autoload\nskyrl_r3.autoload.start()\n"
_HELPERS = """
def report(**values):
    import json
    print("\\nREPORT " + json.dumps(values))

def states():
    import skyrl_r3
    return {row.target: row.state for row in skyrl_r3.status()}

def details():
    import skyrl_r3
    return {row.target: row.detail for row in skyrl_r3.status()}

def patched(function):
    return hasattr(getattr(function, "__func__", function), "__wrapped__")
"""


@dataclass(frozen=True)
class Ran:
    """What a process left behind. ``values`` are those that its code gave to ``report``."""

    values: dict[str, Any]
    stdout: str
    stderr: str
    returncode: int


def run(
    code: str,
    *,
    path: Sequence[Path | str] = (),
    hook: bool = False,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> Ran:
    """Run ``code`` with the checkout's skyrl_r3, after the helpers ``report``, ``states``, ``details``, ``patched``.

    Args:
        path: Folders to be searched first.
        hook: Whether the import hook is installed first, as the wheel's ``.pth`` file does it. If not, it is taken
            out, should the wheel be installed beside the checkout.
        check: Whether a status other than 0 fails the test.
    """
    # Compiled with the helpers in front, so no `from __future__` in the code of a test.
    script = _HELPERS + (_WITH_HOOK if hook else _WITHOUT_HOOK) + dedent(code)
    return run_python([sys.executable, "-c", script], path=[*path, REPO], env=env, check=check)


def run_python(
    command: Sequence[str],
    *,
    path: Sequence[Path | str] = (),
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path | str = "/",
) -> Ran:
    """Run ``command`` with ``path`` as its PYTHONPATH, away from the checkout, and without a switch of this process."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SKYRL_R3")}
    inherited |= {"PYTHONPATH": os.pathsep.join(str(folder) for folder in path), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        command, env=inherited | dict(env or {}), capture_output=True, text=True, cwd=cwd, timeout=300, check=False
    )
    if check:
        assert ran.returncode == 0, f"status {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    reports = [line.removeprefix("REPORT ") for line in ran.stdout.splitlines() if line.startswith("REPORT ")]
    values = json.loads(reports[-1]) if reports else {}
    return Ran(values=values, stdout=ran.stdout, stderr=ran.stderr, returncode=ran.returncode)
