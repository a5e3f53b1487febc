"""Hypothesis profiles, chosen with ``HYPOTHESIS_PROFILE``, the choice of tests, and the fixtures of the suite.

Each SkyRL line has an environment of its own. What is in ``skyrl_0_4`` runs where SkyRL 0.4 is installed, and nothing
else does there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

for _suite in ("client", "flag_off", "manifest", "overlay", "ray", "server"):
    pytest.register_assert_rewrite(f"contract_tests.{_suite}_suite")

from contract_tests import fake_skyrl  # noqa: E402
from contract_tests.child import REPO  # noqa: E402
from skyrl_r3.errors import UnsupportedSkyRLError  # noqa: E402
from skyrl_r3.manifest import installed_skyrl  # noqa: E402

HERE = Path(__file__).parent
ONLY_04 = HERE / "skyrl_0_4"

# Examples on a busy machine take any time, so nothing here has a deadline.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Fail where the other line's tests are named on the command line: to run none of them would look like success.

    Raises:
        pytest.UsageError: One of them is.
    """
    for argument in config.args:
        path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
        if _is_of_other_line(path):
            raise pytest.UsageError(f"{argument} is not for the installed SkyRL, {_skyrl_version()}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the other line's tests out of a run of everything."""
    return True if _is_of_other_line(collection_path) else None


def _is_of_other_line(path: Path) -> bool:
    """Whether ``path`` holds nothing but tests for a SkyRL that is not installed."""
    if _skyrl_version().startswith("0.4."):
        return path.is_relative_to(HERE) and path not in ONLY_04.parents and not path.is_relative_to(ONLY_04)
    return path.is_relative_to(ONLY_04)


@cache
def _skyrl_version() -> str:
    try:
        return installed_skyrl()[0]
    except UnsupportedSkyRLError as error:
        return error.got


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
    built = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
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


def _environment(folder: Path, wheel: Path | None) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    if wheel is not None:
        # The wheel is pure and has no data, so that to unpack it is to install it, but for its command.
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(_site_packages(python))
    return python


def _site_packages(python: Path) -> Path:
    (folder,) = python.parent.parent.glob("lib/python*/site-packages")
    return folder
