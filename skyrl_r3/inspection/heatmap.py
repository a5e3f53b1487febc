"""A picture of how experts are used: layer by expert."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_r3.errors import ReplyError
from skyrl_r3.inspection.facts import Facts

_MOST_CELLS = 2**20
"""Layers times experts: 20 times as many as any model has. A file may claim more."""
_DPI = 150
_LONGEST_NAME = 60
"""Characters that fit above the smallest picture."""


def shares(facts: Facts) -> np.ndarray:
    """The share of tokens that pick an expert, float64 ``[layers, experts]``; NaN in layers without a route.

    Raises:
        ReplyError: There is nothing to draw, or too much.
    """
    shape = (len(facts.loads), facts.num_experts)
    if not shape[0] or shape[0] * shape[1] > _MOST_CELLS:
        expected = f"routes of at most {_MOST_CELLS} layers times experts"
        raise ReplyError("heatmap", expected=expected, got=f"{shape[0]} layers, {shape[1]} experts")
    found = np.full(shape, np.nan)
    for load in facts.loads:
        if len(load.experts):
            found[load.layer] = 0
            found[load.layer, load.experts] = load.picks / load.rows
    return found


def draw(facts: Facts, name: str, path: Path) -> None:
    """Write the picture to a PNG file. Needs matplotlib.

    Raises:
        ReplyError: As :func:`shares`.
        OSError: The file cannot be written.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    percent = 100 * shares(facts)
    layers, experts = percent.shape
    size = (min(max(4 + 0.035 * experts, 7), 13), min(max(2.5 + 0.11 * layers, 4), 9))
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.add_subplot()
    most = np.nanmax(percent, initial=0)
    # By the root, because one expert of 13 times the mean leaves all others in the dark.
    scale = PowerNorm(0.5, vmin=0, vmax=most or 1)
    image = axes.imshow(percent, aspect="auto", interpolation="nearest", norm=scale, cmap="viridis")
    grey: dict[str, Any] = {"facecolor": "lightgrey", "edgecolor": "grey", "hatch": "////", "linewidth": 0}
    without = np.flatnonzero(np.isnan(percent).all(axis=1))
    for layer in without:
        axes.axhspan(layer - 0.5, layer + 0.5, **grey)
    if len(without):
        why = ", ".join(dict.fromkeys(facts.loads[layer].note for layer in without))
        figure.legend(handles=[Patch(**grey, label=why)], loc="outside lower center")
    axes.set(xlabel="expert (id)", ylabel="layer (index)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    ids = facts.saved.ids
    topk = 0 if ids is None else ids.shape[2]
    figure.colorbar(image, ax=axes, label=f"tokens that pick it, % (even: {100 * topk / experts:.3g}%)", pad=0.02)
    shape = "" if ids is None else f"{ids.shape[0]:,} rows, {ids.shape[1]} layers, top-{topk} of {experts} experts"
    name = name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"
    axes.set_title(f"Expert load: {name}\n{shape}", parse_math=False, fontsize=10)
    with warnings.catch_warnings(action="ignore"):  # Of letters in the name that the font has not.
        figure.savefig(path, dpi=_DPI, format="png")
