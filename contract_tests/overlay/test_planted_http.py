"""The HTTP part of the suite is worth as much as the bugs that it catches."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract_tests import planted
from contract_tests.http.planted import PlantedHttp
from contract_tests.planted import Planted


@pytest.mark.parametrize("bug", planted.bugs(PlantedHttp), ids=lambda bug: bug.__name__)
def test_each_is_caught_by_the_test_that_is_named(bug: type[Planted], tmp_path: Path) -> None:
    report = planted.run(f"{bug.__module__}:{bug.__name__}", bug.caught_by, report=tmp_path / "report.json")
    found = planted.failed(report)
    assert found
    assert {name.partition("[")[0] for name in found} == {bug.caught_by}


def test_there_are_some() -> None:
    assert len(planted.bugs(PlantedHttp)) == 5
