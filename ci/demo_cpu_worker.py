"""vLLM's CPU worker with two repairs that the demo needs. The overlay knows nothing of this file.

Routes. On a CPU, vLLM (0.26.0 and its neighbours) runs MoE layers through one call that also picks the experts, and the
hook that records routes sits on another path. ``routed_experts`` then has the right shape and every id is 0, which is
also what fused GPU kernels did (vllm-project/vllm#44116). Here the ids are recorded where the CPU path picks them:
what the reply carries is what the layer computed with.

Ports. torch's TCPStore listens on every interface, whatever address it is given. The demo has one worker, so the
rendezvous can be a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.worker.cpu_worker import CPUWorker

_select_experts = cpu_fused_moe.select_experts
# Recorder of the layer that is running now. One worker runs one forward pass, layer after layer, in one thread.
_record: Callable[[Any], None] | None = None


def _recording_select_experts(*args: Any, **kwargs: Any) -> Any:
    """Pick experts as vLLM does, and hand the ids to the running layer's recorder."""
    weights, ids = _select_experts(*args, **kwargs)
    if _record is not None:
        _record(ids)
    return weights, ids


def _recording_kernel(kernel: Callable[..., Any], router: Any) -> Callable[..., Any]:
    """A layer's MoE call that says which layer's recorder is meant while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        global _record
        _record = router.capture_fn
        try:
            return kernel(*args, **kwargs)
        finally:
            _record = None

    return run


class DemoCPUWorker(CPUWorker):
    """vLLM's worker, with routes recorded and without an open port."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["distributed_init_method"] = f"file://{tempfile.mkdtemp(prefix='r3-rendezvous-')}/store"
        super().__init__(*args, **kwargs)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """Hook the layers once vLLM has bound its recorders to their routers."""
        result = super().initialize_from_config(*args, **kwargs)
        layers = [module for module in self.model_runner.model.modules() if isinstance(module, MoERunner)]
        for layer in layers:
            method: Any = layer.routed_experts.quant_method
            method.cpu_fused_moe = _recording_kernel(method.cpu_fused_moe, layer.router)
        cpu_fused_moe.select_experts = _recording_select_experts
        return result
