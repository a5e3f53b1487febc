"""Serve SkyRL 0.3.0's own endpoints on a vLLM newer than the one it pins, on 127.0.0.1 only.

SkyRL 0.3.0 pins vLLM 0.23.0, whose CPU build fails in its MoE kernel. vLLM 0.30.0 runs, and on a CPU it records which
experts were picked, as 0.26.0 does not. Only SkyRL's start-up calls drifted between the two (``create_server_socket``
now wants ``reuse_port``, ``cli_args`` has moved), so this launcher parses the options and makes socket, app and engine
under vLLM's present names, then calls SkyRL's real ``VLLMServerActor._add_custom_endpoints``. The request handler is
SkyRL's, or, with the overlay on, the overlay's: nothing in this file imports or enables it, or changes vLLM.

Usage: ``python ci/serve_skyrl_03.py --port N --r3-status FILE [any option of the vLLM server]``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


async def serve(cli_args: argparse.Namespace, status_file: Path) -> None:
    """Build the engine and the app, add SkyRL's endpoints, and serve until SIGTERM or SIGINT."""
    import uvicorn
    from process_status import write_status
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((HOST, cli_args.port))

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs.from_cli_args(cli_args), usage_context=UsageContext.OPENAI_API_SERVER
    )
    try:
        tasks = await engine.get_supported_tasks()
        app: Any = build_app(cli_args, tasks, engine.model_config)
        VLLMServerActor._add_custom_endpoints(app, engine, cli_args)
        await init_app_state(engine, app.state, cli_args, tasks)
        write_status(status_file, "server")

        config = uvicorn.Config(app, host=HOST, port=cli_args.port, log_level=cli_args.uvicorn_log_level)
        app.state.server = server = uvicorn.Server(config)
        await server.serve(sockets=[sock])
    finally:
        engine.shutdown()
        sock.close()


def _stop_before_uvicorn(signum: int, _frame: Any) -> None:
    """Leave through the ``finally`` clauses when told to stop while the model still loads."""
    raise SystemExit(128 + signum)


def main(argv: list[str]) -> None:
    """Parse our two flags, hand every other one to vLLM's parser, and serve."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--r3-status", type=Path, required=True, help="write skyrl_r3.status() here once the app is built")
    mine, rest = own.parse_known_args(argv)

    # The switches that SkyRL's own entry point sets before it builds the app: /pause and /resume are dev-mode routes.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    signal.signal(signal.SIGTERM, _stop_before_uvicorn)

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(rest)
    cli_args.host = HOST
    asyncio.run(serve(cli_args, mine.r3_status))


if __name__ == "__main__":
    # Guarded: vLLM starts its engine process with "spawn", which imports this file again.
    main(sys.argv[1:])
