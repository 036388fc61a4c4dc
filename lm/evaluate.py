"""Held-out evaluation: sums over sequences, which give loss, perplexity, accuracy and bits per byte, and for classes a
confusion matrix.

Sums add up over batches, over sites, and under a secure sum, and they avoid averaging averages.

A label is scored if it is not -100 and a token precedes it in its sequence; the first token of a sequence cannot be
predicted, and `lm/data.py` never labels it. `tokens` counts exactly the scored labels, and `bytes` the bytes of the
text that they stand for. A text that is classified has one label, its class.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cloister.lm.confusion import Confusion, Counts
from cloister.lm.data import NOT_LEARNED, Sequences
from cloister.lm.passes import Forward, Precision, summed_loss
from cloister.lm.weights import Weights
from cloister.protocol.errors import DataError


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
    """Of texts that are classified, the confusion matrix; otherwise empty."""

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

    Raises:
        DataError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise DataError("batch_size", batch_size, expected="at least 1 sequence")
    targets = sequences.targets()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    config: Any = module.config
    classes = int(config.num_labels) if sequences.classified else 0
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    forward = Forward(module, device, precision)
    logits_of = forward if weights is None else weights.passes(forward, batch_size).logits
    part = slice(0, batch_size) if weights is None else weights.rows(batch_size)
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for begin in range(0, len(targets), batch_size):
                rows = slice(begin + part.start, begin + part.stop)
                wanted = to_device(targets[rows], device)  # (B, L)
                if not len(wanted):  # a rank without rows takes part with one that is not scored
                    rows = slice(0, 1)
                    wanted = torch.full((1, targets.shape[1]), NOT_LEARNED, device=device)
                positions = (
                    None if sequences.positions is None else to_device(sequences.positions[rows], device)
                )
                logits = logits_of(to_device(sequences.tokens[rows], device), positions)  # (B, L, V)
                if logits is not None:
                    loss += summed_loss(logits, wanted)
                    given = logits.argmax(-1)
                    correct += (given == wanted).sum()
                    if classes:
                        cells = (wanted * classes + given)[wanted != NOT_LEARNED]
                        confusion += torch.bincount(cells, minlength=len(confusion))
    finally:
        module.train(training)
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
        most: Most sequences, at least 1; None for all.
        seed: The plan's public seed.
    """
    if most is None or most >= len(sequences):
        return sequences
    digest = hashlib.sha256(f"cloister/evaluation/{seed}".encode()).digest()
    random = np.random.Generator(
        np.random.Philox(np.random.SeedSequence(int.from_bytes(digest[:16], "little")))
    )
    rows = np.sort(random.permutation(len(sequences))[:most])
    positions = None if sequences.positions is None else sequences.positions[rows]
    chosen = Sequences(sequences.tokens[rows], sequences.labels[rows], positions, 0)
    part = chosen.n_tokens / sequences.n_tokens if sequences.n_tokens else 0.0
    return replace(chosen, n_bytes=round(sequences.n_bytes * part))


def to_device(array: npt.NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """An int64 copy on the device: some torch operations need int64 indices, and none reads shared arrays."""
    return torch.from_numpy(array.astype(np.int64)).to(device)
