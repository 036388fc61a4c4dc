"""Local training: a site's optimizer steps from the global model, and the resulting update.

A `Trainer` lives as long as its process and serves any site and round: the result of a site's round depends on the
plan, the round, the site's seed, data and kept optimizer state, and not on rounds that ran before.

One step minimises, over the learned tokens of `accumulation` micro-batches,

    (1 / tokens) sum of -log p(token)  +  mu/2 ||w - w_global||^2

where the mean is over all tokens of the step, so that 2 micro-batches of 8 are 1 of 16 whatever their padding. Of texts
that are classified, with w = `data.class_weights` or 1, the first term is

    (1 / texts) sum of w[class] (-log p(class))

and divides by the number of texts, not by the sum of their weights. So the loss of a text counts the same in whatever
micro-batch, rank or site it is: sums over parts of a step are added up, and sites count by their texts. The
second term is FedProx (Li et al. 2020, "Federated optimization in heterogeneous networks", eq. 2), added to the
gradient as mu (w - w_global). The gradient of the whole is clipped, and the plan's optimizer (`optimizer.py`) steps on
float32 weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward
from cloister.lm.model.schedule import Schedule
from cloister.lm.model.weights import Named, Weights
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import drawn_by
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, batches
from cloister.lm.training.evaluate import to_device
from cloister.lm.training.moments import Carry, Moments
from cloister.lm.training.optimizer import LocalOptimizer
from cloister.protocol.errors import DataError, ModelError, UpdateError
from cloister.protocol.messages.blocks import all_finite
from cloister.protocol.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK_TOKENS = 2**22
"""Tokens that are moved to the device at once (32 MB), so that a usual round has no transfer between its steps."""


@dataclass(frozen=True)
class LocalUpdate:
    """The result of one site's round."""

    vector: Vector
    """Local minus global, float32, of the part of the layout that the round trains. Of one process the part's whole
    vector; of a rank its span. Finite; NaN: there is no update, under unit `site`."""
    tokens: int
    """Number of labels learned from, each as often as it is used; under privacy it must not leave the site."""
    loss: float
    """Mean training loss over those labels, in nats per label times its class's weight, without the proximal term; as
    `tokens`."""


class Bench:
    """What trainers share: the plan's model on one device, or in the ranks of a mesh, reset for each round to the state
    of a new process.

    Attributes:
        dropout: Whether the model trains with dropout and other randomness of its own. Only where all randomness is
            secret and each vector is noised: masks that differ between sites, known to others or not, can make the
            vectors of all sites but one zeros, and their sum that one's vector.

    Args:
        plan: The plan.
        model: The plan's model; it is moved to `device` and belongs to the trainer afterwards, but its parameters may
            be read or overwritten between rounds.
        device: Where to train.
        ranks: The mesh that the model was divided on (`parallelize`), in each of its ranks; None for one process.
    """

    dropout = False

    def __init__(
        self, plan: Plan, model: LanguageModel, device: torch.device, ranks: DeviceMesh | None = None
    ) -> None:
        self.plan = plan
        self.model = model
        self.task = task_of(plan.data)
        """What is learned."""
        self.device = device
        self.module = model.module.to(device)
        self.forward = Forward(self.task, self.module, device, plan.local.precision)
        """The forward pass."""
        self.weights: Weights
        """Where the parameters are."""
        if ranks is None:
            self.weights = Weights(model)
        else:
            # Imported here: it takes a second, which one process saves.
            from cloister.lm.parallel.shards import Shards

            self.weights = Shards(model, ranks)

    def round(
        self,
        start: Vector,
        take_steps: Callable[[Named, LocalOptimizer], tuple[int, float]],
        *,
        round: int,
        part: Layout | None,
        carry: Carry | None,
    ) -> LocalUpdate:
        """Set the model to `start`, let `take_steps` train it, and return the change.

        Args:
            start: The global model, float32, shape (layout.size,); not modified.
            take_steps: Takes the round's steps; called with the parameters that the round trains and their
                optimizer. It returns the labels learned from and the mean loss over them.
            round: The round, from 1.
            part: As in `Trainer.train`.
            carry: As in `Trainer.train`.

        Raises:
            ModelError: the device runs out of memory.
            StorageError: the optimizer's state cannot be read or written.
            UpdateError: `start` does not have the model's layout, or the update is non-finite.
        """
        local, layout, weights = self.plan.local, self.model.layout, self.weights
        part = part or Schedule.of(self.plan, layout).of_round(round)
        torch.set_num_threads(local.threads)
        weights.place(start)
        self.module.zero_grad(set_to_none=True)
        self.module.train(self.dropout)
        trained = weights.trained(part)
        optimizer = LocalOptimizer(self.plan, self.module, trained, self.device)
        kept = None
        if carry is not None and local.optimizer_state == "keep":
            kept = Moments(carry, layout, weights, part)
            kept.load(optimizer)
        try:
            tokens, loss = take_steps(trained, optimizer)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "local.batch_size",
                local.batch_size,
                expected=f"sequences that fit in the memory of {self.device}",
                fix="lower local.batch_size and raise local.accumulation by the same factor",
            ) from error
        finally:
            self.module.zero_grad(set_to_none=True)
        with np.errstate(invalid="ignore", over="ignore"):  # a non-finite update is refused below
            update = weights.update(start, part)
        if not weights.least(all_finite(update)):
            raise _not_finite(round, "non-finite")
        if kept is not None:
            kept.store(optimizer)
        return LocalUpdate(update, tokens, loss)


class MicroBatch(NamedTuple):
    """Rows that go through the model together, int64 on the device."""

    tokens: torch.Tensor
    """(B, L)"""
    targets: torch.Tensor
    """(B, M): what is learned by the task, -100 where nothing is."""
    positions: torch.Tensor | None = None
    """(B, L): `position_ids` of packed records."""
    factors: torch.Tensor | None = None
    """(B,) float32: what the loss of each row is multiplied by; None: 1."""


class Trainer(Bench):
    """Trains any site's round of one plan on one device, or in the ranks of a mesh.

    The batch is the plan's, whatever the mesh: every rank draws all rows and computes its part of each micro-batch, and
    the loss and gradient of a step are those of one process up to rounding. There is no dropout. Every rank calls
    `train` with the same arguments, and gets its span of the update.
    """

    def train(
        self,
        start: Vector,
        sequences: Sequences,
        *,
        round: int,
        site_seed: tuple[int, ...],
        part: Layout | None = None,
        carry: Carry | None = None,
        steps: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> LocalUpdate:
        """Train from `start` and return the update.

        Args:
            start: The global model, float32, shape (layout.size,); not modified.
            sequences: The site's training sequences.
            round: The round, from 1; with `site_seed` and the plan's seed it determines batches.
            site_seed: Separates this site's random choices from those of other sites.
            part: The part of the model's layout that is trained; None: that of the round by the plan's schedule
                (`lm/model/schedule.py`).
            carry: The folders that the optimizer's moments are read from and written to, used when
                `local.optimizer_state` is `keep`; without moments they start at zero.
            steps: Optimizer steps; by default local.steps. With another number the learning rate still goes through
                that of local.steps steps: step s of n has the rate of step s local.steps / n.
            progress: Called after each step with the number of steps launched so far.

        Raises:
            DataError: there are no sequences.
            ModelError: the device runs out of memory.
            StorageError: the optimizer's state cannot be read or written.
            UpdateError: `start` does not have the model's layout, or training gave non-finite numbers.
        """
        if len(sequences) == 0:
            raise DataError(
                "sequences", 0, expected="at least one training sequence", fix="give the site more records"
            )
        nominal = self.plan.local.steps
        taken = nominal if steps is None else steps
        before = (round - 1) * nominal
        seeds = (self.plan.run.seed, round, *site_seed)

        def take_steps(trained: Named, optimizer: LocalOptimizer) -> tuple[int, float]:
            # What a model draws by itself is the same at all sites; the order of batches is the site's own.
            with seeded("train", *seeds[:2], *self.weights.draws, device=self.device):
                tokens, loss = self._steps(sequences, trained, optimizer, taken, before, seeds, progress)
            if not self.weights.least(math.isfinite(loss)):
                raise _not_finite(round, f"non-finite, with a training loss of {loss}")
            return tokens, loss

        return self.round(start, take_steps, round=round, part=part, carry=carry)

    def _steps(
        self,
        sequences: Sequences,
        trained: Named,
        optimizer: LocalOptimizer,
        steps: int,
        steps_before: int,
        seeds: tuple[int, ...],
        progress: Callable[[int], None] | None,
    ) -> tuple[int, float]:
        """Take the round's steps; return learned tokens and mean loss. No step waits for the device."""
        local = self.plan.local
        parameters = [parameter for _, parameter in trained]
        anchors = [parameter.detach().clone() for parameter in parameters] if local.proximal else []
        total_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        total_tokens = 0
        for step, (learned, micro_batches) in enumerate(self._micro_batches(sequences, steps, seeds)):
            for number, micro_batch in enumerate(micro_batches, 1):
                self.weights.before_backward(last=number == len(micro_batches))
                total_loss += self._backward(micro_batch, learned)
            self.weights.take_gradients()
            self.weights.add_replicas()
            add_proximal(parameters, anchors, local.proximal)
            if local.clip_norm:
                self.weights.clip(parameters, local.clip_norm)
            optimizer.step(steps_before + step * local.steps / steps)
            total_tokens += learned
            if progress is not None:
                progress(step + 1)
        return total_tokens, self.weights.sum(total_loss).item() / max(total_tokens, 1)

    def _backward(self, micro_batch: MicroBatch, learned: int) -> torch.Tensor:
        """Add the gradient of a micro-batch's loss, divided by the learned labels of its step, to `grad`.

        Returns:
            The summed loss, float32 ().
        """
        tokens, targets, positions, factors = micro_batch
        logits, targets = self.forward(tokens, targets, positions)
        task = self.task
        loss = task.loss(logits, targets) if factors is None else task.row_losses(logits, targets) @ factors
        (loss / max(learned, 1)).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        return loss.detach()

    def _micro_batches(
        self, sequences: Sequences, steps: int, seeds: tuple[int, ...]
    ) -> Iterator[tuple[int, list[MicroBatch]]]:
        """For each step: its learned labels, in all rows, and this process's rows of each micro-batch."""
        local, task = self.plan.local, self.task
        part = self.weights.rows(local.batch_size)
        mine = part.stop - part.start
        per_step = local.batch_size * local.accumulation
        length = sequences.tokens.shape[1]
        drawn = batches(len(sequences), per_step, seeds)
        block = max(1, BLOCK_TOKENS // (per_step * length))
        for first in range(0, steps, block):
            rows = np.concatenate([next(drawn) for _ in range(min(block, steps - first))])
            draw = drawn_by([_of_step(seeds, first + step) for step in range(len(rows) // per_step)])
            tokens, labels = task.drawn(
                sequences.tokens[rows], sequences.labels[rows], self.model.tokenizer, draw
            )
            targets = task.targets(labels)
            learned = task.learned(targets).reshape(-1, per_step).sum(axis=1)
            if mine < local.batch_size:
                # A rank without rows takes part with one of which nothing is learned.
                own = (
                    np.arange(len(rows))
                    .reshape(-1, local.batch_size)[:, part if mine else slice(1)]
                    .reshape(-1)
                )
                rows, tokens, targets = rows[own], tokens[own], targets[own]
                if not mine:
                    targets[:] = NOT_LEARNED
            columns = {"tokens": to_device(tokens, self.device), "targets": to_device(targets, self.device)}
            if sequences.positions is not None:
                columns["positions"] = to_device(sequences.positions[rows], self.device)
            factors = task.factors(targets)
            if factors is not None:
                columns["factors"] = torch.from_numpy(factors).to(self.device)
            parts = zip(*(torch.split(column, max(mine, 1)) for column in columns.values()), strict=True)
            micro_batches = (MicroBatch(**dict(zip(columns, part, strict=True))) for part in parts)
            for count in learned:
                yield int(count), list(itertools.islice(micro_batches, local.accumulation))


def _of_step(seeds: tuple[int, ...], step: int) -> np.random.Generator:
    """What a task draws in a step: the same at all sites, of which `seeds` has more than the plan's seed and the round
    (`Bench.dropout` has the reason)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((_DRAWN, *seeds[:2], step))))


_DRAWN = 0x647261776E
"""Separates what tasks draw from the order of batches."""


def add_proximal(parameters: list[nn.Parameter], anchors: list[torch.Tensor], mu: float) -> None:
    """Add FedProx's mu (w - w_global) to the gradients; do nothing without anchors."""
    with torch.no_grad():
        for parameter, anchor in zip(parameters, anchors, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor, alpha=mu)


def _not_finite(round: int, what: str) -> UpdateError:
    return UpdateError(
        f"the update of round {round}",
        what,
        expected="finite numbers",
        fix="lower local.learning_rate or local.clip_norm, or set local.precision = 'float32'",
    )
