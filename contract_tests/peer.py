"""A process with another SkyRL, or another state of the overlay, that is asked over a pipe.

:class:`Peer` starts a script, which calls :func:`serve`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from contract_tests.child import GRACE_S, REPO, Child

VARIABLE = "SKYRL_R3_PYTHON_04"


class PeerError(Exception):
    """What the peer raised, as ``type: text``."""


def python_04() -> str:
    """The interpreter that has SkyRL 0.4.0. Without it the tests fail: a skip would hide half of what is promised."""
    python = os.environ.get(VARIABLE, "")
    if not Path(python).is_file():
        pytest.fail(f"set {VARIABLE} to the interpreter of an environment with SkyRL 0.4.0, it is {python!r}")
    return python


def router() -> str:
    """The vllm-router program: the one that ``SKYRL_R3_ROUTER`` names, or the one beside this interpreter."""
    program = os.environ.get("SKYRL_R3_ROUTER") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.fail("set SKYRL_R3_ROUTER to the vllm-router program")
    return program


class Peer:
    """``script`` in a process of its own, started on the first question and kept, because its imports take seconds."""

    def __init__(self, python: str, script: Path | str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._command = [python, str(script), *arguments]
        self._env = env or {}
        self._child: Child | None = None

    def start(self) -> Child:
        """Start it now, so that several get ready at once."""
        if self._child is None:
            inherited = {key: value for key, value in os.environ.items() if key != "SKYRL_R3"}
            inherited |= {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", **self._env}
            self._child = Child(self._command, env=inherited, cwd="/", pipes=True)
        return self._child

    def ask(self, question: str, argument: Any = None) -> Any:
        """What the script's function of that name returns for ``argument``.

        Raises:
            PeerError: What it raised.
            HungError: It did not answer.
        """
        child = self.start()
        stdin, stdout = child.process.stdin, child.process.stdout
        assert stdin is not None
        assert stdout is not None
        with child.within():
            try:
                pickle.dump((question, argument), stdin)
                stdin.flush()
                ok, answer = pickle.load(stdout)
            except (BrokenPipeError, EOFError) as error:
                raise RuntimeError(f"{self._command} has ended:\n{child.stderr()}") from error
        if not ok:
            raise PeerError(answer)
        return answer

    def stop(self) -> None:
        """Close its questions, which ends it.

        Raises:
            HungError: It did not.
        """
        if self._child is not None:
            with self._child as child:
                assert child.process.stdin is not None
                with suppress(BrokenPipeError):
                    child.process.stdin.close()
                child.wait(3 * GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(questions: Mapping[str, Callable[[Any], Any]], answers: Any) -> None:
    """Answer on ``answers``, which :func:`take_stdout` gave, until there are no more questions."""
    while True:
        try:
            question, argument = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, questions[question](argument))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


def take_stdout() -> Any:
    """The pipe to the asking process. What is printed from now on goes to stderr, or would be taken for an answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
