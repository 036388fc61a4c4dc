"""How micro-batches go through a model: forward, and in training backward.

`Direct` is for a process whose model has all of its blocks; `pipeline.py` is for a stage, which has some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from cloister.lm.model.frozen import is_lowered
from cloister.lm.model.model import is_classifier, takes_positions
from cloister.lm.text.data import NOT_LEARNED

Precision = Literal["auto", "float32", "bfloat16"]


class MicroBatch(NamedTuple):
    """Rows that go through the model together, int64 on the device."""

    tokens: torch.Tensor
    """(B, L)"""
    targets: torch.Tensor
    """(B, L): the next token of each position; -100 where nothing is learned. Of a classifier (B, 1): the classes."""
    positions: torch.Tensor | None = None
    """(B, L): `position_ids` of packed records."""
    factors: torch.Tensor | None = None
    """(B,) float32: what the loss of each row is multiplied by; None: 1."""


class Passes(Protocol):
    """The passes of a model of which this process has a part; all that share its rows call the same methods."""

    def backward(self, micro_batches: Sequence[MicroBatch], learned: int) -> list[torch.Tensor]:
        """Add the gradient of a step's loss, that of its micro-batches summed and divided by `learned`, to `grad`.

        Args:
            micro_batches: This process's rows of the step, in micro-batches of equal shape.
            learned: Labels that all processes learn from in the step.

        Returns:
            The losses with their factors, each summed over some of the rows, float32 (); none in a process that does
            not compute them.
        """

    def weighted(
        self, tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor | None:
        """Add the gradient of a weighted sum of the losses of rows to `grad`.

        Args:
            tokens: (B, L), as in `MicroBatch`.
            targets: (B, L), as in `MicroBatch`.
            weights: (B,) float32: the weight of each row's loss, which is summed over its targets.
            most: The largest B of the processes that call this together.

        Returns:
            The rows' losses (B,), float32; None in a process that does not compute them.
        """

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | None:
        """Logits (B, L, V) of tokens (B, L), of a classifier (B, 1, C), without gradients; None in a process that does
        not compute them."""


class PrepareBackward(Protocol):
    """Called before the backward pass of each micro-batch."""

    def __call__(self, *, last: bool) -> None:
        """`last`: whether it is the last one of its step."""


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

    def __call__(self, inputs: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Logits (B, L, V) of tokens (B, L), with position_ids (B, L) for packed records; of a classifier (B, 1, C).

        A stage that is not the first takes activations (B, L, H) instead of tokens; one that is not the last returns
        activations (B, L, H).
        """
        given: dict[str, Any] = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
        if positions is not None and self._positions:
            given["position_ids"] = positions
        if self._classifies:
            given["attention_mask"] = self._before_padding(inputs)
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


class Direct:
    """`Passes` through a model that has all of its blocks.

    Args:
        forward: Its forward pass.
        prepare: Called before each backward pass.
    """

    def __init__(self, forward: Forward, prepare: PrepareBackward) -> None:
        self._forward = forward
        self._prepare = prepare

    def backward(self, micro_batches: Sequence[MicroBatch], learned: int) -> list[torch.Tensor]:
        """See `Passes`; one loss for each micro-batch."""
        losses = []
        for number, (tokens, targets, positions, factors) in enumerate(micro_batches, 1):
            self._prepare(last=number == len(micro_batches))
            logits = self._forward(tokens, positions)
            loss = (
                summed_loss(logits, targets) if factors is None else losses_of_rows(logits, targets) @ factors
            )
            (loss / max(learned, 1)).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
            losses.append(loss.detach())
        return losses

    def weighted(
        self, tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor:
        """See `Passes`."""
        losses = losses_of_rows(self._forward(tokens, None), targets)
        (losses @ weights).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        return losses.detach()

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """See `Passes`."""
        return self._forward(tokens, positions)


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
