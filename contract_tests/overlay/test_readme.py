"""README.md says what the code does."""

from __future__ import annotations

import re

from ci import patch_table
from contract_tests.child import REPO
from skyrl_r3 import metrics, policy

README = (REPO / "README.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table behind a heading."""
    (section,) = re.findall(rf"\n## {heading}\n(.*?)\n## ", README, re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_patches_is_that_of_the_manifests() -> None:
    """``ci/patch_table.py --write`` makes it."""
    assert patch_table.with_table(README) == README


def test_the_table_of_checks() -> None:
    told = {kind.strip("`"): (default, tuple(actions.split(", "))) for kind, _, default, actions in rows("Checks")}
    assert told == {kind: (policy.DEFAULTS[kind], actions) for kind, actions in policy.ACTIONS.items()}


def test_the_table_of_metrics() -> None:
    told = {re.sub("`", "", name): place for name, _, place in rows("Metrics")}
    trainer_only = {metric.name for metric in (*metrics.COUNTERS, metrics.LOAD) if not metric.server}
    server_only = {"encode_seconds", "floored_logprobs"}
    assert told == {
        metric.name + "".join(f" by {label}" for label in metric.labels): "trainer"
        if metric.name in trainer_only
        else "server"
        if metric.name in server_only
        else "both"
        for metric in (*metrics.COUNTERS, metrics.LOAD)
    }
