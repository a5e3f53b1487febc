"""SkyRL 0.3 with its flag off is what it was."""

from __future__ import annotations

from contract_tests.overlay.flag_off_suite import FlagOffContract


class TestFlagOff(FlagOffContract):
    replaced = "RemoteInferenceClient._post"
