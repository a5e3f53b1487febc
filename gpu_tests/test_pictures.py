"""The report's pictures and numbers."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest

from gpu_tests.pictures import Picture, bars, by_layer, heat_map, significant


def svg(picture: Picture) -> str:
    """The picture itself."""
    kind, _, content = picture.uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (0.001, "0.00100"), (0.0009999, "0.00100"), (0.000999, "9.99·10⁻⁴"), (1.0, "1.00")),
        *((99.96, "100"), (123.4, "123"), (12_345.0, "12,300"), (1e7, "1.00·10⁷"), (-2.5e-9, "-2.50·10⁻⁹")),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize("values", [{"a": 0.0}, {"a": -1e-17, "b": 0.0}, {"a": 1e-9, "b": 1.0, "c": 0.0}, {"a": 5.0}])
def test_bars_are_drawn_of_any_values(values: dict[str, float]) -> None:
    picture = bars({"group": values}, unit="nats", caption="c")
    assert picture.uri.startswith("data:image/svg+xml;base64,")
    assert all(significant(value) in picture.alt for value in values.values())


def test_the_same_facts_make_the_same_picture() -> None:
    first, second = (heat_map(np.ones((2, 4)), [3, 4], unit="load", caption="c").uri for _ in range(2))
    assert first == second


def test_a_series_has_one_colour_in_all_groups_and_pictures() -> None:
    groups = {"one": {"own routes": 3.0, "replayed routes": 2.0}, "another": {"replayed routes": 1.0}}
    drawn = svg(bars(groups, unit="nats", caption="c"))
    # Bars and the key of the legend.
    assert [drawn.count(f"fill: {color}") for color in ("#767676", "#0072b2")] == [1 + 1, 2 + 1]
    alone = svg(bars({"one": {"replayed routes": 2.0}}, unit="nats", caption="c"))
    assert [alone.count(f"fill: {color}") for color in ("#767676", "#0072b2")] == [0, 1]


def test_a_picture_points_nowhere() -> None:
    picture = by_layer({1: 90.0, 7: 70.5}, unit="%", caption="c")
    assert "lowest in layer 7, 70.50" in picture.alt
    assert re.findall(r'(?:href|resource)="(?!#|data:)[^"]*"', svg(picture)) == []
