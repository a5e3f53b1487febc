"""The command line ``skyrl-r3``."""

from __future__ import annotations

from typing import Annotated

import typer

import skyrl_r3
from skyrl_r3.commands.bench import bench
from skyrl_r3.commands.demo import demo
from skyrl_r3.commands.inspect import inspect
from skyrl_r3.commands.status import status

# Without markup, which would take [default: ...] for a style.
app: typer.Typer = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command(short_help="What is installed and patched, and what to do next.")(status)
app.command(short_help="Look at a saved reply, or at saved routes.")(inspect)
app.command(short_help="Real generation, with and without (7 minutes).")(demo)
app.command(short_help="The reply path, with and without (7 minutes).")(bench)


def _version(asked: bool) -> None:
    if asked:
        print(f"skyrl-r3 {skyrl_r3.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Routed experts from rollout to training in SkyRL, as packed and checked arrays."""
