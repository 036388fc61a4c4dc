"""The audit log: each kind of line in runs of real sites, before its effect; and every change of the file is found."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloister.aggregation.vector.average import PlainSum
from cloister.clients.setup.config import read_config
from cloister.clients.site import Site
from cloister.privacy.ledger.ledger import read_history
from cloister.protocol.errors import AuditLogError, EngineError, StorageError
from cloister.protocol.identity.audit_log import NAME, NO_AUDIT_LOG, AuditLog, Fact, Line, read_lines
from cloister.protocol.machine.storage import sync_to_disk
from cloister.protocol.messages.messages import Contribute, Reply, Request
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.tests.parties.federation import CENTRAL, RECORD, SKELLAM, Federation, tiny
from cloister.tests.tools.command import done, ran, refusal
from cloister.tests.tools.raises import raises

SITE = "site-000"


@dataclass
class Audited:
    """A federation in this process whose parties have an audit log."""

    federation: Federation
    out: Path

    @classmethod
    def of(cls, folder: Path, *settings: str) -> Audited:
        made = cls(Federation(folder, tiny("run.rounds=2", "local.steps=1", *settings)), folder / "run")
        for index, name in enumerate(made.federation.names):
            made.federation.channel.sites[name] = made.opener(index)
        RunFolder.create(made.out, made.federation.plan).close()
        return made

    @property
    def coordinators(self) -> Path:
        return self.out.parent / NAME

    def at_site(self, name: str = SITE) -> Path:
        return self.federation.sites_folder / name / "state" / NAME

    def opener(self, index: int, policy: str = "") -> Callable[[], Site]:
        name = self.federation.names[index]
        self.at_site(name).parent.mkdir(exist_ok=True)
        home = self.federation.sites_folder / name
        changed: dict[str, object] = {"ledger": str(home / "ledger.sqlite")}
        if policy:
            (home / "policy.toml").write_text(policy)
            changed["policy"] = str(home / "policy.toml")
        config = read_config(home / "site.toml").model_copy(update=changed)
        return lambda: Site(config, self.federation.resident, audit_log=AuditLog(self.at_site(name)))

    def go(self) -> None:
        roster = self.federation.roster if self.federation.plan.aggregation.secure else None
        with RunFolder.reopen(self.out) as folder:
            run(
                folder,
                self.federation.channel,
                lambda _event: None,
                roster=roster,
                audit_log=AuditLog(self.coordinators),
            )


def told(path: Path) -> list[tuple[str, str, int, int]]:
    """What, site, round and attempt of each line of a log that verifies."""
    return [(line.fact.what, line.fact.site, line.fact.round, line.fact.attempt) for line in read_lines(path)]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """A run by record in clear, which is finished."""
    sync_to_disk(False)
    made = Audited.of(tmp_path_factory.mktemp("audited"), *RECORD)
    made.go()
    yield made
    sync_to_disk(True)


@pytest.mark.slow
def test_joins_charges_and_releases_are_logged_at_both_ends(audited: Audited) -> None:
    names = audited.federation.names
    joins = [("join", name, 0, 0) for name in names]
    rounds = [
        (what, name, number, 1) for number in (1, 2) for what in ("charge", "release") for name in names
    ]
    assert told(audited.coordinators) == [*joins, *rounds]
    for name in names:
        own = [(what, name, number, 1) for number in (1, 2) for what in ("charge", "release")]
        assert told(audited.at_site(name)) == [("join", name, 0, 0), *own]
    lines = read_lines(audited.coordinators)
    assert {line.fact.plan for line in lines} == {audited.federation.plan.digest()}
    assert len({line.fact.run for line in lines}) == 1
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    ledgers = (audited.out / "ledger.sqlite", audited.federation.sites_folder / SITE / "ledger.sqlite")
    for path, ledger in zip((audited.coordinators, audited.at_site()), ledgers, strict=True):
        for line in read_lines(path):
            if line.fact.what == "charge":  # the log has noted a head of the ledger
                assert read_history(ledger).verified(line.fact.detail.split()[-1])


def test_under_masks_the_charge_is_of_the_survivors(tmp_path: Path, unsynced: None) -> None:
    audited = Audited.of(tmp_path / "masked", *SKELLAM, "aggregation.dropouts=0.25", "run.rounds=1")
    audited.federation.channel.lose((SITE, "update", 1))
    audited.go()
    others = audited.federation.names[1:]
    found = told(audited.coordinators)
    assert found[4:] == [(what, name, 1, 1) for what in ("charge", "release") for name in others]
    assert told(audited.at_site()) == [("join", SITE, 0, 0)]


def test_a_vector_that_nothing_hides_has_no_digest_in_the_log(tmp_path: Path, unsynced: None) -> None:
    """Else all sites without records would have one digest, by which everyone who has the log would know them."""
    details: list[set[str]] = []
    for settings in (CENTRAL, SKELLAM):
        audited = Audited.of(tmp_path / str(len(details)), *settings, "run.rounds=1")
        for name in audited.federation.names[:2]:
            (audited.federation.sites_folder / name / "data.jsonl").write_text("")
        audited.go()
        facts = [read_lines(audited.at_site(name))[-1].fact for name in audited.federation.names]
        assert {fact.what for fact in facts} == {"release"}
        details.append({fact.detail for fact in facts})
    bare, masked = details
    assert bare == {"train, vector"}
    assert len(masked) == 4
    assert all(len(detail) == len("train, vector ") + 64 for detail in masked)


def test_refusals_are_logged_at_both_ends(tmp_path: Path, unsynced: None) -> None:
    """A site has a policy that the plan does not meet; another one's policy changes after the first round."""
    audited = Audited.of(
        tmp_path / "refused", *RECORD, "cohort.quorum=0.5", "run.rounds=2", "aggregation.colluders=0.0"
    )
    names, strict = audited.federation.names, "least_cohort = 99\n"
    channel = audited.federation.channel
    channel.sites[SITE] = audited.opener(0, strict)

    def stricter(site: str, request: Request) -> None:
        if isinstance(request, Contribute) and (site, request.sum.round) == (names[1], 2):
            channel.sites[site] = audited.opener(1, strict)

    channel.before = stricter
    audited.go()
    refusals = [each for each in told(audited.coordinators) if each[0] == "refusal"]
    assert refusals == [("refusal", SITE, 0, 0), ("refusal", names[1], 2, 1)]
    assert told(audited.at_site()) == [("refusal", SITE, 0, 0)]
    assert told(audited.at_site(names[1]))[-1] == ("refusal", names[1], 2, 1)
    (line,) = read_lines(audited.at_site())
    assert "99" in line.fact.detail


def test_the_end_of_a_run_at_its_budget_is_logged(tmp_path: Path, unsynced: None) -> None:
    audited = Audited.of(tmp_path / "budget", *RECORD, "privacy.budget=0.001")
    audited.go()
    last = read_lines(audited.coordinators)[-1].fact
    assert (last.what, last.site, last.round, last.detail) == ("refusal", "", 1, "the run ends: budget")


def test_nothing_takes_effect_without_its_line(
    tmp_path: Path, unsynced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that cannot be written: at a site, then at the coordinator."""
    audited = Audited.of(tmp_path / "full", *RECORD)
    channel = audited.federation.channel
    names = audited.federation.names
    for name in names:  # a folder, which no process can write as a file
        audited.at_site(name).mkdir()
    with raises(EngineError, "sites"):
        audited.go()
    for name in names:
        audited.at_site(name).rmdir()
    opened: list[PlainSum] = []
    monkeypatch.setattr(PlainSum, "open", opened.append)

    def spoil(label: str, reply: Reply) -> Reply:
        """Put a folder in the place of the coordinator's log when the first update arrives."""
        if label == "update" and audited.coordinators.is_file():
            audited.coordinators.unlink()
            audited.coordinators.mkdir()
        return reply

    channel.tamper = spoil
    with raises(StorageError, audited.coordinators):
        audited.go()
    assert opened == []
    audited.coordinators.rmdir()
    channel.tamper = lambda _label, reply: reply
    audited.coordinators.mkdir()
    with raises(StorageError, audited.coordinators):
        audited.go()
    assert channel.asked[-1] == ("join", SITE), (
        "the first to join has not joined, so no other request is sent"
    )


# The file.


FACTS = [Fact("join", "run", "ab" * 32, site=name, detail="x") for name in ("a", "b", "c", "d")]


def written(path: Path) -> list[bytes]:
    """The lines of a new log."""
    AuditLog(path).record(*FACTS[:2])
    AuditLog(path).record(*FACTS[2:])
    return path.read_bytes().splitlines(keepends=True)


def changed_field(name: str, value: object) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        fields = json.loads(lines[1])
        assert fields.get(name) != value
        return [lines[0], json.dumps(fields | {name: value}).encode() + b"\n", *lines[2:]]

    return change


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    **{
        f"changed {name}": changed_field(name, value)
        for name, value in {
            "number": 3, "at": "2026-01-01T00:00:00.000+00:00", "what": "release", "run": "other", "plan": "cd" * 32,
            "round": 1, "attempt": 1, "site": "e", "detail": "y", "hash": "00" * 32,
        }.items()
    },
    "changed to another type": changed_field("round", "0"),
    "no text": changed_field("detail", None),
    "a truth value": lambda lines: [lines[0], lines[1].replace(b'"round": 0', b'"round": false'), *lines[2:]],
    "a negative number": changed_field("attempt", -1),
    "another field": changed_field("more", 1),
    "first removed": lambda lines: lines[1:],
    "removed": lambda lines: [*lines[:2], *lines[3:]],
    "swapped": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "repeated": lambda lines: [*lines[:2], *lines[1:]],
    "last changed": lambda lines: [*lines[:3], lines[3].replace(b'"d"', b'"e"')],
    "a space more": lambda lines: [*lines[:3], lines[3].replace(b'": ', b'":  ', 1)],
    "an empty line": lambda lines: [*lines, b"\n"],
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_found(
    change: Callable[[list[bytes]], list[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    lines = written(path)
    assert done(capsys, "logs", str(tmp_path)).count("join") == 4
    path.write_bytes(b"".join(change(lines)))
    code, out, err = ran(capsys, "logs", str(tmp_path))
    assert (code, out) == (1, "")
    assert "follows from the one before it" in err


def test_lines_that_are_missing_at_the_end_are_found_by_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    lines = written(path)
    head = json.loads(lines[-1])["hash"]
    assert head in ran(capsys, "logs", str(path))[2]
    path.write_bytes(b"".join(lines[:-1]))
    assert ran(capsys, "logs", str(path))[0] == 0
    assert ran(capsys, "logs", str(path), "--head", head)[0] == 1
    assert "nothing has been logged" in refusal(capsys, "logs", str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_torn_last_line_is_recovered(left: int, tmp_path: Path) -> None:
    path = tmp_path / NAME
    lines = written(path)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:left])
    assert [line.fact for line in read_lines(path)] == FACTS[:3]
    AuditLog(path).record(FACTS[3])
    assert [line.fact for line in read_lines(path)] == FACTS
    path.write_bytes(lines[0][:left])  # the very first
    AuditLog(path).record(FACTS[0])
    assert [line.fact for line in read_lines(path)] == FACTS[:1]


def test_what_is_not_a_log_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"a table, perhaps\n")
    with raises(AuditLogError, "audit.jsonl"):
        AuditLog(path).record(FACTS[0])
    assert path.read_bytes() == b"a table, perhaps\n"


def test_a_line_is_on_disk_before_its_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / NAME
    monkeypatch.setattr("os.fsync", lambda _descriptor: synced.append(path.read_bytes()))
    AuditLog(path).record(FACTS[0])
    assert len(synced) == 2, "the file, and the folder that has a new entry"
    AuditLog(path).record(FACTS[1])
    assert synced[-1] == path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0


def test_several_writers_make_one_chain(tmp_path: Path, unsynced: None) -> None:
    """A writer reads the time after the last line: without a lock both read the same last line before one writes."""
    path = tmp_path / NAME
    both = threading.Barrier(2, timeout=0.3)

    def meeting() -> float:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return 0.0

    writers = [threading.Thread(target=AuditLog(path, meeting).record, args=(fact,)) for fact in FACTS[:2]]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {line.fact for line in read_lines(path)} == set(FACTS[:2])


def test_a_long_detail_is_cut_and_control_characters_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    for _ in range(2):
        AuditLog(path).record(
            Fact("refusal", "run", "ab" * 32, site="a", detail="\x1b[2J\n\U0001f512" + "ü" * 10**6)
        )
    assert len(path.read_bytes()) < 30_000
    out = done(capsys, "logs", str(path))
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    found = [json.loads(line) for line in done(capsys, "logs", str(path), "--json").splitlines()]
    assert found == [json.loads(line.text()) for line in read_lines(path)]


def test_a_simulated_party_writes_none(whole: dict[str, Any]) -> None:
    assert (Path(whole["run"]) / "journal.sqlite").exists()
    assert not list(Path(whole["run"]).rglob(NAME))
    assert not NO_AUDIT_LOG


def test_the_first_line_is_as_documented() -> None:
    """The hash of a line, computed apart."""
    import hashlib

    from cloister.protocol.encoding import pack

    at = "2026-11-22T14:00:00.000+00:00"
    line = Line.after(bytes(32), 1, at, Fact("join", "r", "p", 2, 3, "s", "d"))
    packed = pack("cloister-audit-log-1", bytes(32), 1, at, "join", "r", "p", 2, 3, "s", "d")
    assert line.hash == hashlib.sha256(packed).hexdigest()
