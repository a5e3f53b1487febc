"""A manifest against the SkyRL that it was written for.

A line's tests derive from :class:`ManifestContract` and say which release that is.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
from pathlib import Path

from contract_tests.child import run
from contract_tests.overlay.fake_skyrl import CLIENT, SERVER
from contract_tests.overlay.line import LineContract
from skyrl_r3 import manifest
from skyrl_r3.manifest import Target
from skyrl_r3.sources import read_target


def skyrl_root() -> Path:
    """SkyRL's package folder, found without the overlay's own code."""
    spec = importlib.util.find_spec("skyrl")
    assert spec is not None, "these tests need skyrl"
    assert spec.origin is not None
    return Path(spec.origin).parent


def source_of(module: str) -> str:
    """Text of one of SkyRL's modules."""
    return skyrl_root().joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")


def bindings(module: str, attribute: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ImportFrom]:
    """The statements at the top of the module or class that bind the name."""
    body = ast.parse(source_of(module)).body
    *classes, name = attribute.split(".")
    for class_name in classes:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
    found: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ImportFrom] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            found.append(node)
        if isinstance(node, ast.ImportFrom):
            found += [node for alias in node.names if (alias.asname or alias.name) == name]
    return found


class ManifestContract(LineContract):
    """Tests that hold in every line. The release that the manifest was written for has to be installed."""

    def test_the_reviewed_release_is_installed(self) -> None:
        assert manifest.installed_skyrl() == (self.release, skyrl_root())

    def test_target_is_as_reviewed(self, target: Target) -> None:
        """Signature and source text, with a diff of the manifest's row where they are not."""
        found = read_target(skyrl_root(), target.module, target.attribute)
        assert found is not None, f"{target.name} is not in SkyRL {self.release}"
        listed = [f"signature = {target.signature!r}", f"sha256 = {target.sha256!r}"]
        there = [f"signature = {found.signature!r}", f"sha256 = {found.sha256!r}"]
        diff = "\n".join(difflib.unified_diff(listed, there, "patches/", target.name, lineterm=""))
        assert listed == there, f"\n{diff}"

    def test_sha256_is_that_of_the_lines_of_the_definition(self, target: Target) -> None:
        """Computed here in another way, from the file's bytes. A comment behind the last statement does not count."""
        home = target.module
        (node,) = bindings(home, target.attribute)
        if isinstance(node, ast.ImportFrom):
            home = node.module or ""
            (node,) = bindings(home, target.attribute)
        assert not isinstance(node, ast.ImportFrom)
        lines = source_of(home).encode().split(b"\n")[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        assert hashlib.sha256(b"\n".join(lines)).hexdigest() == target.sha256

    def test_the_plan_has_no_drift_and_no_edits(self) -> None:
        plan = manifest.plan()
        assert plan.manifest == self.manifest
        assert plan.drifted() == []
        assert plan.error() is None
        assert [target.name for target in plan.manifest.targets if plan.edited(target)] == []

    def test_every_caller_that_bound_a_function_by_name_is_a_target(self) -> None:
        """``from module import name`` keeps the function it got: each such module needs a row of its own."""
        patched = {target.name for target in self.manifest.targets}
        functions = {target.attribute for target in self.manifest.targets if "." not in target.attribute}
        missed = []
        for path in skyrl_root().rglob("*.py"):
            module = ".".join(("skyrl", *path.relative_to(skyrl_root()).with_suffix("").parts))
            text = path.read_text(encoding="utf-8")
            if not any(name in text for name in functions):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skyrl"):
                    missed += [
                        f"{module}.{alias.asname or alias.name}"
                        for alias in node.names
                        if alias.name in functions and f"{module}.{alias.asname or alias.name}" not in patched
                    ]
        assert missed == []

    def test_the_name_is_bound_where_the_manifest_says(self, target: Target) -> None:
        """The module or class itself binds the name, by ``def`` or by import, exactly once and at its top level."""
        assert len(bindings(target.module, target.attribute)) == 1

    def test_hooks_resolve_to_factories(self, target: Target) -> None:
        """``replacement`` takes the original; ``refusal`` takes the original and the error."""
        for hook, parameters in ((target.replacement, ["original"]), (target.refusal, ["original", "error"])):
            if not hook:
                continue
            module, _, name = hook.partition(":")
            factory = getattr(importlib.import_module(module), name)
            assert list(inspect.signature(factory).parameters) == parameters

    def test_row_is_complete(self, target: Target) -> None:
        assert target.what
        assert target.why
        assert target.upstream
        assert len(target.sha256) == 64

    def test_targets_are_listed_once(self) -> None:
        names = [target.name for target in self.manifest.targets]
        assert len(names) == len(set(names))

    def test_both_ends_of_the_wire_can_refuse(self) -> None:
        """Server and client see SkyRL's flag: with drift, one of them must be there to raise."""
        refusing = {target.module for target in self.manifest.targets if target.refusal}
        assert refusing == {SERVER, CLIENT}

    def test_the_check_imports_nothing_of_skyrl(self) -> None:
        ran = run(
            """
            import sys
            from skyrl_r3 import manifest
            plan = manifest.plan()
            assert plan.error() is None
            report(
                version=plan.version,
                skyrl=[name for name in sys.modules if name.split(".")[0] in ("skyrl", "skyrl_gym")],
                heavy=[name for name in ("torch", "vllm", "ray", "transformers") if name in sys.modules],
            )
            """
        )
        assert ran.values == {"version": self.release, "skyrl": [], "heavy": []}
