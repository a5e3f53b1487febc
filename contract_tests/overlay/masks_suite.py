"""Samples with masked rows, from the trainer's ``convert_to_training_input`` on: padding, without a loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import skyrl.train.trainer as trainer_module

import skyrl_r3
from contract_tests import canned

# Tokens of prompt and response of each sample, and which rows are masked.
SIZES = [(4, 3), (2, 6), (3, 3), (5, 4)]
MASKED: list[list[int]] = [[], [1, 4], [0, 1, 2, 3, 4], [2]]
TOKENS = max(prompt + response for prompt, response in SIZES)
RESPONSES = max(response for _, response in SIZES)
# Row t is what token t + 1 was sampled from; the last column is the last response token.
LOSSES = [[1, 1, 1], [0, 1, 1, 0, 1, 1], [0, 0, 0], [1, 1, 1, 1]]


def right_ids() -> list[np.ndarray]:
    return [canned.routes_of([20 * i + t for t in range(p + r - 1)]) for i, (p, r) in enumerate(SIZES)]


def masked_ids() -> list[np.ndarray]:
    ids = right_ids()
    for rows, masked in zip(ids, MASKED, strict=True):
        rows[masked] = 0
    return ids


class MasksContract:
    """Derived from by each SkyRL line."""

    def routes(self, ids: np.ndarray, token_ids: list[int]) -> Any:
        """What the line's generator hands over."""
        raise NotImplementedError

    def sample(self, made: Any, i: int) -> np.ndarray:
        """The rows of sample i in the training tensor, one for each of its tokens."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def stock(self) -> Iterator[None]:
        skyrl_r3.enable()
        yield
        skyrl_r3.disable()

    def output(self, ids: list[np.ndarray]) -> dict[str, Any]:
        tokens = [[20 * i + t for t in range(p + r)] for i, (p, r) in enumerate(SIZES)]
        return {
            "prompt_token_ids": [sample[:p] for sample, (p, _) in zip(tokens, SIZES, strict=True)],
            "response_ids": [sample[p:] for sample, (p, _) in zip(tokens, SIZES, strict=True)],
            "rewards": [[0.0] * r for _, r in SIZES],
            "loss_masks": [[1] * r for _, r in SIZES],
            "rollout_logprobs": [[-0.5] * r for _, r in SIZES],
            "rollout_expert_indices": [
                self.routes(rows, sample[: len(rows)]) for rows, sample in zip(ids, tokens, strict=True)
            ],
        }

    def made(self, output: dict[str, Any]) -> Any:
        """SkyRL's method, called on a trainer with nothing but what it reads."""
        correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
        trainer = SimpleNamespace(
            tokenizer=SimpleNamespace(pad_token_id=0),
            all_metrics={},
            dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
            cfg=SimpleNamespace(
                trainer=SimpleNamespace(
                    algorithm=SimpleNamespace(max_seq_len=None, off_policy_correction=correction),
                    train_batch_size=len(SIZES),
                    policy_mini_batch_size=len(SIZES),
                    critic=SimpleNamespace(model=SimpleNamespace(path=None)),
                ),
                generator=SimpleNamespace(n_samples_per_prompt=1, step_wise_trajectories=False),
            ),
        )
        convert: Any = trainer_module.RayPPOTrainer.convert_to_training_input
        return convert(trainer, output, [str(i) for i in range(len(SIZES))])

    @pytest.mark.case("R07", "R71", "R75", "R81", "R100", "R102")
    def test_masked_rows_are_padding_and_train_nothing(self) -> None:
        output = self.output(masked_ids())
        before = copy.deepcopy(output["loss_masks"])
        made = self.made(output)
        for i, ((prompt, response), masked) in enumerate(zip(SIZES, MASKED, strict=True)):
            rows, right = self.sample(made, i), right_ids()[i]
            kept = [row for row in range(len(right)) if row not in masked]
            np.testing.assert_array_equal(rows[kept], right[kept])
            for row in (*masked, len(rows) - 1):
                assert all(len(set(layer)) == canned.TOPK for layer in rows[row].tolist())
            padding = made["router_padding_mask"][i, TOKENS - prompt - response :].tolist()
            assert padding == [row in masked for row in range(len(right))] + [True]
            assert made["loss_mask"][i, RESPONSES - response :].tolist() == LOSSES[i]
        assert output["loss_masks"] == before

    def test_without_masked_rows_the_batch_is_the_same_as_ever(self) -> None:
        made = self.made(self.output(right_ids()))
        for i, (prompt, response) in enumerate(SIZES):
            np.testing.assert_array_equal(self.sample(made, i)[:-1], right_ids()[i])
            padding = made["router_padding_mask"][i, TOKENS - prompt - response :].tolist()
            assert padding == [False] * (prompt + response - 1) + [True]
            assert made["loss_mask"][i, RESPONSES - response :].tolist() == [1] * response
