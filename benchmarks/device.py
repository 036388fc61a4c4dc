"""How far a round on a device is from the same round on the processor, and the noise that a device releases.

- `update`: the update of one round of the plan not-private, without a mesh. `largest` is the largest difference of a
  coordinate over the largest coordinate of the processor's update, `length` the L2 norm of the difference over that of
  the processor's update, which is trained in float32. Private rounds train an adapter (FFA-LoRA of rank 8) with the
  same batches and the same noise on both; with these, noise is most of the update, so `loss` says more.
- `noise`: the variance of what `ClippedSum.release` adds on the device to a known sum, over the variance asked for, for
  200 releases, with the interval in which it lies with probability 0.999 if the noise is right.

    python benchmarks/device.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.resources import files

import numpy as np
import torch
from scipy import stats

from cloister.clients.training.dpsgd import ClippedSum, PrivateTrainer
from cloister.lm.data.prepare import prepare, unit_rule
from cloister.lm.model.layout import Layout
from cloister.lm.model.model import device_for, load_model
from cloister.lm.text.corpus import corpus_records
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan, PrivacySection
from cloister.protocol.plan.soundness import parse

ADAPTER = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=8")
LOCAL = ("local.steps=8", "local.batch_size=8", "local.optimizer=adamw", "local.optimizer_state=reset")
PRIVACY = {"unit": "record", "record": "window", "noise_multiplier": 0.6, "sampling_rate": 0.01}
METHODS = (None, "reference", "opacus")
PRECISIONS = ("float32", "bfloat16")
RELEASES = 200
CONFIDENCE = 0.999


def plan_of(method: str | None, precision: str) -> Plan:
    """The plan of a round, private if it has a method."""
    shipped = files("cloister.protocol.plan.shipped").joinpath("not-private.toml").read_text(encoding="utf-8")
    plan = parse(shipped, [*LOCAL, *(ADAPTER if method else ()), f"local.precision={precision}"])
    if method is None:
        return plan
    return plan.model_copy(update={"privacy": PrivacySection.model_validate(PRIVACY | {"method": method})})


def sequences_of(plan: Plan) -> Sequences:
    """The windows of the builtin corpus."""
    model = load_model(plan)
    rule = unit_rule(plan.data, PrivacySection.model_validate(PRIVACY))
    records = corpus_records(plan.simulation.source).records
    return prepare(records, model.tokenizer, plan.data, seed=0, units=rule).train


def trained(plan: Plan, sequences: Sequences, device: torch.device) -> LocalUpdate:
    """The update of the first round on a device."""
    model = load_model(plan)
    start = model.layout.flatten(model.module)
    if plan.privacy.method is None or not plan.privacy.dpsgd:
        return Trainer(plan, model, device).train(start, sequences, round=1, site_seed=(0,))
    noise = NoiseStream.from_declared_seed(0)
    return PrivateTrainer(plan, model, device).train(
        start, sequences, round=1, noise=noise, noise_multiplier=0.6
    )


def updates(device: torch.device) -> Iterator[dict[str, object]]:
    """A row for each way to train and each precision."""
    for method in METHODS:
        exact = plan_of(method, "float32")
        sequences = sequences_of(exact)
        here = trained(exact, sequences, torch.device("cpu"))
        for precision in PRECISIONS:
            there = trained(plan_of(method, precision), sequences, device)
            difference = (there.vector - here.vector).astype(np.float64)
            yield {
                "update": method or "plain",
                "precision": precision,
                "largest": float(np.abs(difference).max() / np.abs(here.vector).max()),
                "length": float(np.linalg.norm(difference) / np.linalg.norm(here.vector)),
                "loss": there.loss,
                "processor_loss": here.loss,
            }


def noise(device: torch.device) -> dict[str, object]:
    """The variance of what a release adds, over the variance asked for."""
    layout, sigma, sample = Layout(("a", "b"), ((32, 16), (24,))), 1.5, []
    stream = NoiseStream.fresh()
    for number in range(RELEASES):
        sums = ClippedSum(layout, layout.names, 1.0, device)
        sums.add([torch.randn(3, 32, 16, device=device), torch.randn(3, 24, device=device)])
        known = sums.so_far()
        sample.append((sums.release(stream.child(f"release-{number}"), sigma) - known).cpu().numpy())
    values = np.concatenate(sample).astype(np.float64) / sigma
    low, high = stats.chi2.ppf([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], values.size) / values.size
    return {"noise": float(np.square(values).mean()), "low": float(low), "high": float(high)}


def main() -> int:
    parser = argparse.ArgumentParser(description="A round and its noise on a device against the processor's.")
    parser.add_argument("--device", default="auto", help="cuda, cpu or a torch device (default: auto)")
    device = device_for(parser.parse_args().device)
    print(json.dumps(noise(device)), flush=True)
    for each in updates(device):
        print(json.dumps(each), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
