"""Masked rows in SkyRL 0.4's batches, which have no padding in their routes."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract_tests.overlay import masks_suite


class TestMasks(masks_suite.MasksContract):
    def routes(self, ids: np.ndarray, token_ids: list[int]) -> Any:
        return ids

    def sample(self, made: Any, i: int) -> np.ndarray:
        begin = sum(map(sum, masks_suite.SIZES[:i]))
        return made["rollout_expert_indices"].values[begin : begin + sum(masks_suite.SIZES[i])].numpy()
