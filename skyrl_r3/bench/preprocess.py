"""Preprocessing of a batch by SkyRL 0.3, in a client process, against a copy of the tensor that comes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from skyrl_r3.bench.cases import Case, digest
from skyrl_r3.routes import RoutedExperts, as_token_array

_RAGGED = 16
"""Each sample is so many tokens shorter than the one before, so that there is something to pad."""


def preprocess(*, case: list[int], samples: int, repeats: int, nested: bool) -> dict[str, Any]:
    """Time ``convert_prompts_responses_to_batch_tensors``.

    Args:
        case: Of the longest sample, the numbers of a :class:`Case`.
        samples: In the batch.
        repeats: Of each measurement, in turn.
        nested: Whether the routes come as nested lists, the only form that stock SkyRL 0.3 takes.

    Returns:
        Seconds of each repeat: ``whole``, ``without_routes`` (the same call, given none) and ``copy`` (of the tensor
        of routes); its ``bytes``, and the ``digest`` of its captured rows.
    """
    convert = import_module("skyrl.train.dataset.preprocess").convert_prompts_responses_to_batch_tensors
    longest = Case(*case)
    prompt, response, ids = longest.prompt(), longest.response().tolist(), longest.routes()
    ids = ids if longest.experts <= 256 else ids.astype(np.int16)
    tokens = as_token_array([*prompt, *response])
    rows = [longest.tokens - _RAGGED * i for i in range(samples)]
    responses = [response[: count + 1 - len(prompt)] for count in rows]
    ones = [[1.0] * len(sample) for sample in responses]
    routes: list[Any] = [RoutedExperts(ids[:count], tokens[:count]) for count in rows]
    if nested:
        routes = [ids[:count].tolist() for count in rows]
    batch = (SimpleNamespace(pad_token_id=0), [prompt] * samples, responses, ones, ones, ones)

    def whole(with_routes: bool = True) -> Any:
        return convert(*batch, rollout_expert_indices=routes if with_routes else None)

    result = whole()[-1]
    length = result.shape[1]
    captured = [result[i, length - 1 - count : length - 1].numpy() for i, count in enumerate(rows)]
    found: dict[str, Any] = {"bytes": result.nbytes, "digest": digest([], [], np.concatenate(captured))}
    seconds: dict[str, list[float]] = {"whole": [], "without_routes": [], "copy": []}
    steps: dict[str, Callable[[], Any]] = {
        "whole": whole,
        "without_routes": lambda: whole(False),
        "copy": result.clone,
    }
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return found | seconds


def expected_digest(case: Case, samples: int) -> str:
    """What a right result's ``digest`` is."""
    ids = case.routes()
    return digest([], [], np.concatenate([ids[: case.tokens - _RAGGED * i] for i in range(samples)]))
