"""The heavy part of a site's work: train, code, mask and evaluate, in this process (`Here`) or in ranks (`team.py`).

What is here has the model. `site.py`, which combines it with keys, ledger and attempts, does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch

from cloister.aggregation.features.feature import Code
from cloister.aggregation.features.question import UnitCode
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.vector.span import Piece, manifest_of
from cloister.clients.state.attempt import Mask
from cloister.clients.state.kept import Written, write_pieces
from cloister.clients.training.dpsgd import OUT_OF_MEMORY, PrivateTrainer
from cloister.clients.training.release import MUST_STAY, contribution
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.weights import Weights
from cloister.lm.questions.evaluate import evaluate
from cloister.lm.questions.question import Held
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.records import Record, Unusable
from cloister.lm.training.evaluate import held_out
from cloister.lm.training.moments import Carry
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import CloisterError, UpdateError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.within import question_within

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One update: from what it is trained, and how it leaves."""

    round: int
    """The round, from 1."""
    part: Layout
    """The part of the model's layout that the round trains."""
    sequences: Callable[[], Prepared]
    """Opens the site's sequences; picklable."""
    records: Callable[[Unusable], Iterator[Record]]
    """Reads the site's records one by one; picklable."""
    carry: Carry | None
    """What the update begins with, and where what it leaves is written; None where the plan carries nothing."""
    steps: int
    """The optimizer steps, without DP-SGD."""
    factor: float
    """What the trained update is scaled by."""
    seed: tuple[int, ...]
    """The public seed of the site's batches in this round; not used where batches are secret."""
    code: Code
    """How the update becomes ring integers."""
    noise: NoiseStream | None
    """The secret stream of batches and noise of this update, with a privacy unit."""


class Work(Protocol):
    """Who does the heavy part of a site's work."""

    elsewhere: ClassVar[bool]
    """Whether other processes do it, to which a task is sent."""

    def update(self, task: Task, start: Vector, path: Path) -> Written:
        """Train one update, and write what is summed into a file.

        Args:
            task: The update.
            start: The global model, float32, shape (layout.size,).
            path: The new file.

        Raises:
            CloisterError: the site cannot train.
        """

    def masking(self, path: Path, size: int, instructions: bytes, threads: int) -> Mask:
        """What masks a finished update, each element once: the pieces as `update` returned them or as they were kept,
        which may be masked in place.

        It raises a `SecureSumError` where the attempt has other instructions, or its seeds were used.

        Args:
            path: The file in which the update is kept.
            size: Elements of it without what follows the coded update.
            instructions: Digest of those that the update was made by, to which the masks are bound.
            threads: Threads that mask.
        """

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """A model's sums on held-out records, or on the subset of `server.evaluation_sequences`.

        Args:
            plan: The plan.
            weights: The model, float32, shape (layout.size,).
            sequences: Opens the site's sequences; picklable.
        """

    def measured(
        self, code: UnitCode, weights: Vector, sequences: Callable[[], Prepared], path: Path
    ) -> Written:
        """Write the noised sum of what a model does on each held-out unit into a file.

        Args:
            code: How the units' vectors are coded.
            weights: As for `held_out`.
            sequences: As for `held_out`.
            path: The new file.
        """

    def close(self) -> None:
        """End the processes that do it; idempotent."""


def train(
    trainer: Trainer | PrivateTrainer, terms: Terms | None, task: Task, start: Vector, prepared: Prepared
) -> LocalUpdate:
    """One site's update, or this rank's span of it, without what its code adds, scaled by its factor.

    Under a unit that protects the whole update, a site without records and one whose update is non-finite have none:
    NaN, which the code sends as zeros. Whether they have one depends on the data, and a failure would reveal it.

    Raises:
        CloisterError: the site cannot train.
    """
    sequences, protected = prepared.train, task.code.protects
    try:
        if isinstance(trainer, PrivateTrainer):
            assert task.noise is not None
            assert terms is not None
            local = trainer.train(
                start,
                sequences,
                round=task.round,
                noise=task.noise,
                noise_multiplier=terms.noise_multiplier,
                part=task.part,
                carry=task.carry,
            )
        elif protected and not len(sequences):
            return _nothing(trainer, task.part)  # its code adds the noise
        else:
            local = trainer.train(
                start,
                sequences,
                round=task.round,
                site_seed=task.seed,
                part=task.part,
                carry=task.carry,
                steps=task.steps,
            )
    except Exception as error:  # models raise any type on a record, and each would reveal that it is there
        ours = isinstance(error, (CloisterError, *OUT_OF_MEMORY))
        hidden = isinstance(error, UpdateError) if ours else type(trainer.weights) is Weights
        if not (protected and hidden):
            raise
        _log.warning("round %d: sending zeros, which %s: %s", task.round, MUST_STAY, error)
        return _nothing(trainer, task.part)
    if task.factor != 1:
        with np.errstate(over="ignore"):  # the code handles an update that is not finite
            np.multiply(local.vector, np.float32(task.factor), out=local.vector)
    return local


def _nothing(trainer: Trainer | PrivateTrainer, part: Layout) -> LocalUpdate:
    return LocalUpdate(np.full(trainer.weights.span(part).size, np.nan, np.float32), 0, 0.0)


@dataclass(frozen=True)
class Here:
    """The model of a plan in this process, on one device."""

    model: LanguageModel
    device: torch.device
    trainer: Trainer | PrivateTrainer
    terms: Terms | None

    elsewhere: ClassVar = False

    def update(self, task: Task, start: Vector, path: Path) -> Written:
        """As `Work.update`."""
        finished = train(self.trainer, self.terms, task, start, task.sequences())
        return write_pieces(path, [(0, contribution(task.code, finished))])

    def masking(self, path: Path, size: int, instructions: bytes, threads: int) -> Mask:
        """As `Work.masking`, in place."""
        return masking(instructions, threads)

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """As `Work.held_out`."""
        self.trainer.weights.place(weights)
        return held_out(plan, self.model, self.device, sequences())

    def measured(
        self, code: UnitCode, weights: Vector, sequences: Callable[[], Prepared], path: Path
    ) -> Written:
        """As `Work.measured`."""
        self.trainer.weights.place(weights)
        module, asked = self.model.module, question_within(self.trainer.plan)
        held, training = Held(_no_records, sequences, self.device), module.training
        try:
            return write_pieces(path, [(0, code.answer(evaluate(asked, held, (self.model,))))])
        finally:
            module.train(training)

    def close(self) -> None:
        """As `Work.close`: there is none."""


def _no_records(_: Unusable) -> Iterator[Record]:
    raise AssertionError("an evaluation reads sequences")


def masking(instructions: bytes, threads: int = 1) -> Mask:
    """Masks the pieces of a vector in place, in this process.

    Args:
        instructions: As in `Work.masking`.
        threads: Threads that mask.
    """

    def mask(site: SecureSite, pieces: list[Piece]) -> Written:
        site.mask(pieces, instructions=instructions, threads=threads)
        return Written(manifest_of(pieces), pieces)

    return mask
