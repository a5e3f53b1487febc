"""What a server's two replies tell of it, and what is to be done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_r3.installation import FLAG, Problem
from skyrl_r3.wire import ENCODINGS_FIELD, FRAME, GENERATE_PATH, NESTED

_SERVER_FLAG = "--enable-return-routed-experts"
_START = "python -m skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"
_ASK_WORKER = "If this is a router or proxy, ask the worker itself too: skyrl-r3 status --server http://WORKER:PORT"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One reply of ``/skyrl/v1/generate``.

    Attributes:
        status: Of HTTP; None where there was no reply.
        location: Where it sends one on to.
        failure: Why there was no reply, or not the whole of it.
        text: What the body of an error, or of something else than a reply, says.
        error: Why the body is no reply, and ``error_field`` what of it is wrong.
        encoding: Of its routes. ``packed`` also where there are none; None if it is no reply.
        shape: ``[rows, layers, topk]`` of the routes; None where there are none. ``dtype`` is theirs.
        tokens: How many were sampled.
        frame: What a frame says of the model and of the request.
        findings: What the checks of routes say.
        counted: What they say, and the policy only counts.
        has_routes_key: Whether JSON had the key of the routes at all.
    """

    status: int | None
    content_type: str = ""
    location: str = ""
    body_bytes: int = 0
    failure: str = ""
    text: str = ""
    error: str = ""
    error_field: str = ""
    encoding: str | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    tokens: int = 0
    frame: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    has_routes_key: bool = True


def judge(url: str, asked: Answer, unasked: Answer | None, *, counts: bool) -> dict[str, Any]:
    """The ``verdict`` on a server and its ``problems``.

    Args:
        url: Its address.
        asked: Its reply to a request that names encodings.
        unasked: Its reply to one that does not; None where ``asked`` is no reply.
        counts: Whether its ``/metrics`` have some of skyrl-r3.
    """
    wrong = _wrong(url, asked) or _wrong_form(asked, counts) or (unasked and _wrong_unasked(url, unasked))
    if wrong:
        return {"verdict": wrong.what, "problems": [wrong]}
    stock = "nested lists (SkyRL 0.3)" if unasked and unasked.encoding == NESTED else "packed routes (SkyRL 0.4)"
    verdict = f"skyrl-r3 is active: frames to clients that ask for them, {stock} to others"
    if asked.counted:
        verdict += f"; found, and only counted as SKYRL_R3_CHECKS is here: {_first(asked.counted)}"
    return {"verdict": verdict, "problems": []}


def _wrong(url: str, answer: Answer) -> Problem | None:
    """What is wrong with ``answer`` in any encoding."""
    if answer.encoding is None:
        return _no_reply(url, answer)
    if not answer.has_routes_key:
        what = "the reply has no routed_experts, not even null, as SkyRL's servers send: something strips it on the way"
        cure = f"Have the router or proxy in front of the server pass the reply on as it is. {_ASK_WORKER}"
        return Problem(kind="stripped", what=what, cure=cure)
    if not answer.tokens:
        what = "nothing was generated: the request was aborted before its first token"
        return Problem(kind="aborted", what=what, cure="Ask again when the server is not paused.")
    if answer.shape is None:
        what = f"answers without routes (null): it was started without {_SERVER_FLAG}, or its model is dense"
        cure = (
            f"Start it with {_SERVER_FLAG}; servers that SkyRL starts get it from {FLAG}. Whether skyrl-r3 is active "
            "there can be seen only then."
        )
        return Problem(kind="no-routes", what=what, cure=cure)
    if answer.findings:
        cure = "The engine has captured wrong routes: see what README says on checks, and do not train with them."
        return Problem(kind="findings", what=f"sends routes that are wrong: {_first(answer.findings)}", cure=cure)
    return None


def _first(findings: list[str]) -> str:
    return findings[0] + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")


def _wrong_form(asked: Answer, counts: bool) -> Problem | None:
    """No frame, although one was asked for."""
    if asked.encoding == FRAME:
        return None
    form = "nested lists, as stock SkyRL 0.3" if asked.encoding == NESTED else "packed routes, as stock SkyRL 0.4"
    if counts:
        what = f"sends {form}, although skyrl-r3 is active there: the field {ENCODINGS_FIELD} is lost on the way"
        cure = f"Have the router or proxy in front of it pass unknown fields of requests on. {_ASK_WORKER}"
        return Problem(kind="field-lost", what=what, cure=cure)
    what = f"sends {form}: skyrl-r3 is not active there, or the field {ENCODINGS_FIELD} is lost on the way"
    cure = (
        "Install skyrl-r3 in the server's environment, and start it again; if it is there, SKYRL_R3=off may be set: "
        f"run skyrl-r3 status in that environment. {_ASK_WORKER}"
    )
    return Problem(kind="unpatched", what=what, cure=cure)


def _wrong_unasked(url: str, unasked: Answer) -> Problem | None:
    """What is wrong for stock clients, where one that asks gets a frame that is right."""
    wrong = _wrong(url, unasked)
    if unasked.encoding == FRAME:
        what = "a frame, which a stock client cannot read"
        cure = f"Something on the way adds the field to requests, or keeps replies. {_ASK_WORKER}"
        wrong = Problem(kind="frame-unasked", what=what, cure=cure)
    elif wrong and wrong.kind == "no-routes":
        # The server has the flag: it sent routes to the request before.
        what = "routed_experts is null, although the server captures routes"
        cure = f"Something on the way takes the routes out of JSON, or asks two servers in turn. {_ASK_WORKER}"
        wrong = Problem(kind="stripped", what=what, cure=cure)
    return wrong and replace(wrong, what=f"right for clients that ask for frames, wrong for stock ones: {wrong.what}")


def _no_reply(url: str, answer: Answer) -> Problem:
    """Why ``answer`` is none."""
    status, text = answer.status, answer.text
    if status is None:
        return _unreachable(url, answer.failure)
    if status == 200 and answer.failure:
        cure = f"A router or proxy on the way cuts or changes bodies, or this is no server of SkyRL. {_ASK_WORKER}"
        return Problem(kind="broken", what=answer.failure, cure=cure)
    if status == 200 and ("html" in answer.content_type or text.startswith("<")):
        what = f"a web page ({answer.content_type}), no reply of a server"
        cure = f"This is the address of something else. {_ASK_WORKER}"
        return Problem(kind="not-skyrl", what=what, cure=cure)
    if status == 200 and answer.error_field == "__metadata__.format":
        what = f"sends frames of another version: {answer.error.partition('. ')[0]}"
        cure = "Install the same release of skyrl-r3 here and there: skyrl-r3 status tells it in each environment."
        return Problem(kind="version", what=what, cure=cure)
    if status == 200:
        cure = f"Something else answers at this address, or changes replies on the way. {_ASK_WORKER}"
        return Problem(kind="broken", what=f"the body is no reply: {answer.error}", cure=cure)
    if 300 <= status < 400 and answer.location:
        what = f"HTTP {status}: sends one on to {answer.location}, which is not followed"
        cure = "Use that address, here and in SkyRL. If it is that of a login: SkyRL's client has no credentials."
        return Problem(kind="redirect", what=what, cure=cure)
    said = f"HTTP {status}" + (f": {text or answer.failure}" if text or answer.failure else "")
    if status in (404, 405) and "model" not in text:
        what = f"no {GENERATE_PATH} there ({said}), so that it is no SkyRL inference server"
        cure = f"Check the address, and start the server with SkyRL's own module, not vllm serve: {_START}"
        return Problem(kind="not-skyrl", what=what, cure=cure)
    cure = {
        401: "Something asks for credentials, which SkyRL's client has none of.",
        403: "Something asks for credentials, which SkyRL's client has none of.",
        502: "A router or proxy answers, and the server behind it does not. Ask that one.",
        503: "A router answers, and has no server that is well, or the server is not ready. Ask that one.",
    }.get(status, "The reason is in the server's log." if status >= 500 else "The server refuses SkyRL's request.")
    return Problem(kind="error", what=said, cure=f"{cure} {_ASK_WORKER}")


def _unreachable(url: str, failure: str) -> Problem:
    cure = f"Is it up, and is this its address? Try: curl {url}/v1/models"
    if failure == "asleep":
        what = "the engine sleeps, as SkyRL's does while it trains on the same GPUs, so that it was not asked"
        return Problem(kind="asleep", what=what, cure="Ask again while it generates.")
    if failure.startswith("no answer"):
        cure = "It is starting, paused for new weights, or busy: ask again. If that does not help, look at its log."
        return Problem(kind="timeout", what=failure, cure=cure)
    if failure.startswith("no TLS"):
        cure = f"Try it without: {url.replace('https', 'http', 1)}. If it has TLS, its certificate is not trusted here."
        return Problem(kind="unreachable", what=f"no connection: {failure}", cure=cure)
    return Problem(kind="unreachable", what=f"no connection: {failure}", cure=cure)
