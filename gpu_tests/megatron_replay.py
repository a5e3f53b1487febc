"""Generations through preprocessing and Megatron-Core's router replay: do the experts get what the engine captured?

What lies between the captured routes and the experts is the real thing: preprocessing in SkyRL's trainer with the
overlay or without it, SkyRL 0.3's replay utilities, Megatron's model, routers and dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from skyrl.train import trainer as trainer_module

from gpu_tests.generation import Generation
from gpu_tests.megatron_gpt import Batch, ReplayModel, one_rank
from skyrl_r3 import RoutedExperts
from skyrl_r3.codec import compact
from skyrl_r3.spec import RouteSpec

_VOCABULARY = 100


def training_batch(generations: Sequence[Generation], *, nested: bool = False) -> Batch:
    """What SkyRL's trainer makes of ``generations``, as it is patched at the moment.

    Args:
        generations: One for each sample.
        nested: Routes as stock SkyRL's client returns them, for stock SkyRL.
    """
    routes: list[Any] = []
    for one in generations:
        token_ids = np.asarray([*one.prompt, *one.response][: len(one.routes)], dtype=np.int32)
        routes.append(one.routes.tolist() if nested else RoutedExperts(compact(one.routes), token_ids))
    output = {
        "prompt_token_ids": [one.prompt for one in generations],
        "response_ids": [one.response for one in generations],
        "rewards": [[0.0] * len(one.response) for one in generations],
        "loss_masks": [[1] * len(one.response) for one in generations],
        "rollout_logprobs": [one.logprobs.tolist() for one in generations],
        "rollout_expert_indices": routes,
    }
    correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    of_trainer = SimpleNamespace(
        algorithm=SimpleNamespace(max_seq_len=None, off_policy_correction=correction),
        train_batch_size=len(generations),
        policy_mini_batch_size=len(generations),
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
    )
    of_generator = SimpleNamespace(n_samples_per_prompt=1, step_wise_trajectories=False)
    trainer: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0),
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
        cfg=SimpleNamespace(trainer=of_trainer, generator=of_generator),
    )
    uids = [str(i) for i in range(len(generations))]
    convert: Any = trainer_module.RayPPOTrainer.convert_to_training_input
    made = convert(trainer, output, uids)
    keys = ("sequences", "attention_mask", "rollout_expert_indices", "router_padding_mask")
    return {key: made[key] for key in keys if made.get(key) is not None}


def captured(generation: Generation) -> np.ndarray:
    """bool [tokens]: which tokens of the sample have a route. Not the last, nor one whose row was masked.

    None of a sample without a response, whose routes preprocessing leaves out.
    """
    rows = generation.routes.any(axis=(1, 2)) | (generation.routes.shape[2] == 1)
    rows &= bool(generation.response)
    return np.append(rows, np.zeros(len(generation.prompt) + len(generation.response) - len(rows), dtype=bool))


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A token that was computed with other experts than it was generated with."""

    sample: int
    row: int
    layer: int
    expected: list[int]
    got: list[int]


def mismatches(experts: dict[int, torch.Tensor], generations: Sequence[Generation]) -> list[Mismatch]:
    """Compare the experts used with the captured ones, as sets, in each captured row.

    Args:
        experts: Layer -> bool [batch, tokens, experts], left-padded.
        generations: The samples.
    """
    found = []
    for layer, used in experts.items():
        for i, one in enumerate(generations):
            rows = np.flatnonzero(captured(one))
            ids = one.routes[rows, layer].astype(np.int64)
            start = used.shape[1] - len(one.prompt) - len(one.response)
            got = used[i, start + rows].numpy()
            expected = np.zeros_like(got)
            np.put_along_axis(expected, ids, True, axis=1)
            for bad in np.flatnonzero((got != expected).any(axis=1)):
                sets = {"expected": sorted(ids[bad].tolist()), "got": np.flatnonzero(got[bad]).tolist()}
                found.append(Mismatch(sample=i, row=int(rows[bad]), layer=layer, **sets))
    return found


@dataclass(frozen=True, kw_only=True)
class ReplayedRows:
    """What :func:`check_replay` compared.

    Attributes:
        rows: Captured rows, each compared in each of ``layers``.
        layers: Those with a router, counted from 0.
        padding: Rows of the training tensor that hold no captured route, left padding included.
        mismatches: Empty when replay is right.
    """

    rows: int
    layers: list[int]
    padding: int
    mismatches: list[Mismatch]


def check_replay(
    generations: Sequence[Generation], spec: RouteSpec, *, device: torch.device, packed: bool
) -> ReplayedRows:
    """Replay ``generations`` in a small GPT with the layers and experts of ``spec``. Needs the overlay enabled.

    Args:
        generations: A batch of them, of any engine. Routers have weights of their own, so that experts are only right
            if they are replayed.
        spec: Of the engine's model. All of its fields are needed.
        device: Where the GPT computes.
        packed: SkyRL's ``remove_microbatch_padding``: four samples in a micro-batch, instead of one.
    """
    batch = training_batch(generations)
    # Which tokens they are is nothing to replay, and logits of a real vocabulary would take gigabytes.
    batch["sequences"] %= _VOCABULARY
    with one_rank(device):
        model = ReplayModel(spec, vocab_size=_VOCABULARY, device=device)
        used = model.infer(batch, packed=packed, samples=4 if packed else 1)
        return ReplayedRows(
            rows=sum(int(captured(one).sum()) for one in generations),
            layers=model.layers,
            padding=int(batch["router_padding_mask"].sum()),
            mismatches=mismatches(used.experts, generations),
        )
