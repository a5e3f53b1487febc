"""What is replaced in which SkyRL release, and whether the installed SkyRL still looks like that.

One TOML file per SkyRL line, in ``patches/``. The check reads SkyRL's sources and never imports them: the targets are
imported at different times and in different processes, and still either all of them fit or none is replaced.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from skyrl_r3.errors import DriftError, OverlayError, UnsupportedSkyRLError
from skyrl_r3.sources import Found, assigned_string, read_target

__all__ = ["Manifest", "Plan", "Target", "installed_skyrl", "manifests", "plan"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One row of a manifest: a function of SkyRL's and what stands in for it.

    Attributes:
        module: The module whose name is replaced: the one that calls the function, which need not define it.
        attribute: Name in that module, ``function`` or ``Class.method``.
        signature: Parameters and defaults, with ``async`` or a decorator where there is one; no annotations.
        sha256: Of the function's source text in the release that the patch was written for.
        replacement: ``module:factory`` of the hook.
        refusal: ``module:factory`` of the hook that raises when the flag is on although another target does not fit.
        what: What the replacement does.
        why: What is wrong without it.
        upstream: The change in SkyRL that it stands for.
    """

    module: str
    attribute: str
    signature: str
    sha256: str
    replacement: str
    what: str
    why: str
    upstream: str
    refusal: str = ""

    @property
    def name(self) -> str:
        """``module.attribute``."""
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True)
class Manifest:
    """The targets of one SkyRL line.

    Attributes:
        skyrl: Version specifier of the releases that it is for.
        reviewed: The release whose sources were read for it.
    """

    skyrl: str
    reviewed: str
    targets: tuple[Target, ...]

    def is_for(self, version: str) -> bool:
        """Whether the manifest is for this SkyRL. ``version`` may be any text."""
        # prereleases=True: without it, development builds of a supported line fall out of every specifier.
        return _is_version(version) and SpecifierSet(self.skyrl).contains(version, prereleases=True)


@dataclass(frozen=True)
class Plan:
    """The manifest that fits the installed SkyRL, with what was found for each of its targets.

    Attributes:
        version: Of the installed SkyRL.
        found: By target name; None where the module or the attribute is gone.
    """

    version: str
    manifest: Manifest
    found: dict[str, Found | None]

    def drifted(self) -> list[Target]:
        """Targets that are gone or have another signature."""
        return [target for target in self.manifest.targets if not self._fits(target)]

    def edited(self, target: Target) -> bool:
        """Whether the target fits but its source is not that of the reviewed release."""
        found = self.found[target.name]
        return found is not None and self._fits(target) and found.sha256 != target.sha256

    def warning(self) -> str:
        """What to say of a SkyRL that fits and is not the one that was reviewed; empty if there is nothing to say.

        A checkout has the number of the release before it, whatever has changed since.
        """
        edited = [target.name for target in self.manifest.targets if self.edited(target)]
        if not edited:
            return ""
        others = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        return (
            f"{len(edited)} of the {len(self.manifest.targets)} functions that skyrl-r3 patches are not as in SkyRL "
            f"{self.manifest.reviewed}, with which the patches were reviewed: {edited[0]}{others}. Their signatures "
            "fit, and they are patched all the same. Use the release, or look whether routes are concerned: "
            "python -m ci.anchors, in a checkout of skyrl-r3, shows each."
        )

    def _fits(self, target: Target) -> bool:
        found = self.found[target.name]
        return found is not None and found.signature == target.signature

    def error(self) -> DriftError | None:
        """An error that names the first target that does not fit, or None."""
        drifted = self.drifted()
        if not drifted:
            return None
        found = self.found[drifted[0].name]
        others = f" and {len(drifted) - 1} more" if len(drifted) > 1 else ""
        reviewed = self.manifest.reviewed
        # A checkout keeps the number of the release before it, and whoever reads it there thinks that it is supported.
        not_it = f", as this is not the SkyRL that was released as {reviewed}" if self.version == reviewed else ""
        return DriftError(
            drifted[0].name + others,
            expected=drifted[0].signature,
            got="nothing of that name" if found is None else found.signature,
            where=f"SkyRL {self.version}",
            hint=f"Nothing was patched{not_it}. Use SkyRL {reviewed} as released, or uninstall skyrl-r3.",
        )


def manifests() -> list[Manifest]:
    """All manifests that this package ships.

    Raises:
        OverlayError: There are none, as in an archive on the path or a copy of the modules alone.
    """
    here = Path(__file__).parent
    # In the wheel they lie inside the package, in a checkout beside it.
    folder = here / "patches" if (here / "patches").is_dir() else here.parent / "patches"
    paths = sorted(folder.glob("skyrl-*.toml"))
    if not paths:
        hint = "skyrl-r3 is incomplete: install it anew, with pip and from its wheel."
        raise OverlayError("patches", expected="a manifest for each SkyRL", got="none", where=str(folder), hint=hint)
    return [read_manifest(path) for path in paths]


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        OSError, ValueError, KeyError, TypeError: It is none.
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    targets = tuple(Target(**row) for row in content["target"])
    texts = (content["skyrl"], content["reviewed"], *(text for row in content["target"] for text in row.values()))
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"expected texts alone, got {wrong[0]!r}")
    return Manifest(skyrl=content["skyrl"], reviewed=content["reviewed"], targets=targets)


@cache
def plan() -> Plan:
    """Read the installed SkyRL and choose the manifest for it. Read once per process: installed sources stay.

    Raises:
        UnsupportedSkyRLError: SkyRL is not installed, or is of a release that no manifest is for.
        OverlayError: As :func:`manifests`.
    """
    version, root = installed_skyrl()
    manifest = next((manifest for manifest in manifests() if manifest.is_for(version)), None)
    if manifest is not None:
        found = {target.name: read_target(root, target.module, target.attribute) for target in manifest.targets}
        return Plan(version=version, manifest=manifest, found=found)
    raise UnsupportedSkyRLError(
        "skyrl",
        expected=f"a release in {_supported()}",
        got=version,
        hint="SkyRL is left as it is. Uninstall skyrl-r3, or install a release of it that knows this SkyRL.",
    )


def installed_skyrl() -> tuple[str, Path]:
    """Version and package folder of the SkyRL that ``import skyrl`` would find, without importing it.

    Raises:
        UnsupportedSkyRLError: There is none.
    """
    folders = _skyrl_folders()
    if not folders:
        old = _distribution_version("skyrl-train")
        got = "none" if old is None else f"only skyrl-train {old}, the older package, which has no R3"
        hint = "Install skyrl-r3 in the environment that SkyRL runs in."
        if old is not None:
            hint = "Move to the package skyrl, whose extra is now called skyrl-train."
        raise UnsupportedSkyRLError("skyrl", expected=f"a release in {_supported()}", got=got, hint=hint)
    root = Path(folders[0])
    # The package's own word first: a checkout on sys.path can be another release than the one pip installed.
    version = assigned_string(root / "__init__.py", "__version__") or _distribution_version("skyrl")
    return version or "unknown", root


def _skyrl_folders() -> list[str]:
    try:
        spec = importlib.util.find_spec("skyrl")
    except ValueError:  # One that was imported without a spec, or made by hand.
        return list(getattr(sys.modules["skyrl"], "__path__", ()))
    return [] if spec is None else list(spec.submodule_search_locations or ())


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _supported() -> str:
    return " or ".join(f"{manifest.skyrl}" for manifest in manifests())
