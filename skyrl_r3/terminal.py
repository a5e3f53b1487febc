"""What goes to a terminal, a pipe or a file: without what one of them would obey, choke on, or not take any more."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

__all__ = ["Page", "emit", "plain", "plain_data"]


def plain(text: str, encoding: str | None) -> str:
    """``text`` from an untrusted source without what a terminal would obey, or ``encoding`` has no byte for."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def plain_data(found: Any, encoding: str | None) -> Any:
    """``found``, which is ready for JSON, with each of its texts, and of its keys, made :func:`plain`."""
    if isinstance(found, str):
        return plain(found, encoding)
    if isinstance(found, list):
        return [plain_data(item, encoding) for item in found]
    if isinstance(found, dict):
        return {plain_data(key, encoding): plain_data(item, encoding) for key, item in found.items()}
    return found


class Page(io.StringIO):
    """What is to be written to stdout at once, and looks like it: for libraries that write as their file can take."""

    encoding: str = property(lambda _: getattr(sys.stdout, "encoding", None) or "utf-8")  # type: ignore

    def isatty(self) -> bool:
        """Whether stdout is a terminal."""
        return sys.stdout is not None and sys.stdout.isatty()


def emit(text: str) -> bool:
    """Write ``text`` to stdout. Whether it got there, or nobody wants it: stdout is closed, or its reader has gone.

    Where it did not, as on a full disk, stderr says why.
    """
    if sys.stdout is None:  # Closed before Python started.
        return True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would be tried again, and reported, when Python ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if error.errno == errno.EPIPE:
            return True
        if sys.stderr is not None:
            sys.stderr.write(f"skyrl-r3: cannot write to stdout: {error.strerror}\n")
        return False
    return True
