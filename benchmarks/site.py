"""Tokens per second and peak memory of a site's training on one device, in one run: what this package adds to torch.

- `ratio`: `Trainer` (`lm/train.py`) over the plainest loop of torch that takes the same steps: the same model, windows
  of text, batch, arithmetic, fused AdamW and clipping. A turn of `Trainer` is a round, with all that a round does.
- `private_ratio`: `PrivateTrainer` with the gradients of many windows at a time, over `Trainer`; both train an adapter
  (FFA-LoRA of rank 8, unless the plan names another), and the expected batch of the one is the batch of the other.
  `reference_ratio` is the same with the gradients of one window at a time.
- `mfu`: on a GPU, the floating-point operations of forward and backward that torch counts in a step of the plain loop,
  times the steps a second of `Trainer`, over the GPU's peak in bfloat16; else null.

Each side has a process of its own, so that each has a peak of its own: on a GPU the most that torch has allocated, else
the most resident memory. The sides take turns, and medians are compared.

    python benchmarks/site.py [--json] [--repeats N] [--steps N] [--device NAME] [--set SECTION.KEY=VALUE]...
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing.connection import Connection

import torch
from torch.utils.flop_counter import FlopCounterMode

from cloister.clients.dpsgd import PrivateTrainer
from cloister.lm.corpus import corpus_records
from cloister.lm.data import NOT_LEARNED, Sequences, prepare, unit_rule
from cloister.lm.frozen import is_lowered
from cloister.lm.model import LanguageModel, device_for, load_model
from cloister.lm.train import Trainer
from cloister.privacy.noise import NoiseStream
from cloister.protocol.plan import Plan, PrivacySection
from cloister.protocol.soundness import from_json, parse

ADAPTER = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=8")
PRIVACY = {"unit": "record", "record": "window", "noise_multiplier": 0.6}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 operations a second by NVIDIA's data sheets; the first that is part of the device's name counts."""

Turn = Callable[[int], int]
"""A turn's number, from 1, to the tokens that it learned from."""


@dataclass(frozen=True)
class Measured:
    """One side."""

    tokens_per_second: float
    peak_bytes: int
    flops_per_token: float
    """Of the plain loop; else 0."""


def bare(plan: Plan, model: LanguageModel, sequences: Sequences, device: torch.device) -> Turn:
    """The plain loop."""
    local, module = plan.local, model.module.to(device).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=local.learning_rate, betas=local.betas, fused=True)
    tokens_NL = torch.from_numpy(sequences.tokens.astype("int64")).to(device)
    labels_NL = torch.from_numpy(sequences.labels.astype("int64")).to(device)
    bfloat16 = device.type == "cuda" or is_lowered(module)
    if local.precision != "auto":
        bfloat16 = local.precision == "bfloat16"
    generator = torch.Generator().manual_seed(0)

    def turn(_number: int) -> int:
        learned = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(local.steps):
            for _ in range(local.accumulation):
                rows = torch.randint(len(tokens_NL), (local.batch_size,), generator=generator).to(device)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                    loss = module(input_ids=tokens_NL[rows], labels=labels_NL[rows]).loss
                (loss / local.accumulation).backward()
                learned += (labels_NL[rows, 1:] != NOT_LEARNED).sum()
            torch.nn.utils.clip_grad_norm_(parameters, local.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return int(learned)

    return turn


def plain(plan: Plan, model: LanguageModel, sequences: Sequences, device: torch.device) -> Turn:
    """Rounds of `Trainer`."""
    trainer, start = Trainer(plan, model, device), model.layout.flatten(model.module)
    return lambda number: trainer.train(start, sequences, round=number, site_seed=(0,)).tokens


def private(plan: Plan, model: LanguageModel, sequences: Sequences, device: torch.device) -> Turn:
    """Rounds of `PrivateTrainer`."""
    trainer, start = PrivateTrainer(plan, model, device), model.layout.flatten(model.module)
    noise = NoiseStream.from_declared_seed(0)  # the same batches in every run
    return lambda number: (
        trainer.train(start, sequences, round=number, noise=noise, noise_multiplier=0.6).tokens
    )


SIDES = {
    "bare": bare,
    "trainer": plain,
    "adapter": plain,
    "private": private,
    "reference": private,
}
METHODS = {"private": "opacus", "reference": "reference"}


def measure(side: str, text: str, device_name: str, pipe: Connection) -> None:
    """A side's process: a turn for each number that arrives, answered by (tokens, seconds); None ends it."""
    plan, device = from_json(text), device_for(device_name)
    torch.set_num_threads(plan.local.threads)
    model = load_model(plan)
    rule = unit_rule(plan.data, PrivacySection.model_validate(PRIVACY))
    records = corpus_records(plan.simulation.source).records
    sequences = prepare(records, model.tokenizer, plan.data, seed=0, units=rule).train
    if side in METHODS:
        rate = plan.local.batch_size * plan.local.accumulation / len(sequences)  # a window is a unit
        section = PrivacySection.model_validate(PRIVACY | {"sampling_rate": rate, "method": METHODS[side]})
        plan = plan.model_copy(update={"privacy": section})
    turn = SIDES[side](plan, model, sequences, device)
    flops = 0.0
    if side == "bare":
        with FlopCounterMode(display=False) as counter:
            tokens = turn(0)
        flops = counter.get_total_flops() / tokens
    pipe.send(flops)
    while (number := pipe.recv()) is not None:
        started = time.perf_counter()
        tokens = turn(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pipe.send((tokens, time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak)


def measured(plans: dict[str, Plan], device: str, repeats: int) -> dict[str, Measured]:
    """Every side, in turns; the first turn makes allocations and does not count."""
    context, pipes, flops = multiprocessing.get_context("spawn"), dict[str, Connection](), dict[str, float]()
    processes = []
    for side, plan in plans.items():
        pipes[side], there = context.Pipe()
        processes.append(context.Process(target=measure, args=(side, plan.to_json(), device, there)))
        processes[-1].start()
        there.close()
        flops[side] = pipes[side].recv()
    turns: dict[str, list[float]] = {side: [] for side in plans}
    for number in range(1, repeats + 2):
        for side, pipe in pipes.items():
            pipe.send(number)
            tokens, seconds = pipe.recv()
            if number > 1:
                turns[side].append(tokens / seconds)
    found = {}
    for side, pipe in pipes.items():
        pipe.send(None)
        found[side] = Measured(statistics.median(turns[side]), pipe.recv(), flops[side])
    for process in processes:
        process.join()
    return found


def device_title(device: torch.device) -> str:
    """The name of the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "CPU"


def main() -> int:
    parser = argparse.ArgumentParser(description="a site's training on one device against a plain torch loop")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn (default: 8)")
    parser.add_argument("--device", default="auto", help="auto or a torch device (default: auto)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the plan"
    )
    arguments = parser.parse_args()
    shipped = files("cloister.simulations.plans").joinpath("not-private.toml").read_text(encoding="utf-8")
    settings = [f"run.rounds={arguments.repeats + 1}", f"local.steps={arguments.steps}"]
    whole = parse(shipped, [*settings, *arguments.set])
    adapted = parse(shipped, [*settings, *ADAPTER, *arguments.set])
    plans = {side: whole if side in ("bare", "trainer") else adapted for side in SIDES}
    found = measured(plans, arguments.device, arguments.repeats)
    rate = {side: each.tokens_per_second for side, each in found.items()}
    device = device_for(arguments.device)
    title = device_title(device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in title), None)
    mfu = found["bare"].flops_per_token * rate["trainer"] / peak if peak and device.type == "cuda" else None
    result: dict[str, object] = {
        "ratio": rate["trainer"] / rate["bare"],
        "private_ratio": rate["private"] / rate["adapter"],
        "reference_ratio": rate["reference"] / rate["adapter"],
        "mesh": [1, 1, 1, 1],
        "device": title,
        "mfu": mfu,
        **{f"{side}_tokens_per_second": each for side, each in rate.items()},
        **{f"{side}_peak_bytes": each.peak_bytes for side, each in found.items()},
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:,.3g}" if isinstance(value, float) else f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
