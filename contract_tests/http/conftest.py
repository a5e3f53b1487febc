"""The fixtures of the HTTP tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

for _helper in ("endpoint", "exchange"):
    pytest.register_assert_rewrite(f"contract_tests.http.{_helper}")

from contract_tests import adapter  # noqa: E402
from contract_tests.adapter import Adapter, Http  # noqa: E402
from contract_tests.http.exchange import REFUSAL, Exchange, always, exchange  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of an ``encoding`` for each that the client under test understands."""
    if "encoding" in metafunc.fixturenames:
        found = adapter.load(str(metafunc.config.getoption("impl")))
        metafunc.parametrize("encoding", found.http().encodings())


@pytest.fixture
def http(impl: Adapter) -> Http:
    """Its endpoint and its client."""
    return impl.http()


@pytest_asyncio.fixture
async def on(http: Http) -> AsyncIterator[Exchange]:
    """A client on a server that refuses everything until it is told otherwise, for all examples of a test."""
    async with exchange(http, always(REFUSAL)) as made:
        yield made
