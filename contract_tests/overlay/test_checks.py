"""``skyrl_r3.checks``: ids that no router can have picked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_r3 import checks
from skyrl_r3.errors import RoutesError
from skyrl_r3.spec import RouteSpec

LAYERS, TOPK, EXPERTS = 4, 3, 20
SPEC = RouteSpec(layers=LAYERS, topk=TOPK, num_experts=EXPERTS, moe_layers=tuple(range(LAYERS)))
SIZES = [1, 15, 64, 65, 500, checks.LOOKED_AT, checks.LOOKED_AT + 1, 3 * checks.LOOKED_AT]


def clean(rows: int, *, layers: int = LAYERS, topk: int = TOPK, experts: int = EXPERTS, seed: int = 0) -> np.ndarray:
    """What a router picks: different experts in each row of a layer."""
    dice = np.random.default_rng(seed)
    return np.argsort(dice.random((rows, layers, experts)), axis=2)[:, :, :topk].astype(np.uint8)


def kinds(ids: np.ndarray, spec: RouteSpec = SPEC, **more: int) -> list[str]:
    return [finding.error.kind for finding in checks.find(ids, spec, **more)]


def only(ids: np.ndarray, spec: RouteSpec = SPEC, **more: int) -> checks.Finding:
    (finding,) = checks.find(ids, spec, **more)
    return finding


# What is right.


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("spec", [SPEC, RouteSpec()], ids=["known", "unknown"])
def test_routes_of_a_router(rows: int, spec: RouteSpec) -> None:
    assert kinds(clean(rows), spec) == []


@given(
    rows=st.integers(0, 40),
    layers=st.integers(1, 4),
    topk=st.integers(1, 5),
    more=st.integers(0, 6),
    seed=st.integers(),
)
def test_no_router_is_accused(rows: int, layers: int, topk: int, more: int, seed: int) -> None:
    """Also where all experts are picked each time, so that rows are alike but for their order."""
    ids = clean(rows, layers=layers, topk=topk, experts=topk + more, seed=seed % 2**32)
    spec = RouteSpec(layers=layers, topk=topk, num_experts=topk + more, moe_layers=tuple(range(layers)))
    allowed = {"identical_rows"} if topk + more < 4 else set()  # So few routes repeat by chance.
    assert set(kinds(ids, spec)) <= allowed
    assert set(kinds(ids, RouteSpec())) <= allowed


@pytest.mark.parametrize("moe_layers", [(1, 2, 3), (2, 3), (1, 3), None])
def test_dense_layers_are_zero(moe_layers: tuple[int, ...] | None) -> None:
    ids = clean(100)
    for layer in set(range(LAYERS)) - set(moe_layers or (1, 2, 3)):
        ids[:, layer] = 0
    assert kinds(ids, RouteSpec(layers=LAYERS, topk=TOPK, num_experts=EXPERTS, moe_layers=moe_layers)) == []


def test_one_expert_a_token() -> None:
    """Its id may be 0, all along."""
    spec = RouteSpec(layers=2, topk=1, num_experts=4, moe_layers=(0, 1))
    assert kinds(np.zeros((10, 2, 1), np.uint8), spec) == []


def test_no_rows() -> None:
    assert kinds(np.zeros((0, 0, 0), np.uint8)) == []
    assert kinds(np.zeros((0, LAYERS, TOPK), np.uint8)) == []


# Ids of no expert.


@pytest.mark.case("R03", "R37")
@pytest.mark.parametrize("rows", SIZES)
def test_an_id_out_of_range_is_found_in_any_row(rows: int) -> None:
    for row in {0, rows // 2, rows - 1}:
        ids = clean(rows)
        ids[row, 2, 1] = EXPERTS
        finding = only(ids, first=5)
        assert (finding.error.kind, finding.error.got) == ("out_of_range", str(EXPERTS))
        assert np.flatnonzero(finding.rows).tolist() == [row]
        assert f"row {row + 5}, 1 of {rows} rows" in finding.error.where
        assert "in layer 2" in finding.error.where


@pytest.mark.case("R03")
def test_ids_of_physical_slots() -> None:
    """256 experts and 16 redundant slots: a wider dtype alone would hide it."""
    ids = clean(50, topk=4, experts=100).astype(np.int16)
    ids[7, 1, 3] = 271
    spec = RouteSpec(layers=LAYERS, topk=4, num_experts=256, moe_layers=tuple(range(LAYERS)))
    assert only(ids, spec).error.got == "271"
    assert kinds(ids, RouteSpec()) == []  # Nothing tells how many there are.


@pytest.mark.parametrize(("experts", "dtype"), [(255, np.uint8), (32767, np.int16)])
def test_the_largest_id_of_a_dtype_is_looked_at(experts: int, dtype: type) -> None:
    assert kinds(np.array([[[0, experts]]], dtype), RouteSpec(num_experts=experts)) == ["out_of_range"]


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (255, np.uint8), (32768, np.int16)])
def test_the_last_expert(experts: int, dtype: type) -> None:
    ids = np.array([[[0, min(experts - 1, np.iinfo(dtype).max)]]], dtype)
    assert kinds(ids, RouteSpec(num_experts=experts)) == []


def test_a_dense_layer_has_ids_in_range_too() -> None:
    ids = clean(20)
    ids[:, 0] = EXPERTS + 1
    assert "out_of_range" in kinds(ids, RouteSpec(num_experts=EXPERTS, moe_layers=(1, 2, 3)))


# Rows of one id.


@pytest.mark.case("R01")
@pytest.mark.parametrize("spec", [SPEC, RouteSpec()], ids=["known", "unknown"])
@pytest.mark.parametrize("rows", SIZES)
def test_nothing_was_captured(rows: int, spec: RouteSpec) -> None:
    finding = only(np.zeros((rows, LAYERS, TOPK), np.uint8), spec)
    assert (finding.error.kind, finding.error.got) == ("all_equal", "0, 3 times")
    assert finding.rows.all()
    assert "layers 0 to 3" in finding.error.where
    assert "captured nothing" in finding.error.hint


@pytest.mark.case("R04", "R05")
@pytest.mark.parametrize("layers", [[0], [3], [0, 1], [0, 2, 3]])
@pytest.mark.parametrize("rows", SIZES)
def test_layers_that_nobody_wrote(rows: int, layers: list[int]) -> None:
    """As where only the last stage of a pipeline is saved."""
    ids = clean(rows)
    ids[:, layers] = 0
    finding = only(ids)
    assert (finding.error.kind, finding.rows.all()) == ("all_equal", True)
    named = {(0,): "layer 0", (3,): "layer 3", (0, 1): "layers 0 to 1", (0, 2, 3): "layers 0, 2 to 3"}
    assert finding.error.where.endswith(f"in {named[tuple(layers)]}")


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_routes_in_few_rows_is_none_that_is_dense(layer: int) -> None:
    """Where it is unknown which are."""
    ids = np.tile(clean(1024), (32, 1, 1))
    ids[:30_000, layer] = 0
    ids[30_100:, layer] = 0
    finding = only(ids, RouteSpec())
    assert (finding.error.kind, int(finding.rows.sum())) == ("all_equal", 32_668)


def test_many_layers_are_not_all_named() -> None:
    ids = clean(3, layers=200)
    ids[:, ::2] = 0
    error = only(ids, RouteSpec(moe_layers=tuple(range(200)))).error
    assert error.where.endswith("in layers 0, 2, 4, 6, 8, 10, 12, 14 and 92 more ranges")


@pytest.mark.parametrize("rows", [30, 3000])
def test_a_prompt_that_was_not_captured(rows: int) -> None:
    """As where it came out of a cache that routes are not kept with."""
    ids = clean(rows)
    ids[: rows // 3] = 0
    finding = only(ids, prompt=rows // 3)
    assert finding.error.kind == "all_equal"
    assert np.flatnonzero(finding.rows).tolist() == list(range(rows // 3))
    assert f"row 0, {rows // 3} of {rows} rows, of the prompt, " in finding.error.where


def test_the_region_is_named() -> None:
    ids = clean(30)
    ids[12, 1] = 7
    assert "of the response" in only(ids, prompt=10).error.where
    assert "of the response" in only(ids, prompt=22, first=10).error.where
    assert "of the prompt" in only(ids, prompt=13).error.where
    ids[2, 3] = 9
    assert "of the prompt and response" in only(ids, prompt=10).error.where


def test_an_id_other_than_zero() -> None:
    ids = clean(30)
    ids[12, 1] = 7
    finding = only(ids)
    assert (finding.error.kind, finding.error.got, finding.error.hint) == ("all_equal", "7, 3 times", "")
    assert np.flatnonzero(finding.rows).tolist() == [12]


@pytest.mark.parametrize("length", [16, 17, 100])
@pytest.mark.parametrize("start", [0, 1, 7, 15, 5000, 32768 - 100])
def test_a_run_as_long_as_a_block_is_found_in_one_layer_of_32768_rows(start: int, length: int) -> None:
    ids = np.tile(clean(1024), (32, 1, 1))
    ids[start : start + length, 2] = 0
    finding = only(ids)
    assert finding.error.kind == "all_equal"
    assert np.flatnonzero(finding.rows).tolist() == list(range(start, start + length))


# Ids twice.


@pytest.mark.case("R12", "R81")
@pytest.mark.parametrize("slots", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("rows", SIZES)
def test_repeated_ids(rows: int, slots: tuple[int, int]) -> None:
    ids = clean(rows)
    ids[:, 3, slots[1]] = ids[:, 3, slots[0]]
    finding = only(ids)
    assert (finding.error.kind, finding.rows.all()) == ("repeated", True)
    assert "layer 3" in finding.error.where
    assert finding.error.got == str(ids[0, 3].tolist())


@pytest.mark.parametrize("half", [slice(0, 4000), slice(4000, 8000)])
def test_the_last_slots_are_compared_all_along_a_reply(half: slice) -> None:
    ids = np.tile(clean(1000), (8, 1, 1))
    ids[half, 1, 2] = ids[half, 1, 1]
    finding = only(ids)
    assert (finding.error.kind, int(finding.rows.sum())) == ("repeated", 4000)


def test_both_kinds_in_one_reply_are_told_apart() -> None:
    ids = clean(30)
    ids[4, 0] = 5
    ids[9, 1] = [6, 6, 7]
    found = {finding.error.kind: np.flatnonzero(finding.rows).tolist() for finding in checks.find(ids, SPEC)}
    assert found == {"all_equal": [4], "repeated": [9]}


@pytest.mark.parametrize("moe_layers", [(0, 2), (1, 3), (0, 1, 3)])
def test_layers_that_do_not_follow_each_other(moe_layers: tuple[int, ...]) -> None:
    spec = RouteSpec(moe_layers=moe_layers)
    for layer in range(LAYERS):
        ids = clean(50)
        ids[:, layer, 1] = ids[:, layer, 0]
        found = list(checks.find(ids, spec))
        assert [finding.error.kind for finding in found] == (["repeated"] if layer in moe_layers else [])
        assert all(f"in layer {layer}" in finding.error.where for finding in found)


# Rows as their neighbours.


@pytest.mark.case("R10", "R11")
@pytest.mark.parametrize("rows", [16, 70, 5000])
@pytest.mark.parametrize("length", [16, 67])
def test_equal_rows(rows: int, length: int) -> None:
    for start in {0, 1, rows // 2, rows - length}:
        if 0 <= start <= rows - length:
            ids = clean(rows)
            ids[start : start + length] = ids[start]
            finding = only(ids)
            assert (finding.error.kind, finding.error.got) == ("identical_rows", str(length))
            assert np.flatnonzero(finding.rows).tolist() == list(range(start, start + length))


@pytest.mark.parametrize("start", range(20))
def test_fewer_equal_rows_are_none(start: int) -> None:
    ids = clean(60)
    ids[start : start + checks.RUN - 1] = ids[start]
    assert kinds(ids) == []


def test_rows_that_are_equal_in_one_layer_only() -> None:
    ids = clean(60)
    ids[:, -1] = ids[0, -1]
    assert kinds(ids) == []


def test_rows_of_all_experts_are_alike() -> None:
    ids = np.tile(np.array([1, 0], np.uint8), (40, 2, 1))
    assert kinds(ids, RouteSpec(num_experts=2)) == []
    assert kinds(ids, RouteSpec(num_experts=3)) == ["identical_rows"]


def test_two_runs() -> None:
    ids = clean(100)
    ids[3:20], ids[40:60] = ids[3], ids[40]
    assert only(ids).rows.nonzero()[0].tolist() == [*range(3, 20), *range(40, 60)]


# The shape.


@pytest.mark.case("R12")
@pytest.mark.parametrize("spec", [RouteSpec(topk=TOPK - 1), RouteSpec(topk=TOPK + 1), RouteSpec(layers=LAYERS + 1)])
def test_another_shape_than_the_model_has(spec: RouteSpec) -> None:
    """As where fused shared experts add columns. They are not cut off: which ones they are is a guess."""
    with pytest.raises(RoutesError) as caught:
        checks.check_shape(clean(5), spec)
    assert (caught.value.kind, caught.value.field) == ("shape", "routed_experts.shape")
    checks.check_shape(np.zeros((0, 0, 0), np.uint8), spec)
    checks.check_shape(clean(5), SPEC)
    checks.check_shape(clean(5), RouteSpec())


# Layouts and dtypes.


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("read_only", [False, True])
def test_ids_are_left_alone(dtype: str, read_only: bool) -> None:
    ids = clean(200).astype(dtype)
    ids[5, 1] = 3
    ids[50:90] = ids[50]
    ids[7, 2, 0] = EXPERTS + 2
    before = ids.copy()
    ids.flags.writeable = not read_only
    assert kinds(ids) == ["out_of_range", "all_equal", "identical_rows"]
    assert np.array_equal(ids, before)


@given(st.data())
def test_what_is_found_is_true_of_the_rows_that_are_named(data: st.DataObject) -> None:
    """Against the definition, written out, on routes with few experts, so that all of it happens."""
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3)))
    ids = np.array(data.draw(st.lists(st.integers(0, 4), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    ids = ids.astype(np.uint8).reshape(shape)
    found = {
        f.error.kind: f.rows.tolist() for f in checks.find(ids, RouteSpec(num_experts=4, moe_layers=(shape[1] - 1,)))
    }
    last = [row[-1].tolist() for row in ids]
    truth = {
        "out_of_range": [bool((row > 3).any()) for row in ids],
        "all_equal": [len(set(row)) == 1 for row in last],
        "repeated": [1 < len(set(row)) < len(row) for row in last],
    }
    assert {kind: rows for kind, rows in found.items() if kind != "identical_rows"} == {
        kind: rows for kind, rows in truth.items() if any(rows)
    }
