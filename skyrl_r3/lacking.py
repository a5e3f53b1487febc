"""Whether an exception is about a package that skyrl-r3 needs, and not about skyrl-r3. Standard library only."""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["lacking"]


def lacking(error: BaseException) -> str:
    """Which package skyrl-r3 needs and cannot import, why, and how to get it; empty if ``error`` is about none.

    That is one that is missing or too old, or one with a module that raised ``error`` when it was executed.
    """
    name = getattr(error, "name", None) if isinstance(error, ImportError) else None
    package = (name or _raised_by(error)).partition(".")[0]
    if package in ("", "skyrl", "skyrl_r3") or package in sys.stdlib_module_names:
        return ""
    if isinstance(error, ModuleNotFoundError) and name == package:
        return f"skyrl-r3 needs the package {package}, which is not installed: pip install {package}"
    why = " ".join("".join(traceback.format_exception_only(error)).split())
    cure = f"pip install --force-reinstall {package}"
    return f"skyrl-r3 needs the package {package}, which cannot be imported ({why[:300]}): {cure}"


def _raised_by(error: BaseException) -> str:
    """Name, or file name, of the package whose import by one of ours raised ``error``; or nothing."""
    ours, file, place = os.path.dirname(__file__) + os.sep, "", error.__traceback__
    while place is not None:
        code, place = place.tb_frame.f_code, place.tb_next
        if code.co_filename.startswith(ours):
            file = ""
        elif not file and not code.co_filename.startswith("<frozen importlib"):
            file = code.co_filename if code.co_name == "<module>" else ours
    # A module that cannot be read or compiled has no frame.
    named = getattr(error, "filename", None)
    file = os.path.abspath(file or (named if isinstance(named, str) and named.endswith(".py") else ours))
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    folder = max((folder for folder in folders if file.startswith(folder)), key=len, default="")
    return file.removeprefix(folder).partition(os.sep)[0] if folder else ""
