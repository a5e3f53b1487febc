"""``skyrl_r3.padding``: rows that are no routes, and the loss of the tokens that were sampled from them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract_tests import canned
from skyrl_r3 import batch, padding
from skyrl_r3.routes import RoutedExperts

PROMPT, RESPONSE = 4, 3
ROWS = PROMPT + RESPONSE - 1


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM, where another test has imported it, has the root logger drop warnings."""
    caplog.set_level(logging.WARNING)


def with_masked(rows: list[int], *, count: int = ROWS) -> np.ndarray:
    ids = canned.routes_of([7] * count) + 1
    ids[rows] = 0
    return ids


@given(st.sets(st.integers(0, ROWS - 1)))
def test_masked_rows(rows: set[int]) -> None:
    assert padding.masked_rows(with_masked(sorted(rows))).tolist() == sorted(rows)


def test_a_row_with_any_id_is_a_route() -> None:
    for layer in range(canned.LAYERS):
        for slot in range(canned.TOPK):
            ids = np.zeros((1, canned.LAYERS, canned.TOPK), np.uint8)
            ids[0, layer, slot] = 1
            assert padding.masked_rows(ids).tolist() == []
    assert padding.masked_rows(np.zeros((3, 2, 1), np.uint8)).tolist() == []  # One expert a token: may be the first.
    assert padding.masked_rows(np.zeros((0, 0, 0), np.uint8)).tolist() == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], [1, 1, 1]),
        ([0, 2], [1, 1, 1]),  # The prompt is not trained on.
        ([3], [0, 1, 1]),  # The last prompt token is what the first response token was sampled from.
        ([4], [1, 0, 1]),
        ([5], [1, 1, 0]),
        ([1, 3, 5], [0, 1, 0]),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0]),
    ],
)
def test_losses(rows: list[int], expected: list[int], caplog: pytest.LogCaptureFixture) -> None:
    routes, masks = [with_masked([]), with_masked(rows)], [[1, 0, 1], [1, 1, 1]]
    got = padding.masked_losses(routes, [PROMPT, PROMPT], masks)
    assert list(got) == [[1, 0, 1], expected]
    assert masks == [[1, 0, 1], [1, 1, 1]]
    assert (got is masks) == (not rows)
    dropped = 3 - sum(expected)
    assert [record.levelno for record in caplog.records] == ([logging.WARNING] if rows else [])
    assert (f"{dropped} tokens are left out of the loss" in caplog.text) == bool(rows)


def test_a_sample_without_any_route_trains_nothing() -> None:
    """Not even the end-of-sequence token that the generator has put behind the response."""
    ids = with_masked(list(range(ROWS)))
    assert list(padding.masked_losses([ids], [PROMPT], [[1, 1, 1, 1]])) == [[0, 0, 0, 0]]
    ids = with_masked(list(range(1, ROWS)))
    assert list(padding.masked_losses([ids], [PROMPT], [[1, 1, 1, 1]])) == [[0, 0, 0, 1]]


def test_samples_that_have_no_routes_are_left_to_others() -> None:
    masks = [[1], [1]]
    assert padding.masked_losses([None, np.zeros((0, 0, 0), np.uint8)], [1, 1], masks) is masks


@pytest.mark.case("R81", "R100")
def test_masked_rows_become_padding() -> None:
    ids = with_masked([1, 4])
    (filled,) = padding.without_masked([ids])
    assert padding.masked_rows(ids).tolist() == [1, 4]
    others = [0, 2, 3, 5]
    assert np.array_equal(filled[others], ids[others])
    for row in (1, 4):
        for layer in filled[row].tolist():
            assert len(set(layer)) == canned.TOPK
    plain = with_masked([])
    assert padding.without_masked([plain, ids])[0] is plain
    assert padding.without_masked([plain])[0] is plain


@pytest.mark.case("R82")
def test_masked_samples_spread_over_all_experts_of_the_batch() -> None:
    routes = [np.arange(64, dtype=np.uint8).reshape(8, 1, 8), *np.zeros((4, 20, 1, 8), np.uint8)]
    made = padding.without_masked(routes)
    counts = np.bincount(np.concatenate([ids.ravel() for ids in made[1:]]), minlength=64)
    assert (len(counts), counts.min(), counts.max()) == (64, 10, 10)


def test_padding_of_more_slots_than_a_byte_has() -> None:
    ids = np.tile(np.arange(300) % 256, (3, 1, 1)).astype(np.uint8)
    ids[1] = 0
    (filled,) = padding.without_masked([ids])
    assert filled.dtype == np.int16
    assert sorted(filled[1, 0].tolist()) == list(range(300))
    assert np.array_equal(filled[[0, 2]], ids[[0, 2]])


def pad(routes: list[Any], masks: list[list[int]]) -> torch.Tensor:
    sequences = torch.full((len(routes), ROWS + 1), 7)
    tensor = batch.pad_routes(routes, sequences, [ROWS + 1] * len(routes), masks)
    assert tensor is not None
    return tensor


@pytest.mark.case("R81", "R100", "R102")
def test_the_tensor_holds_no_row_without_routes() -> None:
    """A masked sample is padding all over. Its neighbour is not touched."""
    right, wrong = with_masked([]), with_masked(list(range(ROWS)))
    some = with_masked([2])
    tokens = np.full(ROWS, 7, np.int32)
    tensor = pad([RoutedExperts(ids, tokens) for ids in (right, wrong, some)], [[1] * 3, [0] * 3, [1] * 3])
    assert np.array_equal(tensor[0, :-1].numpy(), right)
    assert np.array_equal(tensor[2, :-1].numpy()[[0, 1, 3, 4, 5]], right[[0, 1, 3, 4, 5]])
    for row in (*tensor[0, -1:], *tensor[1], tensor[2, 2], tensor[2, -1]):
        for layer in row.tolist():
            assert len(set(layer)) == canned.TOPK
    # Over all experts seen, as all padding.
    assert len(np.unique(tensor[1].numpy())) > canned.TOPK
