"""The door: the one port on which a coordinator's process listens, for sites alone, and the run behind it.

Sites connect to the coordinator, which opens no connection. What happens in a session:

1. Hello: the site says its name and a nonce.
2. Challenge: the door draws a nonce.
3. Proof: the site signs both nonces, its name, the federation and the authority with its identity key
   (`protocol/identity/session.py`). It must be a site of the newest version of the federation, with that key.
4. Welcome: a key that names the session in uploads and downloads. With proof and welcome each end says what it has
   seen of the other's audit log, whose owner refuses to go on without it (`protocol/identity/heads.py`).
5. Requests and replies, as `Letter`. The vectors of a reply are uploaded before it, those of a request are downloaded
   after it, by hash (`protocol/messages/transfer.py`).
6. Taken: the run has taken the reply, and the site may forget it.

A stranger may call `Enrol` alone: to ask to become a site, which a person decides (`enrolments.py`).

The process of a run is behind the door (`behind.py`, `grid.py`). It may die and come back while the sites stay
connected. What was uploaded for a request stays on disk until the run asks the site for something else, or the site's
next upload begins. So a run that is killed before that, and asks for the same byte for byte, gets it without a second
upload.

A site is its name in the federation. Its pending request and the vectors that it has uploaded outlive its sessions:
the request is sent again in the next session, byte for byte, and an upload continues where it was. A newer session of
the same site ends the older one.

All state belongs to one thread, which runs the event loop; files are written in a few others. Everything that a peer
can make the door keep has a limit, and everything that it waits for has one in seconds. Refused: gRPC's threaded
server, where a connection that says nothing occupies a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError, Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from cloister.protocol.errors import (
    AuditLogError,
    CloisterError,
    DoorError,
    EncodingError,
    EngineError,
    MemberError,
    RosterError,
    SecureSumError,
    SessionError,
    StorageError,
    TransferError,
)
from cloister.protocol.identity.certificates import read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.heads import NO_HEADS, Head, Heads
from cloister.protocol.identity.roster import check_name
from cloister.protocol.identity.session import NONCE, Nonces, verify_proof
from cloister.protocol.identity.short_authentication import Exchange
from cloister.protocol.machine.closing import Closing
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.transfer import (
    CHUNK,
    HANDSHAKE_S,
    HEARTBEAT_S,
    MESSAGE,
    SILENT_S,
    SMALL,
    STALL_S,
    VERSION,
    Arrivals,
    check_vectors,
    data_of,
    part_of,
)
from cloister.server.door.behind import Behind, asked_in, received
from cloister.server.door.enrolments import Enrolments
from cloister.server.door.event_loop import EventLoop
from cloister.server.door.front import Front
from cloister.server.door.rate import Rate
from cloister.server.door.sites import Pending, Session, Site

_log = logging.getLogger(__name__)

_TRANSFERS = 8
"""Uploads and downloads of a site at the same time."""
_LOGGED = 100
"""Refusals that are logged at once; later ones are, one a second."""
_TOLD = 64 * CHUNK
"""Bytes of an upload after which the site is told how many have arrived."""
_UNWRITTEN = 2
"""Chunks of an upload that may wait while earlier ones are written."""
_WINDOWS = 2**24
"""Bytes that all sites together may have under way: what limits the memory of many fast sites, and with 100 ms between
the ends still fills a line of 1 Gbit/s."""
_WRITERS = 4
"""Threads that write to disk."""
_CLOSE_S = 2.0
"""Seconds for which the last messages may still be sent at the end."""
_SHOW_S = 2.0
"""Seconds between two reports of the bytes that have moved."""
_FIRST = 16
"""Sites that share `_WINDOWS` at a door that is opened before there are any."""
_SERVICE = "cloister.Door"
_OF_SESSION = "session-bin"
_CODES: tuple[tuple[type[CloisterError], grpc.StatusCode], ...] = (
    (SessionError, grpc.StatusCode.UNAUTHENTICATED),
    (TransferError, grpc.StatusCode.FAILED_PRECONDITION),
    (EncodingError, grpc.StatusCode.INVALID_ARGUMENT),
    (SecureSumError, grpc.StatusCode.PERMISSION_DENIED),  # of a signature, or of a site that is no member
    (RosterError, grpc.StatusCode.PERMISSION_DENIED),  # of a name that no card may have
    (DoorError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AuditLogError, grpc.StatusCode.UNAVAILABLE),
)
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE),
    ("grpc.max_send_message_length", MESSAGE),
    ("grpc.max_concurrent_streams", 2 * _TRANSFERS),
    ("grpc.max_metadata_size", 2**12),
    ("grpc.absolute_max_metadata_size", 2**13),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a compressed message could be any size
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(HANDSHAKE_S * 1000)),  # a site has its session always
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.bdp_probe", 0),  # it would widen the windows
    ("grpc.so_reuseport", 0),
)

Context: TypeAlias = grpc.aio.ServicerContext
M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True)
class ServerCertificate:
    """What the server shows, and its private key, both in PEM."""

    pem: bytes
    key: bytes = field(repr=False)

    @property
    def der(self) -> bytes:
        """What it shows, in DER."""
        return read_certificate(self.pem, "of the door").public_bytes(Encoding.DER)


class Door(Closing):
    """Serves from its making until `close`; a context manager.

    Args:
        certificate: Returns the server's certificate; asked at each handshake, so that a new one is served at once.
        federation: Returns the newest version of the federation; asked at each session.
        bind: HOST:PORT on which the server listens; port 0: any.
        heads: The coordinator's audit log, and what it keeps of the sites'.
        version: Returns an earlier version, or None; asked for a site that has not installed it.

    Raises:
        EngineError: the server cannot listen there.
    """

    def __init__(
        self,
        certificate: Callable[[], ServerCertificate],
        federation: Callable[[], Federation],
        bind: str,
        heads: Heads = NO_HEADS,
        version: Callable[[int], Federation | None] = lambda _: None,
    ) -> None:
        self._certificate = certificate
        self._heads = heads
        self._federation = federation
        self._sites: dict[str, Site] = {}
        self._sessions: dict[bytes, tuple[Site, Session]] = {}
        """By the key of the session."""
        self._run: Behind | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._ended: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        """Calls that are being ended, and the reason."""
        self._refusals = Rate(_LOGGED, 1.0)
        """Refusals that are logged: a peer that is refused must not fill the disk with them."""
        self._enrolments = Enrolments(version)
        self._front = Front(len(federation().sites))
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="door-disk")
        self._loop = EventLoop("door")
        self._loop.loop.set_exception_handler(self._failed)
        try:
            self._server, port = self._loop.run(self._start(bind))
        except BaseException as error:
            self._loop.call(self._front.close)
            self._end()
            if isinstance(error, OSError):
                raise EngineError(
                    "--bind", bind, expected=f"an address that is free ({error.strerror or error})"
                ) from error
            raise
        self.address = f"{bind.rpartition(':')[0]}:{port}"
        """HOST:PORT on which it listens."""

    def close(self) -> None:
        """Disconnect all sites and end all threads; idempotent."""
        if not self._loop.over:
            self._loop.call(self._dismiss)
            self._loop.run(self._server.stop(_CLOSE_S))
            self._loop.call(self._front.close)
            self._end()

    def serve(self, near: socket.socket) -> None:
        """Serve a run from now on, until its process has closed the other end of a socket, or `close`.

        Args:
            near: This end of a connected pair of Unix stream sockets, which is closed at the end.
        """

        def begin() -> None:
            self._serving.add(task := asyncio.create_task(self._serve(near)))
            task.add_done_callback(self._serving.discard)

        self._loop.call(begin)

    def connected(self) -> list[str]:
        """The names of the sites that are connected, sorted."""
        return self._loop.call(lambda: sorted(site.name for site in self._sites.values() if site.session))

    def states(self) -> dict[str, str]:
        """Of each site of the federation, whether it is connected, and if not, why it was refused."""

        def state(name: str) -> str:
            site = self._sites.get(name)
            if site is None or site.session is None:
                return f"refused: {site.refused}" if site and site.refused else "not connected"
            return "connected"

        return self._loop.call(lambda: {each.name: state(each.name) for each in self._federation().sites})

    def refresh(self) -> None:
        """End the sessions of sites that are no longer in the federation with the key that they have shown."""
        self._loop.call(self._refresh)

    def waiting(self) -> tuple[list[dict[str, Any]], int]:
        """The requests that wait to be approved, as JSON, and how many exchanges have failed."""
        return self._loop.call(lambda: (self._enrolments.listed(), self._enrolments.failed))

    def compare(self, name: str, code: str) -> str:
        """The request of a name with a code, as a document.

        Raises:
            RosterError: none waits.
        """
        return self._loop.call(lambda: self._enrolments.compare(name, code))

    def _end(self) -> None:
        self._loop.end()
        self._writers.shutdown()

    # The run, in the thread of the event loop.

    async def _serve(self, near: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=near)
        run: Behind | None = None
        showing: asyncio.Task[None] | None = None
        try:
            run = self._run = Behind((await received(reader)).begin, writer)
            for name in run.sites:
                site = self._site(name)
                site.sent = site.received = 0
            showing = asyncio.create_task(self._show(run))
            _log.info("the door serves run %s", run.label, extra={"run": run.label})
            while True:
                said = await received(reader)
                await writer.drain()
                match said.WhichOneof("said"):
                    case "ask":
                        self._ask(run, said.ask)
                    case "taken":
                        self._forget(said.taken, taken=True)
                    case "withdrawn":
                        self._forget(said.withdrawn, taken=False)
                    case "over":
                        self._over(run)
        except (asyncio.IncompleteReadError, ConnectionError):  # its process has ended
            pass
        except Exception:  # a defect: the run's process sees that its socket is closed
            _log.exception("the door serves a run no longer")
        finally:
            if showing is not None:
                showing.cancel()
            if run is not None and self._run is run:
                self._run = None
                for site in self._sites.values():
                    if site.pending is not None:
                        site.pending.settle()
                        site.left = site.pending if site.pending.reply is not None else None
                        site.pending = None
                    site.taken = None  # the next process of the run may ask for it once more
            writer.close()

    async def _show(self, run: Behind) -> None:
        while True:
            run.show(list(self._sites.values()))
            await asyncio.sleep(_SHOW_S)

    def _ask(self, run: Behind, ask: pb.Ask) -> None:
        asked = asked_in(ask, run.label)
        _log.info("run %s: %d sites are asked", run.label, len(ask.sites), extra={"run": run.label})
        for name, envelope in zip(ask.sites, ask.envelopes, strict=True):
            site = self._sites[name]
            folder = run.folder / name / asked.id.hex()[:32]
            if site.taken not in (None, folder):
                shutil.rmtree(site.taken, ignore_errors=True)
            left, site.left, site.taken = site.left, None, None
            known = left is not None and left.asked.id == asked.id
            arrivals = (
                left.arrivals
                if left is not None and known
                else Arrivals(folder, run.most_bytes, self._coming)
            )
            if site.pending is not None:
                site.pending.settle()
            site.pending = Pending(asked, folder, arrivals, run.most_bytes, envelope)
            if left is not None and left.reply is not None and known:
                self._take(run, site, site.pending, left.reply)
                continue
            if site.session is not None:
                site.session.send(site.pending.letter)
            self._expire(run, site, site.pending)

    def _expire(self, run: Behind, site: Site, pending: Pending) -> None:
        """Fail a request that is not answered by its deadline, which transfers move."""
        if (left_s := pending.left_s()) > 0:
            pending.timer = self._loop.loop.call_later(left_s, self._expire, run, site, pending)
            return
        site.pending = None
        late = f"timeout: no answer within {pending.asked.deadline_s:g} s"
        run.answer(site, pending.asked.id, failure=late)

    def _coming(self) -> int:
        """Bytes that are still to come of the uploads that sites have begun."""
        return sum(site.pending.arrivals.missing for site in self._sites.values() if site.pending)

    def _forget(self, of: pb.Of, *, taken: bool) -> None:
        """The run has taken the reply of a site, or does not wait for it any more."""
        site = self._sites[of.site]
        if site.pending is not None and site.pending.asked.id == of.request:
            pending, site.pending = site.pending, None
            pending.settle()
            if taken:
                site.taken = pending.folder
                if site.session is not None:
                    site.session.tell(taken=pb.Taken(id=of.request))

    def _over(self, run: Behind) -> None:
        """The run has ended: its sites forget it, and its uploads are removed."""
        for site in self._sites.values():
            if site.name in run.sites and site.session is not None:
                site.session.tell(over=pb.Over())
        shutil.rmtree(run.folder, ignore_errors=True)

    # Sessions, in the thread of the event loop.

    async def _start(self, bind: str) -> tuple[grpc.aio.Server, int]:
        most = len(self._federation().sites) or _FIRST
        server = grpc.aio.server(  # its calls are bounded by connection, and the connections by the front
            options=[*_OPTIONS, ("grpc.http2.lookahead_bytes", min(max(_WINDOWS // most, 2**16), 2**22))]
        )
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._refusing(self._session)),
            "Upload": grpc.stream_stream_rpc_method_handler(self._refusing(self._upload)),
            # Not unary: gRPC would wait for its one message without a limit.
            "Download": grpc.stream_stream_rpc_method_handler(self._refusing(self._download)),
            "Enrol": grpc.stream_stream_rpc_method_handler(self._refusing(self._enrol)),
        }
        # `Watch` is refused: its calls stay, and anybody may make them.
        health = {"Check": grpc.stream_stream_rpc_method_handler(self._refusing(self._check))}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_SERVICE, handlers),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
                _Others(grpc.stream_stream_rpc_method_handler(self._refusing(self._no_method))),
            )
        )
        server.add_secure_port(self._front.behind, self._credentials())
        await server.start()
        try:
            self._serving.add(asyncio.create_task(self._look()))
            return server, await self._front.start(bind)
        except BaseException:
            await server.stop(0)
            raise

    def _credentials(self) -> grpc.ServerCredentials:
        """Those of the certificate as it is at each handshake."""
        shown = self._certificate()

        def made(certificate: ServerCertificate) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.pem)])

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            try:
                found = self._certificate()
            except CloisterError as error:  # the one that is served stays
                _log.error("%s", error)
                return None
            if found == shown:
                return None
            shown = found
            return made(found)

        return grpc.dynamic_ssl_server_credentials(made(shown), newer)

    async def _check(self, _requests: Any, context: Context) -> None:
        """Answer a health check (gRPC's `health.proto`) of a peer that need not be a site."""
        async with asyncio.timeout(HANDSHAKE_S):
            service = _parsed(HealthCheckRequest, await _read(context)).service
            if service not in ("", _SERVICE):
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            serving = HealthCheckResponse(status=HealthCheckResponse.SERVING)
            await _write(context, serving)

    async def _no_method(self, _requests: Any, context: Context) -> None:
        """Refuse a call of a method that the door does not have: gRPC would, and it would not be counted."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no method of the door")

    def _refusing(
        self, handle: Callable[[Any, Context], Coroutine[Any, Any, None]]
    ) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        """A handler whose errors end the call with a code and one line."""

        async def answered(request: Any, context: Context) -> None:
            try:
                self._front.count(context.peer())
                await handle(request, context)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                reason = self._ended.pop(task, "") if task else ""
                if task is None or not reason:
                    raise
                task.uncancel()  # gRPC would leave the call open
                await context.abort(grpc.StatusCode.ABORTED, reason)
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "timeout: nothing was received")
            except StorageError as error:
                self._log_some(_log.error, "%s: %s", self._front.address(context.peer()), error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot write to its disk")
            except CloisterError as error:
                self._log_some(_log.warning, "%s: refused: %s", self._front.address(context.peer()), error)
                code = next(code for kind, code in _CODES if isinstance(error, kind))
                await context.abort(code, printable(str(error)))

        async def handled(request: Any, context: Context) -> None:
            with contextlib.suppress(grpc.aio.InternalError):  # the connection is gone, which gRPC would log
                await answered(request, context)

        return handled

    def _cancel(self, task: asyncio.Task[Any], reason: str) -> None:
        """End a call."""
        if not task.done():
            self._ended[task] = reason
            task.cancel()

    async def _session(self, _requests: Any, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        async with asyncio.timeout(HANDSHAKE_S):
            site, public, seen = await self._greet(context)
            known = await self._disk(partial(self._heads.known, site.name))
        if not self._is_member(site.name, public):  # it was removed meanwhile
            raise _no_member(site.name)
        peer = context.peer()
        self._front.proved(peer, site.name)
        if site.session is not None:
            site.session.end("the site has opened another session")
        session = site.session = Session(os.urandom(32), partial(self._cancel, task), seen)
        site.public, site.refused = public, ""
        self._sessions[session.key] = site, session
        label = self._run.label if self._run else ""
        session.tell(welcome=pb.Welcome(key=session.key, run=label, seen=pb.Head(**asdict(known))))
        if site.pending is not None and site.pending.reply is None:
            session.send(site.pending.letter)
        _log.info("%s is connected", site.name, extra={"site": site.name})
        self._seen()
        both = {
            asyncio.create_task(self._hear(site, session, context)),
            asyncio.create_task(self._tell(session, context)),
        }
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            del self._sessions[session.key]
            self._front.ended(peer)
            if site.session is session:
                site.session = None
            for other in both:
                other.cancel()
            for other in session.transfers:
                self._cancel(other, "the site's session has ended")
            _log.info("%s is disconnected", site.name, extra={"site": site.name})
            self._seen()

    def _seen(self) -> None:
        if self._run is not None:
            self._run.show(list(self._sites.values()))

    async def _greet(self, context: Context) -> tuple[Site, bytes, Head]:
        """Steps 1 to 3: the site that has proved who it is, its key, and what it has seen of the audit log."""
        hello = _said(await _read(context), "hello").hello
        proof, member = await self._challenge(hello, context)
        if not member:
            raise _no_member(hello.name)
        site, seen = self._site(hello.name), Head.said(proof.seen.number, proof.seen.hash)
        try:
            site.rate.take()
            site.sessions.take()
            await self._disk(partial(self._heads.check, hello.name, seen))
            own = Head.said(proof.own.number, proof.own.hash)
            await self._disk(partial(self._heads.check_newest, hello.name, own))
        except CloisterError as error:
            site.refused = str(error)
            raise
        return site, proof.key, seen

    async def _challenge(self, hello: pb.Hello, context: Context) -> tuple[pb.Proof, bool]:
        """The proof of the key that a peer has, and whether it is that of the site whose name it says."""
        _check_version(hello.version)
        if len(hello.nonce) != NONCE:
            raise DoorError("nonce", f"{len(hello.nonce)} bytes", expected=f"{NONCE} bytes")
        check_name(hello.name)
        nonces = Nonces(hello.nonce, os.urandom(NONCE))
        await _write(context, pb.ToSite(challenge=pb.Challenge(nonce=nonces.door)))
        proof = _said(await _read(context), "proof").proof
        verify_proof(proof.signature, hello.name, proof.key, self._federation().entrance, nonces)
        return proof, self._is_member(hello.name, proof.key)

    def _site(self, name: str) -> Site:
        return self._sites.setdefault(name, Site(name))

    def _is_member(self, name: str, public: bytes) -> bool:
        """Whether the newest version of the federation has a site with a key."""
        member = self._federation().site(name)
        return member is not None and member.key == public

    # Strangers, in the thread of the event loop.

    async def _enrol(self, _requests: Any, context: Context) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            first = _parsed(pb.FromSite, await _read(context))
            kind, hello = first.WhichOneof("said"), first.hello
            if kind == "commit":
                await self._exchange(first.commit, context)
                return
            if kind != "hello":
                raise DoorError("message", kind or "", expected="commit or hello")
            proof, member = await self._challenge(hello, context)
            if not member:
                self._enrolments.hear(hello.name, proof.key)
                await _write(context, pb.ToSite(waiting=pb.Waiting()))
                return
        site, task = self._site(hello.name), asyncio.current_task()
        site.rate.take()
        newest = self._federation()
        following = await self._disk(partial(self._enrolments.following, hello.installed, newest))
        document = _document(following)
        if site.installing is not None:
            self._cancel(site.installing, "the site asks for the federation once more")
        site.installing = task
        self._front.proved(context.peer(), hello.name)
        try:
            async with asyncio.timeout(STALL_S):
                for at in range(0, len(document), CHUNK):
                    part = pb.ToSite(document=document[at : at + CHUNK], newest=newest.version)
                    await _write(context, part)
        finally:
            self._front.ended(context.peer())
            if site.installing is task:
                site.installing = None

    async def _exchange(self, commit: pb.Commit, context: Context) -> None:
        """Steps 2 to 5 of `short_authentication.py`, after which the request waits."""
        _check_version(commit.version)
        address = self._front.address(context.peer())
        self._enrolments.commit(commit.commitment, address)
        try:
            entrance, nonce = self._federation().entrance, os.urandom(NONCE)
            founded = pb.Founded(
                nonce=nonce, name=entrance.federation, address=entrance.address, authority=entrance.authority
            )
            await _write(context, pb.ToSite(founded=founded))
            reveal = _said(await _read(context), "reveal").reveal
            seen = Exchange(reveal.request, Nonces(reveal.nonce, nonce), entrance, self._certificate().der)
            name = self._enrolments.reveal(
                commit.commitment, seen, reveal.signature, address, self._federation()
            )
        except BaseException:
            self._enrolments.failed += 1
            raise
        self._log_some(_log.info, "%s: %s waits to be approved", address, name or "a site that is approved")
        await _write(context, pb.ToSite(waiting=pb.Waiting()))

    def _dismiss(self) -> None:
        for site in self._sites.values():
            if site.session is not None:
                site.session.end("the coordinator's process ends")

    async def _look(self) -> None:
        """End what a command has removed that did not reach this process."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._refresh()
            except CloisterError as error:  # the folder cannot be read now; the next look may
                self._log_some(_log.error, "%s", error)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what the event loop could not do, as often as refusals: accept a connection without a descriptor left."""
        self._log_some(loop.default_exception_handler, context)

    def _log_some(self, log: Callable[..., None], *said: Any) -> None:
        """Log what peers cause, as often as `_LOGGED` allows."""
        with contextlib.suppress(DoorError):
            self._refusals.take()
            log(*said)

    def _refresh(self) -> None:
        federation = self._federation()
        self._enrolments.settle(federation)
        self._front.resize(len(federation.sites))
        for site in self._sites.values():
            if site.session is not None and not self._is_member(site.name, site.public):
                site.session.end("the site is no longer in the federation with this key")

    async def _hear(self, site: Site, session: Session, context: Context) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                data = await _read(context)
            if data is grpc.aio.EOF:
                return
            site.rate.take()
            said = _parsed(pb.FromSite, data)
            match said.WhichOneof("said"):
                case "alive":
                    self._front.proved(context.peer(), site.name)
                    try:
                        compared = partial(self._compare, site, session, said.alive.head)
                        session.seen = await self._disk(compared)
                    except CloisterError as error:
                        site.refused = str(error)
                        raise
                    session.tell(alive=pb.Alive(head=pb.Head(**asdict(session.seen))))
                case "reply":
                    self._replied(site, session, said.reply)
                case other:
                    raise DoorError("message", other or "", expected="a reply or alive")

    def _compare(self, site: Site, session: Session, head: pb.Head) -> Head:
        """Keep the head of a site's audit log; that of the coordinator's, which must have what the site has seen."""
        self._heads.note(site.name, Head.said(head.number, head.hash))
        return self._heads.following(site.name, session.seen)

    async def _tell(self, session: Session, context: Context) -> None:
        while True:
            message = await session.unsent.get()
            await _write(context, message)

    def _replied(self, site: Site, session: Session, letter: pb.Letter) -> None:
        pending = site.pending
        if pending is None or pending.asked.id != letter.id:
            session.tell(taken=pb.Taken(id=letter.id[:32], unasked=True))
            return
        if pending.reply is None and self._run is not None:
            self._take(self._run, site, pending, letter)

    def _take(self, run: Behind, site: Site, pending: Pending, letter: pb.Letter) -> None:
        """Give a run the reply of a site."""
        pending.reply = letter
        pending.settle()
        try:
            if len(letter.frame) > SMALL:
                raise TransferError("frame", f"{len(letter.frame)} bytes", expected=f"at most {SMALL}")
            vectors = [(each.hash, each.size) for each in letter.vectors]
            check_vectors(vectors, pending.most_bytes)
            paths = [str(pending.arrivals.file(name, size) or "") for name, size in vectors]
        except CloisterError as error:
            run.answer(site, letter.id, failure=printable(str(error)))
        else:
            run.answer(site, letter.id, frame=letter.frame, paths=paths)

    # Transfers, in the thread of the event loop.

    @contextlib.asynccontextmanager
    async def _transfer(self, context: Context) -> AsyncIterator[tuple[Site, Pending]]:
        """The site of an upload or download and its pending request; the call ends with the site's session."""
        keys = [value for key, value in context.invocation_metadata() or () if key == _OF_SESSION]
        known = self._sessions.get(keys[0]) if len(keys) == 1 else None
        if known is None:
            raise SessionError("session", expected="one that is open")
        site, session = known
        site.rate.take()
        if len(session.transfers) >= _TRANSFERS:
            raise DoorError("transfers", len(session.transfers) + 1, expected=f"at most {_TRANSFERS}")
        if site.pending is None or site.pending.reply is not None:
            raise TransferError("vector", expected="a request that waits for its reply")
        task = asyncio.current_task()
        assert task is not None
        session.transfers.add(task)
        try:
            yield site, site.pending
        finally:
            session.transfers.discard(task)

    async def _upload(self, _requests: Any, context: Context) -> None:
        async with self._transfer(context) as (site, pending):
            first = await _received(context)
            if first is None:
                return
            start = _parsed(pb.Part, first)
            vector = start.vector
            # Otherwise it may be of a reply to an earlier request.
            if site.pending is not pending or start.request != pending.asked.id:
                raise TransferError("vector", expected="a request that waits for its reply")
            arrival = pending.arrivals.begin(vector.hash, vector.size)
            for folder in pending.folder.parent.iterdir():
                if folder != pending.folder:
                    shutil.rmtree(folder, ignore_errors=True)
            turn, held = await self._disk(arrival.take)
            told = held
            await _write(context, pb.Held(size=held, whole=arrival.whole))
            parts: list[memoryview] = []  # not written yet
            writing: asyncio.Future[int] | None = None
            while held < arrival.size:
                part = await _received(context)
                if part is None:
                    return
                if site.pending is not pending:
                    raise TransferError("vector", expected="a request that waits for its reply")
                parts.append(data_of(part))
                arrival.check(held, parts[-1])
                held += parts[-1].nbytes
                site.received += parts[-1].nbytes
                pending.moved_at = time.monotonic()
                if writing is None or writing.done() or len(parts) == _UNWRITTEN or held >= arrival.size:
                    if writing is not None:
                        await writing
                    writing, parts = self._disk(partial(arrival.add, turn, parts)), []
                if held - told >= _TOLD and held < arrival.size:
                    told = held
                    await _write(context, pb.Held(size=held))
            if writing is not None:
                await writing
            await self._disk(partial(arrival.finish, turn))
            await _write(context, pb.Held(size=held, whole=True))

    async def _download(self, _requests: Any, context: Context) -> None:
        async with self._transfer(context) as (site, pending):
            async with asyncio.timeout(HANDSHAKE_S):
                wanted = _parsed(pb.Wanted, await _read(context))
            offered = pending.asked.offered
            vector = offered.get(wanted.hash)
            if vector is None or not 0 <= wanted.offset <= vector.nbytes:
                raise TransferError("vector", wanted.hash[:32].hex(), expected="one of the request")
            whole = sum(each.nbytes for each in offered.values())
            for at in range(wanted.offset, vector.nbytes, CHUNK):
                if site.pending is not pending:
                    raise TransferError("vector", expected="a request that waits for its reply")
                data = vector[at : at + CHUNK]
                await _write(context, part_of(data))
                site.sent += data.nbytes
                if pending.fetched < whole:
                    pending.fetched_at = time.monotonic()
                pending.fetched += data.nbytes

    def _disk(self, work: Callable[[], T]) -> asyncio.Future[T]:
        done = self._loop.loop.run_in_executor(self._writers, work)
        done.add_done_callback(_retrieve)
        return done


class _Others(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Has each method: gRPC asks it last."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handler


def _no_member(name: str) -> MemberError:
    newer = "if the federation has a newer version, install it: cloister site install"
    return MemberError("site", name, expected="a site of the federation, with its key", fix=newer)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at the error of a write whose upload has ended meanwhile: asyncio would log it as forgotten."""
    if not done.cancelled():
        done.exception()


@lru_cache(maxsize=1)
def _document(federation: Federation) -> bytes:
    """The file of a version."""
    return federation.to_toml().encode()


def _check_version(version: str) -> None:
    if version != VERSION:
        raise DoorError(
            "version of the door",
            printable(version)[:64],
            expected=VERSION,
            fix="install the same release of cloister at the coordinator and at the sites",
        )


def _said(data: Any, kind: str) -> pb.FromSite:
    """A message of a site that must be of one kind."""
    said = _parsed(pb.FromSite, data)
    if said.WhichOneof("said") != kind:
        raise DoorError("message", said.WhichOneof("said") or "", expected=kind)
    return said


def _parsed(kind: type[M], data: Any) -> M:
    """The message in bytes that a peer has sent.

    Raises:
        EncodingError: they are anything else.
    """
    try:
        if data is grpc.aio.EOF:
            raise EncodingError("message", expected=f"{kind.__name__}, and the stream has ended")
        message: M = kind.FromString(data)
    except DecodeError:
        raise EncodingError("message", f"{len(data)} bytes", expected=kind.__name__) from None
    return message


async def _read(context: Context) -> Any:
    """The next message of a call."""
    return await _to_its_end(context.read())


async def _received(context: Context) -> bytes | None:
    """The next message of an upload; None where the site has broken it off."""
    async with asyncio.timeout(STALL_S):
        data: bytes = await _read(context)
    return None if data is grpc.aio.EOF else data


async def _write(context: Context, message: Message | bytes) -> None:
    """Send a message, which may be serialized."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    async with asyncio.timeout(STALL_S):
        await _to_its_end(context.write(data))


def _to_its_end(operation: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """An operation of a call, which goes on when what waits for it is cancelled: it ends with its call.

    gRPC never frees one that is cancelled (`execute_batch`), and whoever connects can make as many as he likes.
    """
    task = asyncio.ensure_future(operation)
    task.add_done_callback(_retrieve)
    return asyncio.shield(task)
