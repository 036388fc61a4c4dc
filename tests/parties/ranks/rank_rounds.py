"""What ranks do in tests: rounds of a tiny model, on the mesh that they are given or in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.weights import Weights
from cloister.lm.parallel import shards
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.parallel.shards import Shards
from cloister.lm.tasks.choices import Choices
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.evaluate import Evaluator, held_out
from cloister.lm.training.moments import Carry
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages import blocks
from cloister.protocol.plan.plan import DataSection, Plan
from cloister.protocol.plan.soundness import from_json, parse
from cloister.tests.parties.evaluated import evaluate

CPU = torch.device("cpu")
SITE = (7, 1)
BLOCK = 256
"""Blocks so short that every rank has a span of a tiny model."""
UNUSED = 200
"""A token that no sequence of `some` has."""


def tiny(kind: str, *overrides: str) -> Plan:
    """Two steps of AdamW on a model of two blocks, some of whose parameters no number of ranks divides."""
    config: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    if kind == "t5":
        config |= {"d_ff": 70, "d_kv": 8}
        config.pop("max_position_embeddings")
    elif kind == "gpt2":
        config |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    elif kind == "bert":
        config |= {"intermediate_size": 70}
    else:
        config |= {"num_key_value_heads": 2, "intermediate_size": 70}
    config |= {"head_dim": 8} if kind == "qwen3" else {}
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    local = ["local.steps=2", "local.batch_size=4", "run.rounds=3", "data.sequence_length=16", "run.seed=0"]
    # With so short a gradient, AdamW's epsilon dominates: the update depends on the norm, and rounding is not amplified
    # where a gradient is near zero.
    return parse("", [f"model.name=builtin:{kind}", *settings, *local, "local.clip_norm=1e-6", *overrides])


def some(n: int = 20) -> Sequences:
    """Random tokens below 64; sequences differ much in how many of them are learned."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (n, 16)).astype(np.int32)
    labels = np.where(random.random((n, 16)) < random.random((n, 1)) * 0.9, NOT_LEARNED, tokens).astype(
        np.int32
    )
    labels[:, 0] = NOT_LEARNED
    return Sequences(tokens, labels, None, n_bytes=1)


def classified(n: int = 20) -> Sequences:
    """The same tokens, each sequence with one of three classes."""
    return Sequences(some(n).tokens, np.arange(n, dtype=np.int32)[:, None] % 3, None, n_bytes=0)


def with_targets(n: int = 20) -> Sequences:
    """The same tokens, each sequence with a target of one to eight tokens."""
    tokens = some(n).tokens
    ends = 1 + np.arange(n)[:, None] % 8
    return Sequences(tokens, np.where(np.arange(8) < ends, tokens[:, 8:], NOT_LEARNED), None, n_bytes=0)


def preferred(n: int = 20) -> Sequences:
    """Pairs of the same sequences, each with the next one."""
    own = some(n)
    tokens, labels = (np.hstack([each, np.roll(each, 1, 0)]) for each in (own.tokens, own.labels))
    return Sequences(tokens, labels, None, n_bytes=0)


def tagged(n: int = 20) -> Sequences:
    """The same tokens, some of them words with one of three tags."""
    data = some(n)
    return replace(data, labels=np.where(data.labels == NOT_LEARNED, data.labels, data.labels % 3), n_bytes=0)


def of_task(task: str, n: int = 20) -> Sequences:
    """Sequences of a task."""
    made = {
        "classify": classified,
        "token-classify": tagged,
        "sequence-to-sequence": with_targets,
        "prefer": preferred,
    }
    return made.get(task, some)(n)


def packed(n: int = 20) -> Sequences:
    """The same tokens as two records in each sequence, which begin where the positions do."""
    begins = np.random.default_rng(1).integers(1, 16, (n, 1))
    places = np.arange(16)
    positions = np.where(places < begins, places, places - begins).astype(np.int32)
    return replace(some(n), positions=positions)


@dataclass(frozen=True)
class Job:
    """A round to train."""

    plan: str
    """The plan as JSON."""
    start: Path
    """The global model, a file that every rank maps."""
    round: int = 1
    carry: Carry | None = None
    """What the round begins with, and where it writes what it leaves."""
    checkpointing: bool = False
    compile: bool = False
    packed: bool = False
    """Whether several records are in a sequence."""


def model_of(ranks: DeviceMesh | None, job: Job) -> LanguageModel:
    """The model of a job, on the mesh."""
    model = load_model(from_json(job.plan), empty=ranks is not None)
    if ranks is not None:
        parallelize(model, ranks, CPU, checkpointing=job.checkpointing, compile=job.compile)
    return model


def start_of(job: Job) -> Vector:
    """The job's global model, read-only."""
    start: Vector = np.load(job.start, mmap_mode="r")
    return start


def several(ranks: DeviceMesh, *, works: Sequence[Callable[[DeviceMesh], Any]]) -> list[Any]:
    """The results of several works; ranks that do more are started less often."""
    return [work(ranks) for work in works]


def train(ranks: DeviceMesh | None, *, jobs: Sequence[Job]) -> list[LocalUpdate]:
    """Train each job, with a model of its own."""
    updates = []
    with short_blocks():
        for job in jobs:
            model = model_of(ranks, job)
            trainer = Trainer(from_json(job.plan), model, CPU, ranks)
            sequences = packed() if job.packed else of_task(json.loads(job.plan)["data"]["task"])
            updates.append(
                trainer.train(start_of(job), sequences, round=job.round, site_seed=SITE, carry=job.carry)
            )
    return updates


@contextmanager
def short_blocks() -> Iterator[None]:
    """Cut spans at short blocks, and send few gradients together."""
    with mock.patch.object(blocks, "BLOCK", BLOCK), mock.patch.object(shards, "BUCKET", 3 * BLOCK):
        yield


def change(ranks: DeviceMesh, *, job: Job, end: Path) -> tuple[int, Vector]:
    """Offset and elements of this rank's span of the update between two models."""
    with short_blocks():
        model = model_of(ranks, job)
        weights, layout = Shards(model, ranks), model.layout
        weights.place(np.load(end, mmap_mode="r"))
        return weights.span(layout).start, weights.update(start_of(job), layout)


@dataclass(frozen=True)
class Held:
    """What a rank has of a model."""

    elements: int
    """Elements of its parameters."""
    names: list[str]
    """Names of all parameters."""
    buffers: dict[str, Any]
    """Buffers, as NumPy arrays."""
    draws: tuple[str, ...]
    """What its random draws depend on."""
    first: int
    """Elements of what it is the first rank to have."""


def held(ranks: DeviceMesh | None, *, job: Job) -> Held:
    """What this rank has of a model."""
    model = model_of(ranks, job)
    local = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in model.module.parameters()
    ]
    weights = Weights(model) if ranks is None else Shards(model, ranks)
    return Held(
        sum(each.numel() for each in local),
        [name for name, _ in model.module.named_parameters()],
        {name: buffer.numpy() for name, buffer in model.module.named_buffers()},
        weights.draws,
        sum(each.size for each in weights.held if each.first),
    )


def score(ranks: DeviceMesh | None, *, job: Job) -> HeldOut:
    """The sums of an evaluation of the job's global model, the last batch of which has fewer rows; and which of three
    choices it gives to five prompts."""
    model = model_of(ranks, job)
    weights = Weights(model) if ranks is None else Shards(model, ranks)
    weights.place(start_of(job))
    found = evaluate(model.module, packed(7) if job.packed else some(7), 4, CPU, weights=weights)
    asked = replace(some(15), answers=np.arange(5, dtype=np.int32) % 3)
    task = Choices(DataSection(task="choices", format="prompt", choices=("a", "b", "c")))
    return found + task.answers(Evaluator(task, model.module, 4, CPU, weights=weights), asked)


def generated(ranks: DeviceMesh | None, *, job: Job) -> HeldOut:
    """The sums of an evaluation of the job's task on seven sequences, and of what the model answers to them."""
    plan, model = from_json(job.plan), model_of(ranks, job)
    weights = Weights(model) if ranks is None else Shards(model, ranks)
    weights.place(start_of(job))
    asked, nothing = with_targets(7), with_targets(0)
    return held_out(plan, model, CPU, Prepared(nothing, asked, 7, {}, asked=asked), weights)


def train_after_a_forward_pass(ranks: DeviceMesh, *, job: Job) -> LocalUpdate:
    """Train other weights, evaluate them, and train the job with the same trainer."""
    model, plan = model_of(ranks, job), from_json(job.plan)
    trainer = Trainer(plan, model, CPU, ranks)
    with short_blocks():
        trainer.train(start_of(job) + np.float32(0.1), some(), round=2, site_seed=(8,))
        evaluate(model.module, some(2), 2, CPU)
        return trainer.train(start_of(job), some(), round=job.round, site_seed=SITE)


def train_compiled(ranks: DeviceMesh, *, job: Job) -> tuple[LocalUpdate, int]:
    """Train a job with compiled blocks, and count their graphs; the code of these is Python, because a C++ compiler
    takes half a minute for it."""
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds, which most ranks save

    graphs = CompileCounterWithBackend("aot_eager")
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=graphs)):
        (update,) = train(ranks, jobs=[replace(job, compile=True)])
    return update, graphs.frame_count


def refused_update(ranks: DeviceMesh, *, job: Job) -> str:
    """The error of a round."""
    try:
        train(ranks, jobs=[job])
    except UpdateError as error:
        return str(error)
    return ""


def forward_passes(ranks: DeviceMesh, *, job: Job) -> int:
    """How often the first block's feed-forward layers run in a round."""
    model, count = model_of(ranks, job), [0]

    def counted(*_: object) -> None:
        count[0] += 1

    dict(model.module.named_modules())["model.layers.0.mlp"].register_forward_pre_hook(counted)
    Trainer(from_json(job.plan), model, CPU, ranks).train(start_of(job), some(), round=1, site_seed=SITE)
    return count[0]
