"""Hugging Face transformers as the engine, where there is no vLLM: one token at a time, with a cache of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_tests import routers
from gpu_tests.generation import Generation, Model

SEED = 20251017


def load_network(model: Model, *, device: str, dtype: torch.dtype) -> Any:
    """The model in transformers, for inference."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype)
    return network.to(device).eval()


class TransformersEngine:
    """Implements :class:`gpu_tests.generation.Engine`. Prompts are generated one after the other, without padding.

    Args:
        model: To load.
        device: Of torch, as ``cpu`` or ``cuda``.
        dtype: To compute in.
    """

    def __init__(self, model: Model, *, device: str, dtype: torch.dtype) -> None:
        self.model = model
        self.name = f"transformers, {str(dtype).removeprefix('torch.')}, {device}"
        self._device = device
        self._network = load_network(model, device=device, dtype=dtype)
        ends = self._network.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Generation]:
        """Generate for all ``prompts``, in their order, from a fixed seed; ``temperature`` 0 is greedy."""
        # On the CPU, so that the same numbers are drawn for every device.
        dice = torch.Generator().manual_seed(SEED)
        return [self._generate(prompt, max_tokens, temperature, dice) for prompt in prompts]

    def _generate(self, prompt: list[int], max_tokens: int, temperature: float, dice: torch.Generator) -> Generation:
        spec = self.model.spec
        response: list[int] = []
        logprobs: list[float] = []
        fed, cache = prompt, None
        with routers.recorded(self._network, spec) as calls:
            while len(response) < max_tokens and not self._ends & set(response[-1:]):
                output = self._network(
                    input_ids=torch.tensor([fed], device=self._device), past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                scores = output.logits[0, -1].double().cpu()
                if temperature:
                    token = int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=dice))
                else:
                    token = int(scores.argmax())
                response.append(token)
                logprobs.append(float(scores.log_softmax(-1)[token]))
                fed = [token]
        # As vLLM hands them over.
        dtype = np.uint8 if (spec.num_experts or 0) <= 256 else np.uint16
        return Generation(
            prompt=prompt,
            response=response,
            logprobs=np.array(logprobs),
            routes=routers.table(calls, spec).numpy().astype(dtype),
            finish_reason="stop" if response[-1] in self._ends else "length",
        )
