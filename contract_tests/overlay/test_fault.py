"""Drift and failing patches, target by target, on SkyRL 0.3."""

from __future__ import annotations

from contract_tests.overlay.fault_suite import FaultContract


class TestFault(FaultContract):
    release = "0.3.0"
