"""The door at a site: it connects to the coordinator, answers requests, and stays connected from run to run.

`server/door/door.py` numbers what happens in a session. The site opens all connections, so its firewall has
to let one outbound port through; a proxy that the environment names (`HTTPS_PROXY`, `NO_PROXY`) is asked to CONNECT.

A session that breaks is opened again, with exponential backoff. The reply to a request is kept until the coordinator
has taken it and is sent again in each new session, byte for byte; its request is not handled twice. A reply with
vectors that was not taken is kept until there is another one: a coordinator that has started again may ask for it. The
vectors of a request are kept on disk, by hash, until the run is over: the global model is fetched once, and an
interrupted download is continued.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from cloister.clients.network.proxy import proxy_for
from cloister.clients.network.serve import Guarded, reticent, serve
from cloister.protocol.errors import (
    CloisterError,
    DoorError,
    MemberError,
    TransferError,
    UntrustedError,
    visible,
)
from cloister.protocol.identity.heads import COORDINATOR, NO_HEADS, Head, Heads
from cloister.protocol.identity.session import NONCE, Entrance, Nonces, prove
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.messages import Failed
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.transfer import (
    CHUNK,
    HANDSHAKE_S,
    HEARTBEAT_S,
    MESSAGE,
    SILENT_S,
    STALL_S,
    STREAMS,
    VERSION,
    Arrival,
    Arrivals,
    Named,
    Parcel,
    check_vectors,
    data_of,
    part_of,
)
from cloister.protocol.messages.wire import LONGEST, Buffer, decode_reply

_log = logging.getLogger(__name__)

MOST_BYTES = 2**40
"""The most bytes of the vectors of one request, unless a site says less."""

_FIRST_S, _LONGEST_S = 0.5, 30.0
"""The first and the longest wait before a session is opened again."""
_HASHES = 3
"""Tries to send or fetch a vector that does not match its hash."""
_SERVICE = "cloister.Door"
_SERVING = bytes((1 << 3, 1))
"""A `HealthCheckResponse` with the status SERVING."""
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MESSAGE),
    ("grpc.max_send_message_length", MESSAGE),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of another session must not be used
    ("grpc.compression_enabled_algorithms_bitset", 1),
)
_REFUSED: dict[grpc.StatusCode, type[CloisterError]] = {
    grpc.StatusCode.PERMISSION_DENIED: MemberError,
    grpc.StatusCode.FAILED_PRECONDITION: TransferError,
}


_IN_WORDS = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""The codes with which the door refuses a stranger in words of its own."""


class _Moving:
    """A call that lives while its counter moves."""

    def __init__(self, call: grpc.RpcContext, limit_s: float) -> None:
        self.call = call
        self.limit_s = limit_s
        self.at = time.monotonic()

    def moved(self) -> None:
        self.at = time.monotonic()


@dataclass(eq=False)
class _Session:
    """A session that the coordinator has welcomed."""

    channel: grpc.Channel
    key: bytes = field(repr=False)
    unsent: queue.SimpleQueue[pb.FromSite | None]
    seen: Head
    """What the coordinator has seen of the site's audit log; of the pulse's thread."""

    def say_alive(self, heads: Heads) -> None:
        """Show the coordinator that the site is alive; end the session if the site's audit log cannot follow.

        The next session says why it lacks what the coordinator has seen, which the coordinator keeps until then.
        """
        try:
            self.seen = heads.following(COORDINATOR, self.seen)
            self.unsent.put(pb.FromSite(alive=pb.Alive(head=pb.Head(**asdict(self.seen)))))
        except CloisterError as error:
            _log.warning("door: %s", error)
            self.unsent.put(None)

    def call(self, kind: str, name: str) -> Any:
        """A call of the service, with messages as bytes."""
        return getattr(self.channel, kind)(f"/{_SERVICE}/{name}")

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("session-bin", self.key),)


@dataclass
class _Requests:
    """What the coordinator has said: its requests, one at a time."""

    heard_at: float = -math.inf
    run: str = ""
    """Label of the run that is under way, as far as the site knows."""
    newest: pb.Letter | None = None
    """The newest one, until its handling begins."""
    handled: bytes = b""
    """The one that is handled: its id."""
    taken: bytes = b""
    """The one whose reply the coordinator took last, or did not wait for: its id."""
    unasked: bool = False
    """Whether it did not wait for it."""
    over: bool = False
    """Whether their run has ended, and its vectors are still there."""

    def heard(self, said: pb.ToSite) -> None:
        """Note a message."""
        self.heard_at = time.monotonic()
        match said.WhichOneof("said"):
            case "welcome":
                self.run = said.welcome.run
            case "request":
                self.run = said.request.run
                # One that is handled is sent again in a new session; after `taken` it is asked once more.
                if said.request.id != self.handled or said.request.id == self.taken:
                    self.newest = said.request
            case "taken":
                self.taken, self.unasked = said.taken.id, said.taken.unasked
            case "over":
                _log.info("run %s: over", self.run, extra={"run": self.run})
                self.newest, self.over, self.run = None, True, ""

    def begin(self) -> pb.Letter | None:
        """The newest request, which is handled from now on."""
        letter, self.newest = self.newest, None
        if letter is not None:
            self.handled, self.taken = letter.id, b""
        return letter


@dataclass(frozen=True)
class Visitor:
    """Who comes to the door, and where it is; read for each session anew, so that what was installed is used."""

    name: str
    """The site's name, as on its card."""
    identity: Callable[[], Ed25519PrivateKey]
    """Reads its identity key."""
    entrance: Callable[[], Entrance]
    """Where the door is."""
    heads: Heads = NO_HEADS
    """The site's audit log, and what it keeps of the coordinator's."""


class DoorSite:
    """A site at the coordinator's door.

    Args:
        visitor: The site.
        open_site: Finds the site; as for `serve`.
        folder: For the vectors of requests; of this site alone.
        ended: Called when a run is over and nothing of it is handled any more.
        explain: Turns an error into the line that the coordinator receives.
        jitter: A factor by which a wait is multiplied.
    """

    def __init__(
        self,
        visitor: Visitor,
        open_site: Callable[[], Guarded],
        folder: Path,
        *,
        ended: Callable[[], None] = lambda: None,
        explain: Callable[[Exception], str] = reticent,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.5),
    ) -> None:
        self._visitor = visitor
        self._open_site = open_site
        self._ended = ended
        self._explain = explain
        self._jitter = jitter
        self._arrivals = Arrivals(folder, MOST_BYTES)
        self._lasting = self._arrivals.names
        """What stays until there is another model: after a start, what the process before has left."""
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        """Guards the fields below, and is notified when one changes."""
        self._session: _Session | None = None
        self._requests = _Requests()
        self._moving: set[_Moving] = set()
        self.trouble = ""
        """Why there was no session at the last try, in one line; empty: there was."""
        self._kept: tuple[bytes, Parcel] | None = None
        """The last reply with vectors, and the id of its request, until it is taken; of the worker alone."""

    # For the owner.

    def run(self) -> None:
        """Serve until `stop` is called."""
        worker = threading.Thread(target=self._work, name="door-work", daemon=True)
        pulse = threading.Thread(target=self._pulse, name="door-pulse", daemon=True)
        with ThreadPoolExecutor(STREAMS, thread_name_prefix="door-vector") as self._streams:
            worker.start()
            pulse.start()
            try:
                self._stay()
            finally:
                self.stop()
                worker.join()
                pulse.join()

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    @property
    def heard_at(self) -> float:
        """When the coordinator was heard last in a session that it had welcomed (`time.monotonic`)."""
        return self._requests.heard_at

    @property
    def run_label(self) -> str:
        """Label of the run that is under way; empty: none is, as far as the site knows."""
        return self._requests.run

    def stop(self) -> None:
        """Disconnect; `run` returns when the request that is handled is."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
            moving = list(self._moving)
        for each in moving:
            each.call.cancel()

    # Sessions: in the thread of `run`.

    def _stay(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            started = time.monotonic()
            try:
                self._attend()
            except CloisterError as error:
                _log.warning("door: %s", error)
                self.trouble = str(error)
                failures += 1
            else:
                failures = 0 if time.monotonic() - started >= SILENT_S else failures + 1
            self._stopped.wait(self._wait_s(failures))

    def _attend(self) -> None:
        """Open a session and stay in it until it breaks.

        Raises:
            UntrustedError: the server has no certificate of the federation's authority for its host.
            MemberError: the coordinator refuses the site.
            RestoredError: an audit log lacks what the other party has seen of it.
            DoorError: the coordinator cannot be reached, or did not answer as expected.
            CloisterError: the site's own key, federation or audit log cannot be read.
        """
        visitor, entrance = self._visitor, self._visitor.entrance()
        identity, seen = visitor.identity(), pb.Head(**asdict(visitor.heads.known(COORDINATOR)))
        own = pb.Head(**asdict(visitor.heads.own()))
        with talking(entrance, "Session") as talk, self._watched(talk.call, HANDSHAKE_S) as moving:
            talk.introduce(entrance, visitor.name, identity, seen=seen, own=own)
            said = talk.hear("welcome")
            known = Head.said(said.welcome.seen.number, said.welcome.seen.hash)
            visitor.heads.check(COORDINATOR, known)
            self.trouble, moving.limit_s = "", SILENT_S
            _log.info("connected to %s", entrance.address)
            self._heard(said)
            self._connected(_Session(talk.channel, said.welcome.key, talk.unsent, known))
            try:
                for data in talk.call:
                    moving.moved()
                    self._heard(said := _parsed(data))
                    if said.WhichOneof("said") == "alive":
                        head = said.alive.head
                        visitor.heads.note(COORDINATOR, Head.said(head.number, head.hash))
            except grpc.RpcError as error:
                _log.info("door: the session broke: %s", printable(_details(error)))
            finally:
                self._connected(None)

    def _wait_s(self, failures: int) -> float:
        """Seconds before the next try."""
        return min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures, 16)) * self._jitter()

    def _connected(self, session: _Session | None) -> None:
        with self._changed:
            self._session = session
            self._changed.notify_all()

    def _heard(self, said: pb.ToSite) -> None:
        with self._changed:
            self._requests.heard(said)
            self._changed.notify_all()

    @contextmanager
    def _watched(self, call: Any, limit_s: float) -> Iterator[_Moving]:
        """Cancel a call when its counter stops, and at `stop`."""
        moving = _Moving(call, limit_s)
        with self._changed:
            self._moving.add(moving)
        if self._stopped.is_set():
            call.cancel()
        try:
            yield moving
        finally:
            with self._changed:
                self._moving.discard(moving)
            call.cancel()

    def _pulse(self) -> None:
        """Show the coordinator that the site is alive, and end what has stopped."""
        wait_s = min(HEARTBEAT_S, HANDSHAKE_S / 2)
        said_at = 0.0
        while not self._stopped.wait(wait_s):
            now = time.monotonic()
            with self._changed:
                stalled = [each for each in self._moving if now - each.at > each.limit_s]
                if self._session is not None and now - said_at >= HEARTBEAT_S - wait_s / 2:
                    said_at = now
                    self._session.say_alive(self._visitor.heads)
            for each in stalled:
                each.call.cancel()

    # Requests: in the worker's thread.

    def _work(self) -> None:
        while not self._stopped.is_set():
            letter: pb.Letter | None = None
            try:
                if (letter := self._next()) is None:
                    return
                reply = self._reply(letter)
                taken = reply is not None and self._deliver(letter.id, reply)
                if taken and self._kept is not None and self._kept[0] == letter.id:
                    self._kept = None
            except Exception as error:  # a defect too: the coordinator is told, and the thread goes on
                if isinstance(error, CloisterError):
                    _log.warning("door: %s", error)
                else:
                    _log.exception("failed")
                if letter is not None:
                    failed = Failed(self._visitor.name, printable(self._explain(error)))
                    self._deliver(letter.id, Parcel.of(failed))

    def _next(self) -> pb.Letter | None:
        """The next request; None at the end. What is left of a run that is over goes first."""
        while True:
            with self._changed:
                self._requests.handled = b""
                self._changed.wait_for(self._superseded)
                if self._stopped.is_set():
                    return None
                over, self._requests.over = self._requests.over, False
                letter = None if over else self._requests.begin()
            if letter is not None:
                return letter
            self._kept = None
            self._lasting = set()
            self._arrivals.retain(())
            self._ended()

    def _reply(self, letter: pb.Letter) -> Parcel | None:
        """The reply to a request: the one that was kept, or the site's; None if it is superseded."""
        if self._kept is not None and self._kept[0] == letter.id:
            return self._kept[1]
        frames = self._fetch(letter)
        if frames is None:
            return None
        reply = Parcel.of(decode_reply(serve(self._open_site, letter.envelope, frames, self._explain)))
        if any(each.data.nbytes for each in reply.vectors):
            self._kept = letter.id, reply
        return reply

    def _superseded(self) -> bool:
        """Whether the request that is handled is the last one no more: there is a newer one, or its run is over."""
        return self._requests.newest is not None or self._requests.over or self._stopped.is_set()

    def _open_session(self, after: _Session | None = None) -> _Session | None:
        """The session, or the next one after `after`; None if the request is superseded."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._superseded() or (self._session is not None and self._session is not after)
            )
            return None if self._superseded() else self._session

    def _fetch(self, letter: pb.Letter) -> list[Buffer] | None:
        """The frames of a request; None if it is superseded. None is fetched of a request that is not signed.

        Raises:
            CloisterError: a vector exceeds a limit, or does not match its hash; or as `Guard.check`.
        """
        guard = self._open_site().guard
        guard.check(letter.envelope, [letter.frame] if letter.frame else None)
        vectors = [(each.hash, each.size) for each in letter.vectors]
        check_vectors(vectors, MOST_BYTES)
        if not letter.frame and (not vectors or vectors[0][1] > LONGEST):
            raise TransferError("frame", vectors[0][1] if vectors else 0, expected=f"1 to {LONGEST} bytes")
        rest = vectors if letter.frame else vectors[1:]
        if any(size for _, size in rest):
            self._lasting = {name for name, _ in rest}  # the model stays until there is another
        self._arrivals.retain(self._lasting.union(name for name, _ in vectors))

        def fetch(arrival: Arrival) -> bool:
            return arrival.whole or self._persist(lambda session: self._download(session, arrival))

        def fetched(some: list[tuple[bytes, int]]) -> bool:
            wanted = [self._arrivals.begin(name, size) for name, size in some if size]
            return all(self._streams.map(fetch, wanted))

        if not letter.frame:
            if not fetched(vectors[:1]):
                return None
            guard.check(letter.envelope, [self._arrivals.open(*vectors[0])])
        if not fetched(rest):
            return None
        frames: list[Buffer] = [self._arrivals.open(name, size) for name, size in vectors]
        return [letter.frame, *frames] if letter.frame else frames

    def _deliver(self, id: bytes, reply: Parcel) -> bool:
        """Send a reply, in each session again, until the coordinator has taken it, does not wait for it or asks for
        something else; returns whether it has taken it."""
        letter = pb.Letter(
            id=id,
            frame=reply.frame,
            vectors=[pb.Vector(hash=each.name, size=each.data.nbytes) for each in reply.vectors],
        )
        sent = [each for each in reply.vectors if each.data.nbytes]

        def send(vector: Named) -> bool:
            return self._persist(lambda session: self._upload(session, id, vector))

        session: _Session | None = None
        while (session := self._open_session(session)) is not None:
            if not all(self._streams.map(send, sent)):
                return False
            with self._changed:
                session = self._session
                if session is not None:
                    session.unsent.put(pb.FromSite(reply=letter))
                    self._changed.wait_for(partial(self._settled, id, session))
                if self._requests.taken == id:
                    return not self._requests.unasked
        return False

    def _settled(self, id: bytes, session: _Session) -> bool:
        """Whether a reply that was sent in a session need not be waited for in it any longer."""
        return self._requests.taken == id or self._superseded() or self._session is not session

    def _persist(self, move: Callable[[_Session], None]) -> bool:
        """Repeat a transfer until it is done; False if its request is superseded.

        Raises:
            TransferError: the coordinator does not want the vector any more, or it never matches its hash.
            StorageError: the disk refuses.
        """
        refused = 0
        failures = 0
        while (session := self._open_session()) is not None:
            try:
                move(session)
                return True
            except TransferError:
                refused += 1
                if refused >= _HASHES:
                    raise
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    refused += 1
                    if refused >= _HASHES:
                        raise _error(error) from None
                _log.info("door: a transfer broke: %s", printable(_details(error)))
            failures += 1
            with self._changed:
                self._changed.wait_for(self._superseded, self._wait_s(failures))
        return False

    def _download(self, session: _Session, arrival: Arrival) -> None:
        turn, held = arrival.take()
        wanted = pb.Wanted(hash=arrival.name, offset=held).SerializeToString()
        call = session.call("unary_stream", "Download")(wanted, metadata=session.metadata)
        with self._watched(call, STALL_S) as moving:
            for data in call:
                arrival.add(turn, [data_of(data)])
                moving.moved()
        arrival.finish(turn)

    def _upload(self, session: _Session, id: bytes, vector: Named) -> None:
        start: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        size = vector.data.nbytes

        def parts() -> Iterator[bytes]:
            yield pb.Part(vector=pb.Vector(hash=vector.name, size=size), request=id).SerializeToString()
            held = start.get()
            if held is None:
                return
            for at in range(held, size, CHUNK):
                moving.moved()
                yield part_of(vector.data[at : at + CHUNK])

        call = session.call("stream_stream", "Upload")(parts(), metadata=session.metadata)
        with self._watched(call, STALL_S) as moving:
            whole = False
            try:
                for data in call:  # to the end: gRPC's server never frees all of a call that is cancelled
                    held = pb.Held.FromString(data)
                    moving.moved()
                    start.put(held.size)
                    whole = held.whole
            finally:
                start.put(None)
        if not whole:
            raise TransferError("upload", expected="an answer that all of it has arrived")


def open_channel(entrance: Entrance) -> grpc.Channel:
    """A connection to the door, made with the first call."""
    proxy = proxy_for(entrance.server_name)
    options = [
        *_OPTIONS,
        ("grpc.ssl_target_name_override", entrance.server_name),
        ("grpc.http_proxy", proxy) if proxy else ("grpc.enable_http_proxy", 0),
    ]
    return grpc.secure_channel(entrance.address, grpc.ssl_channel_credentials(entrance.root), options)


def health(entrance: Entrance, limit_s: float) -> str:
    """What the door answers to a health check (grpc.health.v1), which needs no identity; empty: it serves."""
    with closing(open_channel(entrance)) as channel:
        try:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=limit_s)
        except grpc.RpcError as error:
            return printable(_details(error))
    return "" if answer == _SERVING else "another state than SERVING"


@dataclass(frozen=True)
class Talk:
    """A call with messages both ways: a session, or what a stranger may say. `talking` makes it."""

    channel: grpc.Channel
    call: Any
    unsent: queue.SimpleQueue[pb.FromSite | None]
    """What is sent in it."""
    of_stranger: bool
    """Whether the door refuses in words of its own."""

    def say(self, **said: Any) -> None:
        """Send a message."""
        self.unsent.put(pb.FromSite(**said))

    def hear(self, *kinds: str) -> pb.ToSite:
        """The next message, which must be of one of some kinds; without a kind where the door has ended the call.

        Raises:
            UntrustedError: the server shows another certificate than the one that is trusted.
            MemberError: the coordinator refuses.
            DoorError: it cannot be reached, or answers something else.
        """
        try:
            said = _parsed(next(self.call, b""))
        except grpc.RpcError as error:
            raise (_in_words if self.of_stranger else _error)(error) from None
        kind = said.WhichOneof("said") or ""
        if kind not in kinds:
            raise DoorError("message", kind, expected=" or ".join(kinds))
        return said

    def introduce(
        self,
        entrance: Entrance,
        name: str,
        identity: Ed25519PrivateKey,
        seen: pb.Head | None = None,
        own: pb.Head | None = None,
        installed: int = 0,
    ) -> None:
        """Prove who the site is, in the steps 1 to 3 of `server/door/door.py`; errors as for `hear`.

        Args:
            entrance: The federation.
            name: The site's name.
            identity: Its key.
            seen: What it has seen of the coordinator's audit log.
            own: The last line of its own.
            installed: The version of the federation that it has.
        """
        nonce, public = os.urandom(NONCE), identity.public_key().public_bytes_raw()
        self.say(hello=pb.Hello(version=VERSION, name=name, nonce=nonce, installed=installed))
        nonces = Nonces(nonce, self.hear("challenge").challenge.nonce)
        signature = prove(identity, name, entrance, nonces)
        self.say(proof=pb.Proof(key=public, signature=signature, seen=seen, own=own))


@contextmanager
def talking(entrance: Entrance, name: str, limit_s: float | None = None) -> Iterator[Talk]:
    """A call of a door's service, over a connection of its own.

    Args:
        entrance: Where the door is; its certificate is of the entrance's authority, or is that certificate itself.
        name: The call, `Session` or `Enrol`.
        limit_s: Seconds in which it ends; None: no limit.
    """
    unsent: queue.SimpleQueue[pb.FromSite | None] = queue.SimpleQueue()
    with closing(open_channel(entrance)) as channel:
        messages = (message.SerializeToString() for message in iter(unsent.get, None))
        call = channel.stream_stream(f"/{_SERVICE}/{name}")(messages, timeout=limit_s)
        try:
            yield Talk(channel, call, unsent, of_stranger=name == "Enrol")
        finally:
            unsent.put(None)
            call.cancel()


def _parsed(data: bytes) -> pb.ToSite:
    try:
        said: pb.ToSite = pb.ToSite.FromString(data)
    except DecodeError:
        raise DoorError("message", f"{len(data)} bytes", expected="one of the door") from None
    return said


def _details(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no reason given'}"


def _in_words(error: grpc.RpcError) -> CloisterError:
    """A refusal whose line the coordinator has written."""
    if error.code() not in _IN_WORDS:
        return _error(error)
    kind = DoorError if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED else MemberError
    refused = kind("enrolment", expected="a coordinator that accepts it")
    refused.args = (f"the coordinator refuses: {visible(error.details() or 'without a reason')[:500]}",)
    return refused


def _error(error: grpc.RpcError) -> CloisterError:
    """What a call that failed says, as an error of its own class."""
    reason = printable((error.details() or error.code().name).rpartition("last error: ")[2])
    if "CERTIFICATE_VERIFY_FAILED" in reason or "Hostname Verification" in reason:
        return UntrustedError("server", reason, expected="a certificate of the federation's authority")
    kind = _REFUSED.get(error.code(), DoorError)
    return kind("session", expected=f"a coordinator that accepts it ({reason})")
