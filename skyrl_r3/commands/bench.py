"""``skyrl-r3 bench``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from skyrl_r3.bench.pipe import ENDING, BenchError
from skyrl_r3.commands import check_folder, check_png


def bench(
    python: Annotated[
        list[str] | None,
        typer.Option(help="Interpreter of an environment with SkyRL, vLLM and skyrl-r3; repeat it for another SkyRL."),
    ] = None,
    router: Annotated[str | None, typer.Option(help="vllm-router, if it is not beside an interpreter.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=256, help="Rows of a reply; repeat it. [default: 4096, 16384 and 32768]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each side; a third of it with 32 in flight.")] = 9,
    full: Annotated[bool, typer.Option("--full", help="Also what takes hours: stock 0.3, 32 in flight.")] = False,
    json_to: Annotated[str | None, typer.Option("--json", help="File for the result, - for stdout.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG file for a chart. Needs skyrl-r3[plots].")] = None,
) -> None:
    """Compare SkyRL's reply path with and without the overlay, side by side on this machine.

    Takes 7 minutes on two cores, less with fewer --tokens and --repeats, and wants them to itself. Needs SkyRL, vLLM
    and skyrl-r3 in each environment that is named by --python; no model and no GPU. What no environment has, as a SkyRL
    release or the router, is said to be missing, and the rest is measured.
    """
    from skyrl_r3.bench import report
    from skyrl_r3.bench.run import run

    # Before a run of minutes, not after it.
    if chart is not None:
        check_png(chart, option="--chart")
    if json_to not in (None, "-"):
        check_folder(Path(json_to), option="--json")
    if router is not None and shutil.which(router) is None:
        raise typer.BadParameter(f"{router} is no program", param_hint="--router")
    # Absolute, as the processes run in a folder of their own. Not resolved: an environment's python is a link.
    pythons = [os.path.abspath(shutil.which(name) or name) for name in python or [sys.executable]]
    for number in ENDING:
        signal.signal(number, _exit)  # So that the processes are ended on the way out.
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    try:
        with Progress(*columns, console=errors, transient=True) as shown:
            task = shown.add_task("")
            result = run(
                pythons,
                router=router and os.path.abspath(shutil.which(router) or router),
                tokens=tokens or [4096, 16_384, 32_768],
                repeats=repeats,
                full=full,
                progress=lambda done, total, what: shown.update(task, completed=done, total=total, description=what),
            )
    except BenchError as error:
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    result["command"] = shlex.join(["skyrl-r3", *sys.argv[1:]])
    if json_to is not None:
        text = json.dumps(result, indent=1)
        if json_to == "-":
            print(text)
        else:
            Path(json_to).write_text(text + "\n", encoding="utf-8")
    # A file or a pipe has no width; rich would take 80 columns for it.
    width = None if sys.stdout.isatty() else 120
    report.show(result, Console(stderr=json_to == "-", width=width))
    if chart is not None:
        report.chart(result, chart)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)  # A second Ctrl-C must not cut short the killing of the processes.
    sys.exit(128 + number)
