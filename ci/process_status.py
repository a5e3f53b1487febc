"""What a process says about the overlay in it: one JSON file per process, read by ``ci/demo.py``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any


def status_rows() -> list[dict[str, Any]] | None:
    """Rows of ``skyrl_r3.status()`` in this process, or None when the package is not installed.

    It only reads: ``status()`` enables nothing, so a process that proves itself patched was patched by the import hook.
    """
    if importlib.util.find_spec("skyrl_r3") is None:
        return None
    import skyrl_r3

    return [{field.name: getattr(row, field.name) for field in dataclasses.fields(row)} for row in skyrl_r3.status()]


def write_status(path: Path, role: str, **more: Any) -> None:
    """Write role, pid, the overlay's switch and status rows, and what else the caller wants to prove."""
    proof = {"role": role, "pid": os.getpid(), "switch": os.environ.get("SKYRL_R3"), "status": status_rows(), **more}
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(proof, indent=1, default=str))
    scratch.rename(path)
