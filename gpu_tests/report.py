"""Writes what runs found as JSON and as one HTML page, which needs no other file.

    python -m gpu_tests.report FACTS.json [MORE.json ...] --out DIR

The first file's title is the page's. What was compared is listed in the order of the files. Two files with another
version of the same package are an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gpu_tests.facts import Facts
from gpu_tests.sections import sections
from gpu_tests.verdict import verdict

_TEMPLATE = "report.html.j2"


def write(facts: Facts, directory: Path) -> None:
    """Write ``report.json`` and ``index.html`` into ``directory``, which is made if need be.

    Raises:
        ValueError: A figure is NaN or infinite, or counts of experts don't fit together. Nothing is written.
    """
    require_finite(dataclasses.asdict(facts), "facts")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template(_TEMPLATE).render(facts=facts, verdict=verdict(facts), sections=sections(facts))
    directory.mkdir(parents=True, exist_ok=True)
    facts.save(directory / "report.json")
    (directory / "index.html").write_text(page, encoding="utf-8")


def require_finite(value: Any, where: str) -> None:
    """Look at every number in ``value``.

    Raises:
        ValueError: One is NaN or infinite; the message says which.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value}")
    if isinstance(value, Mapping):
        for key, one in value.items():
            require_finite(one, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            require_finite(one, f"{where}[{i}]")


def merge(found: Mapping[str, Facts]) -> Facts:
    """One report of several runs.

    Args:
        found: Where they are from -> what they found. The first gives the title; where machines differ, both are said.

    Raises:
        ValueError: Two runs had other versions of a package, or two have a result of the bench.
    """
    merged: Facts | None = None
    versions_from: dict[str, str] = {}
    bench_from = ""
    for source, facts in found.items():
        if merged is None:
            merged = Facts(title=facts.title)
        for package, version in facts.versions.items():
            known = merged.versions.setdefault(package, version)
            first = versions_from.setdefault(package, source)
            if known != version:
                raise ValueError(f"versions.{package}: expected one, got {known} in {first} and {version} in {source}")
        for name, value in facts.machine.items():
            known = merged.machine.get(name)
            merged.machine[name] = value if known in (None, value) else f"{known}; {value}"
        for name in ("replays", "transports", "parities", "loads", "not_run"):
            getattr(merged, name).extend(getattr(facts, name))
        if facts.bench is not None:
            if bench_from:
                raise ValueError(f"bench: expected one result, got one in {bench_from} and one in {source}")
            merged.bench, bench_from = facts.bench, source
    if merged is None:
        raise ValueError("expected facts of at least one run, got none")
    return merged


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m gpu_tests.report", description=about)
    parser.add_argument("facts", nargs="*", type=Path, metavar="FACTS.json", help="the first one's title is the page's")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where report.json and index.html go")
    parser.add_argument("--title", help="instead of the first one's; needed where there are no facts")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="the result of skyrl-r3 bench --json")
    parser.add_argument(
        "--not-run", action="append", default=[], metavar="SENTENCE", help="what was left out or failed, and why"
    )
    chosen = parser.parse_args(arguments)
    if not chosen.facts and not chosen.title:
        parser.error("neither FACTS.json nor --title: there is nothing to report")
    try:
        found = {str(path): Facts.load(path) for path in chosen.facts}
        title = chosen.title or next(iter(found.values())).title
        bench = json.loads(chosen.bench.read_text(encoding="utf-8")) if chosen.bench else None
        found = {"the command line": Facts(title=title, bench=bench, not_run=chosen.not_run)} | found
        write(merge(found), chosen.out)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"report: {chosen.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
