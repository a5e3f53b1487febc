"""Run a function of this package in a process of its own, with a limit.

To import SkyRL, or to connect to Ray, is to run code that nobody here answers for: it may hang, end the process, or
write what it likes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

__all__ = ["Ran", "run", "said_by"]

_START = (
    "import json, sys; function, result, sys.path[:] = json.loads(sys.argv.pop()); "
    "from skyrl_r3 import aside; aside._main(function, result)"
)
_FLAGS = {"E": "ignore_environment", "s": "no_user_site", "S": "no_site"}
_LONGEST = 300


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of it.

    Attributes:
        values: What the function yielded.
        ended: How the process ended before the function did; empty where the function came to its end.
    """

    values: list[Any]
    ended: str


def run(function: str, *, limit_s: float) -> Ran:
    """Run a generator function ``module:name``, which yields what JSON can say, with this interpreter and its path.

    What it writes is kept off. Its processes end with it, with this one, and after ``limit_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, noise = Path(folder, "result"), Path(folder, "noise")
        result.touch()
        flags = [f"-{letter}" for letter, name in _FLAGS.items() if getattr(sys.flags, name)]
        argument = json.dumps([function, str(result), sys.path])
        with noise.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", _START, argument],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            ended = _ending(child.wait(limit_s))
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        lines = result.read_text().splitlines()
        if lines and lines[-1] == "null":
            return Ran(values=[json.loads(line) for line in lines[:-1]], ended="")
        written = noise.read_bytes()[-4096:].decode(errors="replace").split("\n")
        last = " ".join(next((line for line in reversed(written) if line.strip()), "").split())[:_LONGEST]
        values = []
        with suppress(ValueError):  # The last one may be cut off.
            for line in lines:
                values.append(json.loads(line))
        return Ran(values=values, ended=f"{ended}{f'; it wrote last: {last}' if last else ''}")


def said_by(error: BaseException) -> str:
    """``error`` in a line, even where its text cannot be had."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be shown)"
    return " ".join(f"{type(error).__name__}: {text}".split())[:_LONGEST]


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def _main(function: str, result: str) -> None:
    """What the process does. It ends here: whatever SkyRL has registered or started is not waited for."""
    _end_with_parent()
    module, _, name = function.partition(":")
    with open(result, "w") as file:
        for value in getattr(import_module(module), name)():
            file.write(json.dumps(value) + "\n")
            file.flush()
        file.write("null\n")
    os._exit(0)


def _end_with_parent() -> None:
    """Stdin is a pipe from the parent, which closes when that has ended, however it did."""
    watched = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        os.read(watched, 1)
        os.killpg(0, signal.SIGKILL)

    Thread(target=watch, daemon=True).start()
