"""Memory: claims cost nothing, and ids are not copied over and over. Measured with a limit, not trusted."""

from __future__ import annotations

import json
import os
import sys

import pytest

from contract_tests.adapter import FRAME, PACKED, Adapter
from contract_tests.child import finish
from contract_tests.parts import HERE

pytestmark = [
    pytest.mark.capability("packed"),
    pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's"),
]

CLAIMS = [
    "2**40 rows",
    "2 GiB in the cap, and no data",
    "2**93 ids",
    "2**60 layers of no rows",
    "int32 beyond the cap",
    "200 MiB of base64 for three ids",
    "200 MiB of base64 and no such dtype",
]
FRAME_CLAIMS = ["2**40 rows", "a header of 2**62 bytes", "a header of 200 MiB"]


@pytest.fixture(scope="module")
def outcomes(impl: Adapter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each case in the process with the limit."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])}
    path = tmp_path_factory.mktemp("limited") / "outcomes.json"
    command = [sys.executable, "-m", "contract_tests.codec.limited", impl.name, str(path)]
    ran = finish(command, env=env)
    assert ran.returncode == 0, ran.stderr
    return json.loads(path.read_text("utf-8"))


@pytest.mark.case("R46")
@pytest.mark.parametrize("case", CLAIMS)
def test_claims_cost_nothing(outcomes: dict[str, str], case: str) -> None:
    """An envelope that claims more than it holds, or holds more than it claims, is refused in 64 MiB."""
    assert outcomes[case] == "refused"


@pytest.mark.capability("reads frame/1")
@pytest.mark.parametrize("case", FRAME_CLAIMS)
def test_claims_of_frames_cost_nothing(outcomes: dict[str, str], case: str) -> None:
    """A frame that claims more than it holds is refused in 64 MiB."""
    assert outcomes[f"frame/1: {case}"] == "refused"


def test_ids_are_held_once(outcomes: dict[str, str]) -> None:
    """Ids of 24 MiB are decoded in 64 MiB on top of their base64."""
    assert outcomes["24 MiB of ids"] == "decoded"


def test_encoding_takes_little_memory(outcomes: dict[str, str]) -> None:
    """Ids of 12 MiB are encoded in 64 MiB, their base64 included."""
    assert outcomes["12 MiB are encoded"] == "decoded"


@pytest.mark.parametrize(
    "encoding", [pytest.param(name, marks=pytest.mark.capability(f"reads {name}")) for name in (PACKED, FRAME)]
)
def test_ids_of_a_body_are_held_once(outcomes: dict[str, str], encoding: str) -> None:
    """Ids of 24 MiB are read from a whole body in 64 MiB on top of it."""
    assert outcomes[f"{encoding}: 24 MiB of ids"] == "decoded"
