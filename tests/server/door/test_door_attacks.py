"""Traffic that the door refuses: at the handshake, in a session, in a transfer; and what it costs the others."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from blake3 import blake3
from packaging.requirements import Requirement

from cloister.clients.network import door as clients_door
from cloister.clients.network.door import DoorSite, Visitor
from cloister.protocol.errors import (
    CloisterError,
    DoorError,
    EngineError,
    MemberError,
    SignatureError,
    StorageError,
    TransferError,
    UntrustedError,
)
from cloister.protocol.identity.heads import Heads
from cloister.protocol.identity.roster import new_identity
from cloister.protocol.identity.session import Entrance, Nonces, prove, verify_proof
from cloister.protocol.messages.door_pb2 import (
    Alive,
    FromSite,
    Head,
    Held,
    Hello,
    Letter,
    Part,
    ToSite,
    Vector,
    Wanted,
)
from cloister.protocol.messages.messages import Failed, Joined
from cloister.protocol.messages.transfer import CHUNK, MESSAGE, VERSION, Arrivals, data_of, part_of
from cloister.protocol.messages.wire import LONGEST, to_bytes
from cloister.server.door import door as server_door
from cloister.server.door import front
from cloister.server.door import sites as server_sites
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.sum.channel import Failure
from cloister.tests.parties.door_parties import (
    AUTHORITY,
    CERTIFICATE,
    NAME,
    NAMES,
    WAIT_S,
    Answering,
    AtDoor,
    Authority,
    Raw,
    Relay,
    connected,
    contribute,
    entrance_at,
    federation_of,
    identity_of,
    join_request,
    open_channel,
    said,
)
from cloister.tests.server.door.test_door import ask, memory
from cloister.tests.tools.raises import raises

MODEL = np.arange(CHUNK, dtype=np.float32)
OTHER = Authority()


def why(folder: Path, entrance: Entrance, *, name: str = "site-1", identity: Any = None) -> CloisterError:
    """Why the session of a site is refused."""
    client = DoorSite(
        Visitor(name, lambda: identity or identity_of(name), lambda: entrance),
        lambda: Answering(name),
        folder / "refused",
    )
    with pytest.raises(CloisterError) as raised:
        client._attend()
    return raised.value


def at_door(folder: Path, certificate: ServerCertificate) -> AtDoor:
    """A run behind a door that shows a certificate."""
    federation = federation_of({name: identity_of(name) for name in NAMES})
    return AtDoor(folder, door=Door(lambda: certificate, lambda: federation, "127.0.0.1:0"))


REFUSED: dict[str, tuple[Any, type[CloisterError], str]] = {
    "other federation": (
        lambda e: replace(e, federation="other"),
        MemberError,
        "a signature of this session",
    ),
    "other authority": (lambda e: replace(e, authority=OTHER.der), UntrustedError, "issuer certificate"),
    "other host": (
        lambda e: replace(e, address=e.address.replace("127.0.0.1", "localhost")),
        UntrustedError,
        "Hostname",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_handshake_is_refused(tmp_path: Path, what: str) -> None:
    alter, kind, reason = REFUSED[what]
    with open_channel(tmp_path) as channel:
        error = why(tmp_path, alter(entrance_at(channel.address)))
        assert type(error) is kind
        assert reason in f"{error} {error.value}"
        assert "\n" not in str(error)
        assert channel.connected() == []
        with connected(channel, Answering(), tmp_path):
            assert ask(channel, join_request()) == Joined("site-1")


def test_only_sites_of_the_federation_connect(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel:
        entrance = entrance_at(channel.address)
        for name, identity in (
            ("site-2", identity_of("site-1")),
            ("site-1", new_identity()),
            ("stranger", new_identity()),
        ):
            error = why(tmp_path, entrance, name=name, identity=identity)
            assert isinstance(error, MemberError)
            assert "a site of the federation, with its key" in str(error)
        odd = why(tmp_path, entrance, name="\x1b[2J", identity=new_identity())
        assert "card name" in str(odd)
        assert channel.door.connected() == []


def test_a_site_that_leaves_the_federation_is_disconnected_and_stays_out(tmp_path: Path) -> None:
    """Also one whose name has another key since then."""
    members = {name: identity_of(name) for name in NAMES}
    newest = [federation_of(members)]
    with (
        Door(lambda: CERTIFICATE, lambda: newest[0], "127.0.0.1:0") as door,
        AtDoor(tmp_path, door=door) as channel,
        Raw(channel) as raw,
        Raw(channel) as other,
        connected(channel, Answering("site-3"), tmp_path),
    ):
        gone, _ = raw.open("site-1")
        rotated, _ = other.open("site-2")
        newest[0] = federation_of({"site-2": new_identity(), "site-3": members["site-3"]})
        door.refresh()
        for call in (gone, rotated):
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() is grpc.StatusCode.ABORTED
        assert door.connected() == ["site-3"]
        for name in ("site-1", "site-2"):
            assert isinstance(why(tmp_path, entrance_at(door.address), name=name), MemberError)


def test_the_door_says_of_each_site_whether_it_is_connected_and_why_it_was_refused(tmp_path: Path) -> None:
    members = {name: identity_of(name) for name in NAMES}
    federation = federation_of(members)
    heads = Heads(tmp_path / "audit.log", tmp_path / "heads")
    with (
        Door(lambda: CERTIFICATE, lambda: federation, "127.0.0.1:0", heads) as door,
        Raw(entrance_at(door.address)) as raw,
        Raw(entrance_at(door.address)) as again,
    ):
        assert door.states() == dict.fromkeys(NAMES, "not connected")
        call, nonce = raw.greeted("site-1")
        proof = raw.proof("site-1", members["site-1"], nonce)
        proof.seen.CopyFrom(Head(number=7, hash="00" * 32))  # of a log that the coordinator has no more
        raw.say(proof=proof)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert door.states()["site-1"].startswith("refused: audit log")
        held, _ = again.open("site-1")
        assert door.states() == dict.fromkeys(NAMES, "not connected") | {"site-1": "connected"}
        held.cancel()


def test_a_site_that_was_removed_without_a_word_to_the_door_stays_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command was killed after it has published, and the site never says that it is alive; or it proves itself
    while the version is published."""
    monkeypatch.setattr(server_door, "HEARTBEAT_S", 0.1)
    unreadable = [StorageError("federation", expected="a folder that can be read")]
    members = {name: identity_of(name) for name in NAMES}
    whole = federation_of(members)
    rest = federation_of({name: members[name] for name in NAMES[1:]})
    newest = [whole]

    def federation() -> Any:
        if newest[0] is rest and unreadable:  # for a moment, in which the door looks
            raise unreadable.pop()
        return newest[0]

    with Door(lambda: CERTIFICATE, federation, "127.0.0.1:0") as door:
        with AtDoor(tmp_path, door=door) as channel, Raw(channel) as raw:
            call, _ = raw.open("site-1")
            newest[0] = rest
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() is grpc.StatusCode.ABORTED
        newest[0], known = whole, door._heads.known

        def published_now(owner: str) -> Any:
            newest[0] = rest
            return known(owner)

        with mock.patch.object(door._heads, "known", published_now), Raw(entrance_at(door.address)) as raw:
            with pytest.raises(grpc.RpcError) as raised:
                raw.open("site-1")
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert newest[0] is rest


def test_sessions_of_a_site_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves lines in logs and in the run's folder."""
    monkeypatch.setattr(server_sites, "_SESSIONS", 3)
    with open_channel(tmp_path) as channel:
        for _ in range(3):
            with Raw(channel) as raw:
                raw.open("site-1")
        refused = why(tmp_path, entrance_at(channel.address))
        assert isinstance(refused, DoorError)
        assert "sessions: expected at most" in str(refused)
        with connected(channel, Answering("site-2"), tmp_path):
            pass


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=30)
    with at_door(tmp_path, AUTHORITY.server(days=2, now=long_ago)) as channel:
        error = why(tmp_path, entrance_at(channel.address))
        assert isinstance(error, UntrustedError)
        assert "expired" in str(error.value)


FACTS: dict[str, Any] = {
    "name": "site-1",
    "public": identity_of("site-1").public_key().public_bytes_raw(),
    "entrance": entrance_at("127.0.0.1:1"),
    "nonces": Nonces(b"s" * 32, b"d" * 32),
}
OTHERS: dict[str, dict[str, Any]] = {
    "name": {"name": "site-2"},
    "public": {"public": identity_of("site-2").public_key().public_bytes_raw()},
    "federation": {"entrance": replace(FACTS["entrance"], federation="other")},
    "authority": {"entrance": replace(FACTS["entrance"], authority=OTHER.der)},
    "nonce of the site": {"nonces": Nonces(b"x" * 32, b"d" * 32)},
    "nonce of the door": {"nonces": Nonces(b"s" * 32, b"x" * 32)},
    "both nonces": {"nonces": Nonces(b"d" * 32, b"s" * 32)},
}


@pytest.mark.parametrize("what", [*OTHERS, "signature"])
def test_a_proof_is_bound_to(what: str) -> None:
    signature = prove(identity_of("site-1"), FACTS["name"], FACTS["entrance"], FACTS["nonces"])
    verify_proof(signature, **FACTS)
    with pytest.raises(SignatureError):
        verify_proof(bytes(64) if what == "signature" else signature, **FACTS | OTHERS.get(what, {}))


def test_a_proof_cannot_be_replayed(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, nonce = raw.greeted("site-1")
        proof = raw.proof("site-1", identity_of("site-1"), nonce)
        raw.say(proof=proof)
        assert said(call).welcome.key
        call.cancel()
        hello = Hello(version=VERSION, name="site-1", nonce=bytes(32))
        messages = [FromSite(hello=hello).SerializeToString(), FromSite(proof=proof).SerializeToString()]
        code, text = raw.refused("Session", messages)
        assert code == "PERMISSION_DENIED"
        assert "a signature of this session" in text


def negotiated(address: str, most: ssl.TLSVersion) -> str | None:
    """The version of TLS that a server negotiates with a client; None if it refuses."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.maximum_version = most
    client.set_alpn_protocols(["h2"])
    host, port = address.rsplit(":", 1)
    try:
        with (
            socket.create_connection((host, int(port)), WAIT_S) as tcp,
            client.wrap_socket(tcp, server_hostname=NAME) as tls,
        ):
            return tls.version()
    except (ssl.SSLError, ConnectionError):
        return None


def test_tls_1_3_is_negotiated(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel:
        assert negotiated(channel.address, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


LISTEN = """
import sys
from cloister.server.door.process import prepare
prepare()
from cloister.tests.parties.door_parties import CERTIFICATE, federation_of, identity_of
from cloister.server.door.door import Door
federation = federation_of({"site-1": identity_of("site-1")})
with Door(lambda: CERTIFICATE, lambda: federation, "127.0.0.1:0") as door:
    print(door.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_tls_1_2_is_refused_in_a_process_that_was_prepared() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert negotiated(address, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert negotiated(address, ssl.TLSVersion.TLSv1_2) is None
        server.stdin.close()
    assert server.returncode == 0


# After the handshake.


@contextmanager
def asked(channel: AtDoor, request: Any) -> Iterator[list[Any]]:
    """A round under way: all sites are asked; their answers are in the list at the end."""
    answers: list[Any] = []
    assert channel.wait_for(1, WAIT_S)
    requests = dict.fromkeys(channel.nodes(), request)
    thread = threading.Thread(
        target=lambda: answers.extend(reply for _, reply in channel.ask(requests, WAIT_S, group="1"))
    )
    thread.start()
    yield answers
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.usefixtures("talkative")
def test_calls_of_strangers_end_no_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC bounds calls in total alone; here connections are bounded, and the calls of each."""
    for where in ("front", "door"):
        monkeypatch.setattr(f"cloister.server.door.{where}.HANDSHAKE_S", WAIT_S)
    with ExitStack() as opened:
        channel = opened.enter_context(open_channel(tmp_path))
        opened.enter_context(connected(channel, Answering(vector=np.arange(1000, dtype=np.uint32)), tmp_path))
        assert channel.wait_for(1, WAIT_S)
        silent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        calls = []
        for raw in (opened.enter_context(Raw(channel)) for _ in range(24)):
            calls += [raw.call("Session", iter(silent.get, None)) for _ in range(15)]
            raw.refused("Session", [b"?"])  # so the others have begun
        for round_number in range(3):
            assert isinstance(ask(channel, contribute(MODEL, round_number + 1), WAIT_S / 2), np.ndarray)
        assert not any(call.done() for call in calls)
        for _ in calls:
            silent.put(None)


def refused_upload(raw: Raw, key: bytes, *parts: Part) -> tuple[str, str]:
    return raw.refused("Upload", [part.SerializeToString() for part in parts], key)


def test_what_a_site_may_upload_is_bounded(tmp_path: Path) -> None:
    data = os.urandom(2 * CHUNK)
    name = blake3(data).digest()
    vector = Vector(hash=name, size=len(data))
    with open_channel(tmp_path, most_bytes=4 * CHUNK) as channel, Raw(channel) as raw:
        call, key = raw.open()
        assert refused_upload(raw, key, Part(vector=vector))[1].endswith("a request that waits for its reply")
        with asked(channel, contribute(MODEL)) as answers:
            letter = said(call).request
            id = letter.id
            assert letter.vectors[0].size == MODEL.nbytes
            refusals = {
                "at most": Part(vector=Vector(hash=name, size=2**60), request=id),
                "32 bytes": Part(vector=Vector(hash=b"../../etc/passwd", size=CHUNK), request=id),
                "1 byte or more": Part(vector=Vector(hash=name, size=0), request=id),
            }
            for expected, part in refusals.items():
                code, text = refused_upload(raw, key, part)
                assert (code, expected in text) == ("FAILED_PRECONDITION", True), text
            for chunk in (data[:100], data[: CHUNK + 1], b""):
                code, text = refused_upload(raw, key, Part(vector=vector, request=id), Part(data=chunk))
                assert (code, text[:8]) == ("FAILED_PRECONDITION", "part is "), text
            wrong = [Part(vector=vector, request=id), Part(data=bytes(CHUNK)), Part(data=bytes(CHUNK))]
            assert "with the hash" in refused_upload(raw, key, *wrong)[1]
            other_size = Part(vector=Vector(hash=name, size=CHUNK), request=id)
            assert "announced before" in refused_upload(raw, key, other_size)[1]
            oversized = refused_upload(raw, key, Part(vector=vector, request=id), Part(data=bytes(MESSAGE)))
            assert oversized[0] in ("RESOURCE_EXHAUSTED", "CANCELLED", "UNKNOWN")
            assert (
                "a request that waits" in refused_upload(raw, key, Part(vector=vector, request=bytes(32)))[1]
            )
            for wrong_key in (b"", bytes(32)):
                assert refused_upload(raw, wrong_key, Part(vector=vector, request=id))[0] == "UNAUTHENTICATED"
            spooled = sum(
                path.stat().st_size for path in (tmp_path / "spool" / "replies").rglob("*") if path.is_file()
            )
            assert spooled <= len(data)
            raw.say(reply=Letter(id=letter.id, frame=b"x", vectors=[vector]))
            assert said(call).taken.id == letter.id
        assert answers == [
            Failure("node 1", f"vector is '{name.hex()}': expected one that has arrived as a whole")
        ]


def test_an_upload_for_an_earlier_request_leaves_that_of_the_next(tmp_path: Path) -> None:
    """Its first part arrives when the request that it was for is not waited for any longer."""
    data = os.urandom(2 * CHUNK)
    late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, key = raw.open()
        asking = channel.ask({1: contribute(MODEL)}, 0.2, group="1")
        thread = threading.Thread(target=lambda: next(asking))
        thread.start()
        first = said(call).request
        old = raw.call("Upload", iter(late.get, None), key)
        thread.join(WAIT_S)
        start = Part(vector=Vector(hash=bytes(32), size=CHUNK), request=first.id).SerializeToString()
        with asked(channel, contribute(MODEL, 2)):
            letter = said(call).request
            vector = Vector(hash=blake3(data).digest(), size=len(data))
            parts.put(Part(vector=vector, request=letter.id).SerializeToString())
            new = raw.call("Upload", iter(parts.get, None), key)
            assert not Held.FromString(next(new)).whole
            late.put(start)
            with pytest.raises(grpc.RpcError) as raised:
                list(old)
            assert "a request that waits for its reply" in raised.value.details()
            for at in (0, CHUNK, None):
                parts.put(None if at is None else part_of(memoryview(data)[at : at + CHUNK]))
            assert Held.FromString(next(new)).whole
            raw.say(reply=Letter(id=letter.id, frame=b"no message"))
        late.put(None)


def test_a_site_that_replies_when_it_is_late_has_one_answer(tmp_path: Path) -> None:
    """Its reply arrives while another late site is told of, and a third one's upload is still waited for."""
    parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with open_channel(tmp_path) as channel, Raw(channel) as one, Raw(channel) as two, Raw(channel) as three:
        opened = [raw.open(f"site-{number}") for number, raw in enumerate((one, two, three), 1)]
        asking = channel.ask(dict.fromkeys((1, 2, 3), join_request()), 1.0, group="1")
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(next, asking)
            _, second, third = [said(call).request for call, _ in opened]
            vector = Vector(hash=bytes(32), size=2 * CHUNK)
            parts.put(Part(vector=vector, request=third.id).SerializeToString())
            parts.put(part_of(memoryview(bytes(CHUNK))))
            upload = three.call("Upload", iter(parts.get, None), opened[2][1])
            assert not Held.FromString(next(upload)).whole
            assert first.result(WAIT_S) == (1, Failure("node 1", "timeout: no answer within 1 s"))
        for raw, letter, (call, _) in ((two, second, opened[1]), (three, third, opened[2])):
            name = "site-2" if raw is two else "site-3"
            raw.say(reply=Letter(id=letter.id, frame=to_bytes(Joined(name))))
            raw.say(alive=Alive())
            while said(call).WhichOneof("said") != "alive":  # the coordinator has the reply before
                pass
        assert list(asking) == [
            (2, Failure("node 2", "timeout: no answer within 1 s")),
            (3, Joined("site-3")),
        ]
        parts.put(None)


def test_what_a_site_may_download_is_what_it_is_asked_about(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel, Raw(channel) as raw, Raw(channel) as other:
        call, key = raw.open()
        with asked(channel, contribute(MODEL)):
            letter = said(call).request
            name = letter.vectors[0].hash
            wanted = Wanted(hash=name, offset=MODEL.nbytes - 10).SerializeToString()
            (part,) = raw.call("Download", [wanted], key)
            assert data_of(part) == MODEL.tobytes()[-10:]
            for wrong in (Wanted(hash=bytes(32)), Wanted(hash=name, offset=2**50)):
                assert "one of the request" in raw.refused("Download", [wrong.SerializeToString()], key)[1]
            assert raw.refused("Download", [wanted])[0] == "UNAUTHENTICATED"
            _, idle = other.open("site-2")
            assert "a request that waits" in other.refused("Download", [wanted], idle)[1]
            raw.say(reply=Letter(id=letter.id, frame=b"no message"))
        assert "a request that waits" in raw.refused("Download", [wanted], key)[1]


def test_a_reply_that_is_no_message_is_a_failure(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, _ = raw.open()
        with asked(channel, join_request()) as answers:
            letter = said(call).request
            raw.say(reply=Letter(id=bytes(32), frame=b"for another request"))
            assert said(call).taken.id == bytes(32)
            raw.say(reply=Letter(id=letter.id, frame=b"no message"))
        assert isinstance(answers[0], Failure)
        assert "one encoded tuple" in answers[0].reason


def test_a_site_answers_under_no_name_but_its_own(tmp_path: Path) -> None:
    """Also where the plan sums in clear, and no reply is signed."""
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, _ = raw.open("site-2")
        with asked(channel, join_request()) as answers:
            letter = said(call).request
            raw.say(reply=Letter(id=letter.id, frame=to_bytes(Joined("site-1"))))
        assert answers == [Failure("site-2", "it answered under the name 'site-1'")]


def test_a_site_that_floods_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sites, "_BURST", 50)
    with open_channel(tmp_path) as channel, Raw(channel) as raw, connected(channel, Answering(), tmp_path):
        call, key = raw.open("site-2")
        for _ in range(2000):  # far more than come in the time that they take
            raw.say(alive=Alive())
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert "messages: expected at most" in raised.value.details()
        assert raw.refused("Upload", [b""], key)[0] == "UNAUTHENTICATED"
        monkeypatch.setattr(server_door, "_TRANSFERS", 0)
        _, key = raw_open_again(raw)
        assert "transfers" in raw.refused("Upload", [b""], key)[1]
        monkeypatch.undo()
        assert next(iter(channel.ask({1: join_request()}, WAIT_S, group="1")))[1] == Joined("site-1")


@pytest.mark.parametrize(("method", "code"), [("Upload", "UNAUTHENTICATED"), ("Nothing", "UNIMPLEMENTED")])
def test_calls_of_a_connection_are_counted_whatever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: str
) -> None:
    """Those that are refused at once cost the coordinator as much time; also of a method that there is not."""
    monkeypatch.setattr(front, "_CALLS", 20)
    monkeypatch.setattr(front, "_CALLS_S", 0.0)  # none comes back while a slow machine calls
    with open_channel(tmp_path) as channel:
        for before in (front._CALLS_BEFORE, 20):
            with Raw(channel) as raw:
                if before == 20:
                    raw.open("site-1")
                codes = [raw.refused(method, [b""], b"no session")[0] for _ in range(100)]
            assert codes[:before] == [code] * before
            assert {"RESOURCE_EXHAUSTED", "UNAVAILABLE"} & set(codes[before:]), "the connection has ended"


GRPC = next(
    each.specifier
    for each in map(
        Requirement,
        tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"][
            "dependencies"
        ],
    )
    if each.name == "grpcio"
)


@pytest.mark.skipif(
    grpc.__version__ not in GRPC, reason=f"grpcio {grpc.__version__} is installed, not {GRPC}"
)
def test_a_call_whose_path_is_no_text_ends_no_server(tmp_path: Path) -> None:
    """From 1.84 on gRPC's loop that takes calls ends with the error; before, the call alone does."""
    site = Answering()
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path), Raw(channel) as raw:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                list(raw._grpc.stream_stream(b"/cloister.Door/\xff")(iter([b""]), timeout=WAIT_S))
        assert ask(channel, join_request()) == Joined("site-1")
        raw.open("site-2")


def test_a_proof_gives_a_connection_its_calls_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they given again to one whose proof has ended."""
    monkeypatch.setattr(front, "_CALLS", 20)
    monkeypatch.setattr(front, "_CALLS_S", 0.0)
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        for _ in range(4):  # of five calls each, and the first proof is one of the calls before it
            say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            installing = raw.call("Enrol", iter(say.get, None))
            hello = Hello(version=VERSION, name="site-1", nonce=bytes(32))
            say.put(FromSite(hello=hello).SerializeToString())
            proof = raw.proof("site-1", identity_of("site-1"), said(installing).challenge.nonce)
            say.put(FromSite(proof=proof).SerializeToString())
            assert said(installing).document
            list(installing)  # its proof has ended
            say.put(None)
            for _ in range(4):
                assert raw.refused("Upload", [b""], b"no session")[0] == "UNAUTHENTICATED"
        assert raw.refused("Upload", [b""], b"no session")[0] == "UNAUTHENTICATED"
        assert raw.refused("Upload", [b""], b"no session")[0] in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")


@pytest.mark.parametrize("sites", [0, 1, 3])
def test_connections_of_an_address_are_counted(monkeypatch: pytest.MonkeyPatch, sites: int) -> None:
    """Each costs a handshake of TLS. Before the first site too there are as many as the documentation says."""
    monkeypatch.setattr(front, "_ARRIVALS_S", 0.0)
    federation = federation_of({name: identity_of(name) for name in NAMES[:sites]})
    with Door(lambda: CERTIFICATE, lambda: federation, "127.0.0.1:0") as door:
        places, at = 64 + 2 * sites, ("127.0.0.1", int(door.address.rpartition(":")[2]))
        for _ in range(2):
            assert door._front._most == {False: 64, True: places}
            door.refresh()  # a look at the federation, as every 15 s
        for _ in range(places):
            with socket.create_connection(at):
                pass
        until = time.monotonic() + WAIT_S
        while door._front._numbers < places:
            assert time.monotonic() < until, "the door does not take them in"
        door.refresh()
        with socket.create_connection(at, WAIT_S) as late:
            assert is_closed(late)
        assert door._front._numbers == places, "it was taken in, and ended by its time"


def test_a_site_holds_one_connection_in_which_it_asks_for_the_federation(tmp_path: Path) -> None:
    """It reads nothing of the answer: a proved connection has no other limit."""
    with open_channel(tmp_path) as channel, ExitStack() as opened:
        peers = [opened.enter_context(Raw(channel)) for _ in range(5)]
        passages = channel.door._front._passages
        for raw in peers:
            held_at_its_version(raw, "site-1")
        until = time.monotonic() + WAIT_S
        while sum(each.proved for each in list(passages.values())) > 1:
            assert time.monotonic() < until, "it holds several"


def held_at_its_version(raw: Raw, name: str) -> Any:
    """A call of a site that asks for the federation, which goes on."""
    more_than_is_sent_without_a_reader = bytes(2**30)
    with mock.patch.object(server_door, "_document", return_value=more_than_is_sent_without_a_reader):
        call = raw.call("Enrol", iter(raw.unsent.get, None))
        raw.say(hello=Hello(version=VERSION, name=name, nonce=bytes(32)))
        nonce = said(call).challenge.nonce
        raw.say(proof=raw.proof(name, identity_of(name), nonce))
        assert said(call).document, "the first part"
    return call


def test_what_grpc_does_for_a_call_is_not_cancelled_with_the_call() -> None:
    """gRPC never frees an operation that is cancelled, and whoever connects can break off as many as he likes: 230
    bytes each, and 32 so. An operation ends by itself when its call does."""

    async def read() -> bytes:
        await ended.wait()
        read_to_its_end.append(True)
        return b""

    async def broken_off() -> None:
        call: Any = SimpleNamespace(read=read, write=lambda _: read())
        waiting = [
            asyncio.create_task(each) for each in (server_door._read(call), server_door._write(call, b""))
        ]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert all(each.cancelled() for each in waiting)
        ended.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(read_to_its_end) == 2

    ended, read_to_its_end = asyncio.Event(), list[bool]()
    asyncio.run(asyncio.wait_for(broken_off(), WAIT_S))


def raw_open_again(raw: Raw) -> tuple[Any, bytes]:
    raw.unsent.put(None)
    raw.unsent = type(raw.unsent)()
    return raw.open("site-3")


# What says nothing, or little.


@pytest.mark.usefixtures("talkative")
def test_refusals_do_not_fill_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(server_door, "_LOGGED", 5)
    monkeypatch.setattr("cloister.server.door.rate.time", SimpleNamespace(monotonic=lambda: now[0]))
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        for logged in (5, 8):
            for _ in range(100):
                assert raw.refused("Upload", [], b"no session")[0] == "UNAUTHENTICATED"
            assert caplog.text.count("refused") == logged
            now[0] = 3.0


def test_a_session_that_says_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_door, "HANDSHAKE_S", 0.2)
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as raised:
            list(raw.session())
        assert raised.value.details() == "timeout: nothing was received"
        raw.say(hello=Hello(version=VERSION, name="site-1", nonce=bytes(32)))
        with pytest.raises(grpc.RpcError) as raised:
            list(raw.session())  # no proof follows
        assert raised.value.details() == "timeout: nothing was received"
        assert time.monotonic() - started < WAIT_S / 2


def test_a_welcomed_site_that_says_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_door, "SILENT_S", 0.2)
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, _ = raw.open()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.details() == "timeout: nothing was received"


@pytest.mark.slow
def test_a_transfer_that_says_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_door, "STALL_S", 0.2)
    monkeypatch.setattr(server_door, "HANDSHAKE_S", 1.0)
    with open_channel(tmp_path) as channel, Raw(channel) as raw:
        call, key = raw.open()
        with asked(channel, contribute(MODEL)):
            letter = said(call).request
            start = Part(vector=Vector(hash=bytes(32), size=CHUNK), request=letter.id).SerializeToString()
            for method, first in (("Upload", [start]), ("Download", [])):
                waiting = threading.Event()
                with pytest.raises(grpc.RpcError) as raised:
                    list(raw.call(method, chain(first, waiting), key))
                waiting.set()
                assert raised.value.details() == "timeout: nothing was received"
            raw.say(reply=Letter(id=letter.id, frame=b"no message"))


def test_a_site_leaves_a_coordinator_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_door, "HANDSHAKE_S", 0.4)
    with open_channel(tmp_path) as channel, Relay(channel.address) as relay:
        relay.hold_at["down"] = 1
        client = DoorSite(
            Visitor("site-1", lambda: identity_of("site-1"), lambda: entrance_at(relay.address)),
            Answering,
            tmp_path / "refused",
            jitter=lambda: 0.01,
        )
        attempts: queue.SimpleQueue[CloisterError] = queue.SimpleQueue()
        attend = client._attend

        def watched() -> None:
            try:
                attend()
            except CloisterError as error:
                attempts.put(error)
                client.stop()
                raise

        monkeypatch.setattr(client, "_attend", watched)
        client.run()
        error = attempts.get(timeout=WAIT_S)
        assert type(error) is DoorError
        assert "ancelled" in str(error)


def chain(first: list[bytes], waiting: threading.Event) -> Iterator[bytes]:
    """Messages, and then nothing."""
    yield from first
    waiting.wait(WAIT_S)


def test_a_newer_session_ends_the_older(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel, Raw(channel) as raw, Raw(channel) as other:
        call, _ = raw.open()
        other.open()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.details() == "the site has opened another session"


# Strangers: `server/door/front.py`.


def strangers(channel: AtDoor, count: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Connections that say nothing."""
    port = int(channel.address.rpartition(":")[2])
    return [socket.create_connection((host, port), WAIT_S) for _ in range(count)]


def is_closed(peer: socket.socket) -> bool:
    """Whether the door closes a connection in time."""
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def everywhere(tmp_path: Path) -> Iterator[AtDoor]:
    """A run behind a door on all addresses, which sites reach over IPv4."""
    with open_channel(tmp_path, bind="[::]:0") as channel:
        channel.address = f"127.0.0.1:{channel.address.rpartition(':')[2]}"
        yield channel


def test_strangers_take_their_own_places(tmp_path: Path, everywhere: AtDoor) -> None:
    """Of so many that say nothing the oldest end, and no site waits, from another address or from theirs."""
    site = Answering()
    with connected(everywhere, site, tmp_path):
        silent = strangers(everywhere, 100, "::1")
        assert ask(everywhere, join_request()) == Joined("site-1")
        assert all(map(is_closed, silent[:36]))
        more = strangers(everywhere, 200)  # the address of the site, which is known
        assert ask(everywhere, join_request("2")) == Joined("site-1")
        with connected(everywhere, Answering("site-2"), tmp_path):
            assert len(everywhere.door.connected()) == 2
        for each in (*silent, *more):
            each.close()


def test_strangers_of_many_addresses_take_no_place_of_a_known_one(tmp_path: Path) -> None:
    with open_channel(tmp_path, bind="0.0.0.0:0") as channel:
        port = int(channel.address.rpartition(":")[2])
        channel.address = f"127.0.0.1:{port}"
        with connected(channel, Answering(), tmp_path):
            (late,) = strangers(channel, 1)
            others = [
                socket.create_connection(("127.0.0.1", port), WAIT_S, (f"127.0.0.{number}", 0))
                for number in range(2, 102)
            ]
            check_place(late, others)


def check_place(late: socket.socket, others: Sequence[socket.socket]) -> None:
    """Check that the strangers who are more than their places were ended, and a connection from a known address not."""
    assert all(map(is_closed, others[:36]))
    late.setblocking(False)
    with pytest.raises(BlockingIOError):
        late.recv(1)
    for each in (late, *others):
        each.close()


def test_no_site_makes_the_address_of_another_unknown(tmp_path: Path) -> None:
    """It is behind the address of the other, and then proves itself at more than a site is known at."""
    with open_channel(tmp_path, bind="0.0.0.0:0") as channel:
        port = int(channel.address.rpartition(":")[2])
        for name, at in (("site-1", 99), ("site-2", 99), *(("site-2", number) for number in range(2, 6))):
            with (
                Relay(f"127.0.0.1:{port}", source=f"127.0.0.{at}") as relay,
                Raw(entrance_at(relay.address)) as raw,
            ):
                raw.open(name)
        late = socket.create_connection(("127.0.0.1", port), WAIT_S, ("127.0.0.99", 0))
        others = [
            socket.create_connection(("127.0.0.1", port), WAIT_S, (f"127.0.1.{number}", 0))
            for number in range(1, 101)
        ]
        check_place(late, others)


@pytest.mark.usefixtures("talkative")
def test_the_address_with_the_most_strangers_loses_one(
    everywhere: AtDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Raw(everywhere) as raw:
        call, nonce = raw.greeted("site-1")  # of an address that is not known yet
        silent = strangers(everywhere, 80, "::1")
        assert all(map(is_closed, silent[:16]))
        raw.say(proof=raw.proof("site-1", identity_of("site-1"), nonce))
        assert said(call).welcome.key
        for each in silent:
            each.close()


@pytest.mark.usefixtures("talkative")
def test_a_stranger_has_a_time_and_a_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_channel(tmp_path) as channel:
        with Raw(channel) as raw:  # 120 kB of metadata, over TLS
            keys = [os.urandom(3000) for _ in range(40)]
            codes = {raw.refused("Nothing", [], key)[0] for key in keys}
        assert "UNAVAILABLE" in codes, "no connection was cut"
        monkeypatch.setattr(front, "HANDSHAKE_S", 0.3)
        (silent,) = strangers(channel, 1)
        assert is_closed(silent)
        silent.close()


def test_a_member_that_leaves_connections_open_is_a_stranger_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer session of it ends the older one, whose connection is closed soon after."""
    monkeypatch.setattr(front, "HANDSHAKE_S", 3.0)
    with open_channel(tmp_path) as channel, Raw(channel) as first, Raw(channel) as second:
        held = first.open(), second.open()  # a call that is dropped is cancelled
        until = time.monotonic() + WAIT_S
        while sum(each.proved for each in channel.door._front._passages.values()) > 1:
            assert time.monotonic() < until
        assert len(channel.door._front._passages) == 2, "gRPC has closed it, which takes 10 s"
        while len(channel.door._front._passages) > 1:
            assert time.monotonic() < until
        assert held
        assert channel.door.connected() == ["site-1"]


@pytest.mark.slow
def test_random_messages_cost_little_and_disturb_no_round(tmp_path: Path) -> None:
    draw = random.Random(7)
    hello = FromSite(hello=Hello(version=VERSION, name="site-1", nonce=bytes(32))).SerializeToString()
    letter = FromSite(reply=Letter(id=bytes(32), frame=b"f" * 300)).SerializeToString()
    seeds = [hello, letter, Part(vector=Vector(hash=bytes(32), size=9)).SerializeToString(), b"", b"\xff" * 9]

    def message() -> bytes:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data) + draw.randbytes(draw.choice((0, 0, 3, 2000)))

    site = Answering()
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path), Raw(channel) as raw:
        _, key = raw.open("site-2")
        before, waiting = 0, []
        for number in range(1200):
            method = draw.choice(("Session", "Upload", "Download", "Nothing"))
            shown = draw.choice((b"", bytes(32), key, draw.randbytes(5)))
            waiting.append(raw.call(method, [message() for _ in range(3)], shown))
            if len(waiting) == 12:
                for call in waiting:
                    with pytest.raises(grpc.RpcError):
                        list(call)
                waiting.clear()
            if number == 300:
                before = memory()
            if number % 400 == 200:
                assert next(iter(channel.ask({1: join_request(f"{number}")}, WAIT_S, group="1")))[
                    1
                ] == Joined("site-1")
        assert memory() - before < 2**24
        assert {each.name for each in channel.connected()} == {"site-1", "site-2"}


@pytest.mark.slow
@pytest.mark.usefixtures("talkative")
def test_random_messages_of_a_site_that_is_asked_cost_little_and_disturb_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """6,400 messages in its sessions and uploads, which with those above makes 10,000."""
    monkeypatch.setattr(server_sites, "_BURST", 2**20)
    monkeypatch.setattr(server_sites, "_SESSIONS", 2**20)
    draw = random.Random(8)
    letters = [Letter(id=bytes(32))]  # what the site was asked, the newest last
    over = threading.Event()

    def hear(call: Any) -> None:
        with suppress(grpc.RpcError):
            letters.extend(each.request for each in map(ToSite.FromString, call) if each.request.id)

    def some_bytes() -> bytes:
        chosen = (bytes(32), letters[-1].id, b"", draw.randbytes(31), draw.randbytes(300), draw.randbytes(32))
        return draw.choice(chosen)

    def vector() -> Vector:
        return Vector(hash=some_bytes(), size=draw.choice((0, 1, CHUNK, CHUNK, 2**32, 2**63, 2**64 - 1)))

    def message() -> Any:
        kind = draw.randrange(100)
        if kind == 0:
            return draw.randbytes(draw.choice((1, 9, 2000)))
        if kind == 1:
            return FromSite(hello=Hello(version=VERSION, nonce=some_bytes())).SerializeToString()
        if kind < 10:
            return FromSite(alive=Alive()).SerializeToString()
        id = letters[-1].id if kind < 20 else some_bytes()
        vectors = [vector() for _ in range(draw.choice((0, 1, 2, 20)))]
        return FromSite(
            reply=Letter(id=id, frame=draw.randbytes(draw.choice((0, 20, 3000))), vectors=vectors)
        ).SerializeToString()

    def parts() -> list[bytes]:
        start = Part(vector=vector(), request=draw.choice((letters[-1].id, some_bytes())))
        data = [Part(data=draw.randbytes(draw.choice((0, 5, CHUNK)))) for _ in range(2)]
        return [part.SerializeToString() for part in (start, *data)]

    def go_on_asking(channel: AtDoor) -> None:
        while not over.is_set():
            for _, reply in channel.ask({2: contribute(MODEL)}, 5.0, group="2"):
                assert isinstance(reply, Failure)

    site = Answering()
    with open_channel(tmp_path, most_bytes=4 * CHUNK) as channel, connected(channel, site, tmp_path):
        sent, sessions, before = 0, 0, 0
        asking = threading.Thread(target=go_on_asking, args=(channel,))
        while sent < 6400:
            with Raw(channel) as raw:
                call, key = raw.open("site-2")
                sessions += 1
                if sessions == 1:
                    asking.start()
                hearing = threading.Thread(target=hear, args=(call,))
                hearing.start()
                while hearing.is_alive() and sent < 6400:
                    for _ in range(20):
                        raw.unsent.put(message())
                    with suppress(grpc.RpcError):
                        list(raw.call("Upload", parts(), key))
                    sent += 23
                    if sent % 690 == 0:
                        assert next(iter(channel.ask({1: join_request(f"{sent}")}, WAIT_S, group="1")))[
                            1
                        ] == Joined("site-1")
                call.cancel()
                hearing.join(WAIT_S)
            if not before and sent > 1500:
                before = memory()
        over.set()
        asking.join(WAIT_S)
        assert not asking.is_alive()
        assert sessions > 5
        assert memory() - before < 2**24
        spooled = sum(
            path.stat().st_size for path in (tmp_path / "spool" / "replies").rglob("*") if path.is_file()
        )
        assert spooled <= 4 * CHUNK + LONGEST
    # gRPC logs errors too, of calls that are cut.
    ours = [record for record in caplog.records if record.name.startswith("cloister")]
    assert not [record for record in ours if record.exc_info], "a defect"


# The pieces alone.


def test_what_a_request_of_the_same_bytes_left_counts(tmp_path: Path) -> None:
    """A site that uploads something else, each time that it is asked again, does not fill the disk."""
    with open_channel(tmp_path, most_bytes=4 * CHUNK) as channel, Raw(channel) as raw:
        call, key = raw.open()
        for _ in range(20):
            asking = channel.ask({1: contribute(MODEL)}, WAIT_S, group="1")
            thread = threading.Thread(target=next, args=(asking,))
            thread.start()
            letter = next(message.request for message in iter(lambda: said(call), None) if message.request.id)
            data = os.urandom(4 * CHUNK)
            vector = Vector(hash=blake3(data).digest(), size=len(data))
            parts = [Part(vector=vector, request=letter.id).SerializeToString()]
            parts += [part_of(memoryview(data)[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
            assert Held.FromString(list(raw.call("Upload", parts, key))[-1]).whole
            raw.say(reply=Letter(id=letter.id, frame=b"no message"))
            thread.join(WAIT_S)
            del asking, thread  # as a coordinator that dies before it takes the reply
            spooled = sum(
                path.stat().st_size for path in (tmp_path / "spool" / "replies").rglob("*") if path.is_file()
            )
            assert spooled <= 4 * CHUNK + LONGEST


def test_a_vector_that_would_fill_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [MODEL.nbytes]
    monkeypatch.setattr(
        "cloister.protocol.messages.transfer.shutil.disk_usage", lambda _: SimpleNamespace(free=free[0])
    )
    with open_channel(tmp_path) as channel, connected(channel, Answering(), tmp_path):
        refused = ask(channel, contribute(MODEL))
        assert isinstance(refused, Failed)
        assert f"{free[0]} are free" in refused.reason
        free[0] = 2 * MODEL.nbytes
        assert len(ask(channel, contribute(MODEL))) == 1000
    # What is there already takes no room.
    data = os.urandom(2 * CHUNK)
    name = blake3(data).digest()
    arrival = Arrivals(tmp_path / "a", 2**30).begin(name, len(data))
    arrival.add(arrival.take()[0], [memoryview(data)[:CHUNK]])
    free[0] = 2 * CHUNK
    again = Arrivals(tmp_path / "a", 2**30)
    assert again.begin(name, len(data)).take()[1] == CHUNK
    with raises(StorageError, tmp_path / "a", says="are free"):
        again.begin(bytes(32), len(data))


def test_the_uploads_of_all_sites_together_leave_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * CHUNK
    free = [2 * size]
    monkeypatch.setattr(
        "cloister.protocol.messages.transfer.shutil.disk_usage", lambda _: SimpleNamespace(free=free[0])
    )
    with ExitStack() as opened:
        channel = opened.enter_context(open_channel(tmp_path, most_bytes=size))
        sites = [opened.enter_context(Raw(channel)) for _ in range(2)]
        calls = [raw.open(f"site-{number}") for number, raw in enumerate(sites, 1)]
        asked = channel.ask(dict.fromkeys((1, 2), join_request()), 1.0, group="1")
        asking = threading.Thread(target=list, args=(asked,))
        asking.start()
        ids = [said(call).request.id for call, _ in calls]

        def begun(at: int) -> list[bytes]:
            vector = Vector(hash=bytes([at] * 32), size=size)
            part = Part(vector=vector, request=ids[at]).SerializeToString()
            return list(sites[at].call("Upload", [part], calls[at][1]))

        assert begun(0)
        with pytest.raises(grpc.RpcError) as refused:
            begun(1)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        free[0] = 3 * size
        assert begun(1)
        asking.join(WAIT_S)


def test_a_file_of_an_earlier_process_is_checked(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 5)
    name = blake3(data).digest()
    arrival = Arrivals(tmp_path / "a", 2**30).begin(name, len(data))
    turn, held = arrival.take()
    assert (held, arrival.add(turn, [memoryview(data)[:CHUNK]])) == (0, CHUNK)
    again = Arrivals(tmp_path / "a", 2**30)
    arrival = again.begin(name, len(data))
    turn, held = arrival.take()
    assert held == CHUNK
    arrival.add(turn, [memoryview(data)[CHUNK:]])
    arrival.finish(turn)
    assert again.open(name, len(data)) == data
    (file,) = (tmp_path / "a").iterdir()
    file.write_bytes(bytes(len(data)))
    damaged = Arrivals(tmp_path / "a", 2**30)
    arrival = damaged.begin(name, len(data))
    with raises(TransferError, "vector", says="arrived"):
        damaged.open(name, len(data))
    turn, held = arrival.take()
    assert held == len(data)
    with raises(TransferError, "vector", says="with the hash"):
        arrival.finish(turn)
    first, _ = arrival.take()
    second, held = arrival.take()
    assert held == 0
    with raises(TransferError, "vector", says="stream"):
        arrival.add(first, [memoryview(data)[:CHUNK]])
    arrival.add(second, [memoryview(data)[:CHUNK]])


@pytest.mark.parametrize("size", [1, 127, 128, 16384, CHUNK])
def test_a_part_is_what_protobuf_writes(size: int) -> None:
    data = os.urandom(size)
    assert part_of(memoryview(data)) == Part(data=data).SerializeToString()
    assert data_of(Part(data=data).SerializeToString()) == data
    for wrong in (b"", b"\x12", Part(data=data).SerializeToString() + b"\0", data):
        with pytest.raises(CloisterError):
            data_of(wrong)


def test_the_generated_files_are_those_of_the_proto(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    protocol = Path(__file__).resolve().parents[3] / "protocol" / "messages"
    made = ["protoc", f"-I{protocol}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "door.proto"]
    assert protoc.main(made) == 0
    for name in ("door_pb2.py", "door_pb2.pyi"):
        assert (tmp_path / name).read_text() == (protocol / name).read_text()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with open_channel(tmp_path) as channel, raises(EngineError, "--bind"):
        open_channel(tmp_path, bind=channel.address)
    for bind in ("80", "127.0.0.1:", "127.0.0.1:http"):
        with raises(EngineError, "--bind", says="HOST:PORT"):
            open_channel(tmp_path, bind=bind)
