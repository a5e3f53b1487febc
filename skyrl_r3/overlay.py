"""Put the hooks into SkyRL and take them out again: all of them, or none.

``enable()`` and the import hook share one ledger per process. A target whose module is not imported yet is pending,
and is replaced as soon as its import is done.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from skyrl_r3 import autoload, manifest
from skyrl_r3.errors import UnsupportedSkyRLError
from skyrl_r3.manifest import Target

logger = logging.getLogger(__name__)
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
        state: ``applied``; ``pending``: its module is not imported yet, or the overlay is off; ``drifted``: SkyRL's
            source is not what the patch was written for; ``absent``: no such function; ``superseded``: somebody
            replaced our replacement.
        version: Of SkyRL.
        pid: Of the process.
        detail: What there is to say about it, or nothing.
    """

    target: str
    state: str
    version: str
    pid: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Applied:
    """A replaced attribute of ``owner``; ``before`` and ``now`` as found in its ``__dict__``."""

    target: str
    owner: Any
    name: str
    before: Any
    now: Any

    @property
    def replacement(self) -> Any:
        """The function in ``now``; its ``__wrapped__`` is the original."""
        return getattr(self.now, "__func__", self.now)

    def current(self) -> Any:
        return inspect.getattr_static(self.owner, self.name)

    def undo(self) -> None:
        """Put ``before`` back, unless somebody else has replaced ``now``."""
        if self.current() is self.now:
            setattr(self.owner, self.name, self.before)
        if self.current() is self.before:
            _ledger.remove(self)


_lock = threading.RLock()
_ledger: list[_Applied] = []


def is_off() -> bool:
    """Whether ``SKYRL_R3=off`` disables the overlay in this process."""
    return os.environ.get(autoload.SWITCH, "").strip().lower() == autoload.OFF


def enable() -> list[TargetStatus]:
    """Apply the overlay in this process, for what is imported already and for what will be.

    Needed where the wheel's ``.pth`` file is not read: editable installs and notebooks. For Ray workers name it as
    the job's ``worker_process_setup_hook``. To enable twice is to enable once.

    Returns:
        The state of every target, as :func:`status` gives it.

    Raises:
        UnsupportedSkyRLError: SkyRL is missing or of another release than those supported.
        DriftError: A target is not what its patch was written for. Nothing is applied.
    """
    if is_off():
        logger.warning("skyrl-r3 stays off: %s=%s is set", autoload.SWITCH, autoload.OFF)
        return status()
    with _lock:
        plan = manifest.plan()
        error = plan.error()
        if error is not None:
            raise error
        autoload.install()
        with ExitStack() as undo:
            for target in plan.manifest.targets:
                module = sys.modules.get(target.module)
                if module is not None:
                    _apply(target, module, target.replacement, undo)
            undo.pop_all()
    return status()


def disable() -> list[TargetStatus]:
    """Put SkyRL's own functions back in this process, and leave later imports alone.

    Where somebody has replaced or wrapped our replacement, theirs stays, and :func:`status` and a warning name it.

    Returns:
        The state of every target.
    """
    with _lock:
        autoload.uninstall()
        for applied in list(_ledger):
            applied.undo()
        for applied in _ledger:
            logger.warning("%s stays as it is: it was replaced by %s", applied.target, _whose(applied))
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
    try:
        return any(target.module == module_name for target in manifest.plan().manifest.targets)
    except UnsupportedSkyRLError as error:
        _warn_once(f"skyrl-r3 is not active: {error}")
    except Exception as error:
        # SkyRL's imports must not fail because of us, least of all where nobody asked for the overlay.
        _warn_once(f"skyrl-r3 is not active: it could not read the installed SkyRL: {error!r}")
    return False


def module_loaded(module: ModuleType, module_name: str) -> None:
    """Replace the targets in a module that was just imported. Called by the import hook; never raises.

    Where the installed SkyRL has drifted, the targets that can see SkyRL's flag are replaced by ones that raise when
    the flag is on, and nothing else is touched.
    """
    with _lock, ExitStack() as undo:
        try:
            plan = manifest.plan()
            error = plan.error()
            for target in plan.manifest.targets:
                if target.module != module_name:
                    continue
                if error is None:
                    _apply(target, module, target.replacement, undo)
                elif target.refusal and plan.found[target.name] is not None:
                    _apply(target, module, target.refusal, undo, error)
            undo.pop_all()
        except Exception:
            logger.exception("skyrl-r3 could not patch %s and leaves it as it is", module_name)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _apply(target: Target, module: ModuleType, factory_name: str, undo: ExitStack, *extra: Any) -> None:
    owner, name = _owner(module, target.attribute)
    if any(applied.owner is owner and applied.name == name for applied in _ledger):
        return
    before = inspect.getattr_static(owner, name)
    kind = type(before) if isinstance(before, staticmethod | classmethod) else None
    function = before.__func__ if kind else before
    if any(applied.replacement is function for applied in _ledger):
        # Imported by name from a module that is patched already.
        before = function = function.__wrapped__
    # One function under several names has one replacement: pickle finds functions by name and identity.
    replacement = next(
        (applied.replacement for applied in _ledger if applied.replacement.__wrapped__ is function), None
    )
    if replacement is None:
        replacement = _load(factory_name)(function, *extra)
    now = kind(replacement) if kind else replacement
    applied = _Applied(target=target.name, owner=owner, name=name, before=before, now=now)
    setattr(owner, name, now)
    _ledger.append(applied)
    undo.callback(applied.undo)
    logger.info("Patched %s", target.name)


def _owner(module: ModuleType, attribute: str) -> tuple[Any, str]:
    *classes, name = attribute.split(".")
    owner: Any = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _state(plan: manifest.Plan, target: Target) -> dict[str, str]:
    found = plan.found[target.name]
    applied = next((applied for applied in _ledger if applied.target == target.name), None)
    if found is None:
        return {"state": "absent", "detail": f"not in SkyRL {plan.version}"}
    if target in plan.drifted():
        return {"state": "drifted", "detail": f"expected {target.signature}, got {found.signature}"}
    if applied is None:
        return {"state": "pending", "detail": "off" if is_off() or not autoload.installed() else "not imported yet"}
    if applied.current() is not applied.now:
        return {"state": "superseded", "detail": f"by {_whose(applied)}"}
    edited = f"its source differs from that of SkyRL {plan.manifest.reviewed}" if plan.edited(target) else ""
    return {"state": "applied", "detail": edited}


def _whose(applied: _Applied) -> str:
    current = applied.current()
    return f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
