"""``skyrl-r3 status``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from skyrl_r3 import cluster, importing, installation
from skyrl_r3.aside import said_by
from skyrl_r3.commands.status_report import show
from skyrl_r3.installation import Problem
from skyrl_r3.terminal import Page, emit, plain, plain_data


def status(
    imports: Annotated[bool, typer.Option("--import", help="Import what is patched (10 s or more): proof.")] = False,
    server: Annotated[
        list[str] | None, typer.Option(help="Have a running server, or a router, generate 4 tokens; repeat it.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Ask a worker on each node of the running Ray cluster.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """What is installed in this environment, what of it is patched, and what is to be done next. Takes a second.

    Run it with the Python that SkyRL runs in. With --server or --ray, servers or nodes are what is looked at, and this
    environment is one line that does not count, unless --import is given too. Exits with 0 if all is well, 1 if not.
    """
    here, failed, wrong = installation.facts(), {}, []
    if imports and here["targets"]:
        imported = importing.import_targets()
        here, failed, wrong = imported.facts or here, imported.failed, imported.problems
    wrong = installation.problems(here) + wrong
    local = imports or not (server or ray)
    found: dict[str, Any] = {"here": here | {"failed_imports": failed, "problems": [asdict(each) for each in wrong]}}
    found |= {"servers": [], "nodes": [], "differences": [], "counts": local}
    if server:
        found["servers"] = _ask_servers(server, wrong)
    if ray:
        found["nodes"] = cluster.ask_nodes()
        found["differences"] = [asdict(each) for each in cluster.differences(found["nodes"], here)]
    asked = [*found["servers"], *found["nodes"], *([found["here"]] if local else [])]
    found["well"] = not found["differences"] and not any(each["problems"] for each in asked)
    if as_json:
        written = emit(json.dumps(found, indent=1) + "\n")
    else:
        page = Page()
        # A file or a pipe has no width; rich would take 80 columns for it.
        width = None if page.isatty() else 120
        console = Console(file=page, width=width, highlight=False, markup=False, emoji=False)
        show(plain_data(found, console.encoding), console)
        written = emit(page.getvalue())
    if not found["well"] or not written:
        raise typer.Exit(1)


def _ask_servers(servers: list[str], wrong: list[Problem]) -> list[dict[str, Any]]:
    try:
        from skyrl_r3 import probe
    except (Exception, SystemExit) as error:
        # A package of ours is missing or broken, which is one of the things that are ``wrong`` here.
        what = f"replies cannot be read here: {said_by(error)}"
        cure = next((each.cure for each in wrong if each.kind in ("requirements", "unread")), "Please report this.")
        problem = asdict(Problem(kind="requirements", what=what, cure=cure))
        return [{"url": url, "verdict": what, "problems": [problem]} for url in servers]
    try:
        addresses = [probe.address(text) for text in servers]
    except ValueError as error:
        raise typer.BadParameter(
            plain(str(error), sys.stderr and sys.stderr.encoding), param_hint="--server"
        ) from error
    return [probe.probe(url).data() for url in addresses]
