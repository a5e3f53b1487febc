"""README.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci import patch_table
from contract_tests.child import REPO
from contract_tests.overlay.test_matrix import CANNOT, ENCODING, SIDES
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


def test_the_table_of_pairs() -> None:
    """What :mod:`test_matrix` sees on the wire, by client and server."""
    header, *lines = [line for line in README.splitlines() if re.match(r"\| (client|stock|skyrl-r3 on)", line)][:5]
    names = {"stock": "stock", "skyrl-r3 on": "patched"}

    def side(text: str) -> str:
        (name,) = [name for name in names if text.startswith(name)]
        return f"{names[name]}{text.removeprefix(name)}.0"

    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *lines)]
    told = {
        (side(row[0]), side(server)): encoding
        for row in cells[1:]
        for server, encoding in zip(cells[0][1:], row[1:], strict=True)
    }
    seen = {
        (client, server): "fails" if (client, server) in CANNOT else encoding.removesuffix("/1")
        for client, encodings in ENCODING.items()
        for server, encoding in zip(SIDES, encodings, strict=True)
    }
    assert told == seen


DOCUMENTS = sorted(path.relative_to(REPO) for path in (*REPO.glob("*.md"), *REPO.glob("*/*.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    """Files that are there, and headings that they have."""
    text = (REPO / document).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    for name, anchor in links:
        path = (REPO / document).parent / name if name else REPO / document
        assert path.exists(), f"{document} links to {name}"
        if anchor:
            assert anchor in headings(path), f"{document} links to {name}#{anchor}"


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
