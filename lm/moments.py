"""The optimizer's moments that a site keeps from round to round (`local.optimizer_state = "keep"`).

A state is one file for the whole model in the flat layout, so that it does not depend on the mesh: a round goes on from
the newest earlier one, whatever mesh the site had then. Each part of a parameter is written by the first rank that has
it, and read by every rank that has it.

`optimizer-<round>` is float32: the number of steps of each parameter, in the order of the layout; then AdamW's first
moment or Muon's momentum, and AdamW's second moment, each as a vector of the layout, with zeros where an optimizer has
none. `optimizer-<round>.json`, written last, says which model and optimizer it is of; without it there is no state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloister.lm.layout import Layout, Vector
from cloister.lm.optimizer import LocalOptimizer
from cloister.lm.weights import Weights
from cloister.protocol.errors import StorageError
from cloister.protocol.storage import allocate, disk_refusal, sync, sync_folders, write_bytes

_FLOAT = np.dtype("<f4")
_MOMENTS = 2
"""Vectors of a state."""
_SEALED = re.compile(r"optimizer-(\d+)\.json")


class Moments:
    """The states of a site; every rank calls the same methods in the same order.

    Args:
        folder: The site's folder of states.
        optimizer: The plan's `local.optimizer`.
        layout: The model's layout.
        weights: Where its parameters are.
    """

    def __init__(self, folder: Path, optimizer: str, layout: Layout, weights: Weights) -> None:
        self._folder = folder
        self._made_by = {"layout": layout.digest(), "optimizer": optimizer}
        self._layout = layout
        self._weights = weights
        self._base = 0

    def load(self, round: int, optimizer: LocalOptimizer) -> None:
        """Give an optimizer the newest state of an earlier round; if there is none, its moments stay zero.

        Args:
            round: The round that begins, from 1.
            optimizer: The round's optimizer, before its first step.

        Raises:
            StorageError: the state cannot be read, or is that of another model or optimizer.
        """
        found = (_SEALED.fullmatch(path.name) for path in self._folder.glob("*"))
        self._base = max((int(each[1]) for each in found if each and int(each[1]) < round), default=0)
        if self._base:
            for part, tensor, _ in self._parts(self._read(self._path(self._base)), optimizer):
                tensor.copy_(torch.from_numpy(part))

    def store(self, round: int, optimizer: LocalOptimizer) -> None:
        """Write the state after a round, durably, whole or not at all; remove all but it and the one that was loaded.

        Args:
            round: The round.
            optimizer: Its optimizer, after its last step.

        Raises:
            StorageError: the disk is full or refuses the write.
        """
        path, weights = self._path(round), self._weights
        try:
            if weights.leads:
                self._folder.mkdir(parents=True, exist_ok=True)
                for old in self._folder.glob("optimizer-*"):
                    if old.stem != self._path(self._base).name:
                        old.unlink()
                allocate(path, self._size * _FLOAT.itemsize)
                # Before the data: a power cut must not leave the seal of other moments beside them.
                sync_folders(self._folder, self._folder)
            weights.least(0)  # the file is there
            with path.open("r+b") as file:
                stored = np.memmap(file, _FLOAT, "r+")
                for part, tensor, first in self._parts(stored, optimizer):
                    if first:
                        part[...] = tensor.cpu().numpy()
                sync(file.fileno())
        except OSError as error:
            raise disk_refusal(path, error) from error
        weights.least(0)  # it is whole
        if weights.leads:
            write_bytes(path.with_suffix(".json"), json.dumps(self._made_by).encode())

    def _read(self, path: Path) -> Vector:
        """The numbers of a state, mapped from its file; a change does not reach it."""
        try:
            made_by = json.loads(path.with_suffix(".json").read_bytes())
            stored: Vector = np.memmap(path, _FLOAT, "c")
            if stored.size != self._size and made_by == self._made_by:
                raise ValueError(f"it has {stored.size} numbers, and not {self._size}")
        except (OSError, ValueError) as error:
            raise StorageError(
                str(path),
                expected=f"a whole optimizer state ({error})",
                fix=f"remove {path.name}.json to continue from an earlier state, or from zero moments",
            ) from error
        if made_by != self._made_by:
            raise StorageError(
                str(path),
                expected=f"the state of {self._made_by['optimizer']} for this plan's model",
                fix="use a separate folder for each run",
            )
        return stored

    @property
    def _size(self) -> int:
        """Numbers of a state."""
        return len(self._layout.names) + _MOMENTS * self._layout.size

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

    def _path(self, round: int) -> Path:
        return self._folder / f"optimizer-{round}"
