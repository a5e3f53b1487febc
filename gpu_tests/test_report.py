"""The report: what is in the facts is on the page, and nothing else is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpu_tests import report
from gpu_tests.facts import Facts, Gap, Load, Parity
from gpu_tests.sample_facts import facts, replay
from gpu_tests.sections import Table


class Page(HTMLParser):
    """The page, read: ``text``, ``titles``, ``references``, ``images``. Tags that don't match are an error."""

    VOID = ("meta", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.titles, self.cells = "", [], []
        self.references: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "poster", "data")]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self._open[-1:] == ["h2"]:
            self.titles.append(data)
        if self._open[-1:] == ["td"]:
            self.cells.append(data)


def page(found: Facts, directory: Path) -> Page:
    report.write(found, directory)
    return Page((directory / "index.html").read_text(encoding="utf-8"))


def test_facts_come_back_from_json(tmp_path: Path) -> None:
    facts().save(tmp_path / "facts.json")
    assert Facts.load(tmp_path / "facts.json") == facts()


def test_the_report_is_json_and_one_page(tmp_path: Path) -> None:
    report.write(facts(), tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["index.html", "report.json"]
    assert Facts.load(tmp_path / "new" / "report.json") == facts()


FIGURES = [
    *("A run", "a CPU", "torch", "9.8.7", "CUDA: there is no GPU here."),
    *("tiny", "vllm", "transformers", "4,321", "0.0123", "0.456", "7.89·10⁻⁵", "1.23·10⁻⁷", "4.56·10⁻⁶", "100,000"),
    *("87.50", "90.62"),
    *("nested", "frame", "5,480,000", "1,602,345", "5.48", "1.60", "2,040", "3.84"),
    *("abort", "29", "31,337", "2 aborted"),
    *("12", "2.50", "1.75"),
    *("17 cores of A Processor", "≥ 1,000", "861", "missed by 14%", "≤ 20", "not measured"),
]


def test_every_figure_is_on_the_page(tmp_path: Path) -> None:
    text = page(facts(), tmp_path).text
    assert [one for one in FIGURES if not re.search(rf"(?<![\w.,]){re.escape(one)}(?![\w%])", text)] == []


def test_a_rows_cells_are_in_their_columns(tmp_path: Path) -> None:
    cells = page(facts(), tmp_path).cells
    own = ["tiny", "vllm", "transformers", "4,321", "own", "0.0123", "0.456", "7.89·10⁻⁵", "1.00"]
    replayed = ["replayed", "1.23·10⁻⁷", "4.56·10⁻⁶", "0", "100,000"]
    assert cells[: len(own) + len(replayed)] == own + replayed
    at = cells.index("12")
    # 2 layers, 4 experts; in layer 1 the busiest has 5 where 2 is the mean, in layer 2 all have the mean; 1 has none.
    assert cells[at - 4 : at + 5] == ["tiny", "vLLM 1.2.3", "2", "4", "12", "2.50", "1", "1.75", "1"]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    found = page(facts(), tmp_path)
    assert found.references
    assert [reference[:40] for reference in found.references if not reference.startswith("data:image/")] == []
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script", re.sub(r'"data:image[^"]*"', "", html))


def test_every_picture_says_what_it_shows(tmp_path: Path) -> None:
    images = page(facts(), tmp_path).images
    assert len(images) == 2 + 1 + 2 + 1
    for image, shown in zip(images, ("0.0123", "7.89·10⁻⁵", "87.50", "5.48", "2,040", "2.50"), strict=True):
        assert shown in (image["alt"] or "")


def test_text_is_escaped(tmp_path: Path) -> None:
    evil = '<b>&"$x_{$'
    named = {"model": evil, "engine": evil, "trainer": evil}
    found = facts(
        title=evil,
        machine={evil: evil},
        versions={evil: evil},
        replays=[replay(**named)],
        transports=[dataclasses.replace(one, case=evil, encoding=evil) for one in facts().transports[:1]],
        parities=[Parity(scenario=evil, model=evil, replies=1, rows=1, seen=evil)],
        loads=[dataclasses.replace(facts().loads[0], model=evil)],
        not_run=[evil],
    )
    read = page(found, tmp_path)
    assert "<b>" not in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert read.text.count(evil) >= 12
    assert sum(evil in (image["alt"] or "") for image in read.images) == 4


SECTIONS = {
    "replays": ["Logprob gap with and without replay", "Agreement per layer"],
    "parities": ["Parity with stock SkyRL"],
    "transports": ["Bytes and time per encoding"],
    "loads": ["Expert load"],
    "bench": ["Benchmark"],
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_part_without_facts_is_left_out(name: str, tmp_path: Path) -> None:
    everything = [title for titles in SECTIONS.values() for title in titles]
    assert page(facts(), tmp_path).titles == everything
    without = facts(**{name: None if name == "bench" else []})
    assert page(without, tmp_path).titles == [title for title in everything if title not in SECTIONS[name]]


def test_a_run_that_found_nothing_says_so(tmp_path: Path) -> None:
    found = page(Facts(title="Empty"), tmp_path)
    assert "Nothing was compared in this run." in found.text
    assert found.titles == []
    assert not any(word in found.text for word in ("Not run, or failed", "Machine", "Versions"))


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("facts.replays[0].without.k3", lambda x: facts(replays=[replay(without=Gap(mean_abs=1, max_abs=1, k3=x))])),
        ("facts.replays[0].agreement.2", lambda x: facts(replays=[replay(agreement={1: 0.5, 2: x})])),
        (
            "facts.transports[0].milliseconds",
            lambda x: facts(transports=[dataclasses.replace(facts().transports[0], milliseconds=x)]),
        ),
        ("facts.bench.targets[0].value", lambda x: facts(bench={"targets": [{"value": x}]})),
    ],
)
def test_a_figure_that_is_no_number_is_refused(
    where: str, broken: Callable[[float], Facts], figure: float, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{where}: expected a finite number, got {figure}")):
        report.write(broken(figure), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("counts", [[[1, 2]], [[1, 2], [3]], [[1, 2], [0, 0]]])
def test_counts_that_do_not_fit_are_refused(counts: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loads, tiny: counts: expected"):
        report.write(facts(loads=[Load(model="tiny", engine="vLLM", layers=[1, 2], counts=counts)]), tmp_path)


def test_what_rows_share_is_said_once() -> None:
    table = Table(columns=["a", "b"], numeric=[], rows=[["x", "1"], ["x", "2"], ["y", "1"], ["x", "1"]], once=1)
    first = [row[0] for row in table.lines()]
    assert first == [("a", "x", 2), ("b", "2", 1), ("a", "y", 1), ("a", "x", 1)]
