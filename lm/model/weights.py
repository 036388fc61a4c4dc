"""Where the parameters of a model that is trained are: all in one process, or a part in each rank (`shards.py`).

Training is the same program in both cases. What differs is behind `Weights`: how the global model gets into the
parameters and the update out of them, which tensors the optimizer steps on, which rows of a micro-batch this process
computes, and what is summed over processes.

A *replica* is one copy of the model: one process, or the ranks that have its parts. Of several replicas each takes
units of its own where gradients of single units are wanted, and these are in one replica until they are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.writes import kept_of_round
from cloister.protocol.messages.blocks import Span

Named = list[tuple[str, nn.Parameter]]
"""Parameters with their names, in layout order."""


class Held(NamedTuple):
    """What a process has of one parameter, seen as a matrix of its first dimension by the rest: a rectangle."""

    name: str
    offset: int
    """Where the parameter begins in the flat vector."""
    width: int
    """Columns of the matrix."""
    rows: Span
    """Rows of the matrix that the process has."""
    columns: Span
    """Columns of them."""
    counts: bool = True
    """Whether this process is the first of its replica's that have this rectangle."""
    first: bool = True
    """Whether it is the first of all processes that have it."""

    @property
    def size(self) -> int:
        """Elements of the rectangle."""
        return self.rows.size * self.columns.size


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def whole(layout: Layout) -> tuple[Held, ...]:
    """What a process has that has every parameter."""
    sizes = map(matrix, layout.shapes)
    return tuple(
        Held(name, offset, columns, Span(0, rows), Span(0, columns))
        for name, (rows, columns), offset in zip(layout.names, sizes, layout.offsets, strict=False)
    )


class Weights:
    """The parameters of a model, all in this process; `Shards` has a part of them in each rank.

    Every rank calls the same methods in the same order.

    Args:
        model: The model, on its device.
    """

    draws: tuple[str, ...] = ()
    """What separates this process's random draws, such as dropout, from those of processes with other rows."""
    divided: bool = False
    """Whether a replica has more than one process."""
    leads: bool = True
    """Whether this process does what one of them does for all."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._loaded = kept_of_round(model.module, model.written.difference(model.layout.names))

    def place(self, start: Vector) -> None:
        """Make the model what it is in a new process that is given the global model, float32 (layout.size,).

        Each use of the model begins with this. Otherwise a process that has trained and one that has not would differ
        by more than their records, in sums that must hide which of the two a site has.

        Raises:
            UpdateError: the vector does not have the model's layout.
        """
        self._loaded.put_back()
        self._model.layout.scatter(start, self._model.module)

    def span(self, part: Layout) -> Span:
        """This process's part of the vector of what a round trains."""
        return Span(0, part.size)

    def trained(self, part: Layout) -> Named:
        """What the optimizer steps on in a round that trains a part: plain tensors on the device, in layout order."""
        return self._model.trainable(part)

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a micro-batch; there may be none."""
        return slice(0, batch_size)

    def before_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of a micro-batch, which is or is not the last one of its step."""

    def take_gradients(self) -> None:
        """After a step's backward passes: set `grad` of what `trained` gave to the gradient of the whole step."""

    def add_replicas(self) -> None:
        """After `take_gradients`: add up the gradients of replicas, where a backward pass has not done it."""

    def clip(self, trained: list[nn.Parameter], norm: float) -> None:
        """Scale the gradients so that the L2 norm over all parameters of the model is at most `norm`."""
        clip_grad_norm_(trained, norm)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a value over the processes that have different rows."""
        return value

    def least(self, number: int) -> int:
        """The smallest of the numbers that the processes give."""
        return number

    def update(self, start: Vector, part: Layout) -> Vector:
        """The part's parameters minus those of the global model, float32: this process's span of the update."""
        update = part.flatten(self._model.module)
        update -= self._model.layout.pick(start, part)
        return update

    @property
    def held(self) -> tuple[Held, ...]:
        """What this process has of each parameter of the layout, in its order."""
        return whole(self._model.layout)

    @property
    def units(self) -> slice:
        """Which of the units of a batch this process's replica takes."""
        return slice(None)

    def unit_rows(self, n: int) -> slice:
        """This process's rows of the `n` rows of a unit that its replica takes; there may be none."""
        return slice(0, n)

    def sum_in_replica(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the processes of a replica, in place; the same in each of them."""
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas, in place; each process has the same part of its replica."""
        return values
