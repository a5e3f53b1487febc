"""What an engine generated, whichever engine it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from skyrl_r3.spec import RouteSpec


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint in Hugging Face's form.

    Attributes:
        name: For messages and the report.
        path: A directory, or the id of a model on the hub.
        spec: What its routes look like, read from its config.
        vocab_size: Token ids are below it.
    """

    name: str
    path: str | Path
    spec: RouteSpec
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt and what an engine sampled for it.

    Attributes:
        prompt: P token ids.
        response: G sampled token ids.
        logprobs: float64 [G], of the sampled tokens, at temperature 1, whatever they were sampled at.
        routes: Integer array [P + G - 1, layers, topk]: the last sampled token is never fed back. Layers without
            experts are all zero.
        finish_reason: ``stop``, ``length`` or ``abort``.
    """

    prompt: list[int]
    response: list[int]
    logprobs: np.ndarray
    routes: np.ndarray
    finish_reason: str


class Engine(Protocol):
    """An engine with one model loaded."""

    name: str
    model: Model

    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Generation]:
        """Generate for all ``prompts``, in their order, from a fixed seed; ``temperature`` 0 is greedy."""
        ...
