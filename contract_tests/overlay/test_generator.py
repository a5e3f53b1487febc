"""SkyRL's real generator on its real client, stock and with the overlay: the same trajectories, routes included."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import random
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import skyrl_gym
from skyrl.train.config import (
    ChatTemplateConfig,
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
    SkyRLGymConfig,
    SkyRLTrainConfig,
)
from skyrl.train.dataset import preprocess
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import concatenate_generator_outputs
from skyrl.train.utils.trainer_utils import validate_generator_output
from skyrl.train.utils.utils import validate_inference_engine_cfg
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import registry

import skyrl_r3
from contract_tests import canned
from contract_tests.replies import FRAME, read, write
from contract_tests.skyrl_server import Server, client_of, reply_to
from skyrl_r3 import RoutedExperts, metrics, policy
from skyrl_r3.errors import MissingRoutesError, RouteError
from skyrl_r3.hooks import generator as generator_hook
from skyrl_r3.trace import trajectory

ENV = "r3_contract"
QUESTIONS = ["What is 2 + 3?", "Name a prime.", "Say something long, please, with many words.", "?"]


class Env(BaseTextEnv):
    """Asks on until ``max_turns``; may change the action as environments with tool calls do."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.extras = extras or {}

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns >= self.extras["max_turns"]
        changed = self.extras.get("change", {}).get(self.turns)
        return {
            "observations": [] if done else [{"role": "user", "content": f"observation {self.turns}"}],
            "reward": float(len(action) % 3),
            "done": done,
            "metadata": {},
            "postprocessed_action": None if changed is None else changed(action),
        }


if ENV not in registry:
    skyrl_gym.envs.register(id=ENV, entry_point=cast(Any, Env))


@pytest.fixture(autouse=True)
def stock() -> Iterator[None]:
    """Every test starts and ends with SkyRL as it is."""
    skyrl_r3.disable()
    yield
    skyrl_r3.disable()


def config(**more: Any) -> GeneratorConfig:
    sampling = more.pop("sampling_params", SamplingParams(max_generate_length=64, logprobs=0))
    return GeneratorConfig(
        inference_engine=InferenceEngineConfig(enable_return_routed_experts=True),
        sampling_params=sampling,
        **{"max_input_length": 2048, **more},
    )


def answer_with(eos: int | None, stop: str = "", engine_truth: dict[tuple[int, ...], np.ndarray] | None = None) -> Any:
    """A deterministic 'model': response and routes follow from the prompt alone."""

    def answer(number: int, request: dict[str, Any]) -> bytes:
        prompt = request["token_ids"]
        dice = random.Random(sum(prompt) * 31 + len(prompt))
        response = [dice.randrange(64, 90) for _ in range(dice.randrange(3, 9))] + [ord(c) - 33 for c in stop]
        response += [] if eos is None else [eos]
        routes = canned.routes_of([*prompt, *response][:-1], experts=512)
        return reply_to(request, response, routes, [-0.25 * (i + 1) for i in range(len(response))])

    return answer


async def run(
    tokenizer: Any, cfg: GeneratorConfig, answer: Any, *, extras: dict[str, Any] | None = None, **generator_input: Any
) -> Any:
    server = Server(answer)
    async with client_of(server, tokenizer) as client:
        generator = SkyRLGymGenerator(cfg, SkyRLGymConfig(max_env_workers=0), client, tokenizer)
        output = await cast(Any, generator).generate(
            {
                "prompts": [[{"role": "user", "content": question}] for question in QUESTIONS],
                "env_classes": [ENV] * len(QUESTIONS),
                "env_extras": [dict(extras or {}) for _ in QUESTIONS],
                "sampling_params": {"logprobs": 0, "max_tokens": 64, "stop": cfg.sampling_params.stop},
                "trajectory_ids": None,
                "batch_metadata": None,
                **generator_input,
            },
            disable_tqdm=True,
        )
    validate_generator_output(len(QUESTIONS), output)
    return output


async def both(tokenizer: Any, cfg: GeneratorConfig, answer: Any, **more: Any) -> tuple[Any, Any]:
    stock_output = await run(tokenizer, cfg, answer, **more)
    skyrl_r3.enable()
    patched_output = await run(tokenizer, cfg, answer, **more)
    return stock_output, patched_output


def assert_same(stock_output: Any, patched_output: Any) -> None:
    """Everything equal; routes in the captured rows, and stock has nothing but placeholders behind them."""
    assert set(stock_output) == set(patched_output)
    for key in set(stock_output) - {"rollout_expert_indices", "trajectory_generation_times", "rollout_metrics"}:
        assert stock_output[key] == patched_output[key], key
    lists, arrays = stock_output["rollout_expert_indices"], patched_output["rollout_expert_indices"]
    for index, (nested, routes) in enumerate(zip(lists, arrays, strict=True)):
        assert isinstance(routes, RoutedExperts)
        assert routes.ids.dtype == np.int16
        expected = np.asarray(nested)
        np.testing.assert_array_equal(routes.ids, expected[: len(routes)])
        assert not expected[len(routes) :].any()
        tokens = [*patched_output["prompt_token_ids"][index], *patched_output["response_ids"][index]]
        assert len(routes) >= len(tokens) - 2, "at most the last token and a synthetic EOS are not captured"
        assert routes.token_ids.tolist() == tokens[: len(routes)]


STYLES: dict[str, dict[str, Any]] = {
    "single turn": {"max_turns": 1},
    "single turn, batched": {"max_turns": 1, "batched": True},
    "multi turn": {"max_turns": 3},
    "multi turn in one message": {"max_turns": 3, "use_conversation_multi_turn": False},
    "single turn in one message": {"max_turns": 1, "use_conversation_multi_turn": False},
}


@pytest.mark.parametrize("with_eos", [True, False])
@pytest.mark.parametrize("style", STYLES)
async def test_every_style_gives_the_same_trajectories(tokenizer: Any, style: str, with_eos: bool) -> None:
    answer = answer_with(tokenizer.eos_token_id if with_eos else None)
    assert_same(*await both(tokenizer, config(**STYLES[style]), answer))


async def test_a_synthetic_eos_after_a_stop_string(tokenizer: Any) -> None:
    sampling = SamplingParams(max_generate_length=64, logprobs=0, stop=["</end>"])
    cfg = config(max_turns=2, sampling_params=sampling, append_eos_token_after_stop_str_in_multi_turn=True)
    stock_output, patched_output = await both(tokenizer, cfg, answer_with(None, stop="</end>"))
    assert_same(stock_output, patched_output)
    assert all(response[-1] == tokenizer.eos_token_id for response in patched_output["response_ids"])


@pytest.mark.case("R64")
async def test_truncation_to_the_longest_response(tokenizer: Any) -> None:
    sampling = SamplingParams(max_generate_length=3, logprobs=0)
    cfg = config(max_turns=1, batched=True, sampling_params=sampling)
    stock_output, patched_output = await both(tokenizer, cfg, answer_with(tokenizer.eos_token_id))
    assert_same(stock_output, patched_output)
    for prompt, response, routes in zip(
        patched_output["prompt_token_ids"],
        patched_output["response_ids"],
        patched_output["rollout_expert_indices"],
        strict=True,
    ):
        assert len(response) == 3
        assert len(routes) == len(prompt) + 3


async def test_a_conversation_that_outgrows_the_input_limit(tokenizer: Any) -> None:
    cfg = config(max_turns=9, max_input_length=150)
    stock_output, patched_output = await both(tokenizer, cfg, answer_with(tokenizer.eos_token_id))
    assert_same(stock_output, patched_output)
    assert "length" in patched_output["stop_reasons"]


async def test_skyrl_s_evaluation_gives_the_same_metrics(tokenizer: Any) -> None:
    from skyrl.train.evaluate import evaluate

    generator_cfg = config(max_turns=2, eval_n_samples_per_prompt=2)
    cfg = SimpleNamespace(
        generator=generator_cfg,
        environment=SimpleNamespace(env_class=ENV),
        trainer=SimpleNamespace(print_example_interval=0, dump_eval_results=False),
    )
    prompts = [
        [{"prompt": [{"role": "user", "content": q}], "env_class": None, "env_extras": {}, "uid": q}] for q in QUESTIONS
    ]
    metrics = []
    for enable in (False, True):
        if enable:
            skyrl_r3.enable()
        async with client_of(Server(answer_with(tokenizer.eos_token_id)), tokenizer) as client:
            generator = SkyRLGymGenerator(generator_cfg, SkyRLGymConfig(max_env_workers=0), client, tokenizer)
            found = await evaluate(prompts, generator, cfg, 1, tokenizer)  # pyright: ignore[reportArgumentType]
        more = ("time", "timing", "/r3/")
        metrics.append({key: value for key, value in found.items() if not any(part in key for part in more)})
    assert metrics[0] == metrics[1]
    assert metrics[0]["eval/all/avg_score"] > 0


async def test_evaluation_concatenates_batches(tokenizer: Any) -> None:
    cfg, answer = config(max_turns=2), answer_with(tokenizer.eos_token_id)
    sampling = {"logprobs": 0, "max_tokens": 64, "temperature": 0.0}
    outputs = [await both(tokenizer, cfg, answer, sampling_params=sampling) for _ in range(2)]
    sides: Any = [concatenate_generator_outputs(list(side)) for side in zip(*outputs, strict=True)]
    stock_output, patched_output = sides
    assert_same(stock_output, patched_output)
    assert len(patched_output["rollout_expert_indices"]) == 2 * len(QUESTIONS)


def changing(change: dict[int, Any]) -> dict[str, Any]:
    """Without logprobs: SkyRL itself refuses a response that has not as many of them as tokens."""
    return {"extras": {"change": change}, "sampling_params": {"max_tokens": 64}}


async def test_a_changed_action_loses_the_routes_of_the_changed_tokens(tokenizer: Any, caplog: Any) -> None:
    skyrl_r3.enable()
    caplog.set_level(logging.WARNING)  # The import of vLLM puts the handlers that are there to ERROR.
    change = {2: lambda action: action[:2] + "X" + action[2:]}
    with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
        output = await run(tokenizer, config(max_turns=2), answer_with(None), **changing(change))
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        kept = len(routes)
        assert routes.token_ids.tolist() == tokens[:kept]
        assert tokenizer.decode(tokens[kept : kept + 1]) == "X"
        np.testing.assert_array_equal(routes.ids, canned.routes_of(tokens[:kept], experts=512).astype(np.int16))
    assert len([record for record in caplog.records if record.name == "skyrl_r3.hooks.generator"]) == len(QUESTIONS)


async def test_an_action_changed_in_an_earlier_turn_is_captured_by_the_next(tokenizer: Any) -> None:
    skyrl_r3.enable()
    change = {1: lambda action: action + "!"}
    output = await run(tokenizer, config(max_turns=2), answer_with(None), **changing(change))
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        assert len(routes) == len(tokens) - 1


@pytest.mark.case("R24")
@pytest.mark.parametrize("style", ["multi turn", "multi turn in one message"])
async def test_50_turns_send_each_row_once(tokenizer: Any, style: str) -> None:
    """And give what asking for all of them each time gives, bit for bit."""
    plain, sent = answer_with(tokenizer.eos_token_id), {"rows": 0, "bytes": 0}

    def answer(number: int, request: dict[str, Any]) -> bytes:
        body = plain(number, request)
        routes = read(body).routes
        assert routes is not None
        sent["rows"] += len(routes)
        sent["bytes"] += len(body)
        return body

    cfg = config(**{**STYLES[style], "max_turns": 50, "max_input_length": 10_000})
    skyrl_r3.enable()
    metrics.report()
    output = await run(tokenizer, cfg, answer)
    final = sum(map(len, output["rollout_expert_indices"]))
    ids = final * canned.LAYERS * canned.TOPK * 2  # int16
    assert output["rollout_metrics"]["r3/rows_captured"] == sent["rows"] <= 1.1 * final
    assert sent["bytes"] < 1.1 * ids + 200 * 1_000  # 200 replies, each with a header, token ids and logprobs.
    skyrl_r3.disable()
    stock = await run(tokenizer, cfg, answer)
    assert stock["response_ids"] == output["response_ids"]
    for one, other in zip(output["rollout_expert_indices"], stock["rollout_expert_indices"], strict=True):
        np.testing.assert_array_equal(one.ids, np.array(other)[: len(one)])


@pytest.mark.parametrize("ends", ["well", "with an error", "cancelled"])
async def test_what_a_trajectory_holds_goes_with_it(ends: str) -> None:
    """Also where a connection that it has opened, which keeps its context, lives on."""
    contexts, traces, held = [], [], asyncio.Event()

    async def loop() -> None:
        current = trajectory.get()
        assert current is not None
        trace = current["http://127.0.0.1", "policy"]
        trace.add(None, canned.routes_of([1, 2, 3]), np.array([1, 2, 3], np.int32))
        traces.append(weakref.ref(trace))
        contexts.append(contextvars.copy_context())
        del current, trace
        held.set()
        if ends == "with an error":
            raise ValueError
        if ends == "cancelled":
            await asyncio.sleep(600)

    task = asyncio.ensure_future(generator_hook.agent_loop(loop)())
    await held.wait()
    if ends == "cancelled":
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    kinds = {"well": type(None), "with an error": ValueError, "cancelled": asyncio.CancelledError}
    assert type(outcome) is kinds[ends]
    gc.collect()
    assert [trace() for trace in traces] == [None]
    assert contexts[0][trajectory] == {}
    assert trajectory.get() is None


@pytest.mark.case("R67")
@pytest.mark.parametrize("ignores", [False, True], ids=["deltas", "an engine that knows no start"])
async def test_the_first_capture_of_a_row_wins(
    tokenizer: Any, ignores: bool, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may compute a prefix anew and route it otherwise: the row that a token was sampled with stays."""
    first: dict[int, int] = {}
    monkeypatch.setattr(policy, "_warned", set())
    caplog.set_level(logging.WARNING)
    metrics.report()

    def answer(number: int, request: dict[str, Any]) -> bytes:
        prompt, response = request["token_ids"], [70, 71, 72]
        turn = tokenizer.decode(prompt).count("observation")
        if not turn:
            first[len(prompt)] = len(prompt) + len(response) - 1
        routes = canned.routes_of([*prompt, *response][:-1]) + 100 * turn
        return reply_to({**request, "sampling_params": {}} if ignores else request, response, routes, [-0.5] * 3)

    skyrl_r3.enable()
    output = await run(tokenizer, config(max_turns=2), answer)
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        assert len(routes) == len(tokens) - 1
        turns = np.arange(len(routes)) >= first[len(output["prompt_token_ids"][i])]
        np.testing.assert_array_equal(routes.ids, canned.routes_of(tokens[:-1]) + 100 * turns.reshape(-1, 1, 1))
    assert ("the ids that the turns before had" in caplog.text) == ignores
    # One reply for each of the four trajectories had other ids for what they held.
    assert output["rollout_metrics"].get("r3/findings/changed", 0) == 4 * ignores
    assert output["rollout_metrics"].get("r3/rows_saved", 0) == (not ignores) * sum(first.values())


@pytest.mark.case("R68")
@pytest.mark.parametrize("style", ["multi turn", "multi turn in one message"])
async def test_a_turn_with_tokens_and_no_routes_is_an_error_of_its_own(tokenizer: Any, style: str) -> None:
    plain = answer_with(tokenizer.eos_token_id)

    def answer(number: int, request: dict[str, Any]) -> bytes:
        if "observation" not in tokenizer.decode(request["token_ids"]):
            return plain(number, request)
        return write(FRAME, [70, 71], None, [-0.5, -0.5])

    skyrl_r3.enable()
    with pytest.raises(MissingRoutesError) as caught:
        await run(tokenizer, config(**STYLES[style]), answer)
    assert caught.value.field == "routed_experts"
    assert "http://127.0.0.1:" in caught.value.where


@pytest.mark.case("R68", "R71")
@pytest.mark.parametrize("style", ["multi turn", "multi turn in one message"])
async def test_a_turn_with_tokens_and_no_routes_can_be_masked(
    tokenizer: Any, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns before it are trained on, and so are the other samples."""
    plain, cut = answer_with(tokenizer.eos_token_id), {}

    def answer(number: int, request: dict[str, Any]) -> bytes:
        text = tokenizer.decode(request["token_ids"])
        if "Name a prime" in text and "observation" in text:
            cut[1] = request["sampling_params"]["routed_experts_prompt_start"]
            return write(FRAME, [70, 71], None, [-0.5, -0.5])
        return plain(number, request)

    skyrl_r3.enable()
    monkeypatch.setattr(policy, "_current", policy.parse("missing=mask"))
    output = await run(tokenizer, config(**{**STYLES[style], "max_turns": 2}), answer)
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        truth = canned.routes_of(tokens[: len(routes)], experts=512)
        np.testing.assert_array_equal(routes.ids[: cut.get(i)], truth[: cut.get(i)])
        assert not routes.ids[cut.get(i, len(routes)) :].any()
    tensors = preprocess.convert_prompts_responses_to_batch_tensors(
        tokenizer,
        output["prompt_token_ids"],
        output["response_ids"],
        output["rewards"],
        output["loss_masks"],
        None,
        output["rollout_expert_indices"],
    )
    before = [sum(mask) for mask in output["loss_masks"]]
    after = [int(sum(mask)) for mask in tensors[4].tolist()]
    assert [b - a for b, a in zip(before, after, strict=True)] == [0, 2, 0, 0]


@pytest.mark.parametrize("rows", [0, 2], ids=["nothing captured", "part of the prompt captured"])
async def test_an_empty_turn_keeps_the_routes_of_the_turns_before(tokenizer: Any, rows: int) -> None:
    plain = answer_with(tokenizer.eos_token_id)

    def answer(number: int, request: dict[str, Any]) -> bytes:
        first_turn = "observation" not in tokenizer.decode(request["token_ids"])
        return plain(number, request) if first_turn else reply_to(request, [], np.zeros((rows, 3, 2), np.uint8), [])

    skyrl_r3.enable()
    output = await run(tokenizer, config(max_turns=2), answer)
    for i, routes in enumerate(output["rollout_expert_indices"]):
        tokens = [*output["prompt_token_ids"][i], *output["response_ids"][i]]
        assert len(routes) > len(output["prompt_token_ids"][i])
        assert routes.token_ids.tolist() == tokens[: len(routes)]


@pytest.mark.case("R77")
@pytest.mark.parametrize("style", ["multi turn", "multi turn in one message"])
@pytest.mark.parametrize("rows", [0, 2])
async def test_a_sample_that_was_aborted_in_all_its_turns_does_no_harm(tokenizer: Any, style: str, rows: int) -> None:
    """The others are trained as ever, and SkyRL's preprocessing takes the batch."""
    plain = answer_with(tokenizer.eos_token_id)

    def answer(number: int, request: dict[str, Any]) -> bytes:
        aborted = "Name a prime" in tokenizer.decode(request["token_ids"])
        return reply_to(request, [], np.zeros((rows, 3, 2), np.uint8), []) if aborted else plain(number, request)

    skyrl_r3.enable()
    # Without logprobs: SkyRL itself refuses a turn that has none.
    output = await run(tokenizer, config(**STYLES[style]), answer, sampling_params={"max_tokens": 64})
    tensors = preprocess.convert_prompts_responses_to_batch_tensors(
        tokenizer,
        output["prompt_token_ids"],
        output["response_ids"],
        output["rewards"],
        output["loss_masks"],
        None,
        output["rollout_expert_indices"],
    )
    assert tensors[-1] is not None
    for i in (0, 2, 3):
        ids = output["rollout_expert_indices"][i].ids
        length = len(output["prompt_token_ids"][i]) + len(output["response_ids"][i])
        np.testing.assert_array_equal(tensors[-1][i, -length:][: len(ids)].numpy(), ids)


def test_routes_of_another_prompt_are_an_error(tokenizer: Any) -> None:
    skyrl_r3.enable()
    from skyrl.train.generators.skyrl_gym_generator import AgentLoopState, TurnOutput

    prompt, response = [1, 2, 3], [4, 5]
    routes = RoutedExperts(canned.routes_of([1, 9, 3, 4]), np.array([1, 9, 3, 4], np.int32))
    state = AgentLoopState(
        chat_history=[], input_ids=prompt, loss_mask=[], rollout_logprobs=None, response_end_idx=None, done=False
    )
    turn = TurnOutput(
        output="x", output_ids=response, output_logprobs=None, new_obs=[], obs_ids=[], reward=0.0,
        rollout_expert_indices=routes,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    generator = SkyRLGymGenerator(config(), SkyRLGymConfig(max_env_workers=0), None, tokenizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RouteError) as caught:
        generator._update_agent_loop_state_with_multiturn_chat_template(state, turn)
    assert (caught.value.expected, caught.value.got) == ("token 2 in row 1 of the prompt", "token 9")


@pytest.mark.case("R78")
def test_skyrl_still_refuses_step_wise_training_with_routes(tokenizer: Any) -> None:
    skyrl_r3.enable()
    with pytest.raises(ValueError, match="step_wise_trajectories"):
        SkyRLGymGenerator(config(step_wise_trajectories=True), SkyRLGymConfig(), None, tokenizer)  # pyright: ignore[reportArgumentType]


@pytest.mark.case("R101")
def test_skyrl_still_refuses_the_engine_s_ray_backend_with_routes() -> None:
    skyrl_r3.enable()
    cfg = SkyRLTrainConfig()
    cfg.trainer.strategy = "megatron"
    cfg.trainer.policy.megatron_config.moe_enable_routing_replay = True
    cfg.generator.inference_engine.enable_return_routed_experts = True
    cfg.generator.inference_engine.distributed_executor_backend = "mp"
    validate_inference_engine_cfg(cfg)
    cfg.generator.inference_engine.distributed_executor_backend = "ray"
    with pytest.raises(AssertionError, match="ray backend"):
        validate_inference_engine_cfg(cfg)


async def test_skyrl_still_refuses_a_custom_chat_template(tokenizer: Any) -> None:
    skyrl_r3.enable()
    cfg = config(max_turns=2, chat_template=ChatTemplateConfig(source="name", name_or_path="qwen3_without_thinking"))
    answer = answer_with(tokenizer.eos_token_id)
    with pytest.raises(ValueError, match="Rollout expert indices bookkeeping is not supported"):
        await run(tokenizer, cfg, answer, sampling_params={"max_tokens": 64})
