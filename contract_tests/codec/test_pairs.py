"""What one implementation writes, another reads."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given

from contract_tests import adapter, oracle
from contract_tests import strategies as r3st
from contract_tests.adapter import ENCODINGS, Adapter, Reply
from contract_tests.codec.test_golden import assert_same
from contract_tests.codec.test_round_trip import edge, through_json

OTHERS = [pytest.param(name, marks=pytest.mark.importable(name)) for name in adapter.NAMES]


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest) -> Adapter:
    """Another implementation, or the same once more."""
    return adapter.load(request.param)


@pytest.mark.parametrize("other", OTHERS, indirect=True)
@given(routes=r3st.routes(tuple(r3st.LAYOUTS), empty=False))
def test_routes_of_each_other(impl: Adapter, other: Adapter, routes: r3st.Routes) -> None:
    """Every pair of implementations decodes what the other encodes, where both have the same form, and to the same
    array, where they do not.
    """
    for writer, reader in ((impl, other), (other, impl)):
        same = writer.quirks.form == reader.quirks.form
        payload = through_json((writer if same else reader).encode(np.array(routes.given, subok=False)))
        oracle.assert_canonical(reader.decode(payload), routes.values)


@pytest.mark.parametrize("other", OTHERS, indirect=True)
@pytest.mark.parametrize("max_id", r3st.EDGE_IDS)
def test_edges_of_each_other(impl: Adapter, other: Adapter, max_id: int) -> None:
    """Two implementations with the same form write the same bytes at every edge of a dtype."""
    ids = edge("c", max_id).values
    if impl.quirks.form == other.quirks.form:
        assert orjson.dumps(impl.encode(ids)) == orjson.dumps(other.encode(ids))
    oracle.assert_canonical(impl.decode(through_json(impl.encode(ids))), other.decode(through_json(other.encode(ids))))


@pytest.mark.capability("bodies")
@pytest.mark.parametrize("other", OTHERS, indirect=True)
@given(reply=r3st.replies())
def test_bodies_of_each_other(impl: Adapter, other: Adapter, reply: Reply) -> None:
    """Every pair of implementations reads the whole replies that the other writes, where they share an encoding."""
    for writer, reader in ((impl, other), (other, impl)):
        for encoding in ENCODINGS:
            if encoding in writer.quirks.writes and encoding in reader.quirks.reads:
                assert_same(reader.load(writer.dump(reply, encoding)), reply, encoding)
