"""Heads of audit logs: what is found of a log that is shorter than it was, or another one."""

from __future__ import annotations

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloister.protocol.errors import AuditLogError, RestoredError
from cloister.protocol.identity import audit_log
from cloister.protocol.identity.audit_log import AuditLog, Fact, Line, facts_of, line_of, read_lines
from cloister.protocol.identity.heads import EMPTY, NO_HEADS, Head, Heads
from cloister.tests.tools.raises import raises

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log whose lines are in several blocks of those that are read at once."""
    path = tmp_path / "audit.jsonl"
    AuditLog(path).record(*(Fact("join", f"run {n % 3}", "plan", n, detail="x" * 900) for n in range(1, 301)))
    assert path.stat().st_size > 4 * 2**16
    return path


@pytest.mark.parametrize("torn", [b"", b'{"number": 301', b"x" * 100])
def test_each_line_is_found_from_the_end(log: Path, torn: bytes) -> None:
    lines = read_lines(log)
    with log.open("ab") as file:
        file.write(torn)
    assert [line_of(log, line.number) for line in lines] == list(lines)
    assert line_of(log) == lines[-1]
    assert line_of(log, 301) is None


@pytest.mark.parametrize("cut", range(0, 1300, 61))
def test_lines_that_end_anywhere_in_a_block_are_found(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(1, 140):
        AuditLog(path).record(Fact("join", "run", "plan", number, detail="x" * (cut if number == 1 else 900)))
    lines = read_lines(path)
    assert [line_of(path, line.number) for line in lines] == list(lines)


def test_who_asks_for_an_old_line_keeps_nobody_from_writing(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member may ask for any line, and often: a lock or a scan of the log would hold up the run."""
    parsed = []

    def counting(data: bytes) -> Line | None:
        parsed.append(data)
        return right(data)

    right = audit_log._parsed
    monkeypatch.setattr(audit_log, "_parsed", counting)
    with log.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # with a lock of its own it would wait for this one
        asking = ThreadPoolExecutor(1).submit(line_of, log, 1)
        found = asking.result(60)
    assert found is not None
    assert found.number == 1
    assert len(parsed) < 12, "300 lines"


def test_a_log_without_a_line_has_none(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert line_of(path) is None
    path.write_bytes(b"torn")
    assert line_of(path) is None
    path.write_bytes(b"not a log\n")
    with raises(AuditLogError, str(path)):
        line_of(path)


def test_the_facts_of_one_run_are_told(log: Path) -> None:
    assert [fact.round for fact in facts_of(log, "run 1")] == list(range(1, 301, 3))
    assert list(facts_of(log, "run")) == []
    assert list(facts_of(log.parent / "none", "run 1")) == []


@pytest.mark.parametrize("hash", ["", "a" * 63, "A" * 64, "a" * 63 + "\x1b", "a" * 65])
def test_what_a_peer_says_that_is_no_head_is_none(hash: str) -> None:
    assert Head.said(2**63, hash) == EMPTY
    assert Head.said(7, "a" * 64) == Head(7, "a" * 64)


def test_a_head_is_kept_and_is_never_that_of_a_shorter_log(tmp_path: Path) -> None:
    heads = Heads(None, tmp_path / "heads")
    assert heads.known("north") == EMPTY
    heads.note("north", EMPTY)
    heads.note("north", Head(7, "a" * 64))
    with raises(RestoredError, "audit log of north"):
        heads.note("north", Head(6, "b" * 64))
    heads.note("east", Head(2, "c" * 64))
    assert heads.known("north") == Head(7, "a" * 64)
    (tmp_path / "heads" / "east.json").write_bytes(b"{")
    assert heads.known("east") == EMPTY


def test_a_log_must_have_what_was_seen_of_it(log: Path) -> None:
    heads, seen = Heads(log), [EMPTY]
    for _ in range(3):
        seen.append(heads.own())
        AuditLog(log).record(Fact("join", "run", "plan"))
    assert [head.number for head in seen] == [0, 300, 301, 302]
    for head in seen:
        heads.check("north", head)
    for head in (Head(304, seen[-1].hash), Head(12, seen[1].hash), Head(2**63, ""), Head(302, seen[2].hash)):
        with raises(RestoredError, "audit log"):
            heads.check("north", head)


def test_the_head_to_say_next_is_of_a_log_that_still_has_the_last_one(log: Path) -> None:
    heads, backup = Heads(log), log.read_bytes()
    AuditLog(log).record(Fact("join", "run", "plan"))
    said = heads.following("north", EMPTY)
    AuditLog(log).record(Fact("join", "run", "plan"))
    assert heads.following("north", said) == heads.own() == Head(302, heads.own().hash)
    log.write_bytes(backup)
    for _ in range(3):  # shorter, as long, longer
        with raises(RestoredError, "audit log"):
            heads.following("north", said)
        AuditLog(log).record(Fact("join", "another run", "plan"))


def test_a_head_says_nothing_of_its_line_to_who_has_not_the_key(log: Path, tmp_path: Path) -> None:
    """A line may tell what a site has spent elsewhere, which others could guess and test."""
    heads, line = Heads(log), read_lines(log)[-1]
    assert heads.own().hash != line.hash
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / log.name).write_bytes(log.read_bytes())
    assert Heads(copy / log.name).own() != heads.own()
    assert heads.own() == Heads(log).own(), "the key is kept"


def test_nothing_is_checked_without_a_log() -> None:
    NO_HEADS.check("north", Head(1, ""))
    assert NO_HEADS.own() == NO_HEADS.known("north") == EMPTY
