"""The command line, the data and the words of the suite itself."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract_tests import deviations, oracle
from contract_tests import strategies as r3st
from contract_tests.child import REPO, Ran
from contract_tests.codec import test_round_trip, test_rows
from contract_tests.meta.suite import run_suite, test_file
from contract_tests.parts import HERE, PARTS
from contract_tests.planted import OneRowMore, StaleBuffer
from contract_tests.strategies import lay_out

READMES = [(folder / "README.md").read_text("utf-8") for folder in (HERE, REPO)]


# --impl


@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ("nobody", "expected overlay, skyrl, naive or package.module:Class"),
        ("no.such.module:Adapter", "ModuleNotFoundError"),
        ("contract_tests.adapter:Nothing", "AttributeError"),
        ("contract_tests.adapter:Adapter", "expected an Adapter with encode()"),
        ("builtins:dict", "expected an Adapter"),
    ],
)
def test_what_is_no_implementation_is_an_error(impl: str, said: str) -> None:
    ran = run_suite(test_file("codec"), "--impl", impl)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in ran.stderr + ran.stdout
    assert "Traceback" not in ran.stderr


def readme_adapter() -> str:
    """The adapter that both READMEs show."""
    (code,) = {
        code for text in READMES for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Adapter" in code
    }
    return code


def test_the_adapter_in_readme_is_short_and_passes(tmp_path: Path) -> None:
    """With a codec of its own, which is right, in the place of the reader's."""
    code = readme_adapter()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_adapter.py").write_text(code)
    (tmp_path / "my_codec.py").write_text("from skyrl_r3.codec import *\nfrom skyrl_r3.errors import CodecError\n")
    arguments = ("--impl", "my_adapter:Mine", "-q", "--report", str(tmp_path / "report.json"))
    ran = run_suite(test_file("codec"), *arguments, path=tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "left out (quirks say no reads frame/1): " in ran.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_status"], report["complete"], report["selected"]) == (0, True, [])


def test_the_adapter_in_readme_finds_the_faults_of_its_codec(tmp_path: Path) -> None:
    (tmp_path / "my_adapter.py").write_text(readme_adapter())
    (tmp_path / "my_codec.py").write_text(
        "from skyrl_r3.errors import CodecError\n"
        "from skyrl_r3.codec import pack\n"
        "import base64, numpy as np\n"
        "def unpack(payload):\n"
        "    return np.frombuffer(base64.b64decode(payload['data']), payload['dtype']).reshape(payload['shape'])\n"
    )
    ran = run_suite(test_file("codec/test_round_trip.py"), "--impl", "my_adapter:Mine", "-q", path=tmp_path)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_layouts[255-c]" in ran.stdout


def test_an_adapter_is_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_adapter.py").write_text("from contract_tests.implementations import Overlay as Mine\n")
    arguments = (test_file("codec/test_rows.py"), "--impl", "my_adapter:Mine", "-q")
    assert run_suite(*arguments, cwd=tmp_path).returncode == 0
    ran = run_suite(*arguments)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    searched = "(searched the current folder and PYTHONPATH)"
    assert f"my_adapter:Mine: ModuleNotFoundError: No module named 'my_adapter' {searched}" in ran.stderr


@pytest.mark.parametrize(
    ("plugin", "arguments", "said"),
    [
        ("", ["--hypothesis-profile", "nightyl"], "--hypothesis-profile nightyl: expected ci, dev or nightly"),
        ("import sys; sys.modules['numpy'] = None", [], "pip install pytest hypothesis numpy orjson pybase64"),
        (
            "import importlib.metadata as m\nold = m.version\n"
            "def version(name):\n    return old(name if name != 'orjson' else 'no-such-package')\nm.version = version",
            [],
            "pip install pytest hypothesis numpy orjson pybase64",
        ),
        # As pytest-xdist has it, which need not be installed.
        (
            "def pytest_addoption(parser): parser.addoption('--dist', default='no')",
            ["--dist", "load", "-p", "no:xdist"],
            "leave out -n: what is found is counted in one process",
        ),
    ],
    ids=["profile", "module", "package", "xdist"],
)
def test_what_cannot_be_done_is_an_error(plugin: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "changes.py").write_text(plugin)
    ran = run_suite(test_file("codec/test_rows.py"), "-p", "changes", *arguments, path=tmp_path)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in ran.stderr
    assert "INTERNALERROR" not in ran.stdout + ran.stderr


# What is run, and what is not


def test_the_header_says_what_is_tested() -> None:
    ran = run_suite(test_file("codec/test_rows.py"), "--impl", "naive")
    assert "implementation: naive, profile: ci" in ran.stdout
    assert f"numpy {np.__version__}" in ran.stdout
    for part in ("http", "overlay", "overlay/skyrl_0_4", "meta"):
        assert ran.stdout.count(f"not run: {part}: ") == 2  # At the head and at the end.
    assert "left out (quirks say no trace): 1 property" in ran.stdout


def test_the_end_says_what_was_tested() -> None:
    """With -q there is no head."""
    ran = run_suite(test_file("codec/test_rows.py"), "--impl", "naive", "-q", "--hypothesis-profile", "dev")
    assert f"\nimplementation: naive (numpy {np.__version__}), profile: dev\n" in ran.stdout


def test_to_name_a_part_that_cannot_be_run_is_an_error() -> None:
    ran = run_suite(test_file("overlay"), "--impl", "naive")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "is about overlay alone" in ran.stderr


def test_every_test_is_in_a_part() -> None:
    files = [path for path in HERE.rglob("test_*.py") if "__pycache__" not in path.parts]
    assert len(files) > 20
    assert [path for path in files if not any(part.holds(path) for part in PARTS)] == []


# What a failure prints


def printed_argument(ran: Ran, name: str) -> str:
    """The value of an argument in the failing example that hypothesis printed."""
    found = re.search(rf"^E +{name}=(.*?),(?:  # [^\n]*)?\n(?:E +\w+=|E +\))", ran.stdout, re.DOTALL | re.MULTILINE)
    assert found is not None, ran.stdout
    return re.sub(r"\nE +", " ", found[1])


def inner(test: Any) -> Any:
    """The test as it is without hypothesis, to be called with one example."""
    return test.hypothesis.inner_test


def test_a_failing_example_can_be_pasted() -> None:
    ran = run_suite(
        test_file("codec/test_round_trip.py"), "--impl", "contract_tests.planted:StaleBuffer", "-k", "takes_a_copy"
    )
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    routes = eval(printed_argument(ran, "routes"), {"np": np, "lay_out": lay_out})
    with pytest.raises(AssertionError):
        inner(test_round_trip.test_encoding_takes_a_copy)(StaleBuffer(), routes)
    assert "@reproduce_failure(" in ran.stdout


def test_a_failing_trajectory_can_be_pasted() -> None:
    ran = run_suite(test_file("codec/test_rows.py"), "--impl", "contract_tests.planted:OneRowMore")
    turns = eval(printed_argument(ran, "turns"))
    with pytest.raises(AssertionError):
        inner(test_rows.test_turns_become_a_trajectory)(OneRowMore(), turns)


@pytest.mark.parametrize("layout", r3st.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 2)])
def test_routes_are_printed_as_code(layout: str, shape: tuple[int, int, int]) -> None:
    routes = lay_out(np.arange(np.prod(shape), dtype=np.uint16).reshape(shape), layout)
    again = eval(repr(routes), {"np": np, "lay_out": lay_out})
    assert again.given.dtype == routes.given.dtype
    assert again.given.strides == routes.given.strides
    assert np.array_equal(again.given, routes.given)


# The report


def test_every_property_is_a_sentence() -> None:
    """They are the rows of the report."""
    wrong = []
    for part in ("codec", "http"):
        for path in (HERE / part).glob("test_*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if not text.endswith(".") or not text[:1].isupper():
                        wrong.append(f"{path.name}::{node.name}")
    assert wrong == []


def test_the_published_report_has_the_known_deviations() -> None:
    published = (HERE / "REPORT.md").read_text("utf-8")
    for entry in deviations.read("skyrl"):
        assert entry.reason in published, "make it anew: ci/contract_report.sh"
        assert f"`{entry.test.partition('[')[0]}`" in published


def test_the_oracle_knows_what_it_refuses() -> None:
    """It judges the others, so that it must not be empty words."""
    right = oracle.envelope(np.array([[[1, 300]]], np.int16))
    assert oracle.violations(right) == set()
    for change, name in (
        ({"start": 0}, "extra keys"),
        ({"dtype": "int64"}, "dtype"),
        ({"shape": [1, 1]}, "shape"),
        ({"shape": [1, 1, 3]}, "another number of bytes"),
        ({"data": right["data"] + "\n"}, "base64"),
        ({"data": "AQAsAR=="}, "pad bits"),
        ({"data": None}, "data"),
        ({"data": "AQABAA=="}, "wider than needed"),
        ({"data": "AQD//w=="}, "negative id"),
        ({"shape": [0, 2**40, 1], "data": ""}, "too large"),
    ):
        assert name in oracle.violations({**right, **change}), change
