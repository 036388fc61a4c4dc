"""A site at the door: whom it trusts, when it comes back, and what it keeps from run to run."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.network.door import DoorSite, Visitor
from cloister.clients.network.proxy import proxy_for
from cloister.protocol.errors import (
    CloisterError,
    DoorError,
    EngineError,
    MemberError,
    RosterError,
    UntrustedError,
)
from cloister.protocol.identity.audit_log import AuditLog, Fact
from cloister.protocol.identity.heads import COORDINATOR, NO_HEADS, Head, Heads
from cloister.protocol.identity.roster import new_identity
from cloister.protocol.identity.session import Entrance
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.messages.messages import Contribution, Failed, Joined
from cloister.server.door import grid as server_grid
from cloister.server.door.door import Door, ServerCertificate
from cloister.tests.parties.door_parties import (
    AUTHORITY,
    CERTIFICATE,
    WAIT_S,
    Answering,
    AtDoor,
    Authority,
    connected,
    contribute,
    entrance_at,
    federation_of,
    identity_of,
    join_request,
)

NOW = datetime.datetime.now(datetime.UTC)


def door(certificate: ServerCertificate = CERTIFICATE, name: str = "site-1", heads: Heads = NO_HEADS) -> Door:
    federation = federation_of({each: identity_of(each) for each in (name, "site-2", "site-3")})
    return Door(lambda: certificate, lambda: federation, "127.0.0.1:0", heads)


def wait_until(true: Callable[[], bool]) -> None:
    until, moment = time.monotonic() + WAIT_S, threading.Event()
    while not true():
        assert time.monotonic() < until
        moment.wait(0.01)


def run_until(visitor: Visitor, folder: Path, trouble: str) -> None:
    """Run a site until it says a trouble."""
    site = DoorSite(visitor, Answering, folder / visitor.name, jitter=lambda: 0.01)
    thread = threading.Thread(target=site.run)
    thread.start()
    try:
        wait_until(lambda: trouble in site.trouble)
    finally:
        site.stop()
        thread.join(WAIT_S)


def refusal(
    entrance: Callable[[], Entrance], folder: Path, caplog: pytest.LogCaptureFixture, key: Ed25519PrivateKey
) -> CloisterError:
    """Why a site has no session, as its log says it; it tries once."""

    def give_up() -> float:
        site.stop()
        return 0.0

    site = DoorSite(Visitor("site-1", lambda: key, entrance), Answering, folder, jitter=give_up)
    caplog.clear()
    site.run()
    warned = [each for each in caplog.records if each.levelno == logging.WARNING and "clients" in each.name]
    (record,) = warned
    assert isinstance(record.args, tuple)
    (error,) = record.args
    assert isinstance(error, CloisterError)
    assert str(error) in caplog.text
    assert (site.connected, site.heard_at) == (False, float("-inf"))
    return error


@pytest.mark.parametrize(
    ("certificate", "authority"),
    [
        (CERTIFICATE, Authority()),
        (AUTHORITY.server("other.example"), AUTHORITY),
        (AUTHORITY.server(days=0, now=NOW - datetime.timedelta(hours=12)), AUTHORITY),
    ],
    ids=["another-authority", "another-name", "expired"],
)
def test_a_server_that_is_not_the_door_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, certificate: ServerCertificate, authority: Authority
) -> None:
    caplog.set_level(logging.INFO)
    with door(certificate) as served:
        entrance = Entrance("tests", served.address, authority.der)
        error = refusal(lambda: entrance, tmp_path, caplog, identity_of("site-1"))
    assert isinstance(error, UntrustedError)
    assert error.field == "server"


def test_a_site_says_why_it_has_no_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    with door() as served:

        def entrance() -> Entrance:
            return entrance_at(served.address)

        assert isinstance(refusal(entrance, tmp_path, caplog, new_identity()), MemberError)
        monkeypatch.setattr("cloister.clients.network.door.VERSION", "cloister/door/0")
        error = refusal(entrance, tmp_path, caplog, identity_of("site-1"))
        assert "version of the door" in str(error)
    gone = refusal(entrance, tmp_path, caplog, identity_of("site-1"))
    assert type(error) is type(gone) is DoorError

    def broken() -> Entrance:
        raise RosterError("federation", expected="a file that can be read")

    assert isinstance(refusal(broken, tmp_path, caplog, identity_of("site-1")), RosterError)


def test_a_site_waits_longer_after_each_failure_and_comes_back(tmp_path: Path) -> None:
    """It was refused before its key was approved; what is approved and where the door is, is read for each session."""
    key, come, tries = new_identity(), threading.Event(), []

    def jitter() -> float:
        tries.append(0.001)
        return 0.001

    site = DoorSite(
        Visitor(
            "site-1",
            lambda: identity_of("site-1") if come.is_set() else key,
            lambda: entrance_at(served.address),
        ),
        Answering,
        tmp_path,
        jitter=jitter,
    )
    waits = [site._wait_s(failures) / jitter() for failures in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    tries.clear()
    with door() as served:
        thread = threading.Thread(target=site.run)
        thread.start()
        wait_until(lambda: len(tries) > 3)
        assert not site.connected
        come.set()
        wait_until(lambda: site.connected)
        assert time.monotonic() - site.heard_at < WAIT_S
        site.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not site.connected


def test_a_site_stays_from_run_to_run_and_keeps_no_vector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, kept = np.arange(1000, dtype=np.float32), tmp_path / "site-1"
    with (
        door() as served,
        AtDoor(tmp_path / "1", door=served, run="first") as first,
        connected(first, Answering(), tmp_path) as site,
    ):
        ((_, reply),) = first.ask({1: contribute(model)}, WAIT_S, group="1")
        assert isinstance(reply, Contribution)
        assert site.run_label == "first"
        assert list(kept.iterdir()), "the model is kept for the next round"
        del reply
        first.close(over=True)
        wait_until(lambda: not site.run_label and not list(kept.iterdir()))
        with AtDoor(tmp_path / "2", door=served, run="second") as second:
            assert second.wait_for(1, WAIT_S) == 1
            heard_at = site.heard_at
            assert list(second.ask({1: join_request()}, WAIT_S, group="1")) == [(1, Joined("site-1"))]
            assert site.run_label == "second"
            assert site.heard_at > heard_at
    assert caplog.text.count("connected to") == 1


@pytest.mark.parametrize("long", [False, True], ids=["frame", "long frame"])
def test_a_site_fetches_nothing_for_a_request_that_is_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Of a long first frame the signature alone is known before; for the vectors behind it nothing is fetched."""
    model = np.arange(10_000, dtype=np.float32)
    if long:
        monkeypatch.setattr(server_grid, "SMALL", 0)
    stranger = Sender(new_identity(), "first", 1)
    with (
        door() as served,
        AtDoor(tmp_path / "1", door=served, run="first", sender=stranger) as channel,
        connected(channel, Answering(), tmp_path),
    ):
        ((_, reply),) = channel.ask({1: contribute(model)}, WAIT_S, group="1")
        assert isinstance(reply, Failed)
        assert "SignatureError" in reply.reason or "a signature with the coordinator's key" in reply.reason
        assert [site.sent for site in channel.connected()] == [0]
        assert not list(tmp_path.glob("site-1/*"))


def test_long_requests_leave_one_frame_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_grid, "SMALL", 0)
    model, kept = np.arange(1000, dtype=np.float32), tmp_path / "site-1"
    with (
        door() as served,
        AtDoor(tmp_path / "1", door=served) as channel,
        connected(channel, Answering(), tmp_path),
    ):
        assert list(channel.ask({1: contribute(model)}, WAIT_S, group="1"))
        held = {path.name for path in kept.iterdir()}
        for number in range(5):
            assert list(channel.ask({1: join_request(f"{number}")}, WAIT_S, group="1")) == [
                (1, Joined("site-1"))
            ]
            assert len(list(kept.iterdir())) == len(held)
        assert len(held & {path.name for path in kept.iterdir()}) == len(held) - 1, "the model stays"


def test_a_site_leaves_a_coordinator_whose_log_is_shorter_than_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a coordinator that does not look at its own log would say."""
    monkeypatch.setattr("cloister.clients.network.door.HEARTBEAT_S", 0.02)
    caplog.set_level(logging.WARNING)
    numbers = iter((5, 5, 6))

    def following(_peer: str, _seen: Head) -> Head:
        return Head(next(numbers, 4), "a" * 64)

    heads = Heads(None, tmp_path / "heads")
    with door() as served, mock.patch.object(served._heads, "following", following):
        visitor = Visitor("site-1", lambda: identity_of("site-1"), lambda: entrance_at(served.address), heads)
        run_until(visitor, tmp_path, "audit log of coordinator")
    assert heads.known(COORDINATOR) == Head(6, "a" * 64)
    assert "4 lines" in caplog.text


class Restored(Heads):
    """Of a party whose log is replaced by a longer one, once, when it has just been compared at a greeting."""

    def __init__(self, folder: Path) -> None:
        self.log, self._fork = folder / "audit.jsonl", folder / "fork"
        folder.mkdir()
        for path, run in ((self.log, "run"), (self._fork, "another run")):
            AuditLog(path).record(*[Fact("join", run, "plan")] * (2 if path == self.log else 4))
        super().__init__(self.log, folder / "heads")

    def check(self, peer: str, head: Head) -> None:
        super().check(peer, head)
        if self._fork.exists():
            self._fork.replace(self.log)


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("restored", ["site", "coordinator"])
def test_a_folder_that_is_restored_after_the_greeting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: str
) -> None:
    """Before the first exchange: what the other party has kept is of an earlier session."""
    monkeypatch.setattr("cloister.clients.network.door.HEARTBEAT_S", 0.02)
    other, broken = Heads(None, tmp_path / "heads"), Restored(tmp_path / "restored")
    ours, theirs = (broken, other) if restored == "site" else (other, broken)
    peer = "site-1" if restored == "site" else COORDINATOR
    other.note(peer, broken.own())
    with door(heads=theirs) as served:
        visitor = Visitor("site-1", lambda: identity_of("site-1"), lambda: entrance_at(served.address), ours)
        run_until(visitor, tmp_path, "line 2 as ")
    assert (other.known(peer).number, broken.own().number) == (2, 4)


def test_what_a_site_holds_of_a_run_goes_when_it_is_over(tmp_path: Path) -> None:
    """Also while a request is handled: its reply is not waited for, and `ended` comes after it."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    answering = Answering()

    def hold(_request: object) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        assert not ended.is_set()

    answering.during = hold
    with door() as served:
        site = DoorSite(
            Visitor("site-1", lambda: identity_of("site-1"), lambda: entrance_at(served.address)),
            lambda: answering,
            tmp_path / "site-1",
            ended=ended.set,
        )
        thread = threading.Thread(target=site.run)
        thread.start()
        with AtDoor(tmp_path, door=served) as run:
            assert run.wait_for(1, WAIT_S) == 1

            def ask() -> None:
                with contextlib.suppress(EngineError):  # the run ends
                    list(run.ask({1: contribute(np.ones(9, np.float32))}, WAIT_S, group="1"))

            asking = threading.Thread(target=ask)
            asking.start()
            assert begun.wait(WAIT_S)
            run.close(over=True)
            asking.join(WAIT_S)
            wait_until(lambda: not site.run_label)
            go_on.set()
            assert ended.wait(WAIT_S)
        assert not list((tmp_path / "site-1").iterdir())
        site.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"HTTPS_PROXY": "proxy.example:3128"}, "http://proxy.example:3128"),
        ({"https_proxy": "http://small.example:1", "HTTPS_PROXY": "http://large.example:1"}, "http://small.example:1"),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "intern.example,example.org"}, None),
        ({"HTTPS_PROXY": ""}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_proxy_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], found: str | None
) -> None:
    for name in ("https_proxy", "http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert proxy_for("fl.example.org") == found
