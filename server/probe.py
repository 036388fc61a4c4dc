"""A probe at the coordinator, for `cloister doctor`: sites of the federation check with it the way to the exchange.

It listens where the exchange does, while no run goes on, with the certificate `exchange.pem` of the federation. What
happens in a use (`Probe.Echo` in protocol/exchange.proto):

1. Hello: the site says its release of the probe.
2. Challenge: the coordinator draws a nonce.
3. Proof: the site signs certificate, nonce and name with its identity key (`protocol/probe.py`). The key must be the
   one that the newest version of the federation has for that name.
4. About: the coordinator's clock, releases and version of the federation.
5. Data: the site sends `ECHO` bytes; the coordinator keeps the first chunk alone, and says how much it has.
6. Data: the coordinator sends the first chunk as often as it takes for as many bytes.

Connections, calls, sizes, times and the uses of each site are limited; what all peers together can make it keep is
about `_CONNECTIONS` windows of `_WINDOW` bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from cloister.protocol.errors import (
    CloisterError,
    EncodingError,
    EngineError,
    ExchangeError,
    MachineError,
    MemberError,
    SignatureError,
)
from cloister.protocol.exchange_pb2 import About, Challenge, FromProbe, Held, ToProbe
from cloister.protocol.invitation import NONCE, fingerprint_of
from cloister.protocol.machine import releases
from cloister.protocol.probe import ECHO, VERSION, verify_proof
from cloister.protocol.refusal import printable
from cloister.protocol.transfer import CHUNK, HANDSHAKE_S, MESSAGE, SLOWEST, STALL_S
from cloister.server.event_loop import EventLoop
from cloister.server.rate import Rate
from cloister.server.registry import Registry

_CONNECTIONS = 16
_WINDOW = 2**22
"""Bytes of a connection that may be under way."""
_TOLD = 4 * CHUNK
"""Bytes after which the site is told how many have arrived."""
_BURST, _RATE = 20, 0.2
"""Uses of a site that may come at once, and a second after that; the same for the refusals that are reported."""
_CODES: tuple[tuple[type[CloisterError], grpc.StatusCode], ...] = (
    (EncodingError, grpc.StatusCode.INVALID_ARGUMENT),
    (MemberError, grpc.StatusCode.PERMISSION_DENIED),
    (SignatureError, grpc.StatusCode.PERMISSION_DENIED),
    (MachineError, grpc.StatusCode.FAILED_PRECONDITION),
    (ExchangeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE),
    ("grpc.max_send_message_length", MESSAGE),
    ("grpc.max_concurrent_streams", 2),
    ("grpc.max_metadata_size", 2**12),
    ("grpc.absolute_max_metadata_size", 2**13),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a compressed message could be any size
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
    ("grpc.http2.lookahead_bytes", _WINDOW),
    ("grpc.http2.bdp_probe", 0),  # it would widen the windows
    ("grpc.so_reuseport", 0),
)

_Context: TypeAlias = grpc.aio.ServicerContext


class Probe:
    """Serves a probe; a context manager.

    Args:
        registry: The coordinator's folder of the federation, whose certificates were checked.
        bind: HOST:PORT on which it listens; port 0: any.
        tell: Called with one line for each use and, at a limited rate, each refusal; in another thread.
        clock: Seconds since 1970.
        stated: The releases that it states; None: those that are installed.
    """

    def __init__(
        self,
        registry: Registry,
        bind: str,
        *,
        tell: Callable[[str], None] = lambda _line: None,
        clock: Callable[[], float] = time.time,
        stated: Mapping[str, str] | None = None,
    ) -> None:
        self._federation = registry.federation
        self._pair = tuple((registry.path / f"exchange.{kind}").read_bytes() for kind in ("key", "pem"))
        self._fingerprint = fingerprint_of(self._pair[1])
        self._bind = bind
        self._tell = tell
        self._clock = clock
        self._releases = dict(releases() if stated is None else stated)
        self._rates: dict[str, Rate] = {}
        self._used: set[str] = set()
        """Sites that use it now."""
        self._refusals = Rate(_BURST, _RATE)
        self.address = bind
        """HOST:PORT on which it listens."""

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            EngineError: it cannot listen there.
        """
        self._loop = EventLoop("probe")
        try:
            self._server, port = self._loop.run(self._start())
        except BaseException as error:
            self._loop.end()
            if isinstance(error, RuntimeError):  # gRPC's, for a port that is taken
                raise EngineError(
                    "exchange",
                    self._bind,
                    expected="an address that is free",
                    fix="a run goes on, or another program listens there: run `cloister doctor` without --listen",
                ) from error
            raise
        self.address = f"{self._bind.rpartition(':')[0]}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._server.stop(0))
        self._loop.end()

    def wait(self) -> None:
        """Wait until the process is interrupted."""
        threading.Event().wait()

    # In the thread of the event loop.

    async def _start(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_CONNECTIONS)
        handlers = {"Echo": grpc.stream_stream_rpc_method_handler(self._echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("cloister.Probe", handlers),))
        port = server.add_secure_port(self._bind, grpc.ssl_server_credentials([self._pair]))
        await server.start()
        return server, port

    async def _echo(self, _requests: Any, context: _Context) -> None:
        try:
            async with asyncio.timeout(2 * ECHO / SLOWEST):
                await self._use(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "timeout: nothing was received")
        except CloisterError as error:
            with contextlib.suppress(ExchangeError):
                self._refusals.take()
                self._say(f"refused: {error}")
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            await context.abort(code, printable(str(error)))

    async def _use(self, context: _Context) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            name = await self._greet(context)
        self._rates.setdefault(name, Rate(_BURST, _RATE)).take()
        if name in self._used:
            raise ExchangeError("site", name, expected="one use of the probe at a time")
        self._used.add(name)
        try:
            await self._transfer(name, context)
        finally:
            self._used.discard(name)

    async def _greet(self, context: _Context) -> str:
        """Steps 1 to 3: the name of the site."""
        hello = _heard("hello", await context.read()).hello
        if hello.version != VERSION:
            raise MachineError("version of the probe", printable(hello.version)[:64], expected=VERSION)
        nonce = os.urandom(NONCE)
        await context.write(_said(challenge=Challenge(nonce=nonce)))  # 2
        proof = _heard("proof", await context.read()).proof
        known = self._federation.site(proof.name)
        if known is None or known.key != proof.key:
            raise MemberError(
                "site",
                printable(proof.name)[:64],
                expected=f"one of version {self._federation.version} of the federation, with its key",
            )
        verify_proof(
            proof.signature, fingerprint=self._fingerprint, nonce=nonce, name=proof.name, public=proof.key
        )
        return known.name

    async def _transfer(self, name: str, context: _Context) -> None:
        """Steps 4 to 6."""
        about = About(
            time=self._clock(),
            releases=self._releases,
            version=self._federation.version,
            fingerprint=self._federation.fingerprint,
        )
        await context.write(_said(about=about))
        first, held, started = b"", 0, time.monotonic()
        while held < ECHO:  # 5
            async with asyncio.timeout(STALL_S):
                data = _heard("data", await context.read()).data
            if len(data) != CHUNK:
                raise EncodingError("data", f"{len(data)} bytes", expected=f"{CHUNK} bytes")
            first = first or data
            held += len(data)
            if held % _TOLD == 0:
                async with asyncio.timeout(STALL_S):
                    await context.write(_said(held=Held(size=held, whole=held == ECHO)))
        half = time.monotonic()
        again = ToProbe(data=first).SerializeToString()
        for _ in range(0, ECHO, CHUNK):  # 6
            async with asyncio.timeout(STALL_S):
                await context.write(again)
        up, down = half - started, time.monotonic() - half
        self._say(f"{name}: {ECHO / 1e6:.1f} MB received in {up:.2f} s, sent in {down:.2f} s")

    def _say(self, line: str) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self._tell(f"{now:%H:%M:%S} {line}")


def _said(**said: Message) -> bytes:
    data: bytes = ToProbe(**said).SerializeToString()
    return data


def _heard(kind: str, data: Any) -> FromProbe:
    """A message of that kind.

    Raises:
        EncodingError: the bytes are another, or none.
    """
    try:
        message = FromProbe() if data is grpc.aio.EOF else FromProbe.FromString(data)
    except DecodeError:
        message = FromProbe()
    if message.WhichOneof("said") != kind:
        raise EncodingError("message", message.WhichOneof("said") or "none", expected=kind)
    return message
