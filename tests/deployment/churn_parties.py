"""The parties of `deployment_churn.py`: a door, a run of rounds that do nothing, and sites that come and go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.network.door import DoorSite, Visitor
from cloister.protocol.identity.roster import new_identity
from cloister.protocol.identity.session import Entrance
from cloister.protocol.messages.messages import Contribute, Contribution, Joined, Reply, Request
from cloister.server.door import sites
from cloister.server.door.door import Door
from cloister.server.door.process import prepare
from cloister.server.sum.members import Members
from cloister.tests.parties.door_parties import (
    RUN,
    WAIT_S,
    Answering,
    AtDoor,
    Authority,
    Relay,
    contribute,
    federation_of,
)
from cloister.tests.parties.federation import tiny

STAYING = ("site-1", "site-2", "site-3")
GUEST = "site-4"
WAYS = ("uploading", "killed", "frozen", "cut", "leaves")
"""How the guest leaves, in turn: killed in the middle of an upload; killed; stopped by SIGSTOP, with its connection
open, until just before it comes again; by itself, after its connection was cut and it came back; by itself."""

_LARGE = 6 * 2**20
"""Bytes of the upload in which the guest is killed, and the bytes after which the relay holds it."""
_HELD_AT = 2 * 2**20


@dataclass(frozen=True)
class Held:
    """What the coordinator's process holds between two rounds, after a collection of garbage."""

    resident: int
    """Bytes of resident memory."""
    allocated: int
    """Bytes that are allocated by malloc: without what it keeps for later."""
    sockets: int
    descriptors: int
    """All open file descriptors."""
    threads: int
    """Those of Python."""
    others: Mapping[str, int]
    """All threads of the process, by their name in the kernel."""
    blocks: int
    """Blocks of memory that Python has allocated: what it keeps for a site or a session shows here first."""
    spooled: int
    """Files of uploads."""
    rounds: int
    answers: int
    """To all requests; the other ones were timeouts."""
    cpu_s: float


class Silent(Answering):
    """A site that answers without a vector."""

    def answer(self, request: Request) -> Reply:
        self.during(request)
        return Joined(self.name)


def resident(pid: int) -> int:
    """Bytes of resident memory of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.split("\nRss:")[1].split()[0]) * 1024


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated() -> int:
    """Bytes that this process has allocated by malloc, in all arenas, and not freed."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _MallInfo
    found = info()
    return int(found.uordblks + found.hblkhd)


def coordinate(
    commands: Connection,
    keys: Mapping[str, bytes],
    authority: Authority,
    folder: Path,
    deadline_s: float,
    pause_s: float,
) -> None:
    """Send the address; then ask all sites for the smallest contribution, again and again, until a command ends it."""
    prepare()
    between, over = threading.Lock(), threading.Event()
    rounds = answers = 0
    plan = tiny("aggregation.secure=false")
    identities = {name: Ed25519PrivateKey.from_private_bytes(key) for name, key in keys.items()}
    federation, certificate = federation_of(identities, authority), authority.server()
    with (
        mock.patch.object(sites, "_SESSIONS", 10**6),  # guests come more often than a site may
        Door(lambda: certificate, lambda: federation, "127.0.0.1:0") as door,
        AtDoor(folder, door=door, names=federation.roster.names) as channel,
    ):
        commands.send(door.address)

        def held() -> Held:
            gc.collect()
            names = []
            for each in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # that of this listing
                    names.append(os.readlink(each))
            return Held(
                resident(os.getpid()),
                allocated(),
                sum(name.startswith("socket:") for name in names),
                len(names),
                threading.active_count(),
                Counter(
                    task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
                ),
                sys.getallocatedblocks(),
                sum(path.is_file() for path in folder.rglob("*")),
                rounds,
                answers,
                time.process_time(),
            )

        def command() -> None:
            while commands.recv() == "held":
                with between:
                    commands.send(held())
            over.set()

        threading.Thread(target=command, daemon=True).start()
        assert channel.wait_for(plan.cohort.sites, 4 * WAIT_S) == plan.cohort.sites
        members = Members(channel, plan, RUN, lambda _failure: None)
        model = np.zeros(1, np.float32)
        while not over.is_set():
            with between:
                rounds += 1
                requests = dict.fromkeys(members.sites, contribute(model, rounds))
                for reply in members.ask(requests, deadline_s, group=f"round {rounds}"):
                    answers += isinstance(reply, Contribution | Joined)
                    del reply  # its vector is an open file
            over.wait(pause_s)
        channel.close(over=True)


def serve_site(
    name: str, key: bytes, bytes_: int, entrance: Entrance, told: Connection, folder: Path
) -> None:
    """A site, until the run is over or `told` has a message.

    Args:
        name: Its name.
        key: Its identity key.
        bytes_: Of its contributions.
        entrance: Where the door is.
        told: Is sent the number of each round that it is asked for.
        folder: Its own.
    """

    def during(request: Request) -> None:
        site.asked.clear()  # each has an open file
        if isinstance(request, Contribute):
            told.send(request.sum.round)

    site = (Answering if bytes_ else Silent)(name, np.zeros(bytes_ // 4, np.uint32))
    site.during = during
    identity = Ed25519PrivateKey.from_private_bytes(key)
    client = DoorSite(
        Visitor(name, lambda: identity, lambda: entrance),
        lambda: site,
        folder,
        ended=lambda: client.stop(),
        jitter=lambda: 0.1,
    )

    def leave() -> None:
        with contextlib.suppress(EOFError):
            told.recv()
        client.stop()

    threading.Thread(target=leave, daemon=True).start()
    client.run()


class Guest:
    """A stay of a site: a process with a connection of its own.

    Args:
        churn: The run in which it is.
        name: The site.
        bytes_: Of its contributions. A guest has none but where it is to be killed in an upload: the coordinator
            waits for an upload that has moved for two minutes longer than for anything else.
        through: A relay between it and the coordinator.
    """

    def __init__(self, churn: Churn, name: str, bytes_: int, through: Relay | None = None) -> None:
        self._told, far = churn.context.Pipe()
        arguments = (
            name,
            churn.keys[name],
            bytes_,
            replace(churn.entrance, address=through.address) if through else churn.entrance,
            far,
            churn.folder / name,
        )
        self._process = churn.context.Process(target=serve_site, args=arguments)
        self._process.start()
        far.close()

    def asked(self, after: int = 0) -> int:
        """Wait until it is asked for a round with a higher number; returns that."""
        while True:
            assert self._told.poll(4 * WAIT_S), "the site is not asked"
            if (number := int(self._told.recv())) > after:
                return number

    def last(self) -> int:
        """The number of the last round that it has been asked for."""
        number = 0
        while self._told.poll():
            number = int(self._told.recv())
        return number

    def leave(self) -> None:
        """Leave by itself."""
        self._told.send(None)
        self.end(0)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.end(-signal.SIGKILL)

    def end(self, code: int) -> None:
        """Wait for the end of the process."""
        self._process.join(WAIT_S)
        assert self._process.exitcode == code
        self._process.close()
        self._told.close()


class Churn:
    """Rounds that do nothing, of three sites that stay and a guest that comes and leaves; use it as a context manager.

    Args:
        folder: For all files.
        deadline_s: Of a round, which waits so long for a guest who is not there.
        pause_s: Between two rounds.
    """

    def __init__(self, folder: Path, *, deadline_s: float, pause_s: float) -> None:
        self.folder = folder
        self.context: Any = multiprocessing.get_context("forkserver")
        self.keys = {name: new_identity().private_bytes_raw() for name in (*STAYING, GUEST)}
        authority = Authority()
        self._commands, far = self.context.Pipe()
        arguments = (far, self.keys, authority, folder / "coordinator", deadline_s, pause_s)
        self._coordinator = self.context.Process(target=coordinate, args=arguments)
        self._coordinator.start()
        assert self._commands.poll(4 * WAIT_S), "the coordinator does not start"
        self.entrance = Entrance("tests", str(self._commands.recv()), authority.der)
        self._frozen: Guest | None = None
        self._staying = [Guest(self, name, 4) for name in STAYING]

    def __enter__(self) -> Churn:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self._commands.send("over")
        self._coordinator.join(2 * WAIT_S)
        assert self._coordinator.exitcode == 0
        for site in self._staying:
            site.end(0)

    @property
    def pid(self) -> int:
        """The coordinator's process."""
        assert self._coordinator.pid is not None
        return self._coordinator.pid

    def held(self) -> Held:
        """What the coordinator's process holds now."""
        for site in self._staying:
            site.last()  # a full pipe would stop it
        self._commands.send("held")
        assert self._commands.poll(8 * WAIT_S), "the coordinator does not answer"
        found = self._commands.recv()
        assert isinstance(found, Held)
        return found

    def thaw(self) -> None:
        """End a guest that is stopped."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            frozen.kill()

    def visit(self, way: str, stay_s: float) -> None:
        """The guest comes, takes part, stays so long and leaves."""
        self.thaw()
        look, relay = threading.Event(), None
        with contextlib.ExitStack() as opened:
            if way in ("uploading", "cut"):
                relay = opened.enter_context(Relay(self.entrance.address))
            guest = Guest(self, GUEST, _LARGE if way == "uploading" else 0, relay)
            if way == "uploading":
                assert relay is not None
                relay.hold_at["up"] = _HELD_AT
                until = time.monotonic() + 4 * WAIT_S
                while relay.moved["up"] < _HELD_AT:
                    assert time.monotonic() < until, "the upload does not move"
                    look.wait(0.05)
            else:
                guest.asked()
            look.wait(stay_s)
            match way:
                case "uploading" | "killed":
                    guest.kill()
                case "frozen":
                    guest.signal(signal.SIGSTOP)
                    self._frozen = guest
                case "cut":
                    assert relay is not None
                    last = guest.last()
                    relay.cut()
                    guest.asked(last + 1)  # one may have been on its way
                    guest.leave()
                case "leaves":
                    guest.leave()
