"""Every case of ``cases.toml`` has a test or a reason, and what finds those tests finds them all."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from contract_tests.cases import Case, CaseError, marked_tests, problems, read_cases


def test_every_case_has_a_test_or_a_reason() -> None:
    assert problems(read_cases(), marked_tests()) == []


def test_a_case_that_is_known_to_be_shown_is_found() -> None:
    """In a suite of both lines, so that an empty answer is not taken for a right one."""
    name = "TestServer::test_more_than_256_experts_travel_as_int16"
    found = marked_tests()["R34"]
    assert f"contract_tests/overlay/test_server.py::{name}" in found
    assert f"contract_tests/overlay/skyrl_0_4/test_server.py::{name}" in found


# The finder.


def found_in(folder: Path, **modules: str) -> dict[str, list[str]]:
    """What is found in a tree of these modules; ``__`` in a name stands for a folder."""
    for name, text in modules.items():
        path = folder.joinpath("tree", *name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import pytest\n" + dedent(text))
    return marked_tests(folder / "tree")


def test_functions_and_methods(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        test_a="""
        @pytest.mark.case("R34")
        def test_one(): ...

        @pytest.mark.parametrize("x", [1])
        @pytest.mark.case("R26", "R27")
        async def test_two(x): ...

        def test_three(): ...
        """,
        deeper__test_b="""
        class TestB:
            @pytest.mark.case("R34")
            def test_one(self): ...
        """,
    )
    assert found == {
        "R34": ["tree/deeper/test_b.py::TestB::test_one", "tree/test_a.py::test_one"],
        "R26": ["tree/test_a.py::test_two"],
        "R27": ["tree/test_a.py::test_two"],
    }


def test_parameters(tmp_path: Path) -> None:
    """In the decorator or in a table that it names, a mark alone or in a list. The test may have the mark as well."""
    found = found_in(
        tmp_path,
        test_a="""
        TABLE: dict = {"x": pytest.param(1, marks=pytest.mark.case("R12")), "y": 2}

        @pytest.mark.case("R35")
        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.case("R34", "R35")])])
        def test_one(x): ...

        @pytest.mark.parametrize("x", TABLE)
        def test_two(x): ...

        @pytest.mark.parametrize("x", TABLE.values())
        def test_three(x): ...
        """,
    )
    assert found == {
        "R34": ["tree/test_a.py::test_one"],
        "R35": ["tree/test_a.py::test_one"],
        "R12": ["tree/test_a.py::test_three", "tree/test_a.py::test_two"],
    }


def test_marks_of_a_module_and_of_a_class(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        test_a="""
        pytestmark = [pytest.mark.case("R44")]

        def test_one(): ...
        def helper(): ...

        @pytest.mark.case("R46")
        class TestA:
            pytestmark = pytest.mark.case("R47")

            def test_two(self): ...
        """,
    )
    assert found == {
        "R44": ["tree/test_a.py::TestA::test_two", "tree/test_a.py::test_one"],
        "R46": ["tree/test_a.py::TestA::test_two"],
        "R47": ["tree/test_a.py::TestA::test_two"],
    }


def test_a_suite_is_found_in_the_classes_that_derive_from_it(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        suite="""
        class Contract:
            @pytest.mark.case("R34")
            def test_one(self): ...
        """,
        more_suite="import suite\nclass More(suite.Contract): ...\n",
        test_a="from suite import Contract\nclass TestA(Contract): ...\nclass Helper(Contract): ...\n",
        line__test_b="import more_suite\nclass TestB(more_suite.More): ...\n",
    )
    assert found == {"R34": ["tree/line/test_b.py::TestB::test_one", "tree/test_a.py::TestA::test_one"]}


REFUSED = {
    "twice in one mark": ('@pytest.mark.case("R34", "R34")\ndef test(): ...', "R34 twice"),
    "twice on one test": ('@pytest.mark.case("R34")\n@pytest.mark.case("R34")\ndef test(): ...', "R34 twice"),
    "on the module and the test": (
        'pytestmark = pytest.mark.case("R34")\n@pytest.mark.case("R34")\ndef test(): ...',
        "R34 twice",
    ),
    "without a number": ("@pytest.mark.case()\ndef test(): ...", "names no cases"),
    "a number that is not written out": ("@pytest.mark.case(NUMBER)\ndef test(): ...", "names no cases"),
    "not called": ("@pytest.mark.case\ndef test(): ...", "names no cases"),
    "an integer": ("@pytest.mark.case(34)\ndef test(): ...", "names no cases"),
    "a keyword": ('@pytest.mark.case("R34", why="x")\ndef test(): ...', "names no cases"),
    "on a helper": ('@pytest.mark.case("R34")\ndef helper(): ...', "belongs to no test"),
    "in a test": ('def test():\n    pytest.mark.case("R34")', "belongs to no test"),
    "in a table that no test takes": ('TABLE = [pytest.param(1, marks=pytest.mark.case("R34"))]', "belongs to no test"),
    "in a class that is not collected": (
        'class Helper:\n    @pytest.mark.case("R34")\n    def test(self): ...',
        "does not collect",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_marks_that_are_refused(tmp_path: Path, case: str) -> None:
    text, reason = REFUSED[case]
    with pytest.raises(CaseError, match=reason) as caught:
        found_in(tmp_path, test_a=f"\n{text}\n")
    assert str(caught.value).startswith("tree/test_a.py:")


@pytest.mark.parametrize("text", ["def test_one(): ...", "class Suite:\n    def test_one(self): ..."])
def test_a_mark_in_a_module_that_is_not_collected(tmp_path: Path, text: str) -> None:
    decorated = text.replace(
        "def", '@pytest.mark.case("R34")\n    def' if "class" in text else '@pytest.mark.case("R34")\ndef'
    )
    with pytest.raises(CaseError, match="does not collect"):
        found_in(tmp_path, suite=decorated)


# The list.


def test_a_list_of_cases(tmp_path: Path) -> None:
    path = tmp_path / "cases.toml"
    path.write_text('[R01]\nwhat = "a"\nwhy_not = "b"\n[R102]\nwhat = "c"\npartly = "d"\n')
    assert read_cases(path) == {"R01": Case(what="a", why_not="b"), "R102": Case(what="c", partly="d")}


@pytest.mark.parametrize(
    "text",
    [
        '[X01]\nwhat = "a"',
        '[R1]\nwhat = "a"',
        'R01 = "a"',
        '[R01]\nwhy_not = "a"',
        '[R01]\nwhat = ""',
        '[R01]\nwhat = "a"\npartly = " "',
        '[R01]\nwhat = "a"\nwhy = "b"',
        "[R01]\nwhat = 1",
    ],
)
def test_other_lists_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cases.toml"
    path.write_text(text)
    with pytest.raises(CaseError):
        read_cases(path)


@pytest.mark.parametrize(
    ("case", "tests", "right"),
    [
        (Case(what="a"), ["t"], True),
        (Case(what="a", partly="b"), ["t"], True),
        (Case(what="a", why_not="b"), [], True),
        (Case(what="a"), [], False),
        (Case(what="a", partly="b"), [], False),
        (Case(what="a", why_not="b"), ["t"], False),
        (Case(what="a", why_not="b", partly="c"), [], False),
    ],
)
def test_a_case_has_tests_or_a_reason_and_never_both(case: Case, tests: list[str], right: bool) -> None:
    found = problems({"R34": case}, {"R34": tests} if tests else {})
    assert (found == []) is right
    assert all(line.startswith("R34") for line in found)


def test_a_mark_with_an_unknown_number_is_named_with_its_tests() -> None:
    assert problems({}, {"R34": ["a", "b"]}) == ["R34 is no case: a, b"]
