"""Golden files: what has been written once has to be written, and read, like that for ever.

A version of them is a folder. It is never written anew: a change of the wire is another version, with files of its
own, and readers keep reading the old ones. The writer is the oracle's, not an implementation.

    python -m contract_tests.golden v2    # and then add it to VERSIONS
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from contract_tests import oracle
from contract_tests.adapter import ENCODINGS, Reply

FOLDER = Path(__file__).with_name("golden")
SUMS = "SHA256SUMS"

# Their cases stand here too, so that to lose some, with their digests or all of them, is not to have none.
VERSIONS = {"v1": {"int16", "int32", "no-routes", "no-rows", "one-id", "told", "uint8", "uint8-order"}}

# Logprobs are such that a float32 holds them.
_CASES: dict[str, dict[str, Any]] = {
    "uint8": {"ids": [[[0, 1], [2, 255]], [[3, 4], [5, 6]], [[7, 8], [9, 10]]], "token_ids": [5, 6]},
    "uint8-order": {"ids": np.arange(24).reshape(4, 3, 2).tolist(), "token_ids": [926, 0, 2147483647]},
    "int16": {"ids": [[[256, 0], [383, 32767]]], "token_ids": [1], "finish_reason": "stop", "logprobs": [-0.5]},
    "int32": {"ids": [[[32768, 1]], [[2147483647, 0]]], "token_ids": [1, 2], "logprobs": [-9999.0, 0.0]},
    "one-id": {"ids": [[[7]]], "token_ids": [1], "finish_reason": "length", "logprobs": [-1.25]},
    "no-rows": {"ids": [], "shape": [0, 48, 8], "token_ids": [], "finish_reason": "abort", "logprobs": []},
    "no-routes": {"ids": None, "token_ids": [1, 2], "finish_reason": "stop", "logprobs": [-0.25, -3.0]},
    "told": {
        "ids": [[[1, 2]], [[3, 4]], [[5, 6]]],
        "token_ids": [9, 2],
        "finish_reason": "stop\u00e9",
        "logprobs": [-0.5, -1.0],
        "metadata": {"prompt_tokens": 4, "start": 2, "num_experts": 128, "model": "org/modèle"},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Golden:
    """One reply, and its bytes in every encoding. ``envelope`` is that of its routes alone."""

    name: str
    reply: Reply
    bodies: dict[str, bytes]
    envelope: bytes


def versions() -> list[str]:
    """The versions that there are."""
    return sorted(VERSIONS)


def read(version: str) -> list[Golden]:
    """The golden files of a version.

    Raises:
        ValueError: There are fewer, or more.
    """
    folder = FOLDER / version
    names = sorted(path.name.removesuffix(".case.json") for path in folder.glob("*.case.json"))
    if set(names) != VERSIONS[version]:
        raise ValueError(f"{folder}: expected the cases {sorted(VERSIONS[version])}, got {names}")
    found = []
    for name in names:
        bodies = {encoding: (folder / _file(name, encoding)).read_bytes() for encoding in ENCODINGS}
        envelope = (folder / f"{name}.envelope.json").read_bytes()
        reply = _reply(json.loads((folder / f"{name}.case.json").read_text("utf-8")))
        found.append(Golden(name, reply, bodies, envelope))
    return found


def sums(version: str) -> dict[str, str]:
    """The digests of the files of a version as they are."""
    paths = sorted(path for path in (FOLDER / version).iterdir() if path.is_file() and path.name != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def recorded(version: str) -> dict[str, str]:
    """The digests that were taken when the version was made."""
    lines = (FOLDER / version / SUMS).read_text("utf-8").splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def write(version: str) -> None:
    """Make a version.

    Raises:
        FileExistsError: It is there.
    """
    folder = FOLDER / version
    folder.mkdir(parents=True)
    for name, case in _CASES.items():
        reply = _reply(case)
        (folder / f"{name}.case.json").write_text(json.dumps(case, indent=1, ensure_ascii=False) + "\n", "utf-8")
        for encoding in ENCODINGS:
            (folder / _file(name, encoding)).write_bytes(oracle.write(reply, encoding))
        envelope = None if reply.routes is None else oracle.envelope(oracle.canonical(reply.routes))
        (folder / f"{name}.envelope.json").write_bytes(orjson.dumps(envelope))
    lines = [f"{digest}  {name}\n" for name, digest in sums(version).items()]
    (folder / SUMS).write_text("".join(lines), "utf-8")


def _file(name: str, encoding: str) -> str:
    return f"{name}.frame" if encoding == "frame/1" else f"{name}.{encoding}.json"


def _reply(case: dict[str, Any]) -> Reply:
    ids = case["ids"]
    shape = case.get("shape", np.shape(ids) if ids is not None else None)
    routes = None if ids is None else oracle.canonical(np.array(ids, np.int64).reshape(shape))
    if routes is not None:
        routes.flags.writeable = False  # Or an implementation that writes it would spoil it for the next one.
    return Reply(case["token_ids"], case.get("finish_reason"), case.get("logprobs"), routes, case.get("metadata", {}))


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    version = arguments[0] if len(arguments) == 1 else ""
    if not re.fullmatch("v[0-9]+", version):
        sys.exit("usage: python -m contract_tests.golden v2")
    try:
        write(version)
    except FileExistsError:
        sys.exit(f"{version} is there, and is never written anew")


if __name__ == "__main__":
    main(sys.argv[1:])
