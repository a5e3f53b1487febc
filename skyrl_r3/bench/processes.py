"""The processes of a run: a server and a client for each SkyRL, overlay on and off, and a router for each server."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from skyrl_r3.bench.cases import Case
from skyrl_r3.bench.pipe import ENDING, Child

_HOST = "127.0.0.1"
_START_S = 300


@dataclass
class Pair:
    """A server and a client process, the addresses of the server, and a router in front of it."""

    server: Child
    client: Child
    router: Child | None = None
    urls: dict[str, str] = field(default_factory=dict)

    def on(self, route: str) -> dict[str, Child]:
        """Those that a reply on ``route`` passes through."""
        found = {"server": self.server, "client": self.client}
        return found | {"router": self.router} if route == "router" and self.router else found


Pairs = dict[tuple[str, bool], Pair]
"""By SkyRL's line and whether the overlay is on."""


def start(stack: ExitStack, lines: Mapping[str, Any], router: str | None, folder: Path) -> Pairs:
    """Start all at once, because their imports take seconds. They end with ``stack``."""

    def child(name: str, command: list[str], env: dict[str, str]) -> Child:
        with _undisturbed():
            started = Child(name, command, env, folder / f"{name.replace(' ', '-')}.log")
            stack.callback(started.stop)
        return started

    inherited = {key: value for key, value in os.environ.items() if key != "SKYRL_R3"}
    pairs: Pairs = {}
    for line, environment in lines.items():
        for overlay in (False, True):
            env = inherited if overlay else inherited | {"SKYRL_R3": "off"}
            name, module = _name(line, overlay), [environment["python"], "-m"]
            server = child(f"server {name}", [*module, "skyrl_r3.bench.server"], env)
            client = child(f"client {name}", [*module, "skyrl_r3.bench.client"], env)
            pairs[line, overlay] = Pair(server, client)
    # Drawn at once: a router may start so late that its port would be drawn for another one too.
    ports = iter(_free_ports(2 * len(pairs)))
    for key, pair in pairs.items():
        pair.urls["direct"] = url = f"http://{_HOST}:{pair.server.answer(_START_S)['port']}"
        pair.client.answer(_START_S)
        if router:
            port, metrics = next(ports), next(ports)
            options = {"worker-urls": url, "host": _HOST, "port": port, "policy": "round_robin"}
            options |= {"prometheus-host": _HOST, "prometheus-port": metrics}
            command = [router, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
            pair.router = child(f"router {_name(*key)}", command, inherited)
            pair.urls["router"] = f"http://{_HOST}:{port}"
    for pair in pairs.values():
        if pair.router:
            _wait_for(pair.router, pair.urls["router"])
    return pairs


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold :data:`ENDING` back, so that none of them ever finds a process that nobody knows of yet."""
    held: list[int] = []
    handlers = {number: signal.signal(number, lambda got, _: held.append(got)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in held[:1]:
        signal.raise_signal(number)


def prepare(pair: Pair, case: Case) -> None:
    """Have the server make the engine's output for ``case`` now, and not in the call that is timed."""
    request = urllib.request.Request(
        f"{pair.urls['direct']}/bench/prepare", data=json.dumps(astuple(case)).encode(), method="POST"
    )
    urllib.request.urlopen(request, timeout=_START_S).close()


def _name(line: str, overlay: bool) -> str:
    return f"{line} {'overlay' if overlay else 'stock'}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_HOST, 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait_for(router: Child, url: str) -> None:
    """Wait until a bare fetch passes through ``router``, and nobody else answers at its address."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and not router.ended():
        try:
            with urllib.request.urlopen(f"{url}/bench/bare/3", data=b"{}", timeout=2) as reply:
                if len(reply.read()) == 3:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    router.fail("did not start")
