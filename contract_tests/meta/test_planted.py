"""The suite is worth as much as the bugs that it catches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from contract_tests import planted
from contract_tests.child import GRACE_S, LIMIT_S
from contract_tests.planted import Planted

BUGS = planted.bugs()
Reports = dict[type[Planted], Future[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """Of each bug, the report of a run of the test that has to catch it."""
    folder = tmp_path_factory.mktemp("reports")

    def run(bug: type[Planted]) -> dict[str, Any]:
        name = f"{bug.__module__}:{bug.__name__}"
        return planted.run(name, bug.caught_by, report=folder / f"{bug.__name__}.json")

    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))))
    try:
        yield {bug: pool.submit(run, bug) for bug in BUGS}
    finally:
        # What has begun ends by itself: no process is waited for without a limit.
        pool.shutdown(cancel_futures=True)


def test_there_are_enough() -> None:
    assert len(BUGS) >= 15
    assert all(bug.__doc__ for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_is_caught_by_the_test_that_is_named(bug: type[Planted], reports: Reports) -> None:
    # It has begun by now, for those before it are done.
    report = reports[bug].result(LIMIT_S + 4 * GRACE_S)
    assert report["profile"] == "ci"
    assert planted.failed(report) == [bug.caught_by]
