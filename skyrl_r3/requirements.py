"""The packages that skyrl-r3 needs, whether they are there and work, and how skyrl-r3 itself is there.

Works without any of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import skyrl_r3
from skyrl_r3.aside import said_by

__all__ = ["HERE", "look", "version", "way"]

HERE = Path(skyrl_r3.__file__).parent


def look() -> list[dict[str, Any]]:
    """Of each requirement of skyrl-r3, as :func:`skyrl_r3.installation.facts` has it; none where they are unknown."""
    return [_requirement(text) for text in _requirements()]


def version(*distributions: str) -> str | None:
    """Of the first of them that is installed."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def way() -> str:
    """How skyrl-r3 is there: the copy that is imported need not be the one that is installed."""
    try:
        distribution = importlib.metadata.distribution("skyrl-r3")
    except importlib.metadata.PackageNotFoundError:
        return "path"
    if Path(str(distribution.locate_file("skyrl_r3"))).resolve() == HERE.resolve():
        return "wheel" if (HERE / "patches").is_dir() else "path"
    with suppress(ValueError, TypeError, LookupError):
        if json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"]["editable"]:
            return "editable"
    return "path"


def _requirements() -> list[str]:
    """Those of skyrl-r3 itself, without its extras."""
    if way() == "path":
        # Beside a copy inside somebody else's project lies somebody else's file.
        with suppress(OSError, ValueError, TypeError, LookupError):
            project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            if project["name"] == "skyrl-r3":
                return project["dependencies"]
    try:
        texts = importlib.metadata.requires("skyrl-r3") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [text for text in texts if "extra ==" not in text]


def _requirement(text: str) -> dict[str, Any]:
    name = re.split(r"[^\w.-]", text, maxsplit=1)[0]
    found, failed = version(name), None
    try:
        import_module(name)  # Our requirements are named as their modules are.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            found = None
        else:
            failed = said_by(error)
    fits = True
    # Where packaging is at fault, its own row says so.
    with suppress(Exception, SystemExit):
        from packaging.requirements import Requirement

        fits = Requirement(text).specifier.contains(found or "", prereleases=True)
    return {"requirement": text, "found": found, "met": found is not None and fits and not failed, "failed": failed}
