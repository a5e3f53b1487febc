"""The one exception tree of skyrl-r3.

Every error says which field is wrong, what was expected, what was found and where, both in its message and as
attributes, so that callers and tests can match fields instead of prose.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = [
    "BrokenRoutesError",
    "CodecError",
    "DriftError",
    "EngineError",
    "MissingRoutesError",
    "OverlayError",
    "R3Error",
    "ReplyError",
    "RouteError",
    "RoutesError",
    "UnsupportedSkyRLError",
    "describe",
]


class R3Error(Exception):
    """Base of everything that skyrl-r3 raises.

    Attributes:
        field: What is wrong, as a dotted path, for example ``routed_experts.shape``.
        expected: What would have been right.
        got: What was found.
        where: The place: a sample, a server's address, a file. Empty where the field says it all.
        hint: What to do about it. Empty where that is obvious.
    """

    def __init__(self, field: str, *, expected: str, got: str, where: str = "", hint: str = "") -> None:
        self.field: str = _cut(field)
        self.expected = expected
        self.got: str = _cut(got)
        self.where = where
        self.hint = hint
        message = f"{self.field}: expected {expected}, got {self.got}"
        if where:
            message += f" ({where})"
        if hint:
            message += f". {hint}"
        super().__init__(message)

    def at(self, where: str) -> ReplyError:
        """This error as one of the reply that came from ``where``."""
        kind = type(self) if isinstance(self, ReplyError) else ReplyError
        return kind(**self._arguments() | {"where": self._places(where)})

    def _places(self, where: str) -> str:
        return ", ".join(filter(None, (self.where, where)))

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("field", "expected", "got", "where", "hint")}

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive BaseException's own pickling, and Ray pickles what a task raises.
        return _rebuild, (type(self), self._arguments())


_LONGEST = 200
"""Characters of a value in a message. What is wrong may be a megabyte long, and is written to every log."""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _rebuild(cls: type[R3Error], arguments: dict[str, Any]) -> R3Error:
    return cls(**arguments)


class CodecError(R3Error, ValueError):
    """Expert ids or an envelope that cannot be a [rows, layers, topk] array of ids."""


class ReplyError(R3Error):
    """A reply of the inference server that arrived whole and is wrong. It is never requested again."""


class RoutesError(ReplyError):
    """The routes of a reply are wrong, and the rest of it may be right, so that one sample is lost and not the run.

    Attributes:
        kind: What was found, one of :data:`skyrl_r3.policy.ACTIONS`.
    """

    def __init__(self, field: str, *, kind: str, **rest: str) -> None:
        super().__init__(field, **rest)
        self.kind = kind

    def at(self, where: str) -> RoutesError:
        """This error at ``where``."""
        return type(self)(**self._arguments() | {"where": self._places(where)})

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"kind": self.kind}


class BrokenRoutesError(RoutesError):
    """Routes that cannot be decoded.

    Attributes:
        reply: What came with them, None after pickling.
    """

    reply: Any = None

    @classmethod
    def of(cls, error: R3Error, reply: Any) -> BrokenRoutesError:
        """``error``, which was found in the routes of ``reply``."""
        made = cls(**error._arguments(), kind="broken")
        made.reply = reply
        return made


class MissingRoutesError(RoutesError):
    """A reply without routed experts although the client asked for them."""


class RouteError(R3Error):
    """Routes that do not belong to the tokens they are handed over with."""


class OverlayError(R3Error):
    """The overlay cannot be installed on the SkyRL that was found."""


class UnsupportedSkyRLError(OverlayError):
    """SkyRL is missing or of a release that this version of skyrl-r3 has no patches for."""


class DriftError(OverlayError):
    """A function to be replaced is not what the patch was written for, so that nothing is replaced."""


class EngineError(OverlayError):
    """The inference engine cannot capture routes the way it was started. ``field`` names the flags."""


def describe(value: Any) -> str:
    """Name ``value`` shortly for the ``got`` of an error: its type, and what tells it from its like."""
    # Not imported here: that numpy is missing has to be said with one of these errors.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return f"{value.dtype.name} array {list(value.shape)}"
    if isinstance(value, str | bytes | bytearray):
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:24]!r}{'…' if len(value) > 24 else ''} ({len(value)} {unit})"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest of them.
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= 4 and all(isinstance(item, int | float) for item in value):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
