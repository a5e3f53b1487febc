"""Pictures of the report, as SVG in data URIs: narrow, so that a phone shows them whole and still readable."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

WIDTH_IN = 4.2
_GREY, _ORANGE, _BLUE, _GREEN = "#767676", "#d55e00", "#0072b2", "#009e73"
_COLORS = {"nested": _GREY, "packed": _ORANGE, "frame": _BLUE, "own routes": _GREY, "replayed routes": _BLUE}
"""The same in all pictures, and told apart by colour-blind readers too; grey is what there is without this package."""
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # It comes with matplotlib, and has superscripts.
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#767676",
    "axes.linewidth": 0.7,
    "svg.hashsalt": "r3",  # The same facts, the same bytes.
    # A model's name is no formula.
    "text.parse_math": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_GROUP_CHARACTERS = 44
"""Of a line of a group's name: as wide as the picture."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture for the page.

    Attributes:
        caption: What is drawn, with the unit.
        alt: What it shows, for those who don't see it.
        uri: The picture itself, as a data URI.
    """

    caption: str
    alt: str
    uri: str


def significant(value: float) -> str:
    """``value`` to three digits: 0.0123, 12,300 or 1.23·10⁻⁷."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    if not 1e-3 <= abs(rounded) < 1e7:
        return _power(value)
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}"


def _power(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}·10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def bars(groups: Mapping[str, Mapping[str, float]], *, unit: str, caption: str) -> Picture:
    """Horizontal bars, each with its value.

    Args:
        groups: Group -> series -> value; the series should be those of :data:`_COLORS`.
        unit: Of the values, for the axis.
    """
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    highest = max((value for values in groups.values() for value in values.values()), default=0) or 1
    names = {group: textwrap.wrap(group, _GROUP_CHARACTERS) for group in groups}
    lines = sum(1.6 + 0.9 * (len(names[group]) - 1) + len(values) for group, values in groups.items())
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.85 + 0.2 * lines), layout="constrained")
        axes = figure.add_subplot()
        # A quarter of the width is left for the values behind the bars.
        axes.set_xlim(0, highest / 0.75)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        at = 0.0
        for group, values in groups.items():
            text = "\n".join(names[group])
            at += 0.9 * text.count("\n")
            axes.text(0, at + 0.45, text, transform=axes.get_yaxis_transform(), va="bottom", weight="bold")
            for name, value in values.items():
                at += 1
                axes.barh(at, value, 0.78, color=_COLORS.get(name, _GREEN))
                axes.annotate(significant(value), (value, at), (4, 0), textcoords="offset points", va="center")
            at += 1.6
        axes.set(ylim=(at - 0.9, -0.7), yticks=[], xlabel=unit)
        axes.spines["left"].set_visible(False)
        if len(series) > 1:
            colors = [Patch(color=_COLORS.get(name, _GREEN)) for name in series]
            figure.legend(colors, series, loc="outside lower center", ncols=min(3, len(series)), frameon=False)
        listed = "; ".join(
            f"{group}: " + ", ".join(f"{name} {significant(value)}" for name, value in values.items())
            for group, values in groups.items()
        )
        return Picture(caption=caption, alt=f"Bars, {unit}. {listed}.", uri=_uri(figure))


def by_layer(values: Mapping[int, float], *, unit: str, caption: str) -> Picture:
    """A value for each layer, of 0 to 100."""
    layers, heights = list(values), list(values.values())
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 2.3), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(layers, heights, color=_BLUE, marker="o", ms=3.2, lw=1, clip_on=False)
        low = 10 * math.floor(min(heights) / 10)
        axes.set(xlabel="layer", ylabel=unit, ylim=(min(low, 90), 100))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.margins(x=0.03)
        worst = min(values, key=lambda layer: values[layer])
        alt = f"Line over {len(layers)} layers, {unit}: lowest in layer {worst}, {values[worst]:.2f}."
        return Picture(caption=caption, alt=alt, uri=_uri(figure))


def heat_map(values: np.ndarray, layers: Sequence[int], *, unit: str, caption: str) -> Picture:
    """``values`` float [layers, experts], from 0; 1 is what is expected."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 1.5 + min(2.6, 0.11 * len(layers))), layout="constrained")
        axes = figure.add_subplot()
        # Pixels, not rectangles: 48 layers of 128 experts are 6,144.
        image = axes.imshow(values, aspect="auto", interpolation="none", cmap="viridis", vmin=0)
        every = math.ceil(len(layers) / 12)
        axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set(xlabel="expert", ylabel="layer")
        figure.colorbar(image, label=unit, orientation="horizontal", aspect=40, pad=0.03)
        layer, expert = (int(i) for i in np.unravel_index(values.argmax(), values.shape))
        shape = f"{values.shape[0]} layers and {values.shape[1]} experts"
        alt = f"Heat map of {shape}, {unit}: highest {values.max():.2f}, expert {expert} of layer {layers[layer]}."
        return Picture(caption=caption, alt=alt, uri=_uri(figure))


def _uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
