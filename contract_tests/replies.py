"""Replies of ``/skyrl/v1/generate``, written and read without the code that is under test."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

FRAME, PACKED, NESTED = "frame/1", "packed", "nested"
ASKS = "routed_experts_encodings"
START = "routed_experts_prompt_start"
URL = "/skyrl/v1/generate"
FRAME_TYPE = "application/vnd.skyrl-r3.frame"


def write(
    encoding: str,
    token_ids: list[int],
    routes: np.ndarray | None,
    logprobs: list[float] | None = None,
    *,
    finish_reason: str | None = "stop",
    **metadata: Any,
) -> bytes:
    """A reply with ``routes`` [rows, layers, topk], in their own dtype. ``metadata`` is the frame's."""
    if encoding == FRAME:
        arrays: dict[str, np.ndarray] = {"token_ids": np.array(token_ids, np.int32)}
        if logprobs is not None:
            arrays["logprobs"] = np.array(logprobs, np.float32)
        if routes is not None:
            arrays["routed_experts"] = np.ascontiguousarray(routes)
        given = {"format": "skyrl-r3/1", "finish_reason": finish_reason, **metadata}
        return save(arrays, {key: str(value) for key, value in given.items() if value is not None})
    choice = {
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "logprobs": None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]},
        "routed_experts": None if routes is None else routes.tolist() if encoding == NESTED else envelope(routes),
    }
    return json.dumps({"choices": [choice]}, separators=(",", ":")).encode()


def compacted(routes: np.ndarray) -> np.ndarray:
    """``routes`` in the smallest dtype of the wire."""
    largest = int(routes.max(initial=0))
    return routes.astype(np.uint8 if largest < 2**8 else np.int16 if largest < 2**15 else np.int32)


def envelope(routes: np.ndarray) -> dict[str, Any]:
    """The packed form of ``routes`` in their own dtype."""
    data = base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode()
    return {"data": data, "shape": list(routes.shape), "dtype": routes.dtype.name}


@dataclass(frozen=True)
class Read:
    """What is in a reply. ``metadata`` and the names of ``tensors`` are the frame's."""

    encoding: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[float] | None
    routes: np.ndarray | None
    metadata: dict[str, str]
    tensors: list[str]


def read(body: bytes) -> Read:
    """The reply in ``body``."""
    if body[:1] == b"{":
        (choice,) = json.loads(body)["choices"]
        given, logprobs = choice["routed_experts"], choice["logprobs"]
        return Read(
            encoding=NESTED if isinstance(given, list) else PACKED,
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            logprobs=None if logprobs is None else [entry["logprob"] for entry in logprobs["content"]],
            routes=unpacked(given) if isinstance(given, dict) else None if given is None else np.array(given),
            metadata={},
            tensors=[],
        )
    arrays = load(body)
    metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    logprobs = arrays.get("logprobs")
    return Read(
        encoding=FRAME,
        token_ids=arrays["token_ids"].tolist(),
        finish_reason=metadata.get("finish_reason"),
        logprobs=None if logprobs is None else logprobs.tolist(),
        routes=arrays.get("routed_experts"),
        metadata=metadata,
        tensors=sorted(arrays),
    )


def unpacked(given: dict[str, Any]) -> np.ndarray:
    """The array in an envelope."""
    return np.frombuffer(base64.b64decode(given["data"], validate=True), given["dtype"]).reshape(given["shape"])
