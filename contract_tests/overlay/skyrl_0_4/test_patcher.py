"""Another patcher at each target, on SkyRL 0.4."""

from __future__ import annotations

from contract_tests.overlay.patcher_suite import PatcherContract


class TestPatcher(PatcherContract):
    release = "0.4.0"
