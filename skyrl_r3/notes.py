"""What is to be said as a warning, once, in a process that really uses routes: with SkyRL's flag off, nothing is."""

from __future__ import annotations

import logging

__all__ = ["note", "say"]

logger: logging.Logger = logging.getLogger(__name__)

_noted: list[str] = []
_said: set[str] = set()


def note(text: str) -> None:
    """Have ``text`` said when routes are first asked for, unless it is empty."""
    if text and text not in _noted:
        _noted.append(text)


def say() -> None:
    """Say what was noted and is not said yet. Called by the hooks that can tell that SkyRL's flag is on."""
    for text in _noted:
        if text not in _said:
            _said.add(text)
            logger.warning(text)
