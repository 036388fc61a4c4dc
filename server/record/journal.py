"""The coordinator's journal: a durable SQLite list of the steps begun and done, which survives a crash.

Each step of each attempt is recorded before its effect. The journal is append-only and authoritative: when a run is
resumed, checkpoints, metrics and reports are brought into line with it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister.protocol.errors import RunFolderError, StorageError
from cloister.protocol.machine.closing import Closing

DIVIDED = "divided"
"""Suffix of a purpose: the groups of a round in clear."""
CREATED = "created"
"""The run has its identity."""
STARTED = "started"
"""A process of the coordinator begins to ask sites; the number of that start, from 1."""
NOISE = "noise"
"""The key of the noise that a trusted coordinator adds is on disk."""
BEGUN = "begun"
"""Suffix of a purpose: an attempt at a sum is about to ask these sites, and so many are needed; and what features tell
them of more than the last checkpoint. It is under way until it has failed or the round is done."""
UNMASKING = "unmasking"
"""Suffix of a purpose: these survivors are about to be asked for shares."""
OPENING = "opening"
"""Suffix of a purpose: the sum in clear of these survivors is about to be opened."""
MEASURED = "measured"
"""A sum was opened; what the times of its sites say, by feature."""
FAILED = "failed"
"""Suffix of a purpose: an attempt at a sum ended with too few sites; and which of them are to blame."""
SPOILED = "spoiled"
"""Suffix of a purpose: the sum of these sites was opened, and honest sites cannot have it; and why. It is not opened
again."""
TRACED = "traced"
"""The cohort of a round is divided into groups that trace a site that has lied."""
REFUSED = "refused"
"""A site refused a request, because of its own policy or budget."""
COMPLAINED = "complained"
"""Sites could not open the shares of others in a secure sum: at least one of each two lies."""
LEFT_OUT = "left out"
"""A site lied in a secure sum, and is asked for no other."""
DONE = "done"
"""A round is done, and its checkpoint is on disk; round 0 is the initial model."""
FINISHED = "finished"
"""The last round is done, and the final model is on disk."""


def of_sum(purpose: str, step: str, group: int = 0) -> str:
    """The name of a step of a sum: the purpose, the step, and the number of a group after the first."""
    return f"{purpose} {step} {group + 1}" if group else f"{purpose} {step}"


def group_of_sum(step: str) -> int:
    """The number of the group, from 1, that a name of `of_sum` has."""
    last = step.split()[-1]
    return int(last) if last.isdecimal() else 1


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    round: int
    attempt: int
    step: str
    detail: dict[str, Any]


class Journal(Closing):
    """An open journal; use it as a context manager.

    The constructor and every method raise `RunFolderError` if the file is not a journal or is damaged.

    Args:
        path: The SQLite file; created if missing.
        clock: Seconds since the epoch, for the time stamps.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        with self._readable():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, time REAL NOT NULL,"
                " round INTEGER NOT NULL, attempt INTEGER NOT NULL, step TEXT NOT NULL, detail TEXT NOT NULL)"
            )

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def record(
        self, round_number: int, attempt: int, step: str, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Add an entry; it is durable on disk when this returns.

        Raises:
            StorageError: the disk is full; the journal is unchanged.
        """
        text = json.dumps(dict(detail or {}), sort_keys=True)
        with self._readable():
            try:
                self._db.execute(
                    "INSERT INTO entries (time, round, attempt, step, detail) VALUES (?, ?, ?, ?, ?)",
                    (self._clock(), round_number, attempt, step, text),
                )
            except sqlite3.OperationalError as error:
                raise StorageError(
                    str(self._path),
                    expected=f"a disk that accepts the write ({error})",
                    fix="free space, then continue the run",
                ) from error

    def entries(self) -> list[Entry]:
        """Everything recorded, oldest first."""
        with self._readable():
            rows = self._db.execute("SELECT round, attempt, step, detail FROM entries ORDER BY id")
            return [Entry(row[0], row[1], row[2], json.loads(row[3])) for row in rows]

    def newest(self, step: str, round_number: int | None = None) -> Entry | None:
        """The newest entry of a step, in any round or in one."""
        query = "SELECT round, attempt, step, detail FROM entries WHERE step = ? AND (? IS NULL OR round = ?)"
        with self._readable():
            row = self._db.execute(
                f"{query} ORDER BY id DESC LIMIT 1", (step, round_number, round_number)
            ).fetchone()
            return Entry(row[0], row[1], row[2], json.loads(row[3])) if row else None

    def of(self, step: str, round_number: int | None = None) -> list[Entry]:
        """The entries of a step, in any round or in one, oldest first; with those of all groups of a sum's step."""
        query = "SELECT round, attempt, step, detail FROM entries WHERE (step = ? OR step LIKE ?)"
        with self._readable():
            rows = self._db.execute(
                f"{query} AND (? IS NULL OR round = ?) ORDER BY id",
                (step, f"{step} %", round_number, round_number),
            )
            return [Entry(row[0], row[1], row[2], json.loads(row[3])) for row in rows]

    def count(self, step: str, round_number: int) -> int:
        """Number of times a step was recorded for a round, in this process or an earlier one."""
        query = "SELECT COUNT(*) FROM entries WHERE round = ? AND step = ?"
        with self._readable():
            return int(self._db.execute(query, (round_number, step)).fetchone()[0])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
            # An OperationalError comes from the system, such as a full disk: the file may be undamaged.
            damaged = not isinstance(error, sqlite3.OperationalError)
            raise RunFolderError(
                str(self._path),
                expected=f"a journal that SQLite can open and read ({error})",
                fix="restore it from a backup, or start a new run" if damaged else "",
            ) from error
