"""Golden files: the bytes of the wire, which are never written anew."""

from __future__ import annotations

import struct

import numpy as np
import orjson
import pytest

from contract_tests import golden, oracle
from contract_tests.adapter import FRAME, PACKED, Adapter, Reply
from contract_tests.golden import Golden

_CASES = {f"{version}-{case.name}": case for version in golden.versions() for case in golden.read(version)}
GOLDEN = [pytest.param(case, id=name) for name, case in _CASES.items()]
WITH_ROUTES = [pytest.param(case, id=name) for name, case in _CASES.items() if case.reply.routes is not None]


def assert_same(found: Reply, want: Reply, encoding: str) -> None:
    """Both say the same, as far as ``encoding`` can say it."""
    assert found.token_ids == want.token_ids
    assert {type(token) for token in found.token_ids} <= {int}
    assert found.finish_reason == want.finish_reason
    assert (found.logprobs is None) is (want.logprobs is None)
    # To the bit, so that 0.0 is not -0.0, and an int or a numpy number is no float.
    for value, right in zip(found.logprobs or [], want.logprobs or [], strict=True):
        assert type(value) is float
        assert struct.pack("d", value) == struct.pack("d", right)
    if encoding == FRAME:
        assert found.metadata == want.metadata
    if want.routes is None:
        assert found.routes is None
        return
    assert type(found.routes) is np.ndarray
    assert found.routes.dtype == want.routes.dtype
    if want.routes.size or encoding in (PACKED, FRAME):
        assert found.routes.shape == want.routes.shape
    else:
        assert len(found.routes) == len(want.routes)  # Lists of nothing have no layers.
    assert found.routes.tobytes() == want.routes.tobytes()
    assert found.routes.flags.c_contiguous


@pytest.mark.parametrize("version", golden.versions())
def test_golden_files_are_as_they_were_made(version: str) -> None:
    """No golden file was changed, added or removed since its version was made."""
    assert golden.sums(version) == golden.recorded(version)
    with pytest.raises(FileExistsError):
        golden.write(version)


@pytest.mark.capability("packed")
@pytest.mark.parametrize("case", WITH_ROUTES)
def test_golden_envelopes_are_written(impl: Adapter, case: Golden) -> None:
    """Encoding gives the golden envelope, byte for byte, from any layout, every time."""
    assert case.reply.routes is not None
    for ids in (case.reply.routes, case.reply.routes.astype(np.int64), np.asfortranarray(case.reply.routes)):
        assert orjson.dumps(impl.encode(ids)) == orjson.dumps(impl.encode(ids)) == case.envelope


@pytest.mark.capability("packed")
@pytest.mark.parametrize("case", WITH_ROUTES)
def test_golden_envelopes_are_read(impl: Adapter, case: Golden) -> None:
    """A golden envelope is decoded to its ids."""
    oracle.assert_canonical(impl.decode(orjson.loads(case.envelope)), case.reply.routes)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bodies_are_written(impl: Adapter, writes: str, case: Golden) -> None:
    """A whole reply is written as the golden body, byte for byte, every time."""
    assert impl.dump(case.reply, writes) == impl.dump(case.reply, writes) == case.bodies[writes]


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bodies_are_read(impl: Adapter, reads: str, case: Golden) -> None:
    """A golden body is read as the reply it was made of."""
    assert_same(impl.load(case.bodies[reads]), case.reply, reads)


@pytest.mark.parametrize("case", GOLDEN)
def test_the_oracle_reads_golden_bodies(case: Golden) -> None:
    """The oracle, which judges the implementations, reads every golden body as the reply it was made of."""
    for encoding, body in case.bodies.items():
        assert_same(oracle.read(body), case.reply, encoding)
