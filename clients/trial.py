"""A trial of a site's devices: its real ranks train two optimizer steps of a plan, and the second one is timed.

The model starts from arbitrary weights and learns from random tokens of the plan's shapes. So no record is read,
nothing is charged, sent or written, and what the site keeps in its state folder is not used: the figures depend on the
plan and the devices alone.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cloister.clients import part
from cloister.clients.pipe import SharedVector
from cloister.clients.places import several
from cloister.clients.rank import Place
from cloister.clients.ranks import Ranks
from cloister.clients.release import code_for
from cloister.clients.resident import Resident
from cloister.clients.work import Task, train
from cloister.lm.data import NOT_LEARNED, Prepared, Sequences
from cloister.lm.mesh import Mesh
from cloister.lm.model import configuration, load_model
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import terms_of
from cloister.protocol.balance import OwnSteps
from cloister.protocol.blocks import cut
from cloister.protocol.plan import MeshSection, Plan
from cloister.protocol.soundness import from_json

STEPS = 2
"""The first one allocates memory and compiles."""
_NO_FILE = Path(os.devnull)
"""In the place of what a site has in its state folder: nothing can be read there or kept."""


@dataclass(frozen=True)
class Measured:
    """What a rank has measured."""

    seconds: float
    """Of an optimizer step."""
    tokens: float
    """Tokens that all ranks together learned from in a step, or the number of texts that are classified."""
    peak: int
    """Largest memory in bytes: on a GPU what torch has allocated, else what the process had in memory, with its program
    and the global model, of which all ranks share one copy."""


def trial(
    plan: Plan,
    section: MeshSection,
    mesh: Mesh,
    devices: Sequence[str],
    size: int,
    log: Path,
) -> list[Measured]:
    """Train on the devices of a site, and end the ranks.

    Args:
        plan: The plan.
        section: The site's `[mesh]`.
        mesh: The mesh that it gives (`places.mesh_for`).
        devices: The device of each rank; all are here.
        size: Trained parameters of the model.
        log: File for what the ranks write.

    Returns:
        What each rank has measured, in their order.

    Raises:
        CloisterError: the site cannot train the plan.
        RankError: a rank has ended, is late or has raised another exception.
    """
    balance = {"balance": "fixed", "least_steps": None, "most_steps": None}
    local = {"steps": STEPS, "warmup_steps": 0, "optimizer_state": "reset", **balance}
    short = plan.model_copy(update={"local": plan.local.model_copy(update=local)})
    model = part.Model(short.to_json(), _NO_FILE, b"", section.checkpointing, section.compile)
    work = partial(_Trial if several(mesh, section) else _Alone, model)
    preload = [part.__name__, "transformers.modeling_utils", "transformers.modeling_layers"]
    over = plan.cohort.attempt_s() * plan.cohort.attempts
    with Ranks[part.Train, Measured](
        work, mesh, devices, threads=plan.local.threads, preload=preload, log=log
    ) as ranks:
        return ranks.call(part.Train(_task(short, size), _some_model(size)), timeout_s=over)


class _Trial:
    """A rank of several, which does what it does for a site."""

    def __init__(self, model: part.Model, place: Place) -> None:
        self._part = part.Part(model, place)
        self._device = place.device

    def __call__(self, command: part.Train) -> Measured:
        """Train as told."""
        return _measured(self._device, lambda: self._tokens(command))

    def _tokens(self, command: part.Train) -> int:
        trained = self._part(command)
        assert isinstance(trained, part.Trained)
        return trained.tokens


class _Alone:
    """The one process of a site without a mesh."""

    def __init__(self, model: part.Model, place: Place) -> None:
        plan = from_json(model.plan)
        self._model = load_model(plan)
        self._terms = terms_of(plan, self._model.layout.size)
        self._trainer = Resident().trainer(plan, self._model, place.device)
        self._device = place.device

    def __call__(self, command: part.Train) -> Measured:
        """Train as told."""
        task = command.task
        return _measured(
            self._device,
            lambda: train(self._trainer, self._terms, task, command.start.array, task.sequences()).tokens,
        )


def _measured(device: torch.device, work: Callable[[], int]) -> Measured:
    """Measure a round of `STEPS` steps, whose result is its tokens."""
    ends: list[float] = []

    def ended(*_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(ended)
    try:
        tokens = work()
    finally:
        hook.remove()
    # A step may be of several optimizers.
    seconds = ends[-1] - ends[len(ends) // STEPS - 1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return Measured(seconds, tokens / STEPS, peak)


def _task(plan: Plan, size: int) -> Task:
    """The update of a first round, whose noise is declared: nothing of it leaves."""
    terms = terms_of(plan, size)
    noise = None if terms is None else NoiseStream.from_declared_seed(0)
    clip = plan.privacy.clip if plan.privacy.unit == "site" else 0.0
    code = code_for(plan, terms, size, rounding=0, clip_norm=clip, noise=noise)
    vocabulary = configuration(plan).get_text_config().vocab_size
    return Task(1, partial(some_sequences, plan, vocabulary), None, OwnSteps(STEPS), (0,), code, noise)


def some_sequences(plan: Plan, vocabulary: int) -> Prepared:
    """As many sequences as the plan has in a step, all of the same random tokens, which take the memory of one.

    Under the units `record` and `owner` there are as many units as give the plan's batch on average, each of the most
    sequences that the plan allows.

    Args:
        plan: The plan.
        vocabulary: Tokens of the model.
    """
    length, rows, privacy = (
        plan.data.sequence_length,
        plan.local.batch_size * plan.local.accumulation,
        plan.privacy,
    )
    starts, classify = None, plan.data.task == "classify"
    if privacy.dpsgd:
        assert privacy.sampling_rate is not None, "a sound plan has a rate"
        each = (1 if privacy.record == "window" or classify else privacy.windows) * (
            privacy.records if privacy.unit == "owner" else 1
        )
        units = round(rows / privacy.sampling_rate)
        rows, starts = units * each, np.arange(units + 1) * each
    token = np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)
    label, place = token.copy(), np.arange(length, dtype=np.int32)
    if classify:
        label = label[:1] % len(plan.data.classes)
    else:
        label[0] = NOT_LEARNED
    packed = plan.data.packing and plan.data.format != "text" and starts is None
    if packed:  # two records in each sequence
        place %= -(-length // 2)
        label[place == 0] = NOT_LEARNED
    tokens, labels, places = (np.broadcast_to(one, (rows, len(one))) for one in (token, label, place))
    train = Sequences(tokens, labels, places if packed else None, 0, starts)
    return Prepared(train, Sequences(tokens[:0], labels[:0], None, 0), rows, {})


def _some_model(size: int) -> SharedVector:
    """A global model with weights of a usual size, (size,) float32; equal ones would make a step faster."""
    vector, some = SharedVector(size, np.float32), np.random.default_rng(0)
    block = some.normal(0, 0.02, 2**15).astype(np.float32)
    for begin, end, _, _ in cut(0, size):
        vector.array[begin:end] = block[: end - begin]
    return vector
