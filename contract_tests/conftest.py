"""What is run: against which implementation, in which profile, and which parts of the suite can be run here."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from skyrl_r3.errors import UnsupportedSkyRLError
from skyrl_r3.manifest import installed_skyrl

HERE = Path(__file__).parent
ONLY_04 = HERE / "overlay" / "skyrl_0_4"

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
