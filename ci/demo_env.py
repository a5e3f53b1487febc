"""A deterministic multi-turn environment for the demo, under the name ``r3_demo`` in SkyRL's gym.

Import this module in every process that makes the environment: gym's registry lives in the process.
"""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

ENV_ID = "r3_demo"


class DemoEnv(BaseTextEnv):
    """Answers each turn with an observation until ``max_turns``; the reward depends on the action's text only."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        super().__init__()
        self.max_turns = (extras or {}).get("max_turns", 1)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the action, and hand back an observation unless this was the last turn."""
        self.turns += 1
        done = self.turns >= self.max_turns
        reward = len(action.encode()) % 7 / 7
        answer = {"role": "user", "content": f"turn {self.turns}: {len(action)} characters, go on"}
        observations = [] if done else [answer]
        return BaseTextEnvStepOutput(
            observations=observations, reward=reward, done=done, metadata={}, postprocessed_action=None
        )


register(id=ENV_ID, entry_point="demo_env:DemoEnv")
