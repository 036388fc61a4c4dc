"""The ledger: what it refuses, what its chain shows, and that no release is ever without its charge."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.privacy.ledger.ledger import (
    FIRST,
    Budget,
    Charge,
    Entry,
    History,
    Ledger,
    Verified,
    link,
    read_history,
)
from cloister.protocol.errors import BudgetError, LedgerError, StorageError
from cloister.tests.parties.federation import spent_on, verified
from cloister.tests.tools.raises import raises

DELTA = 1e-5


def added(events: Sequence[str], delta: float) -> float:
    """Basic composition, of events that are an epsilon each."""
    return math.fsum(json.loads(event) for event in events)


def charge(number: int = 1, epsilon: float = 1.0, **other: Any) -> Charge:
    fields: dict[str, Any] = {
        "id": f"run-a/{number}",
        "dataset": "ward",
        "run": "run-a",
        "round": number,
        "attempt": 1,
        "what": "update",
        "event": json.dumps(epsilon),
        "delta": DELTA,
    }
    return Charge(**fields | other)


def ticking() -> Callable[[], float]:
    times = iter(range(1_000_000, 2_000_000))
    return lambda: next(times) + 0.25


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path, "site-1", added, clock=ticking())


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, opened with plain SQLite."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield db


# What is charged


def test_a_charge_is_an_entry_with_owner_number_time_and_link(ledger: Ledger, path: Path) -> None:
    first, second = ledger.charge(charge(1), None), ledger.charge(charge(2), None)
    assert first == Entry(
        1, 1_000_000.25, "site-1", charge(1), link(FIRST, 1, 1_000_000.25, "site-1", charge(1))
    )
    assert (second.number, second.hash) == (2, link(first.hash, 2, 1_000_001.25, "site-1", charge(2)))
    assert ledger.entries() == (first, second) == Ledger(path, "site-1", added).entries()
    assert verified(ledger) == Verified(2, second.hash.hex())


def test_spending_is_composed_by_dataset_over_all_runs(ledger: Ledger) -> None:
    ledger.charge(charge(1, 0.5), None)
    ledger.charge(charge(2, 0.25, id="b", run="run-b"), None)
    ledger.charge(charge(3, 8.0, id="c", dataset="lab"), None)
    assert read_history(ledger.path).datasets() == ("lab", "ward")
    assert (
        spent_on(ledger, "ward", DELTA),
        spent_on(ledger, "lab", DELTA),
        spent_on(ledger, "new", DELTA),
    ) == (
        0.75,
        8,
        0,
    )
    assert [entry.charge.id for entry in ledger.entries("run-b")] == ["b"]


def test_the_delta_that_is_composed_at_is_the_budget_s_or_the_one_asked_for(path: Path) -> None:
    deltas: list[float] = []

    def compose(events: Sequence[str], delta: float) -> float:
        deltas.append(delta)
        return 0.0

    ledger = Ledger(path, "site-1", compose)
    ledger.charge(charge(1, delta=1e-6), Budget(1.0, 1e-7))
    ledger.charge(charge(2, delta=1e-6), None)
    spent_on(ledger, "ward", 1e-4)
    assert deltas == [1e-7, 1e-6, 1e-4]


def test_a_budget_can_be_used_up_and_not_exceeded(ledger: Ledger, path: Path) -> None:
    budget = Budget(2.0, DELTA)
    ledger.charge(charge(1, 1.5), budget)
    ledger.charge(charge(2, 0.5, id="b", run="run-b"), budget)
    before = path.read_bytes()
    with pytest.raises(BudgetError) as refused:
        ledger.charge(charge(3, 0.125), budget)
    assert "ward" in str(refused.value)
    assert "2.125" in str(refused.value)
    assert "at most the budget of 2.0 at delta 1e-05" in str(refused.value)
    assert path.read_bytes() == before
    ledger.charge(charge(3, 0.125, dataset="lab"), budget)  # another dataset pays for itself


@pytest.mark.parametrize("epsilon", [math.inf, math.nan])
def test_what_has_no_bound_is_within_no_budget(path: Path, epsilon: float) -> None:
    ledger = Ledger(path, "site-1", lambda events, delta: epsilon)
    with pytest.raises(BudgetError):
        ledger.charge(charge(), Budget(1e9, DELTA))
    assert ledger.entries() == ()


def test_an_event_that_cannot_be_composed_gets_in_with_no_budget_either(ledger: Ledger) -> None:
    with pytest.raises(json.JSONDecodeError):
        ledger.charge(charge(event="no event"), None)
    assert ledger.entries() == ()


def test_the_same_charge_again_adds_nothing_even_at_the_budget(ledger: Ledger, path: Path) -> None:
    budget = Budget(1.0, DELTA)
    first = ledger.charge(charge(), budget)
    before = path.read_bytes()
    assert ledger.charge(charge(), budget) == first
    assert Ledger(path, "site-1", added).charge(charge(), Budget(0.0, DELTA)) == first
    assert path.read_bytes() == before


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Charge) if field.name != "id"])
def test_the_same_id_with_other_content_is_refused(ledger: Ledger, field: str) -> None:
    ledger.charge(charge(), None)
    value = getattr(charge(), field)
    other: Any = value + "0" if isinstance(value, str) else value * 2
    changed = dataclasses.replace(charge(), **{field: other})
    with raises(LedgerError, "ledger.sqlite: charge", says=("'run-a/1'", "entry 1,")):
        ledger.charge(changed, None)
    assert len(ledger.entries()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"dataset": ""},
        {"event": ""},
        {"round": -1},
        {"attempt": 2**63},
        {"delta": 0.0},
        {"delta": math.nan},
    ],
)
def test_a_charge_out_of_range_cannot_be_made(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with raises(ValueError, name, f"{name} of a charge"):
        charge(**wrong)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, DELTA), (math.nan, DELTA), (1.0, 0.0), (1.0, 1.0)])
def test_a_budget_out_of_range_cannot_be_made(epsilon: float, delta: float) -> None:
    with raises(ValueError, "delta", "epsilon of a budget"):
        Budget(epsilon, delta)


def test_a_ledger_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "what? 100%25 #1 & ü.sqlite"
    monkeypatch.chdir(tmp_path)
    Ledger(Path(name), "site-1", added).charge(charge(), None)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert read_history(tmp_path / name).verified().entries == 1


def test_a_ledger_belongs_to_one_owner(ledger: Ledger, path: Path) -> None:
    ledger.charge(charge(), None)
    with raises(LedgerError, path, says="site-1"):
        Ledger(path, "site-2", added)


# The chain


def encoded(value: object) -> bytes:
    """The canonical encoding (protocol/encoding.py), written out a second time."""
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "big")
    if isinstance(value, str):
        return b"s" + len(value.encode()).to_bytes(8, "big") + value.encode()
    if isinstance(value, bytes):
        return b"b" + len(value).to_bytes(8, "big") + value
    assert isinstance(value, tuple)
    return b"t" + len(value).to_bytes(8, "big") + b"".join(encoded(item) for item in value)


def test_a_link_is_sha256_over_the_canonical_encoding_of_all_fields() -> None:
    fields: tuple[object, ...] = (
        "cloister-ledger-1",
        bytes(range(32)),
        7,
        "0x1.8000000000000p+0",
        "site-1",
        "run-a/3",
        "ward",
    )
    fields += ("run-a", 3, 1, "update", "0.5", "0x1.4f8b588e368f1p-17")
    found = link(bytes(range(32)), 7, 1.5, "site-1", charge(3, 0.5))
    assert found == hashlib.sha256(encoded(fields)).digest()


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
charges = st.lists(
    st.builds(
        Charge,
        id=texts,
        dataset=texts,
        run=texts,
        round=st.integers(0, 2**63 - 1),
        attempt=st.integers(0, 2**63 - 1),
        what=texts,
        event=texts,
        delta=st.floats(0, 1, exclude_min=True, exclude_max=True),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda charge: charge.id,
)
times = st.floats(allow_nan=False)

Row = list[Any]


def chained(made: list[Charge], time_s: float, owner: str = "site-1") -> list[Row]:
    """The rows that these charges become."""
    rows: list[Row] = []
    head = FIRST
    for number, each in enumerate(made, 1):
        head = link(head, number, time_s, owner, each)
        rows.append([number, time_s, owner, *dataclasses.astuple(each), head])
    return rows


@given(charges, times)
def test_a_chain_that_was_written_holds(made: list[Charge], time_s: float) -> None:
    history = History.of(chained(made, time_s))
    assert [entry.charge for entry in history.entries] == made
    for entry in history.entries:
        assert history.verified(entry.hash.hex().upper()) == Verified(len(made), history.head.hex())


@given(charges, times, st.data())
def test_whatever_is_changed_in_a_chain_is_found_there(
    made: list[Charge], time_s: float, data: st.DataObject
) -> None:
    rows = chained(made, time_s)
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    old = rows[row][column]
    other = {int: st.integers(-(2**63), 2**63 - 1), float: st.floats(), str: st.text(max_size=3)}
    rows[row][column] = data.draw(
        other.get(type(old), st.binary(max_size=32)).filter(lambda new: repr(new) != repr(old))
    )
    with raises(LedgerError, f"ledger: entry {row + 1}"):
        History.of(rows)


@given(charges, times, st.data())
def test_an_entry_that_is_out_of_place_is_found(
    made: list[Charge], time_s: float, data: st.DataObject
) -> None:
    rows = chained(made, time_s)
    at = data.draw(st.integers(0, len(rows) - 1))
    copied = rows[: at + 1] + rows[at:]
    renumbered = [[number, *row[1:]] for number, row in enumerate(copied, 1)]
    for altered in (copied, renumbered):
        with raises(LedgerError, f"ledger: entry {at + 2}"):
            History.of(altered)
    if at < len(rows) - 1:
        removed = rows[:at] + rows[at + 1 :]
        for altered in (removed, [[number, *row[1:]] for number, row in enumerate(removed, 1)]):
            with raises(LedgerError, f"ledger: entry {at + 1}"):
                History.of(altered)


@given(charges, times)
def test_a_cut_tail_and_a_chain_made_anew_show_only_against_a_noted_head(
    made: list[Charge], time_s: float
) -> None:
    noted = History.of(chained(made, time_s)).head.hex()
    cheaper = [*made[:-1], dataclasses.replace(made[-1], event="0")]
    altered = [chained(made[:-1], time_s)]
    if cheaper != made:
        altered.append(chained(cheaper, time_s))
    for rows in altered:
        history = History.of(rows)  # it holds
        with raises(LedgerError, "ledger: head", says=noted):
            history.verified(noted)


def test_an_empty_ledger_has_the_first_head(ledger: Ledger) -> None:
    empty = verified(ledger)
    assert empty == Verified(0, "0" * 64)
    ledger.charge(charge(), None)
    assert verified(ledger, empty.head).entries == 1


# Hands on the file


def unguarded(db: sqlite3.Connection) -> list[str]:
    """Drop the triggers, as one can; returns what puts them back."""
    guards = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in guards:
        db.execute(f"DROP TRIGGER {name}")
    return [sql for _, sql in guards]


ALTERATIONS: dict[str, object] = {
    "number": 9,
    "time": 0.5,
    "owner": "site-2",
    "id": "other",
    "dataset": "lab",
    "run": "run-b",
    "round": 0,
    "attempt": 0,
    "what": "nothing",
    "event": "0.0",
    "delta": 0.5,
    "hash": bytes(32),
}


def test_an_alteration_of_every_column_is_tried(ledger: Ledger, path: Path) -> None:
    with raw(path) as db:
        columns = [name for _, name, *_ in db.execute("PRAGMA table_info(entries)")]
    assert list(ALTERATIONS) == columns


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *ALTERATIONS.items(),
        # Other types; the number of a row cannot be of another.
        *((column, "text" if column == "hash" else b"bytes") for column in ALTERATIONS if column != "number"),
    ],
)
def test_an_altered_column_is_named_by_its_entry(
    ledger: Ledger, path: Path, column: str, value: object
) -> None:
    for number in (1, 2, 3):
        ledger.charge(charge(number), None)
    with raw(path) as db:
        guards = unguarded(db)
        db.execute(f"UPDATE entries SET {column} = ? WHERE number = 2", (value,))
        for guard in guards:
            db.execute(guard)
    with raises(LedgerError, "ledger.sqlite: entry 2"):
        read_history(path)
    for act in (
        lambda: verified(ledger),
        ledger.entries,
        lambda: spent_on(ledger, "ward", DELTA),
        lambda: ledger.charge(charge(4), None),
    ):
        with raises(LedgerError, "ledger.sqlite: entry 2"):
            act()


def test_text_that_is_no_text_is_refused_in_one_line(ledger: Ledger, path: Path) -> None:
    ledger.charge(charge(), None)
    with raw(path) as db:
        unguarded(db)
        db.execute("UPDATE entries SET what = CAST(x'ff' AS TEXT)")
    with raises(LedgerError, "ledger.sqlite", says="UTF-8"):
        verified(ledger)


REST = "dataset, run, round, attempt, what, event, delta, hash FROM entries"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET event = '0'",
        "UPDATE OR REPLACE entries SET number = 1 WHERE number = 2",
        "DELETE FROM entries WHERE number = 2",
        f"INSERT OR REPLACE INTO entries SELECT 2, time, owner, 'new', {REST} WHERE number = 1",
        f"INSERT OR REPLACE INTO entries SELECT 3, time, owner, 'run-a/1', {REST} WHERE number = 1",
    ],
)
def test_entries_are_only_added(ledger: Ledger, path: Path, statement: str) -> None:
    for number in (1, 2):
        ledger.charge(charge(number), None)
    with raw(path) as db:
        before = db.execute("SELECT * FROM entries").fetchall()
        db.execute("PRAGMA recursive_triggers = OFF")  # with them on, REPLACE alone would be caught anyway
        with raises(sqlite3.IntegrityError, "an entry"):
            db.execute(statement)
        assert db.execute("SELECT * FROM entries").fetchall() == before
        unguarded(db)  # and without the guards it is done
        db.execute(statement)
        assert db.execute("SELECT * FROM entries").fetchall() != before
    with pytest.raises(LedgerError):
        verified(ledger)


def test_guards_that_are_gone_are_noticed(ledger: Ledger, path: Path) -> None:
    ledger.charge(charge(), None)
    with raw(path) as db:
        unguarded(db)
    with raises(LedgerError, "ledger.sqlite", says="triggers"):
        ledger.charge(charge(2), None)


@pytest.mark.parametrize("damage", ["cut", "noise", "no database", "another database"])
def test_a_damaged_file_is_refused(ledger: Ledger, path: Path, damage: str) -> None:
    for number in range(40):
        ledger.charge(charge(number), None)
    whole = path.read_bytes()
    if damage == "another database":
        path.unlink()
        with raw(path) as db:
            db.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY)")
    else:
        noise = hashlib.shake_256(b"noise").digest(len(whole) - 4096)
        path.write_bytes(
            {"cut": whole[: len(whole) // 2], "noise": whole[:4096] + noise, "no database": b"text " * 2000}[
                damage
            ]
        )
    for act in (
        lambda: verified(ledger),
        lambda: ledger.charge(charge(99), None),
        lambda: read_history(path),
    ):
        with pytest.raises(LedgerError):
            act()
    with pytest.raises(LedgerError):
        Ledger(path, "site-1", added)


def test_reading_makes_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        read_history(tmp_path / "none.sqlite")
    assert not list(tmp_path.iterdir())


# The disk


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with raises(StorageError, "ledger.sqlite", says="unable to open"):
        Ledger(tmp_path / "none" / "ledger.sqlite", "site-1", added)


def test_a_full_disk_leaves_the_ledger_as_it_was(ledger: Ledger, path: Path) -> None:
    ledger.charge(charge(), None)
    before, size = ledger.entries(), path.stat().st_size
    long = charge(2, what="x" * 20_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with raises(StorageError, "ledger.sqlite", says="disk"):
            ledger.charge(long, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ledger.entries() == before
    ledger.charge(long, None)
    assert verified(ledger).entries == 2


def test_a_file_that_may_not_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "ledger.sqlite"
        ledger = Ledger(path, "site-1", added)
        ledger.charge(charge(), None)
        folder.chmod(0o555)
        path.chmod(0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            with raises(StorageError, "ledger.sqlite", says="readonly"):
                ledger.charge(charge(2), None)
            assert read_history(path).verified().entries == 1  # it can be checked all the same
        finally:
            os.seteuid(user)
            folder.chmod(stat.S_IRWXU)


def test_waiting_for_other_processes_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, "site-1", added)
    monkeypatch.setattr("cloister.privacy.ledger.ledger.PATIENCE_S", 0.01)
    with raw(path) as db:
        db.execute("BEGIN IMMEDIATE")
        with raises(StorageError, "ledger.sqlite", says="0.01 s"):
            ledger.charge(charge(), None)
        db.execute("ROLLBACK")
        # A reader lets a charge begin, and not commit.
        db.execute("BEGIN")
        db.execute("SELECT * FROM entries").fetchall()
        with raises(StorageError, "ledger.sqlite", says="0.01 s"):
            ledger.charge(charge(), None)
        db.execute("COMMIT")
    assert verified(ledger).entries == 0
    ledger.charge(charge(), None)
    assert verified(ledger).entries == 1


def test_nothing_stays_open_between_calls(ledger: Ledger, path: Path) -> None:
    """So that a fork shares no connection of SQLite's, which it must not."""

    def held() -> list[str]:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(descriptor))
        return [each for each in links if each.startswith(str(path))]

    ledger.charge(charge(), None)
    with contextlib.suppress(BudgetError):
        ledger.charge(charge(2), Budget(0.0, DELTA))
    verified(ledger)
    assert held() == []
    with raw(path) as db:
        db.execute("BEGIN IMMEDIATE")
        assert held()
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # at rest it is one file


def test_every_commit_syncs_file_and_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int]] = []
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                mode = super().execute("PRAGMA journal_mode").fetchone()[0]
                found.append((mode, super().execute("PRAGMA synchronous").fetchone()[0]))
            return super().execute(sql, *rest)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Watched))
    Ledger(path, "site-1", added).charge(charge(), None)
    assert found == [("delete", 3), ("delete", 3)]  # 3 is EXTRA


# Several at once


CROWD = """
import sys
from pathlib import Path
from cloister.privacy.ledger.ledger import Budget, Charge, Ledger
from cloister.protocol.errors import BudgetError

path, name = sys.argv[1:]
ledger = Ledger(Path(path), "site-1", lambda events, delta: sum(map(float, events)))
print("ready", flush=True)
sys.stdin.readline()
for number in range(100):
    try:
        ledger.charge(
            Charge(id=f"{name}/{number}", dataset="ward", run=name, round=number, attempt=1, what="update",
                   event="1.0", delta=1e-5),
            Budget(40.0, 1e-5),
        )
        print("charged", flush=True)
    except BudgetError:
        break
"""


def test_eight_processes_never_exceed_one_budget(path: Path) -> None:
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, str(path), f"run-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for each in crowd:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in crowd:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    printed = [each.communicate(timeout=60)[0] for each in crowd]
    assert [each.returncode for each in crowd] == [0] * 8
    ledger = Ledger(path, "site-1", added)
    assert "".join(printed).count("charged") == 40 == spent_on(ledger, "ward", DELTA)
    assert verified(ledger).entries == 40


def at_once(acts: Sequence[Callable[[], object]]) -> list[object]:
    """The results of acts in threads of their own, or their errors."""
    results: list[object] = [None] * len(acts)

    def act(index: int) -> None:
        try:
            results[index] = acts[index]()
        except BudgetError as error:
            results[index] = error

    threads = [threading.Thread(target=act, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_looking_first_and_charging_later_would_exceed_it(path: Path) -> None:
    """The budget is looked at in the transaction that charges: a double that looks before it, overspends."""
    budget = Budget(1.0, DELTA)
    both_looked = threading.Barrier(2)

    class LooksFirst(Ledger):
        def charge(
            self,
            charge: Charge,
            budget: Budget | None,
            check: Callable[[tuple[Entry, ...]], None] = lambda _entries: None,
        ) -> Entry:
            assert budget is not None
            paid = [entry.charge.event for entry in self.entries()]
            assert added([*paid, charge.event], budget.delta) <= budget.epsilon
            both_looked.wait(30)
            return super().charge(charge, None)

    def overspent(ledger: Ledger) -> bool:
        at_once([functools.partial(ledger.charge, charge(n), budget) for n in (1, 2)])
        return spent_on(ledger, "ward", DELTA) > budget.epsilon

    assert not overspent(Ledger(path, "site-1", added))
    assert overspent(LooksFirst(path.with_name("double.sqlite"), "site-1", added))


# kill -9

WORKER = """
import functools, sqlite3, sys
from pathlib import Path
from cloister.privacy.ledger.ledger import Charge, Ledger

folder, order, handshake, last = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "handshake", int(sys.argv[4])

def moment(name):
    print(name, flush=True)
    if handshake:
        sys.stdin.readline()

class Watched(sqlite3.Connection):
    def execute(self, sql, *rest):
        if not handshake:
            return super().execute(sql, *rest)
        moment(f"{number} before {sql.split()[0]}")
        result = super().execute(sql, *rest)
        moment(f"{number} after {sql.split()[0]}")
        return result

number = 0
sqlite3.connect = functools.partial(sqlite3.connect, factory=Watched)
ledger = Ledger(folder / "ledger.sqlite", "site-1", lambda events, delta: sum(map(float, events)))

def pay():
    if order == "says so first":
        moment(f"{number} charged")
    ledger.charge(
        Charge(id=str(number), dataset="ward", run="run-a", round=number, attempt=1, what="update", event="1.0",
               delta=1e-5), None)
    if order != "says so first":
        moment(f"{number} charged")

def release():
    (folder / f"{number}.released").write_text("out")
    moment(f"{number} released")

for number in range(1, last + 1):
    for act in (release, pay) if order == "release first" else (pay, release):
        act()
"""


def check_spending(folder: Path, said: list[str]) -> int:
    """For every release there is a charge, and no charge that was acknowledged is lost; returns the charges."""
    entries = Ledger(folder / "ledger.sqlite", "site-1", added).entries()
    charged = {entry.charge.id for entry in entries}
    released = {path.stem for path in folder.glob("*.released")}
    acknowledged = {line.split()[0] for line in said if line.endswith(" charged")}
    assert released <= charged, "released without a charge"
    assert acknowledged <= charged, "a charge was lost"
    return len(charged)


def killed_at(folder: Path, moment: str, order: str = "charge first", *, going: bool = False) -> list[str]:
    """Kill a worker when it says that it is at `moment`; or, `going`, just after it was told to go on from there.

    Returns:
        What it had said until then.
    """
    command = [sys.executable, "-c", WORKER, str(folder), order, "handshake", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        said: list[str] = []
        for line in worker.stdout:
            said.append(line.strip())
            if said[-1] == moment and not going:
                break
            worker.stdin.write("go\n")
            worker.stdin.flush()
            if said[-1] == moment:
                break
        worker.kill()
        assert worker.wait(30) == -signal.SIGKILL, said
        assert said[-1] == moment
    return said


MOMENTS = [
    "0 before BEGIN",
    "0 before CREATE",
    "0 before COMMIT",
    "0 after COMMIT",
    *(f"2 {when} {word}" for word in ("BEGIN", "INSERT", "COMMIT") for when in ("before", "after")),
    "2 charged",
    "2 released",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_release_has_its_charge_whenever_the_process_is_killed(tmp_path: Path, moment: str) -> None:
    count = check_spending(tmp_path, killed_at(tmp_path, moment))
    ledger = Ledger(tmp_path / "ledger.sqlite", "site-1", added)
    known = {entry.charge.id for entry in ledger.entries()}
    for number in (1, 2, 3):  # a later process charges the same as without the kill
        again = charge(number, id=str(number))
        assert ledger.charge(again, None).number == number
    assert known == {str(number) for number in range(1, count + 1)}
    assert verified(ledger).entries == 3


def test_a_process_killed_while_it_commits_leaves_a_whole_ledger(tmp_path: Path) -> None:
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        assert check_spending(folder, killed_at(folder, "2 before COMMIT", going=True)) in (1, 2)


def test_the_check_fails_where_a_release_comes_first(tmp_path: Path) -> None:
    said = killed_at(tmp_path, "2 before COMMIT", "release first")
    with pytest.raises(AssertionError, match="without a charge"):
        check_spending(tmp_path, said)


def test_the_check_fails_where_a_charge_is_acknowledged_before_its_commit(tmp_path: Path) -> None:
    said = killed_at(tmp_path, "2 before COMMIT", "says so first")
    with pytest.raises(AssertionError, match="was lost"):
        check_spending(tmp_path, said)


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="no strace, or no right to trace")
def test_a_process_killed_at_every_write_and_sync_of_a_commit_leaves_a_whole_ledger(tmp_path: Path) -> None:
    """Exactly at each: strace kills the process as it enters its n-th such system call."""
    made = tmp_path / "made"
    made.mkdir()
    Ledger(made / "ledger.sqlite", "site-1", added)
    killed = 0
    for call in ("pwrite64", "fsync", "fdatasync", "unlink"):
        for occurrence in range(1, 40):
            folder = tmp_path / f"{call}-{occurrence}"
            shutil.copytree(made, folder)
            inject = f"inject={call}:signal=KILL:when={occurrence}"
            command = ["strace", "-o", os.devnull, "-e", f"trace={call}", "-e", inject]
            command += [sys.executable, "-c", WORKER, str(folder), "charge first", "freely", "1"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            charged = check_spending(folder, done.stdout.splitlines())
            if done.returncode == 0:
                assert charged == 1
                break
            assert done.returncode == -signal.SIGKILL
            killed += 1
    assert killed >= 10
