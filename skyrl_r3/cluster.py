"""Ask a worker process on each node of the running Ray cluster what is installed there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from skyrl_r3 import aside
from skyrl_r3.installation import Problem

LIMIT_S = 60.0
"""For all nodes together. A worker process starts in a few seconds; a node without a free one takes longer."""
CONNECT_S = 30.0
"""To import Ray and to find the cluster."""
_GO = "Run this on a node of the cluster, with its Ray and its Python, or set RAY_ADDRESS to the cluster's address."


def look() -> dict[str, Any]:
    """What the process it runs in finds: ``facts`` and ``problems``. Needs nothing of this package."""
    try:
        from dataclasses import asdict

        from skyrl_r3 import installation

        facts = installation.facts()
        return {"facts": facts, "problems": [asdict(problem) for problem in installation.problems(facts)]}
    except ImportError as error:
        import sys

        cure = (
            "Install this release of skyrl-r3 on the node, in the environment that Ray's workers run in. "
            "What a job brings in its runtime_env is not seen here."
        )
        problem = {"kind": "no-skyrl-r3", "what": f"{error} ({sys.executable})", "cure": cure}
        return {"facts": None, "problems": [problem]}


def ask_nodes() -> list[dict[str, Any]]:
    """What :func:`look` returns on each node that is alive, with its ``address``: None where none could be asked.

    In a process of its own, as Ray may wait for an address for ever.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address == "local":
        what = "RAY_ADDRESS=local starts a cluster instead of finding one"
        return [_without(None, "no-cluster", what, f"unset RAY_ADDRESS. {_GO}")]
    ran = aside.run("skyrl_r3.cluster:steps", limit_s=CONNECT_S + LIMIT_S)
    if ran.values:
        return ran.values[-1]
    at = f" at RAY_ADDRESS={address}" if address else ""
    return [_without(None, "no-cluster", f"the Ray cluster{at} could not be asked: {ran.ended}", _GO)]


def differences(nodes: list[dict[str, Any]], here: dict[str, Any]) -> list[Problem]:
    """What is of several versions among the ``nodes`` that told, and this environment if SkyRL could be run from it."""
    told = [(node["address"], node["facts"]) for node in nodes if node["facts"]]
    if told and here["skyrl"]["version"]:
        told.append(("this environment", here))
    problems = []
    for name, key in (("skyrl-r3", "skyrl_r3"), ("SkyRL", "skyrl")):
        places: dict[str, list[str]] = {}
        for place, facts in told:
            if version := facts[key]["version"]:
                places.setdefault(version, []).append(place)
        if len(places) > 1:
            each = "; ".join(f"{version} on {', '.join(dict.fromkeys(where))}" for version, where in places.items())
            cure = f"Install the same {name} on every node, and where the run is started."
            problems.append(Problem(kind="versions", what=f"{name} is of several versions: {each}", cure=cure))
    return problems


def steps() -> Iterator[list[dict[str, Any]]]:
    """What the process does: what :func:`ask_nodes` returns is yielded once."""
    try:
        ray = import_module("ray")
        cloudpickle = import_module("ray.cloudpickle")
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    except Exception as error:
        what = f"Ray cannot be imported here: {aside.said_by(error)}"
        if isinstance(error, ModuleNotFoundError):
            what = f"Ray is not installed here: {error}"
        yield [_without(None, "no-ray", what, "Run this where ray start was run.")]
        return
    # The function travels as code, because skyrl_r3 may be missing where it arrives.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False, _skip_env_hook=True)
    except Exception as error:
        what = f"no running Ray cluster was found: {aside.said_by(error)}"
        yield [_without(None, "no-cluster", what, _GO)]
        return
    nodes = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {}
    for node in nodes:
        there = affinity(node_id=node["NodeID"], soft=False)
        asked[task.options(scheduling_strategy=there).remote()] = node["NodeManagerAddress"]
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LIMIT_S)
    yield [_result(ray, address, task if task in done else None) for task, address in asked.items()]
    ray.shutdown()


def _result(ray: Any, address: str, task: Any) -> dict[str, Any]:
    if task is None:
        return _without(
            address,
            "timeout",
            f"no answer within {LIMIT_S:g} s",
            "Its workers are busy, or end when they start: ask again, or see /tmp/ray/session_latest/logs/raylet.err.",
        )
    try:
        return {"address": address, **ray.get(task)}
    except Exception as error:
        # Ray puts the traceback in front.
        what = f"{type(error).__name__}: {str(error).strip().rpartition('\n')[2]}"
        return _without(address, "error", what, "Ray's log on the node, /tmp/ray/session_latest/logs, has the rest.")


def _without(address: str | None, kind: str, what: str, cure: str) -> dict[str, Any]:
    return {"address": address, "facts": None, "problems": [{"kind": kind, "what": what, "cure": cure}]}
