"""``skyrl-r3 inspect``."""

from __future__ import annotations


def inspect() -> None:
    """Look at a saved reply or at saved routes."""
