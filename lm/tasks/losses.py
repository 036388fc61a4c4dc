"""The cross-entropy of targets: the loss of every task that does not define its own."""

from __future__ import annotations

import torch
from torch.nn import functional

from cloister.lm.text.sequences import NOT_LEARNED


def losses_of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As `summed_loss`, for each row: (B,)."""
    each = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_LEARNED, reduction="none"
    )
    return each.view(targets.shape).sum(1)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Float32 cross-entropy summed over targets that are not -100: logits (B, L, V), targets (B, L) -> ()."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_LEARNED, reduction="sum"
    )
