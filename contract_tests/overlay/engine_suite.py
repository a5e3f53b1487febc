"""Which engines are refused, and what the others say of their model: with vLLM's real configs, made without an engine.

vLLM 0.30 refuses some of it by itself when the routes flag is on; those configs are made without the flag, as an older
vLLM would have taken them. Its release is pretended, and so is load balancing, for which vLLM wants a GPU.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

import skyrl_r3
from contract_tests import canned
from skyrl_r3.errors import EngineError, OverlayError
from skyrl_r3.hooks import engine as hook
from skyrl_r3.spec import RouteSpec

_COMMON = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**_EXPERTS, "mlp_only_layers": [0]}),
    "dense": ("qwen3", "Qwen3ForCausalLM", {}),
    "hybrid": ("qwen3_next", "Qwen3NextForCausalLM", _EXPERTS),
}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


class Engines:
    """Engines with vLLM's config, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def model(self, name: str) -> str:
        """The folder of a model that has a config and no weights."""
        path = self._folder / name
        if not path.exists():
            family, architecture, fields = MODELS[name]
            config = AutoConfig.for_model(family, **_COMMON, **fields, architectures=[architecture])
            config.save_pretrained(path)
        return str(path)

    def engine(self, model: str = "moe", *, flag: bool = True, **options: Any) -> Any:
        """``options`` are vLLM's engine arguments."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        key = repr((model, flag, options))
        if key not in self._made:
            args = AsyncEngineArgs(
                model=self.model(model),
                skip_tokenizer_init=True,
                max_model_len=128,
                enable_return_routed_experts=flag,
                **options,
            )
            self._made[key] = args.create_engine_config()
        stopped: list[str] = []
        shutdown = lambda: stopped.append("shutdown")  # noqa: E731
        return SimpleNamespace(vllm_config=self._made[key], shutdown=shutdown, stopped=stopped)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("models"))


def as_release(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Have vLLM say that it is another release."""
    import vllm

    if version is None:
        monkeypatch.delattr(vllm, "__version__")
    else:
        monkeypatch.setattr(vllm, "__version__", version)


def refused(engine: Any, flags: str, **cli_args: Any) -> EngineError:
    """The error, if it is about the routes flag with ``flags``."""
    with pytest.raises(EngineError) as caught:
        hook.refuse_combinations(SimpleNamespace(**cli_args), engine)
    error = caught.value
    assert isinstance(error, OverlayError)
    assert error.field == f"--enable-return-routed-experts with {flags}"
    assert error.hint
    assert "\n" not in str(error)
    assert getattr(engine, "stopped", ["shutdown"]) == ["shutdown"]
    return error


def accepted(engine: Any, **cli_args: Any) -> None:
    hook.refuse_combinations(SimpleNamespace(**cli_args), engine)
    assert getattr(engine, "stopped", []) == []


class EngineContract:
    """Tests that hold in every line."""

    @pytest.mark.parametrize("version", [None, "dev", "0.16.0", "0.23.0", "0.30.0", "0.33.0"])
    def test_an_ordinary_engine_is_accepted(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch, version: str | None
    ) -> None:
        as_release(monkeypatch, version)
        accepted(engines.engine())
        accepted(engines.engine(), pipeline_parallel_size=1, distributed_executor_backend="mp", enable_eplb=False)

    @pytest.mark.case("R04")
    def test_pipeline_parallelism(self, engines: Engines) -> None:
        error = refused(engines.engine(flag=False, pipeline_parallel_size=2), "--pipeline-parallel-size")
        assert (error.expected, error.got) == ("1", "2")
        with pytest.raises(ValueError, match=r"enable-return-routed-experts is incompatible"):
            engines.engine(pipeline_parallel_size=2)  # As vLLM has it from 0.22.0 on.

    @pytest.mark.case("R06", "R51")
    def test_connectors(self, engines: Engines) -> None:
        error = refused(engines.engine(flag=False, kv_transfer_config=OFFLOADING), "--kv-transfer-config")
        assert (error.expected, error.got) == ("none", "OffloadingConnector")
        with pytest.raises(ValueError, match=r"incompatible with KV"):
            engines.engine(kv_transfer_config=OFFLOADING)

    @pytest.mark.case("R06")
    def test_offloading_which_this_vllm_lets_through(self, engines: Engines) -> None:
        error = refused(engines.engine(kv_offloading_size=1.0), "--kv-offloading-size")
        assert (error.expected, error.got) == ("none", "1.0 GiB")

    @pytest.mark.case("R51")
    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    @pytest.mark.parametrize("as_text", [False, True])
    def test_prefill_and_decode_servers_as_skyrl_starts_them(self, role: str, as_text: bool) -> None:
        """SkyRL sets the argument, which is a dict or its JSON."""
        config: Any = {"kv_connector": "NixlConnector", "kv_role": role}
        if as_text:
            config = '{"kv_connector": "NixlConnector"}'
        error = refused(SimpleNamespace(), "--kv-transfer-config", kv_transfer_config=config)
        assert "NixlConnector" in error.got

    def test_a_transfer_config_without_a_connector(self) -> None:
        from vllm.config import KVTransferConfig

        accepted(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=KVTransferConfig())))
        accepted(SimpleNamespace(), kv_transfer_config={})

    @pytest.mark.case("R101")
    def test_the_ray_executor(self, engines: Engines) -> None:
        error = refused(engines.engine(distributed_executor_backend="ray"), "--distributed-executor-backend")
        assert (error.expected, error.got) == ("mp", "ray")

    @pytest.mark.case("R101")
    def test_a_ray_executor_by_its_class(self) -> None:
        from vllm.v1.executor.ray_executor import RayDistributedExecutor
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        refused(
            SimpleNamespace(), "--distributed-executor-backend", distributed_executor_backend=RayDistributedExecutor
        )
        accepted(SimpleNamespace(), distributed_executor_backend=UniProcExecutor)

    @pytest.mark.case("R05")
    @pytest.mark.parametrize("version", ["0.22.0", "0.23.0", "0.25.1", "0.26.0.dev7"])
    def test_a_draft_with_experts_before_0_26(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch, version: str
    ) -> None:
        draft = {"method": "draft_model", "model": engines.model("moe"), "num_speculative_tokens": 2}
        as_release(monkeypatch, version)
        error = refused(engines.engine(speculative_config=draft), "--speculative-config")
        assert (error.expected, error.got) == ("none, or vLLM 0.26.0", "draft_model")
        assert f"vLLM {version} " in error.hint

    @pytest.mark.case("R05")
    @pytest.mark.parametrize("version", ["0.26.0", "0.30.0", None])
    def test_a_draft_with_experts_since(
        self, engines: Engines, monkeypatch: pytest.MonkeyPatch, version: str | None
    ) -> None:
        draft = {"method": "draft_model", "model": engines.model("moe"), "num_speculative_tokens": 2}
        as_release(monkeypatch, version)
        accepted(engines.engine(speculative_config=draft))

    @pytest.mark.case("R05")
    def test_drafts_that_have_no_experts(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        dense = {"method": "draft_model", "model": engines.model("dense"), "num_speculative_tokens": 2}
        ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
        as_release(monkeypatch, "0.23.0")
        accepted(engines.engine(speculative_config=dense), speculative_config=dense)
        accepted(engines.engine(speculative_config=ngram), speculative_config=ngram)
        accepted(SimpleNamespace(), speculative_config=ngram)

    @pytest.mark.case("R05")
    @pytest.mark.parametrize("config", [{"method": "mtp"}, {"model": "org/draft"}, '{"method": "mtp"}'])
    def test_drafts_that_only_the_arguments_tell_of(self, monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
        as_release(monkeypatch, "0.23.0")
        assert refused(SimpleNamespace(), "--speculative-config", speculative_config=config).got in (
            "mtp",
            "org/draft",
            '{"method": "mtp"}',
        )

    @pytest.mark.case("R08")
    def test_hybrid_models(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        as_release(monkeypatch, "0.21.0")
        error = refused(engines.engine("hybrid"), "--model")
        assert (error.expected, error.got) == ("attention only, or vLLM 0.22.0", "a hybrid model")
        accepted(engines.engine("moe"))
        as_release(monkeypatch, "0.22.0")
        accepted(engines.engine("hybrid"))

    @pytest.mark.case("R15")
    def test_dense_models(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        served = engines.engine("dense")
        error = refused(served, "--model")
        assert (error.expected, error.got) == ("a mixture of experts", f"{engines.model('dense')} without experts")

    @pytest.mark.case("R15")
    def test_a_vllm_that_does_not_count_experts(self) -> None:
        def engine(**fields: Any) -> Any:
            return SimpleNamespace(model_config=SimpleNamespace(model="m", hf_text_config=SimpleNamespace(**fields)))

        refused(engine(num_hidden_layers=2, n_routed_experts=None), "--model")
        accepted(engine(num_hidden_layers=2, n_routed_experts=8))
        accepted(engine(num_hidden_layers=2))

    @pytest.mark.case("R03")
    @pytest.mark.parametrize(("version", "right"), [("0.15.1", False), ("0.16.0", True), ("0.30.0", True)])
    def test_load_balancing(self, engines: Engines, monkeypatch: pytest.MonkeyPatch, version: str, right: bool) -> None:
        served = engines.engine()
        served.vllm_config = copy.copy(served.vllm_config)
        served.vllm_config.parallel_config = copy.copy(served.vllm_config.parallel_config)
        served.vllm_config.parallel_config.enable_eplb = True
        as_release(monkeypatch, version)
        if right:
            accepted(served)
        else:
            assert refused(served, "--enable-eplb").expected == "it off, or vLLM 0.16.0"

    def test_what_is_not_there_is_not_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        as_release(monkeypatch, "0.15.0")
        for engine in (None, SimpleNamespace(), SimpleNamespace(vllm_config=None), SimpleNamespace(model_config=None)):
            accepted(engine)

    @pytest.mark.parametrize("arguments", [{"pipeline_parallel_size": 2}, {"distributed_executor_backend": "ray"}])
    def test_nothing_is_installed_in_the_app_of_a_refused_engine(self, arguments: dict[str, Any]) -> None:
        from fastapi import FastAPI
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

        def add(flag: bool) -> Any:
            app = FastAPI()
            args = SimpleNamespace(enable_return_routed_experts=flag, enable_lora=False, **arguments)
            before = len(app.router.routes)
            try:
                VLLMServerActor._add_custom_endpoints(app, canned.CannedEngine(lambda *_: None), args)
            finally:
                added.append(len(app.router.routes) - before)

        added: list[int] = []
        skyrl_r3.enable()
        try:
            with pytest.raises(EngineError, match=r"--enable-return-routed-experts with --"):
                add(True)
            add(False)  # Without the flag it is SkyRL's and vLLM's business.
        finally:
            skyrl_r3.disable()
        assert added[0] == 0 < added[1]

    # What it says of its model

    def test_the_spec_of_a_real_config(self, engines: Engines, caplog: Any) -> None:
        with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
            spec = hook.route_spec(engines.engine())
        assert spec == RouteSpec(layers=4, topk=2, num_experts=16, moe_layers=(1, 2, 3))
        assert caplog.records == []

    def test_where_vllm_counts_otherwise_it_is_right_and_nothing_is_guessed(
        self, engines: Engines, caplog: Any
    ) -> None:
        served = engines.engine()
        config = served.vllm_config.model_config
        model = SimpleNamespace(
            hf_text_config=config.hf_text_config,
            get_num_experts=lambda: 18,
            get_num_experts_per_tok=config.get_num_experts_per_tok,
            get_total_num_hidden_layers=lambda: 5,
        )
        with caplog.at_level(logging.WARNING, logger="skyrl_r3"):
            spec = hook.route_spec(SimpleNamespace(model_config=model))
        assert spec == RouteSpec(layers=5, topk=2, num_experts=18)
        (record,) = caplog.records
        assert record.args == ("layers 4, num_experts 16", "layers 5, num_experts 18")

    @pytest.mark.parametrize("counts", [{}, {"get_num_experts": lambda: 0, "get_num_experts_per_tok": lambda: None}])
    def test_what_vllm_does_not_say_is_read_from_the_config(self, engines: Engines, counts: dict[str, Any]) -> None:
        """vLLM 0.23 has no method for top-k, and 0 stands for unknown."""
        model = SimpleNamespace(hf_text_config=engines.engine().vllm_config.model_config.hf_text_config, **counts)
        spec = hook.route_spec(SimpleNamespace(model_config=model))
        assert spec == RouteSpec(layers=4, topk=2, num_experts=16, moe_layers=(1, 2, 3))

    def test_what_vllm_alone_knows(self) -> None:
        model = SimpleNamespace(hf_text_config=SimpleNamespace(), get_num_experts_per_tok=lambda: 6)
        assert hook.route_spec(SimpleNamespace(model_config=model)) == RouteSpec(topk=6)

    @pytest.mark.parametrize("engine", [None, SimpleNamespace(), SimpleNamespace(vllm_config=None)])
    def test_an_engine_that_says_nothing(self, engine: Any) -> None:
        assert hook.route_spec(engine) == RouteSpec()
