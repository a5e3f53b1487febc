"""Every order of the overlay's verbs on SkyRL 0.4."""

from __future__ import annotations

from contract_tests.overlay.order_suite import OrderContract


class TestOrder(OrderContract):
    release = "0.4.0"
