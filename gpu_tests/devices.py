"""Devices of torch: which are there, and what is asked of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

REQUIRE_GPU = "R3_REQUIRE_GPU"


def require_gpu() -> None:
    """Skip the test where torch sees no CUDA device; fail it there with ``R3_REQUIRE_GPU=1``."""
    if torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1: expected a CUDA device, torch {torch.__version__} sees none")
    pytest.skip(f"torch {torch.__version__} sees no CUDA device")


class Operations(TorchDispatchMode):
    """While this lasts, keep the name of every operation that torch runs, on any device, in order.

    ``x.cpu()`` of another device is one ``_to_copy``. What reads a value, as ``item`` or the truth of a tensor, is one
    ``_local_scalar_dense``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
