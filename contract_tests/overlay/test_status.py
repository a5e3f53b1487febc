"""``skyrl-r3 status`` on an environment: what it finds, and that what it says of a fault is its cure."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract_tests.child import REPO, Ran, run_python
from contract_tests.overlay import fake_skyrl
from contract_tests.overlay.fake_skyrl import CLIENT, SERVER, manifest_030
from skyrl_r3 import wire
from skyrl_r3.hooks import refuse
from skyrl_r3.manifest import manifests

FLAG = "generator.inference_engine.enable_return_routed_experts=true"


def status(
    python: Path | str, *options: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None, exits: int
) -> Ran:
    """Run the command, which has to exit with ``exits`` and without a traceback."""
    ran = run_python(
        [str(python), "-m", "skyrl_r3", "status", *options],
        path=path,
        env={"COLUMNS": "120", **(env or {})},
        check=False,
    )
    assert ran.returncode == exits, f"{ran.stdout}\n{ran.stderr}"
    assert "Traceback" not in ran.stderr
    return ran


def here(python: Path | str, *options: str, path: Sequence[Path] = (), exits: int, **env: str) -> dict[str, Any]:
    """What it finds in the environment. Nothing but JSON is on stdout."""
    found = json.loads(status(python, "--json", *options, path=path, env=env, exits=exits).stdout)
    assert found["well"] is (exits == 0)
    return found["here"]


def only_problem(found: dict[str, Any]) -> tuple[str, str, str]:
    (problem,) = found["problems"]
    return problem["kind"], problem["what"], problem["cure"]


def drifted(tmp_path: Path) -> Path:
    target = manifest_030().targets[1]
    return fake_skyrl.build(tmp_path, signatures={target.name: "(self, other)"})


# All is well


def test_an_installed_wheel_beside_a_supported_skyrl(fake: Path, wheel_python: Path) -> None:
    found = here(wheel_python, path=[fake], exits=0)
    site_packages = Path(found["skyrl_r3"]["path"]).parent
    assert site_packages.is_relative_to(wheel_python.parent.parent)
    assert found["skyrl_r3"]["how"] == "wheel"
    assert found["python"] == {"version": sys.version.split()[0], "executable": str(wheel_python)}
    # The environment that it lies on may have one, too.
    assert found["hook"].pop("pth")[0] == str(site_packages / "skyrl_r3.pth")
    assert found["hook"] == {"installed": True, "off": None}
    assert (found["skyrl"]["version"], found["skyrl"]["path"]) == ("0.3.0", str(fake / "skyrl"))
    assert (found["skyrl"]["line"], found["skyrl"]["reviewed"]) == (manifest_030().skyrl, "0.3.0")
    assert found["skyrl"]["supported"] == [manifest.skyrl for manifest in manifests()]
    assert found["beside"]["ray"] == importlib.metadata.version("ray")
    assert found["beside"]["vLLM"] is not None
    assert {row["requirement"] for row in found["requirements"]} >= {"numpy>=2.0.0", "pybase64>=1.5.1"}
    assert all(row["met"] for row in found["requirements"])
    assert found["encodings"] == {"server": ["frame/1", "packed", "nested"], "client": list(wire.ENCODINGS)}
    assert found["metrics"] is True
    assert found["checks"]["policy"]["missing"] == "error"
    assert [row["target"] for row in found["targets"]] == [target.name for target in manifest_030().targets]
    assert {(row["state"], row["detail"]) for row in found["targets"]} == {("pending", "not imported yet")}
    assert found["problems"] == []


def test_the_last_lines_say_what_is_next(fake: Path, wheel_python: Path) -> None:
    out = status(wheel_python, path=[fake], exits=0).stdout
    *_, last = out.strip().split("\n\n")
    assert last.startswith("All is well: ")
    assert FLAG in last
    assert "skyrl-r3 status --server URL" in " ".join(last.split())
    assert [target.attribute for target in manifest_030().targets if target.attribute not in out] == []
    assert f"{len(manifest_030().targets)} of {len(manifest_030().targets)} patches pending: fits" in out
    assert max(map(len, out.splitlines())) <= 120


def test_an_edited_skyrl_is_something_to_mind(fake: Path, wheel_python: Path) -> None:
    """The double is one: its signatures are SkyRL's, and its sources are not."""
    count = len(manifest_030().targets)
    warning = here(wheel_python, path=[fake], exits=0)["skyrl"]["warning"]
    assert warning.startswith(f"{count} of the {count} functions that skyrl-r3 patches are not as in SkyRL 0.3.0")
    assert f"Mind: {count} of the {count} functions" in status(wheel_python, path=[fake], exits=0).stdout


def test_a_server_of_each_line_has_encodings() -> None:
    """The hooks that the manifests name are those that the encodings are written down for."""
    hooks = [{target.replacement.partition(":")[2] for target in manifest.targets} for manifest in manifests()]
    assert [len(names & set(wire.WRITTEN)) for names in hooks] == [1] * len(manifests())


@pytest.mark.parametrize(
    ("value", "policy"), [("mask", {"missing": "mask", "changed": "count"}), ("changed=error", {"changed": "error"})]
)
def test_checks_in_effect(fake: Path, wheel_python: Path, value: str, policy: dict[str, str]) -> None:
    checks = here(wheel_python, path=[fake], exits=0, SKYRL_R3_CHECKS=value)["checks"]
    assert checks["value"] == value
    assert checks["policy"] | policy == checks["policy"]


def test_checks_and_metrics_that_are_off(fake: Path, wheel_python: Path) -> None:
    ran = status(wheel_python, path=[fake], env={"SKYRL_R3_CHECKS": "off", "SKYRL_R3_METRICS": "off"}, exits=0)
    assert re.search(r"^checks +SKYRL_R3_CHECKS=off: ids are not looked at", ran.stdout, re.MULTILINE)
    assert re.search(r"^metrics +off", ran.stdout, re.MULTILINE)


# What is wrong, and its cure


def test_switched_off(fake: Path, wheel_python: Path) -> None:
    found = here(wheel_python, path=[fake], exits=1, SKYRL_R3="off")
    kind, what, cure = only_problem(found)
    assert (kind, found["hook"]["off"]) == ("off", "off")
    assert "SKYRL_R3=off" in what
    assert cure.startswith("unset SKYRL_R3")


def test_no_policy(fake: Path, wheel_python: Path) -> None:
    found = here(wheel_python, path=[fake], exits=1, SKYRL_R3_CHECKS="perhaps")
    kind, what, cure = only_problem(found)
    assert kind == "checks"
    assert "got 'perhaps'" in what
    assert "SKYRL_R3_CHECKS" in cure


def test_unsupported_skyrl(tmp_path: Path, wheel_python: Path) -> None:
    found = here(wheel_python, path=[fake_skyrl.build(tmp_path, version="0.9.0")], exits=1)
    kind, what, cure = only_problem(found)
    assert (kind, found["targets"]) == ("unsupported", [])
    assert "SkyRL 0.9.0" in what
    assert all(manifest.skyrl in what for manifest in manifests())
    assert str(tmp_path) in what
    assert "supported SkyRL" in cure


def test_drift(tmp_path: Path, wheel_python: Path) -> None:
    target = manifest_030().targets[1]
    ran = status(wheel_python, path=[drifted(tmp_path)], exits=1)
    found = here(wheel_python, path=[tmp_path], exits=1)
    kind, what, cure = only_problem(found)
    assert kind == "drift"
    assert f"1 of {len(manifest_030().targets)} functions" in what
    assert all(part in what for part in (target.name, target.signature, "(self, other)"))
    assert "as this is not the SkyRL that was released as 0.3.0" in what
    assert str(tmp_path / "skyrl") in what
    assert "Install SkyRL 0.3.0" in cure
    assert found["skyrl"]["warning"] is None, "it would say that what is edited is patched all the same"
    assert "1. 1 of" in ran.stdout
    assert "Install SkyRL 0.3.0" in ran.stdout
    assert "All is well" not in ran.stdout


def test_a_function_that_is_gone(tmp_path: Path, wheel_python: Path) -> None:
    target = manifest_030().targets[0]
    fake_skyrl.build(tmp_path, omit=[target.name])
    found = here(wheel_python, path=[tmp_path], exits=1)
    assert only_problem(found)[0] == "drift"
    assert {row["target"]: row["state"] for row in found["targets"]}[target.name] == "absent"


def test_a_checkout_on_the_path_has_no_hook(fake: Path, plain_python: Path) -> None:
    found = here(plain_python, path=[fake, REPO], exits=1)
    kind, _, cure = only_problem(found)
    assert (kind, found["skyrl_r3"]["how"], found["hook"]["pth"]) == ("no-hook", "path", [])
    assert "skyrl_r3.enable()" in cure
    assert '"worker_process_setup_hook": "skyrl_r3.enable"' in cure
    assert cure.startswith("pip install it, on every node")
    assert {row["requirement"] for row in found["requirements"]} >= {"numpy>=2.0.0"}


def test_an_editable_install_is_told(fake: Path, plain_python: Path, tmp_path: Path) -> None:
    """By its metadata, which are elsewhere than the package. A double without the ``.pth`` file that a real one has."""
    info = tmp_path / "skyrl_r3-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: skyrl-r3\nVersion: 0.2.0\nRequires-Dist: numpy>=2.0.0\n"
    )
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{REPO}", "dir_info": {"editable": True}}))
    found = here(plain_python, path=[fake, REPO, tmp_path], exits=1)
    kind, what, _ = only_problem(found)
    assert (kind, found["skyrl_r3"]["how"]) == ("no-hook", "editable")
    assert "an editable install" in what
    assert [row["requirement"] for row in found["requirements"]] == ["numpy>=2.0.0"]


def test_a_wheel_in_a_folder_of_the_path_is_not_read(
    fake: Path, plain_python: Path, wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    kind, what, cure = only_problem(here(plain_python, path=[fake, tmp_path], exits=1))
    assert kind == "no-hook"
    assert str(tmp_path / "skyrl_r3.pth") in what
    assert "site-packages" in cure


# Environments that lack something


@pytest.fixture
def lacking(wheel: Path, empty_python: Path, tmp_path: Path) -> Callable[..., list[Path]]:
    """What goes on the path of ``empty_python``: the wheel and the packages it needs, but for those that are named."""

    def folders(*left_out: str) -> list[Path]:
        folder = tmp_path / "packages"
        folder.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        waiting = ["numpy", "orjson", "packaging", "pybase64", "rich", "typer"]
        seen: set[str] = set(left_out)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            _link(name, folder)
            needs = importlib.metadata.requires(name) or []
            waiting += [re.split(r"[^\w.-]", need)[0] for need in needs if ";" not in need]
        return [folder]

    return folders


def _link(name: str, folder: Path) -> None:
    """Put the files of an installed distribution into ``folder`` as well."""
    distribution = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


def kinds(found: dict[str, Any]) -> list[str]:
    """Of the problems, but for the hook: what is on ``PYTHONPATH`` has none."""
    return [problem["kind"] for problem in found["problems"] if problem["kind"] != "no-hook"]


def test_without_skyrl(lacking: Callable[..., list[Path]], empty_python: Path) -> None:
    found = here(empty_python, path=lacking(), exits=1)
    assert kinds(found) == ["no-skyrl"]
    assert found["skyrl"]["path"] is None
    assert set(found["beside"].values()) == {None}
    problem = found["problems"][0]
    assert str(empty_python) in problem["what"]
    assert "Install skyrl-r3 into the environment that SkyRL" in problem["cure"]


def test_only_the_older_package(lacking: Callable[..., list[Path]], empty_python: Path, tmp_path: Path) -> None:
    info = tmp_path / "skyrl_train-0.3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-train\nVersion: 0.3.1\n")
    found = here(empty_python, path=[*lacking(), tmp_path], exits=1)
    assert kinds(found) == ["skyrl-train"]
    assert "skyrl-train 0.3.1" in found["problems"][0]["what"]
    assert "package skyrl" in found["problems"][0]["cure"]


@pytest.mark.parametrize("missing", ["numpy", "orjson", "packaging", "pybase64"])
def test_without_a_requirement(
    lacking: Callable[..., list[Path]], empty_python: Path, fake: Path, missing: str
) -> None:
    folders = lacking(missing)
    found = here(empty_python, path=[*folders, fake], exits=1)
    assert kinds(found) == ["requirements"]
    assert [row["requirement"].partition(">")[0] for row in found["requirements"] if not row["met"]] == [missing]
    assert f"pip install '{missing}>=" in found["problems"][0]["cure"]
    out = status(empty_python, path=[*folders, fake], exits=1).stdout
    assert f"pip install '{missing}>=" in out


def test_a_requirement_that_is_too_old(
    lacking: Callable[..., list[Path]], empty_python: Path, fake: Path, tmp_path: Path
) -> None:
    """Of a version that the metadata tell: those come first on the path."""
    info = tmp_path / "pybase64-1.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pybase64\nVersion: 1.4.0\n")
    found = here(empty_python, path=[tmp_path, *lacking(), fake], exits=1)
    assert kinds(found) == ["requirements"]
    assert "pybase64>=1.5.1 (found: 1.4.0)" in found["problems"][0]["what"]


START = (
    "import skyrl_r3.autoload; skyrl_r3.autoload.start()\n"  # The wheel's .pth file, which PYTHONPATH does not read.
)


@pytest.mark.parametrize("missing", ["numpy", "packaging", "pybase64"])
def test_skyrl_is_imported_whatever_is_missing(
    lacking: Callable[..., list[Path]], empty_python: Path, fake: Path, missing: str
) -> None:
    """And what is logged names the package. packaging is needed to find the hooks, the others by them."""
    code = f"{START}import {fake_skyrl.UTILS}, {fake_skyrl.PREPROCESS}\nprint('imported')"
    ran = run_python([str(empty_python), "-c", code], path=[*lacking(missing), fake])
    assert ran.stdout == "imported\n"
    assert f"pip install {missing}" in ran.stderr
    assert "report" not in ran.stderr


def test_a_hook_without_its_package_says_which(
    lacking: Callable[..., list[Path]], empty_python: Path, fake: Path
) -> None:
    code = f"{START}import {fake_skyrl.PREPROCESS}, skyrl_r3\nprint(skyrl_r3.status()[0].detail)"
    ran = run_python([str(empty_python), "-c", code], path=[*lacking("pybase64"), fake])
    assert "pip install pybase64" in ran.stdout
    assert "report" not in ran.stdout


@pytest.mark.parametrize("missing", ["numpy", "orjson", "pybase64"])
def test_without_its_package_and_with_the_flag_it_is_an_error(wheel_python: Path, fake: Path, missing: str) -> None:
    """Stock SkyRL would train on lists, or slowly, and nobody would know; without the flag it is stock."""
    code = f"""
import sys
sys.modules[{missing!r}] = None  # To import it is a ModuleNotFoundError.
import asyncio, {CLIENT} as client
for path in ("inference/v1/generate", "skyrl/v1/generate"):
    try:
        print(asyncio.run(client.RemoteInferenceClient()._post(f"http://127.0.0.1:1/{{path}}", json={{}})))
    except Exception as error:
        print(type(error).__name__, error)
"""
    ran = run_python([str(wheel_python), "-c", code], path=[fake])
    stock, refused = ran.stdout.splitlines()
    assert "RemoteInferenceClient._post" in stock
    assert refused.startswith("OverlayError")
    assert f"pip install {missing}" in refused


def test_the_refusals_know_the_path_of_the_wire() -> None:
    assert refuse._GENERATE_PATH == wire.GENERATE_PATH


# What is said without the command


@pytest.mark.parametrize(
    ("version", "cure"), [(None, "Install skyrl-r3 in the environment that SkyRL runs in"), ("0.3.1", "package skyrl")]
)
def test_enable_without_skyrl_says_where_to_go(
    lacking: Callable[..., list[Path]], empty_python: Path, tmp_path: Path, version: str | None, cure: str
) -> None:
    if version:
        info = tmp_path / f"skyrl_train-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: skyrl-train\nVersion: {version}\n")
    code = "import skyrl_r3\ntry:\n    skyrl_r3.enable()\nexcept skyrl_r3.overlay.UnsupportedSkyRLError as error:\n"
    ran = run_python([str(empty_python), "-c", f"{code}    print(error.hint)"], path=[*lacking(), tmp_path])
    assert cure in ran.stdout


def test_unsupported_skyrl_is_one_warning(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, version="0.9.0")
    code = f"import {fake_skyrl.UTILS}, {CLIENT}"
    err = run_python([str(wheel_python), "-c", code], path=[folder]).stderr
    assert err.count("skyrl-r3 is not active") == 1
    assert all(
        part in err for part in ("0.9.0", manifest_030().skyrl, "Uninstall skyrl-r3, or install a release of it")
    )


# --import


def test_import_is_proof(fake: Path, wheel_python: Path) -> None:
    found = here(wheel_python, "--import", path=[fake], exits=0)
    assert {row["state"] for row in found["targets"]} == {"applied"}
    assert found["failed_imports"] == {}


NOISE = """
import os, sys
print("blather of print")
sys.stderr.write("blather")
os.write(1, b"blather of C")
os.write(2, b"blather of C")
"""


def test_noise_of_imports_is_kept_off(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, bottom={CLIENT: NOISE})
    assert {row["state"] for row in here(wheel_python, "--import", path=[folder], exits=0)["targets"]} == {"applied"}
    ran = status(wheel_python, "--import", path=[folder], exits=0)
    assert "blather" not in ran.stdout + ran.stderr


def test_a_node_of_trainers_has_no_vllm(tmp_path: Path, wheel_python: Path) -> None:
    """That the server's module cannot be imported there is no fault, and said."""
    raising = "raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm')"
    folder = fake_skyrl.build(tmp_path, top={SERVER: raising})
    found = here(wheel_python, "--import", path=[folder], exits=0)
    states = {row["target"]: row["state"] for row in found["targets"] if row["module"] == SERVER}
    assert set(states.values()) == {"pending"}
    assert list(found["failed_imports"]) == [SERVER]
    assert "no vLLM here" in status(wheel_python, "--import", path=[folder], exits=0).stdout


def test_a_module_that_cannot_be_imported(tmp_path: Path, wheel_python: Path) -> None:
    folder = fake_skyrl.build(tmp_path, top={CLIENT: "raise RuntimeError('no such device')"})
    kind, what, cure = only_problem(here(wheel_python, "--import", path=[folder], exits=1))
    assert kind == "import"
    assert CLIENT in what
    assert "RuntimeError: no such device" in what
    assert f"SKYRL_R3=off python -c 'import {CLIENT}'" in cure


def test_a_function_that_somebody_else_replaces(tmp_path: Path, wheel_python: Path) -> None:
    last = fake_skyrl.TRAINER
    replaced = f"import {CLIENT} as client\ndef other(self): ...\nclient.RemoteInferenceClient._post = other"
    folder = fake_skyrl.build(tmp_path, bottom={last: replaced})
    kind, what, _ = only_problem(here(wheel_python, "--import", path=[folder], exits=1))
    assert kind == "superseded"
    assert f"{last}.other" in what


def test_real_skyrl_is_patched(wheel_python: Path) -> None:
    found = here(wheel_python, "--import", exits=0)
    assert (found["skyrl"]["version"], found["skyrl"]["warning"]) == ("0.3.0", None)
    assert {(row["state"], row["detail"]) for row in found["targets"]} == {("applied", "")}


def test_called_wrongly(wheel_python: Path) -> None:
    assert status(wheel_python, "--nothing", exits=2).stdout == ""
    assert "HOST:PORT" in status(wheel_python, "--server", "ftp://host", exits=2).stderr


# --ray

CLUSTER = """
import os, subprocess, sys
import ray
found = ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
try:
    env = {**os.environ, "PYTHONPATH": sys.argv[2], "RAY_ADDRESS": found.address_info["gcs_address"]}
    command = [sys.argv[1], "-m", "skyrl_r3", "status", "--ray", "--json"]
    asked = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
finally:
    ray.shutdown()
import json
print("\\nREPORT " + json.dumps({"rc": asked.returncode, "out": asked.stdout, "err": asked.stderr,
                               "address": found.address_info["node_ip_address"]}))
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def ask(cluster: Path, asking: Path, *, path: Path | str = "") -> tuple[int, dict[str, Any]]:
    """What is found by ``asking``, with ``path``, of a Ray cluster whose workers are of the environment ``cluster``."""
    values = run_python([str(cluster), "-c", CLUSTER, str(asking), str(path)], env=QUIET).values
    found = json.loads(values["out"])
    assert [node["address"] for node in found["nodes"]] == [values["address"]]
    return values["rc"], found


def only_node(cluster: Path, asking: Path) -> tuple[int, dict[str, Any]]:
    """What is found of its node."""
    exits, found = ask(cluster, asking)
    return exits, found["nodes"][0]


def test_ray_workers_with_the_wheel(wheel_python: Path) -> None:
    exits, node = only_node(wheel_python, wheel_python)
    assert (exits, node["problems"]) == (0, [])
    assert node["facts"]["hook"]["installed"] is True
    assert node["facts"]["skyrl"]["version"] == "0.3.0"


def test_another_skyrl_than_the_nodes_have(wheel_python: Path, tmp_path: Path) -> None:
    exits, found = ask(wheel_python, wheel_python, path=fake_skyrl.build(tmp_path, version="0.3.9"))
    (problem,) = found["differences"]
    assert (exits, found["well"], found["nodes"][0]["problems"]) == (1, False, [])
    assert f"0.3.0 on {found['nodes'][0]['address']}; 0.3.9 on this environment" in problem["what"]


def test_a_ray_node_without_it_is_named(wheel_python: Path, plain_python: Path) -> None:
    exits, node = only_node(plain_python, wheel_python)
    assert exits == 1
    (problem,) = node["problems"]
    assert problem["kind"] == "no-skyrl-r3"
    assert "No module named 'skyrl_r3'" in problem["what"]
    assert str(plain_python) in problem["what"]
    assert "Install this release of skyrl-r3 on the node" in problem["cure"]


def test_no_cluster(wheel_python: Path) -> None:
    ran = status(wheel_python, "--ray", env={**QUIET, "RAY_TMPDIR": "/nonexistent"}, exits=1)
    assert "no running Ray cluster" in ran.stdout
    assert "To do: Run this on a node of the cluster, with its Ray and its Python, or set RAY_ADDRESS" in ran.stdout


def test_no_ray(lacking: Callable[..., list[Path]], empty_python: Path, fake: Path) -> None:
    assert "Ray is not installed" in status(empty_python, "--ray", path=[*lacking(), fake], exits=1).stdout
