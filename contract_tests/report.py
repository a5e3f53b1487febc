"""What came of a run, as JSON, and of several runs, as Markdown: implementation by property.

A property is a test function of the parts that are for every implementation; the first line of its docstring says it.

    pytest contract_tests --impl overlay --report overlay.json
    python -m contract_tests.report overlay.json skyrl.json > contract_tests/REPORT.md
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from contract_tests.deviations import FILE, KINDS, Deviation, name_of
from contract_tests.parts import part_of

GENERIC = ("codec", "http")
_SHOWN = 6
"""Inputs of a deviation that Markdown shows. The others are in the JSON and in expected.toml."""


class Recorder:
    """Collects what comes of the tests of a run.

    Attributes:
        planned: How many tests are to be run.
        selected: What of the command line asks for less than whole parts.
    """

    def __init__(
        self, facts: Mapping[str, Any], not_run: Mapping[str, str], deviations: Sequence[Deviation], selected: list[str]
    ) -> None:
        self.facts = dict(facts)
        self.planned = 0
        self.selected = selected
        self._ran = 0
        self._not_run = dict(not_run)
        self._deviations = {entry.test: entry for entry in deviations}
        self._rows: dict[str, dict[str, Any]] = {}

    def left_out(self, item: pytest.Item, why: str) -> None:
        """Take note of a test that the implementation, or this machine, is not able to do."""
        self._row(item)["left_out"] = why

    def add(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Take note of a phase of a test."""
        self._ran += report.when == "teardown"
        if report.failed:
            self._row(item)["failed"].append(name_of(item))
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.left_out(item, report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped")
        elif report.skipped:
            self._row(item)["deviations"].append(asdict(self._deviations[name_of(item)]))
        elif report.when == "call":
            self._row(item)["passed"] += 1

    def _row(self, item: pytest.Item) -> dict[str, Any]:
        name = name_of(item).partition("[")[0]
        text = inspect.getdoc(getattr(item, "function", None)) or ""
        part = part_of(item.path)
        fresh = {"part": part.folder if part else "", "test": name, "property": text.partition("\n\n")[0]}
        return self._rows.setdefault(name, fresh | {"passed": 0, "failed": [], "deviations": [], "left_out": ""})

    def summary(self, fed: Mapping[str, int]) -> list[str]:
        """What is worth a line at the end of a run."""
        versions = ", ".join(f"{name} {version}" for name, version in self.facts["under_test"].items())
        named = f"{self.facts['implementation']} ({versions})" if versions else self.facts["implementation"]
        lines = [f"implementation: {named}, profile: {self.facts['profile']}"]
        lines += [f"not run: {folder}: {why}" for folder, why in self._not_run.items()]
        reasons: dict[str, int] = {}
        for row in self._rows.values():
            if row["left_out"] and not (row["passed"] or row["failed"] or row["deviations"]):
                reasons[row["left_out"]] = reasons.get(row["left_out"], 0) + 1
        lines += [f"left out ({why}): {count} propert{'y' if count == 1 else 'ies'}" for why, count in reasons.items()]
        if deviating := sum(len(row["deviations"]) for row in self._rows.values()):
            lines.append(f"known deviations: {deviating} tests, listed with their inputs in {FILE.name}")
        if fed:
            groups: Counter[str] = Counter()
            for kind, count in fed.items():
                groups[kind.partition(":")[0]] += count
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(groups.items()))
            lines.append(f"corrupted payloads: {sum(fed.values()):,} ({kinds})")
        return lines

    def write(self, path: Path, fed: Mapping[str, int], exit_status: int) -> None:
        """Write everything to ``path``."""
        complete = exit_status in (0, 1) and self._ran == self.planned and not self.selected
        found = {**self.facts, "exit_status": exit_status, "complete": complete, "selected": self.selected}
        found |= {"not_run": self._not_run, "corrupted": dict(sorted(fed.items()))}
        path.write_text(json.dumps(found | {"properties": list(self._rows.values())}, indent=1) + "\n", "utf-8")


# Markdown.


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """The matrix of implementation by property, and the deviations with their inputs."""
    lines = ["| property | " + " | ".join(report["implementation"] for report in reports) + " |"]
    lines.append("|---|" + "---|" * len(reports))
    rows = [{row["test"]: row for row in report["properties"]} for report in reports]
    names = dict.fromkeys(name for found in rows for name, row in found.items() if row["part"] in GENERIC)
    for name in names:
        text = next(found[name]["property"] for found in rows if name in found)
        cells = [_cell(found.get(name)) for found in rows]
        lines.append(f"| {' '.join(text.split())} | " + " | ".join(cells) + " |")
    for report in reports:
        lines += ["", f"## {report['implementation']}", "", _facts(report), ""]
        known = [entry for row in report["properties"] for entry in row["deviations"]]
        failed = [name for row in report["properties"] for name in row["failed"]]
        if failed:
            lines += [f"{len(failed)} tests failed:", "", *(f"* `{name}`" for name in failed), ""]
        if not known:
            lines += [] if failed else ["No deviation from the contract is known."]
            continue
        lines += ["| what it does | where | input | test |", "|---|---|---|---|"]
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for entry in known:
            key = (entry["kind"], entry["reason"], entry["reference"])
            groups.setdefault(key, []).append(entry)
        for (kind, reason, reference), entries in groups.items():
            shown = list(dict.fromkeys(_code(entry["input"]) for entry in entries))
            more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
            inputs = "<br>".join(shown[:_SHOWN] + more)
            tests = dict.fromkeys(f"`{entry['test'].partition('[')[0]}`" for entry in entries)
            lines.append(f"| {KINDS[kind]}: {reason} | {reference} | {inputs} | {'<br>'.join(tests)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["failed"]:
        return f"**{len(row['failed'])} failed**"
    if row["deviations"]:
        return f"{len(row['deviations'])} of {row['passed'] + len(row['deviations'])} deviate"
    return "yes" if row["passed"] else f"({row['left_out']})"


def _facts(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    payloads = sum(report["corrupted"].values())
    passed = sum(row["passed"] for row in report["properties"] if row["part"] in GENERIC)
    return f"Profile {report['profile']}: {passed:,} tests passed, {payloads:,} corrupted payloads. {versions}."


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _read(name: str) -> dict[str, Any]:
    """The report of a whole run. What was not run must not look as if there were nothing to say of it."""
    report = json.loads(Path(name).read_text("utf-8"))
    if not report.get("complete"):
        asked = ", ".join(report.get("selected", [])) or "everything"
        sys.exit(f"{name}: the run was not complete: asked for {asked}, exit status {report.get('exit_status')}")
    return report


if __name__ == "__main__":
    if not sys.argv[1:] or not all(Path(name).is_file() for name in sys.argv[1:]):
        sys.exit("usage: python -m contract_tests.report FILE…, each a file that pytest --report has written")
    print(markdown([_read(name) for name in sys.argv[1:]]), end="")
