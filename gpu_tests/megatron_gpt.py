"""A small GPT of Megatron-Core's whose routers replay, with SkyRL 0.3's replay utilities and layouts of a micro-batch.

SkyRL's Megatron worker needs Transformer Engine; :meth:`ReplayModel.forward` does what it does for a micro-batch. What
was used is seen by hooks on routers and experts, never read from ``RouterReplay``, which holds what it was told.

Seen with SkyRL 0.3.0 and Megatron-Core 0.19.2:

* Without packing, a micro-batch of more than one sample is replayed in the wrong order: SkyRL hands routes over as
  [batch, tokens] and the router reads [tokens, batch]. By default SkyRL packs, and has one sample in a micro-batch.
* Each forward pass leaves its routes in the queue for recomputation, also where nothing is recomputed. Only SkyRL's
  ``clear_router_replay``, at the end of a mini-batch, empties it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils
from skyrl.backends.skyrl_train.utils import replay_utils

from skyrl_r3.spec import RouteSpec

type Batch = dict[str, torch.Tensor]
"""``sequences`` and ``attention_mask`` [batch, tokens], left-padded, and ``rollout_expert_indices`` [batch, tokens,
layers, topk]; with the overlay ``router_padding_mask`` [batch, tokens]."""

_HIDDEN = 32


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Megatron's parallel state for one process, and on the CPU answers to what it asks of CUDA. Undone at the end."""
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(mock.patch("torch.cuda.current_device", return_value=device))
            stack.enter_context(mock.patch.object(megatron_random, "_get_cuda_rng_state", return_value=torch.empty(0)))
            stack.enter_context(mock.patch.object(megatron_random, "_set_cuda_rng_state"))
        stack.enter_context(mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}))
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        megatron_random.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        stack.callback(RouterReplay.clear_global_router_replay_instances)
        yield


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer's router.

    Attributes:
        chosen: bool [tokens, batch, experts], the routing map, in the order in which the router sees tokens.
        received: How many rows the experts of the layer got to compute.
    """

    layer: int
    chosen: torch.Tensor
    received: int


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a batch was computed with.

    Attributes:
        logits: [batch, tokens, vocabulary], zero at left padding.
        experts: Layer, counted from 0 -> bool [batch, tokens, experts], False at left padding.
    """

    logits: torch.Tensor
    experts: dict[int, torch.Tensor]


def known(spec: RouteSpec) -> tuple[int, int, int, tuple[int, ...]]:
    """Layers, top-k, experts and routing layers.

    Raises:
        ValueError: One of them is unknown.
    """
    if None in (spec.layers, spec.topk, spec.num_experts, spec.moe_layers):
        raise ValueError(f"spec: expected layers, topk, num_experts and moe_layers, got {spec}")
    return cast(Any, (spec.layers, spec.topk, spec.num_experts, spec.moe_layers))


class ReplayModel:
    """A GPT with random weights and the layers, experts and top-k of ``spec``. One at a time, in :func:`one_rank`.

    Attributes:
        gpt: Megatron's model.
        layers: Those with a router, counted from 0.
        calls: Of routers, in their order, those of recomputation included.
    """

    def __init__(
        self, spec: RouteSpec, *, vocab_size: int, device: torch.device, sigmoid: bool = False, recompute: bool = False
    ) -> None:
        """
        Args:
            spec: All of its fields are needed.
            vocab_size: Token ids are below it.
            device: Where it computes.
            sigmoid: Scores as DeepSeek-V3's, with a bias for each expert, instead of softmax.
            recompute: Layers are computed again in the backward pass.
        """
        layers, topk, num_experts, moe_layers = known(spec)
        replay_utils.patch_topk_router_layer_number()
        RouterReplay.clear_global_router_replay_instances()
        torch.manual_seed(0)
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=_HIDDEN,
            ffn_hidden_size=_HIDDEN,
            num_attention_heads=2,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            add_bias_linear=False,
            num_moe_experts=num_experts,
            moe_ffn_hidden_size=8,
            moe_layer_freq=[int(layer in moe_layers) for layer in range(layers)],
            moe_router_topk=topk,
            moe_router_score_function="sigmoid" if sigmoid else "softmax",
            moe_router_enable_expert_bias=sigmoid,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            moe_enable_routing_replay=True,
            use_cpu_initialization=device.type == "cpu",
            **full if recompute else {},
        )
        block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        self.gpt = GPTModel(config, block, vocab_size, 4096, position_embedding_type="rope").to(device)
        self.device = device
        self.calls: list[Call] = []
        self.layers: list[int] = []
        for layer, module in enumerate(self.gpt.decoder.layers):
            if isinstance(module.mlp, MoELayer):
                router: Any = module.mlp.router
                experts: Any = module.mlp.experts
                self.layers.append(layer)
                router.register_forward_hook(partial(self._router_chose, layer))
                experts.register_forward_pre_hook(self._experts_received)

    def _router_chose(self, layer: int, _: Any, hidden: tuple[torch.Tensor], out: tuple[torch.Tensor, ...]) -> None:
        tokens, batch, _ = hidden[0].shape
        self.calls.append(Call(layer=layer, chosen=out[1].view(tokens, batch, -1).cpu(), received=-1))

    def _experts_received(self, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.calls[-1] = dataclasses.replace(self.calls[-1], received=int(args[1].sum()))

    def forward(self, micro: Batch, *, packed: bool, replay: bool = True) -> Used:
        """One forward pass of a micro-batch, as SkyRL's worker makes it.

        Args:
            micro: It.
            packed: SkyRL's ``remove_microbatch_padding``: samples one behind the other, instead of right-padded.
            replay: Whether routers get the routes.
        """
        micro = {key: tensor.to(self.device) for key, tensor in micro.items()}
        if replay:
            replay_utils.setup_per_microbatch_replay_forward(
                micro["rollout_expert_indices"].to(torch.int32),
                micro["attention_mask"],
                model_config=self.gpt.config,
                remove_microbatch_padding=packed,
            )
        real = micro["attention_mask"].bool()
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        sample = torch.arange(len(real), device=self.device).unsqueeze(1)
        if packed:
            # Megatron's own attention knows no packing, so the mask keeps samples apart.
            tokens, params = megatron_utils.preprocess_packed_seqs(micro["sequences"], real)
            ends = params.cu_seqlens_q[1:].long()
            of_sample = torch.bucketize(torch.arange(tokens.shape[1], device=self.device), ends, right=True)
            other = of_sample.unsqueeze(0) != of_sample.unsqueeze(1)
            rows, columns = torch.zeros_like(sample), positions + params.cu_seqlens_q[:-1].long().unsqueeze(1)
        else:
            tokens, _, _ = megatron_utils.remove_left_padding(micro["sequences"], real, positions)
            other = torch.zeros(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=self.device)
            rows, columns = sample, positions
        later = torch.ones_like(other).triu(1)
        before = len(self.calls)
        logits = self.gpt(tokens, None, (later | other)[None, None])
        calls = self.calls[before:]
        return Used(
            logits=logits[rows, columns] * real.unsqueeze(-1),
            experts={call.layer: call.chosen[columns.cpu(), rows.cpu()] & real.cpu().unsqueeze(-1) for call in calls},
        )

    def infer(self, batch: Batch, *, packed: bool, samples: int | None = None, replay: bool = True) -> Used:
        """Forward passes alone, as SkyRL's worker makes them for logprobs.

        Args:
            batch: It.
            packed: As for :meth:`forward`.
            samples: In a micro-batch; all of them when packed, otherwise one.
            replay: As for :meth:`forward`.
        """
        size = samples or (len(batch["sequences"]) if packed else 1)
        with torch.no_grad():
            parts = [self.forward(micro, packed=packed, replay=replay) for micro in micro_batches(batch, size)]
        replay_utils.clear_router_replay()
        experts = {layer: torch.cat([part.experts[layer] for part in parts]) for layer in self.layers}
        return Used(logits=torch.cat([part.logits for part in parts]), experts=experts)

    def train(self, batch: Batch, *, packed: bool, samples: int) -> None:
        """Forward and backward passes in micro-batches of ``samples``, up to where SkyRL's worker clears the replay."""
        for micro in micro_batches(batch, samples):
            used = self.forward(micro, packed=packed)
            replay_utils.setup_per_microbatch_replay_backward()
            used.logits.float().square().mean().backward()


def micro_batches(batch: Batch, samples: int) -> Iterator[Batch]:
    """``batch`` in parts of so many samples."""
    for start in range(0, len(batch["sequences"]), samples):
        yield {key: tensor[start : start + samples] for key, tensor in batch.items()}
