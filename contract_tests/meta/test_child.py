"""What hangs is ended, and says where it hung."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract_tests.child import GRACE_S, LIMIT_S, Child, HungError, finish
from contract_tests.meta.suite import run_suite

BELOW = """
import os, signal, sys, threading
signal.signal(signal.SIGABRT, signal.SIG_IGN)
alive = open(sys.argv[1], "w", buffering=1)
print(os.getpid(), file=alive)
threading.Event().wait()
"""
# The second process holds the output of the first, and does not mind SIGABRT.
HANGS = f"""
import subprocess, sys
def here_it_hangs(path, own_session):
    print("said before", flush=True)
    below = subprocess.Popen([sys.executable, "-c", {BELOW!r}, path], start_new_session=own_session == "True")
    below.wait()
here_it_hangs(*sys.argv[1:])
"""


class Pipe:
    """A named pipe, which a process holds open as long as it lives."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def next(self) -> bytes:
        """What was written, or nothing when all who could write are gone."""
        assert select.select([self.reader], [], [], 120)[0]
        return os.read(self.reader, 100)


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "alive")
    yield pipe
    os.close(pipe.reader)


@pytest.mark.parametrize("own_session", ["True", "False"])
def test_a_process_that_hangs_is_ended_with_what_it_started(own_session: str, alive: Pipe) -> None:
    with Child([sys.executable, "-c", HANGS, alive.path, own_session]) as child:
        assert alive.next()
        with pytest.raises(HungError) as caught:
            child.wait(0.01)
    assert alive.next() == b""
    assert child.process.returncode == -signal.SIGABRT
    for text in ("not done after 0.01 s", "said before", "in here_it_hangs"):
        assert text in str(caught.value)


def test_a_dialogue_that_hangs_is_ended(alive: Pipe) -> None:
    with Child([sys.executable, "-c", HANGS, alive.path, "False"], pipes=True) as child:
        assert child.process.stdout is not None
        assert alive.next()
        with pytest.raises(HungError, match="in here_it_hangs"), child.within(0.01):
            child.process.stdout.read()
    assert alive.next() == b""


def test_what_a_process_leaves_behind_keeps_nobody_waiting(alive: Pipe) -> None:
    ran = finish([sys.executable, "-c", HANGS.replace("below.wait()", ""), alive.path, "False"])
    os.kill(int(alive.next()), signal.SIGKILL)
    assert alive.next() == b""
    assert (ran.returncode, ran.stdout) == (0, "said before\n")


def test_a_test_that_hangs_ends_the_run(tmp_path: Path) -> None:
    """The stacks are seen although output is captured."""
    path = tmp_path / "test_hangs.py"
    path.write_text("import threading\ndef test_here():\n    threading.Event().wait()\n")
    ran = run_suite(str(path), "-o", "faulthandler_timeout=5")
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "Timeout (0:00:05)!" in ran.stderr
    assert 'test_hangs.py", line 3 in test_here' in ran.stderr


def test_every_test_has_a_limit(pytestconfig: pytest.Config) -> None:
    """Beyond that of a process, whose own stacks say more."""
    assert float(pytestconfig.getini("faulthandler_timeout")) > LIMIT_S + 4 * GRACE_S
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True
