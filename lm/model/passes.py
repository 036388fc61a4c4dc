"""How micro-batches go forward through a model, and their losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from cloister.lm.model.frozen import is_lowered
from cloister.lm.model.model import takes_positions
from cloister.lm.tasks.task import Task

Precision = Literal["auto", "float32", "bfloat16"]


class Forward:
    """The forward pass of a model by its task, the same for training and evaluation.

    Sequences are padded on the right or not at all, so the causal mask alone excludes padding from what is scored.
    `position_ids` that restart at 0 tell transformers where a packed record begins, and attention stays within it.

    Args:
        task: What is learned.
        module: The model.
        device: Its device.
        precision: The plan's precision.
    """

    def __init__(self, task: Task, module: nn.Module, device: torch.device, precision: Precision) -> None:
        self.device = device
        """The device of the module."""
        self.module = module
        self.task = task
        """What is learned."""
        by_itself = device.type == "cuda" or is_lowered(module)
        self._bfloat16 = precision == "bfloat16" or (precision == "auto" and by_itself)
        self._positions = takes_positions(module)

    def __call__(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, T, V) of rows, and what they are compared with (B, T) (`Task.outputs`)."""
        return self.task.outputs(self, tokens, targets, positions)

    def outputs(self, **inputs: Any) -> Any:
        """What the model gives for its inputs, with its logits (B, T, V)."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            return self.module(**inputs)

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The logits of that."""
        logits: torch.Tensor = self.outputs(**inputs).logits
        return logits

    def places(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The inputs of packed tokens (B, L): the tokens, and `position_ids` where the model takes them."""
        inputs = {"input_ids": tokens}
        if positions is not None and self._positions:
            inputs["position_ids"] = positions
        return inputs

    def before_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """1 up to the last token of each row (B, L) that is no padding, and 0 after it; int64 (B, L)."""
        config: Any = self.module.config
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last = (places * (tokens != config.get_text_config().pad_token_id)).argmax(1, keepdim=True)
        mask: torch.Tensor = (places <= last).long()
        return mask
