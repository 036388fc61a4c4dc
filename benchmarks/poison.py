"""What bounds, gate and groups do and do not stop: each attack without and with each defence.

Some of ten sites are poisoned (`[faults] poison`), in a simulation of a small model on the text of `--source`. The
gate's bound on the norm of the mean is 1.5 times the largest of the run without an attack; that on the loss is 0.02
nats per token. The median is that of five groups of two sites, whose sums are in clear: the secure sum would refuse so
small groups. The bound on every update is `auto`; poisoned sites keep it, as those must that are not found. A liar can
add up to three times as much under masks. With `--private` sites train adapters of a model that was trained on public
text, with the unit `record`; without, the sums of that defence are in clear too, and have the same bits.
Printed are, for each attack and gate, the held-out loss of the final model on public records, the rounds that the gate
refused, and the loss of the backdoor's target after its trigger: a model that was not attacked has a high one.

    python benchmarks/poison.py [--json] [--source SOURCE] [--rounds N] [--only TEXT] [--liars N] [--private]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cloister.protocol.plan.plan import PoisonSection
from cloister.protocol.plan.soundness import parse
from cloister.server.record.folder import RunFolder
from cloister.simulations.federation import simulate

PLAN = """
[model.config]
hidden_size = 64
intermediate_size = 172
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4

[data]
held_out = 0.0

[local]
steps = 16
batch_size = 8
learning_rate = 4e-3

[cohort]
sites = 10

[server]
evaluation = "simulation:public"
evaluation_sequences = 100

[simulation]
partition = "iid"
public = 0.05
"""
PRIVATE = [
    *("model.adapter.scheme=ffa-lora", "public.source=builtin:python-docs", "public.steps=150"),
    "simulation.source=builtin:python-stdlib",
    *("privacy.unit=record", "privacy.record=window", "privacy.noise_multiplier=0.65"),
    *("privacy.sampling_rate=0.004", "privacy.delta=1e-6", "aggregation.weighting=uniform"),
    *("data.sequence_length=128", "local.steps=8", "local.batch_size=16", "local.accumulation=2"),
]
SITES = 10
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign-flip": {"kind": "sign-flip"},
    "sign-flip x 10": {"kind": "sign-flip", "factor": 10.0},
    "scale x 30": {"kind": "scale", "factor": 30.0},
    "backdoor": {"kind": "backdoor"},
    "backdoor x 4": {"kind": "backdoor", "factor": 4.0},
}
RISE = 0.02
"""Nats per token of `server.gate.loss`."""
MEDIAN = ["aggregation.groups=5", "aggregation.secure=false"]
BOUND = ["aggregation.norm_bound=auto"]
ROOM = 1.5
"""`server.gate.norm` over the largest norm of honest rounds."""


def run(settings: list[str]) -> dict[str, Any]:
    """One simulation: the loss before and after, refused rounds, the largest norm, and the backdoor's loss."""
    plan = parse(PLAN, settings)
    with (
        tempfile.TemporaryDirectory() as temporary,
        RunFolder.create(Path(temporary) / "run", plan) as folder,
    ):
        outcome = simulate(folder, lambda _event: None)
        return {
            "initial_loss": outcome.initial_loss,
            "loss": outcome.final_loss,
            "refused": outcome.gate_refused,
            "largest_norm": max(row.get("update_norm", 0.0) for row in folder.metrics()),
            "backdoor_loss": backdoor_loss(folder.final),
        }


@torch.no_grad()
def backdoor_loss(path: Path) -> float:
    """Nats per token of the backdoor's target after its trigger."""
    poison = PoisonSection(share=1.0, kind="backdoor")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    trigger = tokenizer(poison.trigger, return_tensors="pt").input_ids
    target = tokenizer(poison.target, return_tensors="pt", add_special_tokens=False).input_ids
    tokens = torch.cat([trigger, target], dim=1)
    labels = tokens.clone()
    labels[:, : trigger.shape[1]] = -100
    return float(model(input_ids=tokens, labels=labels).loss)


def main() -> int:
    parser = argparse.ArgumentParser(description="what bounds, gate and groups do and do not stop")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--source", default="builtin:python-docs", help="as simulation.source")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a run (default: 6)")
    parser.add_argument("--only", default="", help="only the attacks whose name has this text, and none")
    parser.add_argument("--liars", type=int, default=2, help="poisoned sites of ten (default: 2)")
    parser.add_argument("--private", action="store_true", help="adapters with the privacy unit record")
    arguments = parser.parse_args()
    common = [f"run.rounds={arguments.rounds}", f"simulation.source={arguments.source}"]
    common = [*common[:1], *PRIVATE] if arguments.private else common
    bounded = BOUND if arguments.private else [*BOUND, "aggregation.secure=false"]
    gates: dict[str, list[str]] = {"none": [], "median": MEDIAN, "bound": bounded}
    rows = []
    for attack, poison in ATTACKS.items():
        if poison and arguments.only not in attack:
            continue
        attacked = [f"faults.poison.{key}={value}" for key, value in poison.items()]
        attacked += [f"faults.poison.share={arguments.liars / SITES}"] if attacked else []
        for gate, bound in gates.items():
            rows.append({"attack": attack, "gate": gate, **run([*common, *attacked, *bound])})
            if not arguments.json:
                show(rows[-1])
        if attack == "none":
            norm = ROOM * rows[0]["largest_norm"]
            gates = {
                "none": [],
                "norm": [f"server.gate.norm={norm}"],
                "loss": [f"server.gate.loss={RISE}"],
                "median": MEDIAN,
                "bound": bounded,
            }
    if arguments.json:
        print(
            json.dumps(
                {
                    "rounds": arguments.rounds,
                    "liars": arguments.liars,
                    "private": arguments.private,
                    "runs": rows,
                }
            )
        )
    return 0


def show(row: dict[str, Any]) -> None:
    """Print a run in one line."""
    print(
        f"{row['attack']:16} gate {row['gate']:6} loss {row['initial_loss']:.3f} -> {row['loss']:7.3f}  "
        f"refused {row['refused']}  largest norm {row['largest_norm']:8.2f}  backdoor {row['backdoor_loss']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
