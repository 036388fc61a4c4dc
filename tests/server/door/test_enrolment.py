"""A site that asks over the door to join: what both ends see, and what others can do about it, all over real TLS."""

from __future__ import annotations

import asyncio
import datetime
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.clients.network import enrol as clients_enrol
from cloister.clients.network.enrol import Enrolment, following, wait_for_approval
from cloister.clients.network.route import Route
from cloister.protocol.errors import (
    CertificateError,
    ConnectionFailedError,
    DoorError,
    MemberError,
    RosterError,
    UntrustedError,
)
from cloister.protocol.identity.certificates import read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import new_identity
from cloister.protocol.identity.session import Entrance, Nonces
from cloister.protocol.identity.short_authentication import _CODE, Exchange, commitment, given
from cloister.protocol.messages.door_pb2 import Commit, FromSite, Reveal, ToSite
from cloister.protocol.messages.messages import Joined
from cloister.protocol.messages.transfer import VERSION
from cloister.server.door import enrolments
from cloister.server.door.door import Door
from cloister.server.door.enrolments import _AT_ADDRESS, _PLACES, _WRONG
from cloister.tests.parties.door_parties import (
    AUTHORITY,
    CERTIFICATE,
    NAMES,
    Answering,
    AtDoor,
    Authority,
    Raw,
    Relay,
    connected,
    entrance_at,
    federation_of,
    identity_of,
    join_request,
    said,
)
from cloister.tests.parties.envelopes import PUBLIC
from cloister.tests.server.door.test_door import ask, memory
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

OTHER = Authority()
TODAY = datetime.date(2026, 11, 26)


def asking(name: str, contact: str = "Dr A. Example") -> Request:
    """The request of a site that is none yet."""
    return Request.of(name, identity_of(name), contact, TODAY)


def enrol(address: str, request: Request, identity: Ed25519PrivateKey | None = None) -> Enrolment:
    """What a site does, with the key that its name has in these tests."""
    return clients_enrol.enrol(address, request, identity or identity_of(request.name))


def newest(entrance: Entrance, name: str, identity: Ed25519PrivateKey) -> Federation | None:
    """The newest version, as a site that waits asks for it; None while its request waits."""
    found = following(entrance, name, identity, 0)
    return found[0] if found else None


class Open:
    """A door of a federation of which a test publishes versions.

    Args:
        authority: The federation's.
        bind: Where it listens.
    """

    def __init__(self, authority: Authority = AUTHORITY, bind: str = "127.0.0.1:0") -> None:
        self.newest = Federation.first("tests", "coordinator.example:9443", authority.der, PUBLIC, [])
        certificate = CERTIFICATE if authority is AUTHORITY else authority.server()
        self.versions: dict[int, Federation] = {}
        """Earlier ones, by their number."""
        self.door = Door(lambda: certificate, lambda: self.newest, bind, version=self._version)
        self.address = f"127.0.0.1:{self.door.address.rpartition(':')[2]}"

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()

    def _version(self, number: int) -> Federation | None:
        """An earlier version; a door asks for no other, as `Registry.version` has none."""
        assert 1 <= number < self.newest.version
        return self.versions.get(number)

    def approve(self, name: str, code: str) -> None:
        """What `cloister coordinator approve` does."""
        request = Request.from_toml(self.door.compare(name, given(code)))
        self.versions[self.newest.version] = self.newest
        self.newest = self.newest.approving([request])
        self.door.refresh()

    @property
    def names(self) -> list[str]:
        """Those that wait."""
        return [each["name"] for each in self.door.waiting()[0]]

    @property
    def failed(self) -> int:
        """The exchanges that have failed."""
        return self.door.waiting()[1]


@pytest.fixture
def opened() -> Iterator[Open]:
    with Open() as door:
        yield door


@contextmanager
def raw_at(opened: Open) -> Iterator[Raw]:
    """A peer of a door that says what a test says."""
    with Raw(SimpleNamespace(address=opened.address)) as raw:  # type: ignore[arg-type]  # all that it needs
        yield raw


def exchange(
    raw: Raw,
    committed: bytes,
    request: str,
    nonce: bytes,
    sign: Callable[[Exchange], bytes] = lambda _seen: b"",
) -> list[ToSite]:
    """What a peer is answered that commits itself, and reveals a request and a nonce, with a signature."""
    say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    commit = Commit(version=VERSION, commitment=committed)
    say.put(FromSite(commit=commit).SerializeToString())
    call = raw.call("Enrol", iter(say.get, None))
    answers = [said(call)]
    founded = answers[0].founded
    entrance = Entrance(founded.name, founded.address, founded.authority)
    seen = Exchange(request, Nonces(nonce, founded.nonce), entrance, CERTIFICATE.der)
    say.put(FromSite(reveal=Reveal(request=request, nonce=nonce, signature=sign(seen))).SerializeToString())
    say.put(None)
    return answers + [ToSite.FromString(data) for data in call]


def refused(raw: Raw, committed: bytes, request: str, nonce: bytes) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        exchange(raw, committed, request, nonce)
    assert raised.value.code().name in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
    return str(raised.value.details())


def asks_again(opened: Open, waiting: Enrolment, name: str, identity: Ed25519PrivateKey | None = None) -> Any:
    return newest(waiting.entrance, name, identity or identity_of(name))


# What is meant.


def test_a_person_approves_a_site_by_its_code(opened: Open) -> None:
    """Before the first site too; nothing is accepted by itself."""
    one, two = enrol(opened.address, asking("one")), enrol(opened.address, asking("two"))
    assert one.code != two.code
    assert opened.names == ["one", "two"]
    assert asks_again(opened, one, "one") is None
    opened.approve("one", one.code.lower().replace("-", " "))
    found = asks_again(opened, one, "one")
    assert found == opened.newest
    assert [site.name for site in found.sites] == ["one"]
    assert found.sites[0] == asking("one")
    assert opened.names == ["two"]
    assert asks_again(opened, two, "two") is None


def test_a_site_waits_while_the_coordinator_is_away(opened: Open) -> None:
    """The door is closed when the site asks first, and a version has the site when it asks last."""
    waiting, said = enrol(opened.address, asking("one")), list[str]()
    opened.door.close()
    again: list[Open] = []

    def pause(_seconds: float) -> None:
        if not again and len(said) == 1:
            again.append(Open(bind=opened.address))
            again[0].newest = again[0].newest.approving([asking("one")])

    try:
        found = wait_for_approval(waiting, "one", identity_of("one"), said.append, pause)
        assert found.site("one") == asking("one")
        assert len(said) == 1
    finally:
        for each in again:
            each.door.close()


def test_a_site_goes_on_with_another_code(opened: Open) -> None:
    first = enrol(opened.address, asking("one"))
    second = enrol(opened.address, asking("one"))
    assert first.code != second.code
    assert opened.names == ["one"]
    for name in ("two", "three", "four"):
        enrol(opened.address, asking(name))
    second = enrol(opened.address, asking("one"))  # all places of the address are taken, one by itself
    with raises(RosterError, "code of one"):
        opened.approve("one", first.code)
    waits = opened.door.waiting()[0][-1]
    assert (waits["name"], waits["tries"], waits["wrong"]) == ("one", 3, 1), (
        "both are shown to the coordinator's person"
    )
    opened.approve("one", second.code)
    third = enrol(opened.address, asking("one"))  # it was interrupted after it was approved
    assert opened.names == ["two", "three", "four"]
    assert asks_again(opened, third, "one") == opened.newest


def test_a_site_gets_the_version_after_its_own(opened: Open) -> None:
    """Each that it missed, in their order, then the newest; the newest too where no next is known."""
    waiting = enrol(opened.address, asking("one"))
    for name in ("one", "two", "three", "four"):
        enrolled = waiting if name == "one" else enrol(opened.address, asking(name))
        opened.approve(name, enrolled.code)
    for installed, sent in ((0, 4), (1, 2), (2, 3), (3, 4), (4, 4), (9, 4), (2**64 - 1, 4)):
        found = following(waiting.entrance, "one", identity_of("one"), installed)
        assert found is not None
        assert (found[0].version, found[1]) == (sent, 4)
    opened.versions.clear()
    assert following(waiting.entrance, "one", identity_of("one"), 1) == (opened.newest, 4)


def test_an_earlier_version_is_for_sites_of_the_newest_alone(opened: Open) -> None:
    """After a rotation the old key gets none; the new one gets those from before it too."""
    waiting, old, new = enrol(opened.address, asking("one")), identity_of("one"), new_identity()
    opened.approve("one", waiting.code)
    opened.approve("two", enrol(opened.address, asking("two")).code)
    opened.versions[2] = opened.newest
    opened.newest = opened.newest.approving([Request.of("one", new, "x", TODAY, replaces=old)])
    with pytest.raises(MemberError):
        following(waiting.entrance, "one", old, 1)
    assert following(waiting.entrance, "one", new, 1) == (opened.versions[2], 3)


def test_the_version_is_for_sites_alone(opened: Open) -> None:
    """Nor learns anybody else whether a request waits."""
    waiting = enrol(opened.address, asking("one"))
    for approved in (False, True):
        if approved:
            opened.approve("one", waiting.code)
        for name, identity in (("one", new_identity()), ("two", identity_of("one")), ("two", new_identity())):
            with pytest.raises(MemberError):
                asks_again(opened, waiting, name, identity)


# Who is between a site and the coordinator.


SEEN = Exchange("request", Nonces(b"s" * 32, b"d" * 32), Entrance("f", "a:1", b"authority"), b"certificate")


@pytest.mark.parametrize(
    "other",
    [
        replace(SEEN, request="other"),
        replace(SEEN, nonces=Nonces(b"x" * 32, b"d" * 32)),
        replace(SEEN, nonces=Nonces(b"s" * 32, b"x" * 32)),
        replace(SEEN, entrance=replace(SEEN.entrance, federation="g")),
        replace(SEEN, entrance=replace(SEEN.entrance, address="b:1")),
        replace(SEEN, entrance=replace(SEEN.entrance, authority=b"other")),
        replace(SEEN, certificate=b"other"),
    ],
    ids=["request", "site's nonce", "door's nonce", "federation", "address", "authority", "certificate"],
)
def test_a_code_binds(other: Exchange) -> None:
    assert given(SEEN.code) == SEEN.code
    assert other.code != SEEN.code


def test_a_code_has_40_bits() -> None:
    """Each letter takes each of 32 values; a letter that a person hears or reads as another is that one."""
    letters = [replace(SEEN, request=str(number)).code.replace("-", "") for number in range(1000)]
    assert {len(each) for each in letters} == {8}
    assert all(len({each[at] for each in letters}) == 32 for at in range(8))
    assert given(" oil0 abcd") == "0110-ABCD"
    for wrong in ("", "ABCD-EFG", "ABCD-EFGH-J", "ABCD-EFGU", "ABCD-EFG\u0660"):
        with raises(RosterError, "code"):
            given(wrong)


@pytest.mark.parametrize("keys", ["its own", "the site's"])
def test_a_man_in_the_middle_is_seen(opened: Open, keys: str) -> None:
    """He has a door of his own, with a federation of the same name, and passes on what he can."""
    with Open(OTHER) as middle:
        told = enrol(middle.address, asking("one"))
        own = new_identity()
        forged = Request.of("one", own, "Dr A. Example", TODAY)
        if keys == "its own":
            assert told.code != enrol(opened.address, forged, own).code
        else:  # he has no signature of the site's for this exchange
            with pytest.raises(MemberError):
                enrol(opened.address, asking("one"), own)
            enrol(opened.address, asking("one"))
        with raises(RosterError, "code of one"):
            opened.approve("one", told.code)
        assert opened.newest.version == 0
        middle.approve("one", told.code)  # he needs no code
        found = asks_again(middle, told, "one")
        assert found.fingerprint != opened.newest.approving([asking("one")]).fingerprint


def test_a_man_in_the_middle_cannot_name_the_true_authority(opened: Open) -> None:
    with Open(OTHER) as middle:
        middle.newest = opened.newest  # his certificate is of another authority
        with raises(UntrustedError, f"certificate of {middle.address}"):
            enrol(middle.address, asking("one"))
        assert middle.names == []


def test_what_a_server_says_of_itself_is_checked(opened: Open) -> None:
    """It is printed before anything is compared."""
    right = opened.newest
    for wrong, kind in (
        (replace(right, name="\x1b[2J"), RosterError),
        (replace(right, door="\x1b[2J:1"), RosterError),
        (replace(right, authority=b"none"), CertificateError),
        (
            replace(right, authority=read_certificate(CERTIFICATE.pem, "").public_bytes(Encoding.DER)),
            CertificateError,
        ),
    ):
        opened.newest = wrong
        with pytest.raises(kind):
            enrol(opened.address, asking("one"))
    assert opened.names == []
    opened.newest = right


def test_a_certificate_that_changes_is_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first connection and the next: also one of the same authority."""
    other = read_certificate(AUTHORITY.server().pem, "other")
    with monkeypatch.context() as patch:
        patch.setattr(Route, "shown_certificate", lambda _: other)
        with raises(UntrustedError, f"certificate of {opened.address}"):
            enrol(opened.address, asking("one"))
    waiting = enrol(opened.address, asking("one"))
    with Open(OTHER) as wrong:
        moved = replace(waiting, entrance=replace(waiting.entrance, address=wrong.address))
        with pytest.raises(UntrustedError):
            wait_for_approval(moved, "one", identity_of("one"), print)


def test_a_host_that_the_certificate_does_not_name_is_told(opened: Open) -> None:
    """It is no sign of a device between."""
    address = opened.address.replace("127.0.0.1", "localhost")
    with raises(UntrustedError, f"certificate of {address}") as refused:
        enrol(address, asking("one"))
    assert refused.value.value == "127.0.0.1, coordinator.example"
    assert "--certificate-name localhost" in refused.value.fix


def test_a_version_of_another_authority_is_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = enrol(opened.address, asking("one"))
    opened.approve("one", waiting.code)
    other = replace(opened.newest, authority=OTHER.der).to_toml().encode()
    monkeypatch.setattr("cloister.server.door.door._document", lambda _: other)
    with pytest.raises(RosterError):
        asks_again(opened, waiting, "one")


def test_no_door_is_there() -> None:
    with pytest.raises(ConnectionFailedError):
        enrol("127.0.0.1:1", asking("one"))


# Commitments.


def test_the_codes_that_were_made_for_a_name_that_waits_are_not_forgotten(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number shows who tries to guess one."""
    monkeypatch.setattr(enrolments, "_REMEMBERED", 2)
    for _ in range(3):
        enrol(opened.address, asking("one"))
    with pytest.raises(MemberError):  # a key has one name: it could take the places of all others
        enrol(opened.address, Request.of("two", identity_of("one"), "x", TODAY), identity_of("one"))
    for name in ("two", "three", "four"):
        with suppress(DoorError):  # an address has few places
            enrol(opened.address, asking(name))
    assert {each["name"]: each["tries"] for each in opened.door.waiting()[0]}["one"] == 3


@pytest.mark.usefixtures("talkative")
def test_a_commitment_is_answered_once(opened: Open) -> None:
    document, nonce = asking("one").to_toml(), bytes(32)
    committed = commitment(document, nonce)
    with raw_at(opened) as raw:
        founded, waiting = exchange(
            raw, committed, document, nonce, lambda seen: seen.sign(identity_of("one"))
        )
        assert founded.founded.nonce
        assert waiting.WhichOneof("said") == "waiting"
        assert "commitment" in refused(raw, committed, document, nonce)
        broken = raw.call("Enrol", [_commit(bytes(31))])
        with pytest.raises(grpc.RpcError):
            next(broken)
        # Also one that was not followed by anything.
        with pytest.raises(grpc.RpcError):
            list(raw.call("Enrol", [_commit(b"x" * 32)]))
        assert "commitment" in refused(raw, b"x" * 32, document, nonce)
    assert opened.names == ["one"]


def _commit(committed: bytes) -> bytes:
    message: bytes = FromSite(commit=Commit(version=VERSION, commitment=committed)).SerializeToString()
    return message


@pytest.mark.parametrize("changed", ["request", "nonce", "length"])
def test_what_is_revealed_is_what_was_committed(opened: Open, changed: str) -> None:
    document, nonce = asking("one").to_toml(), bytes(32)
    other = Request.of("one", new_identity(), "Dr A. Example", TODAY).to_toml()
    said = {
        "request": (commitment(document, nonce), other, nonce),
        "nonce": (commitment(document, nonce), document, b"x" * 32),
        "length": (commitment(document, b"x"), document, b"x"),
    }[changed]
    with raw_at(opened) as raw:
        assert "the one of the commitment" in refused(raw, *said)
    assert (opened.names, opened.failed) == ([], 1), "a failure is shown to the coordinator's person"


def test_another_release_is_refused(opened: Open) -> None:
    """Before it reveals anything; version 3 signed no exchange."""
    old = FromSite(commit=Commit(version="cloister/door/3", commitment=bytes(32))).SerializeToString()
    with raw_at(opened) as raw:
        code, text = raw.refused("Enrol", [old])
    assert (code, "same release" in text) == ("RESOURCE_EXHAUSTED", True)


# The key of a request.


def _signed(identity: Ed25519PrivateKey, seen: Exchange) -> bytes:
    return seen.sign(identity)


OTHERS: dict[str, Callable[[Exchange], bytes]] = {
    "nothing": lambda _seen: b"",
    "a key of its own": lambda seen: seen.sign(new_identity()),
    "of another exchange": lambda seen: replace(seen, nonces=Nonces(seen.nonces.site, bytes(32))).sign(
        identity_of("one")
    ),
    "towards another server": lambda seen: replace(seen, certificate=b"another").sign(identity_of("one")),
    "of another meaning": lambda seen: identity_of("one").sign(seen._packed(_CODE)),
}


@pytest.mark.usefixtures("talkative")
@pytest.mark.parametrize("what", OTHERS)
def test_a_request_waits_for_the_owner_of_its_key_alone(opened: Open, what: str) -> None:
    """The document of a request is no secret: it is sent by mail, and is in the file of the federation."""
    document, nonce = asking("one").to_toml(), os.urandom(32)
    with raw_at(opened) as raw, pytest.raises(grpc.RpcError) as raised:
        exchange(raw, commitment(document, nonce), document, nonce, OTHERS[what])
    assert raised.value.code().name == "PERMISSION_DENIED"
    assert (opened.names, opened.failed) == ([], 1)
    waiting, nonce = enrol(opened.address, asking("one")), os.urandom(32)
    with raw_at(opened) as raw, pytest.raises(grpc.RpcError):
        exchange(raw, commitment(document, nonce), document, nonce, OTHERS[what])
    assert opened.door.waiting()[0][0]["tries"] == 1
    opened.approve("one", waiting.code)  # it is the code that its person has read


@pytest.mark.usefixtures("talkative")
def test_a_request_waits_for_whoever_has_it_without_the_guard(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mutant(
        "server.door.enrolments:Enrolments.reveal", "exchange.verify(request.key, signature)", "pass"
    ).plant(monkeypatch)
    waiting, document, nonce = enrol(opened.address, asking("one")), asking("one").to_toml(), os.urandom(32)
    with raw_at(opened) as raw:
        exchange(raw, commitment(document, nonce), document, nonce)
    with raises(RosterError, "code of one"):
        opened.approve("one", waiting.code)


# Codes and names.


def test_a_request_with_wrong_codes_waits_no_longer(opened: Open) -> None:
    waiting, other = enrol(opened.address, asking("one")), enrol(opened.address, asking("two"))
    for _ in range(_WRONG):
        with raises(RosterError, "code of one"):
            opened.approve("one", other.code)
    assert opened.names == ["two"]
    with raises(RosterError, "--code"):
        opened.approve("one", waiting.code)
    with pytest.raises(MemberError) as refusal:
        asks_again(opened, waiting, "one")
    assert "wrong" in str(refusal.value)
    assert opened.newest.version == 0


def test_a_request_of_a_name_that_is_taken_is_refused(opened: Open) -> None:
    """Also under its own key; a request of another's name that waits takes nothing from it."""
    opened.approve("one", enrol(opened.address, asking("one")).code)
    for identity in (new_identity(), identity_of("one")):
        with pytest.raises(MemberError) as refusal:
            enrol(opened.address, Request.of("one", identity, "someone else", TODAY), identity)
        assert "--name" in str(refusal.value)
    assert opened.names == []
    own = new_identity()
    stranger = enrol(opened.address, Request.of("two", own, "a stranger", TODAY), own)
    true = enrol(opened.address, asking("two"))
    assert opened.names == ["two", "two"]
    opened.approve("two", true.code)
    assert opened.newest.site("two") == asking("two")
    with raises(RosterError, "request of two"):
        opened.approve("two", stranger.code)


# Few, small, expiring.


def test_requests_expire(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour after the site was heard last, and a day after it came."""
    now = [0.0]
    monkeypatch.setattr(enrolments, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heard, silent = enrol(opened.address, asking("one")), enrol(opened.address, asking("two"))
    for _ in range(24):
        now[0] += 3599.0
        assert asks_again(opened, heard, "one") is None
        assert opened.names == (["one", "two"] if now[0] < 3600 else ["one"])
    now[0] += 100.0
    for waiting, name in ((heard, "one"), (silent, "two")):
        with pytest.raises(MemberError) as refusal:
            asks_again(opened, waiting, name)
        assert "expired" in str(refusal.value)
    assert opened.names == []
    with raises(RosterError, "--code"):
        opened.approve("one", heard.code)


def test_a_request_is_small(opened: Open) -> None:
    long = asking("x" * 64, "\U0001d54f" * 200)
    assert len(long.to_toml().encode()) < 2**11
    enrol(opened.address, long)
    document = asking("one").to_toml() + "\n" * 2**12
    with raw_at(opened) as raw:
        assert "at most 4096" in refused(raw, commitment(document, bytes(32)), document, bytes(32))
    assert opened.names == ["x" * 64]


def test_a_flood_of_requests_leaves_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address has a few places, and one that has many loses one to an address that has none."""
    with Open(bind="0.0.0.0:0") as opened, ExitStack() as stack:
        lone = stack.enter_context(Relay(opened.address, source="127.0.0.99"))
        waiting = enrol(lone.address, asking("lone"))
        crowds = [
            stack.enter_context(Relay(opened.address, source=f"127.0.0.{number}"))
            for number in range(2, 2 + _PLACES // _AT_ADDRESS)
        ]
        names = [f"f{number}" for number in range(_PLACES)]
        for at, name in enumerate(names[:-1]):
            enrol(crowds[at // _AT_ADDRESS].address, asking(name))
        for crowd in crowds:
            with raises(DoorError, "enrolment", says="16 in all"):
                enrol(crowd.address, asking("more"))
        assert len(opened.names) == _PLACES
        late = stack.enter_context(Relay(opened.address, source="127.0.0.98"))
        enrol(late.address, asking("late"))
        assert {"lone", "late"} <= set(opened.names)
        assert len(opened.names) == _PLACES
        assert names[0] not in opened.names
        with pytest.raises(MemberError):
            newest(entrance_at(opened.address), names[0], identity_of(names[0]))
        assert newest(replace(waiting.entrance, address=opened.address), "lone", identity_of("lone")) is None


def test_an_address_has_few_requests_that_wait_also_of_those_that_waited_elsewhere() -> None:
    """One that is refused waits as before, with the code that its person has read."""
    with Open(bind="0.0.0.0:0") as opened, ExitStack() as stack:
        names = [f"f{number}" for number in range(_AT_ADDRESS + 1)]
        codes = {}
        for number, name in enumerate(names, 2):
            elsewhere = stack.enter_context(Relay(opened.address, source=f"127.0.0.{number}"))
            codes[name] = enrol(elsewhere.address, asking(name)).code
        one = stack.enter_context(Relay(opened.address, source="127.0.0.99"))
        for name in names[:-1]:
            codes[name] = enrol(one.address, asking(name)).code
        with raises(DoorError, "enrolment", says=f"fewer than {_AT_ADDRESS} of an address"):
            enrol(one.address, asking(names[-1]))
        waiting = opened.door.waiting()[0]
        assert [each["address"] for each in waiting].count("127.0.0.99") == _AT_ADDRESS
        assert [each["name"] for each in waiting] == [names[-1], *names[:-1]]
        codes[names[0]] = enrol(one.address, asking(names[0])).code  # it takes its own place
        for name in names:
            opened.approve(name, codes[name])


def test_an_exchange_that_says_nothing_ends(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the connection of a site, for which the accept loop sets no time."""
    monkeypatch.setattr("cloister.server.door.door.HANDSHAKE_S", 0.2)
    for first in ([], [_commit(bytes(32))]):
        say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for each in first:
            say.put(each)
        with raw_at(opened) as raw, pytest.raises(grpc.RpcError) as raised:
            list(raw.call("Enrol", iter(say.get, None)))
        say.put(None)
        assert raised.value.details() == "timeout: nothing was received"
    assert opened.failed == 1


@pytest.mark.usefixtures("talkative")
def test_an_address_has_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 at once and one in 5 s, whatever becomes of them; another address has its own."""
    now = [0.0]
    monkeypatch.setattr("cloister.server.door.rate.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Open(bind="0.0.0.0:0") as opened, Relay(opened.address, source="127.0.0.9") as relay:
        for allowed in (20, 2):
            with raw_at(opened) as raw:
                for number in range(allowed):
                    committed = os.urandom(32)
                    assert "of the commitment" in refused(raw, committed, str(number), bytes(32))
                assert "messages" in refused(raw, os.urandom(32), "", bytes(32))
            now[0] += 10.0
        assert enrol(relay.address, asking("one")).code
        assert (opened.names, opened.failed) == (["one"], 22)


@pytest.mark.slow
def test_all_addresses_together_begin_few_enrolments() -> None:
    """Each commitment that is answered is a try to get a code that somebody else reads aloud."""
    door = enrolments.Enrolments()
    for number in range(enrolments._ALL_BURST):
        door.commit(number.to_bytes(32), f"2001:db8:{number:x}::/64")
    with raises(DoorError, "messages"):
        door.commit(bytes([1] * 32), "192.0.2.1")


@pytest.mark.usefixtures("talkative")
def test_a_flood_of_enrolments_disturbs_no_member_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that say nothing, on all connections that strangers may have, and exchanges that come to nothing."""
    monkeypatch.setattr(enrolments, "_REMEMBERED", 100)
    monkeypatch.setattr(enrolments, "_BURST", 2**20)
    monkeypatch.setattr(enrolments, "_ALL_BURST", 2**20)
    federation = federation_of({name: identity_of(name) for name in NAMES})
    with (
        Door(lambda: CERTIFICATE, lambda: federation, "0.0.0.0:0") as door,
        AtDoor(tmp_path, door=door) as channel,
        ExitStack() as stack,
    ):
        channel.address = f"127.0.0.1:{door.address.rpartition(':')[2]}"
        relay = stack.enter_context(Relay(channel.address, source="127.0.0.9"))
        elsewhere: Any = SimpleNamespace(address=relay.address)
        stack.enter_context(connected(channel, Answering(), tmp_path))
        crowd = stack.enter_context(ExitStack())
        raws = [crowd.enter_context(Raw(elsewhere)) for _ in range(64)]
        silent = [
            raw.call("Enrol", iter(queue.SimpleQueue[bytes]().get, None)) for raw in raws for _ in range(15)
        ]
        while door._loop.call(lambda: len(asyncio.all_tasks())) < len(silent):
            assert not silent[0].done()
        assert ask(channel, join_request()) == Joined("site-1")
        with Raw(channel) as member:  # a new session too
            member.open("site-2")
        waiting = enrol(channel.address, asking("one"))
        for call in silent:
            call.cancel()
        crowd.close()
        before = 0
        for number in range(300):
            identity = identity_of("flood") if number % 2 else new_identity()
            request = Request.of("flood" if number % 2 else "f", identity, "x", TODAY)
            document, nonce = request.to_toml(), number.to_bytes(32)
            if number % 20 == 0:  # a connection has 64 kB
                raw = stack.enter_context(Raw(channel))
            assert "the one of the commitment" in refused(raw, bytes(16) + nonce[16:], document, nonce)
            with suppress(grpc.RpcError):  # all places of the address are taken
                exchange(raw, commitment(document, nonce), document, nonce, partial(_signed, identity))
            if number == 150:
                before = memory()
            if number % 150 == 100:
                answers = channel.ask({1: join_request(f"{number}")}, 30.0, group="1")
                assert next(iter(answers)) == (1, Joined("site-1"))
        assert memory() - before < 2**23
        kept = door._enrolments
        assert max(len(kept._commitments), len(kept._tries), len(kept._ended)) <= 100
        assert newest(waiting.entrance, "one", identity_of("one")) is None
        assert len(door.waiting()[0]) <= _AT_ADDRESS
