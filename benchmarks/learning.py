"""Held-out loss against bytes: federated training beside one machine that has all data.

All runs learn from the same number of tokens of `builtin:python-docs`, those with a round every 7 steps from 2 % fewer,
and are evaluated on the same public records, which no site has. A central run has one site, one round, and the batches
of all sites together in each step. A federated run has eight sites, divided by topic. The first one is `BASE`; the
others change what their name says. A synchronous run would exchange gradients in every step of the largest batch.

Bytes are those of one site, both ways: it fetches the model as float32 and sends ring integers, in each round.

    python benchmarks/learning.py [--json] [--steps N] [--seed N] [--only NAME]... [--plot FILE.svg]

Keys of the JSON: `central`, the best loss of the central runs of N steps; `central_any`, that of all central runs, also
those that take more steps of smaller batches; `best`, that of the federated runs with at most a tenth of the bytes of a
synchronous run; `gap` and `gap_any`, best / central - 1 with each; and `runs`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from cloister.lm.model.model import count_parameters
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.federation.cost import Cost, cost
from cloister.server.record.folder import RunFolder
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
    "cohort.deadline_s=1e6",  # a central run has one round
)
FEDAVG = ("server.optimizer=fedavg", "server.learning_rate=1.0")
FURTHER = ("server.optimizer=fedavg", "server.learning_rate=1.3")
LITTLE_MOMENTUM = ("server.optimizer=nesterov", "server.learning_rate=1.0", "server.momentum=0.3")
NESTEROV = ("server.optimizer=nesterov", "server.learning_rate=0.7", "server.momentum=0.6")
EIGHT_BITS = ("aggregation.ring_bits=8", "aggregation.compression={}")


@dataclass(frozen=True)
class Choice:
    """A federated run of a number of tokens."""

    every: int = 10
    """Steps of the largest batch in a round."""
    batch: int = BATCH // 2
    """Sequences in a step; with half of them a site takes twice as many steps."""
    rate: float = 4e-3
    optimizer: str = "adamw"
    state: str = "keep"
    server: tuple[str, ...] = FEDAVG
    ring: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    """Another division of the records, which is shown and not compared."""

    def settings(self, steps: int) -> list[str]:
        """Those of its plan, for so many steps of the largest batch."""
        return [
            f"run.rounds={steps // self.every}",
            f"local.steps={self.every * BATCH // self.batch}",
            f"local.batch_size={self.batch}",
            f"local.learning_rate={self.rate}",
            f"local.optimizer={self.optimizer}",
            f"local.optimizer_state={self.state}",
            *self.server,
            *self.ring,
            *self.data,
        ]


BASE = Choice()
MUON = replace(BASE, optimizer="muon", rate=8e-3, ring=EIGHT_BITS, every=7)
FEDERATED = {
    "base: a round every 10 steps, batch 4, AdamW 0.004, kept state, FedAvg, 32 bits": BASE,
    "batch 8": replace(BASE, batch=8),
    "batch 2": replace(BASE, batch=2),
    "rate 0.002": replace(BASE, rate=2e-3),
    "rate 0.008": replace(BASE, rate=8e-3),
    "state reset": replace(BASE, state="reset"),
    "Nesterov 0.7, 0.6": replace(BASE, server=NESTEROV),
    "a round every 20 steps": replace(BASE, every=20),
    "rate 0.001": replace(BASE, rate=1e-3),
    "rate 0.002, batch 2": replace(BASE, rate=2e-3, batch=2),
    "rate 0.002, 8 bits, a round every 7 steps": replace(BASE, rate=2e-3, ring=EIGHT_BITS, every=7),
    "8 bits": replace(BASE, ring=EIGHT_BITS),
    "8 bits, a round every 7 steps": replace(BASE, ring=EIGHT_BITS, every=7),
    "Muon 0.004": replace(BASE, optimizer="muon"),
    "Muon 0.004, 8 bits": replace(BASE, optimizer="muon", ring=EIGHT_BITS),
    "Muon 0.008": replace(BASE, optimizer="muon", rate=8e-3),
    "Muon 0.016": replace(BASE, optimizer="muon", rate=16e-3),
    "Muon 0.008, 8 bits, a round every 7 steps": MUON,
    "Muon 0.008, 8 bits, a round every 7 steps, records divided at random": replace(
        MUON, data=("simulation.partition=iid",)
    ),
    "Muon 0.008, 8 bits, a round every 2 steps": replace(MUON, every=2),
    "Muon 0.012, 8 bits, a round every 7 steps": replace(MUON, rate=12e-3),
    "Muon 0.008, 8 bits, a round every 7 steps, batch 2": replace(MUON, batch=2),
    "Muon 0.004, 8 bits, a round every 7 steps, batch 2": replace(MUON, batch=2, rate=4e-3),
    "Muon 0.008, 8 bits, a round every 7 steps, FedAvg with rate 1.3": replace(MUON, server=FURTHER),
    "Muon 0.008, 8 bits, a round every 7 steps, Nesterov 0.7, 0.6": replace(MUON, server=NESTEROV),
    "Muon 0.008, 8 bits, a round every 7 steps, Nesterov 1, 0.3": replace(MUON, server=LITTLE_MOMENTUM),
    "Muon 0.008, 8 bits, a round every 7 steps, Nesterov 1, 0.3, batch 2": replace(
        MUON, server=LITTLE_MOMENTUM, batch=2
    ),
}
CENTRAL = {
    "central, AdamW 0.004": Choice(batch=SITES * BATCH),
    "central, AdamW 0.008": Choice(batch=SITES * BATCH, rate=8e-3),
    "central, AdamW 0.004, half the batch": Choice(batch=SITES * BATCH // 2),
    "central, Muon 0.004": Choice(batch=SITES * BATCH, optimizer="muon"),
    "central, Muon 0.008": Choice(batch=SITES * BATCH, rate=8e-3, optimizer="muon"),
    "central, Muon 0.016": Choice(batch=SITES * BATCH, rate=16e-3, optimizer="muon"),
    "central, Muon 0.032": Choice(batch=SITES * BATCH, rate=32e-3, optimizer="muon"),
    "central, Muon 0.004, half the batch": Choice(batch=SITES * BATCH // 2, optimizer="muon"),
    "central, Muon 0.008, half the batch": Choice(batch=SITES * BATCH // 2, rate=8e-3, optimizer="muon"),
}


def central(choice: Choice, steps: int) -> list[str]:
    """The settings of a central run: one site with the batch of all."""
    largest = SITES * BATCH
    one = [
        "cohort.sites=1",
        "run.rounds=1",
        "simulation.partition=iid",
        f"local.steps={steps * largest // choice.batch}",
    ]
    return [*choice.settings(steps), *one]


def plan_of(settings: list[str]) -> Plan:
    """The shipped `not-private`, changed."""
    text = files("cloister.protocol.plan.shipped").joinpath("not-private.toml").read_text(encoding="utf-8")
    return parse(text, [*COMMON, *settings])


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
        "steps": plan.run.rounds * plan.local.steps,
        "seconds": sum(outcome.phase_seconds.values()),
    }


def plot(runs: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG of runs: a row for each, the best first, with its loss as a point and its bytes."""
    rows = sorted(runs, key=lambda found: found["loss"])
    losses: list[float] = [found["loss"] for found in rows]
    low, high = math.floor(10 * losses[0]) / 10, math.ceil(10 * losses[-1]) / 10
    left, right, top, step = 510, 790, 62, 22

    def at(loss: float) -> float:
        return left + (right - left) * (loss - low) / (high - low)

    bottom = top + step * len(rows) - 8
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {bottom + 30}" font-size="12"',
        ' font-family="DejaVu Sans, Helvetica, Arial, sans-serif" fill="#475569">',
        f'<title>{escape(title)}</title><rect width="880" height="{bottom + 30}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-weight="bold" fill="#0f172a">{escape(title)}</text>',
        '<text x="870" y="44" text-anchor="end">MB of a site</text>',
    ]
    for tenth in range(round(10 * low), round(10 * high) + 1):
        x = at(tenth / 10)
        drawn.append(f'<path d="M{x:.1f} {top - 12} V{bottom}" stroke="#e2e8f0"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tenth / 10:.1f}</text>')
    for row, found in enumerate(rows):
        y, color = top + step * row, "#b45309" if found["name"] in CENTRAL else "#1d4ed8"
        drawn.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{escape(found["name"])}</text>')
        drawn.append(f'<circle cx="{at(found["loss"]):.1f}" cy="{y}" r="4" fill="{color}"/>')
        if found["name"] not in CENTRAL:
            drawn.append(f'<text x="870" y="{y + 4}" text-anchor="end">{found["bytes"] / 1e6:.1f}</text>')
    return "\n".join((*drawn, "</svg>", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description="held-out loss against bytes, beside one machine")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of the largest batch, a multiple of 20 (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="that of the plans (default: 0)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=[*CENTRAL, *FEDERATED],
        help="only the run with this name; may be repeated",
    )
    parser.add_argument("--plot", metavar="FILE", help="write an SVG with the losses")
    arguments = parser.parse_args()
    steps = arguments.steps
    every = {name: central(choice, steps) for name, choice in CENTRAL.items()}
    every |= {name: choice.settings(steps) for name, choice in FEDERATED.items()}
    runs = []
    for name, settings in every.items():
        if arguments.only and name not in arguments.only:
            continue
        runs.append({"name": name, **run([*settings, f"run.seed={arguments.seed}"])})
        if not arguments.json:
            print(f"{runs[-1]['loss']:.4f}  {runs[-1]['bytes'] / 1e6:9.1f} MB  {name}", flush=True)
    spent = cost_of(plan_of([]))
    synchronous = steps * (spent.bytes_up + spent.bytes_down)
    alone = [found for found in runs if found["name"] in CENTRAL]
    one = min((found["loss"] for found in alone if found["steps"] == steps), default=None)
    one_any = min((found["loss"] for found in alone), default=None)
    skewed = {name for name, choice in FEDERATED.items() if not choice.data}
    few = [found["loss"] for found in runs if found["name"] in skewed and found["bytes"] <= synchronous / 10]
    best = min(few, default=None)
    result = {
        "steps": steps,
        "central": one,
        "central_any": one_any,
        "best": best,
        "gap": best / one - 1 if best and one else None,
        "gap_any": best / one_any - 1 if best and one_any else None,
        "synchronous_bytes": synchronous,
        "runs": runs,
    }
    if arguments.plot and runs:
        title = (
            f"Held-out loss, nats per byte, after the tokens of {steps} steps of {SITES * BATCH} sequences"
        )
        Path(arguments.plot).write_text(plot(runs, title), encoding="utf-8")
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"best {best}; central {one}, gap {result['gap']}")
        print(f"with central runs of more steps too: {one_any}, gap {result['gap_any']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
