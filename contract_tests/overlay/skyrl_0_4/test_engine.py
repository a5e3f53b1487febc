"""SkyRL 0.4: engines that cannot capture routes, and what the others say of their model."""

from __future__ import annotations

from contract_tests.overlay import engine_suite
from contract_tests.overlay.engine_suite import engines  # noqa: F401


class TestEngine(engine_suite.EngineContract):
    pass
