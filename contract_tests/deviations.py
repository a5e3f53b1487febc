"""Where implementations are known to break the contract: ``expected.toml``.

Each entry names one test. It must fail, in the test itself, with the exception that the entry names: when an
implementation is mended, the run fails until the entry is gone. An entry that matches no test is an error, and so is
one whose test is not for the implementation: neither could ever fail.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from contract_tests.adapter import NAMES, Adapter, short
from contract_tests.parts import HERE, part_of, skyrl_version

FILE = Path(__file__).with_name("expected.toml")

KINDS = {
    "lenient": "takes what it must refuse",
    "strict": "refuses what it must take",
    "different": "does something else",
    "missing": "cannot do it",
}

_EXCEPTIONS: dict[str, type[BaseException]] = {
    "AssertionError": AssertionError,
    "Failed": pytest.fail.Exception,
    "BufferError": BufferError,
    "RecursionError": RecursionError,
    "ValueError": ValueError,
}


@dataclass(frozen=True)
class Deviation:
    """One test that an implementation fails, and why."""

    test: str
    input: str
    kind: str
    exception: str
    reason: str
    reference: str


_KEYS = {"kind", "exception", "reason", "reference", "tests"}


def read(impl: str, path: Path = FILE) -> list[Deviation]:
    """The known deviations of ``impl`` with the SkyRL that is installed.

    Raises:
        ValueError: An entry, of whatever implementation, is not such a one.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    found = []
    for name, entries in tables.items():
        if name not in NAMES and (":" not in name or short(name) != name):
            known = ", ".join(NAMES)
            raise ValueError(f"{path.name}: {name}: expected [[name]] with {known} or another's package.module:Class")
        if not isinstance(entries, list):
            raise ValueError(f"{path.name}: {name}: expected [[{name}]], got {entries!r}")
        for entry in entries:
            if why := _wrong(entry):
                raise ValueError(f"{path.name}: {name}: {why}")
            tests, line = entry.pop("tests"), entry.pop("line", "")
            if name == impl and skyrl_version().startswith(line):
                found += [Deviation(test=test, input=shown, **entry) for test, shown in tests.items()]
    if len({deviation.test for deviation in found}) != len(found):
        raise ValueError(f"{path.name}: {impl}: a test twice")
    return found


def _wrong(entry: Any) -> str:
    """What is wrong with an entry. Empty: nothing."""
    if not isinstance(entry, dict) or set(entry) - {"line"} != _KEYS:
        return f"expected the keys {sorted(_KEYS)}, got {sorted(entry) if isinstance(entry, dict) else entry!r}"
    tests = entry["tests"]
    if not isinstance(tests, dict) or not tests:
        return f"expected tests with their inputs, got {tests!r}"
    texts = {**tests, **entry, "tests": ""}
    if odd := [key for key, value in texts.items() if not isinstance(value, str)]:
        return f"expected text for {odd[0]}, got {texts[odd[0]]!r}"
    if entry["kind"] not in KINDS or entry["exception"] not in _EXCEPTIONS:
        return f"unknown kind or exception in {entry}"
    return next((why for test in tests if (why := _misnamed(test))), "")


def _misnamed(test: str) -> str:
    """Why there can be no test of that name, in whatever run. Empty: there may be."""
    file, _, function = test.partition("::")
    path = PurePosixPath(file)
    plain = path.as_posix() == file and not path.is_absolute() and ".." not in path.parts
    right = plain and path.match("test_*.py") and function
    if right and (HERE / path).is_file() and part_of(HERE / path) is not None:
        return ""
    return f"no test is called {test}: expected the file of a test in a part, such as codec/test_rows.py::test_name"


def for_others(deviations: Iterable[Deviation], impl: Adapter) -> str:
    """Which entry is about a part that is not for ``impl``. Empty: none."""
    for deviation in deviations:
        part = part_of(HERE / deviation.test.partition("::")[0])
        if part is not None and (why := part.why_never(impl)):
            return f"{FILE.name}: {impl.name}: {deviation.test} cannot fail: {part.folder}: {why}"
    return ""


def apply(deviations: Sequence[Deviation], items: Iterable[pytest.Item], whole: Collection[Path]) -> None:
    """Mark the tests of ``deviations`` among ``items``.

    Args:
        whole: The files and folders that were asked for as a whole, so that all their tests are among ``items``.

    Raises:
        pytest.UsageError: An entry matches no test of a file that was collected as a whole.
    """
    by_name = {name_of(item): item for item in items}
    files = {item.path for item in by_name.values()}
    for deviation in deviations:
        file = HERE / deviation.test.partition("::")[0]
        item = by_name.get(deviation.test)
        if item is not None:
            raises = _EXCEPTIONS[deviation.exception]
            item.add_marker(pytest.mark.xfail(reason=deviation.reason, raises=raises, strict=True))
        elif file in files and any(file.is_relative_to(path) for path in whole):
            raise pytest.UsageError(f"{FILE.name}: no test is called {deviation.test}")


def name_of(item: pytest.Item) -> str:
    """The name of a test as entries and reports have it."""
    return f"{item.path.relative_to(HERE).as_posix()}::{item.nodeid.partition('::')[2]}"
