"""The comparison that parity rests on finds every kind of difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from demo_compare import FRAME, JSON, Run, compare_case

LAYERS = (1, 2)
PROMPT, RESPONSE, TOPK, EXPERTS = 3, 4, 2, 8
ROWS = PROMPT + RESPONSE - 1


def recorded(*, on: bool) -> Run:
    """A case of two samples, of which the second is shorter by a token. Layer 0 is dense."""
    arrays: dict[str, np.ndarray] = {}
    tensors = np.zeros((2, PROMPT + RESPONSE, 3, TOPK), dtype=np.uint8)
    tensors[...] = [0, 1] if on else 0
    for i in range(2):
        rows = ROWS - i
        dice = np.random.default_rng(i)
        routes = dice.random((rows, 3, EXPERTS)).argsort(axis=-1)[..., :TOPK]
        routes[:, 0] = 0
        tensors[i, i : i + rows] = routes
        for kind in ("reply", "sample"):
            of = {"prompt": np.arange(PROMPT) + 10 * i, "token_ids": np.arange(RESPONSE - i)}
            of |= {"logprobs": -1.0 - np.arange(RESPONSE - i), "routes": routes.copy()}
            arrays |= {f"a case|{kind}|{i}|{name}": array for name, array in of.items()}
        arrays[f"a case|sample|{i}|loss_mask"] = np.ones(RESPONSE - i, dtype=np.int64)
    arrays |= {"a case|tensor|routes": tensors, "a case|tensor|sequences": np.arange(2 * (PROMPT + RESPONSE))}
    types = ["RoutedExperts" if on else "list"]
    facts = {"requests": 2, "stop_reasons": ["stop", "length"], "tensor_dtype": "torch.uint8", "reply_bytes": 99}
    facts |= {"content_types": [FRAME if on else JSON], "reply_route_types": types, "sample_route_types": types}
    return Run({"a case": facts}, arrays)


def differences(on: Run) -> list[str]:
    return compare_case("a case", recorded(on=False), on, "0.3", layers=LAYERS)


def test_what_is_equal_is_equal() -> None:
    assert differences(recorded(on=True)) == []


def rolled(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1, axis=0)


def layers_swapped(array: np.ndarray) -> np.ndarray:
    return array[..., [0, 2, 1], :]


def next_float(array: np.ndarray) -> np.ndarray:
    return np.nextafter(array, 0)


FAULTS: list[tuple[str, Callable[[np.ndarray], Any]]] = [
    *((f"{kind}|1|routes", fault) for kind in ("reply", "sample") for fault in (rolled, layers_swapped)),
    *((f"{kind}|1|routes", lambda array: array[:-1]) for kind in ("reply", "sample")),
    *((f"{kind}|1|routes", lambda array: array[..., ::-1]) for kind in ("reply", "sample")),
    *((f"{kind}|0|logprobs", next_float) for kind in ("reply", "sample")),
    *((f"{kind}|0|token_ids", rolled) for kind in ("reply", "sample")),
    ("sample|0|loss_mask", lambda array: array - [1, 0, 0, 0]),
    ("sample|0|loss_mask", lambda array: array.astype(np.uint64)),
    ("tensor|sequences", rolled),
    ("tensor|routes", rolled),
    ("tensor|routes", layers_swapped),
    ("tensor|routes", lambda array: np.roll(array, 1, axis=1)),
    ("tensor|routes", lambda array: array.astype(np.int16)),
    ("tensor|routes", lambda array: np.where(np.arange(len(array[0]))[:, None, None] == len(array[0]) - 1, 0, array)),
]


@pytest.mark.parametrize(("key", "fault"), FAULTS, ids=[f"{i}-{key}" for i, (key, _) in enumerate(FAULTS)])
def test_every_difference_of_an_array_is_found(key: str, fault: Callable[[np.ndarray], Any]) -> None:
    on = recorded(on=True)
    before = on.arrays[f"a case|{key}"]
    on.arrays[f"a case|{key}"] = after = fault(before.copy())
    assert after.dtype != before.dtype or not np.array_equal(after, before)
    assert len(differences(on)) == 1


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("requests", 3),
        ("stop_reasons", ["length", "stop"]),
        ("tensor_dtype", "torch.int16"),
        ("content_types", [JSON]),
        ("content_types", [FRAME, JSON]),
        ("reply_route_types", ["list"]),
        ("sample_route_types", ["list"]),
        ("reply_bytes", 0),
    ],
)
def test_every_difference_of_a_fact_is_found(fact: str, value: Any) -> None:
    on = recorded(on=True)
    on.cases["a case"][fact] = value
    (found,) = differences(on)
    assert fact.replace("_", " ") in found.replace("_", " ")


def test_a_case_or_a_field_that_is_not_there_is_found() -> None:
    for key in ("reply|1|routes", "tensor|routes"):
        on = recorded(on=True)
        del on.arrays[f"a case|{key}"]
        assert key in str(differences(on))
    empty = Run({"a case": {}}, {})
    assert compare_case("a case", empty, copy.deepcopy(empty), "0.3")


def test_routes_of_stock_skyrl_that_are_no_routes_are_found() -> None:
    """All equal ids are the same on both sides, when the engine has captured nothing."""
    off, on = recorded(on=False), recorded(on=True)
    for run in (off, on):
        for key in [key for key in run.arrays if "0|routes" in key]:
            run.arrays[key][:] = 5
    found = compare_case("a case", off, on, "0.3", layers=LAYERS)
    assert any("reply|0|routes" in each for each in found)
    assert any("sample|0|routes" in each for each in found)
