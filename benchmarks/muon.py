"""A step of Muon on this processor, beside that of `torch.optim.Muon`, which iterates in bfloat16 everywhere.

The matrices are those of the hidden layers of the shipped `not-private`; their gradients are random.

    python benchmarks/muon.py [--json]

Keys of the JSON: `ours_ms` and `torch_ms`, the least time of a step in milliseconds, and `ratio`, torch / ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.resources import files

import torch
from torch import nn

from cloister.lm.model.model import load_model
from cloister.lm.training.muon import Muon
from cloister.lm.training.optimizer import hidden_matrices
from cloister.protocol.plan.soundness import parse

REPEATS = 10


def milliseconds(optimizer: torch.optim.Optimizer) -> float:
    """The time of a step."""
    before = time.perf_counter()
    optimizer.step()
    return 1000 * (time.perf_counter() - before)


def main() -> int:
    parser = argparse.ArgumentParser(description="a step of Muon beside torch's")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    shipped = files("cloister.protocol.plan.shipped").joinpath("not-private.toml").read_text(encoding="utf-8")
    plan = parse(shipped, [])
    torch.set_num_threads(plan.local.threads)
    module = load_model(plan).module
    names = hidden_matrices(module)
    shapes = [parameter.shape for name, parameter in module.named_parameters() if name in names]
    sides: list[list[nn.Parameter]] = []
    for _ in range(2):
        random = torch.Generator().manual_seed(0)
        sides.append([nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes])
        for matrix in sides[-1]:
            matrix.grad = torch.randn(matrix.shape, generator=random)
    ours: torch.optim.Optimizer = Muon(
        sides[0], lr=1e-3, momentum=0.95, weight_decay=0.1, dtype=torch.float32
    )
    theirs: torch.optim.Optimizer = torch.optim.Muon(sides[1], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    times = [
        (milliseconds(ours), milliseconds(theirs)) for _ in range(REPEATS)
    ]  # in turn, under the same load
    best = [min(side) for side in zip(*times, strict=True)]
    result = {"ours_ms": best[0], "torch_ms": best[1], "ratio": best[1] / best[0]}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{len(shapes)} matrices: {best[0]:.1f} ms a step, torch {best[1]:.1f} ms, {result['ratio']:.1f} times"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
