"""Held-out loss against bytes: federated training beside one machine that has all data.

Both sides take the same number of sequential optimizer steps on the text of `builtin:python-docs` and are evaluated on
the same public records, which no site has. The central run has one site, one round, and the batches of all sites
together in each step. A federated run of eight sites, divided by topic, exchanges the model every `local.steps` steps.
A synchronous run would exchange it in every step.

Bytes are those of one site, both ways: it fetches the model as float32 and sends ring integers, in each round.

    python benchmarks/learning.py [--json] [--steps N] [--only TEXT]

Keys of the JSON: `central`, the best loss of the central runs; `best`, that of the federated runs with at most a tenth
of the bytes of a synchronous run; `gap` = best / central - 1; and `runs`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from cloister.lm.model import count_parameters
from cloister.protocol.plan import Plan
from cloister.protocol.soundness import parse
from cloister.server.cost import Cost, cost
from cloister.server.folder import RunFolder
from cloister.simulations.federation import simulate

SITES, BATCH = 8, 8
COMMON = (
    "aggregation.secure=false",  # the same weights as with masks, bit for bit
    "data.held_out=0.0",
    "server.evaluation=simulation:public",
    "simulation.public=0.1",
    "simulation.per_site=false",
    "simulation.durable=false",
    "server.evaluate_every=100000",
)
RATES = (4e-3, 8e-3)
OPTIMIZERS = ("adamw", "muon")
SERVERS: dict[str, tuple[str, ...]] = {
    "fedavg": ("server.optimizer=fedavg", "server.learning_rate=1.0"),
    "nesterov 0.7, 0.6": ("server.optimizer=nesterov", "server.learning_rate=0.7", "server.momentum=0.6"),
}


def central(steps: int) -> dict[str, list[str]]:
    """The settings of the central runs, by name: one site with the batch of all."""
    one = ["cohort.sites=1", "run.rounds=1", f"local.steps={steps}", f"local.batch_size={SITES * BATCH}"]
    one += ["simulation.partition=iid", *SERVERS["fedavg"]]
    return {
        f"central, {optimizer}, {rate:g}": [
            *one,
            f"local.optimizer={optimizer}",
            f"local.learning_rate={rate}",
        ]
        for optimizer, rate in product(OPTIMIZERS, RATES)
    }


def federated(steps: int) -> dict[str, list[str]]:
    """The settings of the federated runs, by name."""
    runs = {}
    for local, optimizer, rate, state, server in product(
        (steps // 20, steps // 10), OPTIMIZERS, RATES, ("reset", "keep"), SERVERS
    ):
        name = f"{local} local steps, {optimizer}, {rate:g}, {state}, {server}"
        runs[name] = [
            f"run.rounds={steps // local}",
            f"local.steps={local}",
            f"local.optimizer={optimizer}",
            f"local.learning_rate={rate}",
            f"local.optimizer_state={state}",
            *SERVERS[server],
        ]
    return runs


def plan_of(settings: list[str]) -> Plan:
    """The shipped `not-private`, changed."""
    text = files("cloister.simulations.plans").joinpath("not-private.toml").read_text(encoding="utf-8")
    return parse(text, [*COMMON, f"local.batch_size={BATCH}", *settings])


def cost_of(plan: Plan) -> Cost:
    """What a plan costs."""
    return cost(plan, *count_parameters(plan))


def run(settings: list[str]) -> dict[str, Any]:
    """A simulation: the held-out loss of its final model, and the bytes of a site."""
    plan = plan_of(settings)
    spent = cost_of(plan)
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", plan) as run_folder:
        outcome = simulate(run_folder, lambda _event: None)
    return {
        "loss": outcome.final_loss,
        "bytes": plan.run.rounds * (spent.bytes_up + spent.bytes_down),
        "rounds": plan.run.rounds,
        "seconds": sum(outcome.phase_seconds.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="held-out loss against bytes, beside one machine")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--steps", type=int, default=200, help="sequential optimizer steps (default: 200)")
    parser.add_argument("--only", default="", help="only the runs whose name has this text")
    arguments = parser.parse_args()
    steps = arguments.steps
    runs = []
    for name, settings in {**central(steps), **federated(steps)}.items():
        if arguments.only not in name:
            continue
        runs.append({"name": name, **run(settings)})
        if not arguments.json:
            print(f"{runs[-1]['loss']:.4f}  {runs[-1]['bytes'] / 1e6:9.1f} MB  {name}", flush=True)
    spent = cost_of(plan_of([]))
    synchronous = steps * (spent.bytes_up + spent.bytes_down)
    alone = [found["loss"] for found in runs if found["name"].startswith("central")]
    few = [
        found["loss"]
        for found in runs
        if not found["name"].startswith("central") and found["bytes"] <= synchronous / 10
    ]
    result = {
        "steps": steps,
        "central": min(alone, default=None),
        "best": min(few, default=None),
        "gap": min(few) / min(alone) - 1 if few and alone else None,
        "synchronous_bytes": synchronous,
        "runs": runs,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"central {result['central']}, best {result['best']}, gap {result['gap']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
