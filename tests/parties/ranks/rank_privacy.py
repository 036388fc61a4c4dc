"""What ranks do in tests of privacy on a mesh: private rounds of a tiny model, whose noised sums are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.model.model import load_model
from cloister.lm.model.passes import Forward
from cloister.lm.model.schedule import Schedule
from cloister.lm.model.weights import Held, Named
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.tests.parties.ranks.rank_rounds import CPU, Job, short_blocks, some, start_of, tiny
from cloister.tests.tools.mutants import Mutant

Z = 0.8
"""The noise multiplier."""
CLIP = 0.05
SIZES = (1, 3, 1, 2, 1, 4)
"""Windows of each unit."""


def private(kind: str, *overrides: str) -> Plan:
    """The tiny plan with unit record."""
    settings = ["unit=record", "sampling_rate=0.6", f"clip={CLIP}", f"noise_multiplier={Z}", "delta=1e-5"]
    settings = [f"privacy.{setting}" for setting in settings]
    plain = [
        "aggregation.secure=false",
        "aggregation.weighting=uniform",
        "server.evaluation=none",
    ]
    return tiny(kind, *plain, *settings, *overrides)


def in_units(sizes: Sequence[int] = SIZES, *, owners: bool = False) -> Sequences:
    """Units of so many windows each, of which those of an owner have unequal shares."""
    data, starts = some(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    shares = [np.arange(1, size + 1) / (size * (size + 1) / 2) for size in sizes]
    return replace(data, starts=starts, shares=np.concatenate(shares).astype(np.float32) if owners else None)


def teaches_nothing() -> Sequences:
    """Units that go through the model and have no gradient."""
    data = in_units()
    return replace(data, labels=np.full_like(data.labels, NOT_LEARNED))


@dataclass(frozen=True, eq=False)
class PrivateJob:
    """A private round to train."""

    job: Job
    sequences: Sequences
    noise: NoiseStream


@dataclass(frozen=True)
class PrivateRound:
    """What a rank has of a private round."""

    method: str
    update: LocalUpdate
    sums: list[list[tuple[Held, npt.NDArray[np.float32]]]]
    """What each optimizer step got, times the expected batch: for each part that the rank has, its elements."""


def train_privately(
    ranks: DeviceMesh | None, *, jobs: Sequence[PrivateJob], mutants: Sequence[Mutant] = ()
) -> list[PrivateRound]:
    """Train each job, with a model of its own, in a process of which some code is changed."""
    with short_blocks(), pytest.MonkeyPatch.context() as patch:
        for mutant in mutants:
            mutant.plant(patch)
        return [_train(ranks, each) for each in jobs]


def train_with_a_failing_unit(ranks: DeviceMesh | None, *, jobs: Sequence[PrivateJob]) -> list[PrivateRound]:
    """As `train_privately`, by a model that fails on the last row of unit 1."""
    starts = jobs[0].sequences.starts
    assert starts is not None
    bad, call = jobs[0].sequences.tokens[starts[2] - 1], Forward.__call__

    def forward(self: Forward, inputs: torch.Tensor, *more: Any) -> Any:
        if (inputs.numpy() == bad).all(-1).any():
            raise IndexError("index 290 is out of bounds")
        return call(self, inputs, *more)

    with mock.patch.object(Forward, "__call__", forward):
        return train_privately(ranks, jobs=jobs)


def _train(ranks: DeviceMesh | None, private: PrivateJob) -> PrivateRound:
    job = private.job
    plan = from_json(job.plan)
    model = load_model(plan, empty=ranks is not None)
    parallelize(model, ranks, CPU, checkpointing=job.checkpointing, sum_replicas=False)
    trainer = PrivateTrainer(plan, model, CPU, ranks)
    with _stepped() as steps:
        update = trainer.train(
            start_of(job),
            private.sequences,
            round=job.round,
            noise=private.noise,
            noise_multiplier=Z,
            carry=job.carry,
        )
    expected = np.float32(plan.local.batch_size * plan.local.accumulation)
    part = Schedule.of(plan, model.layout).of_round(job.round)
    held, trained = {each.name: each for each in trainer.weights.held}, trainer.weights.trained(part)
    sums = [[(held[name], each * expected) for name, each in _named(step, trained)] for step in steps]
    return PrivateRound(trainer.method, update, sums)


@contextmanager
def _stepped() -> Iterator[list[dict[int, npt.NDArray[np.float32]]]]:
    """The gradients of every step of AdamW, by the address of their parameters."""
    seen: list[dict[int, npt.NDArray[np.float32]]] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        seen.append({p.data_ptr(): p.grad.numpy().ravel().copy() for p in parameters if p.grad is not None})
        step(self)

    with mock.patch.object(torch.optim.AdamW, "step", spy):
        yield seen


def _named(
    step: dict[int, npt.NDArray[np.float32]], trained: Named
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for name, parameter in trained:
        if parameter.numel():
            yield name, step[parameter.data_ptr()]
