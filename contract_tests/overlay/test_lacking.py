"""Packages that skyrl-r3 needs and cannot import, for whatever reason: SkyRL runs on, and one line says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import skyrl_r3
from contract_tests.child import REPO, Ran, run
from contract_tests.overlay.fake_skyrl import CLIENT, UTILS

BROKEN = {
    "ImportError": "raise ImportError('libopenblas.so.0: cannot open shared object file')",
    "RuntimeError": "raise RuntimeError('compiled for another ABI\\n\\nand more')",
    "OSError": "raise OSError(2, 'No such file', 'libomp.so')",
    "SyntaxError": "def (",
    "AttributeError": "def f():\n    import sys\n    sys.nothing\nf()",
    "deeper": "import colorsys\ncolorsys.rgb_to_hls('a', 1, 1)",
    "long": "raise RuntimeError('x' * 5000)",
    "mute": "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('mute')\nraise Mute",
}


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str, str], Path]:
    """A folder with a package of a name that does as the text says when it is imported."""

    def make(name: str, text: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return tmp_path

    return make


IMPORTED = f"import {UTILS}, {CLIENT}\nreport(patched=patched({UTILS}.filter_generator_output))"


# The import hook


@pytest.mark.parametrize("kind", BROKEN)
def test_skyrl_is_imported_as_ever(kind: str, broken: Callable[[str, str], Path], fake: Path) -> None:
    folder = broken("packaging", BROKEN[kind])
    ran = run(IMPORTED, path=[folder.parent, folder, fake], hook=True)
    assert ran.values == {"patched": False}
    (line,) = ran.stderr.splitlines()
    assert line.startswith("skyrl-r3 is not active, and SkyRL is left as it is. ")
    assert "needs the package packaging, which cannot be imported (" in line
    assert line.endswith("): pip install --force-reinstall packaging, on every node.")
    reason = {
        "OSError": "FileNotFoundError",
        "deeper": "TypeError",
        "long": "RuntimeError",
        "mute": "packaging.Mute",
    }.get(kind, kind)
    assert f"{reason}: " in line
    assert len(line) < 600


@pytest.mark.parametrize("kind", ["RuntimeError", "SyntaxError"])
def test_a_package_of_one_file(kind: str, fake: Path, tmp_path: Path) -> None:
    (tmp_path / "packaging.py").write_text(BROKEN[kind])
    ran = run(IMPORTED, path=[tmp_path, fake], hook=True)
    assert ran.values == {"patched": False}
    assert ran.stderr.endswith("): pip install --force-reinstall packaging, on every node.\n")


def test_a_traceback_with_the_import_system_in_it(broken: Callable[[str, str], Path], fake: Path) -> None:
    ran = run(IMPORTED, path=[broken("packaging", BROKEN["RuntimeError"]), fake], hook=True, env={"PYTHONVERBOSE": "1"})
    assert ran.values == {"patched": False}
    assert "): pip install --force-reinstall packaging, on every node.\n" in ran.stderr


def test_the_package_is_named_and_not_its_module(broken: Callable[[str, str], Path], fake: Path) -> None:
    folder = broken("packaging", "")
    ran = run(f"import {UTILS}", path=[folder, fake], hook=True)
    assert "pip install --force-reinstall packaging, on every node." in ran.stderr
    assert "packaging.specifiers" in ran.stderr


def test_a_half_written_skyrl_r3(fake: Path, tmp_path: Path) -> None:
    package = tmp_path / "skyrl_r3"
    package.mkdir()
    for name in ("__init__.py", "autoload.py", "loader.py"):
        (package / name).write_text((REPO / "skyrl_r3" / name).read_text("utf-8"))
    for text in ("def (", "raise RuntimeError('half')", "from skyrl_r3 import nothing_of_that_name", None):
        if text is None:
            (package / "overlay.py").unlink()
        else:
            (package / "overlay.py").write_text(text)
        ran = run(IMPORTED, path=[tmp_path, fake], hook=True)
        assert ran.values == {"patched": False}
        assert ran.stderr.count("skyrl-r3 is not active") == 1
        assert "pip install --force-reinstall skyrl-r3, on every node." in ran.stderr
        assert "Traceback" in ran.stderr  # It may be a bug of ours.


def test_an_interrupt_is_none_of_them(broken: Callable[[str, str], Path], fake: Path) -> None:
    code = f"""
try:
    import {UTILS}
except KeyboardInterrupt:
    report(interrupted=True)
"""
    ran = run(code, path=[broken("packaging", "raise KeyboardInterrupt"), fake], hook=True)
    assert ran.values == {"interrupted": True}
    assert ran.stderr == ""


# A patch whose package is missing


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')", "pip install numpy"),
        ("raise ModuleNotFoundError(\"No module named 'numpy.x'\", name='numpy.x')", "--force-reinstall numpy"),
        (BROKEN["RuntimeError"], "pip install --force-reinstall numpy"),
    ],
)
def test_a_patch_that_lacks_a_package_says_which(
    text: str, cure: str, broken: Callable[[str, str], Path], fake: Path
) -> None:
    code = f"import {UTILS}\nreport(details=list(details().values()))"
    ran = run(code, path=[broken("numpy", text), fake], hook=True)
    assert f"{cure}, on every node." in ran.stderr
    assert "Please report this" not in ran.stderr
    assert all(f"{cure}, on every node." in detail for detail in ran.values["details"])


# The command

MAIN = "import sys\nsys.argv = ['skyrl-r3', *{arguments}]\nfrom skyrl_r3.__main__ import main\nmain()"
SAVED = str(REPO / "contract_tests/golden/v1/told.frame")


def command(*arguments: str, path: list[Path]) -> Ran:
    return run(MAIN.format(arguments=arguments), path=path, check=False)


@pytest.mark.parametrize("package", ["typer", "rich"])
@pytest.mark.parametrize("kind", BROKEN)
def test_the_command_without_its_libraries(kind: str, package: str, broken: Callable[[str, str], Path]) -> None:
    ran = command("--version", path=[broken(package, BROKEN[kind])])
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"skyrl-r3 needs the package {package}, which cannot be imported (")
    assert line.endswith(f"): pip install --force-reinstall {package}")


@pytest.mark.parametrize(
    ("error", "cure"),
    [("name='rich'", "is not installed: pip install rich\n"), ("name='rich.console'", "--force-reinstall rich\n")],
)
def test_the_command_without_one_that_is_missing(error: str, cure: str, broken: Callable[[str, str], Path]) -> None:
    ran = command("--version", path=[broken("rich", f"raise ModuleNotFoundError('gone', {error})")])
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.endswith(cure)


@pytest.mark.parametrize("package", ["numpy", "orjson", "pybase64"])
def test_inspect_without_what_reads(package: str, broken: Callable[[str, str], Path]) -> None:
    ran = command("inspect", SAVED, path=[broken(package, BROKEN["ImportError"])])
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"skyrl-r3 needs the package {package}, which cannot be imported (ImportError: libopenblas")


@pytest.mark.parametrize(
    "bug",
    [
        "raise RuntimeError('ours')",
        "import skyrl_r3.nothing_of_that_name",
        "from skyrl_r3.errors import nothing_of_that_name",
        "raise ImportError('nameless')",
        "int('x')",
        "open('nowhere')",
        "import json\njson.loads('{')",
        "import skyrl.nothing_of_that_name",
        "raise ModuleNotFoundError('gone', name='_ctypes')",
        "import packaging.version\npackaging.version.Version('x')",
        "import os\nopen(os.path.dirname(os.path.dirname(__file__)) + '/nowhere')",
    ],
)
def test_a_bug_of_our_own_shows_where_it_is(bug: str, tmp_path: Path) -> None:
    package = tmp_path / "skyrl_r3"
    package.mkdir()
    for name in ("__init__.py", "autoload.py", "__main__.py", "errors.py", "lacking.py"):
        (package / name).write_text((REPO / "skyrl_r3" / name).read_text("utf-8"))
    (package / "cli.py").write_text(bug)
    ran = command("--version", path=[tmp_path])
    assert ran.returncode == 1
    assert ran.stderr.startswith("Traceback")
    assert str(package / "cli.py") in ran.stderr


# A package that is there, and not the way that it should be


def test_no_manifest_is_an_incomplete_installation(fake: Path, tmp_path: Path) -> None:
    package = tmp_path / "skyrl_r3"
    package.mkdir()
    for file in (REPO / "skyrl_r3").glob("*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    code = f"""
import {UTILS}, skyrl_r3
from skyrl_r3.errors import OverlayError
for function in (skyrl_r3.enable, skyrl_r3.status):
    try:
        function()
    except OverlayError as error:
        print(error.field, error.got, error.hint)
"""
    ran = run(code, path=[tmp_path, fake], hook=True)
    assert ran.stdout.splitlines() == 2 * [
        "patches none skyrl-r3 is incomplete: install it anew, with pip and from its wheel."
    ]
    assert ran.stderr.count("skyrl-r3 is not active: patches: ") == 1
    assert "supported" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("made", ["by hand", "without a folder"])
def test_a_skyrl_without_a_spec(made: str, fake: Path) -> None:
    """As tests and launchers leave it in ``sys.modules``."""
    code = f"""
import sys, types, skyrl_r3
module = sys.modules["skyrl"] = types.ModuleType("skyrl")
if {made == "by hand"}:
    module.__path__ = [{str(fake / "skyrl")!r}]
rows = skyrl_r3.status()
try:
    got = [row.version for row in skyrl_r3.enable()]
except skyrl_r3.overlay.UnsupportedSkyRLError as error:
    got = error.got
report(rows=len(rows), got=got)
"""
    rows = len(skyrl_r3.status())
    found = run(code, path=[fake]).values
    assert found == ({"rows": rows, "got": ["0.3.0"] * rows} if made == "by hand" else {"rows": 0, "got": "none"})


def test_a_target_module_without_a_spec(fake: Path) -> None:
    code = f"""
import sys, skyrl_r3, {UTILS}
del sys.modules[{UTILS!r}].__spec__
skyrl_r3.enable()
report(state=states()[{f"{UTILS}.filter_generator_output"!r}])
"""
    assert run(code, path=[fake]).values == {"state": "applied"}
