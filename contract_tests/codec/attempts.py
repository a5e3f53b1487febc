"""Calls of an implementation with what is wrong, and what has to be true of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from contract_tests.adapter import LONGEST_ERROR, Adapter


def attempt(impl: Adapter, call: Callable[[Any], Any], payload: Any) -> Any:
    """What ``call`` makes of ``payload``, or the refusal. Other exceptions are faults.

    A refusal has to be short, and the payload has to be left as it was.
    """
    before = _seen(payload)
    found = _outcome(impl, call, payload)
    if isinstance(found, Exception) and len(text := str(found)) >= LONGEST_ERROR:
        # An error of the suite's own, without the other, which would be printed.
        raise AssertionError(f"the error has {len(text):,} characters: {text[:100]}…")
    if _seen(payload) != before:
        raise AssertionError(f"what was given was changed: {_short(before)} to {_short(_seen(payload))}")
    return found


def refused(impl: Adapter, call: Callable[[Any], Any], payload: Any) -> None:
    """Check that ``payload`` is refused."""
    found = attempt(impl, call, payload)
    if not isinstance(found, Exception):
        pytest.fail(f"taken, although wrong: {_short(_seen(payload))} gave {_short(repr(found))}")


def _outcome(impl: Adapter, call: Callable[[Any], Any], payload: Any) -> Any:
    try:
        return call(payload)
    except impl.refusals as error:
        return error


def _seen(payload: Any) -> str:
    """What is in ``payload``, in a form in which NaN is itself and 1 is not True."""
    if isinstance(payload, memoryview):
        return f"memoryview of {bytes(payload)!r}"
    return repr({key: _seen(value) for key, value in payload.items()} if isinstance(payload, Mapping) else payload)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text):,} characters)"
