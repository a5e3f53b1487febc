"""The parts of the suite, and which of them can be run here.

A part that is not run says so: at the head of a run, and at its end.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from contract_tests.adapter import Adapter

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """A folder of tests.

    Attributes:
        needs: Modules, beyond those of the codec part.
        skyrl: The release of SkyRL that it is for, if it needs one.
        only: The one implementation that it is about, if it is not for all.
        capability: What an implementation must be able to do.
    """

    folder: str
    needs: tuple[str, ...] = ()
    skyrl: str = ""
    only: str = ""
    capability: str = ""

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is in this part."""
        return path.is_relative_to(HERE / self.folder)

    def why_never(self, impl: Adapter) -> str:
        """Why it is not for ``impl``, wherever that is run. Empty: it is."""
        if self.only and impl.name != self.only:
            return f"is about {self.only} alone"
        if self.capability and self.capability not in impl.quirks.capabilities:
            return f"{impl.name} has no {self.capability}"
        return ""

    def why_not(self, impl: Adapter) -> str:
        """Why it cannot be run here. Empty: it can."""
        if why := self.why_never(impl):
            return why
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            return f"needs {', '.join(missing)}"
        if not skyrl_version().startswith(self.skyrl):
            return f"needs SkyRL {self.skyrl}x, {skyrl_version()} is installed"
        return ""


_SERVING = ("skyrl", "vllm", "torch", "aiohttp", "fastapi")

# The first that holds a path is its part.
PARTS = (
    Part("codec"),
    Part("http", needs=_SERVING, capability="http"),
    Part("overlay/skyrl_0_4", needs=_SERVING, skyrl="0.4.", only="overlay"),
    Part("overlay", needs=_SERVING, skyrl="0.3.", only="overlay"),
    Part("meta", only="overlay"),
)


def skyrl_version() -> str:
    """The SkyRL that is installed. Empty: none is."""
    try:
        return importlib.metadata.version("skyrl")
    except importlib.metadata.PackageNotFoundError:
        return ""


def part_of(path: Path) -> Part | None:
    """The part that ``path`` is in."""
    return next((part for part in PARTS if part.holds(path)), None)
