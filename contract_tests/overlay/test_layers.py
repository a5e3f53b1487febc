"""Imports go only downwards, read from the sources."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest

from contract_tests.child import REPO

PACKAGE = REPO / "skyrl_r3"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)

# What each module may import of this package. A new module needs a row, and its row is the place to argue about it.
BELOW = {
    "__init__": set(),
    "autoload": set(),
    "lacking": set(),
    "errors": set(),
    "metrics": {"autoload"},
    "codec": {"errors"},
    "routes": {"codec", "errors"},
    "spec": {"errors"},
    "reply": {"errors", "spec"},
    "checks": {"errors", "spec"},
    "policy": {"checks", "codec", "errors", "metrics", "reply"},
    "trace": {"routes"},
    "padding": {"codec"},
    "packed": {"codec", "errors", "reply", "routes"},
    "frame": {"codec", "errors", "reply", "spec"},
    "wire": {"errors", "frame", "packed", "reply"},
    "batch": {"codec", "errors", "padding", "routes"},
    "hooks": set(),
    "hooks.client": {"errors", "metrics", "notes", "policy", "reply", "routes", "trace", "wire"},
    # On the hooks of SkyRL 0.3, of which SkyRL 0.4 needs a part.
    "hooks.client_04": {"errors", "frame", "hooks.client", "metrics", "notes", "packed", "policy", "reply", "wire"},
    "hooks.generator": {"errors", "metrics", "routes", "trace"},
    "hooks.preprocess": {"batch", "errors", "padding", "routes"},
    "hooks.refuse": set(),
    "hooks.tap": set(),
    "hooks.engine": {"errors", "spec", "wire"},
    "hooks.server": {
        "codec",
        "errors",
        "frame",
        "hooks.engine",
        "hooks.tap",
        "metrics",
        "notes",
        "packed",
        "reply",
        "spec",
        "wire",
    },
    "sources": set(),
    "manifest": {"errors", "sources"},
    "ledger": {"errors", "manifest"},
    "notes": set(),
    "overlay": {"autoload", "errors", "lacking", "ledger", "manifest", "notes", "policy"},
    "loader": {"overlay"},
    "aside": set(),
    "terminal": set(),
    "requirements": {"__init__", "aside"},
    "installation": {
        "__init__",
        "autoload",
        "errors",
        "manifest",
        "metrics",
        "overlay",
        "policy",
        "requirements",
        "wire",
    },
    "importing": {"aside", "installation", "manifest"},
    "probe": {"checks", "errors", "installation", "policy", "probe_verdict", "wire"},
    "probe_verdict": {"installation", "wire"},
    "cluster": {"aside", "installation"},
    "bench": set(),
    "bench.cases": set(),
    "bench.pipe": set(),
    "bench.targets": set(),
    "bench.plan": {"bench", "bench.cases", "bench.targets", "frame", "packed"},
    "bench.environments": {"bench.pipe"},
    "bench.processes": {"bench.cases", "bench.pipe"},
    "bench.preprocess": {"bench.cases", "routes"},
    "bench.server": {"bench.cases", "bench.pipe"},
    "bench.client": {"bench.cases", "bench.pipe", "bench.preprocess", "wire"},
    "bench.run": {
        "bench",
        "bench.cases",
        "bench.environments",
        "bench.pipe",
        "bench.plan",
        "bench.preprocess",
        "bench.processes",
        "bench.targets",
        "frame",
    },
    "bench.report": {"bench.plan", "bench.targets"},
    "inspection": set(),
    "inspection.files": {"codec", "errors", "frame", "packed", "reply"},
    "inspection.facts": {"checks", "errors", "inspection.files", "policy", "reply", "spec"},
    "inspection.heatmap": {"errors", "inspection.facts"},
    "inspection.report": {"errors", "inspection.facts", "policy", "reply", "spec", "terminal"},
    "commands": set(),
    "commands.bench": {"bench", "commands", "bench.pipe", "bench.report", "bench.run"},
    "commands.demo": set(),
    "commands.inspect": {
        "commands",
        "errors",
        "inspection",
        "inspection.facts",
        "inspection.files",
        "inspection.heatmap",
        "inspection.report",
        "lacking",
        "terminal",
    },
    "commands.status": {"aside", "cluster", "commands.status_report", "importing", "installation", "probe", "terminal"},
    "commands.status_report": {"importing", "installation"},
    "cli": {"commands.bench", "commands.demo", "commands.inspect", "commands.status"},
    "__main__": {"cli", "lacking"},
}
# Imports inside functions are counted as well, but for these: what is imported at every start of the interpreter
# may only reach for the rest of the package when it is needed.
LATE = {("autoload", "loader"), ("autoload", "lacking")}


def imports(module: str, *, late: bool) -> set[str]:
    """Modules of this package that ``module`` imports, at its top or (``late``) in a function; types do not count."""
    path = PACKAGE.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if (id(node) in inside) is not late:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import, which this test does not follow"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {
        name.removeprefix("skyrl_r3.") for name in found if name.removeprefix("skyrl_r3.") in MODULES and "." in name
    } - ({"hooks"} if any(name.startswith("skyrl_r3.hooks.") for name in found) else set())


def all_imports(module: str) -> set[str]:
    """Top-level names of everything that ``module`` imports."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    return {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names} | {
        str(node.module).split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }


def test_every_module_has_its_place() -> None:
    assert set(MODULES) == set(BELOW)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    late = {name for name in imports(module, late=True) if (module, name) not in LATE}
    assert (imports(module, late=False) | late) - BELOW[module] == set()


def test_the_order_has_no_cycle() -> None:
    order = list(TopologicalSorter(BELOW).static_order())
    for below, above in pairwise(("errors", "codec", "routes", "packed", "wire", "hooks.server")):
        assert order.index(below) < order.index(above)
    for encoding in ("packed", "frame"):
        assert order.index("reply") < order.index(encoding) < order.index("wire")


def test_encodings_do_not_know_each_other() -> None:
    assert "frame" not in BELOW["packed"]
    assert "packed" not in BELOW["frame"]


def test_what_the_pth_file_imports_is_of_the_standard_library() -> None:
    for module in ("__init__", "autoload"):
        assert all_imports(module) <= {*sys.stdlib_module_names, "skyrl_r3"}
    assert imports("__init__", late=False) == set()
    assert imports("autoload", late=False) == set()


def test_hooks_import_nothing_of_skyrl() -> None:
    """A hook that imported SkyRL would import targets while they are being patched."""
    for module in MODULES:
        name = module.replace(".", "/")
        path = PACKAGE / (f"{name}/__init__" if (PACKAGE / name).is_dir() else name)
        tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
        names = [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        assert [name for name in names if name.split(".")[0] in ("skyrl", "vllm", "ray")] == []
