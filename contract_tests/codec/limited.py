"""Decoding under a memory limit, in a process of its own. ``test_memory.py`` starts it and reads what it prints."""

from __future__ import annotations

import base64
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from contract_tests import adapter, oracle
from contract_tests.adapter import LONGEST_ERROR, Reply

ROOM_BYTES = 64 * 2**20
"""What an implementation may have on top of what it has when it is loaded and has worked."""
LARGE_BYTES = 24 * 2**20
"""Routes that have to be decoded in that: their ids once, and not three times."""


def _cases(impl: adapter.Adapter) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """What is tried, by name: a call and what it is given. Everything large is made before there is a limit."""
    small = {"data": "AAAA", "shape": [1, 1, 3], "dtype": "uint8"}
    many = np.resize(np.arange(251, dtype=np.uint8), (min(LARGE_BYTES, impl.quirks.max_bytes) // 384, 48, 8))
    text = base64.b64encode(many.tobytes()).decode()
    long = "A" * (200 * 2**20)
    cases: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "2**40 rows": (impl.decode, small | {"shape": [2**40, 1, 1]}),
        "2 GiB in the cap, and no data": (impl.decode, small | {"shape": [2**31 - 1, 1, 1], "data": ""}),
        "2**93 ids": (impl.decode, small | {"shape": [2**31] * 3}),
        "2**60 layers of no rows": (impl.decode, small | {"shape": [0, 2**60, 1], "data": ""}),
        "int32 beyond the cap": (impl.decode, small | {"shape": [2**20, 2**10, 8], "dtype": "int32"}),
        "200 MiB of base64 for three ids": (impl.decode, small | {"data": long}),
        "200 MiB of base64 and no such dtype": (impl.decode, small | {"data": long, "dtype": "int64"}),
        "24 MiB of ids": (impl.decode, small | {"data": text, "shape": list(many.shape)}),
    }
    ids = np.full((min(LARGE_BYTES, impl.quirks.max_bytes) // 768, 48, 8), 300, np.int16)
    cases["12 MiB are encoded"] = (impl.encode, ids[: len(ids) // 2])
    for encoding in impl.quirks.reads:
        if encoding != adapter.NESTED:
            cases[f"{encoding}: 24 MiB of ids"] = (impl.load, _body(ids, encoding))
    if adapter.FRAME in impl.quirks.reads:
        info = {"dtype": "U8", "shape": [2**40, 48, 8], "data_offsets": [0, 2**40 * 384]}
        tokens = {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}
        header = {"__metadata__": {"format": oracle.FORMAT}, "token_ids": tokens, "routed_experts": info}
        cases["frame/1: 2**40 rows"] = (impl.load, oracle.frame(header, b""))
        cases["frame/1: a header of 2**62 bytes"] = (impl.load, (2**62).to_bytes(8, "little") + b"{}")
        cases["frame/1: a header of 200 MiB"] = (impl.load, oracle.frame(b" " * (200 * 2**20), b""))
    return cases


def _body(ids: Any, encoding: str) -> bytes:
    """A body with many ids. The oracle's own writer makes them one by one."""
    small = oracle.write(Reply([5], routes=ids[:1]), encoding)
    if encoding == adapter.FRAME:
        head = int.from_bytes(small[:8], "little")
        header = json.loads(small[8 : 8 + head])
        begin = header["routed_experts"]["data_offsets"][0]
        header["routed_experts"] |= {"shape": list(ids.shape), "data_offsets": [begin, begin + ids.nbytes]}
        return oracle.frame(header, small[8 + head :][:begin] + ids.tobytes())
    envelope = {"data": base64.b64encode(ids.tobytes()).decode(), "shape": list(ids.shape), "dtype": ids.dtype.name}
    return small.replace(json.dumps(oracle.envelope(ids[:1]), separators=(",", ":")).encode(),
                         json.dumps(envelope, separators=(",", ":")).encode())  # fmt: skip


def main() -> None:
    impl = adapter.load(sys.argv[1])
    cases = _cases(impl)
    right = oracle.envelope(np.arange(300, dtype=np.int16).reshape(100, 3, 1) + 256)
    for _ in range(3):  # So that what is made once is made.
        impl.decode(right)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes = {}
    for name, (call, payload) in cases.items():
        try:
            call(payload)
            outcomes[name] = "decoded"
        except impl.refusals as error:
            outcomes[name] = "refused" if len(str(error)) < LONGEST_ERROR else "refused, and quoted"
        except MemoryError:
            outcomes[name] = "MemoryError"
    Path(sys.argv[2]).write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
