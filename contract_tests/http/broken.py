"""Bodies that arrive whole, with status 200, and are not the reply."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from contract_tests import canned, replies
from contract_tests.adapter import FRAME, NESTED, PACKED, Reply
from contract_tests.http.exchange import LOGPROBS, PROMPT, RESPONSE, body_of, reply_to

RIGHT = reply_to(PROMPT)
ROUTES: Any = RIGHT.routes
PAGE = b"<!doctype html><html><body><h1>Service unavailable</h1></body></html>"


def _with(**change: Any) -> Reply:
    given = {"token_ids": RESPONSE, "finish_reason": "stop", "logprobs": LOGPROBS, "routes": ROUTES}
    return Reply(**{**given, **change})


def _choice(**change: Any) -> bytes:
    """JSON whose only choice is right but for ``change``; what is ``...`` in there is left out."""
    content = {"content": [{"logprob": value} for value in LOGPROBS]}
    choice = {"token_ids": RESPONSE, "finish_reason": "stop", "logprobs": content}
    choice |= {"routed_experts": replies.envelope(ROUTES), **change}
    present = {key: value for key, value in choice.items() if value is not ...}
    return json.dumps({"choices": [present]}, separators=(",", ":")).encode()


def _envelope(**change: Any) -> bytes:
    envelope = {**replies.envelope(ROUTES), **change}
    return _choice(routed_experts={key: value for key, value in envelope.items() if value is not ...})


def _data(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


ANYWHERE: dict[str, bytes] = {
    "empty": b"",
    "white space": b" \r\n ",
    "a page": PAGE,
    "text": b"upstream connect error or disconnect/reset before headers",
    "NUL bytes": bytes(64),
    "not UTF-8": b'{"choices":[{"finish_reason":"\xff\xfe"}]}',
    "bare NaN": _choice(logprobs={"content": [{"logprob": float("nan")}] * 3}),
    "bare Infinity": _choice(logprobs={"content": [{"logprob": float("-inf")}] * 3}),
    "null": b"null",
    "a number": b"7",
    "a string": b'"stop"',
    "a list": b'[{"token_ids":[9]}]',
    "an empty object": b"{}",
    "an error with status 200": b'{"error":{"message":"engine died","code":500}}',
    "choices null": b'{"choices":null}',
    "choices empty": b'{"choices":[]}',
    "choices an object": b'{"choices":{"0":{}}}',
    "choices of text": b'{"choices":["stop"]}',
    "a chat completion": b'{"choices":[{"index":0,"message":{"role":"assistant","content":"9 2 6"}}]}',
    "events": b'data: {"choices":[{"token_ids":[9]}]}\n\ndata: [DONE]\n\n',
}
"""No reply in any encoding."""

_PARTS: dict[str, Callable[[], bytes]] = {
    "no token ids": lambda: _choice(token_ids=...),
    "token ids null": lambda: _choice(token_ids=None),
    "token ids as text": lambda: _choice(token_ids="926"),
    "a token of text": lambda: _choice(token_ids=[9, "2", 6]),
    "a token of float": lambda: _choice(token_ids=[9, 2.5, 6]),
    "no finish reason": lambda: _choice(finish_reason=...),
    "a logprob of null": lambda: _choice(logprobs={"content": [{"logprob": None}] * 3}),
    "a logprob of text": lambda: _choice(logprobs={"content": [{"logprob": "-0.5"}] * 3}),
    "logprobs as a list": lambda: _choice(logprobs=LOGPROBS),
    "no routes": lambda: _choice(routed_experts=...),
    "routes null": lambda: _choice(routed_experts=None),
    "routes a number": lambda: _choice(routed_experts=7),
    "routes as .npy": lambda: _choice(routed_experts="k05VTVBZAQB2AHsn"),
    "cut in mid routes": lambda: _choice()[:-40],
}

_PACKED: dict[str, Callable[[], bytes]] = {
    "no dtype": lambda: _envelope(dtype=...),
    "no shape": lambda: _envelope(shape=...),
    "no data": lambda: _envelope(data=...),
    "dtype of int64": lambda: _envelope(dtype="int64"),
    "dtype with a byte order": lambda: _envelope(dtype=">i2"),
    "dtype of float": lambda: _envelope(dtype="float32"),
    "wider dtype than sent": lambda: _envelope(dtype="int16"),
    "wider dtype than needed": lambda: _choice(routed_experts=replies.envelope(ROUTES.astype(np.int16))),
    "a negative id": lambda: _choice(routed_experts=replies.envelope(ROUTES.astype(np.int16) - 9)),
    "two dimensions": lambda: _envelope(shape=[7, 6]),
    "a dimension of float": lambda: _envelope(shape=[7.0, 3, 2]),
    "a dimension below 0": lambda: _envelope(shape=[-7, -3, 2]),
    "a dimension beyond memory": lambda: _envelope(shape=[2**40, 3, 2]),
    "shape of fewer rows": lambda: _envelope(shape=[6, 3, 2]),
    "shape of more rows": lambda: _envelope(shape=[8, 3, 2]),
    "a byte missing": lambda: _envelope(data=_data(ROUTES.tobytes()[:-1])),
    "a byte too many": lambda: _envelope(data=_data(ROUTES.tobytes() + b"\0")),
    "data not base64": lambda: _envelope(data="!" * 56),
    "data without padding": lambda: _choice(
        routed_experts={"data": _data(ROUTES[:, :1, :1].tobytes()).rstrip("="), "shape": [7, 1, 1], "dtype": "uint8"}
    ),
    "data a list": lambda: _envelope(data=list(ROUTES.tobytes())),
    "base64 without an end": lambda: _choice()[: _choice().find(b'"data"') + 20],
}

_LISTS: dict[str, Callable[[], bytes]] = {
    "ragged rows": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[1, 2]]]),
    "ragged layers": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[1, 2], [1, 2], [1]]]),
    "two dimensions": lambda: _choice(routed_experts=ROUTES[:, 0].tolist()),
    "an id of true": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[True, 2]] * 3]),
    "an id of float": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[1.5, 2]] * 3]),
    "an id of text": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [["1", 2]] * 3]),
    "an id of null": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[None, 2]] * 3]),
    "an id below 0": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[-1, 2]] * 3]),
    "an id beyond int32": lambda: _choice(routed_experts=[*ROUTES.tolist()[:-1], [[2**31, 2]] * 3]),
}


def _frame(**metadata: Any) -> bytes:
    return body_of(RIGHT, FRAME, **metadata)


_FRAMES: dict[str, Callable[[], bytes]] = {
    "one byte missing": lambda: _frame()[:-1],
    "a row missing": lambda: _frame()[: -ROUTES[0].nbytes],
    "only its start": lambda: _frame()[:100],
    "only its length": lambda: _frame()[:8],
    "one byte too many": lambda: _frame() + b"\0",
    "sent twice": lambda: _frame() * 2,
    "a header of no bytes": lambda: bytes(8) + _frame()[8:],
    "a header beyond the body": lambda: (2**40).to_bytes(8, "little") + _frame()[8:],
    "another version": lambda: _frame(format="skyrl-r3/2"),
    "wider dtype than needed": lambda: body_of(_with(routes=ROUTES.astype(np.int16)), FRAME),
    "a negative id": lambda: body_of(_with(routes=ROUTES.astype(np.int16) - 9), FRAME),
    "ids of float": lambda: body_of(_with(routes=ROUTES.astype(np.float32)), FRAME),
    "a logprob of NaN": lambda: body_of(_with(logprobs=[-0.5, float("nan"), -1.0]), FRAME),
    "for another prompt": lambda: _frame(prompt_tokens=4),
    "for another start": lambda: _frame(start=2),
}

ALIKE: dict[str, Callable[[str], bytes]] = {
    "a row missing": lambda encoding: body_of(_with(routes=ROUTES[:-1]), encoding),
    "a row too many": lambda encoding: body_of(_with(routes=np.concatenate([ROUTES, ROUTES[:1]])), encoding),
    "rows of another prompt": lambda encoding: body_of(_with(routes=canned.routes_of([1, 2])), encoding),
    "no rows": lambda encoding: body_of(_with(routes=ROUTES[:0]), encoding),
    "no layers": lambda encoding: body_of(_with(routes=ROUTES[:, :0]), encoding),
    "no experts": lambda encoding: body_of(_with(routes=ROUTES[:, :, :0]), encoding),
    "tokens without routes": lambda encoding: body_of(_with(routes=None), encoding),
    "a logprob missing": lambda encoding: body_of(_with(logprobs=LOGPROBS[:-1]), encoding),
    "a logprob too many": lambda encoding: body_of(_with(logprobs=[*LOGPROBS, -9.0]), encoding),
    "a negative token": lambda encoding: body_of(_with(token_ids=[9, -2, 6]), encoding),
    "a token missing": lambda encoding: body_of(_with(token_ids=[9, 2], logprobs=LOGPROBS[:2]), encoding),
}
"""A reply to something else, in any encoding."""


BROKEN: dict[str, bytes] = dict(ANYWHERE)
for _name, _cases in (("JSON", _PARTS), (PACKED, _PACKED), (NESTED, _LISTS), (FRAME, _FRAMES)):
    BROKEN |= {f"{_name}: {case}": make() for case, make in _cases.items()}
for _encoding in (FRAME, PACKED, NESTED):
    BROKEN |= {f"{_encoding}: {case}": make(_encoding) for case, make in ALIKE.items()}
