"""Held-out evaluation: sums over sequences, which give loss, perplexity, accuracy and bits per byte, and for classes or
choices a confusion matrix.

Sums add up over batches, over sites, and under a secure sum, and they avoid averaging averages.

A label is scored if it is not -100 and a token precedes it in its sequence; the first token of a sequence cannot be
predicted, and `lm/text/data.py` never labels it. `tokens` counts exactly the scored labels, and `bytes` the bytes of
the text that they stand for. A text that is classified has one label, its class.

Multiple choice (`data.choices`): a prompt x counts as answered by the choice c with the largest sum of log p over the
tokens of c and the token that ends the text, each given x and the tokens before it: log p(c | x), where c ends there.
There is no division by the length. The choices exclude each other, so the most probable one is the best guess of a
model that learned their probabilities, as training has it; a mean per token would favour long choices, whose later
tokens follow from the first ones. Of equally probable choices, the first counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward, Precision, losses_of_rows, summed_loss
from cloister.lm.model.weights import Weights
from cloister.lm.tasks.confusion import Confusion, Counts
from cloister.lm.text.data import NOT_LEARNED, Prepared, Sequences, shuffled
from cloister.protocol.plan.plan import Plan


@dataclass(frozen=True)
class HeldOut:
    """Sums over scored labels; `+` adds two of them."""

    loss_nats: float = 0.0
    """Sum of -log p(label), in nats."""
    correct: int = 0
    """Labels to which the model gave the highest probability."""
    tokens: int = 0
    """Labels scored."""
    bytes: int = 0
    """UTF-8 bytes of the learned text."""
    confusion: Counts = ()
    """The confusion matrix of texts that are classified, or of prompts with choices; otherwise empty."""

    def __add__(self, other: HeldOut) -> HeldOut:
        return HeldOut(
            self.loss_nats + other.loss_nats,
            self.correct + other.correct,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            _added(self.confusion, other.confusion),
        )

    @property
    def loss(self) -> float:
        """Nats per label; NaN where nothing was scored."""
        return self.loss_nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows a float."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Fraction of labels with the highest probability; NaN where nothing was scored."""
        return self.correct / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """loss_nats / (ln 2 x bytes), comparable between tokenizers; NaN where there are no bytes."""
        return self.loss_nats / (math.log(2) * self.bytes) if self.bytes else math.nan


def evaluate(
    module: nn.Module,
    sequences: Sequences,
    batch_size: int,
    device: torch.device,
    precision: Precision = "auto",
    weights: Weights | None = None,
) -> HeldOut:
    """Score every sequence once, in order, without gradients; restore the module's training mode afterwards.

    Args:
        module: A causal language model or a classifier, already on `device`.
        sequences: N sequences of L tokens; without sequences every sum is zero.
        batch_size: Sequences per forward pass.
        device: The device of the module.
        precision: Arithmetic of the forward pass; losses are computed in float32 and summed in float64.
        weights: The part of the model that this process has, if it is a rank of several: all call this with the same
            sequences, and each computes its rows of a batch.
    """
    targets = sequences.targets()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    config: Any = module.config
    classes = int(config.num_labels) if sequences.classified else 0
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)

    def score(_: slice, wanted: torch.Tensor, logits: torch.Tensor) -> None:
        loss.add_(summed_loss(logits, wanted))
        given = logits.argmax(-1)
        correct.add_((given == wanted).sum())
        if classes:
            cells = (wanted * classes + given)[wanted != NOT_LEARNED]
            confusion.add_(torch.bincount(cells, minlength=len(confusion)))

    _each_batch(score, Forward(module, device, precision), sequences, targets, batch_size, weights)
    if weights is not None:
        loss, correct = weights.sum(loss), weights.sum(correct)
        confusion = weights.sum(confusion)
    return HeldOut(
        loss.item(),
        int(correct.item()),
        int((targets != NOT_LEARNED).sum()),
        sequences.n_bytes,
        Confusion.of(confusion.tolist()).counts,
    )


def compare(
    module: nn.Module,
    asked: Sequences,
    choices: int,
    batch_size: int,
    device: torch.device,
    precision: Precision = "auto",
    weights: Weights | None = None,
) -> HeldOut:
    """For each prompt the most probable choice, as a confusion matrix alone; otherwise as `evaluate`.

    Args:
        module: A causal language model, already on `device`.
        asked: R prompts, each with each choice, in R C sequences of L tokens, with `answers`.
        choices: Number C of choices.
        batch_size: As in `evaluate`.
        device: As in `evaluate`.
        precision: As in `evaluate`.
        weights: As in `evaluate`.
    """
    assert asked.answers is not None
    targets = asked.targets()
    nats = torch.zeros(len(targets), dtype=torch.float64, device=device)

    def score(rows: slice, wanted: torch.Tensor, logits: torch.Tensor) -> None:
        nats[rows] += losses_of_rows(logits, wanted)

    _each_batch(score, Forward(module, device, precision), asked, targets, batch_size, weights, trim=True)
    if weights is not None:
        nats = weights.sum(nats)  # of each row, one part of the mesh has the sum and the others have 0
    given = nats.cpu().numpy().reshape(-1, choices).argmin(1)
    cells = np.bincount(asked.answers.astype(np.int64) * choices + given, minlength=choices * choices)
    return HeldOut(confusion=Confusion.of(cells.tolist()).counts)


def held_out(
    plan: Plan, model: LanguageModel, device: torch.device, prepared: Prepared, weights: Weights | None = None
) -> HeldOut:
    """A model's sums on held-out sequences, or on the subset of `server.evaluation_sequences`, which also bounds the
    prompts of which choices are compared.

    Args:
        plan: The plan.
        model: The model, with its weights.
        device: Its device.
        prepared: The sequences.
        weights: As for `evaluate`.
    """
    local, most, seed = plan.local, plan.server.evaluation_sequences, plan.run.seed
    chosen = subset(prepared.held_out, most, seed)
    found = evaluate(model.module, chosen, local.batch_size, device, local.precision, weights)
    if prepared.asked is None:
        return found
    asked, choices = subset(prepared.asked, most, seed), len(plan.data.choices)
    return found + compare(model.module, asked, choices, local.batch_size, device, local.precision, weights)


def _each_batch(
    score: Callable[[slice, torch.Tensor, torch.Tensor], None],
    forward: Forward,
    sequences: Sequences,
    targets: npt.NDArray[np.int64],
    batch_size: int,
    weights: Weights | None,
    *,
    trim: bool = False,
) -> None:
    """Call `score` for each batch with this process's rows of it, their targets (B, L) and their logits (B, L, V),
    without gradients; restore the module's training mode afterwards.

    Args:
        score: Called in the order of the batches.
        forward: The forward pass of the module.
        sequences: N sequences of L tokens.
        targets: Their targets.
        batch_size: Sequences per forward pass.
        weights: The part of the model that this process has.
        trim: Cut each batch behind its last target, which changes no score where tokens attend to earlier ones only.
    """
    module, device = forward.module, forward.device
    part = slice(0, batch_size) if weights is None else weights.rows(batch_size)
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), seeded("evaluate", device=device):  # some types draw in evaluations too
            for begin in range(0, len(targets), batch_size):
                scored = (targets[begin : begin + batch_size] != NOT_LEARNED).any(0)
                width = int(np.flatnonzero(scored)[-1]) + 1 if trim else None
                rows = slice(begin + part.start, begin + part.stop)
                wanted = to_device(targets[rows, :width], device)  # (B, L)
                if not len(wanted):  # a rank without rows takes part with one that is not scored
                    rows = slice(0, 1)
                    wanted = torch.full((1, wanted.shape[1]), NOT_LEARNED, device=device)
                tokens, places = sequences.tokens[rows, :width], sequences.positions
                positions = None if places is None else to_device(places[rows, :width], device)
                score(rows, wanted, forward(to_device(tokens, device), positions))
    finally:
        module.train(training)


def _added(one: Counts, other: Counts) -> Counts:
    if not (one and other):
        return one or other
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(one, other, strict=True))


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
