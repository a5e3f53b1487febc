"""The reply of ``/skyrl/v1/generate``: one type for every encoding, and what has to be true of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np

from skyrl_r3.errors import MissingRoutesError, ReplyError, RoutesError, describe
from skyrl_r3.spec import RouteSpec

__all__ = ["FLOORED_LOGPROB", "Reply", "sampled_logprobs"]

FLOORED_LOGPROB = -9999.0
"""Stands for a missing or non-finite logprob: the value that vLLM's own OpenAI endpoints use."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reply:
    """What one request generated.

    Attributes:
        token_ids: The sampled tokens, int32 ``[response]``.
        finish_reason: vLLM's.
        logprobs: Of the sampled tokens, float32 or float64 ``[response]``; None where the request asked for none.
        routed_experts: ids ``[rows, layers, topk]``, or None where the engine captured none. Row ``i`` is the route of
            token ``start + i`` of prompt and response.
        prompt_tokens: Length of the prompt as the server counted it. Only the frame tells.
        start: The first token that has a row, vLLM's ``routed_experts_prompt_start``. Only the frame tells.
        spec: What the model's routes look like, as the server read it. Only the frame tells.
        model: The name of the model or adapter that was asked for, empty where unknown. Only the frame tells.
    """

    token_ids: np.ndarray
    finish_reason: str | None
    logprobs: np.ndarray | None
    routed_experts: np.ndarray | None
    prompt_tokens: int | None = None
    start: int | None = None
    spec: RouteSpec = field(default_factory=RouteSpec)
    model: str = ""

    def __post_init__(self) -> None:
        """Check what has to be true of every reply, whatever was asked for.

        Raises:
            ReplyError: Token ids that are negative or not int32, another number of logprobs than of tokens, or one that
                is not finite in float32.
        """
        if self.token_ids.dtype != np.int32:
            raise ReplyError("token_ids.dtype", expected="int32", got=self.token_ids.dtype.str)
        if len(self.token_ids) and int(self.token_ids.min()) < 0:
            raise ReplyError("token_ids", expected="ids of 0 or more", got=str(int(self.token_ids.min())))
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            expected = f"{len(self.token_ids)}, one for each token"
            raise ReplyError("logprobs", expected=expected, got=str(len(self.logprobs)))
        if self.logprobs is not None and not (fits := _fits_float32(self.logprobs)).all():
            wrong = float(self.logprobs[~fits][0])
            raise ReplyError("logprobs", expected="finite numbers of float32", got=describe(wrong))

    @property
    def rows(self) -> int:
        """How many rows of routes came."""
        return 0 if self.routed_experts is None else len(self.routed_experts)

    def routes_for(self, *, prompt: int, start: int = 0) -> np.ndarray:
        """The routes, if they are those of the request.

        Args:
            prompt: Length of the prompt that was sent.
            start: The ``routed_experts_prompt_start`` that was sent.

        Returns:
            ids ``[rows, layers, topk]`` with one row for each token from ``start`` on that was fed to the model
            (prompt + response - 1 - start: the last sampled token never is), or from 0 on, where the engine knows no
            start.

        Raises:
            RoutesError: Another number of rows, no layers or no experts, or the server counted other tokens.
            MissingRoutesError: Tokens, but no routes.
        """
        response, ids = len(self.token_ids), self.routed_experts
        if self.prompt_tokens not in (None, prompt):
            expected = f"{prompt} as in the request"
            raise RoutesError("prompt_tokens", kind="prompt", expected=expected, got=str(self.prompt_tokens))
        if self.start not in (None, start, 0):
            expected = f"{start} as in the request" + (", or 0" if start else "")
            raise RoutesError("start", kind="rows", expected=expected, got=str(self.start))
        if ids is None and response:
            raise MissingRoutesError(
                "routed_experts",
                kind="missing",
                expected="the routes of the reply",
                got=f"null with finish_reason {self.finish_reason!r}",
                hint="Start the inference server with --enable-return-routed-experts "
                "(generator.inference_engine.enable_return_routed_experts=true), or switch that flag off in the "
                "trainer. If it has the flag, its model is dense, or a router strips the reply: see "
                "skyrl-r3 status --server URL.",
            )
        if ids is None:
            return np.empty((0, 0, 0), dtype=np.uint8)
        # A request that was aborted before its first token trains nothing, whatever part of its prompt was captured.
        first = prompt + response - 1 - len(ids)
        if response and first not in ((start, 0) if self.start is None else (self.start,)):
            counted = f"prompt {prompt} + response {response} - 1" + (f" - start {start}" if start else "")
            raise RoutesError(
                "routed_experts.shape",
                kind="rows",
                expected=f"{prompt + response - 1 - start} rows from {counted}",
                got=f"{len(ids)} rows",
                hint="The engine and this client disagree on what was generated, so no row can be trusted.",
            )
        if not response and len(ids) > prompt:
            expected = f"at most {prompt} rows for a prompt of {prompt} and no response"
            raise RoutesError("routed_experts.shape", kind="rows", expected=expected, got=f"{len(ids)} rows")
        if len(ids) and not ids.size:
            expected = "at least one layer and one expert a row"
            raise RoutesError("routed_experts.shape", kind="shape", expected=expected, got=describe(ids))
        return ids


def sampled_logprobs(token_ids: list[int], logprobs: Any) -> tuple[np.ndarray, int]:
    """The logprob of each sampled token, and how many of them had to be floored.

    A missing entry, None, NaN or an infinity becomes :data:`FLOORED_LOGPROB`. JSON has no number for them: orjson
    writes ``null``, and SkyRL 0.3's own server answers with an error that ends the run.

    Args:
        token_ids: The sampled tokens.
        logprobs: vLLM's, for each of them: its ``FlatLogprobs``, or mappings of token ids to entries.

    Returns:
        float64 ``[tokens]``, vLLM's precision being float32, and the number of floored ones.
    """
    first = _first_of_each(token_ids, logprobs)
    sampled: list[Any] = _by_token(token_ids, logprobs) if first is None else first
    try:
        values = np.array(array("d", sampled))  # In a third of the time that numpy takes for a list.
    except TypeError:
        values = np.array(sampled, dtype=np.float64)  # None becomes NaN.
    wrong = ~_fits_float32(values)
    values[wrong] = FLOORED_LOGPROB
    return values, int(wrong.sum())


def _fits_float32(values: np.ndarray) -> np.ndarray:
    return np.abs(values) <= np.finfo(np.float32).max  # False for NaN, too.


def _first_of_each(token_ids: list[int], logprobs: Any) -> list[float] | None:
    """The first logprob of each position of a ``FlatLogprobs``; None if that is not each time the sampled token's.

    vLLM puts the sampled token first. Where it asks for no others, that is the whole list.
    """
    if not hasattr(logprobs, "start_indices") or len(logprobs) != len(token_ids):
        return None
    starts = logprobs.start_indices
    # One entry in each position. By numpy: to compare the list with one of 0, 1, 2 and so on takes twice as long.
    if logprobs.token_ids == token_ids and (np.array(array("q", starts)) == np.arange(len(starts))).all():
        return logprobs.logprobs
    if any(start == end for start, end in zip(starts, logprobs.end_indices, strict=True)):
        return None
    if [logprobs.token_ids[start] for start in starts] != token_ids:
        return None
    return [logprobs.logprobs[start] for start in starts]


def _by_token(token_ids: list[int], logprobs: Iterable[Mapping[int, Any] | None]) -> list[float | None]:
    # vLLM may have fewer entries than tokens.
    pairs = zip(token_ids, chain(logprobs, repeat(None)), strict=False)
    entries = (candidates.get(token) if candidates else None for token, candidates in pairs)
    return [None if entry is None else entry.logprob for entry in entries]
