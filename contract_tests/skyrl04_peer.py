"""The packed codec of SkyRL 0.4.0, run in a process of its own and asked over a pipe.

The test process imports the SkyRL that the overlay is for, 0.3.0, so this one cannot be imported there. The file is
both sides: :class:`Peer` in the test process starts it as a script.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

VARIABLE = "SKYRL_R3_SKYRL04"


class PeerError(Exception):
    """What SkyRL 0.4.0 raised."""


class Peer:
    """Starts the process on the first question and keeps it, because its imports take seconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, argument: Any = None) -> Any:
        """Have SkyRL 0.4.0 answer one of ``version``, ``pack``, ``decode``, ``load``, ``load_and_decode``."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((question, argument), process.stdin)
        process.stdin.flush()
        ok, answer = pickle.load(process.stdout)
        if not ok:
            raise PeerError(answer)
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        directory = os.environ.get(VARIABLE, "")
        if not os.path.isdir(os.path.join(directory, "skyrl")):
            pytest.fail(f"set {VARIABLE} to the directory of the unpacked skyrl 0.4.0 wheel, it is {directory!r}")
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self._process


def _serve(directory: str) -> None:
    sys.path.insert(0, directory)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever an import prints would be taken for an answer

    from importlib.metadata import distributions

    import skyrl
    from skyrl.backends.skyrl_train.inference_servers import generate_wire  # pyright: ignore[reportAttributeAccessIssue]

    def load_and_decode(body: bytes) -> Any:
        choice = generate_wire.load_packed_body(body)["choices"][0]
        packed = choice["routed_experts"]
        return None if packed is None else generate_wire.decode_packed_routed_experts(packed)

    def load(body: bytes) -> Any:
        reply = generate_wire.load_packed_body(body)
        packed = reply["choices"][0]["routed_experts"]
        if packed is not None:
            packed["data"] = bytes(packed["data"])
        return reply

    def version(_: None) -> tuple[str, str]:
        found = [dist.version for dist in distributions(name="skyrl", path=[directory])]
        return found[0], str(skyrl.__file__)

    questions = {
        "version": version,
        "pack": generate_wire.pack_routed_experts,
        "decode": generate_wire.decode_packed_routed_experts,
        "load": load,
        "load_and_decode": load_and_decode,
    }
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


if __name__ == "__main__":
    _serve(sys.argv[1])
