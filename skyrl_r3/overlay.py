"""Put the hooks into SkyRL and take them out again: all of them, or none.

``enable()`` and the import hook share one ledger per process. A target whose module is not imported yet is pending,
and is replaced as soon as its import is done.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from skyrl_r3 import autoload, manifest, notes
from skyrl_r3.errors import OverlayError, UnsupportedSkyRLError
from skyrl_r3.lacking import lacking
from skyrl_r3.ledger import apply, ledger, put_back
from skyrl_r3.manifest import Target

logger: logging.Logger = logging.getLogger(__name__)
# A dependency of vLLM's sets the root logger to ERROR when it is imported (model_hosting_container_standards, seen with
# vLLM 0.26.0), which would swallow this package's warnings in the server's process.
_package_logger = logging.getLogger("skyrl_r3")
if _package_logger.level == logging.NOTSET:
    _package_logger.setLevel(logging.INFO)


@dataclass(frozen=True, kw_only=True)
class TargetStatus:
    """State of one target in one process.

    Attributes:
        target: Dotted name of what is replaced.
        state: ``applied``; ``pending``: its module is not imported yet, or the overlay is off, or another target does
            not fit; ``drifted``: SkyRL's source is not what the patch was written for, or the patch failed;
            ``absent``: no such function; ``superseded``: somebody replaced our replacement.
        version: Of SkyRL.
        pid: Of the process.
        detail: What there is to say about it, or nothing.
    """

    target: str
    state: str
    version: str
    pid: int
    detail: str = ""


class _Script:
    """The namespace of a module that is run as a script, which need not be in ``sys.modules``."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


_lock = threading.RLock()
_failures: list[OverlayError] = []
"""Why a patch could not be applied although its target fits. From then on nothing is applied in this process."""


def enable(*, checks: str | None = None) -> list[TargetStatus]:
    """Apply the overlay in this process, for what is imported already and for what will be.

    Needed where the ``.pth`` file is not read, as with a checkout on ``PYTHONPATH``. For Ray workers name it as
    the job's ``worker_process_setup_hook``. To enable twice is to enable once.

    Args:
        checks: The policy for wrong routes, in the place of ``SKYRL_R3_CHECKS``: see :mod:`skyrl_r3.policy`. It stays
            until another one is given.

    Returns:
        The state of every target, as :func:`status` gives it.

    Raises:
        UnsupportedSkyRLError: SkyRL is missing or of another release than those supported.
        DriftError: A target is not what its patch was written for. Nothing is applied.
        OverlayError: ``checks`` describes no policy.
    """
    if checks is not None:
        # Not at the top: the import hook imports this module, and must not bring numpy into every process.
        from skyrl_r3 import policy

        policy.use(checks)
    if autoload.is_off():
        value = os.environ[autoload.SWITCH].strip().lower()
        logger.warning("skyrl-r3 stays off: %s=%s is set", autoload.SWITCH, value)
        return status()
    with _lock:
        plan = manifest.plan()
        error = _error(plan)
        if error is not None:
            raise error
        hooked = autoload.installed()
        autoload.install()
        try:
            for target in plan.manifest.targets:
                module = sys.modules.get(target.module)
                # One that is being imported has not defined its functions yet; the import hook is called when it has.
                if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                    apply(target, module)
            notes.note(plan.warning())
        except Exception as failure:
            if hooked:
                _fail(failure)
            else:
                disable()
            raise
    return status()


def disable() -> list[TargetStatus]:
    """Put SkyRL's own functions back in this process, and leave later imports alone.

    Where somebody has replaced or wrapped our replacement, theirs stays, and :func:`status` and a warning name it.

    Returns:
        The state of every target.
    """
    with _lock:
        autoload.uninstall()
        for applied in list(ledger):
            applied.undo()
        for applied in ledger:
            logger.warning("%s stays as it is: it was replaced by %s", applied.target, applied.superseded_by())
    return status()


def status() -> list[TargetStatus]:
    """State of every target in this process; empty where no supported SkyRL is installed."""
    try:
        plan = manifest.plan()
    except UnsupportedSkyRLError:
        return []
    with _lock:
        return [
            TargetStatus(target=target.name, version=plan.version, pid=os.getpid(), **_state(plan, target))
            for target in plan.manifest.targets
        ]


def wanted(module_name: str) -> bool:
    """Whether a target is in ``module_name``. Asked by the import hook for each module of SkyRL's; never raises."""
    if autoload.is_off():
        return False
    try:
        return any(target.module == module_name for target in manifest.plan().manifest.targets)
    except OverlayError as error:
        _warn_once(f"skyrl-r3 is not active: {error}")
    except Exception as error:
        # SkyRL's imports must not fail because of us, least of all where nobody asked for the overlay.
        _warn_once(f"skyrl-r3 is not active: it could not read the installed SkyRL: {error!r}")
    return False


def script_loaded(namespace: dict[str, Any], module_name: str) -> None:
    """:func:`module_loaded` for a module that is run as a script, before its main block."""
    module_loaded(_Script(namespace), module_name)


def module_loaded(module: Any, module_name: str) -> None:
    """Replace the targets in a module that was just executed. Called by the import hook; never raises.

    Where a target does not fit, or its patch fails, whatever was applied is taken back, and the targets that can see
    SkyRL's flag are replaced by ones that raise when the flag is on.
    """
    with _lock:
        plan = manifest.plan()
        # After a reload the module's functions are SkyRL's again.
        ledger[:] = [applied for applied in ledger if applied.module is not module or not applied.superseded_by()]
        targets = [target for target in plan.manifest.targets if target.module == module_name]
        on = autoload.installed()  # Or it was disabled while the module was being executed.
        if on and _error(plan) is None:
            try:
                for target in targets:
                    apply(target, module)
                notes.note(plan.warning())
                return
            except Exception as error:
                _fail(error)
        for target in targets:
            _restore(plan, target, module)
            if on:
                _refuse(plan, target, module)


def _fail(error: Exception) -> None:
    """Take back everything that is applied, and refuse in its place."""
    needed = lacking(error)
    cure = f"{needed}, on every node." if needed else "Please report this."
    logger.error("skyrl-r3 could not patch SkyRL and leaves it as it is. %s", cure, exc_info=error)
    hint = f"{cure} Without R3, or with SKYRL_R3=off, SkyRL runs as ever."
    _failures.append(OverlayError("skyrl_r3", expected="patches that apply", got=repr(error), hint=hint))
    plan = manifest.plan()
    targets = {target.name: target for target in plan.manifest.targets}
    for applied in list(ledger):
        applied.undo()
        _refuse(plan, targets[applied.target], applied.module)


def _restore(plan: manifest.Plan, target: Target, module: Any) -> None:
    if plan.found[target.name] is not None:
        try:
            put_back(target, module)
        except Exception:
            logger.exception("skyrl-r3 could not put %s back", target.name)


def _refuse(plan: manifest.Plan, target: Target, module: Any) -> None:
    if target.refusal and plan.found[target.name] is not None:
        try:
            apply(target, module, _error(plan))
        except Exception:
            logger.exception("skyrl-r3 could not guard %s", target.name)


def _error(plan: manifest.Plan) -> OverlayError | None:
    return next(iter(_failures), None) or plan.error()


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _state(plan: manifest.Plan, target: Target) -> dict[str, str]:
    found = plan.found[target.name]
    # The newest entry: a module that was dropped and imported again is the one that callers have now.
    applied = next((applied for applied in reversed(ledger) if applied.target == target.name), None)
    if found is None:
        return {"state": "absent", "detail": f"not in SkyRL {plan.version}"}
    if target in plan.drifted():
        return {"state": "drifted", "detail": f"expected {target.signature}, got {found.signature}"}
    if _failures:
        return {"state": "drifted", "detail": str(_failures[0])}
    if plan.drifted():
        return {"state": "pending", "detail": f"nothing is applied: {plan.drifted()[0].name} does not fit"}
    if applied is None:
        return {
            "state": "pending",
            "detail": "off" if autoload.is_off() or not autoload.installed() else "not imported yet",
        }
    if applied.superseded_by():
        return {"state": "superseded", "detail": f"by {applied.superseded_by()}"}
    edited = f"its source differs from that of SkyRL {plan.manifest.reviewed}" if plan.edited(target) else ""
    return {"state": "applied", "detail": edited}
