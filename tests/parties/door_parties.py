"""The parties of the door's tests: sites that answer as a test says, real sites in processes, a relay between."""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias
from unittest import mock

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from cloister.clients.network.door import DoorSite, Visitor
from cloister.clients.network.guard import Guard
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.site import Site
from cloister.clients.training import work
from cloister.clients.training.work import Task
from cloister.lm.training.train import LocalUpdate
from cloister.protocol.errors import BudgetError, PolicyError
from cloister.protocol.identity.certificates import (
    certificate_to_pem,
    issue,
    key_to_pem,
    new_authority,
    new_key,
    read_certificate,
)
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request as Enrolment
from cloister.protocol.identity.roster import Roster, load_identity, load_roster, new_identity
from cloister.protocol.identity.session import NONCE, Entrance, Nonces, prove
from cloister.protocol.machine.closing import Closing
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.door_pb2 import FromSite, Head, Hello, Proof, ToSite, Welcome
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.messages.messages import (
    TRAIN,
    Contribute,
    Instructions,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    SumId,
)
from cloister.protocol.messages.transfer import VERSION
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.door.grid import DoorGrid, most_bytes_of
from cloister.server.federation.app import GridChannel
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import identity, next_start
from cloister.server.run import run
from cloister.server.sum.channel import Failure
from cloister.tests.parties.envelopes import PUBLIC, guard_of, sender_of
from cloister.tests.parties.federation import contribution_of, step_of
from cloister.tests.tools.kills import die

RUN = "0a1b2c"
NAME = "coordinator.example"
"""A name of the server that no test can resolve, besides its address."""
WAIT_S = 30.0
NAMES = ("site-1", "site-2", "site-3")
_NOW = datetime.datetime.now(datetime.UTC)
_DAYS = 40
_LONG_AGO = _NOW - datetime.timedelta(days=_DAYS)


class Authority:
    """An authority, and certificates of servers by it; picklable, as a test may make it in another process."""

    def __init__(self) -> None:
        key = new_key()
        self._key = key_to_pem(key)  # a key is not picklable
        self.der = new_authority(key, "tests", _LONG_AGO, 2 * _DAYS).public_bytes(Encoding.DER)

    def server(self, *names: str, days: int = _DAYS, now: datetime.datetime = _NOW) -> ServerCertificate:
        """A certificate for a server with these names, the loopback address if there are none."""
        key = new_key()
        authority, by = read_certificate(self.der, "tests"), load_pem_private_key(self._key, None)
        assert isinstance(by, EllipticCurvePrivateKey)
        made = issue(authority, by, key, names or ("127.0.0.1", NAME), now, days)
        return ServerCertificate(certificate_to_pem(made), key_to_pem(key))


AUTHORITY = Authority()
CERTIFICATE = AUTHORITY.server()


@lru_cache
def identity_of(name: str) -> Ed25519PrivateKey:
    """The identity key of a site of the tests."""
    return new_identity()


def federation_of(
    identities: Mapping[str, Ed25519PrivateKey], authority: Authority | None = None
) -> Federation:
    """A federation of an authority; None: the tests' own."""
    today = _NOW.date()
    requests = [Enrolment.of(name, identity, "x", today) for name, identity in identities.items()]
    return Federation.first("tests", f"{NAME}:9443", (authority or AUTHORITY).der, PUBLIC, requests)


def entrance_at(address: str) -> Entrance:
    """The door of the tests' federation at another address."""
    return Entrance("tests", address, AUTHORITY.der)


class AtDoor(Closing):
    """A run behind a door, as a channel.

    Args:
        folder: For what is under way.
        door: The door, which stays open; None: one on loopback of its own.
        names: The sites of the run, and of the federation of its own door.
        most_bytes: As for `DoorGrid`.
        bind: Where its own door listens.
        run: Label of the run.
        sender: Signs its requests; None: the coordinator of sites that a test makes up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        door: Door | None = None,
        names: Sequence[str] = NAMES,
        most_bytes: int = 2**23,
        bind: str = "127.0.0.1:0",
        run: str = RUN,
        sender: Sender | None = None,
    ) -> None:
        self._own = door is None
        federation = federation_of({name: identity_of(name) for name in names})
        self.door = door or Door(lambda: CERTIFICATE, lambda: federation, bind)
        near, far = socket.socketpair()
        self.door.serve(near)
        self.grid = DoorGrid(far, run, folder / "spool", names, most_bytes)
        channel = GridChannel(self.grid, sender or sender_of(RUN), dict(enumerate(names, 1)))
        self.nodes, self.ask, self.stream = channel.nodes, channel.ask, channel.stream
        self.connected, self.wait_for = self.grid.connected, self.grid.wait_for
        self.address = self.door.address

    def close(self, *, over: bool = False) -> None:
        """End the run's part, and the door if it is its own; idempotent."""
        self.grid.close(over=over)
        if self._own:
            self.door.close()


def laid_out_sender(files: RunFiles, sites: Path, roster: Roster | None = None) -> Sender:
    """The coordinator's side of a run of sites that a simulation has laid out; another start each time."""
    return Sender(load_identity(sites / "coordinator.pem"), identity(files, roster), next_start(files))


def open_channel(folder: Path, **options: Any) -> AtDoor:
    """A run behind a door on loopback, for three sites and vectors of up to 8 MiB."""
    return AtDoor(folder, **options)


def join_request(text: str = "{}") -> Join:
    """A request without a vector."""
    return Join(RUN, text, bytes(32), b"", np.empty(0, np.float32))


def contribute(model: Any, number: int = 1) -> Contribute:
    """A request for a contribution from a model."""
    told = Instructions(SumId(RUN, bytes(32), TRAIN, number), vector_hash(model))
    return Contribute(told, 1, None, model)


class Answering:
    """A site that answers as a test says.

    Args:
        name: Its name.
        vector: What it contributes.
    """

    def __init__(self, name: str = "site-1", vector: Any = None) -> None:
        self.name = name
        self.vector = np.arange(1000, dtype=np.uint32) if vector is None else vector
        self.asked: list[Request] = []
        self.during: Callable[[Request], None] = lambda _request: None
        """Called while a request is handled."""

    @property
    def guard(self) -> Guard:
        return guard_of(self.name)

    def answer(self, request: Request) -> Reply:
        self.asked.append(request)
        self.during(request)
        if isinstance(request, Contribute):
            return contribution_of(request, self.name, self.vector)
        return Joined(self.name)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        raise AssertionError("it has no policy")


@contextlib.contextmanager
def connected(
    channel: AtDoor,
    site: Answering,
    folder: Path,
    *,
    identity: Ed25519PrivateKey | None = None,
    through: Relay | None = None,
    address: Callable[[], str] | None = None,
    more: int = 1,
) -> Iterator[DoorSite]:
    """A site in threads of this process, connected to a channel.

    Args:
        channel: The channel.
        site: The site.
        folder: Its folder is in it.
        identity: Its key; None: that of its name.
        through: A relay through which it connects.
        address: Where it connects to otherwise, for each session anew; None: to the channel's door.
        more: Sites that are connected more than before, when it is.
    """

    def entrance() -> Entrance:
        if through is not None:
            return entrance_at(through.address)
        return entrance_at(address() if address else channel.address)

    client = DoorSite(
        Visitor(site.name, lambda: identity or identity_of(site.name), entrance),
        lambda: site,
        folder / site.name,
        explain=str,
        jitter=lambda: 0.1,
    )
    thread = threading.Thread(target=client.run)
    before = sum(each.online for each in channel.connected())
    thread.start()
    try:
        assert channel.wait_for(before + more, WAIT_S) == before + more
        yield client
    finally:
        client.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        until = time.monotonic() + WAIT_S
        while more and any(each.online and each.name == site.name for each in channel.connected()):
            assert time.monotonic() < until


class Raw:
    """A peer that sends what a test says, without a client of ours.

    Args:
        door: The run behind the door, or the entrance of another door.
    """

    def __init__(self, door: AtDoor | Entrance) -> None:
        self.entrance = door if isinstance(door, Entrance) else entrance_at(door.address)
        self._grpc = grpc.secure_channel(
            self.entrance.address,
            grpc.ssl_channel_credentials(self.entrance.root),
            [("grpc.max_send_message_length", -1)],
        )
        self.unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.unsent.put(None)
        self._grpc.close()

    def call(self, method: str, messages: Iterable[bytes], key: bytes = b"") -> Any:
        """A call of the door; iterate over it for the answers."""
        metadata = (("session-bin", key),) if key else ()
        return self._grpc.stream_stream(f"/cloister.Door/{method}")(
            iter(messages), metadata=metadata, timeout=WAIT_S
        )

    def refused(self, method: str, messages: Iterable[bytes], key: bytes = b"") -> tuple[str, str]:
        """The code and text with which a call is refused."""
        with pytest.raises(grpc.RpcError) as raised:
            list(self.call(method, messages, key))
        return raised.value.code().name, raised.value.details()

    def say(self, **said: Any) -> None:
        """Send a message in the session."""
        self.unsent.put(FromSite(**said).SerializeToString())

    def session(self) -> Any:
        """A session, as a call whose messages come from `say`."""
        return self.call("Session", iter(self.unsent.get, None))

    def greeted(self, name: str, nonce: bytes = bytes(NONCE)) -> tuple[Any, bytes]:
        """A session after the challenge, and the nonce of the door."""
        call = self.session()
        self.say(hello=Hello(version=VERSION, name=name, nonce=nonce))
        return call, said(call).challenge.nonce

    def proof(self, name: str, identity: Ed25519PrivateKey, nonce: bytes) -> Proof:
        """The proof that answers a challenge of `greeted`."""
        signature = prove(identity, name, self.entrance, Nonces(bytes(NONCE), nonce))
        return Proof(key=identity.public_key().public_bytes_raw(), signature=signature)

    def open(self, name: str = "site-1", identity: Ed25519PrivateKey | None = None) -> tuple[Any, bytes]:
        """A session that has been welcomed, and its key."""
        call, welcome = self.welcomed(name, identity or identity_of(name))
        return call, welcome.key

    def welcomed(
        self, name: str, identity: Ed25519PrivateKey, own: Head | None = None
    ) -> tuple[Any, Welcome]:
        """A session, and what it was welcomed with; the last line of the site's audit log is `own`."""
        call, nonce = self.greeted(name)
        proof = self.proof(name, identity, nonce)
        proof.own.CopyFrom(own or Head())
        self.say(proof=proof)
        return call, said(call).welcome


def said(call: Any) -> ToSite:
    """The next message of a session."""
    message: ToSite = ToSite.FromString(next(call))
    return message


class Relay:
    """A relay of TCP connections that counts bytes and can cut them.

    Args:
        address: HOST:PORT of the server.
        proxy: Whether a connection begins with an HTTP CONNECT.
        source: The address of loopback from which it connects; empty: any.
    """

    def __init__(self, address: str, *, proxy: bool = False, source: str = "") -> None:
        self._proxy = proxy
        self._source = (source, 0) if source else None
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.moved = {"up": 0, "down": 0}
        """Bytes from the site and to it."""
        self.cut_at: dict[str, int] = {}
        """The bytes of a direction after which all connections are cut, once."""
        self.hold_at: dict[str, int] = {}
        """The bytes of a direction after which nothing is passed on until `passing` is set."""
        self.passing = threading.Event()
        self.connects: list[str] = []
        """As a proxy: what it was asked for."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.passing.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_S)

    def cut(self) -> None:
        """Close all connections."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                if self._proxy:
                    self.connects.append(near.recv(2**12).split(b"\r\n")[0].decode())
                    near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                far = socket.create_connection(self._to, source_address=self._source)
            except OSError:  # the server is down
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for name, one, other in (("up", near, far), ("down", far, near)):
                thread = threading.Thread(target=self._copy, args=(name, one, other))
                self._threads.append(thread)
                thread.start()

    def _copy(self, name: str, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                self.moved[name] += len(data)
                if name in self.cut_at and self.moved[name] >= self.cut_at[name]:
                    del self.cut_at[name]
                    self.cut()
                    break
                if name in self.hold_at and self.moved[name] >= self.hold_at[name]:
                    self.passing.wait(WAIT_S)
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {one, other}
        one.close()


Moment: TypeAlias = tuple[str, int, str]
"""A purpose, a round, and a step."""


def moment_of(request: Request) -> Moment:
    """The sum and the step that a request is of."""
    step = step_of(request)
    return ("", 0, step) if isinstance(request, Join) else (request.sum.purpose, request.sum.round, step)


class Mortal:
    """A site whose process is killed after it has answered, once at each moment: the answer is lost.

    Args:
        site: The site.
        moments: When.
        folder: Remembers at which of them it has died.
    """

    def __init__(self, site: Site, moments: Collection[Moment], folder: Path) -> None:
        self.name = site.name
        self.guard = site.guard
        self.refuse = site.refuse
        self._site = site
        self._moments = moments
        self._folder = folder

    def answer(self, request: Request) -> Reply:
        reply, now = self._site.answer(request), moment_of(request)
        if now in self._moments and not self._mark(now).exists():
            self._mark(now).touch()
            die()
        return reply

    def _mark(self, moment: Moment) -> Path:
        return self._folder / f"died-{'-'.join(map(str, moment))}"


class SiteProcesses:
    """Real sites, each in a process of its own, which is started again when it is killed, and ends with the run.

    Args:
        address: HOST:PORT of the door.
        configs: For each site its TOML.
        moments: For some of them, by their place, when they are killed.
    """

    def __init__(
        self,
        address: str,
        configs: list[Path],
        moments: Mapping[int, Collection[Moment]] = MappingProxyType({}),
    ) -> None:
        self._entrance = entrance_at(address)
        self._context = multiprocessing.get_context("forkserver")
        self.codes: list[list[int | None]] = [[] for _ in configs]
        """For each site the exit codes of its processes."""
        self._current: list[Any] = [None] * len(configs)
        self._threads = [
            threading.Thread(target=self._keep, args=(index, config, moments.get(index, ())))
            for index, config in enumerate(configs)
        ]
        for thread in self._threads:
            thread.start()

    def _keep(self, index: int, config: Path, moments: Collection[Moment]) -> None:
        while not self.codes[index] or self.codes[index][-1] == -signal.SIGKILL:
            arguments = (config, moments, self._entrance)
            process = self._current[index] = self._context.Process(target=_serve, args=arguments)
            process.start()
            process.join()
            self.codes[index].append(process.exitcode)

    def kill(self, index: int) -> None:
        """End the process of a site as `kill -9` would."""
        os.kill(self._current[index].pid, signal.SIGKILL)

    def join(self) -> None:
        """Wait until all processes have ended."""
        for thread, process in zip(self._threads, self._current, strict=True):
            thread.join(WAIT_S)
            if thread.is_alive():
                process.terminate()


def _serve(path: Path, moments: Collection[Moment], entrance: Entrance) -> None:
    config = read_config(path)
    resident = Resident()
    real = work.train

    def train(trainer: Any, terms: Any, task: Task, *rest: Any) -> LocalUpdate:
        finished = real(trainer, terms, task, *rest)
        with (path.parent / "trained").open("a") as file:
            file.write(f"{task.round}\n")
        return finished

    with mock.patch.object(work, "train", train):
        site = DoorSite(
            Visitor(config.name, lambda: load_identity(Path(config.identity)), lambda: entrance),
            lambda: Mortal(Site(config, resident), moments, path.parent),
            config.folder / "door",
            ended=lambda: site.stop(),
            jitter=lambda: 0.01,
        )
        site.run()


@dataclass(frozen=True)
class Asked:
    """A step that a coordinator has asked for."""

    moment: Moment
    before: int
    """Bytes that its process had received until then."""
    after: int | None
    """Bytes that it had received when it had all answers; None if it was killed."""


class Joinable(Closing):
    """The door of sites that a simulation has laid out, in this process.

    Args:
        sites: Their folder, with the roster.
        configs: For each its TOML.
    """

    def __init__(self, configs: Sequence[Path]) -> None:
        read = [read_config(path) for path in configs]
        federation = federation_of({each.name: load_identity(Path(each.identity)) for each in read})
        self.names = federation.roster.names
        self.door = Door(lambda: CERTIFICATE, lambda: federation, "127.0.0.1:0")
        self.address = self.door.address

    def close(self) -> None:
        """Close the door."""
        self.door.close()


class CoordinatorProcesses:
    """A run in a process of its own, which is killed at some moments and started again; the door stays open.

    Args:
        folder: The run folder, created, and the spool beside it.
        sites: The folder of the sites, which has the roster.
        door: The door.
        moments: For each of its processes but the last, when it is killed.
    """

    def __init__(self, folder: Path, sites: Path, door: Door, moments: list[Moment]) -> None:
        self._folder = folder
        self._sites = sites
        self._door = door
        self._moments = moments

    def run(self) -> list[list[Asked]]:
        """Run to the end; what each process has asked for."""
        context = multiprocessing.get_context("forkserver")
        found: list[list[Asked]] = []
        for moment in (*self._moments, None):
            log = self._folder.with_name(f"asked-{len(found)}")
            near, far = socket.socketpair()
            process = context.Process(target=_coordinate, args=(self._folder, self._sites, far, moment, log))
            process.start()
            far.close()
            self._door.serve(near)
            process.join(2 * WAIT_S)
            assert process.exitcode == (0 if moment is None else -signal.SIGKILL)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            begun = {tuple(moment): before for moment, before, after in lines if after is None}
            ended = {tuple(moment): after for moment, _, after in lines if after is not None}
            found.append([Asked(each, before, ended.get(each)) for each, before in begun.items()])
        return found


class Watched:
    """A channel that notes what it is asked for, and is killed with its process when two sites have answered."""

    def __init__(self, grid: DoorGrid, channel: GridChannel, moment: Moment | None, log: Path) -> None:
        self._grid = grid
        self._channel = channel
        self._moment = moment
        self._log = log

    def nodes(self) -> Sequence[int]:
        return self._channel.nodes()

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        now, before = moment_of(next(iter(requests.values()))), self._received()
        self._note(now, before, None)
        for number, answer in enumerate(self._channel.ask(requests, deadline_s, group=group), 1):
            if (now, number) == (self._moment, 2):
                die()
            yield answer
        self._note(now, before, self._received())

    def _received(self) -> int:
        return sum(site.received for site in self._grid.connected())

    def _note(self, *line: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _coordinate(path: Path, sites: Path, far: socket.socket, moment: Moment | None, log: Path) -> None:
    with RunFolder.reopen(path) as folder:
        plan, roster = folder.plan, load_roster(sites / "roster.toml")
        most_bytes = most_bytes_of(plan, 10**5)
        sender = laid_out_sender(folder, sites, roster)
        with DoorGrid(far, "run", path.with_name("spool"), roster.names, most_bytes) as grid:
            assert grid.wait_for(plan.cohort.sites, WAIT_S) == plan.cohort.sites
            channel = GridChannel(grid, sender, dict(enumerate(roster.names, 1)))
            run(folder, Watched(grid, channel, moment, log), lambda _event: None, roster=roster)
            grid.close(over=True)
