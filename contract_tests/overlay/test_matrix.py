"""Every client against every server, stock and patched, SkyRL 0.3.0 and 0.4.0, direct and through the real vllm-router.

Whoever upgrades a cluster does it one process at a time, so that every pair that can work has to, and the others must
fail as they do without the overlay.
"""

from __future__ import annotations

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract_tests.child import GRACE_S, Child
from contract_tests.overlay.matrix_peer import expected
from contract_tests.peer import VARIABLE, Peer, PeerError, python_04, router

SIDES = ("stock 0.3.0", "patched 0.3.0", "stock 0.4.0", "patched 0.4.0")

# By client and server: the encoding on the wire, as the better of the two knows it.
ENCODING = {
    "stock 0.3.0": ("nested", "nested", "packed", "packed"),
    "patched 0.3.0": ("nested", "frame/1", "packed", "frame/1"),
    "stock 0.4.0": ("nested", "nested", "packed", "packed"),
    "patched 0.4.0": ("nested", "frame/1", "packed", "frame/1"),
}
# What SkyRL itself can't: 0.3.0 takes an envelope for routes and hands it on, 0.4.0 raises on nested lists.
CANNOT = {
    ("stock 0.3.0", "stock 0.4.0"): "an envelope",
    ("stock 0.3.0", "patched 0.4.0"): "an envelope",
    ("stock 0.4.0", "stock 0.3.0"): "ValueError",
    ("stock 0.4.0", "patched 0.3.0"): "ValueError",
}
PROMPTS = [[1, 7, 11, 12, 13], [2, 8, 300, 2], [1, 9], [2, 10, 5, 5, 5, 5, 5, 5, 5]]


class Cluster:
    """A client and a server of each side, and a router in front of each server."""

    def __init__(self, stack: ExitStack) -> None:
        self.clients, self.servers = {}, {}
        for side in SIDES:
            python = sys.executable if side.endswith("0.3.0") else python_04()
            env = {"SKYRL_R3": "off"} if side.startswith("stock") else {}
            for peers, role in ((self.servers, "server"), (self.clients, "client")):
                script = Path(__file__).with_name("matrix_peer.py")
                peers[side] = stack.enter_context(Peer(python, script, role, env=env))
                peers[side].start()
        self.direct = {side: server.ask("address") for side, server in self.servers.items()}
        self.routed = {side: router_of(stack, url) for side, url in self.direct.items()}

    def generate(self, client: str, server: str, way: str, **batch: Any) -> Any:
        """What the client returns, and which encodings the server has written for it."""
        url = (self.direct if way == "direct" else self.routed)[server]
        self.servers[server].ask("encodings")
        output = self.clients[client].ask("generate", {"url": url, "batch": batch})
        return output, self.servers[server].ask("encodings")


def router_of(stack: ExitStack, url: str) -> str:
    ports = []
    for _ in range(2):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(str(sock.getsockname()[1]))
    command = [router(), "--worker-urls", url, "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", ports[1]]
    child = stack.enter_context(Child(command))
    stack.callback(child.wait, GRACE_S)
    stack.callback(child.process.terminate)
    address = f"http://127.0.0.1:{ports[0]}"
    for _ in range(300):
        assert child.process.poll() is None, f"the router ended: {child.stdout()[-2000:]}{child.stderr()[-2000:]}"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return address
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the router did not get ready: {child.stdout()[-2000:]}{child.stderr()[-2000:]}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture(params=["direct", "router"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def check(output: dict[str, Any], prompts: list[list[int]], *, starts: list[int] | None = None) -> None:
    """Tokens, logprobs and routes are those of the prompts, whatever they travelled in."""
    right = [expected(prompt, start) for prompt, start in zip(prompts, starts or [0] * len(prompts), strict=True)]
    assert output["token_ids"] == [one["token_ids"] for one in right]
    assert output["stop_reasons"] == ["stop"] * len(prompts)
    if output["logprobs"] is not None:
        assert output["logprobs"] == [one["logprobs"] for one in right]
    for routes, one in zip(output["routes"], right, strict=True):
        if isinstance(routes, list):
            routes = np.array(routes, dtype=one["routes"].dtype)
        np.testing.assert_array_equal(routes, one["routes"], strict=True)


PAIRS = [(client, server) for client in SIDES for server in SIDES]


@pytest.mark.parametrize(("client", "server"), [pair for pair in PAIRS if pair not in CANNOT])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_every_pair_that_can_work_does(cluster: Cluster, client: str, server: str, way: str, logprobs: Any) -> None:
    sampling = {} if logprobs is None else {"logprobs": logprobs}
    output, encodings = cluster.generate(client, server, way, prompt_token_ids=PROMPTS, sampling_params=sampling)
    check(output, PROMPTS)
    assert (output["logprobs"] is None) is (logprobs is None)
    assert encodings == [ENCODING[client][SIDES.index(server)]] * len(PROMPTS)
    stock = client.startswith("stock 0.3.0")
    assert {type(routes) for routes in output["routes"]} == {list if stock else np.ndarray}


@pytest.mark.parametrize(("client", "server"), CANNOT)
def test_the_pairs_that_cannot_work_fail_as_without_the_overlay(
    cluster: Cluster, client: str, server: str, way: str
) -> None:
    batch: dict[str, Any] = {"prompt_token_ids": PROMPTS, "sampling_params": {"logprobs": 0}}
    if CANNOT[client, server] == "ValueError":
        with pytest.raises(PeerError, match=r"^ValueError: .*must return packed routed_experts"):
            cluster.generate(client, server, way, **batch)
    else:
        output, _ = cluster.generate(client, server, way, **batch)
        assert {frozenset(routes) for routes in output["routes"]} == {frozenset({"data", "shape", "dtype"})}


@pytest.mark.parametrize(
    ("client", "server"), [pair for pair in PAIRS if pair not in CANNOT and pair[0].endswith("0.4.0")]
)
def test_rows_that_the_client_has_already_are_left_out(cluster: Cluster, client: str, server: str, way: str) -> None:
    starts = [0, 3, 2, 9]
    output, _ = cluster.generate(
        client,
        server,
        way,
        prompt_token_ids=PROMPTS,
        sampling_params={"logprobs": 0},
        routed_experts_prompt_starts=starts,
    )
    check(output, PROMPTS, starts=starts)


def test_a_missing_interpreter_is_a_failure_and_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pytest.fail.Exception) as caught:
        python_04()
    assert VARIABLE in str(caught.value)
