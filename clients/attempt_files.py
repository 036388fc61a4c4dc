"""A site's attempts on disk, between two messages that different processes may handle.

There are two files of frames that only the site can read. `marks` is append-only and grows by one frame for each fact
that must survive a crash: an attempt was joined, its masking has begun, shares were revealed for these survivors.
`attempt` holds the secret seed of the current attempt and the messages received so far, and is emptied when the attempt
is over. A frame is appended, whole, before a message that depends on it leaves the site; the last two kinds of mark are
synced to disk first. The next append truncates a frame that a power failure or a full disk has torn: no message that
depends on the torn frame was sent.

Refused: a file for each step, renamed into place, which is equally safe but cost more than the step itself.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cloister.aggregation.secure_sum import Answered
from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError, StorageError

JOINED, MASKING, ANSWERED = 1, 2, 3

_FRAME = struct.Struct(">II")  # bytes of the content, and their CRC-32

Logged = tuple[int, bytes]


@dataclass(frozen=True)
class Marks:
    """The state that the marks give, read in order."""

    joined: tuple[int, int] = (0, 0)
    """Round and attempt that the site joined last."""
    masking: tuple[int, int] = (0, 0)
    """Round and attempt whose masks were used last."""
    answered: Answered | None = None
    """The survivors for which the site revealed shares last."""

    def and_then(self, run: str, mark: tuple[Value, ...]) -> Marks:
        """These marks and one more.

        Raises:
            EncodingError: the frame is not a mark.
        """
        match mark:
            case (1, int(round_), int(attempt)):
                return Marks((round_, attempt), self.masking, self.answered)
            case (2, int(round_), int(attempt)):
                return Marks(self.joined, (round_, attempt), self.answered)
            case (3, int(round_), int(attempt), bytes(survivors)):
                return Marks(self.joined, self.masking, Answered(run, round_, attempt, survivors))
        raise EncodingError("mark", expected="a mark as this site writes it")


@dataclass(frozen=True)
class Kept:
    """The current attempt, as it is kept."""

    newest: tuple[int, int]
    """Round and attempt that the site had joined before this one."""
    now: tuple[int, int]
    """Round and attempt of this one."""
    seed: bytes = field(repr=False)
    log: tuple[Logged, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class State:
    """The content of both files, as one process last read or wrote them."""

    run: str
    marks: Marks
    kept: Kept | None
    ends: tuple[int, int]
    """Where the whole frames of each file end. Marks only grow, and each attempt begins with one: so two states of one
    folder with the same ends are the same state."""


class AttemptFiles:
    """The two files in a folder, open while this process holds the lock on them. Make one with `turn`."""

    def __init__(self, folder: Path, run: str, marks: int, attempt: int) -> None:
        self._folder = folder
        self._run = run
        self._marks = marks
        self._attempt = attempt

    @classmethod
    @contextmanager
    def turn(cls, folder: Path, run: str) -> Iterator[Self]:
        """Wait for the lock on the folder of a run.

        Raises:
            StorageError: the disk refuses the access.
        """
        try:
            marks = _open(folder, "marks")
        except OSError as error:
            raise _refusal(folder, error) from error
        try:
            fcntl.flock(marks, fcntl.LOCK_EX)
            attempt = _open(folder, "attempt")
            try:
                yield cls(folder, run, marks, attempt)
            finally:
                os.close(attempt)
        finally:
            os.close(marks)

    def state(self, known: State | None) -> State:
        """The content of the files; `known` itself if nothing has changed since."""
        sizes = (os.fstat(self._marks).st_size, os.fstat(self._attempt).st_size)
        if known is not None and known.ends == sizes:
            return known
        marks, kept = Marks(), None
        read, marks_end = _frames(self._marks)
        for mark in read:
            marks = marks.and_then(self._run, mark)
        read, attempt_end = _frames(self._attempt)
        match read:
            case [(int(a), int(b), int(c), int(d), bytes(seed)), *steps] if (c, d) == marks.joined:
                kept = Kept((a, b), (c, d), seed, tuple(_step(step) for step in steps))
        return State(self._run, marks, kept, (marks_end, attempt_end))

    def begin(self, state: State, kept: Kept) -> State:
        """Join an attempt, which replaces the previous one."""
        marks, end = self._mark(state, JOINED, kept.now, durable=False)
        self._empty()
        header = (*kept.newest, *kept.now, kept.seed)
        return State(self._run, marks, kept, (end, self._append(self._attempt, 0, header, *kept.log)))

    def keep(self, state: State, step: Logged) -> State:
        """Add a message to the attempt."""
        kept = state.kept
        assert kept is not None
        end = self._append(self._attempt, state.ends[1], step)
        longer = Kept(kept.newest, kept.now, kept.seed, (*kept.log, step))
        return State(self._run, state.marks, longer, (state.ends[0], end))

    def mark_masking(self, state: State) -> State:
        """Record durably that the masks of the attempt are in use."""
        assert state.kept is not None
        marks, end = self._mark(state, MASKING, state.kept.now, durable=True)
        return State(self._run, marks, state.kept, (end, state.ends[1]))

    def mark_answered(self, state: State, answered: Answered) -> State:
        """Record durably the survivors for which shares are revealed."""
        now = (answered.round, answered.attempt)
        marks, end = self._mark(state, ANSWERED, now, answered.survivors, durable=True)
        return State(self._run, marks, state.kept, (end, state.ends[1]))

    def end(self, state: State) -> State:
        """Wipe the secrets of the attempt."""
        self._empty()
        return State(self._run, state.marks, None, (state.ends[0], 0))

    def _mark(
        self, state: State, kind: int, now: tuple[int, int], *more: bytes, durable: bool
    ) -> tuple[Marks, int]:
        mark: tuple[Value, ...] = (kind, *now, *more)
        end = self._append(self._marks, state.ends[0], mark, durable=durable)
        return state.marks.and_then(self._run, mark), end

    def _append(self, descriptor: int, end: int, *contents: tuple[Value, ...], durable: bool = False) -> int:
        frames = b"".join(_frame(pack(*content)) for content in contents)
        try:
            if os.fstat(descriptor).st_size != end:
                os.ftruncate(descriptor, end)  # a torn frame
            if os.pwrite(descriptor, frames, end) != len(frames):
                raise OSError(None, "no space left")
            if durable:
                os.fsync(descriptor)
        except OSError as error:
            raise _refusal(self._folder, error) from error
        return end + len(frames)

    def _empty(self) -> None:
        try:
            size = os.fstat(self._attempt).st_size
            if size:
                os.pwrite(self._attempt, bytes(min(size, 4096)), 0)  # over the seed, which is at the start
                os.ftruncate(self._attempt, 0)
        except OSError as error:
            raise _refusal(self._folder, error) from error


def _open(folder: Path, name: str) -> int:
    path = folder / name
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        entries = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entries)
        finally:
            os.close(entries)
        return descriptor


def _frame(content: bytes) -> bytes:
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def _frames(descriptor: int) -> tuple[list[tuple[Value, ...]], int]:
    """The whole frames of a file, and where they end."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    found, end = [], 0
    while len(data) - end >= _FRAME.size:
        size, checksum = _FRAME.unpack_from(data, end)
        content = data[end + _FRAME.size : end + _FRAME.size + size]
        if not size or len(content) != size or zlib.crc32(content) != checksum:
            break
        found.append(unpack(content))
        end += _FRAME.size + size
    return found, end


def _step(frame: tuple[Value, ...]) -> Logged:
    match frame:
        case (int(step), bytes(body)):
            return step, body
    raise EncodingError("attempt", expected="steps as this site writes them")


def _refusal(folder: Path, error: OSError) -> StorageError:
    return StorageError(str(folder), expected=f"a disk that accepts the write ({error.strerror})")
