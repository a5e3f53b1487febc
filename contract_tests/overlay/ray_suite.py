"""Real Ray: the overlay reaches its worker processes, which the driver cannot patch.

A line's tests derive from :class:`RayContract` and say what they look at in the workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import REPO, run_python
from contract_tests.overlay import fake_skyrl

# A task with a runtime_env of its own gets a worker process of its own, so that one Ray serves several cases.
DRIVER = """
import json, os, sys
import ray

def look():
    import os, sys
    at_start = [type(finder).__name__ for finder in sys.meta_path].count("SkyRLFinder")
    import MODULE
    import skyrl_r3
    row = next(row for row in skyrl_r3.status() if row.target == "MODULE.FUNCTION")
    function = MODULE.FUNCTION
    return {"state": row.state, "detail": row.detail, "own": row.pid == os.getpid(), "pid": row.pid,
            "finder": at_start, "patched": hasattr(function, "__wrapped__"), "home": skyrl_r3.__file__}

def call(function):
    return [function is __import__("sys").modules[function.__module__].FUNCTION, hasattr(function, "__wrapped__")]

ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env=RUNTIME_ENV,
         log_to_driver=False)
try:
    report = {"driver": os.getpid(), "worker": ray.get(ray.remote(look).remote())}
    if SEND:
        import MODULE, skyrl_r3
        skyrl_r3.enable()
        report["sent"] = ray.get(ray.remote(call).remote(MODULE.FUNCTION))
    if SWITCH_OFF:
        report["off"] = ray.get(ray.remote(look).options(runtime_env={"env_vars": SWITCH_OFF}).remote())
finally:
    ray.shutdown()
print("\\nREPORT " + json.dumps(report))
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


class RayContract:
    """Tests that hold in every line.

    Attributes:
        release: The SkyRL of the line.
        module: One with a target.
        function: The target, a function of that module.
    """

    release: str
    module: str
    function: str

    def driver(self, *, runtime_env: object = None, switch_off: object = None, send: bool = False) -> str:
        """Code of a driver whose workers look at themselves."""
        values = {"RUNTIME_ENV": repr(runtime_env), "SWITCH_OFF": repr(switch_off), "SEND": repr(send)}
        values |= {"MODULE": self.module, "FUNCTION": self.function}
        code = DRIVER
        for name, value in values.items():
            code = code.replace(name, value)
        return code

    @pytest.fixture(scope="class")
    def double(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return fake_skyrl.build(tmp_path_factory.mktemp("double"), like=self.release)

    @pytest.fixture(scope="class")
    def installed(self, wheel_python: Path, double: Path) -> dict[str, Any]:
        """Of workers where the wheel is installed: one with the real SkyRL, one switched off with the double."""
        code = self.driver(switch_off={"SKYRL_R3": "off", "PYTHONPATH": str(double)})
        return run_python([str(wheel_python), "-c", code], env=QUIET).values

    @pytest.fixture(scope="class")
    def by_hand(self, double: Path) -> dict[str, Any]:
        """From a checkout on the path: no ``.pth`` file, Ray's setup hook instead."""
        code = self.driver(runtime_env={"worker_process_setup_hook": "skyrl_r3.enable"}, send=True)
        return run_python([sys.executable, "-c", code], path=[double, REPO], env=QUIET).values

    def test_worker_is_patched_where_the_wheel_is_installed(
        self, installed: dict[str, Any], wheel_python: Path
    ) -> None:
        worker = installed["worker"]
        assert (worker["state"], worker["detail"]) == ("applied", "")
        assert worker["patched"]
        assert worker["finder"] == 1
        assert worker["own"]
        assert worker["pid"] != installed["driver"]
        assert Path(worker["home"]).is_relative_to(wheel_python.parent.parent)

    def test_switched_off_in_a_worker(self, installed: dict[str, Any]) -> None:
        off = installed["off"]
        assert (off["state"], off["detail"]) == ("pending", "off")
        assert not off["patched"]
        assert off["finder"] == 0
        assert off["pid"] not in (installed["driver"], installed["worker"]["pid"])

    def test_worker_process_setup_hook_without_the_wheel(self, by_hand: dict[str, Any]) -> None:
        worker = by_hand["worker"]
        assert worker["state"] == "applied"
        assert worker["patched"]
        assert worker["pid"] != by_hand["driver"]
        assert Path(worker["home"]).is_relative_to(REPO)

    def test_patched_function_travels_to_a_worker_by_name(self, by_hand: dict[str, Any]) -> None:
        """The worker gets its own patched function, not a copy of the driver's."""
        assert by_hand["sent"] == [True, True]
