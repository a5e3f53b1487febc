"""What ``skyrl-r3 status`` prints, from nothing but what was found."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from skyrl_r3.importing import lacks_vllm
from skyrl_r3.installation import FLAG

_COLORS = {"applied": "green", "pending": "yellow"}
_NARROW = 70
"""Columns below which a label stands over its text instead of beside it."""


def show(found: dict[str, Any], console: Console) -> None:
    """The facts, or a line of them; servers; nodes; and last what is to be done."""
    here, counts = found["here"], found["counts"]
    if counts:
        _show_facts(here, console)
        _show_targets(here, console)
    else:
        problems = len(here["problems"])
        well = "well" if not problems else f"{problems} problem{'s' * (problems > 1)}, which skyrl-r3 status tells"
        console.print(
            f"This environment, which was not asked for: skyrl-r3 {here['skyrl_r3']['version']}, {_skyrl(here)}: {well}"
        )
    for server in found["servers"]:
        console.print()
        _show_server(server, console)
    if found["nodes"]:
        console.print()
        for node in found["nodes"]:
            _show_node(node, console)
        _show_problems(found["differences"], console)
    console.print()
    if counts and here["skyrl"]["warning"]:
        console.print(Text(f"Mind: {here['skyrl']['warning']}", style="yellow"))
        console.print()
    _show_problems(here["problems"] if counts else [], console)
    asked = [*found["servers"], *found["nodes"]]
    if bad := sum(1 for each in asked if each["problems"]):
        console.print(Text(f"{bad} of {len(asked)} with a problem: see above what to do.", style="red"))
    if found["well"]:
        console.print(Text(_all_is_well(found), style="green"))


def _show_problems(problems: list[dict[str, str]], console: Console) -> None:
    for number, problem in enumerate(problems, 1):
        console.print(Text(f"{number}. {problem['what']}", style="red"))
        console.print(f"   To do: {problem['cure']}", soft_wrap=True)


def _all_is_well(found: dict[str, Any]) -> str:
    if found["servers"] or found["nodes"]:
        return "All is well."
    then = f"train with {FLAG}, and see with skyrl-r3 status --server URL what a running server sends."
    if any(row["state"] == "pending" for row in found["here"]["targets"]):
        then += " skyrl-r3 status --import proves the patches."
    return f"All is well: {then}"


def _skyrl(here: dict[str, Any]) -> str:
    version = here["skyrl"]["version"]
    return f"SkyRL {version}" if version else "no SkyRL" if not here["skyrl"]["unread"] else "SkyRL not looked at"


def _show_facts(here: dict[str, Any], console: Console) -> None:
    how = {"wheel": "installed", "editable": "an editable install", "path": "only on Python's path"}
    own, skyrl, hook = here["skyrl_r3"], here["skyrl"], here["hook"]
    line = f"{skyrl['path']}, " if skyrl["path"] else ""
    if skyrl["line"]:
        line += f"one of {skyrl['line']}, whose patches were written for {skyrl['reviewed']}"
    elif skyrl["supported"]:
        line += f"no patches; there are some for {' and '.join(skyrl['supported'])}"
    beside = [f"{name} {version}" for name, version in here["beside"].items() if version]
    by = ", ".join(hook["pth"]) or "skyrl_r3.enable()"
    on = f"in every process of this Python, by {by}" if hook["installed"] else "not in this process"
    server, client = (", ".join(here["encodings"][end]) or "unknown" for end in ("server", "client"))
    rows = [
        (f"skyrl-r3 {own['version']}", f"{how[own['how']]}, {own['path']}"),
        (f"Python {here['python']['version']}", here["python"]["executable"]),
        (_skyrl(here), line),
        ("beside it", ", ".join(beside) or "no vLLM, torch or Ray"),
        ("needs", _needs(here["requirements"])),
        ("import hook", "switched off" if hook["off"] is not None else on),
        ("SkyRL's flag", f"set for each run, {FLAG}; see a running server with --server URL"),
        ("checks", _checks(here["checks"])),
        ("metrics", {True: "on", False: "off", None: "unknown"}[here["metrics"]]),
        ("encodings", f"a server here writes {server}; a client here reads {client}"),
    ]
    if console.width < _NARROW:
        for label, text in rows:
            console.print(Text(label, style="bold"))
            console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
        return
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    console.print(table)


def _needs(requirements: list[dict[str, Any]]) -> str:
    if not requirements:
        return "unknown: there are no metadata of skyrl-r3"
    if unmet := [row for row in requirements if not row["met"]]:
        broken = ((row["requirement"], ", which cannot be imported" if row["failed"] else "") for row in unmet)
        return f"not met: {'; '.join(map(''.join, broken))}"
    return ", ".join(f"{row['requirement'].partition('>')[0]} {row['found']}" for row in requirements) + ": met"


def _checks(checks: dict[str, Any]) -> str:
    by = f"{checks['variable']}={checks['value']}" if checks["value"] is not None else "defaults"
    if checks["error"]:
        return f"{by}, which is no policy"
    if checks["policy"] is None:
        return (
            f"{by}: ids are not looked at; missing, broken, prompt, rows and shape stay errors"
            if checks["value"] is not None
            else "unknown"
        )
    actions: dict[str, list[str]] = {}
    for kind, action in checks["policy"].items():
        actions.setdefault(action, []).append(kind)
    return f"{by}: " + "; ".join(f"{action}: {', '.join(kinds)}" for action, kinds in actions.items())


def _show_targets(here: dict[str, Any], console: Console) -> None:
    """Those of a state and a reason together, and of these the ones of a module."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in here["targets"]:
        modules = groups.setdefault((row["state"], _why(row, here)), {})
        modules.setdefault(row["module"], []).append(row["target"].removeprefix(f"{row['module']}."))
    for (state, why), modules in groups.items():
        count = sum(map(len, modules.values()))
        console.print()
        title = Text(f"{count} of {len(here['targets'])} patches ")
        console.print(title.append(state, style=_COLORS.get(state, "red")).append(f": {why}" if why else ""))
        for module, attributes in modules.items():
            console.print(Padding(Text(module, style="dim"), (0, 0, 0, 2), expand=False))
            for attribute in attributes:
                console.print(Padding(Text(attribute), (0, 0, 0, 4), expand=False))


def _why(row: dict[str, Any], here: dict[str, Any]) -> str:
    edited = f"source differs from {here['skyrl']['reviewed']}" if row["edited"] else ""
    if row["state"] == "applied":
        return edited
    failed = here["failed_imports"].get(row["module"], "")
    if failed:
        return (
            "no vLLM here, so that no server can run here either" if lacks_vllm(failed) else "import failed, see below"
        )
    if row["detail"] == "not imported yet":
        return "fits, patched on import" + (f"; {edited}" if edited else "")
    if row["detail"] == "off":
        return "switched off" if here["hook"]["off"] is not None else "fits, and the hook is not there"
    return row["detail"]


def _show_server(server: dict[str, Any], console: Console) -> None:
    style = "red" if server["problems"] else "green"
    console.print(Text(f"{server['url']}: ", style="bold").append(server["verdict"], style=style))
    for name, what in (("asked", "asked for frames"), ("unasked", "a stock client gets")):
        answer = server.get(name)
        if not answer or answer["encoding"] is None:
            continue
        said = f"  {what}: {answer['encoding'] if answer['shape'] else 'JSON'}, {answer['body_bytes']:,} bytes"
        said += f", {answer['content_type']}"
        if answer["shape"]:
            said += f"; {answer['dtype']} {answer['shape']} (rows, layers, top-k)"
        console.print(said)
        if frame := answer["frame"]:
            names = {"layers": "layers", "topk": "top-k", "num_experts": "experts"}
            said = [f"{label} {frame[name]}" for name, label in names.items() if name in frame]
            if frame.get("moe_layers"):
                said.append(f"{len(frame['moe_layers'])} layers route")
            console.print(f"  model{_named(server)}: {', '.join(said) or 'its config says nothing of experts'}")
    for problem in server["problems"]:
        console.print(f"  To do: {problem['cure']}", soft_wrap=True)


def _named(server: dict[str, Any]) -> str:
    return f" {server['model']}" if server["model"] else ""


def _show_node(node: dict[str, Any], console: Console) -> None:
    """A line, and for a node with something wrong what to do."""
    where = Text(f"{node['address']}: " if node["address"] else "", style="bold")
    if node["facts"] is None:
        (problem,) = node["problems"]
        console.print(where.append(problem["what"], style="not bold red"))
        console.print(f"   To do: {problem['cure']}", soft_wrap=True)
        return
    facts, count = node["facts"], len(node["problems"])
    said = f"skyrl-r3 {facts['skyrl_r3']['version']}, {_skyrl(facts)}, vLLM {facts['beside']['vLLM'] or 'none'}: "
    verdict = f"{count} problem{'s' * (count > 1)}" if count else "patched on import"
    style = f"not bold {'red' if count else 'green'}"
    console.print(where.append(said, style="not bold").append(verdict, style=style))
    _show_problems(node["problems"], console)
