"""Masked rows in SkyRL 0.3's batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract_tests.overlay import masks_suite
from skyrl_r3 import RoutedExperts


class TestMasks(masks_suite.MasksContract):
    def routes(self, ids: np.ndarray, token_ids: list[int]) -> Any:
        return RoutedExperts(ids, np.array(token_ids, np.int32))

    def sample(self, made: Any, i: int) -> np.ndarray:
        return made["rollout_expert_indices"][i, masks_suite.TOKENS - sum(masks_suite.SIZES[i]) :].numpy()
