"""The cases of ``cases.toml``, which are faults that somebody met in public, and the tests that show them.

A test names the cases that it shows by ``@pytest.mark.case("R34")``. Tests are read as text, not imported: those of
both SkyRL lines count, and no process can import both.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CASES = HERE / "cases.toml"

_MARK = "pytest.mark.case"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class CaseError(Exception):
    """A table of ``cases.toml``, or a mark, that is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table of ``cases.toml``.

    Attributes:
        what: The smallest input, and what is right.
        why_not: Why no test shows it. Empty where tests do.
        partly: What the tests do not show of it. Empty where they show all.
    """

    what: str
    why_not: str = ""
    partly: str = ""


def read_cases(path: Path = CASES) -> dict[str, Case]:
    """The cases by number.

    Raises:
        CaseError: Not a number, or other keys than those of :class:`Case`, or one of them without text.
    """
    cases = {}
    for number, table in tomllib.loads(path.read_text("utf-8")).items():
        if not re.fullmatch(r"R\d{2,3}", number) or not isinstance(table, dict):
            raise CaseError(f"{number}: not a table [R00]")
        if "what" not in table or not set(table) <= {"what", "why_not", "partly"}:
            raise CaseError(f"{number}: has {', '.join(table)}")
        if not all(isinstance(text, str) and text.strip() for text in table.values()):
            raise CaseError(f"{number}: a key without text")
        cases[number] = Case(**table)
    return cases


def marked_tests(folder: Path = HERE) -> dict[str, list[str]]:
    """Node ids of the tests below ``folder`` by the numbers that they are marked with.

    A method of a suite, which pytest collects in the classes that derive from it, is one test for each of them.

    Raises:
        CaseError: A mark without a number, with something else, with a number that the test has already, or on
            something that pytest does not collect.
    """
    modules = [_Module(path, path.relative_to(folder.parent)) for path in sorted(folder.rglob("*.py"))]
    classes = [found for module in modules for found in module.classes]
    tests: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for number, owner, name, line in module.marked:
            if owner is None:
                ids = [f"{module.name}::{name}"] if module.collected else []
            else:
                ids = [f"{test}::{name}" for test in _collected_as(owner, classes)]
            if not ids:
                raise CaseError(f"{module.name}:{line}: {number} marks {name}, which pytest does not collect")
            tests[number] += ids
    return {number: sorted(set(ids)) for number, ids in tests.items()}


def problems(cases: Mapping[str, Case], tests: Mapping[str, list[str]]) -> list[str]:
    """What is wrong between the cases and the tests, a line each."""
    found = [f"{number} is no case: {', '.join(ids)}" for number, ids in tests.items() if number not in cases]
    for number, case in cases.items():
        ids = tests.get(number, [])
        if not ids and not case.why_not:
            found.append(f"{number} has neither a test nor a reason")
        if ids and case.why_not:
            found.append(f"{number} has a reason why there is no test, and tests: {', '.join(ids)}")
        if not ids and case.partly:
            found.append(f"{number} says what its tests leave out, and has none")
    return found


@dataclass(frozen=True)
class _Class:
    """A class of a module. ``names`` is the path to it, ``bases`` the last names of what it derives from."""

    node_id: str
    name: str
    bases: list[str]
    collected: bool


@dataclass
class _Module:
    """What one file has: its classes, and each mark as number, class, test and line."""

    path: Path
    relative: Path
    classes: list[_Class] = field(default_factory=list)
    marked: list[tuple[str, _Class | None, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.relative.as_posix()
        self.collected = self.path.name.startswith("test_")
        tree = ast.parse(self.path.read_text("utf-8"))
        self._left = {id(call): call for call in _marks(tree)}
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == _MARK]
        if len(named) != len(self._left):
            raise CaseError(f"{self.name}:{named[0].lineno}: {_MARK} names no cases")
        self._tables = {
            target.id: list(_marks(node))
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        self._visit(tree.body, None, [])
        if self._left:
            line = min(call.lineno for call in self._left.values())
            raise CaseError(f"{self.name}:{line}: a mark that belongs to no test")

    def _visit(self, body: list[ast.stmt], owner: _Class | None, above: list[ast.Call]) -> None:
        """Read the tests of a module or class, of which ``above`` are the marks of all."""
        above = above + [call for node in body if _assigns_pytestmark(node) for call in _marks(node)]
        for node in body:
            if isinstance(node, ast.ClassDef):
                inner = _Class(
                    node_id=f"{owner.node_id if owner else self.name}::{node.name}",
                    name=node.name,
                    bases=[ast.unparse(base).rpartition(".")[2] for base in node.bases],
                    collected=self.collected and node.name.startswith("Test"),
                )
                self.classes.append(inner)
                self._visit(node.body, inner, above + _decorations(node))
            elif isinstance(node, _FUNCTIONS) and node.name.startswith("test"):
                own = _decorations(node)
                named = (inner for item in node.decorator_list for inner in ast.walk(item))
                names = {inner.id for inner in named if isinstance(inner, ast.Name)}
                # A parameter's mark holds for a part of the test, so the test may have it, too, or another parameter.
                parameters = [call for name in sorted(names) for call in self._tables.get(name, [])]
                parameters += [call for item in node.decorator_list for call in _marks(item) if call not in own]
                self._note(node, owner, above + own, parameters)

    def _note(self, node: ast.stmt, owner: _Class | None, whole: list[ast.Call], parameters: list[ast.Call]) -> None:
        name, seen = getattr(node, "name", ""), set()
        for call in whole:
            for number in self._numbers(call):
                if number in seen:
                    raise CaseError(f"{self.name}:{call.lineno}: {name} is marked {number} twice")
                seen.add(number)
        for call in parameters:
            seen |= set(self._numbers(call))
        self.marked += [(number, owner, name, node.lineno) for number in sorted(seen)]

    def _numbers(self, call: ast.Call) -> list[str]:
        self._left.pop(id(call), None)
        values = [item.value if isinstance(item, ast.Constant) else None for item in call.args]
        numbers = [value for value in values if isinstance(value, str)]
        if not numbers or len(numbers) != len(values) or call.keywords:
            raise CaseError(f"{self.name}:{call.lineno}: {ast.unparse(call)} names no cases")
        return numbers


def _marks(node: ast.AST) -> Iterator[ast.Call]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == _MARK:
            yield inner


def _decorations(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.Call]:
    """The marks that stand as decorators, not inside one."""
    return [item for item in node.decorator_list if isinstance(item, ast.Call) and ast.unparse(item.func) == _MARK]


def _assigns_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]


def _collected_as(owner: _Class, classes: list[_Class]) -> list[str]:
    """Node ids of the classes in which pytest finds the methods of ``owner``: itself, and those that derive from it."""
    found = [owner.node_id] if owner.collected else []
    for heir in classes:
        if owner.name in heir.bases and heir is not owner:
            found += _collected_as(heir, classes)
    return found
