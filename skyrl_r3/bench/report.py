"""Tables and a chart of a run's result, from nothing but that result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skyrl_r3.bench.plan import SIDES
from skyrl_r3.bench.targets import milliseconds, routes_part

_COLORS = {True: "green", False: "red", None: "yellow"}


def show(result: dict[str, Any], console: Console) -> None:
    """Everything that fits: times of all cells, costs of the longest replies of the first shape, and the targets."""
    machine, rows = result["machine"], result["rows"]
    console.print(f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}, {result['date']}")
    console.print(f"$ {result['command']}", markup=False, highlight=False)
    for found in result["environments"]:
        if "missing" not in found:
            names = {"skyrl": "SkyRL", "skyrl_r3": "skyrl-r3", "vllm": "vLLM", "python_version": "Python"}
            versions = (f"{names.get(key, key)} {found[key]}" for key in (*names, "numpy", "aiohttp"))
            console.print(f"{', '.join(versions)}: {found['python']}")
    for what, why in result["missing"].items():
        console.print(f"[yellow]missing: {what}:[/] {why}")
    for route, in_flight in dict.fromkeys((row["route"], row["in_flight"]) for row in rows):
        chosen = [row for row in rows if (row["route"], row["in_flight"]) == (route, in_flight)]
        way = "Through the router" if route == "router" else "Direct"
        title = f"{way}, {in_flight} in flight: ms until all are there, median (min to max)"
        _show_by_tokens(result, chosen, title, _time, console)
    replies = [row for row in _direct(rows) if not row["side"].startswith("bare")]
    _show_by_tokens(result, replies, "MB of one reply", _megabytes, console)
    _show_costs(result, console)
    if preprocessing := result["preprocessing"]:
        lines = []
        for name in ("stock", "overlay"):
            if side := preprocessing.get(name):
                spreads = [_spread(milliseconds(side[key])) for key in ("whole", "without_routes", "copy")]
                lines.append([name, *spreads[:2], _ms(1000 * routes_part(side)), spreads[2]])
        title = f"Preprocessing {preprocessing['what']}: ms, median (min to max)"
        columns = ("", "the whole function", "given no routes", "difference", "copy of the routes' tensor")
        _show_table(title, columns, lines, console)
    lines = []
    for target in result["targets"]:
        limit = f"{'>=' if target['at_least'] else '<='} {target['limit']:,g}"
        value = "" if target["value"] is None else f"{target['value']:,.3g}"
        verdict = f"[{_COLORS[target['reached']]}]{target['verdict']}[/]"
        lines.append([f"{target['what']}, {target['note']}", target["unit"], limit, value, verdict])
    _show_table("Targets", ("what and where", "", "target", "measured", "verdict"), lines, console)


def label(result: dict[str, Any], key: str) -> str:
    """A side with the release of SkyRL that it was measured on."""
    side = next(side for side in SIDES if side.key == key)
    releases = {found["line"]: found["skyrl"] for found in result["environments"] if "line" in found}
    return f"{side.label} {releases[side.line]}"


def _direct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if (row["route"], row["in_flight"]) == ("direct", 1)]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _time(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"[dim]not run: {row['not_run']}[/]"
    return _spread(row) if len(row["seconds"]) > 1 else f"{_ms(row['median_ms'])} (once)"


def _spread(found: dict[str, Any]) -> str:
    return f"{_ms(found['median_ms'])} ({_ms(found['min_ms'])} to {_ms(found['max_ms'])})"


def _megabytes(row: dict[str, Any]) -> str:
    return f"{row['reply_bytes'] / 1e6:.2f}" if "reply_bytes" in row else "[dim]not run[/]"


def _show_by_tokens(
    result: dict[str, Any],
    rows: list[dict[str, Any]],
    title: str,
    text: Callable[[dict[str, Any]], str],
    console: Console,
) -> None:
    """A line for each shape and side, a column for each number of tokens."""
    tokens = sorted({row["tokens"] for row in rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        cells.setdefault((row["shape"], row["side"]), {})[row["tokens"]] = text(row)
    lines = [
        [shape, label(result, side), *(found.get(count, "") for count in tokens)]
        for (shape, side), found in cells.items()
    ]
    _show_table(title, ("layers x top-k", "side", *(f"{count:,} tokens" for count in tokens)), lines, console)


def _show_costs(result: dict[str, Any], console: Console) -> None:
    rows = [row for row in result["rows"] if "median_ms" in row]
    shape, tokens = rows[0]["shape"], max(row["tokens"] for row in rows)
    title = (
        f"{tokens:,} x {shape}: CPU ms of each reply and peak MB of server (s), client (c) and router (r); "
        "stalls of the client's event loop in ms"
    )
    columns = ("in flight", "side", *(f"{what} {process}" for what in ("CPU", "MB") for process in "scr"))
    lines = []
    for row in rows:
        if (row["shape"], row["tokens"]) == (shape, tokens):
            names = ("server", "client", "router")
            cpu = [_ms(row["cpu_ms"][name]) if name in row["cpu_ms"] else "" for name in names]
            peak = [f"{row['peak_bytes'][name] / 1e6:,.0f}" if name in row["peak_bytes"] else "" for name in names]
            stalls = [_ms(row["stall_ms"][key]) for key in ("p50", "p99", "max")]
            where = f"{row['in_flight']} {row['route']}"
            lines.append([where, label(result, row["side"]), *cpu, *peak, *stalls])
    _show_table(title, (*columns, "stall p50", "p99", "max"), lines, console)


def _show_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    """A table in which the first column is said once for the lines below it."""
    console.print(f"\n[bold]{title}[/]")
    table = Table()
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 or name == "verdict" else "right")
    last = None
    for first, *others in lines:
        if last is not None and first != last and title != "Targets":
            table.add_section()
        table.add_row(first if first != last or title == "Targets" else "", *others)
        last = first
    console.print(table)


def chart(result: dict[str, Any], path: Path) -> None:
    """Draw time against tokens, a panel for each shape, one in flight, direct. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in _direct(result["rows"]) if "median_ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(shapes), figsize=(4.5 * len(shapes), 5), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, shape in zip(panels[0], shapes, strict=True):
        for side in SIDES:
            chosen = [row for row in rows if (row["shape"], row["side"]) == (shape, side.key)]
            if chosen:
                tokens, medians = [row["tokens"] for row in chosen], [row["median_ms"] for row in chosen]
                below = [row["median_ms"] - row["min_ms"] for row in chosen]
                above = [row["max_ms"] - row["median_ms"] for row in chosen]
                style = ":" if side.encodings is None else "-"
                name = label(result, side.key)
                panel.errorbar(tokens, medians, (below, above), label=name, marker="o", ms=4, capsize=3, ls=style)
        panel.set(title=f"layers x top-k: {shape}", xlabel="tokens", xscale="log", yscale="log")
        ticks = sorted({row["tokens"] for row in rows})
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms, whole reply path: median, min to max")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"One reply, direct: {result['machine']['cores']} cores of {result['machine']['cpu']}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
