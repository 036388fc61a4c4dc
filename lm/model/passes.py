"""How micro-batches go forward through a model, and their losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from cloister.lm.model.frozen import is_lowered
from cloister.lm.model.model import is_classifier, takes_positions
from cloister.lm.text.data import NOT_LEARNED

Precision = Literal["auto", "float32", "bfloat16"]


class Forward:
    """The forward pass of a causal language model or a classifier, the same for training and evaluation.

    Sequences are padded on the right or not at all, so the causal mask alone excludes padding from what is scored.
    `position_ids` that restart at 0 tell transformers where a packed record begins, and attention stays within it.
    A classifier may attend in both directions, so it is told where the padding begins.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: Precision) -> None:
        self.device = device
        """The device of the module."""
        self.module = module
        by_itself = device.type == "cuda" or is_lowered(module)
        self._bfloat16 = precision == "bfloat16" or (precision == "auto" and by_itself)
        self._positions = takes_positions(module)
        self._classifies = is_classifier(module)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Logits (B, L, V) of tokens (B, L), with position_ids (B, L) for packed records; of a classifier (B, 1, C)."""
        given = {"input_ids": tokens}
        if positions is not None and self._positions:
            given["position_ids"] = positions
        if self._classifies:
            given["attention_mask"] = self._before_padding(tokens)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            logits: torch.Tensor = self.module(**given).logits
        return logits[:, None] if self._classifies else logits

    def _before_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """1 up to the last token of each row (B, L) that is no padding, and 0 after it; int64 (B, L)."""
        config: Any = self.module.config
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last = (places * (tokens != config.get_text_config().pad_token_id)).argmax(1, keepdim=True)
        mask: torch.Tensor = (places <= last).long()
        return mask


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
