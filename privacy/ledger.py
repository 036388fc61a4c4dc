"""The ledger: the durable list of every release that was paid for, which refuses what the budget does not allow.

A release is charged first and made second. `Ledger.charge` composes the new charge with everything that its dataset
has paid in any run, and returns only when the entry is on disk; so a crash can leave a charge without its release, and
never a release without its charge. Each party keeps a ledger of its own: one SQLite file.

The entries form a hash chain: the hash of each is SHA-256 over the canonical encoding of the hash before it and of all
its fields (Haber and Stornetta 1991, "How to time-stamp a digital document"). What the chain shows, and what not:

- An entry that was changed, taken out, put in or moved is found and named, as long as the hashes after it were not made
  anew.
- Whoever can write the file can make every hash anew, or cut entries off its end, or put an older copy or no file in
  its place: a chain alone cannot show that. A head that was noted elsewhere (a report holds one) does: as long as an
  entry still has that hash, everything up to it is as it was. What came after the noted head stays unprotected.
- A ledger that is gone starts again at nothing. Nothing here can tell a site that has spent before from a new one.

A rollback journal with `synchronous = EXTRA` is used, and no write-ahead log: the journal and its folder are on disk
before the file is changed, the file before the journal is removed, and the folder once more before a commit returns
(sqlite.org/pragma.html, `synchronous`), so a charge outlives a power cut right after it, where the disk keeps what
it said it had synced. And the ledger is at rest one file, which can be copied and read anywhere; of a write-ahead log a
copy may miss the newest entries. It costs a few syncs for each charge, and there are few charges.

Refused: a connection that stays open (SQLite's must not be carried through a fork), and signed entries (they show who
wrote an entry and not that none is missing; a signed report with the head in it shows both).
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from cloister.protocol.encoding import pack
from cloister.protocol.errors import BudgetError, LedgerError, StorageError

Compose: TypeAlias = Callable[[Sequence[str], float], float]
"""Accounting events, each as JSON, and delta -> epsilon of all of them together."""

FORMAT = "cloister-ledger-1"
"""What the hash of an entry starts with."""
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

# What the system refuses; of anything else the file is to blame.
_STORAGE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What a release costs, before it is made.

    Raises:
        ValueError: a field is out of its range.
    """

    id: str
    """Names the release, once in a ledger: charging it again after a crash adds nothing."""
    dataset: str
    """The data that pays. What was spent on it is composed over all runs."""
    run: str
    """The run that releases."""
    round: int
    """Its round, 0 or more."""
    attempt: int
    """The attempt at that round, 0 or more."""
    what: str
    """What is released, in words, such as `update`."""
    event: str
    """The accounting events of the release, as canonical JSON."""
    delta: float
    """Delta of the plan that is charged, between 0 and 1."""

    def __post_init__(self) -> None:
        for name in ("id", "dataset", "run", "what", "event"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a charge is empty")
        for name in ("round", "attempt"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} of a charge is {getattr(self, name)}: expected 0 to 2^63 - 1")
        _check_delta(self.delta)


@dataclass(frozen=True)
class Budget:
    """How much may be spent on a dataset.

    Raises:
        ValueError: epsilon is negative or no number, or delta is not between 0 and 1.
    """

    epsilon: float
    """Largest epsilon over everything that the dataset has paid, the new charge among it."""
    delta: float
    """The delta at which that epsilon is composed."""

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon of a budget is {self.epsilon}: expected 0 or more")
        _check_delta(self.delta)


@dataclass(frozen=True)
class Entry:
    """A charge that is on disk."""

    number: int
    """Place in the ledger, from 1 on."""
    time: float
    """When it was charged: seconds since the epoch, by the clock of the ledger's owner."""
    owner: str
    """Whose ledger it is."""
    charge: Charge
    """What was charged."""
    hash: bytes
    """Its link in the chain, 32 bytes."""


@dataclass(frozen=True)
class Verified:
    """What a chain that holds comes to: worth noting elsewhere."""

    entries: int
    """Number of entries."""
    head: str
    """Hash of the last of them, in hex; 64 zeros where there is none."""


def link(previous: bytes, number: int, time_s: float, owner: str, charge: Charge) -> bytes:
    """The hash of an entry: SHA-256 over `pack("cloister-ledger-1", previous, ...)` of all its fields.

    Args:
        previous: Hash of the entry before, 32 bytes; `FIRST` before the first.
        number: Its place.
        time_s: Seconds since the epoch. Like delta it is hashed as `float.hex`, which is exact.
        owner: Whose ledger it is.
        charge: What was charged.
    """
    fields = (charge.id, charge.dataset, charge.run, charge.round, charge.attempt, charge.what, charge.event)
    packed = pack(FORMAT, previous, number, time_s.hex(), owner, *fields, charge.delta.hex())
    return hashlib.sha256(packed).digest()


@dataclass(frozen=True)
class History:
    """The entries of a ledger, oldest first. Build it with `of`, which checks the chain."""

    entries: tuple[Entry, ...]
    """Every entry."""
    origin: str = "ledger"
    """Where they were read, for messages."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]], origin: str = "ledger") -> History:
        """Check the rows of a ledger, each (number, time, owner, id, dataset, ..., delta, hash).

        Raises:
            LedgerError: the first entry that does not fit to those before it.
        """
        entries: list[Entry] = []
        head = FIRST
        for expected, row in enumerate(rows, 1):
            place = f"{origin}: entry {expected}"
            if [type(value) for value in row] != _TYPES:
                raise _altered(place, "fields of the types that a ledger writes")
            number, time_s, owner, id_, dataset, run, round_number, attempt, what, event, delta, found = row
            if number != expected:
                raise _altered(place, f"it to be there, and the next one is entry {number}")
            try:
                charge = Charge(
                    id=id_,
                    dataset=dataset,
                    run=run,
                    round=round_number,
                    attempt=attempt,
                    what=what,
                    event=event,
                    delta=delta,
                )
            except ValueError as error:
                raise _altered(place, f"a charge that could be made ({error})") from error
            head = link(head, number, time_s, owner, charge)
            if head != found:
                raise _altered(place, "the hash of its fields and of the entry before it")
            entries.append(Entry(number, time_s, owner, charge, head))
        return cls(tuple(entries), origin)

    @property
    def head(self) -> bytes:
        """Hash of the last entry, 32 bytes; `FIRST` where there is none."""
        return self.entries[-1].hash if self.entries else FIRST

    def verified(self, noted: str | None = None) -> Verified:
        """What the chain comes to, if it still holds a head that was noted earlier.

        Args:
            noted: A head in hex. Some entry must have this hash: then that entry and all before it are those of the
                moment at which it was noted, and none of them was cut off. Later entries may follow.

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
                fix="entries were cut off or made anew, or the head is of another ledger: trust no figure of this one",
            )
        return Verified(len(self.entries), head)

    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets that have paid, sorted."""
        return tuple(sorted({entry.charge.dataset for entry in self.entries}))

    def find(self, charge: Charge) -> Entry | None:
        """The entry of a charge that was made before, or None.

        Raises:
            LedgerError: its id was charged with other content.
        """
        entry = self._by_id.get(charge.id)
        if entry is not None and entry.charge != charge:
            raise LedgerError(
                f"{self.origin}: charge",
                charge.id,
                expected=f"what entry {entry.number} holds under that id, and this is something else",
                fix="give each release an id of its own",
            )
        return entry

    @cached_property
    def _by_id(self) -> dict[str, Entry]:
        return {entry.charge.id: entry for entry in self.entries}

    def events(self, dataset: str, more: Iterable[Charge] = ()) -> list[str]:
        """The accounting events of everything that `dataset` has paid, and of the charges `more` once they are made."""
        paid = [entry.charge.event for entry in self.entries if entry.charge.dataset == dataset]
        return paid + [charge.event for charge in dict.fromkeys(more) if self.find(charge) is None]


class Ledger:
    """The ledger of one party.

    Each call opens the file, checks the whole chain, and closes it again: nothing is computed from entries that do not
    fit, and between calls there is nothing open that a fork would share. Several processes may charge at once; their
    charges take turns.

    Args:
        path: The SQLite file, made when it is not there, in a folder that is. A ledger that was lost is made anew and
            knows of no spending: keep it where it is backed up.
        owner: Whose ledger it is: the site's name, or `coordinator`.
        compose: Events and delta -> epsilon.
        clock: Seconds since the epoch, for the time stamps.
        patience_s: Seconds to wait for other processes that are charging.

    Raises:
        LedgerError: the file is no ledger, is damaged or altered, or another's.
        StorageError: it cannot be opened or written, or other processes keep it too long.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        compose: Compose,
        *,
        clock: Callable[[], float] = time.time,
        patience_s: float = 60.0,
    ) -> None:
        self.path = path
        self.owner = owner
        self._compose = compose
        self._clock = clock
        self._patience_s = patience_s
        with _open(path, "rwc", patience_s) as db, _commit(db):
            if not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA:
                    db.execute(statement)
            self._own(_read(db, path))

    def charge(
        self,
        charge: Charge,
        budget: Budget | None,
        check: Callable[[tuple[Entry, ...]], None] = lambda _entries: None,
    ) -> Entry:
        """Pay for a release; only when this has returned may the release be made. As `charge_all`, for one charge."""
        return self.charge_all([charge], budget, check)[0]

    def charge_all(
        self,
        charges: Sequence[Charge],
        budget: Budget | None,
        check: Callable[[tuple[Entry, ...]], None] = lambda _entries: None,
    ) -> tuple[Entry, ...]:
        """Pay for releases, all of them or none; only when this has returned may they be made.

        In one transaction that excludes every other charge: the ledger is read and checked, the epsilon of each dataset
        with its new charge is composed, and the entries are added and synced to disk. Events are composed also without
        a budget, because an entry that cannot be composed could never be taken out again.

        Args:
            charges: What is to be paid. The same charge again gives its first entry, and adds nothing.
            budget: The most that each dataset may have paid afterwards; None: no limit.
            check: Given the entries that are there, in the transaction; what it raises ends it, and nothing was added.

        Returns:
            The entries that are on disk, in the order of the charges.

        Raises:
            BudgetError: epsilon would exceed the budget; nothing was added.
            LedgerError: the ledger is damaged or altered, or an id was charged with other content.
            StorageError: the disk refuses the write, or other processes keep the ledger too long. The charges are then
                on disk wholly or not at all, and charging them again is safe.
        """
        with _open(self.path, "rw", self._patience_s) as db, _commit(db):
            history = self._own(_read(db, self.path))
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
        if budget is not None and not epsilon <= budget.epsilon:  # so that NaN is refused, too
            raise BudgetError(
                f"epsilon of {charge.dataset} with {charge.what} of round {charge.round} of {charge.run}",
                epsilon,
                expected=f"at most the budget of {budget.epsilon!r} at delta {budget.delta!r}",
                fix="nothing was released or charged: end the run with the model it has; only whoever answers for "
                "the data can raise the budget",
            )

    def would_spend(self, charges: Sequence[Charge], delta: float | None = None) -> float:
        """Epsilon of a dataset if these charges were made too: a run can end cleanly before a round it cannot pay for.

        Nothing is reserved: another process may charge in between, and then `charge` refuses.

        Args:
            charges: At least one, all of one dataset. Those that are in the ledger already count once.
            delta: The delta to compose at; None: the smallest that the charges name.

        Raises:
            LedgerError: the ledger is damaged or altered, or an id was charged with other content.
            StorageError: it cannot be read.
        """
        datasets = {charge.dataset for charge in charges}
        if len(datasets) != 1:
            raise ValueError(f"charges of {len(datasets)} datasets: expected one dataset")
        at = min(charge.delta for charge in charges) if delta is None else delta
        return self._compose(self._history().events(datasets.pop(), charges), at)

    def spent(self, dataset: str, delta: float) -> float:
        """Epsilon at `delta` of everything that `dataset` has paid, over all runs in this ledger; 0 for nothing.

        Raises:
            LedgerError: the ledger is damaged or altered.
            StorageError: it cannot be read.
        """
        events = self._history().events(dataset)
        return self._compose(events, delta) if events else 0.0

    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets that have paid, sorted; errors as `spent`."""
        return self._history().datasets()

    def entries(self, run: str | None = None) -> tuple[Entry, ...]:
        """Every entry, or those of one run, oldest first; errors as `spent`."""
        return tuple(entry for entry in self._history().entries if run in (None, entry.charge.run))

    def verify(self, noted: str | None = None) -> Verified:
        """Check the chain, and that it holds a head that was noted earlier; see `History.verified`.

        Without a noted head this cannot see that entries were cut off the end, nor a chain that was made anew.

        Raises:
            LedgerError: the first entry that does not fit, or the noted head is not there.
            StorageError: the file cannot be read.
        """
        return self._history().verified(noted)

    def _history(self) -> History:
        return self._own(read_history(self.path, self._patience_s))

    def _own(self, history: History) -> History:
        for entry in history.entries:
            if entry.owner != self.owner:
                raise LedgerError(
                    str(self.path), f"the ledger of {entry.owner}", expected=f"the ledger of {self.owner}"
                )
        return history


def read_history(path: Path, patience_s: float = 60.0) -> History:
    """Read a ledger without its owner, and check its chain.

    Args:
        path: The SQLite file.
        patience_s: Seconds to wait for processes that are charging.

    Raises:
        LedgerError: the file is no ledger, or is damaged or altered: the first entry that does not fit.
        StorageError: it cannot be read.
    """
    with _open(path, "rw", patience_s) as db:
        return _read(db, path)


def _read(db: sqlite3.Connection, path: Path) -> History:
    rows = db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY number").fetchall()
    history = History.of(rows, str(path))
    schema = {row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if schema != set(_SCHEMA):
        raise _altered(str(path), "the table and the guards that a ledger is made with")
    return history


def _append(db: sqlite3.Connection, entry: Entry) -> None:
    c = entry.charge
    fields = (c.id, c.dataset, c.run, c.round, c.attempt, c.what, c.event, c.delta)
    row = (entry.number, entry.time, entry.owner, *fields, entry.hash)
    db.execute(f"INSERT INTO entries ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)


@contextmanager
def _open(path: Path, mode: str, patience_s: float) -> Iterator[sqlite3.Connection]:
    """A connection for one call; `mode` is SQLite's: `rw` makes no file. Closing it undoes what was not committed."""
    try:
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(uri, timeout=patience_s, isolation_level=None, uri=True)) as db:
            db.execute("PRAGMA synchronous = EXTRA")
            yield db
    except sqlite3.Error as error:
        # Without a code it is Python's own, such as of text that is not UTF-8.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _BUSY:
            raise StorageError(
                str(path),
                expected=f"the ledger to be free within {patience_s:g} s, and other processes hold it ({error})",
                fix="nothing was added; see what holds it, then try again",
            ) from error
        if code in _STORAGE:
            raise StorageError(
                str(path),
                expected=f"a disk and a folder that take the ledger ({error})",
                fix="no entry is lost or half written; free space or mend permissions, then try again",
            ) from error
        raise _altered(str(path), f"a whole ledger ({error})") from error


@contextmanager
def _commit(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that excludes other writers from its beginning on, and is on disk when it ends without an error."""
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _altered(place: str, expected: str) -> LedgerError:
    return LedgerError(
        place,
        expected=expected,
        fix="it was damaged or altered: trust no figure of this ledger, and restore it from a copy that verifies",
    )


def _check_delta(delta: float) -> None:
    if not (math.isfinite(delta) and 0 < delta < 1):
        raise ValueError(f"delta is {delta}: expected more than 0 and less than 1")
