"""The part of a site's work that one rank does: train, release, mask and evaluate, for its span of the vector.

A rank has no key, ledger or attempt of the site. It gets what it needs with a command: the stream of noise of one
update, or the seeds of one attempt's masks. It writes its span of the update into the file that the site's process has
made, and gives its masked span to that process in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from cloister.aggregation.features.feature import Clipped, Portion
from cloister.aggregation.secure.secure_site import Seeds
from cloister.aggregation.vector import masks
from cloister.clients.ranks.rank import Place
from cloister.clients.state.kept import read_base
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.clients.training.work import Task, train
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.model import load_model
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.tasks.task import HeldOut
from cloister.lm.training.evaluate import held_out
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.terms import terms_of
from cloister.protocol.errors import ModelError
from cloister.protocol.machine.segments import SharedVector
from cloister.protocol.messages.blocks import Span
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.soundness import from_json


@dataclass(frozen=True)
class Model:
    """What a rank builds when it starts."""

    plan: str
    """The plan, as JSON."""
    base: Path
    """File of the frozen parameters to build on."""
    base_hash: bytes
    """Their hash; empty: the plan's own are built on."""
    source: str
    """Digest of what the site's model is made from (`lm/model/origin.py`)."""
    checkpointing: bool
    """Compute activations again in the backward pass."""
    compile: bool
    """Compile the model's blocks."""


@dataclass(frozen=True)
class Train:
    """Train an update, code this rank's span of it, and write it at its place."""

    task: Task
    start: SharedVector
    """The global model, float32, the whole vector."""
    out: Path
    """The file of the whole coded vector."""


@dataclass(frozen=True)
class Trained:
    """A rank's span of a coded update, which it has written."""

    span: Span
    """Where it is in the coded vector."""
    digest: bytes
    """Its hash, for the manifest."""
    clipped: Clipped
    tokens: int
    """Tokens that all ranks together learned from."""
    loss: float
    """Mean training loss over them."""


@dataclass(frozen=True)
class Mask:
    """Mask a span of a finished update; nothing else is ever masked with these seeds at this span."""

    vector: Path
    """The file of the whole coded vector."""
    spans: tuple[Span, ...]
    """The span of each rank."""
    dtype: str
    """The ring's."""
    seeds: Seeds = field(repr=False)
    threads: int
    """Threads that mask, in each rank."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a model on held-out sequences."""

    weights: SharedVector
    """The model, float32, the whole vector."""
    sequences: Callable[[], Prepared]


@dataclass(frozen=True)
class Masked:
    """A rank's masked span."""

    vector: SharedVector
    digest: bytes
    """Its hash, for the manifest."""
    of: bytes
    """The hash of what was masked."""


Command = Train | Mask | Evaluate


class Part:
    """One rank's part of a model, and what it does with it.

    Args:
        model: What to build.
        place: This rank's place among the ranks.
    """

    def __init__(self, model: Model, place: Place) -> None:
        plan = from_json(model.plan)
        base = read_base(model.base, model.base_hash)
        loaded = load_model(plan, base, empty=plan.model.adapter.scheme == "full")
        if loaded.layout.source != model.source:
            raise ModelError("model.name", plan.model.name, expected="the model that the site has loaded")
        private = plan.privacy.dpsgd
        parallelize(
            loaded,
            place.ranks,
            place.device,
            checkpointing=model.checkpointing,
            compile=model.compile,
            sum_replicas=not private,
        )
        self._plan = plan
        self._place = place
        self._terms = terms_of(plan, loaded.layout.size)
        self._trainer = (PrivateTrainer if private else Trainer)(plan, loaded, place.device, place.ranks)
        self._model = loaded

    def __call__(self, command: Command) -> Trained | Masked | HeldOut:
        """Carry out a command that all ranks got."""
        match command:
            case Train():
                return self._train(command)
            case Mask():
                return self._mask(command)
            case Evaluate():
                return self._evaluate(command)

    def _train(self, command: Train) -> Trained:
        task = command.task
        finished = train(self._trainer, self._terms, task, command.start.array, task.sequences())
        span = self._trainer.weights.span(task.part)
        coded, clipped = task.code.release(finished.vector, finished.tokens, Portion(span.start, _gather))
        blocks = task.code.layout.blocks
        place = span if blocks is None else blocks.coded(span)
        with command.out.open("r+b") as file:
            file.seek(place.start * coded.itemsize)
            file.write(coded.data)
        return Trained(place, vector_hash(coded), clipped, finished.tokens, finished.loss)

    def _evaluate(self, command: Evaluate) -> HeldOut:
        weights = self._trainer.weights
        weights.place(command.weights.array)
        return held_out(self._plan, self._model, self._place.device, command.sequences(), weights)

    def _mask(self, command: Mask) -> Masked:
        span, dtype = command.spans[self._place.rank], np.dtype(command.dtype)
        masked = SharedVector(span.size, dtype)
        if span.size:
            masked.array[:] = np.memmap(
                command.vector, dtype, "r", offset=span.start * dtype.itemsize, shape=(span.size,)
            )
        of = vector_hash(masked.array)
        add, subtract = command.seeds.add, command.seeds.subtract
        masks.apply(masked.array, add, subtract, offset=span.start, threads=command.threads)
        return Masked(masked, vector_hash(masked.array), of)


def _gather(numbers: list[float]) -> list[float]:
    """The numbers of all ranks' spans, in their order; no bit of a number changes where zeros are added."""
    rank, counts = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.int64)
    counts[rank] = len(numbers)
    dist.all_reduce(counts)
    begin = int(counts[:rank].sum())
    found = torch.zeros(int(counts.sum()), dtype=torch.float64)
    found[begin : begin + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found)
    return found.tolist()
