"""The wheel: what is in it, and what it does to an interpreter that has it installed.

Needs hatchling, see the ``wheel`` fixture. Nothing here needs a network.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from contract_tests.child import REPO, finish, run_python
from contract_tests.overlay.fake_skyrl import CONVERT, PREPROCESS

PTH = "import skyrl_r3.autoload; skyrl_r3.autoload.start()\n"


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    """Contents of the wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_is_pure_and_named_as_the_project(wheel: Path) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert wheel.name == f"skyrl_r3-{project['version']}-py3-none-any.whl"


def test_version_is_the_same_everywhere(files: dict[str, bytes], bare_python: Path) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (name,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(files[name].decode())
    ran = run_python([str(bare_python), "-c", "import skyrl_r3; print(skyrl_r3.__version__)"])
    assert project["version"] == metadata["Version"] == ran.stdout.strip()
    assert metadata["Name"] == "skyrl-r3"
    assert metadata["Requires-Python"] == ">=3.12"
    extras = [
        f"{each}; extra == '{extra}'"
        for extra, more in project.get("optional-dependencies", {}).items()
        for each in more
    ]
    assert sorted(metadata.get_all("Requires-Dist", [])) == sorted([*project["dependencies"], *extras])


def test_pth_file_is_at_the_root_and_has_one_line(files: dict[str, bytes]) -> None:
    assert [name for name in files if name.endswith(".pth")] == ["skyrl_r3.pth"]
    assert files["skyrl_r3.pth"].decode() == PTH


def test_wheel_holds_the_package_the_manifests_and_nothing_else(files: dict[str, bytes]) -> None:
    package = {
        f"skyrl_r3/{path.relative_to(REPO / 'skyrl_r3').as_posix()}"
        for path in (REPO / "skyrl_r3").rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed")
    }
    patches = {f"skyrl_r3/patches/{path.name}" for path in (REPO / "patches").iterdir()}
    assert "skyrl_r3/py.typed" in package
    assert "skyrl_r3/patches/skyrl-0.3.toml" in patches
    assert {name for name in files if ".dist-info/" not in name} == package | patches | {"skyrl_r3.pth"}
    for name in package | patches:
        source = REPO / name if name in package else REPO / name.removeprefix("skyrl_r3/")
        assert files[name] == source.read_bytes()


def test_license_is_in_the_wheel(files: dict[str, bytes]) -> None:
    (name,) = [name for name in files if name.endswith("/LICENSE")]
    assert files[name] == (REPO / "LICENSE").read_bytes()


# An interpreter that has it

START = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def modules_at_start(python: Path) -> set[str]:
    """What is in sys.modules of a fresh interpreter."""
    return set(json.loads(run_python([str(python), "-c", START]).stdout))


def test_start_imports_two_modules_and_nothing_else(bare_python: Path, empty_python: Path) -> None:
    assert modules_at_start(bare_python) - modules_at_start(empty_python) == {"skyrl_r3", "skyrl_r3.autoload"}


def test_finder_is_installed_once_and_first(bare_python: Path) -> None:
    code = (
        "import sys; print([type(finder).__name__ for finder in sys.meta_path].count('SkyRLFinder'), sys.meta_path[0])"
    )
    out = run_python([str(bare_python), "-c", code]).stdout
    assert out.startswith("1 <skyrl_r3.autoload.SkyRLFinder")


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "no"])
def test_switched_off_installs_nothing(bare_python: Path, empty_python: Path, value: str) -> None:
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"
    off = run_python([str(bare_python), "-c", code], env={"SKYRL_R3": value}).stdout
    assert off == run_python([str(empty_python), "-c", code]).stdout.replace("'NoneType', ", "")


def test_isolated_interpreter_is_not_hooked(bare_python: Path) -> None:
    """``-S`` reads no ``.pth`` file: nothing fails, and nothing is hooked."""
    ran = run_python([str(bare_python), "-S", "-c", "import sys; print('skyrl_r3' in sys.modules)"])
    assert ran.stdout.strip() == "False"


def test_imports_of_other_packages_never_reach_the_overlay(bare_python: Path) -> None:
    code = (
        "import sys, json, email.parser, xml.dom.minidom\ntry:\n    import skyrl_gym\nexcept ImportError:\n    pass\n"
    )
    code += "print(sorted(name for name in sys.modules if name.startswith('skyrl')))"
    assert run_python([str(bare_python), "-c", code]).stdout.strip() == "['skyrl_r3', 'skyrl_r3.autoload']"


def test_import_of_skyrl_fails_as_ever_where_it_is_not_installed(bare_python: Path) -> None:
    ran = run_python([str(bare_python), "-c", "import skyrl.train.trainer"], check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'skyrl'"


def test_package_imports_without_skyrl_or_numpy(bare_python: Path) -> None:
    """Only what is asked for is imported: the package itself needs none of its dependencies."""
    code = "import skyrl_r3, sys; print(sorted(skyrl_r3.__all__), 'numpy' in sys.modules, 'typing' in sys.modules)"
    out = run_python([str(bare_python), "-c", code]).stdout
    *names, numpy, typing = out.strip().split(" ")
    assert (numpy, typing) == ("False", "False")
    assert {"'enable',", "'frame',"} < set(names)


def test_every_public_name_resolves(wheel_python: Path) -> None:
    code = "import skyrl_r3; print({name: type(getattr(skyrl_r3, name)).__name__ for name in skyrl_r3.__all__})"
    found = ast.literal_eval(run_python([str(wheel_python), "-c", code]).stdout)
    modules = ("batch", "codec", "errors", "frame", "metrics", "reply")
    functions = ("disable", "enable", "status")
    assert found == {
        **dict.fromkeys(modules, "module"),
        **dict.fromkeys(functions, "function"),
        **{"RoutedExperts": "type", "TargetStatus": "type", "__version__": "str"},
    }


def test_unknown_name_is_an_attribute_error(bare_python: Path) -> None:
    code = "import skyrl_r3; print(hasattr(skyrl_r3, 'nothing'), hasattr(skyrl_r3, '__path__'))"
    assert run_python([str(bare_python), "-c", code]).stdout.strip() == "False True"


def test_installed_wheel_patches_what_is_imported(fake: Path, wheel_python: Path) -> None:
    """With the manifests from inside the package: the checkout is not on the path."""
    code = f"""
import json, {PREPROCESS}, skyrl_r3
row = next(row for row in skyrl_r3.status() if row.target == {f"{PREPROCESS}.{CONVERT}"!r})
print("REPORT " + json.dumps({{"state": row.state, "home": skyrl_r3.__file__}}))
"""
    ran = run_python([str(wheel_python), "-c", code], path=[fake])
    assert ran.values["state"] == "applied"
    assert Path(ran.values["home"]).is_relative_to(wheel_python.parent.parent)


def test_wheel_from_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """``pip install`` of a source archive: the forced files are in it as well."""
    python = os.environ.get("SKYRL_R3_BUILD_PYTHON", sys.executable)
    build = [python, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    finish([*build, "sdist"], cwd=REPO).check_returncode()
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    finish([*build, "wheel"], cwd=folder).check_returncode()
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(again) as new, zipfile.ZipFile(wheel) as old:
        assert {n: new.read(n) for n in new.namelist()} == {n: old.read(n) for n in old.namelist()}
