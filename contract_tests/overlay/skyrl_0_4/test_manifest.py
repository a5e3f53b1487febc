"""The manifest against the installed SkyRL 0.4.0."""

from __future__ import annotations

from contract_tests.overlay.manifest_suite import ManifestContract


class TestManifest(ManifestContract):
    release = "0.4.0"
