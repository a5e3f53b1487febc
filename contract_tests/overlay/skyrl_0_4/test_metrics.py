"""What both ends of SkyRL 0.4 count."""

from __future__ import annotations

from contract_tests.overlay import metrics_suite
from contract_tests.replies import FRAME, PACKED


class TestMetrics(metrics_suite.MetricsContract):
    stock = PACKED
    knows_lengths = (FRAME,)
