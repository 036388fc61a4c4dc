"""Error feedback: what a site's coded updates have left out, kept from round to round.

The code of a compressed update (`aggregation/compression.py`) leaves a remainder, which belongs to the next update. It
counts once: only if the coded update is in a sum. So the remainder of a round is kept beside the one that the update
was coded with, and when the next update is made, the site decides which of the two it adds:

- Under masks that of the newest round in which it has revealed shares, by its durable mark (`attempt_files.py`). A site
  reveals them only as a survivor, whose update is in the sum. The remainder of a round in which it has not is dropped
  with the update that was not summed.
- In clear a site is told nothing after it has sent its update, so that of the newest round in which it made one. If
  that update came too late, what it left out is added all the same: mostly less than a step of each value.

If all the sites' shares were revealed and the coordinator still abandons the round, the update is lost, and its
remainder is added as if it were not.

Attempts of one round send the same kept update. An update that is made again after a crash starts from the same
remainder as before, because only those of earlier rounds are looked at.

A file `residual-<round>` has the bounds of the blocks (float32), then the remainder, as wide as the ring.
`residual-<round>.json`, which is written last, has the run, the plan and the round whose remainder the update was coded
with.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cloister.aggregation.compression import BlockCode, Kept
from cloister.aggregation.rotation import ROTATED
from cloister.protocol.blocks import Span
from cloister.protocol.storage import disk_refusal, write_bytes, write_file

_log = logging.getLogger(__name__)
_NAME = re.compile(r"residual-(\d{5,})\.json")
_FLOAT = np.dtype("<f4")

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    run: str
    plan: str
    base: int
    """The round whose remainder the update was coded with; 0: none."""


class Feedback:
    """The remainders of a site in a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
        code: The code of its updates.
    """

    def __init__(self, state: Path, run: str, plan: str, code: BlockCode) -> None:
        self._state = state
        self._run = run
        self._plan = plan
        self._code = code

    def base(self, round_number: int, summed: Callable[[int], bool]) -> int:
        """The round whose remainder the update of a round is coded with; 0: there is none.

        Args:
            round_number: The round.
            summed: Whether the update of an earlier round is in a sum, as far as the site knows.
        """
        earlier = [number for number in self._entries() if number < round_number]
        if not earlier:
            return 0
        newest = max(earlier)
        base = newest if summed(newest) else self._entries()[newest].base
        if base and not self._whole(base):
            path = self.path(base).name
            _log.warning("what the update of round %d left is lost: %s is missing or damaged", base, path)
            return 0
        return base

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
        made: list[T] = []

        def fill(temporary: Path) -> None:
            _allocate(temporary, bounds, self._code)
            made.append(make(temporary))

        write_file(self.path(round_number), fill, durable=durable)
        entry = {"run": self._run, "plan": self._plan, "base": base}
        write_bytes(self.path(round_number).with_suffix(".json"), json.dumps(entry).encode(), durable=durable)
        needed = {self.path(number).name for number in (round_number, base)}
        for old in self._state.glob("residual-*"):
            if old.stem not in needed:
                old.unlink(missing_ok=True)
        return made[0]

    def path(self, round_number: int) -> Path:
        """The file of a round's remainder."""
        return self._state / f"residual-{round_number:05d}"

    def _whole(self, round_number: int) -> bool:
        path = self.path(round_number)
        return path.exists() and path.stat().st_size == _bytes(self._code)

    def _entries(self) -> dict[int, _Entry]:
        """The rounds of this run and plan that have a remainder."""
        found = {}
        for path in self._state.glob("residual-*.json"):
            match = _NAME.fullmatch(path.name)
            try:
                read = json.loads(path.read_bytes())
                entry = _Entry(str(read["run"]), str(read["plan"]), int(read["base"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # torn by a crash: the update was not made
            if match and (entry.run, entry.plan) == (self._run, self._plan):
                found[int(match[1])] = entry
        return found


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


def _allocate(path: Path, bounds: npt.NDArray[np.float32], code: BlockCode) -> None:
    """A file of bounds and zeros, which only its owner may read; where the disk is full, no rank meets it later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, _bytes(code))
        os.pwrite(file, bounds.astype(_FLOAT).tobytes(), 0)
    finally:
        os.close(file)


def _bytes(code: BlockCode) -> int:
    return _FLOAT.itemsize * code.blocks + np.dtype(code.ring.dtype).itemsize * code.size
