"""The known deviations: what an entry has to be, and what it cannot hide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from contract_tests import deviations
from contract_tests.child import Ran
from contract_tests.meta.suite import run_suite, test_file
from contract_tests.parts import HERE

TEST = "codec/test_rows.py::test_a_cut_keeps_the_first_rows"


def _entry(test: str = TEST, impl: str = "overlay", **changes: str) -> str:
    entry = {"kind": "lenient", "exception": "AssertionError", "reason": "r", "reference": "f", **changes}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in entry.items()]
    return f"[[{json.dumps(impl)}]]\n{''.join(lines)}[{json.dumps(impl)}.tests]\n{json.dumps(test)} = 'i'\n"


@pytest.mark.parametrize("changes", [{"kind": "odd"}, {"exception": "KeyError"}, {"more": "x"}])
def test_entries_are_checked(changes: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text(_entry())
    (found,) = deviations.read("overlay", file)
    assert (found.test, found.input, found.reason) == (TEST, "i", "r")
    assert deviations.read("skyrl", file) == []
    file.write_text(_entry(**changes))
    with pytest.raises(ValueError, match=r"expected\.toml"):
        deviations.read("overlay", file)
    file.write_text(_entry() + _entry())
    with pytest.raises(ValueError, match="twice"):
        deviations.read("overlay", file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[naiv]]", "naiv: expected [[name]] with overlay, skyrl, naive or another's package.module:Class"),
        ("[['contract_tests.implementations:Naive']]", "contract_tests.implementations:Naive: expected [[name]]"),
        ("test = 3", "test: expected [[name]]"),
        ("naive = 3", "naive: expected [[naive]], got 3"),
        ("[naive]", "naive: expected [[naive]], got {}"),
        ("naive = [3]", "naive: expected the keys"),
        ("[[naive]", "Expected"),
        (_entry(impl="naive").replace("'i'", "3"), f"naive: expected text for {TEST}, got 3"),
        (_entry(impl="naive").replace('"r"', "3"), "naive: expected text for reason, got 3"),
        (_entry(impl="naive").replace('"lenient"', "[]"), "naive: expected text for kind, got []"),
        (_entry(impl="naive").replace("'i'", "'i'\n[[naive]]\ntests = 3"), "naive: expected the keys"),
    ],
)
def test_tables_are_checked(text: str, said: str, tmp_path: Path) -> None:
    """Those of every implementation, whichever is run: a misspelt one would be silent."""
    file = tmp_path / "expected.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^expected\.toml: {re.escape(said)}"):
        deviations.read("overlay", file)


@pytest.mark.parametrize(
    "name",
    [
        "codec/test_rows.py",
        "codec/test_rows.py::",
        "codec/test_nothing.py::test_a",
        "codec/limited.py::test_a",
        "codec/../codec/test_rows.py::test_a",
        "./codec/test_rows.py::test_a",
        "contract_tests/codec/test_rows.py::test_a",
        "../contract_tests/codec/test_rows.py::test_a",
        str(HERE / "codec/test_rows.py") + "::test_a",
    ],
)
def test_an_entry_names_a_file_of_a_part(name: str, tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text(_entry(test=name))
    with pytest.raises(ValueError, match=rf"no test is called {re.escape(name)}: expected"):
        deviations.read("naive", file)


@pytest.fixture
def with_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a part of the suite with another ``expected.toml``, and with ``more`` in a plugin."""

    def run(text: str, *arguments: str, more: str = "") -> Ran:
        plugin = tmp_path / "with_entry.py"
        (tmp_path / "expected.toml").write_text(text)
        plugin.write_text(
            "from pathlib import Path\nfrom contract_tests import deviations\n"
            "deviations.read.__defaults__ = (Path(__file__).with_name('expected.toml'),)\n" + more
        )
        return run_suite("-p", "with_entry", "-q", *arguments, path=tmp_path)

    return run


def test_an_entry_that_matches_no_test_is_an_error(with_entry: Any) -> None:
    for name in ("codec/test_rows.py::test_nothing", "codec/test_nothing.py::test_nothing"):
        ran = with_entry(_entry(test=name), test_file("codec/test_rows.py"))
        assert ran.returncode == pytest.ExitCode.USAGE_ERROR
        assert f"no test is called {name}" in ran.stderr + ran.stdout


def test_an_entry_is_checked_file_by_file(with_entry: Any) -> None:
    """A file that is named with one of its tests says nothing of the others, and nothing of other files."""
    rows, dtypes = test_file("codec/test_rows.py"), test_file("codec/test_dtypes.py::test_smallest_dtype")
    for name, code in (
        ("codec/test_rows.py::test_nothing", pytest.ExitCode.USAGE_ERROR),
        ("codec/test_dtypes.py::test_nothing", pytest.ExitCode.OK),
        ("codec/test_nested.py::test_nothing", pytest.ExitCode.OK),
    ):
        ran = with_entry(_entry(test=name), rows, dtypes)
        assert ran.returncode == code, ran.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("codec/test_rows.py::test_turns_become_a_trajectory", "cannot fail: quirks say no trace"),
        ("http/test_faults.py::test_a", "cannot fail: http: naive has no http"),
        ("overlay/test_wire.py::test_a", "cannot fail: overlay: is about overlay alone"),
    ],
)
def test_an_entry_for_what_is_left_out_is_an_error(name: str, said: str, with_entry: Any) -> None:
    ran = with_entry(_entry(test=name, impl="naive"), test_file("codec/test_rows.py"), "--impl", "naive")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"expected.toml: naive: {name} {said}" in ran.stderr + ran.stdout


@pytest.mark.parametrize(("before", "after"), [("assert 0", ""), ("", "assert 0")])
def test_an_entry_does_not_hide_what_breaks_around_a_test(before: str, after: str, with_entry: Any) -> None:
    more = f"import pytest\n@pytest.fixture(autouse=True)\ndef broken():\n    {before}\n    yield\n    {after}\n"
    impl = "contract_tests.planted:CutsTheFront"
    ran = with_entry(_entry(impl=impl), test_file(TEST), "--impl", impl, more=more)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"a known deviation is one of the test, not of its {'setup' if before else 'teardown'}" in ran.stdout


def test_entries_are_for_an_implementation_by_any_name() -> None:
    ran = run_suite(test_file("codec/test_dtypes.py"), "--impl", "contract_tests.implementations:Naive", "-q")
    assert ran.returncode == 0, ran.stdout
    assert "known deviations: 2 tests" in ran.stdout


def test_an_entry_whose_file_is_not_run_is_none(with_entry: Any) -> None:
    assert with_entry(_entry(), test_file("codec/test_nested.py")).returncode == 0


def test_an_entry_whose_test_passes_is_a_failure(with_entry: Any) -> None:
    ran = with_entry(_entry(), test_file("codec/test_rows.py"))
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "[XPASS(strict)] r" in ran.stdout


def test_an_entry_with_another_exception_is_a_failure(with_entry: Any) -> None:
    arguments = (test_file("codec/test_rows.py"), "--impl", "contract_tests.planted:CutsTheFront")
    for exception, code in (("AssertionError", 0), ("ValueError", 1)):
        text = _entry(impl="contract_tests.planted:CutsTheFront", exception=exception)
        assert with_entry(text, *arguments).returncode == code


def test_an_entry_for_another_skyrl_is_none(with_entry: Any) -> None:
    ran = with_entry(_entry(line="0.9."), test_file("codec/test_rows.py"))
    assert ran.returncode == 0
