"""SkyRL 0.3's real generate endpoint with the overlay: compact for those who ask, stock for everybody else."""

from __future__ import annotations

from contract_tests.overlay import server_suite
from contract_tests.overlay.server_suite import asking, assert_same, engine, request, with_and_without
from contract_tests.replies import FRAME, NESTED


class TestServer(server_suite.ServerContract):
    stock = NESTED
    floors = False

    async def test_adapters_are_refused_as_in_stock(self) -> None:
        patched, stock = await with_and_without(
            lambda: self.app(engine(), enable_lora=True), asking(FRAME), plain=request()
        )
        assert_same(patched, stock)
        assert stock.status_code == 400
