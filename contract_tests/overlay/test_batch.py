"""``skyrl_r3.batch``: the routes of a batch as the training tensor and its padding mask."""

from __future__ import annotations

import logging
import tracemalloc
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract_tests import oracle
from contract_tests import strategies as r3st
from skyrl_r3 import batch
from skyrl_r3.batch import router_padding_mask
from skyrl_r3.errors import R3Error, RouteError
from skyrl_r3.routes import RoutedExperts

FIELD = "rollout_expert_indices"


def pad_routes(routes: Any, sequences: torch.Tensor, lengths: list[int], trained: list[bool]) -> torch.Tensor | None:
    """With all tokens of a sample in the loss, or none."""
    masks = [[int(train)] * length for train, length in zip(trained, lengths, strict=True)]
    return batch.pad_routes(routes, sequences, lengths, masks)


Array = r3st.Array

# A batch takes many draws, and each property below gets batches of every kind.
fewer = settings(max_examples=70)


@dataclass
class Batch:
    """A batch as preprocessing hands it over, and for each sample the ids that were captured."""

    routes: list[Any]
    sequences: torch.Tensor
    lengths: list[int]
    trained: list[bool]
    captured: list[Array]

    def pad(self) -> torch.Tensor | None:
        return pad_routes(self.routes, self.sequences, self.lengths, self.trained)

    def rows(self) -> list[int]:
        return [len(ids) for ids in self.captured]


def _sequences(lengths: list[int], tokens: int | None = None) -> torch.Tensor:
    """Left-padded with -1; sample i holds the tokens 1000 * i, 1000 * i + 1, ..."""
    width = max(lengths) if tokens is None else tokens
    rows = [[-1] * (width - length) + [1000 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    return torch.tensor(rows, dtype=torch.int64)


def _routed(ids: Array, sample: int = 0) -> RoutedExperts:
    """``ids`` as routes of the first tokens of a sample of :func:`_sequences`."""
    return RoutedExperts(ids, np.arange(1000 * sample, 1000 * sample + len(ids), dtype=np.int32))


def _row_is_token(rows: int, *, layers: int = 2, topk: int = 2, first: int = 0, dtype: str = "uint8") -> Array:
    """Row t holds ``first + t``; layer and slot are told apart by multiples of 40 and 20."""
    row = np.arange(first, first + rows).reshape(rows, 1, 1)
    return (row + 40 * np.arange(layers).reshape(1, layers, 1) + 20 * np.arange(topk)).astype(dtype)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Batches of all kinds of samples, each of them right."""
    layers, topk = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    tokens = max(lengths) + draw(st.sampled_from([0, 0, 3]))
    max_ids = draw(st.sampled_from([(0, 3), (0, 90, 255), (255, 256), (90, 32767), (5, 300, 32768), (2**31 - 1,)]))
    if max_ids == (2**31 - 1,):
        topk = 1
    routes: list[Any] = []
    trained: list[bool] = []
    captured: list[Array] = []
    for i, length in enumerate(lengths):
        rows = draw(st.integers(0, length))
        max_id = draw(st.sampled_from(max_ids))
        ids = draw(r3st.ids(max_ids=(max_id,), shape=(rows, layers, topk)))
        if topk > 1:
            ids[~ids.any(axis=(1, 2)), -1, -1] = 1  # All zero is no route.
        # Trimming can leave a wide array with small ids, so any dtype of the wire that holds them is right.
        wide = ["uint8", "int16", "int32"][["uint8", "int16", "int32"].index(oracle.smallest(max_id)) :]
        ids = ids.astype(draw(st.sampled_from(wide)))
        layout = draw(st.sampled_from(["c", "fortran", "sliced", "reversed_rows", "read_only"]))
        given_ids = r3st.lay_out(ids, layout).given
        if not rows:
            entry = draw(st.sampled_from([None, _routed(given_ids, i)]))
        else:
            entry = draw(st.sampled_from([given_ids, _routed(given_ids, i)]))
        routes.append(entry)
        trained.append(bool(rows) and draw(st.booleans()))
        captured.append(ids.astype(np.int64))
    return Batch(routes, _sequences(lengths, tokens), lengths, trained, captured)


# The tensor.


@pytest.mark.case("R63", "R84", "R86", "R87")
@fewer
@given(batches())
def test_captured_rows_are_at_their_tokens(batch: Batch) -> None:
    """Row i of a sample is at its token i, whatever is on its left, and all of them are."""
    tensor = batch.pad()
    if not any(batch.rows()):
        assert tensor is None
        return
    assert tensor is not None
    size, tokens = batch.sequences.shape
    layers, topk = batch.captured[0].shape[1:]
    assert tensor.shape == (size, tokens, layers, topk)
    assert tensor.is_contiguous()
    for i, (ids, length) in enumerate(zip(batch.captured, batch.lengths, strict=True)):
        start = tokens - length
        assert tensor[i, start : start + len(ids)].tolist() == ids.tolist()


@pytest.mark.case("R34", "R39")
@fewer
@given(batches())
def test_the_dtype_is_the_smallest_for_the_batch(batch: Batch) -> None:
    """Over all samples, and never uint16."""
    tensor = batch.pad()
    if tensor is None:
        return
    topk = tensor.shape[-1]
    largest = max(int(ids.max(initial=0)) for ids in batch.captured)
    assert tensor.dtype == getattr(torch, oracle.smallest(max(largest, topk - 1)))


@pytest.mark.case("R81")
@fewer
@given(batches())
def test_rows_without_a_route_hold_distinct_experts(batch: Batch) -> None:
    """topk distinct ids that the batch has seen, or 0 to topk - 1 where it has seen fewer."""
    tensor = batch.pad()
    if tensor is None:
        return
    topk = tensor.shape[-1]
    experts = max(max(int(ids.max(initial=0)) for ids in batch.captured) + 1, topk)
    fill = _fill(tensor, batch.rows(), batch.lengths)
    assert (fill >= 0).all()
    assert (fill < experts).all()
    assert all(len(set(row.tolist())) == topk for row in fill.reshape(-1, topk))


@pytest.mark.case("R82")
@fewer
@given(batches())
def test_padding_spreads_over_all_experts(batch: Batch) -> None:
    """Over the whole batch and in each layer, no expert gets two more than another."""
    tensor = batch.pad()
    if tensor is None:
        return
    topk = tensor.shape[-1]
    experts = max(max(int(ids.max(initial=0)) for ids in batch.captured) + 1, topk)
    fill = _fill(tensor, batch.rows(), batch.lengths)
    for layer in range(fill.shape[1]):
        seen, counts = np.unique(fill[:, layer], return_counts=True)
        least = counts.min() if len(seen) == experts else 0
        assert not len(counts) or counts.max() - least <= 1


def _fill(tensor: torch.Tensor, rows: list[int], lengths: list[int]) -> Array:
    """The rows ``[padding, layers, topk]`` that were not captured, found without the mask."""
    tokens = tensor.shape[1]
    real = {(i, tokens - length + t) for i, (n, length) in enumerate(zip(rows, lengths, strict=True)) for t in range(n)}
    places = [(i, t) for i in range(len(rows)) for t in range(tokens) if (i, t) not in real]
    return np.array([tensor[place].tolist() for place in places], np.int64).reshape(-1, *tensor.shape[2:])


@pytest.mark.case("R87")
def test_two_samples_by_hand() -> None:
    """Five and three tokens, row value = token index, one row not captured in each."""
    long, short = _row_is_token(4), _row_is_token(2)
    tensor = pad_routes([_routed(long), _routed(short, 1)], _sequences([5, 3]), [5, 3], [True, True])
    assert tensor is not None
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (2, 5, 2, 2)
    assert tensor[0, :4, 0, 0].tolist() == [0, 1, 2, 3]
    assert tensor[1, 2:4, 0, 0].tolist() == [0, 1]
    assert tensor[0, 3].tolist() == [[3, 23], [43, 63]]
    assert tensor[1, 3].tolist() == [[1, 21], [41, 61]]


@pytest.mark.case("R82")
def test_balance_per_rank() -> None:
    """1,000 padding rows, top-8 of 256 experts on 8 ranks."""
    ids = np.arange(8, dtype=np.uint8).reshape(1, 1, 8) + 248
    tensor = pad_routes([ids, None], _sequences([501, 500], 501), [501, 500], [True, False])
    assert tensor is not None
    fill = _fill(tensor, [1, 0], [501, 500])
    assert len(fill) == 1001
    ranks = np.bincount(fill.reshape(-1) // 32, minlength=8)
    assert ranks.sum() == 1001 * 8
    assert ranks.max() - ranks.min() <= 32
    assert np.bincount(fill.reshape(-1), minlength=256).max() - np.bincount(fill.reshape(-1), minlength=256).min() <= 1
    # Every expert of a row is another one, so that no token is counted short in the routing map.
    one_hot = np.zeros((len(fill), 256), bool)
    np.put_along_axis(one_hot, fill[:, 0], True, axis=1)
    assert one_hot.sum() == len(fill) * 8


@pytest.mark.case("R82")
def test_padding_goes_on_where_it_stopped() -> None:
    """Samples with one padding row each do not all send it to the first experts."""
    ids = _row_is_token(1, layers=1, topk=2, first=79)
    tensor = pad_routes([ids] * 50, _sequences([2] * 50), [2] * 50, [True] * 50)
    assert tensor is not None
    assert tensor[:, 1, 0].flatten().tolist() == list(range(100))


@pytest.mark.case("R34", "R63")
@pytest.mark.parametrize(
    ("dtypes", "max_ids", "expected"),
    [
        (["uint8", "int16"], [200, 300], torch.int16),
        (["int16", "uint8"], [300, 200], torch.int16),
        (["int16", "int16"], [200, 90], torch.uint8),
        (["int32", "int16"], [200, 90], torch.uint8),
        (["int16", "uint8"], [255, 255], torch.uint8),
        (["int16", "uint8"], [256, 1], torch.int16),
        (["int16", "int32"], [256, 32767], torch.int16),
        (["uint8", "int16", "int32"], [7, 256, 32768], torch.int32),
        (["int32", "int16", "uint8"], [32768, 256, 7], torch.int32),
    ],
)
def test_mixed_dtypes(dtypes: list[str], max_ids: list[int], expected: torch.dtype) -> None:
    """The widest that is needed, not the widest that came, and no id wraps."""
    arrays = [np.array([[[0, max_id]]], dtype) for dtype, max_id in zip(dtypes, max_ids, strict=True)]
    lengths = [2] * len(arrays)
    tensor = pad_routes(arrays, _sequences(lengths), lengths, [True] * len(arrays))
    assert tensor is not None
    assert tensor.dtype == expected
    assert tensor[:, 0, 0, 1].tolist() == max_ids


@pytest.mark.case("R81")
def test_topk_above_the_experts_seen() -> None:
    """Fewer experts seen than slots, so padding needs ids of its own."""
    tensor = pad_routes([np.array([[[0, 1, 1]]], np.uint8)], _sequences([3]), [3], [True])
    assert tensor is not None
    assert tensor.tolist() == [[[[0, 1, 1]], [[0, 1, 2]], [[0, 1, 2]]]]


@pytest.mark.case("R77")
def test_a_sample_without_a_response_has_no_routes() -> None:
    """Nobody has looked at what was captured of its prompt: ids of no expert, which padding must not spread."""
    aborted, right = np.full((2, 1, 2), 250, np.uint8), np.array([[[1, 2]], [[3, 0]]], np.uint8)
    tensor = batch.pad_routes([aborted, right], _sequences([3, 3]), [3, 3], [[], [1]])
    assert tensor is not None
    assert tensor[1, :2].tolist() == right.tolist()
    assert int(tensor.max()) == 3
    assert batch.pad_routes([aborted], _sequences([3]), [3], [[]]) is None


@pytest.mark.case("R86")
def test_one_row() -> None:
    tensor = pad_routes([_row_is_token(1, first=7)], _sequences([1], 4), [1], [True])
    assert tensor is not None
    assert tensor[0, 3].tolist() == [[7, 27], [47, 67]]
    assert tensor.shape == (1, 4, 2, 2)


def test_the_tensor_does_not_alias() -> None:
    ids = _row_is_token(3)
    tensor = pad_routes([ids], _sequences([3]), [3], [True])
    assert tensor is not None
    before = ids.copy()
    ids[...] = 0
    assert tensor[0].tolist() == before.tolist()
    tensor += 1
    assert not ids.any()


def test_inputs_are_left_alone() -> None:
    ids, sequences = _row_is_token(3), _sequences([4, 2])
    before = sequences.clone()
    pad_routes([_routed(ids), None], sequences, [4, 2], [True, False])
    assert ids.tolist() == _row_is_token(3).tolist()
    assert torch.equal(sequences, before)


@pytest.mark.case("R89")
def test_read_only_inputs_without_a_warning() -> None:
    ids = np.frombuffer(_row_is_token(3).tobytes(), np.uint8).reshape(3, 2, 2)
    tokens = np.frombuffer(np.arange(3, dtype=np.int32).tobytes(), np.int32)
    assert not ids.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = pad_routes([ids, RoutedExperts(ids, tokens + 1000)], _sequences([4, 3]), [4, 3], [True, True])
        assert tensor is not None
        tensor += 1
        mask = router_padding_mask([3, 3], [4, 3], 4)
    assert tensor[0, :3, 0, 0].tolist() == [1, 2, 3]
    assert mask.tolist() == [[False, False, False, True], [True, False, False, False]]


# Samples without routes.


@pytest.mark.case("R75")
@pytest.mark.parametrize("entry", [None, _routed(np.zeros((0, 2, 2), np.uint8), 1)], ids=["none", "no-rows"])
def test_an_untrained_sample_needs_no_routes(entry: Any) -> None:
    """A placeholder without a model call becomes padding."""
    tensor = pad_routes([_row_is_token(3), entry], _sequences([4, 3]), [4, 3], [True, False])
    assert tensor is not None
    assert all(len(set(row)) == 2 for row in tensor[1].reshape(-1, 2).tolist())
    assert router_padding_mask([3, 0], [4, 3], 4)[1].all()


@pytest.mark.case("R100")
@pytest.mark.parametrize("entry", [None, _routed(np.zeros((0, 2, 2), np.uint8), 1)], ids=["none", "no-rows"])
def test_a_trained_sample_needs_routes(entry: Any) -> None:
    """Never zeros in their place."""
    error = _refused([_row_is_token(3), entry])
    assert error.field == f"{FIELD}[1]"


def test_a_batch_without_routes() -> None:
    assert pad_routes([None, None], _sequences([4, 3]), [4, 3], [False, False]) is None
    with pytest.raises(RouteError) as caught:
        pad_routes([None, None], _sequences([4, 3]), [4, 3], [False, True])
    assert caught.value.where == "sample 1"


@pytest.mark.case("R48")
def test_the_shape_does_not_come_from_an_empty_sample() -> None:
    """No rows came as nested lists, so that [layers, topk] are not known."""
    tensor = pad_routes(
        [_routed(np.zeros((0, 0, 0), np.uint8)), _row_is_token(3)], _sequences([4, 3]), [4, 3], [False, True]
    )
    assert tensor is not None
    assert tensor.shape == (2, 4, 2, 2)


# Errors name the sample.


def _refused(routes: list[Any], lengths: tuple[int, ...] = (4, 3), sample: int = 1) -> RouteError:
    with pytest.raises(RouteError) as caught:
        pad_routes(routes, _sequences(list(lengths)), list(lengths), [True] * len(lengths))
    assert caught.value.where == f"sample {sample}"
    assert caught.value.field.startswith(f"{FIELD}[{sample}]")
    return caught.value


@pytest.mark.case("R76")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(_row_is_token(3).tolist(), id="list"),
        pytest.param([], id="empty-list"),
        pytest.param({}, id="dict"),
        pytest.param(oracle.envelope(_row_is_token(3)), id="envelope"),
        pytest.param("AAEC", id="str"),
        pytest.param(b"AAEC", id="bytes"),
        pytest.param(0, id="int"),
        pytest.param(False, id="bool"),
        pytest.param(torch.from_numpy(_row_is_token(3)), id="tensor"),
        pytest.param(_row_is_token(3)[0], id="2d"),
        pytest.param(_row_is_token(3)[None], id="4d"),
        pytest.param(np.array(5, np.uint8), id="0d"),
        pytest.param(_row_is_token(3)[:0], id="no-rows"),
    ],
)
def test_what_is_no_array_is_refused(wrong: Any) -> None:
    """Nested and empty lists, with the number of the sample."""
    assert _refused([_row_is_token(3), wrong]).field == f"{FIELD}[1]"
    assert _refused([wrong, _row_is_token(2)], sample=0).field == f"{FIELD}[0]"


@pytest.mark.case("R27", "R39")
@pytest.mark.parametrize(
    "dtype", ["int64", "uint16", "int8", "uint32", "uint64", "float32", "bool", "object", ">i2", ">i4"]
)
def test_other_dtypes_are_refused(dtype: str) -> None:
    error = _refused([_row_is_token(3), _row_is_token(3).astype(dtype)])
    assert error.field == f"{FIELD}[1].dtype"
    assert error.got == np.dtype(dtype).str


@pytest.mark.case("R10")
@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_negative_ids_are_refused(dtype: str) -> None:
    """-1 does not wrap to 255."""
    ids = _row_is_token(3, dtype=dtype)
    ids[2, 1, 0] = -1
    assert _refused([_row_is_token(3), ids]).got == "-1"


@pytest.mark.case("R12")
@pytest.mark.parametrize("shape", [(3, 1, 2), (3, 3, 2), (3, 2, 1), (3, 2, 3), (3, 4, 1), (3, 1, 4)])
def test_another_shape_is_refused(shape: r3st.Shape) -> None:
    """A further column is not cut off."""
    error = _refused([_row_is_token(3), np.zeros(shape, np.uint8)])
    assert error.field == f"{FIELD}[1].shape"
    assert error.got == str(list(shape[1:]))
    assert "[2, 2]" in error.expected
    assert _refused([_row_is_token(3), _routed(np.zeros(shape, np.uint8), 1)]).field == f"{FIELD}[1].shape"


@pytest.mark.case("R64", "R87")
@pytest.mark.parametrize("plain", [False, True])
def test_more_rows_than_tokens_are_refused(plain: bool) -> None:
    """Not cut, not shifted."""
    ids = _row_is_token(4)
    error = _refused([_row_is_token(3), ids if plain else _routed(ids, 1)])
    assert error.field == f"{FIELD}[1]"
    assert error.got == "4"


def test_as_many_rows_as_tokens_are_right() -> None:
    tensor = pad_routes([_row_is_token(4), _routed(_row_is_token(3), 1)], _sequences([4, 3]), [4, 3], [True, True])
    assert tensor is not None
    assert tensor[1, 1:, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.case("R70")
def test_routes_of_other_tokens_are_refused() -> None:
    """A replaced sample that kept the routes of the rejected one."""
    error = _refused([_routed(_row_is_token(3)), _routed(_row_is_token(3), 0)])
    assert error.field == f"{FIELD}[1]"
    assert "1000" in error.expected
    assert "row 0" in error.expected
    assert error.hint


@given(st.integers(1, 6), st.data())
def test_any_changed_token_is_seen(rows: int, data: st.DataObject) -> None:
    """Also the last row's; tokens behind the captured rows may be anything."""
    routes = _routed(_row_is_token(rows))
    at = data.draw(st.integers(0, rows - 1))
    sequences = _sequences([rows + 2])
    sequences[0, rows:] = 7
    assert pad_routes([routes], sequences, [rows + 2], [True]) is not None
    sequences[0, at] = 999_999
    with pytest.raises(RouteError) as caught:
        pad_routes([routes], sequences, [rows + 2], [True])
    assert caught.value.where == "sample 0"
    assert "999999" in caught.value.expected
    assert f"row {at}" in caught.value.expected


@pytest.mark.case("R70")
def test_swapped_samples_are_seen() -> None:
    first, second = _routed(_row_is_token(3), 0), _routed(_row_is_token(3), 1)
    assert _refused([second, first], lengths=(4, 4), sample=0).hint


@given(st.lists(st.none() | r3st.ids() | r3st.json_values(), min_size=1, max_size=3), st.data())
def test_anything_else_is_a_route_error(routes: list[Any], data: st.DataObject) -> None:
    """Nothing but a tensor, None or an :class:`R3Error` that names a sample."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(routes), max_size=len(routes)))
    try:
        tensor = pad_routes(routes, _sequences(lengths), lengths, [False] * len(routes))
    except R3Error as error:
        named = (type(error), error.where)
        assert named in {(RouteError, f"sample {i}") for i in range(len(routes))}
        return
    assert all(entry is None or entry == [] for entry in routes) if tensor is None else tensor.shape[0] == len(routes)


# Tokens that are trained on without a route.


def _covered(rows: int, masks: list[list[int]], lengths: list[int], caplog: pytest.LogCaptureFixture) -> list[Any]:
    arrays = [_row_is_token(rows) for _ in lengths]
    with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
        assert batch.pad_routes(arrays, _sequences(lengths), lengths, masks) is not None
    return [record.args for record in caplog.records]


def test_the_last_token_and_a_synthetic_eos_need_no_route(caplog: pytest.LogCaptureFixture) -> None:
    """Prompt 3, response 3: rows for 5 tokens, or for 4 where the last one is an EOS that was not sampled."""
    assert _covered(5, [[1, 1, 1]], [6], caplog) == []
    assert _covered(4, [[1, 1, 1]], [6], caplog) == []


def test_trained_tokens_after_the_captured_rows_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert _covered(3, [[1, 1, 1], [0, 0, 1], [0, 1, 0]], [6, 6, 6], caplog) == [(2, "0, 2")]


def test_prompt_rows_alone_are_enough_for_one_sampled_token(caplog: pytest.LogCaptureFixture) -> None:
    assert _covered(3, [[1]], [4], caplog) == []


@pytest.mark.case("R77")
@pytest.mark.parametrize("nothing", [None, [], RoutedExperts(np.empty((0, 0, 0), np.uint8), np.empty(0, np.int32))])
def test_a_sample_without_routes_may_be_trained_on_nothing_but_a_synthetic_eos(nothing: Any) -> None:
    """What SkyRL makes of a request that was aborted before its first token, in the one-message style."""
    routes, lengths = [_row_is_token(3), nothing], [4, 4]
    tensor = batch.pad_routes(routes, _sequences(lengths), lengths, [[1], [1]])
    assert tensor is not None
    assert (tensor[1].sort(dim=-1).values.diff(dim=-1) > 0).all()
    with pytest.raises(RouteError) as caught:
        batch.pad_routes(routes, _sequences(lengths), lengths, [[1], [1, 1]])
    assert caught.value.where == "sample 1"


@pytest.mark.parametrize("shape", [(2, 0, 2), (2, 2, 0)])
def test_rows_without_ids_are_refused(shape: tuple[int, ...]) -> None:
    assert _refused([_row_is_token(3), np.zeros(shape, np.uint8)]).field == f"{FIELD}[1]"


# The mask.


@pytest.mark.case("R83")
def test_mask_of_left_padding_and_an_appended_token() -> None:
    """P=3, G=2 and a synthetic EOS, 4 rows captured, left padding 2."""
    mask = router_padding_mask([4], [6], 8)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, True, False, False, False, False, True, True]]


@pytest.mark.case("R83", "R84")
@fewer
@given(batches())
def test_the_mask_tells_captured_rows_from_others(batch: Batch) -> None:
    """The number of rows that are replayed is the number that were captured."""
    tokens = batch.sequences.shape[1]
    mask = router_padding_mask(batch.rows(), batch.lengths, tokens)
    want = [
        [not tokens - length <= t < tokens - length + rows for t in range(tokens)]
        for rows, length in zip(batch.rows(), batch.lengths, strict=True)
    ]
    assert mask.dtype == torch.bool
    assert mask.tolist() == want
    assert int((~mask).sum()) == sum(batch.rows())


@fewer
@given(batches())
def test_mask_and_tensor_agree(batch: Batch) -> None:
    """What the mask leaves over is the captured ids in order, and nothing else."""
    tensor = batch.pad()
    if tensor is None:
        return
    mask = router_padding_mask(batch.rows(), batch.lengths, batch.sequences.shape[1])
    real = np.concatenate([ids for ids in batch.captured if len(ids)])
    assert tensor[~mask].tolist() == real.tolist()


# Memory.


@pytest.mark.case("R73")
@pytest.mark.parametrize("plain", [False, True])
def test_peak_memory(plain: bool) -> None:
    """At most 1.25 times the result.

    The result itself is allocated by torch, which tracemalloc does not see. What it sees is everything that numpy
    and Python allocate on the way, so that may be a quarter of the result and a small constant.
    """
    lengths = [2000, 1500, 1000, 500]
    arrays = [np.full((length - 1, 48, 8), 127, np.uint8) for length in lengths]
    routes = arrays if plain else [_routed(ids, i) for i, ids in enumerate(arrays)]
    sequences = torch.cat(
        [torch.cat([torch.full((1, 2000 - n), -1), torch.arange(1000 * i, 1000 * i + n)[None]], 1)
         for i, n in enumerate(lengths)]
    )  # fmt: skip
    pad_routes(routes, sequences, lengths, [True] * 4)  # imports and caches are not the batch's
    tracemalloc.start()
    try:
        tensor = pad_routes(routes, sequences, lengths, [True] * 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tensor is not None
    assert peak <= 0.25 * tensor.nbytes + 65_536


# Inputs that were once let through, or raised something else.


@pytest.mark.parametrize("routes", [1, 3])
def test_as_many_samples_as_sequences(routes: int) -> None:
    """The buffer starts uninitialised, so a sequence without an entry would be trained on what was in memory."""
    with pytest.raises((RouteError, ValueError)):
        pad_routes([_row_is_token(3)] * routes, _sequences([3, 3]), [3] * routes, [True] * routes)


@pytest.mark.case("R87")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("plain", [False, True])
def test_a_sample_longer_than_its_sequence(rows: int, plain: bool) -> None:
    """A negative left pad. One row would broadcast into none and be lost without an error."""
    ids = _row_is_token(rows)
    sequences = torch.tensor([[0, 1, 2], [1000, 1001, 1002]])
    with pytest.raises(RouteError) as caught:
        pad_routes([_row_is_token(3), ids if plain else _routed(ids, 1)], sequences, [3, 4], [True, True])
    assert caught.value.where == "sample 1"


def test_masked_arrays_are_refused() -> None:
    """As the codec does: what is behind the mask is no id."""
    masked = np.ma.array(_row_is_token(3), mask=True)
    assert _refused([_row_is_token(3), masked]).field.startswith(f"{FIELD}[1]")


@pytest.mark.case("R73")
def test_peak_memory_of_a_batch_that_is_mostly_padding() -> None:
    """The ids of padding rows are made on the way, as int64 and more than once. See :func:`test_peak_memory`."""
    length = 16_384
    arguments = ([_row_is_token(1, layers=48, topk=8) % 128], torch.arange(length)[None], [length], [True])
    pad_routes(*arguments)
    tracemalloc.start()
    try:
        tensor = pad_routes(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tensor is not None
    assert peak <= 0.25 * tensor.nbytes + 65_536
