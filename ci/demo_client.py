"""One client process of the demo: SkyRL's own client, generator and preprocessing against a running server.

It runs the same cases whether the overlay is off or on, and writes what it got: arrays into ``OUT.npz``, timings and
types into ``OUT.json``, the overlay's state in this process into ``OUT.status.json``. ``ci/demo.py`` compares two such
runs. Nothing in this file imports or enables the overlay; only ``SKYRL_R3`` and what is installed make the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import demo_env
import numpy as np
import skyrl
from demo_compare import LONG_CASE, SAMPLED_CASE
from process_status import write_status
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train import trainer as skyrl_trainer
from skyrl.train.config import GeneratorConfig, InferenceEngineConfig, SamplingParams, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

# SkyRL 0.4 keeps routes as arrays up to its own training tensor, where the overlay does nothing.
SKYRL_03 = skyrl.__version__.startswith("0.3.")
PROMPT_TOKENS = (1000, 1200, 1400, 1600, 1800, 2000)
TENSORS = ("sequences", "attention_mask", "action_mask", "rewards", "loss_masks", "logprobs", "routes")
# Any of these ends a turn. With random weights they come up often enough to give every demo run some synthetic EOS.
STOP = ["l", "N", "a", "e"]


def as_ids(routes: Any) -> np.ndarray:
    """Routes of one sample as int64 [rows, layers, topk], from nested lists or from the overlay's ``.ids``."""
    ids = np.asarray(getattr(routes, "ids", routes), dtype=np.int64)
    if ids.ndim != 3:
        raise ValueError(f"routes: expected [rows, layers, topk], got shape {ids.shape} from {type(routes).__name__}")
    return ids


@dataclass
class Wire:
    """Response body bytes that aiohttp hands to the client, counted chunk by chunk, and what they are."""

    received_bytes: int = 0
    content_types: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def of(self, client: RemoteInferenceClient) -> AsyncIterator[None]:
        """Give ``client`` a session set up as SkyRL sets up its own, plus the counter."""

        async def count(_session: Any, _context: Any, params: aiohttp.TraceResponseChunkReceivedParams) -> None:
            self.received_bytes += len(params.chunk)

        async def note(_session: Any, _context: Any, params: aiohttp.TraceRequestEndParams) -> None:
            if params.url.path.endswith("/generate"):
                self.content_types.add(params.response.content_type)

        trace = aiohttp.TraceConfig()
        trace.on_response_chunk_received.append(count)
        trace.on_request_end.append(note)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
        ) as session:
            if SKYRL_03:
                client._session = session
            else:
                inner: Any = client._get_generate_client()  # pyright: ignore[reportAttributeAccessIssue]
                inner._sessions[asyncio.get_running_loop()] = session
            yield


@dataclass
class RecordingClient(RemoteInferenceClient):
    """SkyRL's client, unchanged, that also keeps every reply it returned.

    Replies arrive in any order, so they are compared by their prompt. Token ids are copied because the generator
    appends a synthetic EOS to the very list; routes are kept by reference, a copy would cost as much as the transport.
    """

    replies: list[dict[str, Any]] = field(default_factory=list, repr=False)

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> Any:
        prompts = copy.deepcopy(input_batch["prompt_token_ids"]) or []
        output = await super().generate(input_batch, model=model)
        for i, prompt in enumerate(prompts):
            logprobs, routes = output["response_logprobs"], output["rollout_expert_indices"]
            self.replies.append(
                {
                    "prompt": list(prompt),
                    "response": list(output["response_ids"][i]),
                    "stop": output["stop_reasons"][i],
                    "logprobs": list(logprobs[i]) if logprobs is not None else [],
                    "routes": routes[i] if routes is not None else None,
                }
            )
        return output


@dataclass
class Recorder:
    """Arrays and facts of this process's cases, by case name."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, case: str, client: RecordingClient, facts: dict[str, Any], samples: dict[str, list], tensors: tuple):
        """Keep one case: raw replies, samples as the generator returned them, and the training tensors."""
        replies = sorted(client.replies, key=lambda reply: reply["prompt"])
        for i, reply in enumerate(replies):
            self.arrays[f"{case}|reply|{i}|prompt"] = np.asarray(reply["prompt"], dtype=np.int64)
            self.arrays[f"{case}|reply|{i}|token_ids"] = np.asarray(reply["response"], dtype=np.int64)
            self.arrays[f"{case}|reply|{i}|logprobs"] = np.asarray(reply["logprobs"], dtype=np.float64)
            self.arrays[f"{case}|reply|{i}|routes"] = as_ids(reply["routes"])
        for i in range(len(samples["prompts"])):
            self.arrays[f"{case}|sample|{i}|prompt"] = np.asarray(samples["prompts"][i], dtype=np.int64)
            self.arrays[f"{case}|sample|{i}|token_ids"] = np.asarray(samples["responses"][i], dtype=np.int64)
            self.arrays[f"{case}|sample|{i}|loss_mask"] = np.asarray(samples["loss_masks"][i], dtype=np.int64)
            self.arrays[f"{case}|sample|{i}|logprobs"] = np.asarray(samples["logprobs"][i], dtype=np.float64)
            self.arrays[f"{case}|sample|{i}|routes"] = as_ids(samples["routes"][i])
        for name, tensor in zip(TENSORS if tensors else (), tensors, strict=True):
            self.arrays[f"{case}|tensor|{name}"] = tensor.numpy()
        self.cases[case] = facts | {
            "stop_reasons": [reply["stop"] for reply in replies],
            "reply_route_types": sorted({type(reply["routes"]).__name__ for reply in replies}),
            "sample_route_types": sorted({type(routes).__name__ for routes in samples["routes"]}),
            "tensor_dtype": str(tensors[-1].dtype) if tensors else "not made",
        }


def make_prompts(count: int, salt: str, sizes: Sequence[int] = PROMPT_TOKENS) -> list[list[dict[str, str]]]:
    """Chat prompts of at least ``sizes`` bytes, in turn. They differ from the first bytes on.

    So no two share a block of the prefix cache. Which of two concurrent requests computes such a block and which one
    reuses it would depend on arrival.
    """
    rng = random.Random(f"{salt}-prompts")
    prompts = []
    for i in range(count):
        text = f"{salt} {i}: "
        while len(text) < sizes[i % len(sizes)]:
            text += "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) + " "
        prompts.append([{"role": "user", "content": text}])
    return prompts


def per_token_rewards(rewards: list[Any], responses: list[list[int]]) -> list[list[float]]:
    """Rewards as preprocessing wants them: a scalar goes to the last token, as SkyRL's trainer puts it."""
    return [
        reward if isinstance(reward, list) else [0.0] * (len(response) - 1) + [float(reward)]
        for reward, response in zip(rewards, responses, strict=True)
    ]


def preprocess(tokenizer: Any, samples: dict[str, list]) -> tuple[tuple, float]:
    """Run the preprocessing that SkyRL's trainer is bound to: its tensors, and the median of three times in ms."""
    times_ms, tensors = [], ()
    for _ in range(3):
        start = time.perf_counter()
        tensors = skyrl_trainer.convert_prompts_responses_to_batch_tensors(
            tokenizer,
            samples["prompts"],
            samples["responses"],
            samples["rewards"],
            samples["loss_masks"],
            samples["logprobs"],
            samples["routes"],
        )
        times_ms.append((time.perf_counter() - start) * 1e3)
    return tuple(tensors), statistics.median(times_ms)


class Demo:
    """The cases, against one server, with one tokenizer."""

    def __init__(self, *, proxy_url: str, server_url: str, model_name: str, tokenizer: Any):
        self.addresses = {"proxy_url": proxy_url, "server_urls": [server_url], "model_name": model_name}
        self.tokenizer = tokenizer
        self.recorder = Recorder()

    def client(self) -> RecordingClient:
        """A fresh client with SkyRL's R3 flag on."""
        return RecordingClient(
            **self.addresses,
            data_parallel_size=1,
            enable_return_routed_experts=True,
            tokenizer=self.tokenizer,
        )

    async def client_case(
        self,
        case: str,
        *,
        count: int,
        max_tokens: int,
        sizes: Sequence[int] = PROMPT_TOKENS,
        temperature: float = 0.0,
        seed: int | None = None,
        keep: bool = True,
    ) -> None:
        """``RemoteInferenceClient.generate`` alone."""
        prompt_ids = self.tokenizer.apply_chat_template(
            make_prompts(count, case, sizes), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        params = get_sampling_params_for_backend(
            "vllm", SamplingParams(temperature=temperature, max_generate_length=max_tokens)
        )
        if seed is not None:
            params["seed"] = seed
        request: Any = {"prompt_token_ids": prompt_ids, "sampling_params": params}
        wire, client = Wire(), self.client()
        async with wire.of(client):
            start = time.perf_counter()
            output = await client.generate(request)
            generate_ms = (time.perf_counter() - start) * 1e3
        responses = output["response_ids"]
        samples = {
            "prompts": prompt_ids,
            "responses": responses,
            "rewards": [[0.0] * len(response) for response in responses],
            "loss_masks": [[1] * len(response) for response in responses],
            "logprobs": output["response_logprobs"],
            "routes": output["rollout_expert_indices"],
        }
        if keep:
            self.finish(case, client, wire, generate_ms, samples)

    async def generator_case(
        self, case: str, *, count: int, max_tokens: int, temperature: float = 0.0, **overrides: Any
    ) -> None:
        """``SkyRLGymGenerator.generate``, configured by ``overrides``."""
        stop = overrides.pop("stop", None)
        config = GeneratorConfig(
            inference_engine=InferenceEngineConfig(enable_return_routed_experts=True),
            sampling_params=SamplingParams(temperature=temperature, max_generate_length=max_tokens, stop=stop),
            max_input_length=6000,
            **overrides,
        )
        wire, client = Wire(), self.client()
        generator = SkyRLGymGenerator(config, SkyRLGymConfig(), client, self.tokenizer)
        request: Any = {
            "prompts": make_prompts(count, case),
            "env_classes": [demo_env.ENV_ID] * count,
            "env_extras": [{} for _ in range(count)],
            "sampling_params": get_sampling_params_for_backend("vllm", config.sampling_params),
            "trajectory_ids": None,
            "batch_metadata": None,
        }
        async with wire.of(client):
            start = time.perf_counter()
            output = await generator.generate(request, disable_tqdm=True)
            generate_ms = (time.perf_counter() - start) * 1e3
        samples = {
            "prompts": output["prompt_token_ids"],
            "responses": output["response_ids"],
            "rewards": per_token_rewards(output["rewards"], output["response_ids"]),
            "loss_masks": output["loss_masks"],
            "logprobs": output["rollout_logprobs"],
            "routes": output["rollout_expert_indices"],
        }
        self.finish(case, client, wire, generate_ms, samples, output["rollout_metrics"] or {})

    def finish(
        self,
        case: str,
        client: RecordingClient,
        wire: Wire,
        generate_ms: float,
        samples: dict[str, list],
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Preprocess what a case returned, record everything, and say so."""
        tensors, preprocess_ms = preprocess(self.tokenizer, samples) if SKYRL_03 else ((), None)
        facts = {
            "requests": len(client.replies),
            "reply_bytes": wire.received_bytes,
            "content_types": sorted(wire.content_types),
            "generate_ms": generate_ms,
            "preprocess_ms": preprocess_ms,
            "metrics": {name: value for name, value in (metrics or {}).items() if name.startswith("r3/")},
        }
        self.recorder.add(case, client, facts, samples, tensors)
        print(
            f"progress: {case}: {facts['requests']} replies, {wire.received_bytes / 1e6:.2f} MB, "
            f"generate {generate_ms:.0f} ms" + (f", preprocess {preprocess_ms:.1f} ms" if tensors else ""),
            flush=True,
        )

    async def run(self) -> None:
        """All cases, one after the other."""
        start = time.perf_counter()
        await self.client_case("warm-up", count=1, max_tokens=2, keep=False)
        print(f"progress: first request (not counted): {time.perf_counter() - start:.1f} s", flush=True)

        await self.client_case("client", count=6, max_tokens=8)
        await self.client_case(SAMPLED_CASE, count=4, max_tokens=64, temperature=1.0, seed=1)
        await self.generator_case("single turn, batched", count=6, max_tokens=8, batched=True)
        await self.generator_case("single turn, not batched", count=6, max_tokens=8)
        await self.generator_case("multi turn, chat", count=4, max_tokens=32, max_turns=3, stop=STOP)
        await self.generator_case(LONG_CASE, count=1, max_tokens=2, max_turns=50, stop=STOP)
        if not SKYRL_03:
            return  # It refuses routes where a conversation is one message.
        await self.generator_case(
            "multi turn, one message",
            count=4,
            max_tokens=32,
            max_turns=3,
            stop=STOP,
            use_conversation_multi_turn=False,
        )


def main() -> None:
    """Run the cases and write what they returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy-url", required=True, help="the router")
    parser.add_argument("--server-url", required=True, help="the server behind it")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory, for its tokenizer")
    parser.add_argument("--model-name", required=True, help="the name that the server gives the model")
    parser.add_argument("--out", type=Path, required=True, help="output path without suffix")
    args = parser.parse_args()

    from skyrl.utils.tok import get_tokenizer

    tokenizer = get_tokenizer(str(args.model), padding_side="left")
    demo = Demo(proxy_url=args.proxy_url, server_url=args.server_url, model_name=args.model_name, tokenizer=tokenizer)
    asyncio.run(demo.run())
    # An uncompressed .npz: the file exists only for one comparison.
    np.savez(args.out.with_suffix(".npz"), **demo.recorder.arrays)  # pyright: ignore[reportArgumentType]
    args.out.with_suffix(".json").write_text(json.dumps(demo.recorder.cases, indent=1))
    write_status(args.out.with_suffix(".status.json"), "client")


if __name__ == "__main__":
    main()
