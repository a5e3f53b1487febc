"""What the tests of one SkyRL line know about it."""

from __future__ import annotations

import pytest

from contract_tests.overlay.fake_skyrl import manifest_of
from skyrl_r3.manifest import Manifest, Target


class LineContract:
    """Base of the tests that hold in every line.

    Attributes:
        release: The SkyRL that the line's manifest was written for.
    """

    release: str

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run the tests of one ``target`` for every target."""
        if "target" in metafunc.fixturenames:
            targets = [pytest.param(target, id=target.name) for target in self.manifest.targets]
            metafunc.parametrize("target", targets)

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.release)

    @property
    def targets(self) -> list[str]:
        """Names of the targets, as the manifest orders them."""
        return [target.name for target in self.manifest.targets]

    def names_of(self, target: Target) -> list[str]:
        """The targets that are the same function, under each name that it is imported by."""
        kept = (target.attribute, target.sha256)
        return [other.name for other in self.manifest.targets if (other.attribute, other.sha256) == kept]

    def among(self, states: dict[str, str], state: str) -> list[str]:
        """The targets in ``state``."""
        return [name for name in self.targets if states[name] == state]
