"""The exchange at the coordinator: gRPC with TLS on a port of its own, and the `Channel` over it.

Sites connect to the coordinator, which opens no connection. What happens in a session:

1. Hello: the site shows the token of an invitation. A token opens one session.
2. Challenge: the coordinator draws a nonce.
3. Proof: the site signs run, token, certificate and nonce with its identity key (`protocol/identity/invitation.py`).
4. Welcome: a key that names the session in uploads and downloads, and the token of the next session.
5. Requests and replies, as `Letter`. The vectors of a reply are uploaded before it, those of a request are downloaded
   after it, by hash (`protocol/messages/transfer.py`).
6. Taken: the coordinator has taken the reply, and the site may forget it.

What was uploaded for a request stays on disk until this process asks the site for something else, or the site's next
upload begins. So a coordinator that is killed before that, and asks for the same byte for byte, gets it without a
second upload.

A site is its identity key. Its node, pending request and the vectors that it has uploaded outlive its sessions: the
request is sent again in the next session, byte for byte, and an upload continues where it was. A newer session of the
same site ends the older one.

All state belongs to one thread, which runs the event loop; files are written in a few others. Everything that a peer
can make the coordinator keep has a limit, and everything that it waits for has one in seconds. Refused: gRPC's
threaded server, where a connection that says nothing occupies a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError, Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from cloister.aggregation.sums import Sums
from cloister.protocol.errors import (
    CloisterError,
    EncodingError,
    EngineError,
    DoorError,
    InvitationError,
    MemberError,
    RosterError,
    SecureSumError,
    StorageError,
    TransferError,
)
from cloister.protocol.identity.invitation import NONCE, Invitation, Tokens, verify_proof
from cloister.protocol.identity.roster import Card, check_name
from cloister.protocol.machine.closing import Closing
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.messages import Failed, Reply, Request
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.transfer import (
    CHUNK,
    HANDSHAKE_S,
    MESSAGE,
    SILENT_S,
    SLOWEST,
    SMALL,
    STALL_S,
    VERSION,
    Arrivals,
    Parcel,
    check_vectors,
    data_of,
    part_of,
)
from cloister.protocol.messages.wire import Buffer
from cloister.protocol.plan.plan import Plan
from cloister.server.door.certificate import Certificate
from cloister.server.door.event_loop import EventLoop, LoopEndedError
from cloister.server.door.rate import Rate
from cloister.server.sum.channel import Failure, reply_in

_log = logging.getLogger(__name__)

ENVIRONMENT: Mapping[str, str] = {
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES128-GCM-SHA256",
    "GRPC_VERBOSITY": "NONE",
    "MALLOC_ARENA_MAX": "2",
}
"""What a process must have in its environment when it starts, so that its server refuses TLS 1.2, a peer that is
refused does not fill the log with lines of gRPC's own, and less memory is kept for sites that have come and gone: glibc
otherwise keeps what each of gRPC's threads has freed in an arena of its own.

gRPC for Python has no setting for the version. It negotiates 1.3 where the peer can. The variable leaves one cipher
suite of TLS 1.2, which needs an RSA key, and the certificate's is ECDSA; the suites of 1.3 do not depend on it."""
INVITATION_S = 3600.0
"""Seconds for which an invitation is valid."""

_GREETINGS = 64
"""Sessions that have shown no token yet; a newer one ends the oldest."""
_TRANSFERS = 8
"""Uploads and downloads of a site at the same time."""
_BURST, _RATE = 2048, 100.0
"""Messages of a session and transfers of a site that may come at once, and a second."""
_LOGGED = 100
"""Refusals that are logged at once; later ones are, one a second."""
_UNSENT = 64
"""Messages to a site that wait to be sent; a site that does not read them is disconnected."""
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
_SERVICE = "cloister.Exchange"
_OF_SESSION = "session-bin"
_CODES: tuple[tuple[type[CloisterError], grpc.StatusCode], ...] = (
    (InvitationError, grpc.StatusCode.UNAUTHENTICATED),
    (TransferError, grpc.StatusCode.FAILED_PRECONDITION),
    (EncodingError, grpc.StatusCode.INVALID_ARGUMENT),
    (SecureSumError, grpc.StatusCode.PERMISSION_DENIED),  # of a signature, or of a site that is no member
    (RosterError, grpc.StatusCode.PERMISSION_DENIED),  # of a name that no card may have
    (DoorError, grpc.StatusCode.RESOURCE_EXHAUSTED),
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
class Connected:
    """What the exchange knows of a site."""

    node: int
    name: str
    """As the site has signed it."""
    online: bool
    """Whether it has a session now."""
    sent: int
    """Bytes of vectors that it was sent."""
    received: int
    """Bytes of vectors that it has uploaded."""


@dataclass
class _Pending:
    """A request that waits for its reply."""

    node: int
    id: bytes
    letter: bytes
    """The request as it is sent, each time."""
    offered: dict[bytes, memoryview]
    """Its vectors, by hash."""
    answers: queue.SimpleQueue[tuple[int, list[Buffer] | Failure]]
    until: float = 0.0
    """The deadline."""
    answered: bool = False


@dataclass(eq=False)
class _Session:
    """A connection of a site that has proved who it is."""

    key: bytes = field(repr=False)
    end: Callable[[str], None]
    """Ends it, with the reason that the site is told."""
    unsent: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(_UNSENT))
    transfers: set[asyncio.Task[Any]] = field(default_factory=set)

    def tell(self, **said: Message) -> None:
        """Queue a message; a site that does not read loses its session."""
        self.send(pb.ToSite(**said).SerializeToString())

    def send(self, message: bytes) -> None:
        try:
            self.unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.end("the site does not read its messages")


class _Site:
    """A site that has proved its identity at least once.

    Args:
        node: Its number.
        name: Its name.
        folder: For the vectors that it uploads.
    """

    def __init__(self, node: int, name: str, folder: Path) -> None:
        self.node = node
        self.name = name
        self.folder = folder
        self.session: _Session | None = None
        self.pending: _Pending | None = None
        self.arrivals: Arrivals | None = None
        self.token = b""
        """Opens its next session; valid while it is connected, and for a time after."""
        self.rate = Rate(_BURST, _RATE)
        self.sent = self.received = 0
        self.moved_at = -STALL_S
        """When the last bytes of an upload for the pending request have arrived."""
        self.fetched = 0
        """Bytes of vectors of the pending request that were sent."""
        self.fetched_at = -math.inf
        """When the last of them was; what a site fetches again does not count."""
        self.taken: Path | None = None
        """The vectors of the reply that was taken last."""


class _Sites:
    """The sites that have proved their identity at least once.

    Args:
        folder: For the vectors that they upload.
        most: The most sites.
        cards: As for `ExchangeChannel`.
    """

    def __init__(self, folder: Path, most: int, cards: Sequence[Card] | None) -> None:
        self.folder = folder
        self.most = most
        self._cards = None if cards is None else {card.name: card.public for card in cards}
        self._by_key: dict[bytes, _Site] = {}
        self._by_node: dict[int, _Site] = {}

    def __iter__(self) -> Iterator[_Site]:
        return iter(self._by_key.values())

    @property
    def online(self) -> int:
        """How many have a session now."""
        return sum(site.session is not None for site in self)

    def at(self, node: int) -> _Site | None:
        """The site with a node."""
        return self._by_node.get(node)

    def check_card(self, name: str, public: bytes) -> None:
        """Check that a key is that of the site `name`.

        Raises:
            MemberError: it is not.
        """
        check_name(name)
        if self._cards is None:
            known = next((key for key, site in self._by_key.items() if site.name == name), public)
            same = self._by_key[public].name == name if public in self._by_key else True
            if known != public or not same:
                raise MemberError("site", name, expected="the name and key with which it was first connected")
        elif self._cards.get(name) != public:
            raise MemberError("site", name, expected="a site of the roster, with its key")

    def proved(self, name: str, public: bytes) -> _Site:
        """The site that has proved this identity; a new one gets the next node.

        Raises:
            MemberError: there are as many sites as there may be.
        """
        site = self._by_key.get(public)
        if site is None:
            node = len(self._by_key) + 1
            if node > self.most:
                raise MemberError("sites", node, expected=f"at most {self.most}")
            site = _Site(node, name, self.folder / public.hex())
            self._by_key[public] = self._by_node[node] = site
        return site


class ExchangeChannel(Closing):
    """The exchange of a run, as a `Channel`; use it as a context manager. Its nodes are sites that have been connected.

    Args:
        run: Label of the run, the same after a restart.
        certificate: The server's; its first name is the one that sites ask for.
        folder: Where uploads are kept until they are summed; of this run alone.
        sites: The most sites.
        most_bytes: The most bytes of the vectors of one reply (`most_bytes_of`).
        bind: HOST:PORT on which the server listens; port 0: any.
        advertised: HOST:PORT at which sites reach it; empty: as bound.
        cards: The cards of the sites that may connect; None: any, each under the key that its name had first.

    Raises:
        EngineError: the server cannot listen there.
        CertificateError: the certificate has no name.
    """

    def __init__(
        self,
        run: str,
        certificate: Certificate,
        folder: Path,
        *,
        sites: int,
        most_bytes: int,
        bind: str = "[::]:9443",
        advertised: str = "",
        cards: Sequence[Card] | None = None,
    ) -> None:
        self._run = run
        self._certificate = certificate
        self._server_name = certificate.name
        self._most_bytes = most_bytes
        self._tokens = Tokens(time.monotonic, most=4 * sites + 64)
        self._sites = _Sites(folder, sites, cards)
        self._sessions: dict[bytes, tuple[_Site, _Session]] = {}
        """By the key of the session, which is 32 random bytes."""
        self._greeting: dict[asyncio.Task[Any], None] = {}
        self._ended: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        """Calls that are being ended, and the reason."""
        self._refusals = Rate(_LOGGED, 1.0)
        """Refusals that are logged: a peer that is refused must not fill the disk with them."""
        self._more = asyncio.Condition()
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="exchange-disk")
        self._loop = EventLoop("exchange")
        try:
            self._server, port = self._loop.run(self._start(bind))
        except BaseException as error:
            self._end()
            if isinstance(error, RuntimeError):  # gRPC's, for a port that is taken
                raise EngineError("exchange", bind, expected="an address that is free") from error
            raise
        self.address = advertised or f"{bind.rpartition(':')[0]}:{port}"
        """HOST:PORT at which sites reach it."""

    def close(self, *, over: bool = False) -> None:
        """Disconnect all sites and end all threads; idempotent.

        Args:
            over: Tell the sites that the run is over, so that they do not connect again. Their uploads are removed.
        """
        if self._loop.over:
            return
        self._loop.call(partial(self._dismiss, over))
        self._loop.run(self._server.stop(_CLOSE_S if over else 0))
        self._end()
        if over:
            shutil.rmtree(self._sites.folder, ignore_errors=True)

    # For the coordinator's thread.

    def invite(self, lifetime_s: float = INVITATION_S) -> Invitation:
        """A new invitation, for one session of one site; it is a secret between the two."""
        token = self._loop.call(lambda: self._tokens.issue(lifetime_s))
        return Invitation(self._run, self.address, self._server_name, self._certificate.pem, token)

    def wait_for(self, sites: int, timeout_s: float) -> int:
        """Wait until so many sites are connected; returns how many are, also when the time is over."""

        async def wait() -> int:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._more:
                    await self._more.wait_for(lambda: self._sites.online >= sites)
            return self._sites.online

        return self._loop.run(wait(), timeout_s)

    def connected(self) -> list[Connected]:
        """All sites that have been connected, by node; none after `close`."""

        def read() -> list[Connected]:
            return [
                Connected(site.node, site.name, site.session is not None, site.sent, site.received)
                for site in self._sites
            ]

        try:
            return sorted(self._loop.call(read), key=lambda site: site.node)
        except LoopEndedError:
            return []

    def nodes(self) -> Sequence[int]:
        """The nodes of all sites that have been connected: also of those that are to connect again."""
        return [site.node for site in self.connected()]

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Channel.ask`, with two differences. A site's deadline begins when it has the vectors of its request. A
        reply whose upload moves at the deadline is waited for as long as it moves.

        The vectors of a reply are mapped from disk; they are removed when the next answer is asked for. Vectors of the
        requests must not change until this iterator ends.
        """
        batches = iter((requests,))
        return self.stream(lambda: next(batches, {}), deadline_s, group=group)

    def stream(
        self, requests: Callable[[], Mapping[int, Request]], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Streaming.stream`, otherwise as `ask`. A vector must not change until its request has ended."""
        answers: queue.SimpleQueue[tuple[int, list[Buffer] | Failure]] = queue.SimpleQueue()
        waiting: dict[int, _Pending] = {}
        # By the id of a request, which is that of an object that lives: those of the newest batch.
        parcels: dict[int, tuple[Request, _Pending]] = {}
        timeout: float | None = None
        try:
            while True:
                batch = requests()
                if batch:
                    parcels = {id(each): parcels[id(each)] for each in batch.values() if id(each) in parcels}
                    until, asked = time.monotonic() + deadline_s, {}
                    for node, request in batch.items():
                        if id(request) not in parcels:
                            parcels[id(request)] = request, _pending(request, answers)
                        asked[node] = replace(parcels[id(request)][1], node=node, until=until)
                    waiting |= asked
                    timeout = None
                    _log.info("%s: %d sites are asked", group, len(asked))
                    self._loop.call(partial(self._ask, asked))
                if not waiting:
                    return
                if timeout is None:
                    timeout = min(pending.until for pending in waiting.values()) - time.monotonic()
                try:
                    node, answer = answers.get(timeout=max(0.0, timeout))
                except queue.Empty:
                    overdue, timeout = self._loop.call(partial(self._overdue, waiting, deadline_s))
                    for late in overdue:
                        del waiting[late]
                        yield late, Failure(f"node {late}", f"timeout: no answer within {deadline_s:g} s")
                    continue
                pending = waiting.pop(node)
                reply = answer if isinstance(answer, Failure) else self._reply_in(answer, node)
                del answer
                yield node, reply
                del reply  # its vectors are mapped
                with contextlib.suppress(LoopEndedError):  # `close` ends the requests of another thread
                    self._loop.call(partial(self._taken, pending))
                timeout = None
        finally:
            with contextlib.suppress(LoopEndedError):
                self._loop.call(partial(self._withdraw, waiting))

    def _reply_in(self, frames: Sequence[Buffer], node: int) -> Reply | Failure:
        """As `reply_in`; a reply under another name than the site has proved is a failure too."""
        reply, site = reply_in(frames, node), self._sites.at(node)
        assert site is not None, "it was asked"
        if isinstance(reply, Failure | Failed) or reply.site == site.name:
            return reply
        return Failure(site.name, f"it answered under the name {reply.site!r}")

    def _end(self) -> None:
        self._loop.end()
        self._writers.shutdown()

    # In the thread of the event loop: the coordinator's side.

    def _ask(self, requests: Mapping[int, _Pending]) -> None:
        for node, pending in requests.items():
            site = self._sites.at(node)
            if site is None:
                pending.answers.put((node, Failure(f"node {node}", "it has not been connected")))
                continue
            if site.taken not in (None, _folder(site, pending)):
                shutil.rmtree(site.taken, ignore_errors=True)
            site.pending, site.taken = pending, None
            site.moved_at, site.fetched_at, site.fetched = -STALL_S, -math.inf, 0
            site.arrivals = Arrivals(_folder(site, pending), self._most_bytes)
            if site.session is not None:
                site.session.send(pending.letter)

    def _overdue(self, waiting: Mapping[int, _Pending], deadline_s: float) -> tuple[list[int], float]:
        """Withdraw the requests that have not been answered by their deadline, and whose upload does not move.

        Both in one step: a reply that arrived between would be a second answer of its site. The deadline begins when
        the site has the request's vectors; what it waits for transfers is bounded, each way.

        Returns:
            Their nodes, and the seconds until the next can be overdue.
        """
        now = time.monotonic()
        left = {}
        for node, pending in waiting.items():
            if pending.answered:
                continue
            left[node] = pending.until - now
            site = self._sites.at(node)
            if site is not None:
                longest = (
                    max(self._most_bytes, sum(each.nbytes for each in pending.offered.values())) / SLOWEST
                )
                end = max(pending.until, min(site.fetched_at, pending.until + longest) + deadline_s)
                left[node] = max(end, min(site.moved_at + STALL_S, end + longest)) - now
        overdue = [node for node, seconds in left.items() if seconds <= 0]
        self._withdraw({node: waiting[node] for node in overdue})
        return overdue, min((seconds for seconds in left.values() if seconds > 0), default=0.0)

    def _site_of(self, pending: _Pending) -> _Site | None:
        site = self._sites.at(pending.node)
        return site if site is not None and site.pending is pending else None

    def _taken(self, pending: _Pending) -> None:
        site = self._site_of(pending)
        if site is not None:
            self._withdraw({site.node: pending})
            site.taken = _folder(site, pending)
            if site.session is not None:
                site.session.tell(taken=pb.Taken(id=pending.id))

    def _withdraw(self, requests: Mapping[int, _Pending]) -> None:
        for pending in requests.values():
            site = self._site_of(pending)
            if site is not None:
                site.pending = site.arrivals = None

    def _dismiss(self, over: bool) -> None:
        for site in self._sites:
            if site.pending is not None and not site.pending.answered:
                site.pending.answered = True
                site.pending.answers.put((site.node, Failure(f"node {site.node}", "the exchange is closed")))
            if over and site.session is not None:
                site.session.tell(over=pb.Over())

    # In the thread of the event loop: the service.

    async def _start(self, bind: str) -> tuple[grpc.aio.Server, int]:
        connections = 2 * self._sites.most + _GREETINGS
        server = grpc.aio.server(
            options=[
                *_OPTIONS,
                ("grpc.max_allowed_incoming_connections", connections),
                ("grpc.http2.lookahead_bytes", min(max(_WINDOWS // self._sites.most, 2**16), 2**22)),
            ],
            maximum_concurrent_rpcs=connections * _TRANSFERS,
        )
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._refusing(self._session)),
            "Upload": grpc.stream_stream_rpc_method_handler(self._refusing(self._upload)),
            # Not unary: gRPC would wait for its one message without a limit.
            "Download": grpc.stream_stream_rpc_method_handler(self._refusing(self._download)),
        }
        # `Watch` is refused: its calls stay, and anybody may make them.
        health = {"Check": grpc.stream_stream_rpc_method_handler(self._refusing(self._check))}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_SERVICE, handlers),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
            )
        )
        pair = (self._certificate.key, self._certificate.pem)
        port = server.add_secure_port(bind, grpc.ssl_server_credentials([pair]))
        await server.start()
        return server, port

    async def _check(self, _requests: Any, context: Context) -> None:
        """Answer a health check (gRPC's `health.proto`) of a peer that need not be a site: a run goes on."""
        async with asyncio.timeout(HANDSHAKE_S):
            service = _parsed(HealthCheckRequest, await context.read()).service
            if service not in ("", _SERVICE):
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            serving = HealthCheckResponse(status=HealthCheckResponse.SERVING)
            await context.write(serving.SerializeToString())

    def _refusing(
        self, handle: Callable[[Any, Context], Coroutine[Any, Any, None]]
    ) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        """A handler whose errors end the call with a code and one line."""

        async def handled(request: Any, context: Context) -> None:
            try:
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
                _log.error("%s: %s", context.peer(), error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot write to its disk")
            except CloisterError as error:
                with contextlib.suppress(DoorError):
                    self._refusals.take()
                    _log.warning("%s: refused: %s", context.peer(), error)
                code = next(code for kind, code in _CODES if isinstance(error, kind))
                await context.abort(code, printable(str(error)))

        return handled

    def _cancel(self, task: asyncio.Task[Any], reason: str) -> None:
        """End a call."""
        if not task.done():
            self._ended[task] = reason
            task.cancel()

    async def _session(self, _requests: Any, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._greeting) >= _GREETINGS:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            self._cancel(oldest, "too many sessions have shown no token")
        self._greeting[task] = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                site = await self._greet(task, context)
        finally:
            self._greeting.pop(task, None)
        if site.session is not None:
            site.session.end("the site has opened another session")
        session = site.session = _Session(os.urandom(32), partial(self._cancel, task))
        self._sessions[session.key] = site, session
        self._tokens.expire(site.token, 0.0)
        token = site.token = self._tokens.issue(float("inf"))
        session.tell(welcome=pb.Welcome(key=session.key, token=token))
        if site.pending is not None and not site.pending.answered:
            session.send(site.pending.letter)
        _log.info("%s is connected as node %d", site.name, site.node, extra={"site": site.name})
        async with self._more:
            self._more.notify_all()
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
            if site.session is session:
                site.session = None
                self._tokens.expire(token, INVITATION_S)
            for other in both:
                other.cancel()
            for other in session.transfers:
                self._cancel(other, "the site's session has ended")
            _log.info("%s is disconnected", site.name, extra={"site": site.name})

    async def _greet(self, task: asyncio.Task[Any], context: Context) -> _Site:
        """Steps 1 to 3: the site that has proved who it is."""
        hello = _parsed(pb.FromSite, await context.read())
        if hello.WhichOneof("said") != "hello":
            raise DoorError("first message", hello.WhichOneof("said") or "", expected="hello")
        if hello.hello.version != VERSION:
            raise DoorError(
                "version of the exchange",
                printable(hello.hello.version)[:64],
                expected=VERSION,
                fix="install the same release of cloister at the coordinator and at the sites",
            )
        token = hello.hello.token
        self._tokens.spend(token)
        del self._greeting[task]  # tokens are bounded: no newer session ends this one
        nonce = os.urandom(NONCE)
        await context.write(pb.ToSite(challenge=pb.Challenge(nonce=nonce)).SerializeToString())
        said = _parsed(pb.FromSite, await context.read())
        if said.WhichOneof("said") != "proof":
            raise DoorError("second message", said.WhichOneof("said") or "", expected="proof")
        name, public = said.proof.name, said.proof.key
        self._sites.check_card(name, public)
        verify_proof(
            said.proof.signature,
            run=self._run,
            token=token,
            fingerprint=self._certificate.fingerprint,
            nonce=nonce,
            name=name,
            public=public,
        )
        return self._sites.proved(name, public)

    async def _hear(self, site: _Site, session: _Session, context: Context) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                data = await context.read()
            if data is grpc.aio.EOF:
                return
            site.rate.take()
            said = _parsed(pb.FromSite, data)
            match said.WhichOneof("said"):
                case "alive":
                    session.tell(alive=pb.Alive())
                case "reply":
                    self._replied(site, session, said.reply)
                case other:
                    raise DoorError("message", other or "", expected="a reply or alive")

    async def _tell(self, session: _Session, context: Context) -> None:
        while True:
            message = await session.unsent.get()
            async with asyncio.timeout(STALL_S):
                await context.write(message)

    def _replied(self, site: _Site, session: _Session, letter: pb.Letter) -> None:
        pending = site.pending
        if pending is None or pending.id != letter.id:
            session.tell(taken=pb.Taken(id=letter.id[:32], unasked=True))
            return
        if pending.answered:
            return
        assert site.arrivals is not None
        answer: list[Buffer] | Failure
        try:
            if len(letter.frame) > SMALL:
                raise TransferError("frame", f"{len(letter.frame)} bytes", expected=f"at most {SMALL}")
            vectors = [(each.hash, each.size) for each in letter.vectors]
            check_vectors(vectors, self._most_bytes)
            frames: list[Buffer] = [site.arrivals.open(name, size) for name, size in vectors]
            answer = [letter.frame, *frames] if letter.frame else frames
        except CloisterError as error:
            answer = Failure(site.name, str(error))
        pending.answered = True
        pending.answers.put((site.node, answer))

    @contextlib.asynccontextmanager
    async def _transfer(self, context: Context) -> AsyncIterator[tuple[_Site, _Pending]]:
        """The site of an upload or download and its pending request; the call ends with the site's session."""
        keys = [value for key, value in context.invocation_metadata() or () if key == _OF_SESSION]
        known = self._sessions.get(keys[0]) if len(keys) == 1 else None
        if known is None:
            raise InvitationError("session", expected="one that is open")
        site, session = known
        site.rate.take()
        if len(session.transfers) >= _TRANSFERS:
            raise DoorError("transfers", len(session.transfers) + 1, expected=f"at most {_TRANSFERS}")
        if site.pending is None or site.pending.answered:
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
            if site.pending is not pending or start.request != pending.id:  # of a reply to an earlier one
                raise TransferError("vector", expected="a request that waits for its reply")
            assert site.arrivals is not None
            arrival = site.arrivals.begin(vector.hash, vector.size)
            for folder in site.folder.iterdir():
                if folder != _folder(site, pending):
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
                site.moved_at = time.monotonic()
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
                wanted = _parsed(pb.Wanted, await context.read())
            vector = pending.offered.get(wanted.hash)
            if vector is None or not 0 <= wanted.offset <= vector.nbytes:
                raise TransferError("vector", wanted.hash[:32].hex(), expected="one of the request")
            whole = sum(each.nbytes for each in pending.offered.values())
            for at in range(wanted.offset, vector.nbytes, CHUNK):
                if site.pending is not pending:  # the vector may change from now on
                    raise TransferError("vector", expected="a request that waits for its reply")
                data = vector[at : at + CHUNK]
                async with asyncio.timeout(STALL_S):
                    await context.write(part_of(data))
                site.sent += data.nbytes
                if site.fetched < whole:
                    site.fetched_at = time.monotonic()
                site.fetched += data.nbytes

    def _disk(self, work: Callable[[], T]) -> asyncio.Future[T]:
        done = self._loop.loop.run_in_executor(self._writers, work)
        done.add_done_callback(_retrieve)
        return done


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at the error of a write whose upload has ended meanwhile: asyncio would log it as forgotten."""
    if not done.cancelled():
        done.exception()


def most_bytes_of(plan: Plan, parameters: int) -> int:
    """The most bytes of the vectors of one reply of a site.

    Args:
        plan: The plan.
        parameters: Trained parameters of its model.
    """
    layout = Sums(plan, parameters).training
    return max(layout.length * np.dtype(layout.ring.dtype).itemsize, CHUNK)


def _folder(site: _Site, pending: _Pending) -> Path:
    """Where the vectors of a reply are kept: the same for the same request of a coordinator that starts again."""
    return site.folder / pending.id.hex()[:32]


def _pending(request: Request, answers: queue.SimpleQueue[tuple[int, list[Buffer] | Failure]]) -> _Pending:
    parcel = Parcel.of(request)
    letter = pb.Letter(
        id=parcel.id,
        frame=parcel.frame,
        vectors=[pb.Vector(hash=each.name, size=each.data.nbytes) for each in parcel.vectors],
    )
    offered = {each.name: each.data for each in parcel.vectors}
    return _Pending(0, parcel.id, pb.ToSite(request=letter).SerializeToString(), offered, answers)


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


async def _received(context: Context) -> bytes | None:
    """The next message of an upload; None where the site has broken it off."""
    async with asyncio.timeout(STALL_S):
        data: bytes = await context.read()
    return None if data is grpc.aio.EOF else data


async def _write(context: Context, message: Message) -> None:
    async with asyncio.timeout(STALL_S):
        await context.write(message.SerializeToString())
