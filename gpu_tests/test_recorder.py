"""What is given again is what was generated for that prompt, and comes as many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_tests import recorder as module
from gpu_tests.recorder import Recorder

PROMPTS = ([1, 2, 3], [1, 2, 3, 4], [5, 6])


class Once:
    """Answers each prompt with routes that no other has, and each only once."""

    def __init__(self) -> None:
        self._asked: list[list[int]] = []

    async def generate(self, prompt: Any, sampling_params: Any) -> AsyncIterator[Any]:
        token_ids = prompt["prompt_token_ids"]
        assert token_ids not in self._asked
        self._asked.append(token_ids)
        await asyncio.sleep(0)
        routes = np.arange(len(token_ids) * 4, dtype=np.uint8).reshape(-1, 2, 2) + token_ids[0]
        yield SimpleNamespace(outputs=[SimpleNamespace(routed_experts=routes)])


async def ask(recorder: Recorder, prompt: list[int], start: int | None = None) -> np.ndarray:
    params = SimpleNamespace(routed_experts_prompt_start=start)
    (output,) = [each async for each in recorder.generate({"prompt_token_ids": list(prompt)}, params)]
    return output.outputs[0].routed_experts


async def recorded() -> tuple[Recorder, list[np.ndarray]]:
    recorder = Recorder(Once())
    recorder.begin(again=False)
    given = await asyncio.gather(*(ask(recorder, prompt) for prompt in PROMPTS))
    assert recorder.most_in_flight == len(PROMPTS)
    return recorder, given


async def test_each_prompt_gets_its_own_again_from_its_start_on() -> None:
    recorder, given = await recorded()
    for _ in range(2):
        recorder.begin(again=True)
        starts = (0, 2, None)
        again = await asyncio.gather(*(ask(recorder, *each) for each in zip(PROMPTS, starts, strict=True)))
        for start, first, second in zip(starts, given, again, strict=True):
            assert np.array_equal(second, first[start or 0 :])
            assert not np.shares_memory(second, first)


async def test_none_is_answered_before_all_are_asked_for_nor_in_that_order() -> None:
    recorder, _ = await recorded()
    recorder.begin(again=True)
    order = []

    async def noted(prompt: list[int]) -> None:
        await ask(recorder, prompt)
        order.append(prompt)

    early = [asyncio.create_task(noted(prompt)) for prompt in PROMPTS[:-1]]
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == []
    await noted(PROMPTS[-1])
    await asyncio.gather(*early)
    assert sorted(order) == sorted(PROMPTS)
    assert order not in ([*PROMPTS], [*reversed(PROMPTS)])
    assert recorder.most_in_flight == len(PROMPTS)


async def test_fewer_than_were_generated_at_once_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0)
    recorder, _ = await recorded()
    recorder.begin(again=True)
    with pytest.raises(ValueError, match="expected 3 at once, as when they were generated, got 1") as error:
        await ask(recorder, PROMPTS[0])
    assert recorder.failed is error.value
    assert recorder.in_flight == 0


async def test_a_prompt_twice_in_a_pass_and_one_that_was_not_generated_for_are_errors() -> None:
    recorder, _ = await recorded()
    with pytest.raises(ValueError, match="got one of 3 tokens twice"):
        await ask(recorder, PROMPTS[0])
    recorder.begin(again=True)
    assert recorder.failed is None
    with pytest.raises(ValueError, match="that was generated for, got one of 4 tokens"):
        await ask(recorder, [9, 9, 9, 9])
