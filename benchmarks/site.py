"""Tokens per second and peak memory of a site's training on its devices, in one run: what this package adds to torch.

- `ratio`: `Trainer` (`lm/training/train.py`) in the ranks of a mesh over the plainest loop of torch that takes the
same steps on
  the same mesh: the same model, windows of text, batch, arithmetic, fused AdamW and clipping, with torch's own
  `DistributedDataParallel`, `fully_shard` and `parallelize_module`. A turn of `Trainer` is a round, with all that a
  round does.
- `private_ratio`: `PrivateTrainer` with the gradients of many windows at a time, over `Trainer`; both train an adapter
  (FFA-LoRA of rank 8, unless the plan names another), and the expected batch of the one is the batch of the other.
  `reference_ratio` is the same with the gradients of one window at a time. Each is null where it was not measured.
- `mfu`: on a GPU, the floating-point operations of forward and backward that torch counts for a token, times the
  tokens a second of `Trainer`, over the peak of all GPUs of the mesh in bfloat16; else null.

Each side has rank processes of its own, so that each has a peak of its own, that of its largest rank: on a GPU the most
that torch has allocated, else the most resident memory. The sides take turns, and medians are compared.

    python benchmarks/site.py --mesh 1,1,1 --mesh 2,1,1 --mesh 1,2,1 --mesh 1,1,2
    python benchmarks/site.py --json --params 1e9 --compile              # on a GPU: full training
    python benchmarks/site.py --json --params 1e9 --scheme ffa-lora      # on a GPU: an adapter, plain and private
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.flop_counter import FlopCounterMode

from cloister.clients.ranks.device_mesh import mesh_for
from cloister.clients.ranks.rank import Place
from cloister.clients.ranks.ranks import Ranks
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import prepare, unit_rule
from cloister.lm.model.frozen import is_lowered
from cloister.lm.model.model import LanguageModel, device_for, load_model, outline
from cloister.lm.parallel.mesh import Mesh
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.tasks.losses import summed_loss
from cloister.lm.text.corpus import corpus_records
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, next_tokens
from cloister.lm.training.train import Trainer
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import MeshSection, Plan, PrivacySection
from cloister.protocol.plan.soundness import from_json, parse

ADAPTER = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=8")
PRIVACY = {"unit": "record", "record": "window", "noise_multiplier": 0.6}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 operations a second by NVIDIA's data sheets; the first that is part of the device's name counts."""

Turn = Callable[[int], int]
"""A turn's number, from 1, to the tokens that it learned from, in all ranks together."""


@dataclass(frozen=True)
class Task:
    """What a rank of a side does."""

    side: str
    plan: str
    """The plan, as JSON."""
    compile: bool


@dataclass(frozen=True)
class Timed:
    """A rank's turn."""

    tokens: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Setting:
    """What a side trains, in one of its ranks."""

    plan: Plan
    model: LanguageModel
    sequences: Sequences
    device: torch.device
    ranks: DeviceMesh | None
    """None for one process."""
    compile: bool


# --- the plain loop ---------------------------------------------------------------------------------------------------


def bare(setting: Setting) -> Turn:
    """The plain loop."""
    local, device, sequences = setting.plan.local, setting.device, setting.sequences
    module = divided(setting.model.module.to(device).train(), setting.ranks, compile=setting.compile)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [group for group in alike(parameters) if group]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], lr=local.learning_rate, betas=local.betas, fused=True
    )
    tokens_NL = torch.from_numpy(sequences.tokens.astype("int64")).to(device)
    labels_NL = torch.from_numpy(sequences.labels.astype("int64")).to(device)
    bfloat16 = device.type == "cuda" or is_lowered(module)
    if local.precision != "auto":
        bfloat16 = local.precision == "bfloat16"
    generator = torch.Generator().manual_seed(0)
    part, parts = data_part(setting.ranks)

    def turn(_number: int) -> int:
        learned = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(local.steps):
            for number in range(local.accumulation):
                rows = torch.randint(len(tokens_NL), (local.batch_size,), generator=generator).to(device)
                learned += (labels_NL[rows, 1:] != NOT_LEARNED).sum()
                mine = rows.chunk(parts)[part]
                last = number == local.accumulation - 1
                apart = isinstance(module, DistributedDataParallel) and not last
                with module.no_sync() if apart else nullcontext():
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
                        loss = module(input_ids=tokens_NL[mine], labels=labels_NL[mine]).loss
                    (loss / local.accumulation).backward()
            clip(groups, local.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return int(learned)

    return turn


def divided(module: nn.Module, ranks: DeviceMesh | None, *, compile: bool) -> Any:
    """A model of the Llama family on a mesh, by what torch has for it."""
    get_base: Any = getattr(module, "get_base_model", lambda: module)
    blocks = list(get_base().model.layers)
    if ranks is not None and ranks["tensor"].size() > 1:
        columns = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        columns |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for block in blocks:
            parallelize_module(block, ranks["tensor"], {**columns, **rows})
    if compile:
        for block in blocks:
            block.compile()
    if ranks is None:
        return module
    if ranks["shard"].size() > 1:
        data = ranks["replicate", "shard"] if ranks["replicate"].size() > 1 else ranks["shard"]
        for part in (*blocks, module):
            fully_shard(part, mesh=data)
    elif ranks["replicate"].size() > 1:
        return DistributedDataParallel(module, process_group=ranks["replicate"].get_group())
    return module


def data_part(ranks: DeviceMesh | None) -> tuple[int, int]:
    """Which part of a batch's rows this rank has, and of how many."""
    if ranks is None:
        return 0, 1
    shards = ranks["shard"].size()
    part = ranks["replicate"].get_local_rank() * shards + ranks["shard"].get_local_rank()
    return part, ranks["replicate"].size() * shards


def alike(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that are divided on the same mesh; torch's functions on several tensors take no others together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return iter(groups.values())


def clip(groups: list[list[nn.Parameter]], norm: float) -> None:
    """Clip by the norm over all groups."""
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, norm, total)


# --- ours -------------------------------------------------------------------------------------------------------------


def plain(setting: Setting) -> Turn:
    """Rounds of `Trainer`."""
    plan, model, device, ranks = setting.plan, setting.model, setting.device, setting.ranks
    start = model.layout.flatten(model.module)
    if ranks is not None or setting.compile:
        parallelize(model, ranks, device, compile=setting.compile)
    trainer = Trainer(plan, model, device, ranks)
    return lambda number: trainer.train(start, setting.sequences, round=number, site_seed=(0,)).tokens


def private(setting: Setting) -> Turn:
    """Rounds of `PrivateTrainer`."""
    plan, model, sequences, device = setting.plan, setting.model, setting.sequences, setting.device
    start = model.layout.flatten(model.module)
    if setting.ranks is not None:
        parallelize(model, setting.ranks, device, sum_replicas=False)
    trainer = PrivateTrainer(plan, model, device, setting.ranks)
    noise = NoiseStream.from_declared_seed(0)  # the same batches in every run
    return lambda number: (
        trainer.train(start, sequences, round=number, noise=noise, noise_multiplier=0.6).tokens
    )


# --- sides ------------------------------------------------------------------------------------------------------------

SIDES = {
    "bare": bare,
    "trainer": plain,
    "adapter": plain,
    "private": private,
    "reference": private,
}
METHODS = {"private": "opacus", "reference": "reference"}


def begin(task: Task, place: Place) -> Callable[[int], Timed]:
    """A rank's work: what it does in a turn."""
    plan = from_json(task.plan)
    ranks = place.ranks if place.count > 1 else None
    model = load_model(plan)
    rule = unit_rule(plan.data, PrivacySection.model_validate(PRIVACY))
    records = corpus_records(plan.simulation.source).records
    sequences = prepare(records, model.tokenizer, plan.data, seed=0, units=rule).train
    if task.side in METHODS:
        rate = plan.local.batch_size * plan.local.accumulation / len(sequences)  # a window is a unit
        section = PRIVACY | {"sampling_rate": rate, "method": METHODS[task.side]}
        plan = plan.model_copy(update={"privacy": PrivacySection.model_validate(section)})
    turn = SIDES[task.side](Setting(plan, model, sequences, place.device, ranks, task.compile))

    def timed(number: int) -> Timed:
        started = time.perf_counter()
        tokens = turn(number)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
            peak = torch.cuda.max_memory_allocated(place.device)
        return Timed(tokens, time.perf_counter() - started, peak)

    return timed


@dataclass(frozen=True)
class Measured:
    """One side."""

    tokens_per_second: float
    peak_bytes: int


def measured(
    plans: dict[str, Plan], mesh: Mesh, devices: list[str], repeats: int, *, compile: bool
) -> dict[str, Measured]:
    """Every side, in turns; the first turn makes allocations and compiles, and does not count."""
    turns: dict[str, list[float]] = {side: [] for side in plans}
    peaks = dict.fromkeys(plans, 0)
    with ExitStack() as opened:
        sides = {
            side: opened.enter_context(
                Ranks[int, Timed](
                    partial(begin, Task(side, plan.to_json(), compile and side in ("bare", "trainer"))),
                    mesh,
                    devices,
                    threads=plan.local.threads,
                )
            )
            for side, plan in plans.items()
        }
        for number in range(1, repeats + 2):
            for side, ranks in sides.items():
                found = ranks.call(number)
                peaks[side] = max(each.peak_bytes for each in found)
                if number > 1:
                    turns[side].append(found[0].tokens / max(each.seconds for each in found))
    return {side: Measured(statistics.median(turns[side]), peaks[side]) for side in plans}


def flops_per_token(plan: Plan) -> float:
    """Floating-point operations of forward and backward for a token, counted on a model without memory."""
    module = outline(plan).module.train()
    length = plan.data.sequence_length
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, length, length, device="meta")
    labels = torch.from_numpy(next_tokens(torch.zeros(tokens.shape, dtype=torch.int32).numpy()))
    with FlopCounterMode(display=False) as counter:
        # Without a mask transformers looks at the positions, which have no values.
        loss: Any = summed_loss(module(input_ids=tokens, attention_mask=mask).logits, labels.to("meta"))
        loss.backward()
    return float(counter.get_total_flops()) / (tokens.numel() - 1)


def sized(parameters: float) -> list[str]:
    """Settings of a Llama with about so many parameters, beside its embeddings.

    A layer of width h has 3 h^2 parameters of attention, with half as many key-value heads as heads, and 12 h^2 of the
    feed-forward network of width 4 h; there are h / 128 layers.
    """
    width = (parameters * 128 / 15) ** (1 / 3)
    step, head = (256, 64) if width >= 512 else (64, 16)
    width = max(1, round(width / step)) * step
    config = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": max(1, round(width / 128)),
        "num_attention_heads": width // head,
        "num_key_value_heads": width // head // 2,
        "max_position_embeddings": 4096,
    }
    return [f"model.config.{name}={value}" for name, value in config.items()]


def device_title(device: torch.device) -> str:
    """The name of the device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "CPU"


def options() -> argparse.ArgumentParser:
    """The command line."""
    names = ",".join(field.name.upper() for field in fields(Mesh))
    parser = argparse.ArgumentParser(
        description="A site's training on its devices against a plain torch loop on the same mesh, in turns."
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each mesh")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side that count (default: 5)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a turn (default: 8)")
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cpu or a torch device such as cuda:1 (default: auto)"
    )
    parser.add_argument(
        "--mesh",
        action="append",
        metavar=names,
        help="degrees of a mesh, the last ones 1 if left out; repeatable (default: one device)",
    )
    parser.add_argument(
        "--params",
        type=float,
        metavar="N",
        help="train a fresh Llama of about N parameters, such as 1e9 (default: that of the plan not-private)",
    )
    parser.add_argument(
        "--scheme",
        default="full",
        choices=("full", "ffa-lora", "rolora", "lora"),
        help="what the plain loop and Trainer train: every parameter, or an adapter of rank 8 (default: full)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks of the plain loop and of Trainer"
    )
    parser.add_argument(
        "--private",
        action=argparse.BooleanOptionalAction,
        help="measure private training of an adapter too (default: on one device only)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change the plan not-private, such as local.batch_size=32 or local.precision=bfloat16; repeatable",
    )
    return parser


def row(arguments: argparse.Namespace, degrees: str) -> dict[str, object]:
    """The figures of one mesh."""
    shipped = files("cloister.protocol.plan.shipped").joinpath("not-private.toml").read_text(encoding="utf-8")
    settings = [
        f"run.rounds={arguments.repeats + 1}",
        f"local.steps={arguments.steps}",
        "local.warmup_steps=0",
        "local.batch_size=8",
        "local.optimizer=adamw",  # ranks that share a matrix cannot take Muon's steps
        "local.optimizer_state=reset",
    ]
    settings += sized(arguments.params) if arguments.params else []
    scheme = [] if arguments.scheme == "full" else [*ADAPTER, f"model.adapter.scheme={arguments.scheme}"]
    whole = parse(shipped, [*settings, *scheme, *arguments.set])
    named = zip((field.name for field in fields(Mesh)), map(int, degrees.split(",")), strict=False)
    section = MeshSection.model_validate(dict(named))
    mesh, devices = mesh_for(whole, section, arguments.device)
    if whole.local.batch_size % mesh.data:
        raise SystemExit(f"local.batch_size is {whole.local.batch_size}: expected a multiple of {mesh.data}")
    plans: dict[str, Plan] = {"bare": whole, "trainer": whole}
    if arguments.private or (arguments.private is None and mesh.size == 1):
        adapted = parse(shipped, [*settings, *ADAPTER, *scheme, *arguments.set])
        methods = METHODS if mesh.size == mesh.replicate else ("reference",)  # Opacus knows no divided model
        plans |= dict.fromkeys(("adapter", *methods), adapted)
    found = measured(plans, mesh, devices, arguments.repeats, compile=arguments.compile)
    rate = {side: each.tokens_per_second for side, each in found.items()}
    title = device_title(device_for(devices[0]))
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in title), math.inf) * mesh.size
    mfu = flops_per_token(whole) * rate["trainer"] / peak if devices[0] != "cpu" else 0
    return {
        "ratio": rate["trainer"] / rate["bare"],
        **{
            f"{side}_ratio": rate[side] / rate["adapter"] if side in rate else None
            for side in ("private", "reference")
        },
        "mesh": [getattr(mesh, field.name) for field in fields(mesh)],
        "device": title,
        "mfu": mfu or None,
        **{f"{side}_tokens_per_second": each for side, each in rate.items()},
        **{f"{side}_peak_bytes": each.peak_bytes for side, each in found.items()},
    }


def main() -> int:
    arguments = options().parse_args()
    for degrees in arguments.mesh or ["1"]:
        result = row(arguments, degrees)
        if arguments.json:
            print(json.dumps(result), flush=True)
            continue
        for name, value in result.items():
            print(f"{name:28} {value:,.3g}" if isinstance(value, float) else f"{name:28} {value}")
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
