"""Stock SkyRL and the overlay hand the same generation to the trainer, bit for bit.

Each scenario generates once, for stock SkyRL's server and client. What the engine gave then goes through the overlay,
packed and as frames: token ids, logprobs, routes, samples and training tensors are compared with stock's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import statistics
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_tests.conftest import BLOCK_TOKENS, CACHE_BLOCKS, CHUNK_TOKENS
from gpu_tests.facts import Transport
from gpu_tests.passes import ENCODINGS, Passes

SHORT, LONG = (60, 80, 100, 120), (1000, 1500, 2000)
PAUSE_TOKENS, WAIT_S = 40, 60
STOP = list(string.ascii_lowercase)

FAULTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "rows of the token before": (
        "skyrl_r3.hooks.client._routes",
        lambda routes: lambda trace, held, ids, *tokens: routes(trace, held, np.roll(ids, 1, axis=0), *tokens),
        "packed: .*routes.*frame: .*routes",
    ),
    "logprobs with another last bit": (
        "skyrl_r3.frame.pieces",
        lambda pieces: (
            lambda reply: pieces(
                dataclasses.replace(reply, logprobs=np.nextafter(reply.logprobs.astype(np.float32), np.float32(-99)))
            )
        ),
        "frame: .*logprobs",
    ),
    "nested lists for packed": (
        "skyrl_r3.wire.choose_encoding",
        lambda choose: lambda wanted, written: choose([wanted[0], wanted[-1]][wanted[0] == "packed" :], written),
        "expected {'packed'}, got {'nested'}",
    ),
}
"""A function of the overlay's, what is planted in its place, and what is found."""


@pytest.mark.one_model
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plant, found = FAULTS[fault]
    module, _, name = target.rpartition(".")
    monkeypatch.setattr(target, plant(getattr(importlib.import_module(module), name)))

    async def work(demo: Any) -> None:
        await demo.client_case("planted", count=2, max_tokens=4, sizes=(40,))

    with pytest.raises(AssertionError, match=f"(?s){found}"):
        passes.compare("planted", work)


def test_single_turn(passes: Passes) -> None:
    """Sampled, at temperature 1. Its transport is timed: the same replies again, without the model."""
    case = "single turn, sampled"

    async def work(demo: Any) -> None:
        await demo.client_case(case, count=6, max_tokens=64, sizes=(200, 400, 800), temperature=1.0)

    passes.compare(case, work)
    lengths = {len(ids) for name, ids in passes.runs["nested"].of(case).items() if name.endswith("|token_ids")}
    assert len(lengths) > 1 or set(passes.stops(case)) == {"length"}
    passes.passed(case, f"ended by {', '.join(sorted(set(passes.stops(case))))}")
    for encoding in ENCODINGS:
        runs = [passes.one(encoding, work, again=True).cases[case] for _ in range(3)]
        passes.facts.transports.append(
            Transport(
                case=f"{case}, {passes.served.model.name}",
                encoding=encoding,
                replies=runs[0]["requests"],
                body_bytes=runs[0]["reply_bytes"],
                milliseconds=statistics.median(run["generate_ms"] for run in runs),
                generation=False,
            )
        )


@pytest.mark.one_model
def test_long_prompts_are_prefilled_in_chunks(passes: Passes) -> None:
    """No chunk holds a whole prompt, so that rows of one come from several steps of the engine."""
    case = "chunked prefill"

    async def work(demo: Any) -> None:
        await demo.client_case(case, count=3, max_tokens=8, sizes=LONG)

    passes.compare(case, work)
    prompts = [len(ids) for name, ids in passes.runs["nested"].of(case).items() if name.endswith("|prompt")]
    assert min(prompts) > CHUNK_TOKENS
    passes.passed(case, f"prompts of {min(prompts)} to {max(prompts)} tokens, {CHUNK_TOKENS} at once")


@pytest.mark.one_model
def test_turns_hit_the_prefix_cache(passes: Passes) -> None:
    """Rows of earlier turns come out of the engine's cache; the overlay does not fetch them again."""
    case, hits = "three turns", "vllm:prefix_cache_hits_total"
    before = passes.served.count(hits)

    async def work(demo: Any) -> None:
        # Sampled: greedy, these models repeat themselves, and hardly ever say what ends a turn.
        await demo.generator_case(case, count=4, max_tokens=32, temperature=1.0, max_turns=3, stop=STOP)

    passes.compare(case, work)
    hit = int(passes.served.count(hits) - before)
    assert hit > 0
    assert "stop" in passes.stops(case)
    saved = {encoding: run.cases[case]["metrics"].get("r3/rows_saved", 0) for encoding, run in passes.runs.items()}
    assert saved["nested"] == 0
    assert saved["packed"] == saved["frame"] > 0
    passes.passed(case, f"{hit} tokens from the prefix cache, {saved['frame']:.0f} rows not sent again")


def test_32_concurrent_requests(passes: Passes) -> None:
    """All of them in the engine at once."""
    case = "32 concurrent requests"

    async def work(demo: Any) -> None:
        await demo.client_case(case, count=32, max_tokens=16, sizes=SHORT)

    passes.compare(case, work)
    # In the last pass; no pass has fewer than the one that generated.
    assert passes.served.recorder.most_in_flight == 32
    passes.passed(case, "32 at once")


@pytest.mark.one_model
def test_preempted_requests(passes: Passes) -> None:
    """The cache is too small for all: some lose their blocks, and are computed again from the start."""
    case, preemptions = "preemption", "vllm:num_preemptions_total"
    before = passes.served.count(preemptions)

    async def work(demo: Any) -> None:
        await demo.client_case(case, count=32, max_tokens=160, sizes=SHORT, temperature=1.0)

    passes.compare(case, work)
    lost = int(passes.served.count(preemptions) - before)
    assert lost > 0
    passes.passed(case, f"{lost} preemptions, with room for {CACHE_BLOCKS * BLOCK_TOKENS} tokens")


@pytest.mark.one_model
@pytest.mark.parametrize(("mode", "stop"), [("abort", "abort"), ("keep", None), ("wait", None)])
def test_paused_generation(passes: Passes, mode: str, stop: str | None) -> None:
    """SkyRL pauses the server while replies are generated, and resumes it."""
    case, served = f"pause ({mode}) and resume", passes.served

    async def work(demo: Any) -> None:
        asked = demo.client_case(case, count=4, max_tokens=160, sizes=SHORT, temperature=1.0)
        await asyncio.gather(asked, *([] if served.recorder.again else [pause(demo.client())]))

    async def pause(client: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while served.recorder.in_flight < 4 or generated() < PAUSE_TOKENS:
                await asyncio.sleep(0.02)
        try:
            await client.pause(mode)
            await asyncio.sleep(0.3)  # Until the last step is counted.
            stood = generated()
            await asyncio.sleep(0.3)
            assert generated() == stood
        finally:
            await client.resume()
            await client.teardown()

    def generated() -> float:
        return served.count("vllm:generation_tokens_total") - before

    before = served.count("vllm:generation_tokens_total")
    passes.compare(case, work)
    stops = passes.stops(case)
    if stop is None:
        assert set(stops) <= {"stop", "length"}
    else:
        assert stop in stops
    passes.passed(case, f"paused after {PAUSE_TOKENS} tokens, ended by {', '.join(sorted(set(stops)))}")
