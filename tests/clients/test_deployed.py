"""The process of a deployed site: what a service manager sees of it, and what it uses without a restart."""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.clients import deployed
from cloister.clients.deployed import DeployedSite
from cloister.clients.setup.enrolment import consider, install, make_request, make_rotation
from cloister.clients.setup.templates import with_values
from cloister.protocol.errors import CertificateError, EngineError, RosterError, StorageError
from cloister.protocol.identity.address import free_port, port_of
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog, Fact
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.heads import COORDINATOR, Heads
from cloister.protocol.machine.storage import lock
from cloister.protocol.messages.messages import Joined
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.federation.registry import Registry, Renewal, Terms
from cloister.tests.parties.door_parties import WAIT_S, Answering, AtDoor, join_request
from cloister.tests.tools.command import ran
from cloister.tests.tools.raises import raises

NOW = datetime.datetime.now(datetime.UTC)
NAMES = ("north", "east", "south")

pytestmark = pytest.mark.usefixtures("unsynced")


class Parties:
    """A federation that is installed at three sites, and the first of them."""

    def __init__(self, path: Path, days: int = 9, made: datetime.datetime = NOW) -> None:
        self.folder, self.site = path / "north", path / "north" / "site.toml"
        requests = [make_request(path / name, name, "a person", NOW.date())[0] for name in NAMES]
        terms = Terms(name="oncology", door=f"127.0.0.1:{free_port()}", authority_days=days)
        self.registry = Registry.create(path / "federation", terms, requests, made, durable=False)
        if made == NOW:
            self.install(self.registry.federation)

    def install(self, federation: Federation) -> None:
        install(consider(self.folder, federation, NOW), durable=False)

    def door(self) -> Door:
        """The door at the federation's address."""
        folder, federation = self.registry.path, self.registry.federation
        pem, key = ((folder / f"door.{kind}").read_bytes() for kind in ("pem", "key"))
        shown = ServerCertificate(pem, key)
        heads = Heads(self.log, folder / "heads")
        return Door(lambda: shown, lambda: federation, f"127.0.0.1:{port_of(federation.door)}", heads)

    @property
    def log(self) -> Path:
        """The coordinator's audit log."""
        return self.registry.path / AUDIT_LOG

    @contextlib.contextmanager
    def started(self) -> Iterator[list[bool]]:
        """The site's process, as a thread; what `run` has returned is in the list at the end."""
        stopped, done = threading.Event(), list[bool]()
        site = DeployedSite(self.site)
        thread = threading.Thread(target=lambda: done.append(site.run(stopped)))
        thread.start()
        try:
            yield done
        finally:
            stopped.set()
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    """What answers instead of the site; it tries to connect often."""
    found = Answering("north")
    monkeypatch.setattr(deployed, "Site", lambda *_args, **_options: found)
    monkeypatch.setattr(deployed, "_HEARTBEAT_S", 0.02)
    monkeypatch.setattr("cloister.clients.network.door._LONGEST_S", 0.02)
    return found


@pytest.fixture
def parties(tmp_path: Path, answering: Answering) -> Parties:
    return Parties(tmp_path)


@pytest.fixture
def probe(parties: Parties, capsys: pytest.CaptureFixture[str]) -> Callable[[str], dict[str, Any]]:
    """What the probe finds, when its problem contains some words."""

    def look(words: str) -> dict[str, Any]:
        for _ in range(1000):
            code, out, _ = ran(capsys, "status", str(parties.site), "--probe", "--json")
            found: dict[str, Any] = json.loads(out)
            assert code == (0 if found["well"] else 1)
            if (words in found["problem"]) if words else found["well"]:
                return found
            threading.Event().wait(0.01)
        raise AssertionError(found)

    return look


def test_the_probe_says_whether_the_coordinator_is_heard(
    parties: Parties,
    probe: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    probe("does not run")
    with parties.started() as done:
        assert probe("has not been heard")["contact_s"] is None
        with parties.door() as door:
            assert set(probe("")) == {"well", "problem", "pid", "connected", "contact_s", "run", "trouble"}
            with AtDoor(tmp_path / "run", door=door, names=NAMES, run="abc") as run:
                assert run.wait_for(1, WAIT_S) == 1
                assert list(run.ask({1: join_request()}, WAIT_S, group="1")) == [(1, Joined("north"))]
                while probe("")["run"] != "abc":
                    pass
                assert "which runs abc" in ran(capsys, "status", str(parties.site))[1]
                run.close(over=True)
                while probe("")["run"]:
                    pass
        assert probe("has not been heard for")["contact_s"] < WAIT_S
    assert done == [True]
    probe("does not run")


def test_a_coordinator_that_is_silent_for_minutes_is_a_problem(
    parties: Parties, probe: Callable[[str], dict[str, Any]]
) -> None:
    seen = {"pid": 1, "connected": True, "contact_s": 180.0, "run": "", "trouble": ""}
    (parties.folder / "state").mkdir()
    heartbeat = parties.folder / "state" / "heartbeat.json"
    heartbeat.write_text(json.dumps(seen))
    with lock(parties.folder / "state" / "lock", "the site's process"):
        probe("")
        heartbeat.write_text(json.dumps(seen | {"contact_s": 181.0}))
        probe("has not been heard for 181 s")
        heartbeat.write_text(json.dumps(seen))
        probe("")
    probe("does not run")  # it was killed, and its last heartbeat is there


@pytest.mark.parametrize("restored", ["site", "coordinator", "both", "forked"])
def test_a_folder_that_was_restored_from_a_backup_is_refused(
    parties: Parties,
    probe: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    restored: str,
) -> None:
    """The other party has seen more of its audit log. If both are older, nobody knows."""
    monkeypatch.setattr("cloister.clients.network.door.HEARTBEAT_S", 0.02)
    state = parties.site.parent / "state"
    logs = {"site": state / AUDIT_LOG, "coordinator": parties.log}
    theirs = Heads(None, parties.registry.path / "heads")
    ours = Heads(None, state / "heads")

    def write() -> None:
        for path in logs.values():
            AuditLog(path).record(Fact("join", "run", "plan"))

    with parties.started(), parties.door():
        probe("")
        write()
        backups = {name: path.read_bytes() for name, path in logs.items()}
        write()
        while (theirs.known("north").number, ours.known(COORDINATOR).number) != (2, 2):
            probe("")
    for name, path in logs.items():
        if restored in (name, "both"):
            path.write_bytes(backups[name])
    if restored == "both":
        for folder in (state / "heads", parties.registry.path / "heads"):
            for file in folder.iterdir():
                file.unlink()
    if restored == "forked":
        parties.log.write_bytes(backups["coordinator"])
        for _ in range(2):
            AuditLog(parties.log).record(Fact("join", "another run", "plan"))
    with parties.started(), parties.door():
        found = probe({"both": "", "site": "at least the 2 that were seen"}.get(restored, "line 2 as "))
        assert ("accepts it (" in found["problem"]) == (restored != "both")
        assert found["connected"] == (restored == "both")


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("restored", ["site", "coordinator"])
def test_a_folder_that_is_restored_while_its_command_runs_is_refused(
    parties: Parties,
    probe: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    restored: str,
    forked: bool,
) -> None:
    """Also if its log outgrows, between two exchanges, what the other party has seen; and in each later session."""
    monkeypatch.setattr("cloister.clients.network.door.HEARTBEAT_S", 0.02)
    state = parties.site.parent / "state"
    ours, theirs = Heads(None, state / "heads"), Heads(None, parties.registry.path / "heads")
    path = parties.log if restored == "coordinator" else state / AUDIT_LOG
    copy = tmp_path / AUDIT_LOG
    with parties.door(), parties.started():
        for log in (parties.log, state / AUDIT_LOG):
            AuditLog(log).record(*[Fact("join", "run", "plan")] * 2)
        while (theirs.known("north").number, ours.known(COORDINATOR).number) != (2, 2):
            probe("")
        kept = theirs.known("north"), ours.known(COORDINATOR)
        copy.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        if forked:
            AuditLog(copy).record(*[Fact("join", "another run", "plan")] * 4)
        copy.replace(path)
        shorter = restored == "site" and not forked
        for _ in range(3):
            probe("at least the 2 that were seen" if shorter else "line 2 as ")
        assert (theirs.known("north"), ours.known(COORDINATOR)) == kept


def test_a_site_that_cannot_read_its_audit_log_says_so(
    parties: Parties, probe: Callable[[str], dict[str, Any]]
) -> None:
    """And opens no session: the coordinator would take it for a restored one."""
    log = parties.site.parent / "state" / AUDIT_LOG
    with parties.door(), parties.started():
        probe("")
    log.write_bytes(b"not a log\n")
    with parties.door() as door, parties.started():
        assert not probe(f"{log}: expected an audit log")["connected"]
        assert door.states()["north"] == "not connected"


def test_a_version_that_is_installed_is_used_without_a_restart(parties: Parties, tmp_path: Path) -> None:
    """The door has moved, and the site has a new key."""
    with parties.started():
        with parties.door() as door, AtDoor(tmp_path / "1", door=door, names=NAMES) as run:
            assert run.wait_for(1, WAIT_S) == 1
        rotation, _ = make_rotation(parties.folder, NOW.date())
        moved = parties.registry.renew(Renewal(door=f"127.0.0.1:{free_port()}"), NOW)
        parties.registry = moved.publish(moved.federation.approving([rotation]))
        with parties.door() as door, AtDoor(tmp_path / "2", door=door, names=NAMES) as run:
            assert run.wait_for(1, 0.1) == 0
            parties.install(moved.federation)
            parties.install(parties.registry.federation)
            assert run.wait_for(1, WAIT_S) == 1


def test_a_site_that_is_stopped_while_it_works_says_so(
    parties: Parties, answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends at once then: it is asked again when it is back."""
    monkeypatch.setattr(deployed, "_END_S", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hold(_request: object) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    answering.during = hold
    before = set(threading.enumerate())
    with parties.door() as door, AtDoor(tmp_path / "run", door=door, names=NAMES) as run:
        with parties.started() as done:
            assert run.wait_for(1, WAIT_S) == 1

            def ask() -> None:
                with contextlib.suppress(EngineError):  # the run ends
                    list(run.ask({1: join_request()}, WAIT_S, group="1"))

            asking = threading.Thread(target=ask)
            asking.start()
            assert begun.wait(WAIT_S)
        assert done == [False]
        go_on.set()
    asking.join(WAIT_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)


def test_a_site_that_is_at_the_door_no_more_ends_as_a_failure(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a defect; its service manager starts it again."""
    monkeypatch.setattr("cloister.clients.network.door.DoorSite.run", lambda _site: None)
    stopped = threading.Event()
    late = threading.Timer(WAIT_S, stopped.set)
    late.start()
    with raises(EngineError, "connection"):
        DeployedSite(parties.site).run(stopped)
    late.cancel()
    late.join()


def test_a_site_that_is_not_set_up_does_not_start(tmp_path: Path, answering: Answering) -> None:
    parties = Parties(tmp_path / "1", made=NOW - datetime.timedelta(days=30))
    with raises(RosterError, "federation", says="site install"):
        DeployedSite(parties.site)
    parties = Parties(tmp_path / "2")
    with parties.started(), raises(StorageError, "state"):
        DeployedSite(parties.site)
    (parties.folder / "identity.pem").chmod(0o644)
    with raises(RosterError, f"permissions of {parties.folder / 'identity.pem'}"):
        DeployedSite(parties.site)
    (parties.folder / "identity.pem").chmod(0o600)
    later = SimpleNamespace(now=lambda zone: datetime.datetime.now(zone) + datetime.timedelta(days=10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloister.clients.deployed.datetime", SimpleNamespace(datetime=later, UTC=datetime.UTC))
        with raises(CertificateError, "certificate of the authority"):
            DeployedSite(parties.site)


def test_a_probe_of_a_site_is_light(parties: Parties) -> None:
    """It is run every minute: torch and Flower, which take seconds to import, stay out."""
    code = "import sys, cloister.cli.main as main\n"
    code += "main.main(['status', sys.argv[1], '--probe'])\n"
    code += "print([name for name in ('flwr', 'torch', 'grpc', 'transformers') if name in sys.modules])"
    command = [sys.executable, "-c", code, str(parties.site)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["its process does not run", "[]"]


def test_a_site_that_can_join_no_run_yet_says_so_when_it_starts(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = SimpleNamespace(run=lambda _stopped: True)
    monkeypatch.setattr(deployed, "DeployedSite", lambda _path: site)
    policy = parties.folder / "policy.toml"
    text, problems = parties.site.read_text(), list[int]()
    for data, demands in (("d.jsonl", 'units = ["site"]'), ("none.jsonl", 'units = ["records"]')):
        caplog.clear()
        (parties.folder / "d.jsonl").write_text("{}\n")
        policy.write_text(f"{demands}\n")
        parties.site.write_text(with_values(text, {"data": data, "policy": "policy.toml"}, "site.toml"))
        assert main(["site", "start", str(parties.site)]) == 0
        problems.append(caplog.text.count("the site can join no run yet"))
    assert problems == [0, 2]
