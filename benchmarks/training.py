"""Tokens per second of `simulate` against a bare torch loop, in one run: the cost of the federation in training speed.

Both sides train the shipped default model on the same records with the same batch, precision, optimizer, gradient
clipping, number of processes and threads. The bare loop is a plain loop over batches in as many processes; its time
runs from a barrier, when every process has its model and data, to the last step. The simulation's time is what a run
reports: from a round's first request to its decoded mean, over all rounds, with everything that a round does in between
(sending the model, building the optimizer, rounding, summing, keeping the finished update). Neither counts evaluation.
The two alternate, and the ratio is that of the medians.

    python benchmarks/training.py [--json] [--repeats N] [--workers N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from importlib.resources import files
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import load_model
from cloister.lm.text.corpus import corpus_records
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.folder import RunFolder
from cloister.simulations.federation import simulate


def bare_loop(plan: Plan, steps: int, process: int, ready: Barrier, done: Barrier) -> None:
    """`steps` optimizer steps of plain torch, between two barriers."""
    local = plan.local
    torch.set_num_threads(local.threads)
    model = load_model(plan)
    records = corpus_records(plan.simulation.source).records
    sequences = prepare(records, model.tokenizer, plan.data, seed=0).train
    tokens_NT = torch.from_numpy(sequences.tokens.astype("int64"))
    labels_NT = torch.from_numpy(sequences.labels.astype("int64"))
    module = model.module.train()
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=local.learning_rate, betas=local.betas, weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(process)

    def step() -> None:
        batch = torch.randint(len(tokens_NT), (local.batch_size,), generator=generator)
        module(input_ids=tokens_NT[batch], labels=labels_NT[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, local.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # exclude the allocations of the first step on both sides
    ready.wait()
    for _ in range(steps):
        step()
    done.wait()


def bare_rate(plan: Plan, workers: int) -> float:
    """Tokens per second of the bare loop in all processes together."""
    steps = plan.run.rounds * plan.local.steps * plan.cohort.size() // workers
    context = multiprocessing.get_context("spawn")
    ready, done = context.Barrier(workers + 1), context.Barrier(workers + 1)
    processes = [
        context.Process(target=bare_loop, args=(plan, steps, number, ready, done))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    ready.wait()
    started = time.perf_counter()
    done.wait()
    seconds = time.perf_counter() - started
    for process in processes:
        process.join()
    labels = plan.data.sequence_length - 1  # the first token of a sequence has nothing before it
    return workers * steps * plan.local.batch_size * labels / seconds


def simulated_rate(plan: Plan, workers: int) -> float:
    """Tokens per second that a run of the plan reports."""
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", plan) as run:
        return simulate(run, lambda _: None, workers=workers).tokens_per_second


ROUND = (
    "local.steps=16",
    "local.batch_size=8",
    "local.optimizer=adamw",
    "local.optimizer_state=reset",
)
"""The round that is measured; the shipped plan has had it until it took smaller steps, and later those of Muon."""


def main() -> int:
    parser = argparse.ArgumentParser(description="tokens per second of simulate against a bare torch loop")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a run (default: 4)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    arguments = parser.parse_args()
    shipped = files("cloister.protocol.plan.shipped").joinpath("not-private.toml").read_text(encoding="utf-8")
    rounds = [f"run.rounds={arguments.rounds}", f"server.evaluate_every={arguments.rounds}"]
    plan = parse(shipped, [*rounds, *ROUND])
    bare, simulated = [], []
    for _ in range(arguments.repeats):
        bare.append(bare_rate(plan, arguments.workers))
        simulated.append(simulated_rate(plan, arguments.workers))
    result = {
        "ratio": statistics.median(simulated) / statistics.median(bare),
        "simulate_tokens_per_second": statistics.median(simulated),
        "bare_tokens_per_second": statistics.median(bare),
        "workers": arguments.workers,
        "repeats": arguments.repeats,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:,.3g}" if isinstance(value, float) else f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
