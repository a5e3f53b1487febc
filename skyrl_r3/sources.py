"""Read functions of SkyRL's from its sources, without importing them."""

from __future__ import annotations

import ast
import hashlib
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["Found", "assigned_string", "read_target"]


@dataclass(frozen=True)
class Found:
    """What the installed source has for a target.

    Attributes:
        signature: As a manifest has it.
        sha256: Of ``text``.
        text: The function's source, from ``def`` on, for whoever compares releases.
    """

    signature: str
    sha256: str
    text: str = field(default="", repr=False)


def read_target(root: Path, module: str, attribute: str, seen: frozenset[str] = frozenset()) -> Found | None:
    """What SkyRL's sources have for ``attribute`` of ``module``; None where there is no such function.

    Args:
        root: SkyRL's package folder.
        attribute: A function or method that the module defines, or a function that it imports by name.
        seen: Modules that the name was followed through.
    """
    package, *rest = module.split(".")
    path = root.joinpath(*rest).with_suffix(".py")
    if package != "skyrl" or module in seen or not path.is_file():
        return None
    source, body = _parsed(path)
    *classes, name = attribute.split(".")
    context: list[str] = []
    for class_name in classes:
        node = _last(body, lambda node, name=class_name: isinstance(node, ast.ClassDef) and node.name == name)
        if not isinstance(node, ast.ClassDef):
            return None
        # A decorator may make the name something else than the class, as ray.remote does.
        context += [f"in @{ast.unparse(decorator)}:" for decorator in node.decorator_list]
        body = node.body
    node = _last(body, lambda node: name in _bound_names(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_source_segment(source, node) or ""
        signature = " ".join([*context, _signature(node)])
        return Found(signature=signature, sha256=hashlib.sha256(text.encode()).hexdigest(), text=text)
    if isinstance(node, ast.ImportFrom) and not classes:
        origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        parents = module.split(".")[: -node.level] if node.level else []
        return read_target(root, ".".join([*parents, *filter(None, [node.module])]), origin, seen | {module})
    return None


def _last(body: list[ast.stmt], fits: Callable[[ast.stmt], bool]) -> ast.stmt | None:
    """The last statement that fits: what a name is bound to when the body has been executed."""
    return next((node for node in reversed(body) if fits(node)), None)


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    return [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


@cache
def _parsed(path: Path) -> tuple[str, list[ast.stmt]]:
    """Text and statements of a source file; nothing of one that Python itself could not read."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        return source, ast.parse(source).body
    except (SyntaxError, UnicodeDecodeError):
        return "", []


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """``@staticmethod async (self, url, headers=None)``: what a caller relies on, without annotations."""
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    kind = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    return " ".join([*decorators, *kind, f"({ast.unparse(arguments)})"])


def assigned_string(path: Path, name: str) -> str | None:
    """The string that the module in ``path`` assigns to ``name``, if it does so in one plain statement."""
    if path.is_file():
        for node in _parsed(path)[1]:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
                return ast.literal_eval(node.value) if isinstance(node.value, ast.Constant) else None
    return None
