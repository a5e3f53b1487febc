"""``skyrl-r3 status --import`` on the real SkyRL 0.4.0."""

from __future__ import annotations

from pathlib import Path

from contract_tests.overlay.fake_skyrl import manifest_of
from contract_tests.overlay.test_status import here


def test_real_skyrl_is_patched(wheel_python: Path) -> None:
    found = here(wheel_python, "--import", exits=0)
    assert (found["skyrl"]["version"], found["skyrl"]["reviewed"]) == ("0.4.0", "0.4.0")
    assert [row["target"] for row in found["targets"]] == [target.name for target in manifest_of("0.4.0").targets]
    assert {(row["state"], row["detail"]) for row in found["targets"]} == {("applied", "")}
    assert found["encodings"]["server"] == ["frame/1", "packed"]
