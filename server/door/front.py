"""The accept loop before gRPC's server, which passes TLS bytes on and bounds what a stranger costs.

gRPC for Python limits connections in total only, so those that say nothing could keep sites out. Here a connection
whose peer has not proved yet who it is has at most `HANDSHAKE_S` seconds, `_BEFORE` bytes, and one of a few places.
Where all are taken, the oldest connection of the address that has the most of them ends. Addresses at which a site has
proved itself lately have places of their own, so that strangers elsewhere take none of them. An address is one of
IPv4, or a network of 64 bits of IPv6.

gRPC listens on a socket in a folder of this process alone. The name of each connection to it is its number here, which
gRPC gives back as that of the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cloister.protocol.errors import DoorError
from cloister.protocol.messages.transfer import HANDSHAKE_S
from cloister.server.door.rate import Rate, Rates

_STRANGERS = 64
"""Places of connections from addresses at which no site has proved itself."""
_BEFORE = 2**16
"""Bytes that a peer may send before it has proved who it is: the handshake of TLS and the first messages take 4 kB."""
_FLUSH_S = 2.0
"""Seconds in which a peer must have read what is left for it when its connection ends."""
_KNOWN_S = 3600.0
"""Seconds for which an address at which a site has proved itself is known."""
_ADDRESSES = 4
"""Addresses at which a site is known, the newest."""
_BACKLOG = 1024
_CALLS, _CALLS_S = 512, 100.0
"""Calls of a connection that may come at once, and a second."""
_CALLS_BEFORE = 4
"""Those before a proof, which needs one. gRPC keeps 32 bytes of each that is broken off."""
_ARRIVALS_S = 10.0
"""Connections of an address that may come in a second, once as many have come as there are places."""


class _End(asyncio.Protocol):
    """One end of a connection: what arrives is written to the other end, no faster than that takes it.

    Args:
        lost: Called when it is closed.
        passes: Told the bytes that arrive; returns whether they are passed on.
    """

    def __init__(self, lost: Callable[[], None], passes: Callable[[int], bool] = lambda _size: True) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._lost, self._passes = lost, passes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None and self._passes(len(data)):
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._lost()


class _Passage:
    """A connection from outside, and its continuation to gRPC.

    Args:
        front: Its front.
        number: Its name.
        address: Where it comes from.
    """

    def __init__(self, front: Front, number: int, address: str) -> None:
        self.address = address
        self.proved = False
        """Whether the peer has a session for which it has proved who it is."""
        self.outer = _End(self.abort, self._passes)
        self.inner = _End(self.close)
        self.outer.other, self.inner.other = self.inner, self.outer
        self._front, self._number = front, number
        self._before = 0
        self.calls, self.calls_proved = Rate(_CALLS_BEFORE, 0.0, "calls"), Rate(_CALLS, _CALLS_S, "calls")
        """Of the peer in this connection; the second from its first proof on, which no further proof renews."""
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self.limit()

    def limit(self) -> None:
        """Let it end in `HANDSHAKE_S` seconds, if nothing is proved until then."""
        self.proved, self._before = False, 0
        if not self._closing:
            self._end_in(HANDSHAKE_S, self._expire)

    def close(self) -> None:
        """Close both ends. What is left for the peer is sent, and the connection keeps its place, for `_FLUSH_S`."""
        if not self._closing:
            self._closing, self.proved = True, False
            self._end_in(_FLUSH_S, self.abort)
            for end in (self.outer, self.inner):
                if end.transport is not None:
                    end.transport.close()

    def abort(self) -> None:
        """Close both ends at once, and give the place back; idempotent."""
        self._closing = True
        self._front.forget(self._number)
        if self._timer is not None:
            self._timer.cancel()
        if self.outer.transport is not None:
            self.outer.transport.abort()
        if self.inner.transport is not None:
            self.inner.transport.close()  # gRPC reads what has arrived

    def _end_in(self, seconds: float, end: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def _expire(self) -> None:
        if not self.proved:
            self.abort()

    def _passes(self, size: int) -> bool:
        if self.proved:
            return True
        self._before += size
        if self._before > _BEFORE:
            self.abort()
            return False
        return True


class Front:
    """Listens from `start` until `close`; all of it in one event loop.

    Args:
        sites: The sites of the federation: each may come anew in many connections at once.
    """

    def __init__(self, sites: int) -> None:
        self._most = {False: _STRANGERS, True: 0}
        """Places of connections without a proof, by whether their address is known."""
        self.resize(sites)
        self._passages: dict[int, _Passage] = {}
        """By their numbers, the oldest first."""
        self._known: dict[tuple[str, str], float] = {}
        """When a site has proved itself last, by its name and address, the longest ago first."""
        self._numbers = 0
        self._beginning: set[asyncio.Task[None]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="cloister-"))  # short: the path of a socket has 107 bytes
        self._server: asyncio.Server | None = None

    @property
    def behind(self) -> str:
        """Where gRPC is to listen, in its words."""
        return f"unix:{self._folder / 'grpc'}"

    async def start(self, bind: str) -> int:
        """Listen on HOST:PORT; returns the port.

        Raises:
            OSError: the address is wrong or taken.
        """
        made = listening(bind)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Arrival(self._pass), sock=made)
        return int(made.getsockname()[1])

    def close(self) -> None:
        """Listen no more, and close all connections."""
        if self._server is not None:
            self._server.close()
        for passage in list(self._passages.values()):
            passage.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def resize(self, sites: int) -> None:
        """The federation has so many sites now."""
        most = 2 * sites + _STRANGERS
        if most != self._most[True]:  # else what came stays counted
            self._most[True] = most
            self._arrivals = Rates(most, _ARRIVALS_S)
            """Connections by their address."""

    def address(self, peer: str) -> str:
        """Where a peer of gRPC comes from."""
        passage = self._passages.get(_number(peer))
        return "a connection that has ended" if passage is None else passage.address

    def count(self, peer: str) -> None:
        """A peer of gRPC makes a call.

        Raises:
            DoorError: its connection has made too many, and ends.
        """
        passage = self._passages.get(_number(peer))
        if passage is not None:
            try:
                passage.calls.take()
            except DoorError:
                passage.close()
                raise

    def proved(self, peer: str, name: str) -> None:
        """A peer of gRPC has proved which site it is: its connection is without a limit, until `ended`."""
        passage = self._passages.get(_number(peer))
        if passage is not None:
            passage.proved, passage.calls = True, passage.calls_proved
            self._known.pop((name, passage.address), None)
            own = [known for known in self._known if known[0] == name]
            if len(own) == _ADDRESSES:
                del self._known[own[0]]
            self._known[name, passage.address] = time.monotonic()

    def ended(self, peer: str) -> None:
        """The session of a peer has ended: its connection has the time and bytes of one without a proof."""
        passage = self._passages.get(_number(peer))
        if passage is not None:
            passage.limit()

    def forget(self, number: int) -> None:
        """A connection is closed."""
        self._passages.pop(number, None)

    def _pass(self, transport: asyncio.Transport) -> _End:
        """Take a connection in; returns its end."""
        # asyncio does so only for a socket that names its protocol; else a message may wait 40 ms for the one before.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = _address(transport.get_extra_info("peername"))
        try:
            self._arrivals.take(address)
        except DoorError:
            transport.abort()
            return _End(lambda: None)
        self._make_place(address)
        self._numbers += 1
        passage = self._passages[self._numbers] = _Passage(self, self._numbers, address)
        passage.outer.connection_made(transport)
        transport.pause_reading()
        task = asyncio.get_running_loop().create_task(self._continue(passage, self._numbers))
        self._beginning.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._beginning.discard)
        return passage.outer

    async def _continue(self, passage: _Passage, number: int) -> None:
        """Connect to gRPC under the passage's number."""
        inner, path = socket.socket(socket.AF_UNIX), self._folder / f"{number}"
        try:
            inner.setblocking(False)
            inner.bind(str(path))
            loop = asyncio.get_running_loop()
            await loop.sock_connect(inner, str(self._folder / "grpc"))
            await loop.create_unix_connection(lambda: passage.inner, sock=inner)
        except OSError:
            inner.close()
            passage.close()
            return
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if number not in self._passages:  # it was closed meanwhile
            passage.abort()
        elif passage.outer.transport is not None:
            passage.outer.transport.resume_reading()

    def _make_place(self, address: str) -> None:
        """End a connection without a proof, if all places of the kind that a new one needs are taken."""
        known = self._addresses()
        kind = address in known
        waiting = [
            passage
            for passage in self._passages.values()
            if not passage.proved and (passage.address in known) == kind
        ]
        if len(waiting) >= self._most[kind]:
            crowd, _ = Counter(passage.address for passage in waiting).most_common(1)[0]
            next(passage for passage in waiting if passage.address == crowd).abort()

    def _addresses(self) -> set[str]:
        """Those that are known."""
        since = time.monotonic() - _KNOWN_S
        return {address for (_, address), at in self._known.items() if at > since}


class _Arrival(asyncio.Protocol):
    """A connection that was just accepted: it is handed to the end of a passage."""

    def __init__(self, take: Callable[[asyncio.Transport], _End]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(self._take(transport))


def listening(bind: str) -> socket.socket:
    """A socket that listens on HOST:PORT; `[::]` is all addresses of the machine.

    Raises:
        OSError: the address is wrong or taken.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal():
        raise OSError(None, "HOST:PORT is needed, such as 0.0.0.0:9443")
    host = host.strip("[]")
    everywhere = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host == "::" and not everywhere:
        host, family = "", socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)


def _address(peer: tuple[str, int] | None) -> str:
    """An address of IPv4, or a network of 64 bits."""
    try:
        found = ipaddress.ip_address(peer[0].partition("%")[0] if peer else "")
    except ValueError:
        return "an unknown address"
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


def _number(peer: str) -> int:
    """The number of a passage in the name of a peer, `unix:FOLDER/NUMBER`."""
    name = peer.rpartition("/")[2]
    return int(name) if name.isdigit() else 0
