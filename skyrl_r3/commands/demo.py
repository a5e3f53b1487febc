"""``skyrl-r3 demo``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

_SCRIPT = Path("ci", "demo.sh")


def demo() -> None:
    """Real generation with the overlay off and on, compared bit for bit: vLLM, vllm-router, SkyRL 0.3.0 and 0.4.0.

    Runs ci/demo.sh of a checkout of skyrl-r3, the one in the current folder or the one that this command is run from.
    Takes 7 minutes on two cores, and 2 to 4 more the first time, when it makes environments of 8 GB under
    ~/.cache/skyrl-r3. Needs 10 GB of memory and a package index; no GPU, and no SkyRL or vLLM of yours. Its report is
    r3-report/index.html in the current folder.
    """
    for checkout in (Path.cwd(), Path(__file__).parents[2]):
        # That of another project is none of ours.
        if (checkout / _SCRIPT).is_file() and (checkout / "patches").is_dir():
            sys.stdout.flush()
            os.execvp("bash", ["bash", str(checkout / _SCRIPT)])
    where = "in the current folder or around this command"
    typer.echo(f"skyrl-r3 demo: there is no {_SCRIPT} {where}. Run it in a checkout: the wheel has no demo.", err=True)
    raise typer.Exit(2)
