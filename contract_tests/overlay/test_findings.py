"""Wrong routes in the traffic of SkyRL 0.3."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract_tests.overlay import findings_suite


class TestFindings(findings_suite.FindingsContract):
    def ids(self, routes: Any) -> np.ndarray:
        return routes.ids
