"""The made-up replies: both processes and the judge of the results make the same ones from four numbers.

By integer arithmetic and not by numpy's generators, whose streams may differ between the numpy of two environments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

PROMPT_TOKENS = 512
SHAPES = ((48, 8, 128), (61, 8, 256), (61, 8, 384))
"""(layers, topk, experts): the size of Qwen3-30B-A3B's routes, of DeepSeek-V3's, and one that needs two bytes an id."""

_VOCABULARY = 151_936


@dataclass(frozen=True)
class Case:
    """A reply of ``tokens`` rows. Its numbers lead its prompt, so that they pass through any client and handler."""

    tokens: int
    layers: int
    topk: int
    experts: int

    @property
    def shape(self) -> str:
        """Layers, top-k and experts for people."""
        return f"{self.layers}x{self.topk} of {self.experts}"

    def prompt(self) -> list[int]:
        """The prompt's token ids: 512 of them, or half of a shorter sample."""
        size = min(PROMPT_TOKENS, self.tokens // 2)
        return [*astuple(self), *(_mix(size, 1) % _VOCABULARY).tolist()][:size]

    @staticmethod
    def of_prompt(token_ids: Sequence[int]) -> Case:
        """The case that ``token_ids`` asks for."""
        return Case(*token_ids[:4])

    def response(self) -> np.ndarray:
        """The sampled tokens, int32 ``[response]``: so many that prompt + response - 1 is ``tokens``."""
        return (_mix(self.tokens + 1 - len(self.prompt()), 2) % _VOCABULARY).astype(np.int32)

    def logprobs(self) -> np.ndarray:
        """Of the sampled tokens, float64 ``[response]`` that are float32's, as vLLM computes them."""
        return (_mix(len(self.response()), 3) / -(2.0**30)).astype(np.float32).astype(np.float64)

    def routes(self) -> np.ndarray:
        """ids ``[tokens, layers, topk]``, distinct in a row; uint8, or above 256 experts uint16, as vLLM has them."""
        mixed = _mix(self.tokens * self.layers, 4)
        first = (mixed % self.experts).astype(np.uint16)
        step = (mixed // 2**16 % (self.experts // self.topk)).astype(np.uint16) + np.uint16(1)
        ids = (first[:, None] + step[:, None] * np.arange(self.topk, dtype=np.uint16)) % np.uint16(self.experts)
        dtype = np.uint8 if self.experts <= 256 else np.uint16
        return ids.astype(dtype).reshape(self.tokens, self.layers, self.topk)

    def digest(self) -> str:
        """What a right reply's :func:`digest` is."""
        return digest(self.response(), self.logprobs(), self.routes())


def digest(token_ids: Any, logprobs: Any, routes: Any) -> str:
    """A hash of a reply's values, whatever types they arrived in."""
    sha256 = hashlib.sha256()
    for values, dtype in ((token_ids, "<i4"), (logprobs, "<f8"), (routes, "<i4")):
        array = np.ascontiguousarray(np.asarray(values), dtype=dtype)
        sha256.update(repr(array.shape).encode())
        sha256.update(array.data)
    return sha256.hexdigest()


def _mix(size: int, seed: int) -> np.ndarray:
    """``size`` numbers that look random, uint32: a multiply-and-shift hash of 0, 1, 2 and so on."""
    x = np.arange(size, dtype=np.uint32) + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))
