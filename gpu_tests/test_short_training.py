"""The short training run, as far as it goes without a GPU: SkyRL takes its settings, and a run without routes fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpu_tests import short_training


def test_skyrl_takes_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("skyrl")
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg

    settings = short_training.overrides("some/model", tmp_path, tmp_path / "prompts.jsonl")
    config = SkyRLTrainConfig.from_cli_overrides([f"{key}={value}" for key, value in settings.items()])
    validate_cfg(config)
    assert config.generator.inference_engine.enable_return_routed_experts is True
    assert config.trainer.policy.megatron_config.moe_enable_routing_replay is True
    assert config.data.train_data == [str(tmp_path / "prompts.jsonl")]
    assert config.trainer.policy.model.path == "some/model"


def test_every_prompt_has_its_answer(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    from skyrl_gym.envs.gsm8k.env import GSM8kEnv

    short_training.write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == short_training.STEPS * short_training.BATCH
    for i, row in enumerate(rows):
        morning, evening = (int(word) for word in row["prompt"][0]["content"].split() if word.isdigit())
        assert GSM8kEnv(extras=row).step(f"#### {morning + evening}")["reward"] == 1.0, f"prompt {i}"


@pytest.mark.parametrize(
    ("lines", "status", "expected", "said"),
    [
        (2, 0, 0, ""),
        (1, 0, 1, "expected r3/rows_captured in 2 steps, got it in 1"),
        (0, 0, 1, "expected r3/rows_captured in 2 steps, got it in 0"),
        (2, 3, 1, "SkyRL ended with status 3"),
    ],
)
def test_a_run_without_routes_in_every_step_fails(
    lines: int, status: int, expected: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"import sys; print('r3/rows_captured: 9\\n' * {lines}); sys.exit({status})"
    assert short_training.run([sys.executable, "-c", program]) == expected
    assert capsys.readouterr().err == (f"short_training: {said}\n" if said else "")
