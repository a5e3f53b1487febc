"""What is installed in an interpreter, which is asked and not imported, and the machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_r3.bench.pipe import BenchError

LINES = ("0.3", "0.4")
"""The SkyRL lines that are measured."""

_ASK_S = 120
_QUESTION = """
import importlib.metadata, importlib.util, json, platform
owners = importlib.metadata.packages_distributions()
def version(module):
    if importlib.util.find_spec(module) is None:
        return None
    if module == "skyrl_r3":  # Has no metadata where it is not installed but on the path.
        import skyrl_r3
        return skyrl_r3.__version__
    return importlib.metadata.version(owners[module][0]) if module in owners else "unknown"
print(json.dumps({"python_version": platform.python_version()}
    | {module: version(module) for module in ("skyrl", "vllm", "numpy", "aiohttp", "skyrl_r3")}))
"""


def look_at(python: str, folder: Path) -> dict[str, Any]:
    """Versions in the environment of ``python``: its ``line`` of SkyRL, or as ``missing`` why it can't be measured."""
    found: dict[str, Any] = {"python": python}
    try:
        ran = subprocess.run(
            [python, "-c", _QUESTION], cwd=folder, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return found | {"missing": f"{python} does not run: {error}"}
    if ran.returncode:
        return found | {"missing": f"{python} failed: {ran.stderr.strip().splitlines()[-1:]}"}
    try:
        found |= json.loads(ran.stdout.splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return found | {"missing": f"{python} is no Python: it answered {ran.stdout[:40]!r}"}
    if absent := [module for module in ("skyrl", "vllm", "skyrl_r3") if found[module] is None]:
        return found | {"missing": f"no {' and no '.join(absent)} in {python}"}
    line = ".".join(found["skyrl"].split(".")[:2])
    if line not in LINES:
        return found | {"missing": f"SkyRL {found['skyrl']} in {python}, measured are {' and '.join(LINES)}"}
    return found | {"line": line}


def by_line(environments: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The environment for each line of SkyRL.

    Raises:
        BenchError: Two have the same line, so that it is open which one is meant.
    """
    found: dict[str, dict[str, Any]] = {}
    for environment in environments:
        if line := environment.get("line"):
            if line in found:
                both = f"{found[line]['python']} and {environment['python']}"
                raise BenchError(f"{both} have the same SkyRL, {line}: name one of them")
            found[line] = environment
    return found


def find_router(pythons: Sequence[str]) -> str | None:
    """The vllm-router beside one of the interpreters, else the one on the path."""
    folders = [str(Path(python).absolute().parent) for python in pythons]
    return next(filter(None, (shutil.which("vllm-router", path=path) for path in (*folders, None))), None)


def machine() -> dict[str, Any]:
    """What it runs on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
    }
