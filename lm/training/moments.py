"""The optimizer's moments that a site keeps from round to round (`local.optimizer_state = "keep"`).

They are one file for the whole model in the flat layout, so that they do not depend on the mesh: a round goes on from
an earlier one, whatever mesh the site had then. Each part of a parameter is written by the first rank that has it, and
read by every rank that has it.

The file is float32: the number of steps of each parameter, in the order of the layout; then its first moment (Muon's
momentum), and the second, each as a vector of the layout, with zeros where an optimizer has none. It is part of what a
site carries (`clients/state/carried.py`): so it is of one run and plan, and as it was written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.weights import Weights
from cloister.lm.training.optimizer import LocalOptimizer
from cloister.protocol.machine.storage import allocate, on_disk

_FLOAT = np.dtype("<f4")
_NAME = "moments"


class Carry(NamedTuple):
    """What one update begins with, and where it writes what it leaves."""

    before: Path | None
    """The folder of an earlier round; None: nothing is carried."""
    after: Path
    """The new folder of this round."""


class Moments:
    """The moments with which an update begins and ends; every rank calls the same methods in the same order.

    Args:
        carry: Their folders.
        layout: The model's layout.
        weights: Where its parameters are.
        part: What the round trains: the moments of other parameters stay what they were.
    """

    def __init__(self, carry: Carry, layout: Layout, weights: Weights, part: Layout) -> None:
        self._carry = carry
        self._layout = layout
        self._whole = part.names == layout.names
        self._weights = weights

    def load(self, optimizer: LocalOptimizer) -> None:
        """Give an optimizer the moments of the earlier round; if there are none, they stay zero.

        Args:
            optimizer: The round's optimizer, before its first step.

        Raises:
            StorageError: the moments cannot be read.
        """
        if self._carry.before is None:
            return
        path = self._carry.before / _NAME
        if not path.exists():  # unit `site`: an update that was not finite, or of no records, has left none
            return
        with on_disk(path):
            stored: Vector = np.memmap(path, _FLOAT, "c")
        for part, tensor, _ in self._parts(stored, optimizer):
            tensor.copy_(torch.from_numpy(part))

    def store(self, optimizer: LocalOptimizer) -> None:
        """Write the moments with which the round ends; the folder is made durable and put in place by its owner.

        Args:
            optimizer: The round's optimizer, after its last step.

        Raises:
            StorageError: the disk is full or refuses the write.
        """
        path, weights = self._carry.after / _NAME, self._weights
        with on_disk(path):
            if weights.leads:
                allocate(path, self._size(optimizer.vectors) * _FLOAT.itemsize)
                before = self._carry.before / _NAME if self._carry.before else None
                if not self._whole and before is not None and before.exists():
                    shutil.copyfile(before, path)  # into the file that only its owner may read
            weights.least(0)  # the file is there
            stored = np.memmap(path, _FLOAT, "r+")
            for part, tensor, first in self._parts(stored, optimizer):
                if first:
                    part[...] = tensor.cpu().numpy()
            stored.flush()
        weights.least(0)  # it is whole

    def _size(self, vectors: int) -> int:
        """Numbers of a state."""
        return len(self._layout.names) + vectors * self._layout.size

    def _parts(
        self, stored: Vector, optimizer: LocalOptimizer
    ) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.float32]], torch.Tensor, bool]]:
        """The parts of a state that this process has: in the file, in the optimizer, and whether it is the first that
        has this part."""
        states = optimizer.states()
        for place, held in enumerate(self._weights.held):
            if not held.size or held.name not in states:
                continue
            steps, moments = states[held.name]
            if steps is not None:
                yield stored[place : place + 1], steps.view(1), held.first
            for number, moment in enumerate(moments):
                begin = len(self._layout.names) + number * self._layout.size + held.offset
                rows = stored[begin + held.rows.start * held.width : begin + held.rows.stop * held.width]
                part = rows.reshape(-1, held.width)[:, held.columns.start : held.columns.stop]
                yield part, moment.view(held.rows.size, held.columns.size), held.first
