"""The audit log of one party: an append-only file with a line for each join, refusal, release and charge.

A line is written and synced (fsync) before what it tells of takes effect: before a reply leaves a site, before the
coordinator takes a site for joined or opens a sum. A charge has its line after the ledger has it, and before the
training or the sum that it pays for. So a crash can leave a line without its effect, but no effect without its line; a
request that is repeated after the crash has another line.

The lines form a hash chain, as the entries of a ledger do (`privacy/ledger/ledger.py` says what a chain detects and
what not:
a changed, removed, inserted or moved line, but not lines that are missing at the end, unless a head was noted).
A write that a crash has torn ends without a newline: the next write removes it, and readers leave it out.

Every write opens the file, locks it, and closes it: several processes and threads may write, and no state is carried
across a fork. Deployed parties have a log. Simulated ones, which can show nothing to an auditor and would sync for each
message, have `NO_AUDIT_LOG`, which returns before it does anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

from cloister.protocol.encoding import pack
from cloister.protocol.errors import AuditLogError, visible
from cloister.protocol.machine.storage import on_disk, sync, sync_folders

_log = logging.getLogger(__name__)

NAME: Final = "audit.jsonl"
"""The file of a party, in the coordinator's folder of a federation and in a site's state folder."""
FORMAT = "cloister-audit-log-1"
"""First field of the hashed encoding of a line."""
FIRST = bytes(32)
"""The hash before the first line."""
_LONGEST = 1000
"""Characters of the longest detail; more are cut off."""
_TAIL = 2**16
"""Bytes at the end of the file among which its last line is."""

_TYPES = [int, str, str, str, str, int, int, str, str]

What = Literal["join", "refusal", "release", "charge"]


@dataclass(frozen=True)
class Fact:
    """What a line tells."""

    what: What
    """`join`: a site takes part in a run. `refusal`: a site refuses, signed, or the coordinator ends a run. `release`:
    at a site a vector that leaves it, at the coordinator a sum that is opened. `charge`: of a ledger."""
    run: str
    """Identity of the run."""
    plan: str
    """Digest of its plan, in hex."""
    round: int = 0
    """The round; 0 before the first."""
    attempt: int = 0
    """The attempt at the sum, from 1; 0: it belongs to none."""
    site: str = ""
    """The site; empty: the coordinator."""
    detail: str = ""
    """More of it in words: a reason, the purpose of a sum, a hash."""


@dataclass(frozen=True)
class Line:
    """A line of the log."""

    number: int
    """Its position, from 1."""
    at: str
    """When it was written, in ISO 8601, by the clock of its party."""
    fact: Fact
    """What it tells."""
    hash: str
    """Its hash in the chain, in hex."""

    @classmethod
    def after(cls, previous: bytes, number: int, at: str, fact: Fact) -> Line:
        """The line that follows the one with the hash `previous`.

        Its hash is SHA-256 over `pack(FORMAT, previous, ...)` of all its fields.
        """
        told = (fact.what, fact.run, fact.plan, fact.round, fact.attempt, fact.site, fact.detail)
        return cls(number, at, fact, hashlib.sha256(pack(FORMAT, previous, number, at, *told)).hexdigest())

    def text(self) -> str:
        """The line, without its newline."""
        return json.dumps({"number": self.number, "at": self.at, **asdict(self.fact), "hash": self.hash})


class AuditLog:
    """The log of one party.

    Args:
        path: The file, made if missing, in an existing folder; None: nothing is kept.
        clock: Seconds since the epoch.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return self._path is not None

    def record(self, *facts: Fact) -> None:
        """Add a line for each fact, in one write; they are durable when this returns.

        Raises:
            StorageError: the disk refuses.
            AuditLogError: the file is not an audit log.
        """
        path = self._path
        if path is None or not facts:
            return
        with on_disk(path):
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                last = _last(file, path)
                number, previous = (0, FIRST) if last is None else (last.number, bytes.fromhex(last.hash))
                at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
                lines = []
                for fact in facts:
                    short = replace(fact, detail=fact.detail[:_LONGEST])
                    line = Line.after(previous, number := number + 1, at, short)
                    previous = bytes.fromhex(line.hash)
                    lines.append(line.text() + "\n")
                file.write("".join(lines).encode())
                file.flush()
                sync(file.fileno())
            if last is None:
                sync_folders(path.parent, path.parent)


NO_AUDIT_LOG: Final = AuditLog(None)
"""Keeps nothing."""


def read_lines(path: Path, noted: str = "") -> tuple[Line, ...]:
    """The lines of a log, after a check of its chain.

    Args:
        path: The file.
        noted: A head in hex that was noted elsewhere: a line must have this hash.

    Raises:
        AuditLogError: a line does not follow from the one before it, names the first one; or none has the noted hash.
        OSError: it cannot be read.
    """
    found: list[Line] = []
    head = FIRST
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n"):
                _log.warning("%s: its last line is torn, and is left out", path)
                break
            line = _parsed(data)
            if line is None or Line.after(head, number, line.at, line.fact) != line:
                raise AuditLogError(
                    f"{path}: line {number}",
                    expected="a line that follows from the one before it: it or that one was changed, removed or moved",
                    fix="trust the lines before it alone, and restore the file from a backup",
                )
            found.append(line)
            head = bytes.fromhex(line.hash)
    if noted and noted.strip().lower() not in {line.hash for line in found}:
        raise AuditLogError(
            f"{path}: head",
            head.hex(),
            expected=f"the noted head {noted.strip()} among its {len(found)} lines",
            fix="lines were removed or rewritten, or the head is of another log",
        )
    return tuple(found)


def line_of(path: Path, number: int = 0) -> Line | None:
    """A line of a log, found by bisection; None where the log has no such line. The chain is not checked.

    It takes no lock, because the file only grows: who asks for old lines keeps nobody from writing.

    Args:
        path: The file.
        number: Position of the line, from 1; 0: the last one.

    Raises:
        AuditLogError: a line that is read is not that of an audit log.
        StorageError: it cannot be read.
    """
    if not path.exists():
        return None
    with on_disk(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _TAIL))
        end = start + file.read().rfind(b"\n") + 1  # what follows the last newline is torn
        begin = 0  # the line lies in [begin, end), which whole lines fill
        while begin < end:
            middle = (begin + end) // 2
            start = file.seek(max(begin, middle - _TAIL))
            start += file.read(middle - start).rfind(b"\n") + 1
            file.seek(start)
            data = file.readline(_TAIL)
            line = _parsed(data)
            if line is None:
                raise AuditLogError(str(path), expected=f"an audit log: the line at byte {start} is none")
            if line.number == number or (not number and start + len(data) == end):
                return line
            begin, end = (start + len(data), end) if not number or line.number < number else (begin, start)
    return None


def facts_of(path: Path, run: str) -> Iterator[Fact]:
    """What a log tells of a run, oldest first; nothing where there is no log. The chain is not checked.

    Args:
        path: The file.
        run: Identity of the run.
    """
    wanted = run.encode()
    if path.exists():
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            for data in file:
                line = _parsed(data) if wanted in data else None
                if line is not None and line.fact.run == run:
                    yield line.fact


def _last(file: IO[bytes], path: Path) -> Line | None:
    """The last line of a file, of which a torn one is removed; None if it has none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    tail = file.read()
    whole = tail[: tail.rfind(b"\n") + 1]
    line = _parsed(whole[whole.rfind(b"\n", 0, -1) + 1 :])
    if line is None and (whole or size > _TAIL):
        raise AuditLogError(
            str(path),
            expected="an audit log, whose last line is whole",
            fix="move the file away, and keep it",
        )
    if len(whole) < len(tail):
        _log.warning("%s: its last line is torn, and is removed", path)
        file.truncate(size - len(tail) + len(whole))
    return line


def _parsed(data: bytes) -> Line | None:
    """The line of a file; None if it is not exactly as a line is written."""
    try:
        fields: dict[str, Any] = json.loads(data)
        number, at, hash_ = fields.pop("number"), fields.pop("at"), fields.pop("hash")
        line = Line(number, at, Fact(**fields), hash_)
        typed = [type(value) for value in (number, at, *asdict(line.fact).values())] == _TYPES
        sound = (
            typed and min(number, line.fact.round, line.fact.attempt) >= 0 and len(bytes.fromhex(hash_)) == 32
        )
        return line if sound and data == line.text().encode() + b"\n" else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def in_words(lines: tuple[Line, ...]) -> Iterator[str]:
    """Each line for a person."""
    for line in lines:
        fact = line.fact
        where = f"round {fact.round}" + (f", attempt {fact.attempt}" if fact.attempt else "")
        who = f"{fact.what:<8}  {fact.site or 'coordinator'}  {where}  run {fact.run[:12]}  plan {fact.plan[:12]}"
        detail = f"  {fact.detail}" if fact.detail else ""
        yield visible(f"{line.number:>6}  {line.at}  {who}{detail}")
