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

logger = logging.getLogger(__name__)


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
        return getattr(self.now, "__func__", self.now)

    def current(self) -> Any:
        """What is there now."""
        return inspect.getattr_static(self.owner, self.name)

    def superseded_by(self) -> str:
        """Dotted name of what somebody else has put in the place of ``now``; empty if nobody has."""
        current = self.current()
        if current is self.now:
            return ""
        return f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"

    def undo(self) -> None:
        """Put ``before`` back, unless somebody else has replaced ``now``."""
        if self.current() is self.now:
            setattr(self.owner, self.name, self.before)
        if self.current() is self.before:
            ledger.remove(self)


ledger: list[Applied] = []
"""In the order of their replacement. The overlay's lock guards it."""


def apply(target: Target, module: Any, refuse_with: OverlayError | None = None) -> Applied:
    """Replace ``target`` in ``module``, or have it raise ``refuse_with`` when the flag is on."""
    owner, name = _owner(module, target.attribute)
    before = inspect.getattr_static(owner, name)
    for applied in list(ledger):
        if applied.owner is owner and applied.name == name:
            if applied.current() is not applied.before:
                return applied
            ledger.remove(applied)  # Somebody has put SkyRL's own function back.
    kind = type(before) if isinstance(before, staticmethod | classmethod) else None
    function: Any = before.__func__ if kind else before
    if any(applied.replacement is function for applied in ledger):
        # Imported by name from a module that is patched already.
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
    ledger.append(applied)
    logger.info("%s %s", "Guarded" if refuses else "Patched", target.name)
    return applied


def _owner(module: Any, attribute: str) -> tuple[Any, str]:
    *classes, name = attribute.split(".")
    owner: Any = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
