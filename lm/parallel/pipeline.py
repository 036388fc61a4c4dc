"""One stage of a model whose decoder blocks are divided among several ranks, and the passes through all stages.

The first stage has the embedding, the last one the norm and the output layer, and each has consecutive blocks. A stage
is the model itself, in which every module of another stage is replaced by one that returns its input (`keep_stage`):
parameters keep their names, and masks and positions are those of transformers. It takes activations where the first
stage takes tokens (`inputs_embeds`), so only model types are divided whose forward pass does nothing to them but what
blocks do (`mesh.STAGED`).

Only activations and their gradients travel, in float32, which is the precision of the residual stream under autocast
too. Every rank draws all rows, so each has the positions and the last one the targets. In training, micro-batches go
forward and backward by turns (1F1B, Narayanan et al. 2021, section 2.2), so that a stage keeps what backward passes
need of at most as many of them as there are stages. With m micro-batches and p stages, a stage is idle for
(p - 1) / (m + p - 1) of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cloister.lm.model.passes import Forward, MicroBatch, PrepareBackward, summed_loss
from cloister.lm.text.data import NOT_LEARNED

FOR_EACH_STAGE = 4
"""Micro-batches of a step for each stage, where there are rows for so many: a stage is idle for less than 1/5."""


class Elsewhere(nn.Module):
    """In the place of a module that another stage has: returns its first argument."""

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """(B, L, H) -> (B, L, H)."""
        return hidden


def keep_stage(model: Any, stage: int, stages: int) -> None:
    """Drop the modules of all other stages, in place.

    Args:
        model: A causal language model of transformers, of a type in `mesh.STAGED`.
        stage: The stage to keep, from 0.
        stages: Number of stages, at most the number of blocks.
    """
    inner = getattr(model, model.base_model_prefix)
    blocks = len(inner.layers)
    # The last stage, which has the output layer, gets no more blocks than the others; and blocks do not rise again from
    # stage to stage after they have fallen, which `clients/checks/memory_estimate.py` relies on.
    fewest, more = divmod(blocks, stages)
    first, end = (edge * fewest + min(edge, more) for edge in (stage, stage + 1))
    for index in range(blocks):
        if not first <= index < end:
            inner.layers[index] = Elsewhere()
    if stage > 0:
        inner.embed_tokens = Elsewhere()
    if stage < stages - 1:
        inner.norm, model.lm_head = Elsewhere(), Elsewhere()


class Pipeline:
    """`Passes` through the stages of a model, in the process of one of them.

    Args:
        forward: The forward pass of this process's stage.
        config: The model's configuration.
        group: The processes of the stages, in their order.
        rows: Rows of the largest part of a micro-batch that a process has. All processes with the same stage must make
            the same number of passes, because they communicate in each.
        prepare: Called before each backward pass.
    """

    def __init__(
        self, forward: Forward, config: Any, group: dist.ProcessGroup, rows: int, prepare: PrepareBackward
    ) -> None:
        text = config.get_text_config()
        self._forward = forward
        self._hidden: int = text.hidden_size
        self._vocabulary: int = text.vocab_size
        self._group = group
        self._stage, self._stages = dist.get_rank(group), dist.get_world_size(group)
        self._first, self._last = self._stage == 0, self._stage == self._stages - 1
        self._rows = rows
        self._prepare = prepare
        self._score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed_loss
        self._schedules: dict[tuple[int, int, int], Schedule1F1B] = {}

    def backward(self, micro_batches: Sequence[MicroBatch], learned: int) -> list[torch.Tensor]:
        """See `Passes`: the step's rows are cut into other micro-batches, none of which is larger than a given one."""
        # Only a classifier's rows have factors, and it is not divided into stages.
        assert all(each.factors is None for each in micro_batches)
        size, count = divided(self._rows, len(micro_batches), self._stages)
        tokens = torch.cat([each.tokens for each in micro_batches])
        targets = torch.cat([each.targets for each in micro_batches])
        positions = [each.positions for each in micro_batches if each.positions is not None]
        losses = []

        def score(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            losses.append(summed_loss(logits, targets))
            return losses[-1] / max(learned, 1)

        self._through(size, count, tokens, targets, torch.cat(positions) if positions else None, score)
        return [loss.detach() for loss in losses]

    def weighted(
        self, tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor | None:
        """See `Passes`: each row is a micro-batch, of which all processes with the same stage have equally many."""
        losses: list[torch.Tensor] = []
        more = max(self._stages, most) - len(tokens)
        factors = torch.cat([weights, weights.new_zeros(more)])

        def score(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            losses.append(summed_loss(logits, targets))
            return losses[-1] * factors[len(losses) - 1]

        self._through(1, len(factors), tokens, targets, None, score)
        return torch.stack(losses).detach()[: len(tokens)] if self._last else None

    def _through(
        self,
        size: int,
        count: int,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Forward and backward of `count` micro-batches of `size` rows; rows are added of which nothing is learned.

        Args:
            size: Rows of a micro-batch.
            count: Number of micro-batches, at least that of the stages.
            tokens: (B, L), as in `MicroBatch`.
            targets: (B, L), as in `MicroBatch`.
            positions: (B, L), as in `MicroBatch`.
            score: From logits and targets of a micro-batch, in their order, to the loss whose gradient is added.
        """
        more = size * count - len(tokens)
        targets = torch.cat([targets, targets.new_full((more, targets.shape[1]), NOT_LEARNED)])
        given = {} if positions is None else {"positions": _padded(positions, more)}
        schedule: Any = self._schedule(size, count, tokens.shape[1])  # torch leaves `step` untyped
        self._score = score
        try:
            schedule.step(
                *([_padded(tokens, more)] * self._first),
                target=targets if self._last else None,
                return_outputs=False,
                **given,
            )
        except RuntimeError as error:  # torch wraps what a pass raises, such as that memory is exhausted
            raise (error.__cause__ or error) from None

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor | None:
        """See `Passes`."""
        inputs = tokens
        if not self._first:
            inputs = torch.empty(*tokens.shape, self._hidden, device=tokens.device)
            dist.recv(inputs, group=self._group, group_src=self._stage - 1)
        outputs = self._forward(inputs, positions)
        if self._last:
            return outputs
        dist.send(outputs.contiguous(), group=self._group, group_dst=self._stage + 1)
        return None

    def _schedule(self, size: int, count: int, length: int) -> Schedule1F1B:
        """The schedule for `count` micro-batches of (size, length): its buffers are used again in each step."""
        key = (size, count, length)
        if key not in self._schedules:
            activations = torch.empty(size, length, self._hidden, device="meta", requires_grad=True)
            tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
            logits = torch.empty(size, length, self._vocabulary, device="meta", requires_grad=True)
            stage = _Stage(
                _Part(self._forward),
                self._stage,
                self._stages,
                self._forward.device,
                # With all shapes given, torch makes no pass of its own to find them.
                input_args=tokens if self._first else activations,
                output_args=logits if self._last else activations,
                group=self._group,
            )
            stage.prepare = self._prepare
            # The loss is a sum that is divided by the tokens of the step: gradients are not averaged.
            self._schedules[key] = Schedule1F1B(stage, count, self._loss, scale_grads=False)
        return self._schedules[key]

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._score(logits, targets)


def divided(rows: int, micro_batches: int, stages: int) -> tuple[int, int]:
    """Rows of each micro-batch of a pipeline, at most `rows`, and their number, at least `stages`.

    Args:
        rows: Rows of a process in each micro-batch of the plan.
        micro_batches: Micro-batches of the plan's step.
        stages: Stages of the pipeline.
    """
    whole = max(rows, 1) * micro_batches
    size = -(-whole // max(micro_batches, FOR_EACH_STAGE * stages))
    return size, max(stages, -(-whole // size))


class _Part(nn.Module):
    """A stage as torch calls it. The model is not a submodule: torch would let sharded modules of it keep whole weights
    and gradients until the end of a step."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self._forward(inputs, positions)


class _Stage(PipelineStage):
    """Torch's stage, which says before each backward pass whether it is the last one of its step."""

    prepare: PrepareBackward

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.prepare(last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def _padded(rows: torch.Tensor, more: int) -> torch.Tensor:
    """(B, L) -> (B + more, L): the first row is repeated."""
    return torch.cat([rows, rows[:1].expand(more, -1)])
