"""``skyrl-r3 status``."""

from __future__ import annotations


def status() -> None:
    """What is installed, what of it is patched, and what is to be done next. Takes a second."""
