"""Generations out of what ``ci/demo_client.py`` recorded of a case of its client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_tests.generation import Generation

if TYPE_CHECKING:
    from demo_compare import Run


def samples(run: Run, case: str) -> list[Generation]:
    """The samples of ``case``, in the order of its training tensors."""
    arrays, stops = run.of(case), run.cases[case]["stop_reasons"]
    prompts = [arrays[f"sample|{i}|prompt"].tolist() for i in range(len(stops))]
    # Replies are recorded in the order of their prompts.
    stop_of = {tuple(prompt): stop for prompt, stop in zip(sorted(prompts), stops, strict=True)}
    return [
        Generation(
            prompt=prompt,
            response=arrays[f"sample|{i}|token_ids"].tolist(),
            logprobs=arrays[f"sample|{i}|logprobs"],
            routes=arrays[f"sample|{i}|routes"],
            finish_reason=stop_of[tuple(prompt)],
        )
        for i, prompt in enumerate(prompts)
    ]
