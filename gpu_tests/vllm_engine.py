"""vLLM behind SkyRL 0.3's own endpoints, stock and with the overlay, on one engine and in this process.

To compare two ways to move a reply bit for bit, both need the same reply. An engine gives the same twice only if it
computes the same requests in the same batches, which nobody can ask of 32 concurrent ones, of preemption or of a GPU.
So generation is real and happens once: :class:`~gpu_tests.recorder.Recorder` keeps what the engine gave, and hands that
to later passes.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import multiprocessing
import socket
import subprocess
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import skyrl_r3
from gpu_tests.generation import Generation, Model
from gpu_tests.recorder import Recorder

HOST = "127.0.0.1"
NAME = "r3-model"
CALL_S, STOP_S = 540, 60
SIDES = ("stock", "overlay")


class VllmEngine:
    """One engine and two servers on it, ``urls["stock"]`` and ``urls["overlay"]``, on a loop in a thread of its own.

    Implements :class:`gpu_tests.generation.Engine`.

    Args:
        model: To load, in its own dtype.
        device: ``cpu`` or ``cuda``, which this vLLM is built for.
        engine_args: Of vLLM, as its command line has them.
    """

    def __init__(self, model: Model, *, device: str, **engine_args: Any) -> None:
        self.model = model
        self.name = f"vLLM {importlib.metadata.version(_distribution())}, {device}"
        self.urls: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vLLM server", daemon=True)
        self._thread.start()
        self._servers: list[Any] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._engine: Any = None
        self._watch: subprocess.Popen[bytes] | None = None
        try:
            self.call(self._start(model.path, device, engine_args))
        except BaseException:
            self.close()
            raise

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the server's loop, within :data:`CALL_S` seconds."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def _start(self, path: str | Path, device: str, engine_args: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # In releases before 0.30, as SkyRL 0.3.0's own 0.23.
            from vllm.entrypoints.openai.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"host": HOST, "model": path, "served_model_name": NAME} | engine_args
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        flags += ["--enable-return-routed-experts", *(["--enforce-eager"] if device == "cpu" else [])]
        args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        self._watch = _end_with_us()
        self.recorder = Recorder(self._engine)
        for side in SIDES:
            with overlay(on=side == "overlay"):
                await self._serve(side, args)

    async def _serve(self, side: str, args: Any) -> None:
        """Serve vLLM's app with SkyRL's endpoints, which are ours if the overlay is on now."""
        import uvicorn
        from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor as skyrl

        # As SkyRL's start-up does, by the names that it has bound.
        app: Any = skyrl.build_app(args)
        skyrl.VLLMServerActor._add_custom_endpoints(app, self.recorder, args)
        await skyrl.init_app_state(self._engine, app.state, args)
        sock = socket.socket()
        sock.bind((HOST, 0))
        app.state.server = server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        server.capture_signals = _no_signals  # A thread has none to capture.
        self.urls[side] = f"http://{HOST}:{sock.getsockname()[1]}"
        self._servers.append(server)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[sock])))

    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Generation]:
        """Generate for all ``prompts``, through SkyRL's client and the overlay.

        The seed is the engine's: one of a request's own ends vLLM 0.30.0 on a CPU where a prompt comes in chunks.
        """
        from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
        from skyrl.train.config import SamplingParams

        params = SamplingParams(temperature=temperature, max_generate_length=max_tokens)
        request: Any = {
            "prompt_token_ids": [list(prompt) for prompt in prompts],
            "sampling_params": get_sampling_params_for_backend("vllm", params),
        }
        url = self.urls["overlay"]
        client = RemoteInferenceClient(
            proxy_url=url,
            server_urls=[url],
            data_parallel_size=1,
            model_name=NAME,
            enable_return_routed_experts=True,
        )

        async def ask() -> Any:
            try:
                return await asyncio.wait_for(client.generate(request), CALL_S)
            finally:
                await client.teardown()

        self.recorder.begin(again=False)
        with overlay(on=True):
            output = asyncio.run(ask())
        return [
            Generation(
                prompt=list(prompt),
                response=list(output["response_ids"][i]),
                logprobs=np.array(output["response_logprobs"][i]),
                routes=output["rollout_expert_indices"][i].ids,
                finish_reason=output["stop_reasons"][i],
            )
            for i, prompt in enumerate(prompts)
        ]

    def count(self, name: str) -> float:
        """The value of vLLM's counter ``name``, over all engines of this process."""
        from prometheus_client import REGISTRY

        found = [sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name]
        if not found:
            raise KeyError(f"counter: expected {name} among vLLM's, got none of that name")
        return sum(found)

    def close(self) -> None:
        """End servers, engine and thread."""

        async def stop() -> None:
            for server in self._servers:
                server.should_exit = server.force_exit = True
            await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), STOP_S)
            if self._engine is not None:
                self._engine.shutdown()  # Here, as it cancels a task of this loop.

        try:
            self.call(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            if self._watch is not None:
                self._watch.kill()
                self._watch.communicate()


def _distribution() -> str:
    """The name that vLLM is installed under: the build for CPUs has another."""
    return importlib.metadata.packages_distributions()["vllm"][0]


def _end_with_us() -> subprocess.Popen[bytes]:
    """Have vLLM's processes end when this one ends without :meth:`VllmEngine.close`: killed, or by faulthandler.

    vLLM 0.30.0's would go on for ever. A shell waits for the end of its input, whose other end is here.
    """
    ids = " ".join(str(child.pid) for child in multiprocessing.active_children())
    return subprocess.Popen(["sh", "-c", f"cat; kill -9 {ids}"], stdin=subprocess.PIPE, start_new_session=True)


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


@contextmanager
def overlay(*, on: bool) -> Iterator[None]:
    """This process with the overlay on, or as SkyRL is; off afterwards."""
    if on:
        skyrl_r3.enable()
    else:
        skyrl_r3.disable()
    try:
        yield
    finally:
        skyrl_r3.disable()
