"""The trainer's side: the same tokens through the same weights in one pass, with the captured routes and without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from gpu_tests import routers
from gpu_tests.facts import Gap, Load, Replay
from gpu_tests.generation import Generation, Model
from gpu_tests.transformers_engine import load_network
from skyrl_r3.spec import RouteSpec


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What the trainer computed for one generation.

    Attributes:
        logprobs: float64 [G], of the response's tokens, at temperature 1.
        routes: int64 [P + G - 1, layers, topk], the experts that were really used.
    """

    logprobs: np.ndarray
    routes: np.ndarray


class Trainer:
    """The model in transformers, for one full pass over each sample, without padding and without a cache.

    Args:
        model: To load.
        device: Of torch, as ``cpu`` or ``cuda``.
        dtype: To compute in.
    """

    def __init__(self, model: Model, *, device: str, dtype: torch.dtype) -> None:
        self.model = model
        self.name = f"transformers, {str(dtype).removeprefix('torch.')}, {device}"
        self._device = device
        self.network = load_network(model, device=device, dtype=dtype)

    @torch.inference_mode()
    def forward(self, generation: Generation, routes: np.ndarray | None = None) -> Pass:
        """One pass, with ``routes`` [P + G - 1, layers, topk] or, without, by the trainer's own choice.

        Raises:
            ValueError: Another number of rows, or what :func:`gpu_tests.routers.forced` raises.
        """
        prompt, spec = len(generation.prompt), self.model.spec
        tokens = torch.tensor([generation.prompt + generation.response], device=self._device)
        rows = tokens.shape[1] - 1
        with ExitStack() as stack:
            used = stack.enter_context(routers.recorded(self.network, spec))
            if routes is not None:
                if len(routes) != rows:
                    raise ValueError(f"routes: expected {rows} rows, prompt + response - 1, got {len(routes)}")
                ids = torch.from_numpy(routes.astype(np.int64)).to(self._device)
                stack.enter_context(routers.forced(self.network, spec, ids))
            logits = self.network(input_ids=tokens, use_cache=False).logits[0, prompt - 1 : -1]
        logprobs = logits.double().log_softmax(-1).gather(-1, tokens[0, prompt:, None])[:, 0]
        return Pass(logprobs=logprobs.cpu().numpy(), routes=routers.table(used, spec)[:rows].numpy())


def captured_rows(tensor: torch.Tensor, generations: Sequence[Generation]) -> list[np.ndarray]:
    """Each sample's captured rows, out of SkyRL's left-padded training tensor ``[batch, tokens, layers, topk]``.

    Raises:
        ValueError: Another number of samples, or one has more tokens than the tensor.
    """
    if len(tensor) != len(generations):
        raise ValueError(f"training tensor: expected {len(generations)} samples, got {len(tensor)}")
    rows = []
    for i, generation in enumerate(generations):
        tokens = len(generation.prompt) + len(generation.response)
        if tensor.shape[1] < tokens:
            raise ValueError(f"training tensor: expected at least {tokens} tokens, got {tensor.shape[1]}, sample {i}")
        rows.append(tensor[i, tensor.shape[1] - tokens : -1].numpy())
    return rows


def gap(trainer: np.ndarray, engine: np.ndarray) -> Gap:
    """How far the trainer's logprobs ``[tokens]`` are from the engine's.

    Raises:
        ValueError: Not as many, none, or one that is not finite.
    """
    if trainer.shape != engine.shape or not engine.size or not np.isfinite([trainer, engine]).all():
        raise ValueError(f"logprobs: expected finite ones of the same tokens, got {trainer} and {engine}")
    difference = trainer.astype(np.float64) - engine
    away = np.abs(difference)
    k3 = np.expm1(difference) - difference
    return Gap(mean_abs=float(away.mean()), max_abs=float(away.max()), k3=float(k3.mean()))


def agreement(captured: np.ndarray, chosen: np.ndarray, spec: RouteSpec) -> dict[int, float]:
    """Layer -> share of tokens whose set of experts is the same in both, ``[tokens, layers, topk]``."""
    same = (np.sort(captured.astype(np.int64)) == np.sort(chosen)).all(axis=-1).mean(axis=0)
    return {layer: float(same[layer]) for layer in spec.moe_layers or ()}


def measure(
    trainer: Trainer, generations: Sequence[Generation], *, engine: str, routes: Sequence[np.ndarray] | None = None
) -> Replay:
    """Both passes over all generations, against what the engine returned.

    Args:
        trainer: To compute them.
        generations: Of the trainer's model.
        engine: Its name.
        routes: To replay instead of the generations' own, each ``[P + G - 1, layers, topk]``.
    """
    free = [trainer.forward(each) for each in generations]
    given = [each.routes for each in generations] if routes is None else routes
    replayed = [trainer.forward(each, rows) for each, rows in zip(generations, given, strict=True)]
    returned = np.concatenate([each.logprobs for each in generations])
    captured, chosen = (np.concatenate([each.routes for each in of]) for of in (generations, free))
    return Replay(
        model=trainer.model.name,
        engine=engine,
        trainer=trainer.name,
        tokens=len(returned),
        without=gap(np.concatenate([each.logprobs for each in free]), returned),
        replayed=gap(np.concatenate([each.logprobs for each in replayed]), returned),
        agreement=agreement(captured, chosen, trainer.model.spec),
    )


def load_of(model: Model, generations: Sequence[Generation], *, engine: str) -> Load:
    """How often each expert was chosen, over all captured rows."""
    spec = model.spec
    layers, routes = list(spec.moe_layers or ()), np.concatenate([each.routes for each in generations])
    counts = [np.bincount(routes[:, layer].ravel(), minlength=spec.num_experts or 0).tolist() for layer in layers]
    return Load(model=model.name, engine=engine, layers=layers, counts=counts)
