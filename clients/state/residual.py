"""Error feedback: the residual, which a site's coded update has left out and which it adds to its next one.

The code of a compressed update (`aggregation/vector/compression.py`) leaves a residual, which the site carries into
the next round (`carried.py`): a file of the bounds of the blocks (float32), then the residual, as wide as the ring.
It counts once where each round's update is summed. The residual of an update that was lost is added all the same:
mostly less than a step of each value.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.compression import BlockCode, Kept
from cloister.aggregation.vector.rotation import ROTATED
from cloister.lm.training.moments import Carry
from cloister.protocol.machine.storage import allocate, disk_refusal
from cloister.protocol.messages.blocks import Span

_NAME = "residual"
_FLOAT = np.dtype("<f4")


class Residuals(NamedTuple):
    """What a compressed update is coded with."""

    bounds: npt.NDArray[np.float32]
    """(blocks,) float32: the bound of each block of the whole update in this round."""
    before: Path | None
    """The residual that the site carries; None: there is none."""
    after: Path
    """File of the residual of this update, of its full size."""


class Stored:
    """A span of the residual in a file, read and written by parts: pages that are mapped from a file cost more.

    Args:
        file: The open file.
        code: The code of the updates.
        span: Of the coded update.
    """

    def __init__(self, file: int, code: BlockCode, span: Span) -> None:
        self._file = file
        self._type = np.dtype(code.ring.signed_dtype)
        self._start = _FLOAT.itemsize * code.blocks + self._type.itemsize * span.start

    def __getitem__(self, part: slice) -> npt.NDArray[np.signedinteger[Any]]:
        found = np.empty(part.stop - part.start, self._type)
        if os.preadv(self._file, [found.data], self._at(part)) != found.nbytes:
            raise OSError(errno.EIO, "the file is shorter than it was")
        return found

    def __setitem__(self, part: slice, values: npt.NDArray[np.float32]) -> None:
        written = values.astype(self._type)
        if os.pwrite(self._file, written.data, self._at(part)) != written.nbytes:
            raise OSError(errno.ENOSPC, "no space left")

    def _at(self, part: slice) -> int:
        return self._start + self._type.itemsize * int(part.start)


def residuals(carry: Carry, bounds: npt.NDArray[np.float32], code: BlockCode) -> Residuals:
    """The files of what the update before has left out, and of what this one will leave out, which is made here.

    The new one has its full size at once: where the disk is full, no rank meets it later.

    Args:
        carry: What the update begins with, and where it writes what it leaves.
        bounds: (blocks,) float32: the bounds with which the update is coded.
        code: The code of the updates.

    Raises:
        StorageError: the disk is full.
    """
    after = carry.after / _NAME
    _allocate(after, bounds, code)
    return Residuals(bounds, carry.before / _NAME if carry.before else None, after)


@contextmanager
def stored(path: Path, code: BlockCode, span: Span, flags: int) -> Iterator[Stored]:
    """A span of the residual in a file that `residuals` has named.

    Args:
        path: The file.
        code: The code of the updates.
        span: Of the coded update.
        flags: As for `os.open`.

    Raises:
        StorageError: the disk refuses the access.
    """
    try:
        file = os.open(path, flags)
        try:
            yield Stored(file, code, span)
        finally:
            os.close(file)
    except OSError as error:
        raise disk_refusal(path, error) from error


@contextmanager
def kept_in(path: Path | None, code: BlockCode, span: Span) -> Iterator[Kept | None]:
    """What was left out in a span of the coded update of an earlier round; None: there was none.

    Raises:
        StorageError: the disk refuses the access.
    """
    if path is None:
        yield None
        return
    with stored(path, code, span, os.O_RDONLY) as residual:
        bounds = np.fromfile(path, _FLOAT, code.blocks)
        yield Kept(residual, bounds[span.start // ROTATED : span.stop // ROTATED])


def _allocate(path: Path, bounds: npt.NDArray[np.float32], code: BlockCode) -> None:
    """A file of bounds and zeros, which only its owner may read."""
    allocate(path, _bytes(code))
    with path.open("r+b") as file:
        file.write(bounds.astype(_FLOAT).data)


def _bytes(code: BlockCode) -> int:
    return _FLOAT.itemsize * code.blocks + np.dtype(code.ring.dtype).itemsize * code.size
