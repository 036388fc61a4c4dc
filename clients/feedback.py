"""Error feedback: what a site's coded updates have left out, carried from round to round.

The code of a compressed update (`aggregation/compression.py`) leaves a remainder, which belongs to the next update. It
counts once, by the rule of `carried.py`. In clear, what an update left out that came too late is added all the same:
mostly less than a step of each value.

A file `residual-<round>` has the bounds of the blocks (float32), then the remainder, as wide as the ring.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cloister.aggregation.compression import BlockCode, Kept
from cloister.aggregation.rotation import ROTATED
from cloister.clients.carried import Carried
from cloister.protocol.blocks import Span
from cloister.protocol.storage import allocate, disk_refusal

_FLOAT = np.dtype("<f4")

T = TypeVar("T")


class Feedback(Carried):
    """The remainders of a site in a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
        code: The code of its updates.
    """

    def __init__(self, state: Path, run: str, plan: str, code: BlockCode) -> None:
        super().__init__(state, run, plan, "residual", _bytes(code))
        self._code = code

    def write(
        self,
        round_number: int,
        base: int,
        bounds: npt.NDArray[np.float32],
        make: Callable[[Path], T],
        *,
        durable: bool,
    ) -> T:
        """Let `make` code the update of a round, and keep its remainder; remove all but this and the one of `base`.

        Args:
            round_number: The round.
            base: What `base` returned.
            bounds: (blocks,) float32: the bounds with which the update is coded.
            make: Codes the update, and fills the file that it is given (`stored`).
            durable: Sync the remainder before this returns.

        Raises:
            StorageError: the disk is full.
        """

        def fill(temporary: Path) -> T:
            allocate(temporary, _bytes(self._code))
            with temporary.open("r+b") as file:
                file.write(bounds.astype(_FLOAT).data)
            return make(temporary)

        return self.keep(round_number, base, fill, durable=durable)


class Stored:
    """A span of the remainder in a file, read and written by parts: pages that are mapped from a file cost more.

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


@contextmanager
def stored(path: Path, code: BlockCode, span: Span, flags: int) -> Iterator[Stored]:
    """A span of the remainder in a file that `Feedback.write` gave or that it kept.

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
    with stored(path, code, span, os.O_RDONLY) as remainder:
        bounds = np.fromfile(path, _FLOAT, code.blocks)
        yield Kept(remainder, bounds[span.start // ROTATED : span.stop // ROTATED])


def _bytes(code: BlockCode) -> int:
    return _FLOAT.itemsize * code.blocks + np.dtype(code.ring.dtype).itemsize * code.size
