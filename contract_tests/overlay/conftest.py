"""The fixtures of the overlay's own tests."""

from __future__ import annotations

import os
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

for _suite in (
    "client",
    "cluster",
    "engine",
    "fault",
    "flag_off",
    "life",
    "manifest",
    "metrics",
    "order",
    "overlay",
    "patcher",
    "ray",
    "server",
):
    pytest.register_assert_rewrite(f"contract_tests.overlay.{_suite}_suite")

from contract_tests.child import REPO, finish  # noqa: E402
from contract_tests.overlay import fake_skyrl  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer with a chat template, made on the spot: one token for each byte of text."""
    from transformers import AutoTokenizer

    from ci.tiny_moe import write_tokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the double of SkyRL 0.3.0, as it should be. For tests that only read it."""
    return fake_skyrl.build(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout.

    Needs hatchling in the interpreter of the tests, or in the one that ``SKYRL_R3_BUILD_PYTHON`` names. Without it
    the tests fail instead of being skipped: a wheel without its ``.pth`` file is a product that never turns on.
    """
    folder = tmp_path_factory.mktemp("wheel")
    python = os.environ.get("SKYRL_R3_BUILD_PYTHON", sys.executable)
    command = [python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = finish(command, cwd=REPO)
    if built.returncode:
        pytest.fail(f"{' '.join(command)} failed; it needs hatchling:\n{built.stdout}{built.stderr}", pytrace=False)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds the wheel and nothing else."""
    return _environment(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="session")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds nothing."""
    return _environment(tmp_path_factory.mktemp("empty"), None)


@pytest.fixture(scope="session")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds the wheel, and sees SkyRL and the rest of this one's packages."""
    python = _environment(tmp_path_factory.mktemp("installed"), wheel)
    base = sysconfig.get_paths()["purelib"]
    (_site_packages(python) / "base_environment.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    return python


@pytest.fixture(scope="session")
def plain_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that sees SkyRL and the rest of this one's packages, but not this one."""
    python = _environment(tmp_path_factory.mktemp("plain"), None)
    folders = [path for path in sys.path if path.endswith("-packages") and not (Path(path) / "skyrl_r3").exists()]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (_site_packages(python) / "base_environment.pth").write_text("".join(lines))
    return python


def _environment(folder: Path, wheel: Path | None) -> Path:
    made = finish([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    assert made.returncode == 0, made.stderr
    python = folder / "bin" / "python"
    if wheel is not None:
        # The wheel is pure and has no data, so that to unpack it is to install it, but for its command.
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(_site_packages(python))
    return python


def _site_packages(python: Path) -> Path:
    (folder,) = python.parent.parent.glob("lib/python*/site-packages")
    return folder
