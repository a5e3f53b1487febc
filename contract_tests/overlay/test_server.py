"""SkyRL 0.3's real generate endpoint with the overlay: compact for those who ask, stock for everybody else."""

from __future__ import annotations

from typing import Any

import pytest

from contract_tests.overlay import server_suite
from contract_tests.overlay.server_suite import (
    ENCODINGS,
    asking,
    assert_reply,
    assert_same,
    engine,
    request,
    with_and_without,
)
from contract_tests.replies import FRAME, NESTED, read

NAMES: dict[str, dict[str, Any]] = {
    "path": {"model": "org/base"},
    "served alias": {"model": "alias"},
    "unknown": {"model": "nobody"},
    "empty": {"model": ""},
    "null": {"model": None},
}


class TestServer(server_suite.ServerContract):
    stock = NESTED
    floors = False

    async def test_adapters_are_refused_as_in_stock(self) -> None:
        patched, stock = await with_and_without(
            lambda: self.app(engine(), enable_lora=True), asking(FRAME), plain=request()
        )
        assert_same(patched, stock)
        assert stock.status_code == 400

    @pytest.mark.case("R59")
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("case", [*NAMES, "missing"])
    async def test_every_name_is_that_of_the_base_model_as_in_stock(self, case: str, encoding: str) -> None:
        """SkyRL's handler does not look at it."""
        bodies = [asking(encoding, **NAMES.get(case, {})), request(**NAMES.get(case, {}))]
        for body in bodies if case == "missing" else []:
            del body["model"]
        patched, stock = await with_and_without(lambda: self.app(engine()), bodies[0], plain=bodies[1])
        assert patched.status_code == stock.status_code == 200
        assert_reply(read(patched.content))
        if encoding == FRAME:
            assert read(patched.content).metadata.get("model", "") == (bodies[0].get("model") or "")
