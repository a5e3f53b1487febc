"""Steps of SkyRL's own fully asynchronous trainer, in its simulated-training mode, under Ray.

Real Ray, real generation through a running server, real preprocessing; no weights are trained. Nothing here imports or
enables the overlay: where the wheel is installed, its import hook and SkyRL's own R3 flag are all there is. The proof
comes from ``_run_training``, inside the Ray task: what reaches the training step, and the overlay's state there.

Usage: ``python ci/async_trainer.py --proof DIR [SkyRL overrides...]``; ``ci/demo.py`` gives the overrides.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import ray
import torch
from process_status import write_status
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.utils import initialize_ray, validate_cfg


class _NoWorker:
    """Stands for a Megatron worker class; simulated training never makes one."""


def stub_megatron_workers() -> None:
    """Put a double in place of SkyRL's Megatron worker module.

    With ``strategy=megatron``, which SkyRL wants for R3, the module is imported before anything asks whether models are
    built. It needs Transformer Engine and a GPU. Simulated training uses none of its classes, so nothing that the demo
    measures or checks runs through the double.
    """
    double = types.ModuleType("skyrl.backends.skyrl_train.workers.megatron.megatron_worker")
    for name in ("PolicyWorker", "CriticWorker", "RefWorker"):
        setattr(double, name, _NoWorker)
    sys.modules[double.__name__] = double


def describe(value: Any) -> dict[str, Any]:
    """Dtype and shape of a tensor."""
    return {"dtype": str(value.dtype), "shape": list(value.shape)}


def route_facts(batch: Any) -> dict[str, Any]:
    """What the training step received as routes: dtype, shape, padding, and how many rows repeat an id."""
    routes = batch["rollout_expert_indices"]
    ids = routes.to(torch.int64).sort(dim=-1).values
    facts = describe(routes) | {"rows_with_repeated_ids": int((ids[..., 1:] == ids[..., :-1]).any(-1).sum())}
    mask = batch.get("router_padding_mask")
    if mask is not None:
        facts["router_padding_mask"] = describe(mask) | {"padding_rows": int(mask.sum())}
    return facts


class ProvingTrainer(FullyAsyncTrainerSim):
    """SkyRL's simulated trainer, which also writes down what each training step was given."""

    proof_dir: Path

    async def _run_training(self, training_input: Any) -> Any:
        write_status(
            self.proof_dir / f"trainer-step{self.global_step}.json",
            "trainer",
            step=self.global_step,
            keys=sorted(str(key) for key, value in training_input.items() if value is not None),
            sequences=describe(training_input["sequences"]),
            routes=route_facts(training_input),
        )
        return await super()._run_training(training_input)


class Experiment(BasePPOExp):
    """SkyRL's experiment with the trainer above and a dataset that is small enough for one process."""

    proof_dir: Path

    def get_train_dataset(self) -> PromptDataset:
        """As SkyRL's, without eight processes that each import transformers to filter a handful of prompts."""
        return PromptDataset(
            datasets=self.cfg.data.train_data,
            tokenizer=self.tokenizer,  # pyright: ignore[reportArgumentType]  (SkyRL's own annotation)
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            num_workers=1,
        )

    def get_trainer(self, *args: Any, **kwargs: Any) -> ProvingTrainer:
        """The proving trainer, made from the very arguments that SkyRL passes to its own."""
        trainer = ProvingTrainer(*args, **kwargs)
        trainer.proof_dir = self.proof_dir
        return trainer


@ray.remote(num_cpus=1, max_retries=0)
def train(cfg: SkyRLTrainConfig, proof_dir: Path) -> None:
    """The whole training loop, in a Ray worker, as SkyRL's entry points run it."""
    import demo_env  # noqa: F401  (registers the environment in this process)

    stub_megatron_workers()
    experiment = Experiment(cfg)
    experiment.proof_dir = proof_dir
    experiment.run()


def main(argv: list[str]) -> None:
    """Validate the config as SkyRL does, start Ray as SkyRL does, run, and write the driver's own status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proof", type=Path, required=True, help="directory for the JSON proofs")
    args, overrides = parser.parse_known_args(argv)

    cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
    validate_cfg(cfg)
    initialize_ray(cfg)
    try:
        ray.get(train.remote(cfg, args.proof.resolve()))
        write_status(args.proof / "driver.json", "driver")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
