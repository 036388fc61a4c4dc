"""The accept loop before gRPC: a connection that ends gives its place back, whatever its peer does not read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cloister.server.door.event_loop import EventLoop
from cloister.server.door.front import Front
from cloister.tests.parties.door_parties import WAIT_S

LEFT = 2**24
"""Bytes that the server behind the front writes before it closes: more than all buffers on the way hold."""


class Served:
    """A front, and in place of gRPC a server that writes `LEFT` bytes to each connection and closes it."""

    def __init__(self) -> None:
        self.ended, self.loop = threading.Event(), EventLoop("front")
        self.port = self.loop.run(self._start())

    async def _start(self) -> int:
        self.front = Front(1)
        forget = self.front.forget

        def forgotten(number: int) -> None:
            forget(number)
            self.ended.set()

        self.front.forget = forgotten  # type: ignore[method-assign]  # it tells the test
        self._behind = await asyncio.start_unix_server(self._write, self.front.behind.removeprefix("unix:"))
        return await self.front.start("127.0.0.1:0")

    async def _write(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(bytes(LEFT))
            await writer.drain()
            writer.close()

    def close_when_full(self) -> None:
        """Close the one connection from inside, as soon as its peer has left something unread."""

        def closed() -> bool:
            for passage in list(self.front._passages.values()):
                transport = passage.outer.transport
                if transport is not None and transport.get_write_buffer_size():
                    passage.close()
                    return True
            return False

        until = time.monotonic() + WAIT_S
        while not self.loop.call(closed):
            assert time.monotonic() < until
            threading.Event().wait(0.01)

    def close(self) -> None:
        self.loop.call(self.front.close)
        self.loop.call(self._behind.close)
        self.loop.end()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def read(peer: socket.socket) -> int:
    """The bytes that a peer gets until its connection is closed or reset."""
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while data := peer.recv(2**20):
            size += len(data)
    return size


def test_a_peer_that_reads_gets_what_was_left_for_it(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), WAIT_S) as peer:
        assert read(peer) == LEFT
    assert served.ended.wait(WAIT_S)


@pytest.mark.parametrize("limit", ["_FLUSH_S", "HANDSHAKE_S"])
def test_a_peer_that_does_not_read_is_cut_off(
    served: Served, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its connection stays, and is counted nowhere. By the time that a proof may take it has been written to."""
    for other in ("_FLUSH_S", "HANDSHAKE_S"):  # each has to do it alone
        monkeypatch.setattr(f"cloister.server.door.front.{other}", 0.5 if other == limit else WAIT_S)
    open_before = len(os.listdir("/proc/self/fd"))
    with socket.create_connection(("127.0.0.1", served.port), WAIT_S):
        if limit == "_FLUSH_S":
            served.close_when_full()
        assert served.ended.wait(WAIT_S / 4)
        until = time.monotonic() + WAIT_S / 10
        while len(os.listdir("/proc/self/fd")) > open_before + 1:  # the peer's own
            assert time.monotonic() < until
            threading.Event().wait(0.01)


def test_addresses_of_one_site_do_not_make_those_of_another_unknown() -> None:
    front = Front(2)
    passages: dict[int, Any] = {}
    front._passages = passages  # of which a proof needs the address alone

    def proved(address: str, name: str) -> None:
        passages[1] = SimpleNamespace(address=address, calls_proved=None)
        front.proved("unix:/front/1", name)

    proved("192.0.2.1", "east")
    for number in range(200):
        proved(f"2001:db8:{number:x}::", "mallory")
    assert front._addresses() == {"192.0.2.1", *(f"2001:db8:{number:x}::" for number in range(196, 200))}
    proved("192.0.2.1", "mallory")
    for number in range(4):
        proved(f"2001:db8:{number:x}::", "mallory")
    assert front._addresses() == {"192.0.2.1", *(f"2001:db8:{number:x}::" for number in range(4))}
