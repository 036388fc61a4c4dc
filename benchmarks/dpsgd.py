"""Seconds of a private step against a plain one, in one run: the cost of record-level privacy in training speed.

The model of the shipped default plan with FFA-LoRA of rank 8, trained on one CPU thread. A plain step
(`lm/train.py`) takes 32 sequences of 128 bytes; a private one takes each window of the same text with the
probability that makes 32 of them on average. Each is timed over a round of several steps, with everything else that a
round does; the trainers alternate, and medians are compared. Both private methods do the same arithmetic for the same
batches.

    python benchmarks/dpsgd.py [--json] [--repeats N] [--steps N] [--scheme SCHEME] [--micro-batch N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.resources import files

import torch

from cloister.clients.dpsgd import PrivateTrainer
from cloister.lm.corpus import corpus_records
from cloister.lm.data import prepare, unit_rule
from cloister.lm.model import load_model
from cloister.lm.train import Trainer
from cloister.privacy.noise import NoiseStream
from cloister.protocol.plan import Plan, PrivacySection
from cloister.protocol.soundness import parse

EXPECTED_BATCH = 32
CPU = torch.device("cpu")


def plain_round(plan: Plan) -> Callable[[int], None]:
    """A round of plain steps."""
    model = load_model(plan)
    records = corpus_records(plan.simulation.source).records
    sequences = prepare(records, model.tokenizer, plan.data, seed=0).train
    trainer, start = Trainer(plan, model, CPU), model.layout.flatten(model.module)
    return lambda number: void(trainer.train(start, sequences, round=number, site_seed=(0,)))


def private_round(plan: Plan, method: str) -> Callable[[int], None]:
    """A round of private steps by a method."""
    section = {"unit": "record", "record": "window", "noise_multiplier": 0.6, "method": method}
    model = load_model(plan)
    records = corpus_records(plan.simulation.source).records
    rule = unit_rule(plan.data, PrivacySection.model_validate(section))
    sequences = prepare(records, model.tokenizer, plan.data, seed=0, units=rule).train
    section["sampling_rate"] = EXPECTED_BATCH / len(sequences)  # a window is a unit
    private = plan.model_copy(update={"privacy": PrivacySection.model_validate(section)})
    trainer, start = PrivateTrainer(private, model, CPU), model.layout.flatten(model.module)
    noise = NoiseStream.from_declared_seed(0)  # the same batches in every run
    return lambda number: void(
        trainer.train(start, sequences, round=number, noise=noise, noise_multiplier=0.6)
    )


def void(_: object) -> None:
    """Drop a result."""


def main() -> int:
    parser = argparse.ArgumentParser(description="seconds of a private step against a plain one")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a round (default: 6)")
    parser.add_argument("--scheme", default="ffa-lora", help="adapter scheme (default: ffa-lora)")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows at a time (default: 16)")
    arguments = parser.parse_args()
    shipped = files("cloister.simulations.plans").joinpath("default.toml").read_text(encoding="utf-8")
    plan = parse(
        shipped,
        [
            f"run.rounds={arguments.repeats + 1}",
            f"model.adapter.scheme={arguments.scheme}",
            "model.adapter.rank=8",
            f"local.steps={arguments.steps}",
            f"local.batch_size={arguments.micro_batch}",
            f"local.accumulation={EXPECTED_BATCH // arguments.micro_batch}",
            "local.threads=1",
        ],
    )
    kinds = {
        "plain": plain_round(plan),
        "opacus": private_round(plan, "opacus"),
        "reference": private_round(plan, "reference"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(1, arguments.repeats + 2):
        for name, train in kinds.items():
            started = time.perf_counter()
            train(number)
            if number > 1:  # the first makes allocations
                seconds[name].append((time.perf_counter() - started) / arguments.steps)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    result: dict[str, float | int | str] = {
        "scheme": arguments.scheme,
        "expected_batch": EXPECTED_BATCH,
        "micro_batch": arguments.micro_batch,
        **{f"{name}_seconds_per_step": median for name, median in medians.items()},
        **{f"{name}_least_seconds_per_step": min(each) for name, each in seconds.items()},
        "opacus_over_plain": medians["opacus"] / medians["plain"],
        "reference_over_plain": medians["reference"] / medians["plain"],
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:34} {value:.3g}" if isinstance(value, float) else f"{name:34} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
