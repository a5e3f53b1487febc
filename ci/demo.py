"""Run the same requests with the overlay off and on, against real generation, and compare; ``ci/demo.sh`` calls this.

SkyRL 0.3.0, per phase: one server (vLLM on a CPU behind SkyRL's endpoint), the real vllm-router in front, one client
process. In the phase "on" also two steps of SkyRL's fully asynchronous trainer under Ray. "off" means SKYRL_R3=off in
server and client; "on" means that nothing is set. SkyRL 0.4.0: its own server with the overlay on, the router, and a
client process with the overlay off and one with it on. Ends with tables; the exit status is 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from demo_compare import Run, compare_case, compare_rows, format_table, transport_table

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
MODEL_NAME = "tiny-moe"
PROGRESS = "progress: "
SERVER_START_S, ROUTER_START_S, CLIENT_S, TRAINER_S, REPORT_S, STOP_S = 420, 60, 420, 420, 300, 30
TRAINER_STEPS, TRAINER_BATCH, TRAINER_SAMPLES = 2, 2, 2


class DemoError(Exception):
    """The demo cannot go on; the message says what failed and shows the end of its log."""


def say(text: str) -> None:
    """A progress line with the seconds since the start."""
    print(f"[{time.monotonic() - _START:4.0f} s] {text}", flush=True)


_START = time.monotonic()


class Child:
    """A process of the demo, in a session of its own, so that whatever it leaves behind can be found and ended."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=log.parent,
                start_new_session=True,
            )

    def tail(self, lines: int) -> str:
        """The end of this process's log."""
        return f"The end of {self.log}:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def fail(self, why: str) -> NoReturn:
        """Raise with the end of this process's log, and of any other's that ended while it was still needed."""
        message = f"{self.name}: {why}. {self.tail(40)}"
        for other in _running:
            if other is not self and other.process.poll() is not None:
                message += f"\n{other.name}: had ended with status {other.process.returncode}. {other.tail(20)}"
        raise DemoError(message)

    def wait_until(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Wait for ``ready``; fail when the process ends first or the time is up."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if self.process.poll() is not None:
                self.fail(f"ended with status {self.process.returncode} before it was ready")
            if time.monotonic() > deadline:
                self.fail(f"not ready after {limit_s:.0f} s")
            time.sleep(0.5)

    def wait(self, limit_s: float) -> None:
        """Wait for the end and repeat its progress lines meanwhile; fail on status or time."""
        deadline, shown = time.monotonic() + limit_s, 0
        while True:
            running = self.process.poll() is None
            lines = self.log.read_text(errors="replace").split("\n")[:-1]
            for line in lines[shown:]:
                if line.startswith(PROGRESS):
                    say(line.removeprefix(PROGRESS))
            shown = len(lines)
            if not running:
                break
            if time.monotonic() > deadline:
                self.fail(f"not done after {limit_s:.0f} s")
            time.sleep(0.5)
        if self.process.returncode != 0:
            self.fail(f"ended with status {self.process.returncode}")

    def stop(self) -> None:
        """Ask it to end, then end what is left of its session."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)
        for pid in session_members(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


_running: list[Child] = []


def session_members(session: int) -> Iterator[int]:
    """Pids of the session that a child of ours leads or led."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # After the command in parentheses: state, parent, process group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                yield int(entry.name)


@contextmanager
def running(name: str, command: list[str], env: dict[str, str], log: Path) -> Iterator[Child]:
    """A child that is stopped on the way out, whatever happens."""
    child = Child(name, command, env, log)
    _running.append(child)
    try:
        yield child
    finally:
        _running.remove(child)
        child.stop()


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def flat(options: dict[str, Any]) -> list[str]:
    """Options and their values as command line arguments."""
    return [str(part) for pair in options.items() for part in pair]


def environment(work: Path, phase: str) -> dict[str, str]:
    """Environment of every process of a phase. ``SKYRL_R3`` is the only part in which the phases differ."""
    env = {key: value for key, value in os.environ.items() if key not in ("SKYRL_R3", "PYTHONPATH", "RAY_ADDRESS")}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(work / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(work / "t"),
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing is sent anywhere.
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's word for "this machine only": it makes it listen on 127.0.0.1, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "VLLM_HOST_IP": HOST,
        # Without it gloo, which vLLM starts on a CPU, listens on whatever address this machine's name stands for.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The server runs eager; without this vLLM still compiles its sampler, which takes longer than the whole phase.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return env | ({"SKYRL_R3": "off"} if phase == "off" else {})


def server_command(args: argparse.Namespace, line: str, port: int, status: Path) -> list[str]:
    """How the server of a SkyRL line is started: 0.4.0's by itself, 0.3.0's by a launcher for newer vLLM."""
    options = {
        "--host": HOST,
        "--port": port,
        "--model": args.model,
        "--served-model-name": MODEL_NAME,
        "--max-model-len": 8192,
        # One sequence at a time: what is computed together would else depend on arrival, and with it the last bits.
        "--max-num-seqs": 1,
    }
    switches = ["--enforce-eager", "--enable-return-routed-experts"]
    if line == "0.3":
        launcher = [sys.executable, str(HERE / "serve_skyrl_03.py"), "--r3-status", str(status)]
    else:
        launcher = [str(args.python_04), "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor"]
        # What vLLM would choose by itself on a CPU; SkyRL's launcher takes the GPU's for granted.
        options["--worker-cls"] = "vllm.v1.worker.cpu_worker.CPUWorker"
    return [*launcher, *flat(options), *switches]


def start_serving(
    stack: ExitStack, args: argparse.Namespace, line: str, phase: str, env: dict[str, str]
) -> tuple[str, str]:
    """Start server and router; both are stopped with ``stack``. Returns the router's URL and the server's."""
    port, router_port, metrics_port = free_port(), free_port(), free_port()
    server_url, proxy_url = f"http://{HOST}:{port}", f"http://{HOST}:{router_port}"
    name = f"SkyRL {line}, overlay {phase}"
    say(f"{name}: starting vLLM behind SkyRL's endpoint (a minute or two)")
    command = server_command(args, line, port, args.work / f"server-{phase}.status.json")
    server = stack.enter_context(running(f"server, {name}", command, env, args.work / f"server-{line}-{phase}.log"))
    server.wait_until(lambda: answers(f"{server_url}/health"), SERVER_START_S)
    options = {
        "--worker-urls": server_url,
        "--host": HOST,
        "--port": router_port,
        "--policy": "round_robin",
        "--prometheus-host": HOST,
        "--prometheus-port": metrics_port,
    }
    command = [str(args.router), *flat(options)]
    router = stack.enter_context(running(f"router, {name}", command, env, args.work / f"router-{line}-{phase}.log"))
    router.wait_until(lambda: answers(f"{proxy_url}/health"), ROUTER_START_S)
    say(f"{name}: server and router are up")
    return proxy_url, server_url


def client_stem(work: Path, line: str, phase: str) -> Path:
    """Path without suffix of what a client process writes. Without a dot, as suffixes are added to it."""
    return work / f"client-{line.replace('.', '')}-{phase}"


def run_client(
    args: argparse.Namespace, line: str, phase: str, env: dict[str, str], proxy_url: str, server_url: str
) -> None:
    """One client process, all cases."""
    stem = client_stem(args.work, line, phase)
    options = {
        "--proxy-url": proxy_url,
        "--server-url": server_url,
        "--model": args.model,
        "--model-name": MODEL_NAME,
        "--out": stem,
    }
    python = sys.executable if line == "0.3" else str(args.python_04)
    command = [python, "-u", str(HERE / "demo_client.py"), *flat(options)]
    name = f"SkyRL {line}, overlay {phase}"
    say(f"{name}: client and generator" + (", preprocessing" if line == "0.3" else ""))
    with running(f"client, {name}", command, env, stem.parent / f"{stem.name}.log") as client:
        client.wait(CLIENT_S)


def write_dataset(path: Path) -> None:
    """A parquet file with as many prompts as the trainer's steps use."""
    import polars

    rows = [
        {"prompt": [{"role": "user", "content": f"{i}: " + f"question {i} " * 40}], "env_class": "r3_demo"}
        for i in range(TRAINER_STEPS * TRAINER_BATCH)
    ]
    polars.DataFrame(rows).write_parquet(path)


def trainer_overrides(args: argparse.Namespace, proxy_url: str, server_url: str) -> dict[str, Any]:
    """SkyRL's configuration. The R3 flag is SkyRL's own; what stands around it is what SkyRL wants with it."""
    out = args.work / "trainer"
    return {
        "data.train_data": f"['{out}/train.parquet']",
        # A handful of prompts; eight more processes that import torch would take longer than the training steps.
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": "false",
        "environment.env_class": "r3_demo",
        "generator.inference_engine.enable_return_routed_experts": "true",
        "generator.inference_engine.distributed_executor_backend": "mp",
        "generator.inference_engine.enable_ray_prometheus_stats": "false",
        "generator.inference_engine.run_engines_locally": "false",
        "generator.inference_engine.external_proxy_url": proxy_url,
        "generator.inference_engine.external_server_urls": f"['{server_url}']",
        "generator.inference_engine.served_model_name": MODEL_NAME,
        "generator.max_input_length": 4096,
        "generator.max_turns": 2,
        "generator.n_samples_per_prompt": TRAINER_SAMPLES,
        "generator.sampling_params.max_generate_length": 16,
        "trainer.strategy": "megatron",
        "trainer.policy.megatron_config.moe_enable_routing_replay": "true",
        "trainer.policy.model.path": args.model,
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.simulate_training": "true",
        "trainer.fully_async.simulate_training_step_seconds": 0,
        "trainer.fully_async.max_staleness_steps": 1,
        "trainer.fully_async.num_parallel_generation_workers": TRAINER_BATCH,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.placement.colocate_all": "false",
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.epochs": 1,
        "trainer.train_batch_size": TRAINER_BATCH,
        "trainer.policy_mini_batch_size": TRAINER_BATCH,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.max_prompt_length": 2048,
        "trainer.logger": "console",
        "trainer.log_path": out / "logs",
        "trainer.export_path": out / "export",
        "trainer.ckpt_path": out / "ckpt",
    }


def run_trainer(args: argparse.Namespace, env: dict[str, str], proxy_url: str, server_url: str) -> list[dict[str, Any]]:
    """The asynchronous trainer's two steps. Returns the proofs that it wrote, the driver's first."""
    out = args.work / "trainer"
    out.mkdir()
    write_dataset(out / "train.parquet")
    overrides = [f"{key}={value}" for key, value in trainer_overrides(args, proxy_url, server_url).items()]
    say(f"overlay on: {TRAINER_STEPS} steps of SkyRL's asynchronous trainer (simulated training) under Ray")
    command = [sys.executable, str(HERE / "async_trainer.py"), "--proof", str(out), *overrides]
    with running("asynchronous trainer", command, env, args.work / "trainer.log") as trainer:
        trainer.wait(TRAINER_S)
        proofs = [out / "driver.json", *(out / f"trainer-step{step + 1}.json" for step in range(TRAINER_STEPS))]
        missing = [proof.name for proof in proofs if not proof.exists()]
        if missing:
            trainer.fail(f"ended without {', '.join(missing)}")
    return [json.loads(proof.read_text()) for proof in proofs]


def check_trainer(proofs: list[dict[str, Any]]) -> list[str]:
    """What is wrong with what the training steps received."""
    found = []
    for proof in proofs[1:]:
        step, routes, sequences = proof["step"], proof["routes"], proof["sequences"]
        mask = routes.get("router_padding_mask", {"padding_rows": "no mask of"})
        say(
            f"trainer step {step}, Ray process {proof['pid']}: routes {routes['dtype']} {routes['shape']}, "
            f"{mask['padding_rows']} rows are padding"
        )
        if routes["shape"][:2] != sequences["shape"]:
            found.append(f"trainer step {step}: routes {routes['shape']} for sequences {sequences['shape']}")
        if routes["dtype"] != "torch.uint8":
            found.append(f"trainer step {step}: expected torch.uint8 for 64 experts, got {routes['dtype']}")
        if mask.get("dtype") != "torch.bool" or mask["shape"] != sequences["shape"]:
            found.append(f"trainer step {step}: router_padding_mask is {mask}")
        if routes["rows_with_repeated_ids"]:
            found.append(f"trainer step {step}: {routes['rows_with_repeated_ids']} rows repeat an expert")
        if proof["pid"] == proofs[0]["pid"]:
            found.append(f"trainer step {step}: ran in the driver, not in a Ray worker")
    return found


SERVER_MODULE = "vllm_server_actor"
CLIENT_MODULE = "remote_inference_client"


def check_process(name: str, proof: dict[str, Any], required: Callable[[str], bool] | None) -> list[str]:
    """What a process fails to prove: each target that ``required`` names must be applied, and there must be one."""
    rows = proof["status"]
    if rows is None:
        return [f"{name}: skyrl_r3 is not installed in process {proof['pid']}"]
    if required is None:
        return [f"{name}: {row['target']} is {row['state']}" for row in rows if row["state"] in ("drifted", "absent")]
    needed = [row for row in rows if required(row["target"])]
    if not needed:
        return [f"{name}: no target of this process in status(): {[row['target'] for row in rows]}"]
    return [f"{name}: {row['target']} is {row['state']}, not applied" for row in needed if row["state"] != "applied"]


def check_processes(proofs: dict[str, dict[str, Any]]) -> list[str]:
    """Print which targets each process of the phase "on" has patched; returns what is missing."""
    requirements: dict[str, Callable[[str], bool] | None] = {
        "server": lambda target: SERVER_MODULE in target,
        "client": lambda target: CLIENT_MODULE in target,
        # It imports SkyRL, but neither generates nor trains: it must only not be broken.
        "driver": None,
        "trainer": lambda target: SERVER_MODULE not in target,
    }
    found = [problem for name, proof in proofs.items() for problem in check_process(name, proof, requirements[name])]
    states = {name: {row["target"]: row["state"] for row in proof["status"] or []} for name, proof in proofs.items()}
    targets = sorted({target for rows in states.values() for target in rows})
    header = ["patch target, overlay on", *(f"{name} {proof['pid']}" for name, proof in proofs.items())]
    rows = [[target.removeprefix("skyrl."), *(states[name].get(target, "-") for name in proofs)] for target in targets]
    print(f"\n{format_table(header, rows)}\npending: this process has not imported that module\n", flush=True)
    return found


def check_off(work: Path) -> list[str]:
    """With SKYRL_R3=off no process may have applied anything."""
    found = []
    for name in ("server-off", "client-03-off", "client-04-off"):
        proof = json.loads((work / f"{name}.status.json").read_text())
        applied = [row["target"] for row in proof["status"] or [] if row["state"] == "applied"]
        if proof["switch"] != "off" or applied:
            found.append(f"{name}: SKYRL_R3={proof['switch']}, yet applied: {applied}")
    return found


def make_report(args: argparse.Namespace) -> list[str]:
    """Replay what was generated in transformers, and write the page. Returns what is wrong."""
    say("replaying in transformers what vLLM generated, with the captured routes and without (a minute)")
    command = [sys.executable, str(HERE / "demo_report.py")]
    command += flat({"--work": args.work, "--model": args.model, "--out": args.report.absolute()})
    with running("report", command, environment(args.work, "off"), args.work / "report.log") as report:
        try:
            report.wait(REPORT_S)
        except DemoError as error:
            return [str(error)]
    print(report.log.read_text().splitlines()[-1])
    print(f"the report, with pictures: {args.report / 'index.html'}")
    return []


def main() -> int:
    """Both phases, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for logs and results")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint made by tiny_moe.py")
    parser.add_argument("--python-04", type=Path, required=True, help="interpreter that has SkyRL 0.4.0")
    parser.add_argument("--report", type=Path, required=True, help="directory for the report")
    parser.add_argument("--router", type=Path, required=True, help="the vllm-router program")
    args = parser.parse_args()
    # So that every "finally" runs, and with it every stop.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    (args.work / "t").mkdir(exist_ok=True)

    trainer_proofs: list[dict[str, Any]] = []
    try:
        for phase in ("off", "on"):
            env = environment(args.work, phase)
            with ExitStack() as stack:
                urls = start_serving(stack, args, "0.3", phase, env)
                run_client(args, "0.3", phase, env, *urls)
                if phase == "on":
                    trainer_proofs = run_trainer(args, env, *urls)
            say(f"SkyRL 0.3, overlay {phase}: stopped")
        with ExitStack() as stack:
            urls = start_serving(stack, args, "0.4", "on", environment(args.work, "on"))
            for phase in ("off", "on"):
                # Both ask the same server for the same: what it kept of the first must not help the second.
                reset = urllib.request.Request(f"{urls[1]}/reset_prefix_cache", data=b"{}", method="POST")
                urllib.request.urlopen(reset, timeout=60).close()
                run_client(args, "0.4", phase, environment(args.work, phase), *urls)
        say("SkyRL 0.4: stopped")
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1

    names = {"server": "server-on", "client": "client-03-on"}
    proofs = {name: json.loads((args.work / f"{stem}.status.json").read_text()) for name, stem in names.items()}
    proofs |= {"driver": trainer_proofs[0], "trainer": trainer_proofs[-1]}
    problems = check_off(args.work) + check_trainer(trainer_proofs) + check_processes(proofs)
    client_04 = json.loads((args.work / "client-04-on.status.json").read_text())
    problems += check_process("client, SkyRL 0.4", client_04, lambda target: CLIENT_MODULE in target)
    for line in ("0.3", "0.4"):
        off, on = (Run.load(client_stem(args.work, line, phase)) for phase in ("off", "on"))
        differences = {case: compare_case(case, off, on, line) for case in off.cases}
        print(f"SkyRL {line}, overlay off and on\n{transport_table(off, on, differences)}", flush=True)
        print("generate includes the model, which is most of it; skyrl-r3 bench measures the reply path alone")
        text, wrong = compare_rows(off, on)
        print(f"{text}\n", flush=True)
        problems += [difference for found in differences.values() for difference in found] + wrong
    if not problems:
        problems = make_report(args)
    for problem in problems:
        print(f"NOT equal or not patched: {problem}")
    print(f"demo: {len(problems)} problems" if problems else "demo: equal everywhere, and every process is patched")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
