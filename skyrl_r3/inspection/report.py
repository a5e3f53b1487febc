"""The facts of a file for people: some lines, a table of the layers' load, what is wrong, and one line that sums up."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyrl_r3.errors import RoutesError
from skyrl_r3.inspection.facts import Facts
from skyrl_r3.policy import DEFAULTS, ERROR
from skyrl_r3.reply import FLOORED_LOGPROB
from skyrl_r3.spec import layers_text
from skyrl_r3.terminal import plain

_FEW = 20
"""Picks of the average expert below which chance alone makes some look busy."""


def show(facts: Facts, name: str, console: Console) -> None:
    """Print all of it; the verdict last, where it stays in sight."""
    lines = Table.grid(padding=(0, 2))
    for label, text in _lines(facts):
        lines.add_row(Text(label, style="bold"), Text(plain(text, console.encoding)))
    console.print(Text(f"{plain(name, console.encoding)}: {facts.saved.what}", style="bold"))
    console.print(lines)
    if facts.loads:
        console.print()
        _show_loads(facts, console)
    if facts.findings:
        console.print()
        _show_findings(facts.findings, console)
    for text in facts.unchecked:
        console.print(Text(f"Not checked: {text}."))
    console.print(_verdict(facts))


def _lines(facts: Facts) -> list[tuple[str, str]]:
    saved, spec, reply, ids = facts.saved, facts.spec, facts.saved.reply, facts.saved.ids
    lines = [("file", f"{saved.file_bytes:,} bytes")]
    if ids is not None:
        stored = f", {saved.stored} in the file" if saved.stored not in ("", ids.dtype.name) else ""
        text = f"{list(ids.shape)} rows, layers, top-k; {ids.dtype.name}{stored}; {ids.nbytes:,} bytes"
        lines.append(("routes", text))
    else:
        lines.append(("routes", "none" if saved.broken is None else "none that can be read"))
    if facts.regions is not None:
        text = f"{facts.regions[0]:,} of the prompt, {facts.regions[1]:,} of the response"
        text += " (its last token has none)" if reply is not None and len(reply.token_ids) else ""
        lines.append(("rows", text))
    elif ids is not None:
        wrong = any(finding.kind in ("rows", "prompt") for finding in facts.findings)
        why = "the file does not tell (--prompt-tokens N)"
        if wrong:
            why = "their number is wrong" + ("" if facts.start else ", if the request had no start (--start S)")
        lines.append(("rows", f"of prompt or response: {why}"))
    if facts.prompt is not None:
        text = f"{facts.prompt:,} tokens" + ("" if facts.told else ", worked out from the rows, if they begin at")
        if facts.told:
            text += f", rows from token {facts.start} on" if facts.start else ""
        else:
            text += f" token {facts.start}"
        lines.append(("prompt", text))
    if reply is not None:
        lines.append(("response", f"{len(reply.token_ids):,} tokens, finish_reason {reply.finish_reason or 'null'}"))
        count = "none" if reply.logprobs is None else f"{len(reply.logprobs):,}"
        floored = f", {facts.floored:,} of them floored ({FLOORED_LOGPROB})" if reply.logprobs is not None else ""
        lines.append(("logprobs", count + floored))
    known = [f"{value:,} {what}" for value, what in ((spec.layers, "layers"), (spec.num_experts, "experts")) if value]
    known += [f"top-{spec.topk}"] if spec.topk else []
    known += [f"layers that route: {layers_text(spec.moe_layers) or 'none'}"] if spec.moe_layers is not None else []
    named = f"{reply.model}: " if reply is not None and reply.model else ""
    lines.append(("model", named + (", ".join(known) or "its layers and experts are not told")))
    return lines


def _show_loads(facts: Facts, console: Console) -> None:
    experts, topk = facts.num_experts, facts.saved.ids.shape[2] if facts.saved.ids is not None else 0
    rows = max(load.rows for load in facts.loads)
    each = rows * topk / experts
    known = "" if facts.spec.num_experts else " (largest id + 1)"
    text = f"Load of {experts:,} experts{known}. Even would be {topk / experts:.2%} of the tokens, {each:,.3g} picks."
    console.print(Text(text + (" With so few, chance makes them uneven." if each < _FEW else "")))
    table = Table()
    for column in ("layer", "experts used", "busiest", "its share of tokens", "busiest / mean"):
        table.add_column(column, justify="right")
    table.add_column("")
    for load in facts.loads:
        if len(load.experts):
            used = f"{len(load.experts):,} of {experts:,}"
            ratio = f"{load.over_mean(experts):,.2f}"
            table.add_row(f"{load.layer}", used, f"{load.busiest}", f"{load.share:.1%}", ratio, load.note)
        else:
            table.add_row(f"{load.layer}", "", "", "", "", load.note, style="dim")
    console.print(table)
    picked = [load for load in facts.loads if len(load.experts)]
    if picked:
        most = max(picked, key=lambda load: load.over_mean(experts))
        ratio = most.over_mean(experts)
        console.print(f"Most uneven: layer {most.layer}, where expert {most.busiest} has {ratio:,.2f} times the mean.")
    without = [load.layer for load in facts.loads if not len(load.experts)]
    if without:
        console.print(Text(f"{len(without)} of {len(facts.loads)} layers without a route: {layers_text(without)}."))


def _show_findings(findings: list[RoutesError], console: Console) -> None:
    table = Table("finding", "by default", "field", "expected", "got", "where")
    for finding in findings:
        action = DEFAULTS[finding.kind]
        cells = (finding.kind, action, finding.field, finding.expected, finding.got, finding.where)
        style = "red" if action == ERROR else "yellow"
        table.add_row(*(Text(plain(cell, console.encoding)) for cell in cells), style=style)
    console.print(table)
    for hint in dict.fromkeys(finding.hint for finding in findings if finding.hint):
        console.print(Text(plain(hint, console.encoding)))


def _verdict(facts: Facts) -> Text:
    if facts.errors:
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in facts.errors))
        return Text(f"Wrong: {kinds}. By default a run ends with that; SKYRL_R3_CHECKS sets what is done.", "bold red")
    if facts.findings:
        kinds = ", ".join(finding.kind for finding in facts.findings)
        return Text(f"Found, and by default only counted: {kinds}.", style="bold yellow")
    if facts.saved.ids is None:
        return Text("There are no routes to check.", style="bold yellow")
    unchecked = f"; {len(facts.unchecked)} could not be made" if facts.unchecked else ""
    return Text(f"All checks passed{unchecked}.", style="bold green")
