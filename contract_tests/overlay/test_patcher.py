"""Another patcher at each target, on SkyRL 0.3."""

from __future__ import annotations

from contract_tests.overlay.fake_skyrl import CLIENT
from contract_tests.overlay.patcher_suite import PatcherContract


class TestPatcher(PatcherContract):
    release = "0.3.0"
    alone = (f"{CLIENT}.RemoteInferenceClient._post",)
