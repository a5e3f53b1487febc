"""A child process that is asked in JSON lines, and what the kernel counts for it. Linux only."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run: Ctrl-C, a supervisor, a closed terminal."""


class BenchError(Exception):
    """The benchmark cannot go on, or a side delivered something else than the engine gave out."""


def answers() -> TextIO:
    """In the child: where its answers go. What libraries print goes to stderr from then on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


class Child:
    """A process in a session of its own, so that Ctrl-C reaches only us, who then end it.

    Args:
        name: For errors.
        log: File for its stderr, the end of which is shown when it fails.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        self._read = b""
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )

    def send(self, **command: Any) -> None:
        """Ask something."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.fail("ended")

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line that it writes.

        Raises:
            BenchError: It ended, said what went wrong, or ``limit_s`` passed.
        """
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._read:
            if not select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0]:
                self.fail(f"did not answer within {limit_s:.0f} s")
            piece = os.read(descriptor, 2**20)
            if not piece:
                self.fail("ended")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        found = json.loads(line)
        if "error" in found:
            self.fail(f"failed:\n{found['error']}")
        return found

    def fail(self, why: str) -> Any:
        """Raise a BenchError with the end of the log."""
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise BenchError(f"{self.name} {why}" + (f"\nThe end of its log:\n{tail}" if tail else ""))

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, by its CPU clock: ``/proc/<pid>/stat`` counts in steps of 10 ms."""
        return time.clock_gettime(~self._process.pid << 3 | 2)  # What clock_getcpuclockid(3) gives.

    def reset_peak(self) -> None:
        """Have :meth:`peak_bytes` begin anew."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that the process had resident since :meth:`reset_peak`."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def stop(self) -> None:
        """Kill it and what it started: it has nothing to save, and vLLM's modules take seconds to be torn down."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # It leads the group of its session.
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # It had not read all.
                    stream.close()
