"""Held-out evaluation: sums over sequences, from which the figures of a task follow.

Sums add up over batches, over sites, and under a secure sum, and they avoid averaging averages.

A label is scored if it is not -100. `tokens` counts exactly the scored labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cloister.lm.data.prepare import Prepared
from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward, Precision
from cloister.lm.model.weights import Weights
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import HeldOut, Task
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, shuffled
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import Plan

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


class Evaluator:
    """Evaluates a model without gradients; it has its training mode again afterwards.

    Args:
        task: What is learned.
        module: The model, already on `device`.
        batch_size: Sequences per forward pass.
        device: The device of the module.
        precision: Arithmetic of the forward pass; losses are computed in float32 and summed in float64.
        weights: The part of the model that this process has, if it is a rank of several: all evaluate the same
            sequences, and each computes its rows of a batch.
        tokenizer: The tokenizer of the model, for tasks that compare texts.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        batch_size: int,
        device: torch.device,
        precision: Precision = "auto",
        weights: Weights | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.task = task
        self.device = device
        """Where sums over batches are."""
        self.tokenizer = tokenizer
        """The tokenizer of the model."""
        self.forward = Forward(task, module, device, precision)
        """The forward pass."""
        self._module = module
        self._batch_size = batch_size
        self._weights = weights

    def held_out(self, sequences: Sequences) -> HeldOut:
        """Score every sequence once, in order; without sequences every sum is zero."""
        task, device = self.task, self.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        correct = torch.zeros((), dtype=torch.int64, device=device)
        names, known = task.counters(), task.known(sequences)
        counts = torch.zeros(len(names), dtype=torch.int64, device=device)

        def score(_: slice, targets: torch.Tensor, logits: torch.Tensor) -> None:
            loss.add_(task.loss(logits, targets))
            correct.add_((logits.argmax(-1) == targets).sum())
            if (counted := task.count(logits, targets)) is None:
                return
            if counted.shape != counts.shape or counted.is_floating_point():
                found = f"{counted.dtype} of shape {tuple(counted.shape)}"
                expected = f"{len(names)} whole numbers, of which `counters` has the names, from `count`"
                raise DataError("data.task", found, expected=expected)
            counts.add_(counted)

        self.each_batch(score, sequences)
        loss, correct, counts = self.sum(loss), self.sum(correct), self.sum(counts)
        scored = int(task.learned(task.targets(sequences.labels[:])).sum())
        found = dict(zip(names, counts.tolist(), strict=True))
        return HeldOut(loss.item(), int(correct.item()), scored, {**found, **known})

    def each_batch(
        self,
        score: Callable[[slice, torch.Tensor, torch.Tensor], None],
        sequences: Sequences,
        *,
        trim: bool = False,
    ) -> None:
        """Call `score` for each batch with this process's rows of it, and their targets (B, T) and logits (B, T, V).

        Args:
            score: Called in the order of the batches.
            sequences: N sequences of L tokens.
            trim: Cut each batch behind its last target; no score changes where tokens attend to earlier ones only.
        """

        def passed(
            rows: slice, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
        ) -> None:
            logits, wanted = self.forward(tokens, targets, positions)
            score(rows, wanted, logits)

        self.each_rows(passed, sequences, trim=trim)

    def each_rows(
        self,
        score: Callable[[slice, torch.Tensor, torch.Tensor, torch.Tensor | None], None],
        sequences: Sequences,
        *,
        trim: bool = False,
    ) -> None:
        """As `each_batch`, without the pass: call `score` with rows, tokens (B, L), targets and positions (B, L)."""
        device, module = self.device, self._module
        targets = self.task.targets(sequences.labels)
        part = slice(0, self._batch_size) if self._weights is None else self._weights.rows(self._batch_size)
        training = module.training
        module.eval()
        try:
            with torch.no_grad(), seeded("evaluate", device=device):  # some types draw in evaluations too
                for begin in range(0, len(targets), self._batch_size):
                    scored = (targets[begin : begin + self._batch_size] != NOT_LEARNED).any(0)
                    width = int(np.flatnonzero(scored)[-1]) + 1 if trim else None
                    rows = slice(begin + part.start, begin + part.stop)
                    wanted = to_device(targets[rows, :width], device)  # (B, M)
                    if not len(wanted):  # a rank without rows takes part with one that is not scored
                        rows = slice(0, 1)
                        wanted = torch.full((1, wanted.shape[1]), NOT_LEARNED, device=device)
                    tokens, places = sequences.tokens[rows, :width], sequences.positions
                    positions = None if places is None else to_device(places[rows, :width], device)
                    score(rows, to_device(tokens, device), wanted, positions)
        finally:
            module.train(training)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this process, added up over all ranks."""
        return values if self._weights is None else self._weights.sum(values)


def held_out(
    plan: Plan, model: LanguageModel, device: torch.device, prepared: Prepared, weights: Weights | None = None
) -> HeldOut:
    """A model's sums on held-out sequences, or on the subset of `server.evaluation_sequences`, which also bounds what
    the task asks beside their labels.

    Args:
        plan: The plan.
        model: The model, with its weights.
        device: Its device.
        prepared: The sequences.
        weights: As for `Evaluator`.
    """
    local, most, seed = plan.local, plan.server.evaluation_sequences, plan.run.seed
    task = task_of(plan.data)
    evaluator = Evaluator(
        task, model.module, local.batch_size, device, local.precision, weights, model.tokenizer
    )
    found = evaluator.held_out(subset(prepared.held_out, most, seed))
    if prepared.asked is None:
        return found
    return found + task.answers(evaluator, subset(prepared.asked, most, seed))


def subset(sequences: Sequences, most: int | None, seed: int) -> Sequences:
    """At most `most` of the sequences, in their order, to evaluate on.

    The choice depends on `seed` and the number of sequences alone, so it is the same in every round; a larger `most`
    adds to a smaller one. Bytes are known of all sequences together only: the subset has the part of them that it has
    of the scored labels, which is exact if every token stands for the same number of bytes.

    Args:
        sequences: N sequences of L tokens.
        most: Most sequences, or with choices most prompts, at least 1; None for all.
        seed: The plan's public seed.
    """
    answers = sequences.answers
    count = len(sequences if answers is None else answers)
    if most is None or most >= count:
        return sequences
    digest = hashlib.sha256(f"cloister/evaluation/{seed}".encode()).digest()
    rows = np.sort(shuffled((int.from_bytes(digest[:16], "little"),), count)[:most])
    if answers is not None:
        answers, choices = answers[rows], len(sequences) // count
        rows = (rows[:, None] * choices + np.arange(choices)).reshape(-1)
    positions = None if sequences.positions is None else sequences.positions[rows]
    chosen = Sequences(sequences.tokens[rows], sequences.labels[rows], positions, 0, answers=answers)
    part = chosen.n_tokens / sequences.n_tokens if sequences.n_tokens else 0.0
    return replace(chosen, n_bytes=round(sequences.n_bytes * part))


def to_device(array: npt.NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """An int64 copy on the device: some torch operations need int64 indices, and none reads shared arrays."""
    return torch.from_numpy(array.astype(np.int64)).to(device)
