"""Another user of a site's machine, who connects to its ranks before their peers do."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # which `socket` loads for a host's name: the other user may not read it
import multiprocessing
import os
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # missing in the stub

from cloister.clients.ranks import rank as rank_process
from cloister.protocol.machine import fork_server
from cloister.tests.parties.ranks.rank_work import TWO, tell

NOBODY = 65534
USER = os.getuid() or NOBODY
"""Whose process the stranger is: of another user where this one may start such a process."""
FOLDER = "CLOISTER_TEST_FOLDER"
"""The variable of the environment with the folder of the socket that ranks tell."""
_PREAMBLE = struct.Struct("=6Q")  # bytes, kind, slot, offset, length, offset at the receiver
_SEND, _SEND_READY, _RECEIVE_READY = 1, 2, 3


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses on which a process listens, as the kernel writes them, with their ports."""
    table = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [row for row in table if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return [(address, int(port, 16)) for address, _, port in (row[1].partition(":") for row in rows)]


class Stranger:
    """A process that connects to ranks and says that it is their peers."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def connect(self, pids: Sequence[int]) -> None:
        """Connect to every port of the processes, once as each peer."""
        self._pipe.send(sorted({port for pid in pids for _, port in listening(pid)}))
        assert self._pipe.recv() == "connected"

    def loot(self) -> bytes:
        """What ranks have sent until now, or, where they have sent something that is not complete, then."""
        self._pipe.send("loot")
        found: bytes = self._pipe.recv()
        return found


@contextmanager
def stranger() -> Iterator[Stranger]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_live, args=(theirs,))
    with fork_server.running([__name__]):
        process.start()
    theirs.close()
    try:
        yield Stranger(ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _live(pipe: Connection) -> None:
    if not os.getuid():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    taken = [_taken(port, number) for port in pipe.recv() for number in range(len(TWO))]
    pipe.send("connected")
    loot = b""
    while True:
        ready = wait([*taken, pipe])
        if pipe in ready:
            pipe.recv()
            pipe.send(loot)
        for peer in [each for each in taken if each in ready]:
            loot += _received(peer)
        if loot:  # the ranks hear of it, and no longer wait
            for peer in taken:
                peer.close()
            taken = []


def _taken(port: int, number: int) -> socket.socket:
    """A connection to a rank, as its peer of a number: the handshake of gloo is the number alone."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(struct.pack("=q", number))
    return connection


def _received(peer: socket.socket) -> bytes:
    """What a rank sends next in a collective, to a peer that says that it is ready for it."""
    head = peer.recv(_PREAMBLE.size, socket.MSG_WAITALL)
    if len(head) < _PREAMBLE.size:
        return b""
    _, kind, slot, _, length, _ = _PREAMBLE.unpack(head)
    if kind == _SEND_READY:
        peer.sendall(_PREAMBLE.pack(_PREAMBLE.size, _RECEIVE_READY, slot, 0, length, 0))
    return peer.recv(length, socket.MSG_WAITALL) if kind == _SEND else b""


# A rank that listens and has no peer yet.


class Paused(Store):
    """The store of the rendezvous, at which a rank waits for SIGUSR1 before it learns of its peers; it tells when."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._waited = False

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        if not self._waited:
            self._waited = True
            tell(Path(os.environ[FOLDER]), 0)
            signal.sigwait({signal.SIGUSR1})
        self._store.wait(keys, timeout)

    def clone(self) -> Any:
        return self._store


_stores: list[Paused] = []


def listens_first(theirs: socket.socket) -> None:
    """In the place of a rank's main function."""

    def paused(*arguments: Any) -> Paused:
        _stores.append(Paused(FileStore(*arguments)))  # torch does not keep it
        return _stores[-1]

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with mock.patch.object(rank_process, "FileStore", paused):
        rank_process.main(theirs)
