"""``skyrl-r3 status --server``: SkyRL's real servers, stock and patched, the real router, and doubles of what breaks.

The engine is a double in all of them: what is found out is how replies travel.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from contract_tests import canned
from contract_tests.overlay.test_matrix import router_of
from contract_tests.peer import Peer, python_04
from skyrl_r3 import frame, policy, probe, wire
from skyrl_r3.cli import app
from skyrl_r3.reply import Reply
from skyrl_r3.spec import RouteSpec

SIDES = ("stock 0.3.0", "patched 0.3.0", "stock 0.4.0", "patched 0.4.0")
ROWS = [12, canned.LAYERS, canned.TOPK]  # 8 tokens of the prompt, and the 5 of the double's engine but for the last.
WORKER = "skyrl-r3 status --server http://WORKER:PORT"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Addresses of SkyRL's own server by side, and of a router in front of two of them."""
    with ExitStack() as stack:
        peers = {}
        for side in SIDES:
            python = sys.executable if side.endswith("0.3.0") else python_04()
            env = {"SKYRL_R3": "off"} if side.startswith("stock") else {}
            script = Path(__file__).with_name("matrix_peer.py")
            peers[side] = stack.enter_context(Peer(python, script, "server", env=env))
            peers[side].start()
        urls = {side: peer.ask("address") for side, peer in peers.items()}
        routed = {f"{side}, routed": router_of(stack, urls[side]) for side in ("stock 0.4.0", "patched 0.3.0")}
        yield urls | routed


Speech = Callable[[Callable[[bytes], Any]], None]
"""Writes an answer by itself, with what it is given."""
Answered = tuple[int, str, bytes] | Speech
Answers = Callable[[str, bytes | None], Answered]


@contextmanager
def answering(answer: Answers) -> Iterator[str]:
    """Address of a server that answers with what ``answer(path, body)`` gives: status, content type, body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(self.rfile.read(int(self.headers["Content-Length"])))

        def reply(self, body: bytes | None) -> None:
            given = answer(self.path, body)
            if callable(given):
                given(self.wfile.write)
                return
            status, content_type, answered = given
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(answered)))
            self.end_headers()
            self.wfile.write(answered)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def generating(answer: Callable[[dict[str, Any]], Answered], **gets: Any) -> Answers:
    """Answers requests for tokens as told, ``gets`` by their last name, and everything else with a 404."""

    def answers(path: str, body: bytes | None) -> Answered:
        if path == wire.GENERATE_PATH and body is not None:
            return answer(json.loads(body))
        got = gets.get(path.rpartition("/")[2])
        return (404, "application/json", b'{"detail":"Not Found"}') if got is None else (200, "application/json", got)

    return answers


def passing(url: str, request: Callable[[dict[str, Any]], dict[str, Any]], reply: Callable[[Any], Any]) -> Answers:
    """Double of a router in front of ``url``, which changes requests, and JSON replies."""

    def answers(path: str, body: bytes | None) -> tuple[int, str, bytes]:
        data = None if body is None else json.dumps(request(json.loads(body))).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=30) as response:
                content_type, got = response.headers["Content-Type"], response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read()
        if data is not None and content_type == "application/json":
            got = json.dumps(reply(json.loads(got))).encode()
        return 200, content_type, got

    return answers


def writing(head: str, body: bytes = b"") -> Speech:
    """An answer with a ``head`` of its own: status line and headers."""

    def speech(write: Callable[[bytes], Any]) -> None:
        write("\r\n".join((f"HTTP/1.1 {head}", "", "")).encode() + body)

    return speech


def command(*urls: str, exits: int) -> dict[str, Any]:
    """What the command says of servers, in JSON."""
    ran = CliRunner().invoke(app, ["status", "--json", *(part for url in urls for part in ("--server", url))])
    assert ran.exit_code == exits, ran.output
    return json.loads(ran.stdout)


def said(url: str, exits: int) -> str:
    """What it prints, in one line."""
    ran = CliRunner().invoke(app, ["status", "--server", url])
    assert ran.exit_code == exits, ran.output
    return " ".join(ran.output.split())


def only_problem(probed: probe.Probed) -> tuple[str, str, str]:
    (problem,) = probed.problems
    assert probed.verdict == problem.what
    return problem.kind, problem.what, problem.cure


# SkyRL's own servers


@pytest.mark.parametrize(
    ("side", "unasked", "stock"),
    [
        ("patched 0.3.0", "nested", "nested lists (SkyRL 0.3)"),
        ("patched 0.4.0", "packed", "packed routes (SkyRL 0.4)"),
        ("patched 0.3.0, routed", "nested", "nested lists (SkyRL 0.3)"),
    ],
)
def test_a_patched_server(servers: dict[str, str], side: str, unasked: str, stock: str) -> None:
    found = command(servers[side], exits=0)
    (server,) = found["servers"]
    assert found["well"]
    assert server["problems"] == []
    assert server["verdict"].startswith("skyrl-r3 is active")
    assert stock in server["verdict"]
    assert (server["asked"]["encoding"], server["unasked"]["encoding"]) == ("frame/1", unasked)
    assert server["asked"]["content_type"] == "application/vnd.skyrl-r3.frame"
    assert (server["asked"]["shape"], server["asked"]["dtype"]) == (ROWS, "uint8")
    assert server["unasked"]["shape"] == ROWS
    assert server["asked"]["frame"]["prompt_tokens"] == 8
    assert server["asked"]["body_bytes"] > 0
    assert server["asked"]["findings"] == []


@pytest.mark.parametrize(
    ("side", "encoding"), [("stock 0.3.0", "nested"), ("stock 0.4.0", "packed"), ("stock 0.4.0, routed", "packed")]
)
def test_a_stock_server(servers: dict[str, str], side: str, encoding: str) -> None:
    (server,) = command(servers[side], exits=1)["servers"]
    (problem,) = server["problems"]
    assert problem["kind"] == "unpatched"
    assert f"as stock SkyRL {side[6:9]}" in problem["what"]
    assert "Install skyrl-r3 in the server's environment" in problem["cure"]
    assert "SKYRL_R3=off" in problem["cure"]
    assert WORKER in problem["cure"]
    assert server["asked"]["encoding"] == server["unasked"]["encoding"] == encoding
    assert server["asked"]["shape"] == ROWS


def test_one_glance_for_each_of_two(servers: dict[str, str]) -> None:
    ran = CliRunner().invoke(
        app, ["status", *(f"--server={servers[side]}" for side in ("patched 0.4.0", "stock 0.3.0"))]
    )
    assert ran.exit_code == 1
    out = " ".join(ran.output.split())
    assert f"{servers['patched 0.4.0']}: skyrl-r3 is active" in out
    assert "frame/1, " in out
    assert f"uint8 {ROWS}" in out
    assert f"{servers['stock 0.3.0']}: sends nested lists" in out
    assert out.count("To do: Install skyrl-r3") == 1
    assert out.endswith("1 of 2 with a problem: see above what to do.")


@pytest.mark.parametrize("routes", [None], ids=["null"])
async def test_a_server_without_the_flag(routes: None) -> None:
    """SkyRL's own handler; the engine captures nothing then."""
    from asyncio import to_thread

    engine = canned.CannedEngine(lambda prompt, _: canned.completion([7, 8], prompt=prompt, routed_experts=routes))
    async with canned.served(canned.skyrl_app(engine, enable_return_routed_experts=False)) as url:
        kind, what, cure = only_problem(await to_thread(probe.probe, url))
    assert kind == "no-routes"
    assert "--enable-return-routed-experts" in what
    assert "dense" in what
    assert "--enable-return-routed-experts" in cure
    assert "generator.inference_engine.enable_return_routed_experts=true" in cure


# Between


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: {key: value for key, value in body.items() if key != name}


def stripped(body: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [without("routed_experts")(choice) for choice in body["choices"]]}


def same(body: Any) -> Any:
    return body


def test_a_router_that_strips_the_reply(servers: dict[str, str]) -> None:
    with answering(passing(servers["stock 0.4.0"], same, stripped)) as url:
        kind, what, cure = only_problem(probe.probe(url))
        out = said(url, exits=1)
    assert kind == "stripped"
    assert "strips it on the way" in what
    assert WORKER in cure
    assert WORKER in out


def test_a_router_that_drops_the_field(servers: dict[str, str]) -> None:
    """The server's metrics tell that it is patched, where the router lets one see them."""
    with answering(passing(servers["patched 0.4.0"], without(wire.ENCODINGS_FIELD), same)) as url:
        kind, what, cure = only_problem(probe.probe(url))
    assert kind == "unpatched"
    assert f"or the field {wire.ENCODINGS_FIELD} is lost on the way" in what
    assert WORKER in cure


@pytest.mark.parametrize(("metrics", "kind"), [(b"skyrl_r3_replies_total 1", "field-lost"), (b"vllm 1", "unpatched")])
def test_what_metrics_tell(servers: dict[str, str], metrics: bytes, kind: str) -> None:
    between = passing(servers["stock 0.4.0"], same, same)
    with answering(
        lambda path, body: (200, "text/plain", metrics) if path == "/metrics" else between(path, body)
    ) as url:
        found, what, cure = only_problem(probe.probe(url))
    assert found == kind
    assert wire.ENCODINGS_FIELD in what
    assert ("unknown fields of requests" in cure) is (kind == "field-lost")


# Wrong answers


def json_body(value: Any) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(value).encode()


def routes_body(routes: Any, tokens: int = 2) -> tuple[int, str, bytes]:
    choice = {"token_ids": [5] * tokens, "finish_reason": "stop" if tokens else "abort", "logprobs": None}
    return json_body({"choices": [choice | {"routed_experts": routes}]})


def framed(routes: Any = ((0, 1),), **spec: Any) -> bytes:
    """A reply of two tokens as a frame, with ``routes`` in each of its 9 rows."""
    ids = np.array([routes] * 9, dtype=np.uint8)
    tokens = np.array([5, 5], dtype=np.int32)
    return frame.dump(
        Reply(token_ids=tokens, finish_reason="stop", logprobs=None, routed_experts=ids, spec=RouteSpec(topk=2, **spec))
    )


FRAMED = framed()


@pytest.mark.parametrize(
    ("answer", "kind", "says", "cure"),
    [
        ((200, "text/html", b"<html>Ray dashboard</html>"), "not-skyrl", "a web page (text/html)", "something else"),
        ((404, "application/json", b'{"detail":"Not Found"}'), "not-skyrl", "Not Found", "vllm_server_actor"),
        ((404, "application/json", b'{"detail":"The model `x` does not exist."}'), "error", "model `x`", "refuses"),
        ((400, "application/json", b'{"detail":"no LoRA"}'), "error", "HTTP 400: no LoRA", "refuses"),
        ((400, "application/json", b'{"error":{"message":"too long"}}'), "error", "HTTP 400: too long", "refuses"),
        ((401, "text/plain", b"who?"), "error", "HTTP 401: who?", "credentials"),
        ((500, "text/plain", b"Internal Server Error"), "error", "HTTP 500: Internal Server Error", "server's log"),
        ((503, "text/plain", b"no worker"), "error", "HTTP 503: no worker", "no server that is well"),
        ((200, "application/json", b"{"), "broken", "expected JSON", WORKER),
        (json_body({"choices": []}), "broken", "choices", WORKER),
        (routes_body({"data": "AA", "shape": [9, 1, 2], "dtype": "uint8"}), "broken", "routed_experts", WORKER),
        (routes_body([[[0, 0]]] * 9), "findings", "different experts", "do not train"),
        (routes_body([[[0, 1]]] * 5), "findings", "5 rows", "do not train"),
        (
            (405, "application/json", b'{"detail":"Method Not Allowed"}'),
            "not-skyrl",
            "Not Allowed",
            "vllm_server_actor",
        ),
        ((400, "application/json", b'{"message":"too long"}'), "error", "HTTP 400: too long", "refuses"),
        ((500, "application/json", b"[" * 200_000), "error", "HTTP 500: [[[", "server's log"),
        ((200, "application/json", b'{"choices":' + b"[" * 200_000), "broken", "depth limit", WORKER),
        ((200, frame.CONTENT_TYPE, FRAMED.replace(b"skyrl-r3/1", b"skyrl-r3/2")), "version", "/2'", "same release"),
        ((200, frame.CONTENT_TYPE, framed(layers=3)), "findings", "3 layers, as the model has", "do not train"),
        (writing("200 OK\r\nContent-Length: 9999", FRAMED), "broken", f"after {len(FRAMED)} of 9999 bytes", "cuts"),
        (writing("200 OK\r\nTransfer-Encoding: chunked", b"2\r\n{}\r\n"), "broken", "cut off after 2 bytes", "cuts"),
        (writing("200 OK\r\nContent-Encoding: gzip", gzip.compress(FRAMED)), "broken", "gzip", "changes bodies"),
        (
            writing("502 No\r\nContent-Encoding: gzip", b"\x1f"),
            "error",
            "HTTP 502: the body is compressed",
            "behind it",
        ),
        (
            writing("307 No\r\nLocation: http://there:1/x"),
            "redirect",
            "307: sends one on to http://there:1/x",
            "Use that",
        ),
        (writing("302 No\r\nLocation: /login"), "redirect", "HTTP 302: sends one on to /login", "credentials"),
        (writing("304 No"), "error", "HTTP 304", "refuses"),
        (routes_body(None, tokens=0), "aborted", "before its first token", "Ask again"),
        (routes_body(None), "no-routes", "dense", "--enable-return-routed-experts"),
    ],
)
def test_an_answer_that_is_no_good(answer: Answered, kind: str, says: str, cure: str) -> None:
    with answering(generating(lambda _: answer)) as url:
        found = only_problem(probe.probe(url))
    assert found[0] == kind
    assert says in found[1]
    assert cure in found[2]


@pytest.mark.parametrize("where", ["models", "generate"])
def test_an_answer_without_end(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MOST_BYTES", 10_000)
    done = threading.Event()

    def pour(write: Callable[[bytes], Any]) -> None:
        with suppress(OSError):
            write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not done.is_set():
                write(b" " * 5_000)

    good = generating(lambda _: (200, "", FRAMED))
    with answering(lambda path, body: pour if path.endswith(where) else good(path, body)) as url:
        probed = probe.probe(url, limit_s=10)
        done.set()
    if where == "models":
        # It only tells the name of the model.
        assert (probed.model, probed.asked.encoding) == (None, "frame/1")
    else:
        kind, what, _ = only_problem(probed)
        assert kind == "broken"
        assert "more than 10000 bytes" in what


def test_models_of_any_kind() -> None:
    for models in (b"[" * 200_000, b'{"data":[]}', b"[]", b'{"data":[{"id":"\\ud800"}]}', b'"'):
        with answering(generating(lambda _: routes_body(None), models=models)) as url:
            probed = probe.probe(url)
        assert (probed.model, only_problem(probed)[0]) == (None, "no-routes")


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (routes_body(None), "stripped", "routed_experts is null, although the server captures routes"),
        (json_body({"choices": [{"token_ids": [5, 5], "finish_reason": "stop"}]}), "stripped", "no routed_experts"),
        ((200, "", FRAMED), "frame-unasked", "a frame, which a stock client cannot read"),
        (routes_body([[[0, 0]]] * 9), "findings", "expected different experts"),
        (routes_body(None, tokens=0), "aborted", "nothing was generated"),
        ((502, "text/plain", b"no"), "error", "HTTP 502: no"),
    ],
)
def test_what_stock_clients_get(answer: Answered, kind: str, says: str) -> None:
    def answers(request: dict[str, Any]) -> Answered:
        return (200, "", FRAMED) if wire.ENCODINGS_FIELD in request else answer

    with answering(generating(answers)) as url:
        found = only_problem(probe.probe(url))
    assert found[0] == kind
    assert found[1].startswith("right for clients that ask for frames, wrong for stock ones: ")
    assert says in found[1]
    assert ("Start it with" in found[2]) is False


@pytest.fixture
def policy_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the variable of the policy, which is read once."""

    def set_to(text: str) -> None:
        monkeypatch.setenv(policy.VARIABLE, text)
        policy.use(None)

    yield set_to
    monkeypatch.undo()
    policy.use(None)


@pytest.mark.parametrize(
    ("text", "kinds", "says"),
    [
        ("", ["findings"], "sends routes that are wrong"),
        ("mask", ["findings"], "sends routes that are wrong"),
        ("count", [], "found, and only counted as SKYRL_R3_CHECKS is here: routed_experts: expected different"),
        ("all_equal=count", [], "only counted"),
        ("off", [], "skyrl-r3 is active"),
        ("eror", ["findings"], "sends routes that are wrong"),
    ],
)
def test_the_policy_is_a_clients(text: str, kinds: list[str], says: str, policy_of: Callable[[str], None]) -> None:
    """Also through the command; what is no policy is for the line on this environment to say."""
    policy_of(text)
    zeros = framed(((0, 0),))

    def answers(request: dict[str, Any]) -> Answered:
        return (200, "", zeros) if wire.ENCODINGS_FIELD in request else routes_body([[[0, 0]]] * 9)

    with answering(generating(answers)) as url:
        (server,) = command(url, exits=len(kinds))["servers"]
    assert [problem["kind"] for problem in server["problems"]] == kinds
    assert says in server["verdict"]
    assert bool(server["asked"]["counted"]) is (text in ("count", "all_equal=count"))
    assert ("counted" in server["verdict"]) is (text in ("count", "all_equal=count"))


def test_the_request_is_skyrls_for_the_model_that_is_served() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> tuple[int, str, bytes]:
        asked.append(request)
        return routes_body([[[0, 1]]] * 9)

    with answering(generating(answer, models=b'{"data":[{"id":"the/model"}]}')) as url:
        assert probe.probe(url).model == "the/model"
    assert [request.pop(wire.ENCODINGS_FIELD, None) for request in asked] == [["frame/1", "packed", "nested"], None]
    assert asked[0] == asked[1]
    assert set(asked[0]) == {"token_ids", "sampling_params", "model"}
    assert asked[0]["model"] == "the/model"


def test_an_engine_that_sleeps_is_left_alone() -> None:
    asked: list[Any] = []
    with answering(generating(asked.append, is_sleeping=b'{"is_sleeping":true}')) as url:  # pyright: ignore[reportArgumentType]
        kind, _, cure = only_problem(probe.probe(url))
    assert (kind, asked) == ("asleep", [])
    assert "while it generates" in cure


def test_an_engine_that_does_not_say_that_it_sleeps() -> None:
    for answer in (b'{"is_sleeping":false}', b'{"is_sleeping":"unknown"}', b"[" * 200_000, b"1"):
        with answering(generating(lambda _: routes_body(None), is_sleeping=answer)) as url:
            assert only_problem(probe.probe(url))[0] == "no-routes"


def test_no_answer_in_time() -> None:
    """Whether nothing comes, or a byte now and then."""
    done = threading.Event()

    def hang(path: str, body: bytes | None) -> tuple[int, str, bytes]:
        done.wait(30)
        return 500, "text/plain", b""

    with answering(hang) as url:
        kind, what, cure = only_problem(probe.probe(url, limit_s=0.3))
        done.set()
    assert kind == "timeout"
    assert what == "no answer within 0.3 s"
    assert "busy" in cure


def test_nobody_there() -> None:
    with answering(generating(lambda _: routes_body(None))) as url:
        pass
    kind, what, cure = only_problem(probe.probe(url))
    assert kind == "unreachable"
    assert "refused" in what
    assert f"curl {url}/v1/models" in cure


def test_a_host_that_there_is_not() -> None:
    assert only_problem(probe.probe("http://no.such.host.invalid:1"))[0] == "unreachable"


def test_an_answer_that_is_no_http() -> None:
    with answering(lambda path, body: lambda write: write(b"220 mail ready\r\n")) as url:
        kind, what, _ = only_problem(probe.probe(url))
    assert kind == "unreachable"
    assert "220 mail ready" in what


def test_https_where_there_is_none() -> None:
    with answering(generating(lambda _: routes_body(None))) as url:
        kind, what, cure = only_problem(probe.probe(url.replace("http", "https")))
    assert kind == "unreachable"
    assert "no TLS" in what
    assert f"Try it without: {url}. " in cure


def test_the_environments_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SkyRL's client, which uses none."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with answering(generating(lambda _: routes_body(None))) as url:
        assert only_problem(probe.probe(url))[0] == "no-routes"


# Slow answers


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 2", b"0"),
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"b"),
        (b"HTTP/1.1 200 OK\r\n", b"X-Slow: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
    ],
    ids=["status", "header", "headers", "body", "counted body"],
)
@pytest.mark.parametrize("last", ["models", "generate"])
def test_an_answer_by_drops(begin: bytes, piece: bytes, last: str) -> None:
    """The connection is closed then, so that neither side goes on."""
    closed = threading.Event()

    def drip(write: Callable[[bytes], Any]) -> None:
        try:
            write(begin)
            for _ in range(90):  # Each drop is well within the limit; all of them are not.
                closed.wait(0.1)
                write(piece)
        except OSError:
            closed.set()

    def answers(path: str, body: bytes | None) -> Answered:
        return drip if path.endswith(last) else (404, "text/plain", b"")

    with answering(answers) as url:
        kind, what, _ = only_problem(probe.probe(url, limit_s=0.8))
        assert closed.wait(8)
    assert (kind, what) == ("timeout", "no answer within 0.8 s")


def test_one_limit_for_all_that_a_server_is_asked() -> None:
    """Each answer comes within it, and the third is too late."""

    def answers(path: str, body: bytes | None) -> Answered:
        threading.Event().wait(0.5)
        given = generating(lambda _: routes_body([[[0, 1]]] * 9))(path, body)

        def late(write: Callable[[bytes], Any]) -> None:
            with suppress(OSError):
                assert not callable(given)
                writing(f"{given[0]} Late", given[2])(write)

        return late

    with answering(answers) as url:
        kind, what, _ = only_problem(probe.probe(url, limit_s=1.2))
    assert (kind, what) == ("timeout", "no answer within 1.2 s")


def test_the_environment_is_one_line_that_does_not_count(servers: dict[str, str]) -> None:
    """Here it is a checkout without a hook, and still all is well with the server."""
    out = said(servers["patched 0.3.0"], exits=0)
    assert out.startswith("This environment, which was not asked for: skyrl-r3")
    assert "1 problem, which skyrl-r3 status tells" in out
    assert out.endswith("All is well.")
    found = command(servers["patched 0.3.0"], exits=0)
    assert [problem["kind"] for problem in found["here"]["problems"]] == ["no-hook"]


@pytest.mark.parametrize(
    "text",
    ["10.0.0.1:8000", "http://10.0.0.1:8000/", "http://10.0.0.1:8000/v1", "http://10.0.0.1:8000/skyrl/v1/generate"],
)
def test_addresses(text: str) -> None:
    assert probe.address(text) == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:0",
        "http://user:word@host:1",
        "http://@host:1",
        "http://host:1?x",
        "http://host:1/?",
        "http://host:1#x",
        " host:1",
        "host:1\n",
        "host:1/\x1b",
        "http://host:1/\u00e9",
        "http://a..b:1",
        f"http://{'a' * 300}:1",
        "http://[::1:1",
    ],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected http://HOST:PORT, got "):
        probe.address(text)


def test_no_address_for_the_command() -> None:
    ran = CliRunner().invoke(app, ["status", "--server", "http://host:1/\u00e9"])
    assert ran.exit_code == 2
    assert "HOST:PORT" in ran.output


@pytest.mark.parametrize("host", ["a..b", "a" * 300, ".".join(["a" * 60] * 5)])
def test_a_host_that_no_socket_takes(host: str) -> None:
    assert only_problem(probe.probe(f"http://{host}:1"))[0] == "unreachable"
