"""Which encoding a reply of ``/skyrl/v1/generate`` comes in.

A client names the encodings it reads, most wanted first, in the request field ``routed_experts_encodings``. A body
field and no header, because vllm-router passes unknown fields on and drops headers (seen with 0.1.17). Without the
field a server answers as the SkyRL release that it runs in does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from skyrl_r3 import frame, packed
from skyrl_r3.errors import ReplyError, describe
from skyrl_r3.frame import FRAME
from skyrl_r3.packed import NESTED, PACKED
from skyrl_r3.reply import Reply

__all__ = ["ENCODINGS", "ENCODINGS_FIELD", "GENERATE_PATH", "START_FIELD", "choose_encoding", "load"]

GENERATE_PATH = "/skyrl/v1/generate"
ENCODINGS_FIELD = "routed_experts_encodings"
ENCODINGS = (FRAME, PACKED, NESTED)
"""What a client reads, most wanted first."""
WRITTEN = MappingProxyType({"add_custom_endpoints": (FRAME, PACKED, NESTED), "add_packing_endpoints": (FRAME, PACKED)})
"""What a server writes, by its hook: most compact first, what its SkyRL writes without the overlay last."""
START_FIELD = "routed_experts_prompt_start"
"""vLLM's sampling parameter: the first token that gets a row."""


def choose_encoding(wanted: Any, written: Sequence[str]) -> str:
    """The first encoding of a request's list that the server writes.

    Raises:
        ReplyError: Not a list of names, or none of them is in ``written``.
    """
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise ReplyError(ENCODINGS_FIELD, expected="a list of names", got=describe(wanted))
    for name in wanted:
        if name in written:
            return name
    raise ReplyError(ENCODINGS_FIELD, expected=f"one of {', '.join(written)}", got=repr(wanted)[:80])


def load(body: bytes) -> tuple[Reply, str]:
    """Read a reply in any encoding, and say which it was.

    Raises:
        ReplyError: ``body`` is no reply.
    """
    return (frame.load(body), FRAME) if frame.is_frame(body) else packed.read(packed.parse(body))
