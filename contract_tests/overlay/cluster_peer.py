"""Ray with two nodes, skyrl-r3 installed on one of them; cluster_suite.py starts this script.

``build BARE DOUBLE MODULE FUNCTION`` makes the cluster and is its driver on the side that has the package: the first
node's processes run in this interpreter, the second node's in BARE, an interpreter without skyrl-r3. ``visit ADDRESS
DOUBLE MODULE FUNCTION`` is a driver without the package, started by the first. Its workers import the double of SkyRL,
because they would need long to import the real one a second time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

WITH, WITHOUT = "with", "without"
NODE: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
LONGEST_S = 90


def on(node: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a task on one of the nodes. Without a CPU of its own, so that each node needs one worker only."""
    return ray.remote(function).options(resources={node: 0.1}, num_cpus=0, **options).remote(*arguments)


def outcome(reference: Any) -> dict[str, Any]:
    """What a driver sees of it: a value, or an error."""
    try:
        return {"value": ray.get(reference, timeout=LONGEST_S)}
    except Exception as error:
        fields = [getattr(error, name, None) for name in ("field", "expected", "got")]
        return {"error": type(error).__name__, "message": str(error), "fields": fields}


# Tasks. They are sent by value and import what they need where they run.


def look(module: str, function: str) -> dict[str, Any]:
    """Where this is, and whether SkyRL is patched here."""
    found = attrgetter(function)(importlib.import_module(module))
    return {
        "package": find_spec("skyrl_r3") is not None,
        "patched": hasattr(found, "__wrapped__"),
        "python": sys.executable,
        "node": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
        "finders": [type(finder).__name__ for finder in sys.meta_path].count("SkyRLFinder"),
    }


def capture() -> Any:
    """What a patched client of SkyRL 0.3 hands on."""
    from skyrl_r3 import RoutedExperts

    return RoutedExperts(np.arange(12, dtype=np.int16).reshape(3, 2, 2), np.arange(3, dtype=np.int32))


def generator_output() -> dict[str, Any]:
    return {"response_ids": [[1, 2]], "rollout_expert_indices": [capture()]}


def ids(dtype: str) -> np.ndarray:
    return np.arange(12, dtype=dtype).reshape(3, 2, 2)


def refuse() -> None:
    from skyrl_r3.errors import ReplyError

    raise ReplyError("routed_experts.shape", expected="[41, 48, 8]", got="[42, 48, 8]", where="sample 3")


def describe(value: Any) -> list[Any]:
    """What has arrived."""
    value = getattr(value, "ids", value)
    return [type(value).__name__, str(value.dtype), np.asarray(value).tolist(), os.getpid()]


def count(batch: dict[str, Any]) -> int:
    return len(batch["rollout_expert_indices"])


class Worker:
    """SkyRL's workers and servers are actors."""

    def pid(self) -> int:
        return os.getpid()


def compare(value: Any, module: str, function: str) -> list[bool]:
    """Whether ``value`` is this process's own function, and patched."""
    return [value is attrgetter(function)(importlib.import_module(module)), hasattr(value, "__wrapped__")]


# Drivers


def drive(module: str, function: str) -> dict[str, Any]:
    """Send things both ways, as seen by the driver that this process is."""
    looks = {node: on(node, look, module, function) for node in (WITH, WITHOUT)}
    report: dict[str, Any] = {"driver": look(module, function)}
    report["nodes"] = {node: outcome(reference) for node, reference in looks.items()}
    routes, batch = on(WITH, capture), on(WITH, generator_output)
    report["kept"] = outcome(on(WITH, describe, routes))
    # A driver that has the package could read these; one that has not, and a worker that has not, cannot.
    report["routes"] = {"by reference": outcome(on(WITHOUT, describe, routes))}
    report["routes"]["in a batch"] = outcome(on(WITHOUT, count, batch))
    report["after"] = outcome(on(WITHOUT, describe, on(WITH, ids, "uint8")))
    report["arrays"] = {
        f"{dtype} {a} to {b}": outcome(on(b, describe, on(a, ids, dtype)))
        for dtype in ("uint8", "int16", "int32")
        for a, b in ((WITH, WITHOUT), (WITHOUT, WITH))
    }
    here = attrgetter(function)(importlib.import_module(module))
    report["functions"] = {node: outcome(on(node, compare, here, module, function)) for node in (WITH, WITHOUT)}
    report["raised"] = outcome(on(WITH, refuse))
    report["raised on the way"] = outcome(on(WITHOUT, describe, on(WITH, refuse)))
    got = outcome(routes)
    report["got"] = {"value": describe(got["value"])} if "value" in got else got
    if report["driver"]["package"]:
        report["routes"]["by value"] = outcome(on(WITHOUT, describe, capture()))
    return report


def drive_with_setup_hook() -> dict[str, Any]:
    """What becomes of a job that names ``enable`` for all of its workers."""
    worker: Any = ray.remote(Worker)
    actors = {node: worker.options(resources={node: 0.1}, num_cpus=0).remote() for node in (WITH, WITHOUT)}
    return {node: outcome(actor.pid.remote()) for node, actor in actors.items()}


def connect(address: str, **options: Any) -> None:
    ray.init(address=address, log_to_driver=False, _node_ip_address="127.0.0.1", **options)


def build(bare_python: str, double: str, module: str, function: str) -> dict[str, Any]:
    """Both drivers' reports."""
    own, cluster = sys.executable, Cluster()
    try:
        cluster.add_node(resources={WITH: 1}, include_dashboard=False, **NODE)
        # Ray starts every process of a node with the interpreter that adds the node, its workers too.
        sys.executable = bare_python
        cluster.add_node(resources={WITHOUT: 1}, **NODE)
        sys.executable = own
        address = str(cluster.address)
        connect(address)
        reports = {"with": drive(module, function)}
        ray.shutdown()
        command = [bare_python, __file__, "visit", address, double, module, function]
        environment = {**os.environ, "PYTHONPATH": double}
        # Whoever has started this process ends both, with their stacks, if this takes too long.
        visitor = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        reports["without"] = json.loads(visitor.stdout.splitlines()[-1])
        connect(address, runtime_env={"worker_process_setup_hook": "skyrl_r3.enable"})
        reports["hook"] = drive_with_setup_hook()
        return reports
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    verb, *arguments = sys.argv[1:]
    if verb == "build":
        print("\nREPORT " + json.dumps(build(*arguments)))
        return
    address, double, module, function = arguments
    connect(address, runtime_env={"env_vars": {"PYTHONPATH": double}})
    try:
        print("\n" + json.dumps(drive(module, function)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
