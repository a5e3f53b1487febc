"""What a setting costs on the whole reply path, side by side. A measurement, not a test.

    python ci/cost.py SKYRL_R3_METRICS=off SKYRL_R3_METRICS= [--pairs N] [--tokens N ...]
    python ci/cost.py SKYRL_R3_CHECKS=off SKYRL_R3_CHECKS= [--pairs N] [--tokens N ...]

Each argument is a side: a setting of the environment, or several with commas between them, that the overlay looks at
with every reply; one without a value is not set. The sides take turns, and the first is what the others are compared
with. Name it twice to see what two sides differ by that are the same.

SkyRL's own handler, on an engine that has its outputs ready, serves SkyRL's own client through HTTP: both in this
process and in one thread, so that a time is the work of both ends. What the client counts goes to Prometheus here as
well, which is more work than it has elsewhere. Prints milliseconds for each number of tokens of 48 layers, top-8 of 128
experts: the median, on the clock, as CPU time and for decoding alone, and how much more the second of a pair took than
the first, median and quartiles. Run it in an environment with SkyRL and vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import uvicorn

from skyrl_r3 import metrics, policy
from skyrl_r3.bench import server
from skyrl_r3.bench.cases import Case
from skyrl_r3.bench.client import Client

TOKENS = (4_096, 32_768)
# So that all is checked that can be.
MODEL = SimpleNamespace(
    model_type="qwen3_moe",
    num_hidden_layers=48,
    num_experts=128,
    num_experts_per_tok=8,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)


def use(side: str, sides: Sequence[str]) -> None:
    """Have the environment of ``side``, and of no other of the ``sides``."""
    for other in sides:
        for setting in other.split(","):
            os.environ.pop(setting.partition("=")[0], None)
    settings = (setting.split("=", 1) for setting in side.split(","))
    os.environ.update({name: value for name, value in settings if value})
    policy.use(None)  # It is read once.


async def measured_ms(fetch: Any) -> tuple[float, float, float]:
    """Of one reply: time on the clock, CPU time, and of the clock's what the client took to decode its body."""
    metrics.report()
    began, cpu_began = time.perf_counter(), time.process_time()
    await fetch()
    took, took_cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return took * 1e3, took_cpu * 1e3, metrics.report().get("decode_seconds", 0) * 1e3


async def compare(fetch: Any, sides: Sequence[str], pairs: int) -> None:
    """Measure and print. Every side goes first as often as the others, since the first finds the caches colder."""
    times: list[list[tuple[float, float, float]]] = [[] for _ in sides]
    for turn in range(pairs + 3):
        gc.collect()
        for index in (i % len(sides) for i in range(turn, turn + len(sides))):
            use(sides[index], sides)
            found = await measured_ms(fetch)
            if turn == 2:
                gc.freeze()  # So that to collect what a turn has left does not take as long as many turns.
            if turn >= 3:
                times[index].append(found)
    for side, found in zip(sides, times, strict=True):
        line = f"  {side:40}"
        for column, name in enumerate(("clock", "CPU", "decode")):
            first = [pair[column] for pair in times[0]]
            if not all(first):
                continue  # With metrics off, nobody takes that time.
            median = statistics.median(pair[column] for pair in found)
            line += f"  {name} {median:8.3f} ms"
            if found is not times[0]:
                more = [pair[column] - base for pair, base in zip(found, first, strict=True)]
                low, middle, high = (100 * value / statistics.median(first) for value in statistics.quantiles(more))
                line += f", {middle:+.1f}% ({low:+.1f} to {high:+.1f})"
        print(line, flush=True)


async def main() -> None:
    """Serve, and fetch replies of each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--pairs", type=int, default=200, help="how many times each side is measured")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    given = parser.parse_args()
    client = Client()  # Enables the overlay.
    server.CannedEngine.model_config = SimpleNamespace(hf_text_config=MODEL)  # type: ignore[attr-defined]
    served = uvicorn.Server(uvicorn.Config(server._app(), host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(served.serve())
    while not served.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    gc.disable()
    for tokens in given.tokens:
        case = Case(tokens, 48, 8, 128)
        prompt, params = case.prompt(), {"logprobs": 0, "max_tokens": len(case.response())}
        batch = {"prompt_token_ids": [prompt], "sampling_params": params, "session_ids": ["cost"]}
        print(f"{tokens} tokens, {given.pairs} times each side")
        skyrl = client._client(url)
        await compare(lambda: skyrl.generate(batch), given.sides, given.pairs)  # noqa: B023
    await client.close()
    served.should_exit = True
    await task


if __name__ == "__main__":
    asyncio.run(main())
