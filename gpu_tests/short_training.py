"""Two steps of SkyRL's own GRPO training with replay, on one GPU, through its own entry point.

    python -m gpu_tests.short_training --model MODEL --out DIR

Needs SkyRL 0.3.0 with its megatron extra. Has not been run: the settings are checked against SkyRL's own validation,
but no machine with a GPU has seen them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS, BATCH, SAMPLES = 2, 4, 4
_METRIC = "r3/rows_captured"
"""Is among a step's metrics where the overlay has handed routes to the trainer."""


def write_prompts(path: Path) -> None:
    """As many sums as the steps take, for SkyRL's gsm8k environment."""
    lines = []
    for i in range(STEPS * BATCH):
        question = f"A shop sells {i + 2} apples in the morning and {3 * i + 5} in the evening. How many are that?"
        prompt = [{"role": "user", "content": f'{question} Think, then write the answer after "####".'}]
        answer = {"method": "rule", "ground_truth": str(4 * i + 7)}
        lines.append(json.dumps({"prompt": prompt, "env_class": "gsm8k", "reward_spec": answer}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def overrides(model: str, out: Path, prompts: Path) -> dict[str, Any]:
    """SkyRL's settings.

    A model of 7 billion parameters has 14 GB of weights in bfloat16 and 28 of float32 gradients; the optimizer's 84 are
    kept on the host. vLLM sleeps while the trainer has the GPU.
    """
    megatron = "trainer.policy.megatron_config"
    return {
        "data.train_data": f"['{prompts}']",
        "data.dataloader.num_workers": 0,
        "environment.env_class": "gsm8k",
        "generator.inference_engine.distributed_executor_backend": "mp",
        "generator.inference_engine.enable_return_routed_experts": "true",
        "generator.inference_engine.enable_ray_prometheus_stats": "false",
        "generator.inference_engine.gpu_memory_utilization": 0.5,
        "generator.inference_engine.max_num_seqs": BATCH * SAMPLES,
        "generator.max_input_length": 512,
        "generator.n_samples_per_prompt": SAMPLES,
        "generator.sampling_params.max_generate_length": 256,
        "generator.sampling_params.logprobs": 1,
        "trainer.strategy": "megatron",
        f"{megatron}.moe_enable_routing_replay": "true",
        f"{megatron}.optimizer_config_kwargs.optimizer_cpu_offload": "true",
        f"{megatron}.optimizer_config_kwargs.optimizer_offload_fraction": 1.0,
        f"{megatron}.optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": "true",
        f"{megatron}.optimizer_config_kwargs.use_precision_aware_optimizer": "true",
        "trainer.policy.model.path": model,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.placement.colocate_all": "true",
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.epochs": 1,
        "trainer.max_training_steps": STEPS,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.max_prompt_length": 512,
        "trainer.logger": "console",
        "trainer.log_path": out / "logs",
        "trainer.export_path": out / "export",
        "trainer.ckpt_path": out / "ckpt",
    }


def run(command: Sequence[str]) -> int:
    """Train, and repeat what is said. Returns 0 if it ended well and each step got routes by way of the overlay."""
    steps = 0
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, **pipe) as child:
        for line in child.stdout or ():
            print(line, end="", flush=True)
            steps += _METRIC in line
    if child.returncode:
        print(f"short_training: SkyRL ended with status {child.returncode}", file=sys.stderr)
    elif steps < STEPS:
        print(f"short_training: expected {_METRIC} in {STEPS} steps, got it in {steps}", file=sys.stderr)
    return int(child.returncode != 0 or steps < STEPS)


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gpu_tests.short_training")
    parser.add_argument("--model", required=True, help="id on the hub or directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the prompts and SkyRL's logs")
    chosen = parser.parse_args()
    # Ray's workers run elsewhere.
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(out / "prompts.jsonl")
    settings = [f"{key}={value}" for key, value in overrides(chosen.model, out, out / "prompts.jsonl").items()]
    return run([sys.executable, "-u", "-m", "skyrl.train.entrypoints.main_base", *settings])


if __name__ == "__main__":
    sys.exit(main())
