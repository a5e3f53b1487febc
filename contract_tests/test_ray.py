"""Real Ray: the overlay reaches its worker processes, which the driver cannot patch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import REPO, run_python
from contract_tests.fake_skyrl import CONVERT, PREPROCESS

# A task with a runtime_env of its own gets a worker process of its own, so that one Ray serves several cases.
DRIVER = f"""
import json, os, sys
import ray

def look():
    import os, sys
    at_start = [type(finder).__name__ for finder in sys.meta_path].count("SkyRLFinder")
    import {PREPROCESS}
    import skyrl_r3
    row = next(row for row in skyrl_r3.status() if row.target == {f"{PREPROCESS}.{CONVERT}"!r})
    function = {PREPROCESS}.{CONVERT}
    return {{"state": row.state, "detail": row.detail, "own": row.pid == os.getpid(), "pid": row.pid,
            "finder": at_start, "patched": hasattr(function, "__wrapped__"), "home": skyrl_r3.__file__}}

def call(function):
    return [function is __import__("sys").modules[function.__module__].{CONVERT}, hasattr(function, "__wrapped__")]

ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env=RUNTIME_ENV,
         log_to_driver=False)
try:
    report = {{"driver": os.getpid(), "worker": ray.get(ray.remote(look).remote())}}
    if FUNCTION:
        import {PREPROCESS}, skyrl_r3
        skyrl_r3.enable()
        report["sent"] = ray.get(ray.remote(call).remote({PREPROCESS}.{CONVERT}))
    if SWITCH_OFF:
        report["off"] = ray.get(ray.remote(look).options(runtime_env={{"env_vars": SWITCH_OFF}}).remote())
finally:
    ray.shutdown()
print("\\nREPORT " + json.dumps(report))
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def driver(*, runtime_env: object = None, switch_off: object = None, function: bool = False) -> str:
    """Code of a driver whose workers look at themselves."""
    code = DRIVER.replace("RUNTIME_ENV", repr(runtime_env)).replace("SWITCH_OFF", repr(switch_off))
    return code.replace("FUNCTION", repr(function))


@pytest.fixture(scope="module")
def installed(wheel_python: Path, fake: Path) -> dict[str, Any]:
    """What workers say where the wheel is installed: one with the real SkyRL, one switched off with the double."""
    code = driver(switch_off={"SKYRL_R3": "off", "PYTHONPATH": str(fake)})
    return run_python([str(wheel_python), "-c", code], env=QUIET).values


@pytest.fixture(scope="module")
def by_hand(fake: Path) -> dict[str, Any]:
    """The same from a checkout on the path, as an editable install is: no ``.pth`` file, Ray's setup hook instead."""
    code = driver(runtime_env={"worker_process_setup_hook": "skyrl_r3.enable"}, function=True)
    return run_python([sys.executable, "-c", code], path=[fake, REPO], env=QUIET).values


def test_worker_is_patched_where_the_wheel_is_installed(installed: dict[str, Any], wheel_python: Path) -> None:
    worker = installed["worker"]
    assert (worker["state"], worker["detail"]) == ("applied", "")
    assert worker["patched"]
    assert worker["finder"] == 1
    assert worker["own"]
    assert worker["pid"] != installed["driver"]
    assert Path(worker["home"]).is_relative_to(wheel_python.parent.parent)


def test_switched_off_in_a_worker(installed: dict[str, Any]) -> None:
    off = installed["off"]
    assert (off["state"], off["detail"]) == ("pending", "off")
    assert not off["patched"]
    assert off["finder"] == 0
    assert off["pid"] not in (installed["driver"], installed["worker"]["pid"])


def test_worker_process_setup_hook_without_the_wheel(by_hand: dict[str, Any]) -> None:
    worker = by_hand["worker"]
    assert worker["state"] == "applied"
    assert worker["patched"]
    assert worker["pid"] != by_hand["driver"]
    assert Path(worker["home"]).is_relative_to(REPO)


def test_patched_function_travels_to_a_worker_by_name(by_hand: dict[str, Any]) -> None:
    """The worker gets its own patched function, not a copy of the driver's."""
    assert by_hand["sent"] == [True, True]
