"""Attacks on the door of a deployment while a run goes on, which ends with the weights of a simulation.

The processes are those of a rehearsal: a coordinator and three sites, each with the files of its own machine. Strangers
come from an address of their own, as do removed sites; a member attacks with the key of a site that takes part, from a
third one. Each attack is repeated until the run has ended, side by side with the others.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.setup.enrolment import consider, install, make_request
from cloister.protocol.identity.roster import load_identity, new_identity
from cloister.protocol.identity.session import Entrance
from cloister.protocol.messages.door_pb2 import Alive, Commit, FromSite, Hello, Letter, Part, Vector, Wanted
from cloister.protocol.messages.transfer import CHUNK, VERSION
from cloister.protocol.plan.soundness import load
from cloister.server.federation.control import command
from cloister.server.federation.deployment import Deployment
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.outcome import outcome
from cloister.simulations.rehearsal.rehearsal import prepare, running
from cloister.tests.deployment.deployment_kills import simulated
from cloister.tests.parties.door_parties import Raw, Relay, said

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1200)]

ROUNDS = 40
HELD_S = 4.0
"""Seconds for which an attacker holds what it has opened."""
STRANGER, MEMBER = "127.0.0.2", "127.0.0.3"
"""From where they connect."""
CUT = "cut"
"""How an attack ends before it can be made, and how some end."""
_MEMORY = 2**29
"""Bytes by which the memory of the coordinator's processes may exceed that before the attacks."""
_LOG = 2**20
"""Bytes that the coordinator's log may have in the end."""


@dataclass(frozen=True)
class Target:
    """A federation under attack."""

    entrance: Entrance
    """Its door, for an attacker's address."""
    member: str
    """A site that takes part, whose key the attackers have."""
    key: Ed25519PrivateKey
    """Its key."""
    other: str
    """Another site that takes part."""
    gone: str
    """A site that was revoked."""
    gone_key: Ed25519PrivateKey
    """Its key."""
    over: threading.Event
    """Set when the run has ended."""

    def hold(self) -> None:
        """Do nothing for `HELD_S`, or until the run has ended."""
        self.over.wait(HELD_S)


def _connect(target: Target) -> socket.socket:
    host, _, port = target.entrance.address.rpartition(":")
    return socket.create_connection((host, int(port)), 30)


def silence(target: Target) -> str:
    """Connections that say nothing."""
    with ExitStack() as opened:
        for _ in range(100):
            with contextlib.suppress(OSError):
                opened.enter_context(_connect(target))
        target.hold()
    return "held"


def half_of_tls(target: Target) -> str:
    """Connections that begin a handshake of TLS and do not end it."""
    context = ssl.create_default_context(cadata=target.entrance.root.decode())
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    begun = hello.read()
    with ExitStack() as opened:
        for cut in range(1, len(begun), max(1, len(begun) // 20)):
            with contextlib.suppress(OSError):
                opened.enter_context(_connect(target)).sendall(begun[:cut])
        target.hold()
    return "held"


def another_name_in_tls(target: Target) -> str:
    """A client that asks for another host, by its name in TLS."""
    context = ssl.create_default_context(cadata=target.entrance.root.decode())
    try:
        with (
            _connect(target) as plain,
            context.wrap_socket(plain, server_hostname="fl.example.org"),
        ):
            return "let in"
    except ssl.SSLCertVerificationError:
        return "another certificate"
    except OSError:
        return CUT


def slow_reader(target: Target) -> str:
    """HTTP/2 whose answers nobody reads: thousands of pings."""
    context = ssl.create_default_context(cadata=target.entrance.root.decode())
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + bytes(8)
    try:
        with (
            _connect(target) as plain,
            context.wrap_socket(plain, server_hostname=target.entrance.server_name) as tls,
        ):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            tls.settimeout(HELD_S)
            tls.sendall(preface)
            for _ in range(200):
                tls.sendall(ping * 100)
            target.hold()
    except OSError:
        return CUT
    return "held"


def _refused(target: Target, method: str, messages: Sequence[bytes], key: bytes = b"") -> str:
    """The code with which a call is refused."""
    with Raw(target.entrance) as raw:
        try:
            list(raw.call(method, messages, key))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "answered"


def _sent(**fields: Any) -> bytes:
    message: bytes = FromSite(**fields).SerializeToString()
    return message


def huge_frame(target: Target) -> str:
    """A first message of 32 MB."""
    return _refused(target, "Session", [_sent(hello=Hello(version=VERSION, name="x" * 2**25))])


def endless_messages(target: Target) -> str:
    """A session that is never proved, and goes on saying hello."""
    hello = _sent(hello=Hello(version=VERSION, name=target.other, nonce=bytes(32)))
    return _refused(target, "Session", [hello] * 5000)


def _proved_as(target: Target, name: str, key: Ed25519PrivateKey) -> str:
    with Raw(target.entrance) as raw:
        try:
            call, _ = raw.welcomed(name, key)
        except (grpc.RpcError, StopIteration) as error:
            return str(error.code().name) if isinstance(error, grpc.RpcError) else "ended"
        call.cancel()
        return "let in"


def name_of_a_site(target: Target) -> str:
    """A stranger's own key under the name of a site."""
    return _proved_as(target, target.other, new_identity())


def revoked_key(target: Target) -> str:
    """A key that was revoked."""
    return _proved_as(target, target.gone, target.gone_key)


def key_of_another_site(target: Target) -> str:
    """A member's key under the name of another site."""
    return _proved_as(target, target.other, target.key)


def transfers_without_a_session(target: Target) -> str:
    """Uploads and downloads by somebody who proved nothing."""
    part = Part(vector=Vector(hash=bytes(32), size=CHUNK), request=bytes(32)).SerializeToString()
    asked = Wanted(hash=bytes(32), offset=0).SerializeToString()
    codes = {_refused(target, "Upload", [part], bytes(32)), _refused(target, "Download", [asked], bytes(32))}
    return " ".join(sorted(codes))


def enrolments(target: Target) -> str:
    """Strangers who ask to become sites, and go away."""
    with Raw(target.entrance) as raw:
        calls = [
            raw.call("Enrol", [_sent(commit=Commit(version=VERSION, commitment=os.urandom(32)))])
            for _ in range(30)
        ]
        codes = set()
        for call in calls:
            try:
                next(call, None)
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(str(error.code().name))
    return "refused in part" if codes - {"OK"} else "answered"


def replayed_proof(target: Target) -> str:
    """The messages with which a site has opened a session, sent again."""
    with Raw(target.entrance) as raw:
        call, nonce = raw.greeted(target.member)
        proof = raw.proof(target.member, target.key, nonce)
        call.cancel()
        hello = Hello(version=VERSION, name=target.member, nonce=bytes(32))
        return _refused(target, "Session", [_sent(hello=hello), _sent(proof=proof)])


def lies_of_a_member(target: Target) -> str:
    """A session of a member that lies about what it was asked, about lengths, hashes and what it may read."""
    data = os.urandom(CHUNK)
    name = blake3(data).digest()
    with Raw(target.entrance) as raw:
        call, key = raw.open(target.member, target.key)
        for _ in range(20):
            raw.say(reply=Letter(id=os.urandom(32), frame=os.urandom(300)))
            raw.say(alive=Alive())
        asked = b""
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def hear() -> None:
            with contextlib.suppress(grpc.RpcError, StopIteration):
                while True:
                    waiting.put(said(call))

        hearing = threading.Thread(target=hear)
        hearing.start()
        with contextlib.suppress(queue.Empty):
            while not asked:
                asked = waiting.get(timeout=1.0).request.id
        codes = Counter[str]()
        for size, of, request in (
            (2**62, name, asked),
            (CHUNK, b"../../../etc/passwd", asked),
            (CHUNK, name, os.urandom(32)),
            (0, name, asked),
            (3 * CHUNK, name, asked),
        ):
            start = Part(vector=Vector(hash=of, size=size), request=request).SerializeToString()
            more = Part(data=data).SerializeToString()
            codes[_refused(target, "Upload", [start, more, more, more], key)] += 1
        codes[_refused(target, "Download", [Wanted(hash=name, offset=0).SerializeToString()], key)] += 1
        call.cancel()
        hearing.join(30)
    target.over.wait(10.0)  # its site comes back, and takes part in rounds
    return "answered" if codes["answered"] else "refused"


OF_STRANGERS: dict[Callable[[Target], str], set[str]] = {
    silence: {"held"},
    half_of_tls: {"held"},
    another_name_in_tls: {"another certificate"},
    slow_reader: {CUT, "held"},
    huge_frame: {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"},
    endless_messages: {"PERMISSION_DENIED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"},
    name_of_a_site: {"PERMISSION_DENIED", "UNAVAILABLE"},
    revoked_key: {"PERMISSION_DENIED", "UNAVAILABLE"},
    key_of_another_site: {"PERMISSION_DENIED", "UNAVAILABLE"},
    replayed_proof: {"PERMISSION_DENIED", "UNAVAILABLE"},
    transfers_without_a_session: {"UNAUTHENTICATED", "UNAVAILABLE", "UNAUTHENTICATED UNAVAILABLE"},
    enrolments: {"refused in part"},
}
"""Each attack, and how it may end. The door cuts connections of an address that has too many (`UNAVAILABLE`)."""
OF_MEMBERS: dict[Callable[[Target], str], set[str]] = {lies_of_a_member: {"refused"}}


def memory_of(folder: Path) -> int:
    """Bytes of the resident memory of the coordinator's processes."""
    total = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if entry.name.isdecimal() and " coordinator " in line and str(folder) in line:
                pages = int((entry / "statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


@pytest.fixture
def files(small_plan: Path, tmp_path: Path) -> RunFiles:
    """A rehearsal of three sites of a federation that has revoked a fourth."""
    files = RunFiles(tmp_path / "deployed")
    plan = load(small_plan, ["cohort.sites=3", f"run.rounds={ROUNDS}"])
    now = datetime.datetime.now(datetime.UTC)
    with RunFolder.create(files.path, plan) as folder:
        prepare(folder, lambda _event: None)
        registry = Registry.open(files.federation)
        request, _ = make_request(tmp_path / "gone", "gone", "rehearsal", now.date())
        approved = registry.federation.approving([request])
        for version in (approved, approved.revoking("gone")):
            registry = registry.publish(version)
            for name in files.sites.names():
                install(consider(files.sites.site(name), version, now))
        Deployment(registry.federation.version, 120.0, str(registry.path)).write(folder)
    return files


def attacking(
    attacks: dict[Callable[[Target], str], set[str]], target: Target, found: dict[str, Counter[str]]
) -> Iterator[threading.Thread]:
    """Threads that repeat one attack each, until the run has ended."""

    def repeat(attack: Callable[[Target], str]) -> None:
        while not target.over.is_set():
            try:
                end = attack(target)
            except (grpc.RpcError, StopIteration):
                end = CUT  # among too many connections of its address
            found[attack.__name__][end] += 1

    for attack in attacks:
        found[attack.__name__] = Counter()
        yield threading.Thread(target=repeat, args=(attack,), name=attack.__name__)


def test_a_run_under_attack_ends_with_the_weights_of_a_simulation(
    small_plan: Path, tmp_path: Path, files: RunFiles
) -> None:
    whole = simulated(small_plan, tmp_path / "simulated", "--sites", "3", "--rounds", str(ROUNDS))
    with RunFolder.reopen(files.path) as folder:
        plan = folder.plan
    entrance = Registry.open(files.federation).federation.entrance
    member, other = files.sites.names()[-1], files.sites.names()[0]
    over = threading.Event()
    found: dict[str, Counter[str]] = {}
    state: dict[str, Any] = {}

    def target(relay: Relay) -> Target:
        return Target(
            replace(entrance, address=relay.address),
            member,
            load_identity(files.sites.site(member) / "identity.pem"),
            other,
            "gone",
            load_identity(tmp_path / "gone" / "identity.pem"),
            over,
        )

    with ExitStack() as opened:
        opened.enter_context(running(files, plan, lambda _line: None))
        before = memory_of(files.federation)
        strangers = opened.enter_context(Relay(entrance.address, source=STRANGER))
        insiders = opened.enter_context(Relay(entrance.address, source=MEMBER))
        threads = [
            *attacking(OF_STRANGERS, target(strangers), found),
            *attacking(OF_MEMBERS, target(insiders), found),
        ]
        for thread in threads:
            thread.start()
        try:
            for line in command(files.federation, do="follow", run=str(files.path)):
                if "state" in line:
                    state = dict(line)
            grown = memory_of(files.federation) - before
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not [thread.name for thread in threads if thread.is_alive()]
    print({name: dict(ends) for name, ends in found.items()}, f"memory +{grown / 1e6:.0f} MB")
    assert state == {"state": "done", "reason": ""}
    with RunFolder.reopen(files.path) as folder:
        assert outcome(folder).params_sha256 == whole["params_sha256"]
    for attack, may in (OF_STRANGERS | OF_MEMBERS).items():
        ends = found[attack.__name__]
        assert set(ends) <= may | {CUT}, f"{attack.__name__}: {dict(ends)}"
        assert ends.keys() & may, f"{attack.__name__} was not made while the run went on"
    assert grown < _MEMORY
    assert (files.path / "federation.log").stat().st_size < _LOG
