"""The import hook that the wheel's ``.pth`` file installs at every start of the interpreter.

Standard library only, and nothing but a finder on ``sys.meta_path``: a process that never imports SkyRL pays for
this file alone. wrapt has such a hook, but takes 0.16 to 0.2 s to import, so this one is written by hand.
"""

import os
import sys

__all__ = ["OFF", "SWITCH", "SkyRLFinder", "install", "installed", "is_off", "start", "uninstall"]

# `typing` alone would take longer to import than this module may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SWITCH = "SKYRL_R3"
OFF = ("off", "0", "false", "no")


class SkyRLFinder:
    """Finds the modules of SkyRL that have something to patch, and patches them when they are loaded."""

    _broken: bool = False  # skyrl-r3 cannot be imported, which is said once.

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec that the other finders give, with a loader that patches; None for every other module."""
        if self._broken or not fullname.startswith("skyrl."):
            return None
        try:
            from skyrl_r3 import loader
        except Exception as error:
            # Whatever it is, SkyRL's imports must not fail because of us.
            self._broken = True
            _say_inactive(error)
            return None
        return loader.patching_spec(self, fullname, path, target)


def _say_inactive(error: Exception) -> None:
    import logging

    needed = ""
    try:
        from skyrl_r3.lacking import lacking

        needed = lacking(error)
    except ImportError:
        pass  # A part of skyrl-r3 is all that is there.
    logging.getLogger("skyrl_r3").error(
        "skyrl-r3 is not active, and SkyRL is left as it is. %s, on every node.",
        needed or "skyrl-r3 cannot be imported: pip install --force-reinstall skyrl-r3",
        exc_info=None if needed else error,
    )


def install() -> None:
    """Put the finder first. To install twice is to install once."""
    if not installed():
        sys.meta_path.insert(0, SkyRLFinder())


def uninstall() -> None:
    """Take the finder out."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != SkyRLFinder.__name__]


def installed() -> bool:
    """Whether the finder is in this process. By its name, because a reload of this module makes another class."""
    return any(type(finder).__name__ == SkyRLFinder.__name__ for finder in sys.meta_path)


def start() -> None:
    """What the ``.pth`` file does: install, unless ``SKYRL_R3=off``."""
    if not is_off():
        install()


def is_off() -> bool:
    """Whether the environment disables the overlay in this process: ``SKYRL_R3=off``."""
    return os.environ.get(SWITCH, "").strip().lower() in OFF
