"""The commands of ``skyrl-r3``, a module each.

What a command works out is in the modules below it; here are its options, what it prints and how it exits: 0 when all
is well, 1 when something is found to be wrong, 2 when it was called wrongly.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer


def check_folder(path: Path, *, option: str) -> None:
    """Check that the folder that a file is to be written to is there.

    Raises:
        typer.BadParameter: It is not.
    """
    if not (folder := path.absolute().parent).is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint=option)


def check_png(path: Path, *, option: str) -> None:
    """Check that a picture can be written to ``path``, before the work that it is of.

    Raises:
        typer.BadParameter: matplotlib is missing, or the folder, or the file is to be no PNG.
    """
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install 'skyrl-r3[plots]'", param_hint=option)
    check_folder(path, option=option)
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"{path} does not end in .png", param_hint=option)
