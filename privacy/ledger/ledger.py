"""The ledger: a durable list of all charges, which refuses a charge that would exceed the budget.

A release is charged before it is made. `Ledger.charge` composes the new charge with all charges of its dataset in any
run, and returns only when the entry is durable on disk. So a crash can leave a charge without its release, but never a
release without its charge. Each party keeps its own ledger: one SQLite file.

The entries form a hash chain: the hash of each is SHA-256 over the canonical encoding of the hash before it and of all
its fields (Haber and Stornetta 1991, "How to time-stamp a digital document"). What the chain detects and what it does
not detect:

- An entry that was changed, removed, inserted or moved is detected and named, unless the hashes after it were
  recomputed.
- A party that can write the file can recompute every hash, remove entries from the end, or replace the file by an older
  copy or by none. The chain alone cannot detect that. A head that was noted elsewhere (a report contains one) can: if
  an entry still has that hash, every entry up to it is unchanged. Entries after the noted head stay unprotected.
- A lost ledger starts again with no spending. Nothing here can distinguish a site that has spent before from a new one.

SQLite uses a rollback journal with `synchronous = EXTRA`, not a write-ahead log: the journal and its folder are synced
(fsync) before the file is changed, the file before the journal is removed, and the folder again before a commit returns
(sqlite.org/pragma.html, `synchronous`). So a charge survives a power cut right after it, if the disk keeps the data
that it reported as synced. At rest the ledger is one file, which can be copied and read anywhere; a copy of a database
with a write-ahead log may miss the newest entries. The cost is a few fsyncs for each charge, and there are few charges.

Refused: a connection that stays open (an SQLite connection must not be carried across a fork), and signed entries (they
show who wrote an entry, but not that none is missing; a signed report that contains the head shows both).
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self, TypeAlias

from cloister.protocol.encoding import pack
from cloister.protocol.errors import BudgetError, LedgerError, StorageError
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose

Compose: TypeAlias = Callable[[Sequence[str], float], float]
"""From accounting events, each as JSON, and delta to the epsilon of their composition."""

FORMAT = "cloister-ledger-1"
"""First field of the hashed encoding of an entry."""
FIRST = bytes(32)
"""The hash before the first entry: the head of an empty ledger."""

_SCHEMA = (
    (
        "CREATE TABLE entries (number INTEGER PRIMARY KEY, time REAL NOT NULL, owner TEXT NOT NULL,"
        " id TEXT NOT NULL UNIQUE, dataset TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL,"
        " attempt INTEGER NOT NULL, what TEXT NOT NULL, event TEXT NOT NULL, delta REAL NOT NULL, hash BLOB NOT NULL)"
    ),
    (
        "CREATE TRIGGER entries_are_not_changed BEFORE UPDATE ON entries"
        " BEGIN SELECT RAISE(ABORT, 'an entry is never changed'); END"
    ),
    (
        "CREATE TRIGGER entries_are_not_removed BEFORE DELETE ON entries"
        " BEGIN SELECT RAISE(ABORT, 'an entry is never removed'); END"
    ),
    # INSERT OR REPLACE removes a row without the trigger above, unless recursive triggers are on.
    (
        "CREATE TRIGGER entries_are_added_last BEFORE INSERT ON entries"
        " WHEN NEW.number IS NOT (SELECT COALESCE(MAX(number), 0) + 1 FROM entries)"
        " OR EXISTS (SELECT 1 FROM entries WHERE id = NEW.id)"
        " BEGIN SELECT RAISE(ABORT, 'an entry is only added after the last'); END"
    ),
)
_COLUMNS = "number, time, owner, id, dataset, run, round, attempt, what, event, delta, hash"
_TYPES = [int, float, str, str, str, str, int, int, str, str, float, bytes]

# Errors of the operating system or the disk; any other error means that the file is damaged.
_STORAGE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
PATIENCE_S = 60.0
"""Timeout in seconds for other processes that are charging."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The cost of a release, to be charged before the release is made.

    Raises:
        ValueError: a field is out of its range.
    """

    id: str
    """Identifies the release in a ledger. Charging is idempotent: a retry after a crash adds nothing."""
    dataset: str
    """The dataset that is charged. Its charges are composed over all runs."""
    run: str
    """The run that releases."""
    round: int
    """Its round, 0 or more."""
    attempt: int
    """The attempt at that round, 0 or more."""
    what: str
    """The kind of release, such as `update`."""
    event: str
    """The accounting events of the release, as canonical JSON."""
    delta: float
    """Delta of the charged plan, between 0 and 1."""

    @property
    def purpose(self) -> Purpose:
        """Of the sum that the release is for, by its `release_id`."""
        return EVALUATE if self.id.startswith(release_id(self.run, EVALUATE)) else TRAIN

    def __post_init__(self) -> None:
        for name in ("id", "dataset", "run", "what", "event"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a charge is empty")
        for name in ("round", "attempt"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} of a charge is {getattr(self, name)}: expected 0 to 2^63 - 1")
        _check_delta(self.delta)


def release_id(run: str, purpose: Purpose, *parts: object) -> str:
    """The id of a charge for a sum of one purpose: a round of training begins with its number.

    Args:
        run: Identity of the run.
        purpose: `train` or `evaluate`.
        parts: The round, and what else tells the release from others.
    """
    of = (EVALUATE,) if purpose == EVALUATE else ()
    return "/".join((run, *of, "")) + "/".join(map(str, parts))


@dataclass(frozen=True)
class Budget:
    """The limit on the charges of a dataset.

    Raises:
        ValueError: epsilon is negative or NaN, or delta is not between 0 and 1.
    """

    epsilon: float
    """Maximum epsilon of all charges of the dataset together, including the new one."""
    delta: float
    """The delta at which that epsilon is composed. If mechanisms differ, the limit holds at twice this delta."""

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon of a budget is {self.epsilon}: expected 0 or more")
        _check_delta(self.delta)


@dataclass(frozen=True)
class Entry:
    """A charge that is on disk."""

    number: int
    """Position in the ledger, from 1."""
    time: float
    """Time of the charge: seconds since the epoch, by the clock of the ledger's owner."""
    owner: str
    """Owner of the ledger."""
    charge: Charge
    """The charge."""
    hash: bytes
    """Hash of this entry in the chain, 32 bytes."""


@dataclass(frozen=True)
class Verified:
    """The result of a verified chain; note its head elsewhere."""

    entries: int
    """Number of entries."""
    head: str
    """Hash of the last entry, in hex; 64 zeros in an empty ledger."""


def link(previous: bytes, number: int, time_s: float, owner: str, charge: Charge) -> bytes:
    """The hash of an entry: SHA-256 over `pack("cloister-ledger-1", previous, ...)` of all its fields.

    Args:
        previous: Hash of the entry before, 32 bytes; `FIRST` before the first.
        number: Its position, from 1.
        time_s: Seconds since the epoch. Like delta it is hashed as `float.hex`, which is exact.
        owner: Owner of the ledger.
        charge: The charge.
    """
    fields = (charge.id, charge.dataset, charge.run, charge.round, charge.attempt, charge.what, charge.event)
    packed = pack(FORMAT, previous, number, time_s.hex(), owner, *fields, charge.delta.hex())
    return hashlib.sha256(packed).digest()


@lru_cache(maxsize=4096)
def _entry(previous: bytes, row: tuple[Any, ...]) -> Entry:
    """The entry of a row without its hash, after the entry with the hash `previous`.

    Cached, because each call of a ledger verifies the whole chain.

    Raises:
        ValueError: a field is out of its range.
    """
    number, time_s, owner, *charged = row
    charge = Charge(**dict(zip(Charge.__dataclass_fields__, charged, strict=True)))
    return Entry(number, time_s, owner, charge, link(previous, number, time_s, owner, charge))


@dataclass(frozen=True)
class History:
    """The entries of a ledger, oldest first. Build it with `of`, which checks the chain."""

    entries: tuple[Entry, ...]
    """Every entry."""
    origin: str = "ledger"
    """Where the entries were read from, for error messages."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]], origin: str = "ledger") -> History:
        """Verify the rows of a ledger, each (number, time, owner, id, dataset, ..., delta, hash).

        Raises:
            LedgerError: an entry does not follow from those before it; names the first one.
        """
        entries: list[Entry] = []
        head = FIRST
        for expected, row in enumerate(rows, 1):
            place = f"{origin}: entry {expected}"
            if [type(value) for value in row] != _TYPES:
                raise _altered(place, "fields of the types that a ledger writes")
            if row[0] != expected:
                raise _altered(place, f"this entry at its position, but the next one is entry {row[0]}")
            try:
                entry = _entry(head, tuple(row[:-1]))
            except ValueError as error:
                raise _altered(place, f"a valid charge ({error})") from error
            head = entry.hash
            if head != row[-1]:
                raise _altered(place, "a hash that matches its fields and the entry before it")
            entries.append(entry)
        return cls(tuple(entries), origin)

    @property
    def head(self) -> bytes:
        """Hash of the last entry, 32 bytes; `FIRST` in an empty ledger."""
        return self.entries[-1].hash if self.entries else FIRST

    def of_owner(self, owner: str) -> Self:
        """This history.

        Raises:
            LedgerError: an entry has another owner.
        """
        for entry in self.entries:
            if entry.owner != owner:
                raise LedgerError(
                    self.origin, f"the ledger of {entry.owner}", expected=f"the ledger of {owner}"
                )
        return self

    def verified(self, noted: str | None = None) -> Verified:
        """Number of entries and head of the chain, if the chain contains a head that was noted earlier.

        Args:
            noted: A head in hex. Some entry must have this hash: then that entry and all before it are the same as when
                the head was noted, and none of them was removed. Later entries may follow.

        Raises:
            LedgerError: no entry has the noted hash.
        """
        head = self.head.hex()
        known = {FIRST.hex(), *(entry.hash.hex() for entry in self.entries)}
        if noted is not None and noted.strip().lower() not in known:
            raise LedgerError(
                f"{self.origin}: head",
                head,
                expected=f"the noted head {noted.strip()} among its {len(self.entries)} entries",
                fix="entries were removed or rewritten, or the head is of another ledger: trust no figure of this one",
            )
        return Verified(len(self.entries), head)

    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets with charges, sorted."""
        return tuple(sorted({entry.charge.dataset for entry in self.entries}))

    def find(self, charge: Charge) -> Entry | None:
        """The entry of a charge that is already in the ledger, or None.

        Raises:
            LedgerError: the id was charged with other content.
        """
        entry = self._by_id.get(charge.id)
        if entry is not None and entry.charge != charge:
            raise LedgerError(
                f"{self.origin}: charge",
                charge.id,
                expected=f"the content of entry {entry.number}, which has the same id",
                fix="use a unique id for each release",
            )
        return entry

    @cached_property
    def _by_id(self) -> dict[str, Entry]:
        return {entry.charge.id: entry for entry in self.entries}

    def events(self, dataset: str) -> list[str]:
        """The accounting events of all charges of `dataset`."""
        return [entry.charge.event for entry in self.entries if entry.charge.dataset == dataset]


class Ledger:
    """The ledger of one party.

    Each call opens the file, verifies the whole chain, and closes the file: no figure is computed from a broken chain,
    and between calls there is no open connection that a fork would share. Several processes may charge at the same
    time; their charges are serialised.

    Args:
        path: The SQLite file; created if missing, in an existing folder. A lost ledger is created again without its
            spending: keep it in a place with backups.
        owner: Owner of the ledger: the site's name, or `coordinator`.
        compose: From events and delta to epsilon.
        clock: Seconds since the epoch, for the time stamps.

    Raises:
        LedgerError: the file is not a ledger, is damaged or altered, or has another owner.
        StorageError: it cannot be opened or written, or other processes lock it beyond the timeout.
    """

    def __init__(
        self, path: Path, owner: str, compose: Compose, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.owner = owner
        self._compose = compose
        self._clock = clock
        with _open(path, "rwc") as db, _commit(db):
            if not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA:
                    db.execute(statement)
            _read(db, path).of_owner(owner)

    def charge(
        self,
        charge: Charge,
        budget: Budget | None,
        check: Callable[[tuple[Entry, ...]], None] = lambda _entries: None,
    ) -> Entry:
        """Charge one release; make it only after this has returned. As `charge_all`, for one charge."""
        return self.charge_all([charge], budget, check)[0]

    def charge_all(
        self,
        charges: Sequence[Charge],
        budget: Budget | None,
        check: Callable[[tuple[Entry, ...]], None] = lambda _entries: None,
    ) -> tuple[Entry, ...]:
        """Charge releases, all of them or none; make the releases only after this has returned.

        One transaction, which excludes every other charge, reads and verifies the ledger, composes the epsilon of each
        dataset with its new charge, adds the entries and syncs them to disk (fsync). Events are composed even without a
        budget, because an entry that cannot be composed could never be removed again.

        Args:
            charges: The charges. Idempotent: a charge that is already in the ledger gives its first entry and adds
                nothing.
            budget: The limit for each dataset including the new charges; None: no limit.
            check: Called with the existing entries, in the transaction; if it raises, nothing is added.

        Returns:
            The entries on disk, in the order of the charges.

        Raises:
            BudgetError: epsilon would exceed the budget; nothing was added.
            LedgerError: the ledger is damaged or altered, or an id was charged with other content.
            StorageError: the disk refuses the write, or other processes lock the ledger beyond the timeout. Then either
                all charges are on disk or none, and a retry is safe.
        """
        with _open(self.path, "rw") as db, _commit(db):
            history = _read(db, self.path).of_owner(self.owner)
            check(history.entries)
            events: dict[str, list[str]] = {}
            for entry in history.entries:
                events.setdefault(entry.charge.dataset, []).append(entry.charge.event)
            found: list[Entry] = []
            number, head = len(history.entries), history.head
            added: dict[str, Entry] = {}
            for charge in charges:
                known = history.find(charge) or added.get(charge.id)
                if known is not None:
                    if known.charge != charge:
                        raise ValueError(f"two charges with the id {charge.id}")
                    found.append(known)
                    continue
                paid = events.setdefault(charge.dataset, [])
                paid.append(charge.event)
                self._check_budget(charge, paid, budget)
                number, now = number + 1, float(self._clock())
                head = link(head, number, now, self.owner, charge)
                entry = Entry(number, now, self.owner, charge, head)
                _append(db, entry)
                added[charge.id] = entry
                found.append(entry)
        return tuple(found)

    def _check_budget(self, charge: Charge, paid: Sequence[str], budget: Budget | None) -> None:
        epsilon = self._compose(paid, charge.delta if budget is None else budget.delta)
        if budget is not None and not epsilon <= budget.epsilon:  # refuses NaN, too
            raise BudgetError(
                f"epsilon of {charge.dataset} with {charge.what} of round {charge.round} of {charge.run}",
                epsilon,
                expected=f"at most the budget of {budget.epsilon!r} at delta {budget.delta!r}",
                fix="nothing was released or charged: end the run with its current model; only the party responsible "
                "for the data can raise the budget",
            )

    def entries(self, run: str | None = None) -> tuple[Entry, ...]:
        """Every entry, or those of one run, oldest first.

        Raises:
            LedgerError: the ledger is damaged or altered.
            StorageError: it cannot be read.
        """
        history = read_history(self.path).of_owner(self.owner)
        return tuple(entry for entry in history.entries if run in (None, entry.charge.run))


def read_history(path: Path) -> History:
    """Read the ledger of any owner, and verify its chain.

    Args:
        path: The SQLite file.

    Raises:
        LedgerError: the file is not a ledger, or is damaged or altered; names the first entry that is wrong.
        StorageError: it cannot be read.
    """
    with _open(path, "rw") as db:
        return _read(db, path)


def _read(db: sqlite3.Connection, path: Path) -> History:
    rows = db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY number").fetchall()
    history = History.of(rows, str(path))
    schema = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if schema != set(_SCHEMA):
        raise _altered(str(path), "the table and the triggers that a ledger is created with")
    return history


def _append(db: sqlite3.Connection, entry: Entry) -> None:
    row = (entry.number, entry.time, entry.owner, *astuple(entry.charge), entry.hash)
    db.execute(f"INSERT INTO entries ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)


@contextmanager
def _open(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection for one call; mode `rw` creates no file. Closing it rolls back an open transaction."""
    try:
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(uri, timeout=PATIENCE_S, isolation_level=None, uri=True)) as db:
            db.execute("PRAGMA synchronous = EXTRA")
            yield db
    except sqlite3.Error as error:
        # An error without a code comes from Python's sqlite3, for example for text that is not UTF-8.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _BUSY:
            raise StorageError(
                str(path),
                expected=f"the ledger to be free within {PATIENCE_S:g} s, but other processes lock it ({error})",
                fix="nothing was added: find the process that locks the ledger, then retry",
            ) from error
        if code in _STORAGE:
            raise StorageError(
                str(path),
                expected=f"a disk and a folder on which the ledger can be read and written ({error})",
                fix="no entry is lost or half written: free space or fix the permissions, then retry",
            ) from error
        raise _altered(str(path), f"an undamaged ledger ({error})") from error


@contextmanager
def _commit(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that excludes other writers from its start; durable when it ends without an error."""
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _altered(place: str, expected: str) -> LedgerError:
    return LedgerError(
        place,
        expected=expected,
        fix="it was damaged or altered: trust no figure of this ledger, and restore it from a backup that verifies",
    )


def _check_delta(delta: float) -> None:
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ValueError(f"delta is {delta}: expected more than 0 and less than 1")
