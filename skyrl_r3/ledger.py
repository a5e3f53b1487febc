"""The ledger of one process: which attributes were replaced, by what, and what they were."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_r3.errors import OverlayError
from skyrl_r3.manifest import Target

__all__ = ["Applied", "apply", "ledger", "put_back"]

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Applied:
    """A replaced attribute of ``owner``; ``before`` and ``now`` as found in its ``__dict__``.

    ``module`` is the target's module, or what stands for it when it is run as a script. ``refuses`` marks the
    replacement that raises when the flag is on.
    """

    target: str
    refuses: bool
    module: Any
    owner: Any
    name: str
    before: Any
    now: Any

    @property
    def replacement(self) -> Any:
        """The function in ``now``; its ``__wrapped__`` is the original."""
        return _function(self.now)

    def current(self) -> Any:
        """What is there now."""
        return inspect.getattr_static(self.owner, self.name)

    def superseded_by(self) -> str:
        """Dotted name of what somebody else has put in the place of ``now``; empty if nobody has."""
        current = self.current()
        if current is self.now:
            return ""
        return f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"

    def is_out(self) -> bool:
        """Whether somebody has put back what we found, or a function that what we found goes around."""
        function, found = _function(self.current()), _function(self.before)
        while found is not None and found is not function:
            found = getattr(found, "__wrapped__", None)
        return found is function

    def undo(self) -> None:
        """Put ``before`` back, unless somebody else has replaced ``now``."""
        if self.current() is self.now:
            setattr(self.owner, self.name, self.before)
        if self.is_out():
            ledger.remove(self)


ledger: list[Applied] = []
"""In the order of their replacement. The overlay's lock guards it."""

_replacements: list[Any] = []
"""All there ever were in this process. One that was taken back may still be where it was imported by name."""


def apply(target: Target, module: Any, refuse_with: OverlayError | None = None) -> Applied:
    """Replace ``target`` in ``module``, or have it raise ``refuse_with`` when the flag is on."""
    owner, name = _owner(module, target.attribute)
    before = inspect.getattr_static(owner, name)
    for applied in list(ledger):
        if applied.owner is owner and applied.name == name:
            if not applied.is_out():
                return applied
            ledger.remove(applied)
    kind = type(before) if isinstance(before, staticmethod | classmethod) else None
    function = _function(before)
    if _is_ours(function):
        # Imported by name from a module that was patched at that time.
        before = function = function.__wrapped__
    # One function under several names has one replacement: pickle finds functions by name and identity.
    made = (applied.replacement for applied in ledger if applied.replacement.__wrapped__ is function)
    replacement = next(made, None)
    if replacement is None and refuse_with is None:
        replacement = _load(target.replacement)(function)
    elif replacement is None:
        replacement = _load(target.refusal)(function, refuse_with)
    now = kind(replacement) if kind else replacement
    refuses = refuse_with is not None
    applied = Applied(
        target=target.name, refuses=refuses, module=module, owner=owner, name=name, before=before, now=now
    )
    setattr(owner, name, now)
    _replacements.append(replacement)
    ledger.append(applied)
    logger.info("%s %s", "Guarded" if refuses else "Patched", target.name)
    return applied


def put_back(target: Target, module: Any) -> None:
    """Put SkyRL's function in the place of a replacement that was taken back after ``module`` had imported it."""
    owner, name = _owner(module, target.attribute)
    bound = inspect.getattr_static(owner, name)
    if _is_ours(bound) and not any(applied.owner is owner and applied.now is bound for applied in ledger):
        setattr(owner, name, bound.__wrapped__)


def _function(attribute: Any) -> Any:
    return getattr(attribute, "__func__", attribute)


def _is_ours(function: Any) -> bool:
    return any(function is replacement for replacement in _replacements)


def _owner(module: Any, attribute: str) -> tuple[Any, str]:
    *classes, name = attribute.split(".")
    owner: Any = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
