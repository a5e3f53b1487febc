"""``skyrl-r3 inspect``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from skyrl_r3.commands import check_png
from skyrl_r3.errors import R3Error
from skyrl_r3.lacking import lacking
from skyrl_r3.terminal import Page, emit, plain

if TYPE_CHECKING:
    from skyrl_r3.inspection.facts import Facts


def inspect(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The reply or the routes.")],
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompt that was sent. Only a frame tells it.")
    ] = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="The routed_experts_prompt_start that was sent. Only a frame tells it.")
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option(min=1, help="Experts of a layer, as in the model's config. A frame may tell it.")
    ] = None,
    heatmap: Annotated[
        Path | None, typer.Option(help="PNG file for a picture, layer by expert. Needs skyrl-r3[plots].")
    ] = None,
) -> None:
    """Look at a saved reply or at saved routes: what is in it, what the checks find, how busy each expert is.

    Takes the body of a reply of /skyrl/v1/generate (frame, packed or nested JSON), and routes [rows, layers, topk] as
    .npy, as .safetensors (with the package safetensors), or as the JSON of their own. It is the content that tells, not
    the name. Needs no SkyRL, no vLLM and no GPU; takes seconds.

    Exits with 1 if the file cannot be read, or if something is found that ends a run by default; with 2 if there is no
    such file.
    """
    if not file.is_file():
        raise typer.BadParameter(f"{file} is no regular file", param_hint="FILE")
    if heatmap is not None:
        check_png(heatmap, option="--heatmap")
    if prompt_tokens is not None and start is not None and start > prompt_tokens:
        raise typer.BadParameter(f"{start} is behind a prompt of {prompt_tokens}", param_hint="--start")
    from skyrl_r3.inspection import facts, files
    from skyrl_r3.inspection import heatmap as picture

    name = os.fspath(file)
    with _one_line(name):
        found = facts.work_out(files.read(file), prompt=prompt_tokens, start=start, num_experts=num_experts)
    _print(found, name)
    if heatmap is not None:
        with _one_line(name):
            picture.draw(found, plain(file.name, None), heatmap)
        emit(f"Wrote {plain(os.fspath(heatmap), None)}.\n")
    if found.errors:
        raise typer.Exit(1)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        yield
    except R3Error as error:
        _fail(name, str(error))
    except OSError as error:
        _fail(name, f"file: expected one that can be read or written, got {error}")
    except MemoryError:
        _fail(name, f"file: expected one that fits into memory, got {os.path.getsize(name):,} bytes")
    except Exception as error:
        if needed := lacking(error):
            _fail(name, needed)
        raise


def _print(found: Facts, name: str) -> None:
    """Print all at once: who reads the first line alone, as ``head -1`` does, must not change the exit status."""
    from skyrl_r3.inspection import report

    page = Page()
    # A file or a pipe has no width; rich would take 80 columns for it.
    report.show(found, name, Console(file=page, width=None if page.isatty() else 120, highlight=False))
    if not emit(page.getvalue()):
        raise typer.Exit(1)


def _fail(name: str, what: str) -> NoReturn:
    typer.echo(plain(f"skyrl-r3 inspect: {name}: {what}", sys.stderr.encoding), err=True)
    raise typer.Exit(1)
