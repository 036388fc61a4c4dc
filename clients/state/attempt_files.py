"""A site's attempts on disk, between two messages that different processes may handle.

There are three files that only the site can read. `marks` says which attempt the site joined last, and for which
survivors it revealed shares last. It has two slots at fixed places, so a damaged length hides nothing. Each slot has
all marks, the number of the write and a CRC-32; the higher number is newer. A write replaces the older slot and is
synced, so a power cut can tear the newest write only, and no message that depends on it was sent. A slot may also be
damaged later. Then `attempt` still says what was joined last, and `revealed` what was answered last, and the site goes
on with that: it forgets nothing. If both slots are damaged, or one of them and `attempt` or `revealed`, or the file is
missing or has another length, the site does not know what it has answered, and refuses everything (`StorageError`).
An earlier copy of `marks` beside later shares in `revealed` is refused too. That both, or all files, are an earlier
copy is not noticed. They are created once, durably, before the run takes a consent (`create`), and never again.

`attempt` holds the secret seed of the current attempt, the history that the site advertises in it and the messages
received so far, in frames: a length, a CRC-32 and the content. Each is appended and synced before a message that
depends on it leaves the site. A damaged frame, the last one included, ends the attempt: the site refuses the rest of it
and can join the next. When the site has revealed its shares, the file is overwritten with zeros, synced and emptied.

`revealed` holds, in one frame, the site's newest answer to a request for shares, with the hash of that request and the
mark, or that there was none: a file that was emptied is damage. It is synced before the answer leaves and the attempt
is wiped, so that the answer can be sent again if it was lost. It has no secret of the site: only shares that the
coordinator was sent.

Refused: `marks` as a log that grows, because a truncated log is a valid shorter one. A file for each step, renamed into
place, is equally safe but cost more than the step itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from cloister.aggregation.secure.secure_sum import Answered
from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError, StorageError
from cloister.protocol.machine.storage import disk_refusal, on_disk, sync, sync_folders, write_at, write_new
from cloister.protocol.messages.messages import NOTHING_CARRIED

_FRAME = struct.Struct(">II")  # bytes of the content, and their CRC-32
_SLOT = 4096  # bytes of a slot of `marks`: no disk writes two of them as one sector

_NOTHING = pack("no answer yet")
"""What is in `revealed` before the first answer."""

MASKED = 0
"""What is logged beside the protocol's steps: the digest of the masked vector."""

Logged = tuple[int, bytes]


@dataclass(frozen=True)
class Marks:
    """What a site must not forget of its attempts."""

    joined: tuple[int, int] = (0, 0)
    """Round and attempt that the site joined last: a site joins an attempt before it answers in it."""
    answered: Answered | None = None
    """The survivors for which the site revealed shares last."""
    writes: int = 0
    """Number of writes before this one."""
    masked: int = -1
    """The round for which the site masked a vector last; -1: none. The vector may have been opened in a sum since."""
    sketched: tuple[int, int, int] = (0, 0, 0)
    """The round and attempt for which the site made a sketch last, and the attempts at that round in which it has."""


@dataclass(frozen=True)
class Kept:
    """The current attempt, as it is kept."""

    newest: tuple[int, int]
    """Round and attempt that the site had joined before this one."""
    now: tuple[int, int]
    """Round and attempt of this one."""
    seed: bytes = field(repr=False)
    log: tuple[Logged, ...] = field(default=(), repr=False)
    history: bytes = NOTHING_CARRIED
    """Of what the site carried when it joined this one (`carried.py`)."""


@dataclass(frozen=True)
class State:
    """The content of `marks` and `attempt`, as one process last read or wrote them."""

    marks: Marks
    kept: Kept | None
    end: int
    """Bytes of the attempt. It only grows, until a mark is written: so two states of one folder with the same marks and
    end are the same state. The exception is a process that was killed before it marked the attempt that it began: one
    that has the attempt before in memory may go on with that, and no other process finds it."""


class AttemptFiles:
    """The files in a folder, open while this process holds the lock on them. Make one with `turn`."""

    def __init__(self, folder: Path, run: str, marks: int, attempt: int) -> None:
        self._folder = folder
        self._run = run
        self._marks = marks
        self._attempt = attempt

    @staticmethod
    def create(folder: Path, top: Path) -> None:
        """Create the files of a run in which the site has answered nothing, durably; existing files stay as they are.

        Args:
            folder: The folder of a run's sums.
            top: The folder that has the site's state folder; the entries of all folders on the way are synced.

        Raises:
            StorageError: the disk refuses the write.
        """
        write_new(folder / "attempt", b"")
        write_new(folder / "revealed", _frame(_NOTHING))
        write_new(folder / "marks", _slot(Marks()) + _slot(Marks(writes=1)))
        sync_folders(folder.parent, top)

    @classmethod
    @contextmanager
    def turn(cls, folder: Path, run: str) -> Iterator[Self]:
        """Wait for the lock on the folder of a run.

        Raises:
            StorageError: a file is missing, or the disk refuses the access.
        """
        with _opened(folder / "marks") as marks:
            fcntl.flock(marks, fcntl.LOCK_EX)
            with _opened(folder / "attempt") as attempt:
                yield cls(folder, run, marks, attempt)

    def state(self, known: State | None) -> State:
        """The content of the files; `known` itself if nothing has changed since.

        Raises:
            StorageError: the marks are damaged.
        """
        marks, end = self._read_marks(), os.fstat(self._attempt).st_size
        if known is not None and (known.marks, known.end) == (marks, end):
            return known
        kept = self._read_attempt(end)
        return State(marks, kept if kept is not None and kept.now == marks.joined else None, end)

    def begin(self, state: State, kept: Kept) -> State:
        """Join an attempt, durably; it replaces another one, which is wiped first.

        So a process that is killed in between leaves no beginning of the previous attempt, from which the site would
        answer its later steps again. The mark is written last: without it the attempt is not joined, and its first
        message joins it again.
        """
        if state.end and kept != state.kept:
            state = self.end(state)
        header = (*kept.newest, *kept.now, kept.seed, kept.history)
        end = self._append(0, (header, *kept.log))
        return State(self._mark(replace(state.marks, joined=kept.now)), kept, end)

    def keep(self, state: State, *steps: Logged) -> State:
        """Add messages to the attempt, durably.

        Those that are there already are synced again, because the process that wrote them may have been killed before
        they were synced.
        """
        kept = state.kept
        assert kept is not None
        new = tuple(step for step in steps if step not in kept.log)
        return State(state.marks, replace(kept, log=kept.log + new), self._append(state.end, new))

    def mark_answered(self, state: State, answered: Answered) -> State:
        """Record durably the survivors for which shares are revealed."""
        return replace(state, marks=self._mark(replace(state.marks, answered=answered)))

    def mark_masked(self, state: State, round_number: int) -> State:
        """Record durably that the site masks a vector of a round, unless it is recorded."""
        if state.marks.masked == round_number:
            with on_disk(self._folder):
                sync(self._marks)  # the process that wrote it may have been killed before it synced it
            return state
        return replace(state, marks=self._mark(replace(state.marks, masked=round_number)))

    def mark_sketched(self, state: State) -> State:
        """Record durably that the site sends a sketch of its vector in the attempt that it has joined.

        Also where the marks say so already: that may be what was assumed for a slot that is lost, and is not on disk.
        """
        return replace(state, marks=self._mark(_sketched_in(state.marks, state.marks.joined)))

    def keep_revealed(self, state: State, request: bytes, answer: bytes) -> None:
        """Keep the answer to a request for shares, which is marked, durably; it replaces the previous one.

        A power cut can tear it; the attempt, which gives the same answer, is wiped later only.
        """
        frame = _frame(pack(_hash(request), answer, *_fields(state.marks.answered)))
        before = self._read_revealed()
        with _opened(self._folder / "revealed") as file:
            try:
                write_at(file, frame, 0)
                os.ftruncate(file, len(frame))
                sync(file)
            except OSError as error:
                # The answer does not leave, and `marks` still has the one before it.
                with contextlib.suppress(OSError):
                    written = 0
                    while written < len(before):  # in blocks that the file has had
                        written += os.pwrite(file, before[written:], written)
                    os.ftruncate(file, written)
                    sync(file)
                raise disk_refusal(self._folder, error) from error

    def revealed(self, request: bytes) -> bytes | None:
        """The answer that was kept for exactly this request for shares; None if there is none."""
        content = _content(self._read_revealed())
        match unpack(content) if content else ():
            case (bytes(known), bytes(answer), *_) if known == _hash(request):
                return answer
        return None

    def end(self, state: State) -> State:
        """Wipe the secrets of the attempt, durably, so that later readers of the disk cannot remove its masks.

        No answer depends on it: an attempt that a power cut brings back gives the answer that was marked, and no other.
        A disk that copies on write, and an SSD, may keep the old blocks.
        """
        with on_disk(self._folder):
            os.pwrite(self._attempt, bytes(state.end), 0)
            sync(self._attempt)  # before the truncation, which would drop the zeros
            os.ftruncate(self._attempt, 0)
        return State(state.marks, None, 0)

    def _read_marks(self) -> Marks:
        data = os.pread(self._marks, 2 * _SLOT + 1, 0)
        slots = (_marks_in(self._run, data[at : at + _SLOT]) for at in (0, _SLOT))
        whole = sorted((marks for marks in slots if marks is not None), key=lambda marks: marks.writes)
        consecutive = all(marks.writes == whole[0].writes + place for place, marks in enumerate(whole))
        if len(data) != 2 * _SLOT or not whole or not consecutive:
            raise _unknown(self._folder / "marks", "damaged")
        if len(whole) != 2:
            return self._recovered(whole[0])
        self._check_newer(whole[1])
        return whole[1]

    def _check_newer(self, marks: Marks) -> None:
        """Refuse an earlier copy of the marks: the mark of an answer is synced before its shares are kept."""
        revealed = self._answered_in(_content(self._read_revealed()))
        own = (0, 0) if marks.answered is None else (marks.answered.round, marks.answered.attempt)
        if revealed is not None and (revealed.round, revealed.attempt) > own:
            raise _unknown(self._folder / "marks", "older than the shares that were revealed")

    def _recovered(self, marks: Marks) -> Marks:
        """The marks where only one slot is whole, by the other files: no share has left that is not in `revealed`."""
        end = os.fstat(self._attempt).st_size
        kept = self._read_attempt(end)
        if kept is None and end:  # it may have been joined; a power cut tears it or a slot, not both
            raise _unknown(self._folder / "attempt", "damaged, and a slot of marks too")
        joined = marks.joined if kept is None else max(marks.joined, kept.now)
        if kept is None or kept.newest[0] == kept.now[0] or any(step == MASKED for step, _ in kept.log):
            # It, or an attempt before it, may have masked a vector of that round: so it has.
            marks = replace(marks, masked=max(marks.masked, joined[0]))
        # The lost write may have been that of one more sketch.
        marks = _sketched_in(replace(marks, joined=joined), joined)
        content = _content(self._read_revealed())
        if content == _NOTHING:
            return marks
        answered = self._answered_in(content)
        if answered is None:
            raise _unknown(self._folder / "revealed", "damaged, and a slot of marks too")
        return replace(marks, answered=answered)

    def _answered_in(self, content: bytes | None) -> Answered | None:
        """What the last revealed shares answered; None: there are none, or they are damaged."""
        match unpack(content) if content and content != _NOTHING else ():
            case (bytes(_), bytes(_), int(round_), int(attempt), bytes(survivors)):
                return Answered(self._run, round_, attempt, survivors)
        return None

    def _read_attempt(self, end: int) -> Kept | None:
        """The attempt, marked or not; None if there is none, or it is damaged."""
        match _frames(os.pread(self._attempt, end, 0)):
            case [(int(a), int(b), int(c), int(d), bytes(seed), bytes(history)), *steps]:
                return Kept((a, b), (c, d), seed, tuple(_step(step) for step in steps), history)
        return None

    def _read_revealed(self) -> bytes:
        with _opened(self._folder / "revealed") as file:
            return os.pread(file, os.fstat(file).st_size, 0)

    def _mark(self, marks: Marks) -> Marks:
        marks = replace(marks, writes=marks.writes + 1)
        with on_disk(self._folder):
            write_at(self._marks, _slot(marks), marks.writes % 2 * _SLOT)
            sync(self._marks)
        return marks

    def _append(self, end: int, contents: tuple[tuple[Value, ...], ...]) -> int:
        """Write frames at the end, or instead of all, durably; the new end. They are there and whole, or not there."""
        frames = b"".join(_frame(pack(*content)) for content in contents)
        try:
            if os.fstat(self._attempt).st_size > end + len(frames):
                os.ftruncate(self._attempt, end + len(frames))
            write_at(self._attempt, frames, end)
            sync(self._attempt)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._attempt, end)
            raise disk_refusal(self._folder, error) from error
        return end + len(frames)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _unknown(path, "missing") from None
    except OSError as error:
        raise disk_refusal(path, error) from error
    try:
        yield file
    finally:
        os.close(file)


def _hash(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()


def _frame(content: bytes) -> bytes:
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def _frames(data: bytes) -> list[tuple[Value, ...]]:
    """The frames of an attempt; none if one is damaged."""
    found, at = [], 0
    while at < len(data):
        content = _content(data[at:])
        if content is None:
            return []
        found.append(unpack(content))
        at += _FRAME.size + len(content)
    return found


def _content(data: bytes) -> bytes | None:
    """The content of the frame that data begins with, if it is whole."""
    if len(data) < _FRAME.size:
        return None
    size, checksum = _FRAME.unpack_from(data)
    content = data[_FRAME.size : _FRAME.size + size]
    return content if size and len(content) == size and zlib.crc32(content) == checksum else None


def _fields(answered: Answered | None) -> tuple[Value, ...]:
    return (answered.round, answered.attempt, answered.survivors) if answered else ()


def _sketched_in(marks: Marks, joined: tuple[int, int]) -> Marks:
    """The marks, where a sketch is sent in an attempt."""
    round_, attempt, count = marks.sketched
    if (round_, attempt) == joined:
        return marks
    return replace(marks, sketched=(*joined, count + 1 if round_ == joined[0] else 1))


def _slot(marks: Marks) -> bytes:
    frame = _frame(
        pack(marks.writes, *marks.joined, marks.masked + 1, *marks.sketched, *_fields(marks.answered))
    )
    return frame.ljust(_SLOT, b"\0")


def _marks_in(run: str, slot: bytes) -> Marks | None:
    """The marks in a slot; None if it is damaged."""
    content = _content(slot)
    match unpack(content) if content else ():
        case (int(writes), int(a), int(b), int(masked), int(c), int(d), int(e), *rest):
            answered = None
            match rest:
                case (int(round_), int(attempt), bytes(survivors)):
                    answered = Answered(run, round_, attempt, survivors)
                case [_, *_]:
                    return None
            return Marks((a, b), answered, writes, masked - 1, (c, d, e))
    return None


def _step(frame: tuple[Value, ...]) -> Logged:
    match frame:
        case (int(step), bytes(body)):
            return step, body
    raise EncodingError("attempt", expected="steps as this site writes them")


def _unknown(path: Path, how: str) -> StorageError:
    return StorageError(
        str(path),
        how,
        expected="the file that the site made when it joined the run: without it the site does not know what it has "
        "answered, and could reveal its update",
        fix="the site takes part in these sums of the run no more; do not restore an earlier copy; for another run: "
        "cloister site accept",
    )
