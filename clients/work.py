"""The heavy part of a site's work: train, code, mask and evaluate, in this process (`Here`) or in ranks (`team.py`).

What is here has the model. `site.py`, which combines it with keys, ledger and attempts, does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from cloister.aggregation.secure_site import SecureSite
from cloister.aggregation.span import Piece, manifest_of
from cloister.clients.attempt import Mask
from cloister.clients.dpsgd import PrivateTrainer
from cloister.clients.drift import Drift
from cloister.clients.kept import Written, write_pieces
from cloister.clients.release import Code, Finished, Protected, contribution
from cloister.lm.data import Prepared
from cloister.lm.evaluate import HeldOut, held_out
from cloister.lm.layout import Vector
from cloister.lm.model import LanguageModel
from cloister.lm.train import Trainer
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import Terms
from cloister.protocol.balance import OwnSteps
from cloister.protocol.blocks import Span, all_finite
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One update: from what it is trained, and how it leaves."""

    round: int
    """The round, from 1."""
    sequences: Callable[[], Prepared]
    """Opens the site's sequences; picklable."""
    state: Path
    """The site's state folder, for kept optimizer state."""
    own: OwnSteps
    """The optimizer steps, and what the update of so many is scaled by."""
    seed: tuple[int, ...]
    """The public seed of the site's batches in this round; not used where batches are secret."""
    code: Code
    """How the update becomes ring integers."""
    noise: NoiseStream | None
    """The secret stream of batches and noise of this update, with a privacy unit."""
    correction: Vector | None = None
    """(d,) float32: c - c_i, with `local.control_variates`."""
    part: Span | None = None
    """The span of the update that the round sums (`lm/parts.py`); None: all of it."""
    drift: Drift | None = None
    """What the site has not sent yet, with `aggregation.fragments`; otherwise None."""


class Work(Protocol):
    """Who does the heavy part of a site's work."""

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do it, to which a task is sent."""

    def update(self, task: Task, start: Vector, path: Path, trained: Callable[[Finished], None]) -> Written:
        """Train one update, and write what is summed into a file.

        Args:
            task: The update.
            start: The global model, float32, shape (layout.size,).
            path: The new file.
            trained: Receives the update as it was trained, where one process has all of it.

        Raises:
            CloisterError: the site cannot train.
        """

    def mask(
        self, site: SecureSite, pieces: list[Piece], path: Path, *, model: bytes, threads: int
    ) -> Written:
        """Mask a finished update; each element once.

        Args:
            site: The site's side of the attempt, which has the seeds.
            pieces: The update, as `update` returned it or as it was kept; it may be masked in place.
            path: The file in which it is kept.
            model: What the attempt's masks are bound to.
            threads: Threads that mask.

        Raises:
            SecureSumError: the attempt has another model, or its seeds were used.
        """

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """A model's sums on held-out records, or on the subset of `server.evaluation_sequences`.

        Args:
            plan: The plan.
            weights: The model, float32, shape (layout.size,).
            sequences: Opens the site's sequences; picklable.
        """

    def close(self) -> None:
        """End the processes that do it; idempotent."""


def train(
    trainer: Trainer | PrivateTrainer, terms: Terms | None, task: Task, start: Vector, prepared: Prepared
) -> Finished:
    """The part of one site's update that the round sums, or this rank's span of it, without what its code adds, scaled
    by its number of steps.

    Under a unit that protects the whole update, a site without records and one whose update is non-finite have none:
    NaN, which the code sends as zeros. Whether they have one depends on the data, and a failure would reveal it. The
    site then begins without drift again.

    Raises:
        CloisterError: the site cannot train.
    """
    sequences, protected = prepared.train, isinstance(task.code, Protected)
    drift = None if task.drift is None else task.drift.read(start.size)
    begin = start if drift is None else start + drift
    try:
        if isinstance(trainer, PrivateTrainer):
            assert task.noise is not None
            assert terms is not None
            local = trainer.train(
                begin,
                sequences,
                round=task.round,
                noise=task.noise,
                noise_multiplier=terms.noise_multiplier,
                state=task.state,
            )
        elif protected and not len(sequences):
            return _nothing(trainer, task)  # its code adds the noise
        else:
            local = trainer.train(
                begin,
                sequences,
                round=task.round,
                site_seed=task.seed,
                state=task.state,
                steps=task.own.steps,
                correction=task.correction,
            )
        sent = _sent(local.vector, task, drift)
    except UpdateError as error:
        if not protected:
            raise
        _log.warning("round %d: sending zeros: %s", task.round, error)
        return _nothing(trainer, task)
    if task.own.factor != 1:
        with np.errstate(over="ignore"):  # the code handles an update that is not finite
            np.multiply(sent, np.float32(task.own.factor), out=sent)
    return Finished(sent, local.tokens, local.loss)


def _sent(update: Vector, task: Task, drift: Vector | None) -> Vector:
    """The part of an update that the round sums; what is kept of the rest is written.

    Args:
        update: What was trained in the round; overwritten.
        task: The task.
        drift: That with which the round began.

    Raises:
        UpdateError: update and drift together are not finite.
    """
    if task.part is None:
        return update
    if drift is None:
        return task.part.of(update)
    assert task.drift is not None, "a drift has been read"
    with np.errstate(over="ignore"):
        update += drift
    if not all_finite(update):
        raise UpdateError("change since the fragments were sent", "non-finite", expected="finite numbers")
    sent = task.part.of(update).copy()
    task.part.of(update)[:] = 0
    task.drift.write(update)
    return sent


def _nothing(trainer: Trainer | PrivateTrainer, task: Task) -> Finished:
    span = trainer.weights.span
    if task.drift is not None:
        task.drift.write(np.zeros(span.size, np.float32))
    return Finished(np.full((task.part or span).size, np.nan, np.float32), 0, 0.0)


@dataclass(frozen=True)
class Here:
    """The model of a plan in this process, on one device."""

    model: LanguageModel
    device: torch.device
    trainer: Trainer | PrivateTrainer
    terms: Terms | None

    @property
    def elsewhere(self) -> bool:
        """False: it is done in this process."""
        return False

    def update(self, task: Task, start: Vector, path: Path, trained: Callable[[Finished], None]) -> Written:
        """As `Work.update`."""
        finished = train(self.trainer, self.terms, task, start, task.sequences())
        vector = contribution(task.code, finished)
        trained(finished)
        return write_pieces(path, [(0, vector)])

    def mask(
        self, site: SecureSite, pieces: list[Piece], path: Path, *, model: bytes, threads: int
    ) -> Written:
        """As `Work.mask`, in place."""
        return masking(model, threads)(site, pieces)

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """As `Work.held_out`."""
        self.model.layout.scatter(weights, self.model.module)
        return held_out(plan, self.model, self.device, sequences())

    def close(self) -> None:
        """As `Work.close`: there is none."""


def masking(model: bytes, threads: int = 1) -> Mask:
    """Masks the pieces of a vector in place, in this process.

    Args:
        model: What the attempt's masks are bound to.
        threads: Threads that mask.
    """

    def mask(site: SecureSite, pieces: list[Piece]) -> Written:
        for offset, vector in pieces:
            site.mask(vector, model=model, offset=offset, threads=threads)
        return Written(manifest_of(pieces), pieces)

    return mask
