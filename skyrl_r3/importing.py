"""Import the modules of SkyRL that have something to patch, in a process of its own: proof that they are patched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from skyrl_r3 import aside, installation
from skyrl_r3.installation import Problem

LIMIT_S = 300.0
"""For all modules together. On two cores they take half a minute."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What came of it.

    Attributes:
        facts: Those of :func:`skyrl_r3.installation.facts` after the imports; None where the process ended before.
        failed: By module, why it could not be imported.
        problems: What is wrong with that.
    """

    facts: dict[str, Any] | None
    failed: dict[str, str]
    problems: list[Problem]


def import_targets() -> Imported:
    """Import them, within :data:`LIMIT_S`."""
    ran = aside.run("skyrl_r3.importing:steps", limit_s=LIMIT_S)
    failed = {value["failed"]: value["why"] for value in ran.values if "failed" in value}
    problems = [_problem(module, f"could not be imported: {why}") for module, why in failed.items()]
    # That no server's module can be imported where there is no vLLM, as on a node of trainers alone, is as it is.
    problems = [each for each, why in zip(problems, failed.values(), strict=True) if not lacks_vllm(why)]
    facts = next((value["facts"] for value in ran.values if "facts" in value), None)
    if ran.ended:
        module = next((value["importing"] for value in reversed(ran.values) if "importing" in value), "skyrl")
        failed[module] = f"the process ended: {ran.ended}"
        problems.append(_problem(module, f"was being imported when the process ended: {ran.ended}"))
    return Imported(facts=facts, failed=failed, problems=problems)


def lacks_vllm(reason: str) -> bool:
    """Whether an import failed for want of vLLM."""
    return reason.startswith("ModuleNotFoundError: No module named 'vllm'")


def _problem(module: str, what: str) -> Problem:
    cure = f"See if it is SkyRL's own: SKYRL_R3=off python -c 'import {module}'"
    return Problem(kind="import", what=f"{module} {what}", cure=cure)


def steps() -> Iterator[dict[str, Any]]:
    """What the process does: which module is next, which ones have ``failed``, and last the ``facts``."""
    from skyrl_r3 import manifest

    for module in dict.fromkeys(target.module for target in manifest.plan().manifest.targets):
        yield {"importing": module}
        try:
            import_module(module)
        except BaseException as error:
            yield {"failed": module, "why": aside.said_by(error)}
    yield {"facts": installation.facts()}
