"""Processes that tests start, none of which is waited for without a limit.

Code runs in a process of its own because the overlay changes modules of the process that it is in, for good.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from threading import Event, Timer
from typing import IO, Any, Self

REPO = Path(__file__).parent.parent

LIMIT_S = 300
"""What a process may take. The slowest take a minute on two cores."""
GRACE_S = 10
"""What it may take to end once it is told to: first to write where it hangs, then to be gone."""
_SHOWN = 10_000

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


class HungError(Exception):
    """A process did not end in time. The text has its stacks and whatever else it wrote."""


class Child:
    """A process in a session of its own, so that it can be ended with everything that it has started.

    It writes to files: what it leaves behind may hold them for ever, and nobody waits for that, as one does at a pipe.

    Args:
        pipes: Whether its stdin and stdout are pipes to this process instead.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        pipes: bool = False,
    ) -> None:
        self._command = command
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env={**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"},
            cwd=cwd,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit status.

        Raises:
            HungError: It has not ended within ``limit_s``. It has now.
        """
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise self._hung(limit_s) from None

    @contextmanager
    def within(self, limit_s: float = LIMIT_S) -> Iterator[None]:
        """For a dialogue over its pipes, which ends when the process does.

        Raises:
            HungError: The dialogue has not ended within ``limit_s``. The process has now.
        """
        ended = Event()

        def end() -> None:
            self.end()
            ended.set()

        timer = Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join(4 * GRACE_S)
            if ended.is_set():
                raise self._hung(limit_s)

    def _hung(self, limit_s: float) -> HungError:
        said = "\n".join(text[-_SHOWN:] for text in (shlex.join(self._command), self.stdout(), self.stderr()))
        return HungError(f"not done after {limit_s:g} s, and ended: {said}")

    def end(self) -> None:
        """End it and what it has started. Those that are Python's write their stacks to stderr, one after the other."""
        below = _descendants(self.process.pid)  # Before it ends: nothing tells later whose they were.
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        for pid in below:
            _signal(pid, signal.SIGABRT)
            time.sleep(0.2)
        for pid in below:
            _signal(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)

    def stdout(self) -> str:
        """What it has written by now."""
        return _read(self._out)

    def stderr(self) -> str:
        """What it has written by now."""
        return _read(self._err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()
        for file in filter(None, (self.process.stdin, self.process.stdout, self._out, self._err)):
            with suppress(BrokenPipeError):
                file.close()


def _read(file: IO[bytes]) -> str:
    # At an offset of its own: the process writes at the one that this file object shares with it.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """What ``pid`` has started, and what that has, in sessions of their own too. Linux; elsewhere none is found."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # After the command in parentheses: state, parent.
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def finish(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end.

    Raises:
        HungError: It takes longer than ``limit_s``.
    """
    with Child(command, env=env, cwd=cwd) as child:
        status = child.wait(limit_s)
        return subprocess.CompletedProcess(command, status, child.stdout(), child.stderr())


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
    ran = finish(command, env=inherited | dict(env or {}), cwd=cwd)
    if check:
        assert ran.returncode == 0, f"status {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    reports = [line.removeprefix("REPORT ") for line in ran.stdout.splitlines() if line.startswith("REPORT ")]
    values = json.loads(reports[-1]) if reports else {}
    return Ran(values=values, stdout=ran.stdout, stderr=ran.stderr, returncode=ran.returncode)
