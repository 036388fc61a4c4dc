"""The exchange against a bare stream of gRPC for Python with the same TLS, and against Flower's own messages, on
loopback, in one run.

- `up`, `down`: megabytes a second over all sites, each of which sends, then receives a vector. On the way up that is
  until the coordinator has the vectors of all sites, hashed, on disk and mapped; on the way down, until all reply.
  `folded`: as `up`, until the coordinator has also added each vector to a sum.
- `stream_up`, `stream_down`: the same bytes by a threaded server of gRPC, in chunks of the same size, dropped.
- `stream_ratio`: the bare stream's seconds over the exchange's, up and down together.
- `flower_up`, `flower_down`: the same vectors as contents of Flower's messages, by a SuperLink and a SuperNode for each
  site, with TLS and keys, until the coordinator has the replies of all sites: what `--transport flower` does.
- `flower_ratio`: Flower's seconds over the exchange's, up and down together.
- `phase_ms`: a request without a vector to all sites, until the last has replied; the median.
- `memory`: for each number of sites the coordinator's peak in megabytes while it adds their vectors, and while they
  receive.

Coordinator and sites are processes of their own. The sides take turns, and the best of each is compared.

    python benchmarks/door.py [--json] [--mb N] [--sites N] [--memory N [N ...]] [--repeats N] [--no-flower]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from cloister.clients.app import client_app, serve_tasks
from cloister.clients.network.door import ExchangeSite
from cloister.protocol.errors import CloisterError, EngineError, InvitationError
from cloister.protocol.identity.address import free_port
from cloister.protocol.identity.invitation import Invitation
from cloister.protocol.identity.roster import new_identity
from cloister.protocol.machine.child import Child
from cloister.protocol.machine.flower import QUIET, SECRET, Tasks
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.messages import (
    TRAIN,
    Contribute,
    Contribution,
    Instructions,
    Join,
    Joined,
    Refused,
    Request,
    SumId,
)
from cloister.protocol.messages.transfer import CHUNK, MESSAGE
from cloister.server.door.certificate import new_certificate
from cloister.server.door.door import ENVIRONMENT, ExchangeChannel
from cloister.server.federation.app import GridChannel, SuperLink
from cloister.server.federation.registry import Registry
from cloister.server.sum.channel import Channel
from cloister.simulations.rehearsal.provision import Provision, SiteSection, provision

NAME = "coordinator.example"
WAIT_S = 600.0
PHASES = 100


class Site:
    """Contributes a vector of so many bytes, or one element where the model is large."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._large = np.arange(size // 4, dtype=np.uint32)
        self._manifest = ((0, self._large.size, vector_hash(self._large)),)
        self._small = np.zeros(1, np.uint32)

    def answer(self, request: Request) -> Joined | Contribution:
        if not isinstance(request, Contribute):
            return Joined(self.name)
        vector, manifest = self._large, self._manifest
        if request.model.size > 1:
            vector, manifest = self._small, ((0, 1, vector_hash(self._small)),)
        told = instructions_digest(request.told)
        return Contribution(self.name, request.sum, told, None, manifest, (vector,))

    def refuse(self, request: Request, error: CloisterError) -> Refused:
        raise AssertionError("it has no policy")


def serve_site(pipe: Connection, name: str, size: int, folder: str) -> None:
    site = Site(name, size)

    def invite(_why: CloisterError | None) -> Invitation:
        pipe.send(None)
        if not pipe.poll(WAIT_S):
            raise InvitationError("invitation", expected="one in time")
        return Invitation.from_bytes(pipe.recv_bytes())

    ExchangeSite(name, new_identity(), lambda: site, invite, Path(folder) / name).run()


def coordinate(pipe: Connection, invitations: list[Connection], size: int, folder: str) -> None:
    """Send the seconds of each direction, of an empty phase, and the peaks."""
    count = len(invitations)
    with ExchangeChannel(
        "run",
        new_certificate([NAME]),
        Path(folder) / "spool",
        sites=count,
        most_bytes=size,
        bind="127.0.0.1:0",
    ) as channel:
        for each in invitations:
            each.recv()
            each.send_bytes(channel.invite().to_bytes())
        assert channel.wait_for(count, WAIT_S) == count
        total = np.ones(size // 4, np.uint32)  # not zeros, whose memory would come with the first sum
        found: dict[str, Any] = {"phase": []}
        for number in range(PHASES):
            request: Request = Join("run", f"{number}", bytes(32), b"", np.empty(0, np.float32))
            found["phase"].append(timed(partial(ask, channel, request, None)))
        one = np.ones(1, np.float32)
        model = np.zeros(size // 4, np.float32)
        while (number := pipe.recv()) is not None:
            model[0] = number
            for step, (name, vector) in enumerate((("up", one), ("folded", one), ("down", model)), 1):
                forget_peak()
                request = contribute(vector, 3 * number + step)
                found[name] = timed(partial(ask, channel, request, total if name == "folded" else None))
                found[f"{name}_peak"] = peak()
            pipe.send(found)
        channel.close(over=True)


def contribute(model: Any, number: int) -> Contribute:
    """A request for a contribution from a model."""
    told = Instructions(SumId("run", bytes(32), TRAIN, number), vector_hash(model))
    return Contribute(told, 1, None, model)


def ask(channel: Channel, request: Request, total: Any) -> None:
    for _, reply in channel.ask(dict.fromkeys(channel.nodes(), request), WAIT_S, group="benchmark"):
        if isinstance(reply, Contribution) and total is not None:
            for (offset, length, _), span in zip(reply.manifest, reply.spans, strict=True):
                np.add(total[offset : offset + length], span, out=total[offset : offset + length])
        elif not isinstance(reply, Joined | Contribution):
            raise SystemExit(f"a site did not answer: {reply}")


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


class Exchange:
    """A coordinator and sites in processes.

    Args:
        sites: How many.
        size: Bytes of a vector.
        folder: For their files.
    """

    def __init__(self, sites: int, size: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        ends = [context.Pipe() for _ in range(sites)]
        self._pipe, far = context.Pipe()
        arguments = (far, [near for near, _ in ends], size, folder)
        self._processes = [context.Process(target=coordinate, args=arguments)]
        self._processes += [
            context.Process(target=serve_site, args=(end, f"site-{index}", size, folder))
            for index, (_, end) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        self._turns = 0

    def turn(self) -> dict[str, Any]:
        self._turns += 1
        self._pipe.send(self._turns)
        found: dict[str, Any] = self._pipe.recv()
        return found

    def close(self) -> None:
        self._pipe.send(None)
        for process in self._processes:
            process.join(60)


# The bare stream.


def stream_server(pipe: Connection, pem: bytes, key: bytes, size: int) -> None:
    def up(messages: Iterator[bytes], _context: Any) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    def down(_request: bytes, _context: Any) -> Iterator[bytes]:
        vector = memoryview(bytes(size))
        for at in range(0, size, CHUNK):
            yield bytes(vector[at : at + CHUNK])

    options = [("grpc.max_receive_message_length", MESSAGE)]
    server = grpc.server(ThreadPoolExecutor(16), options=options)
    handlers = {
        "up": grpc.stream_unary_rpc_method_handler(up),
        "down": grpc.unary_stream_rpc_method_handler(down),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, pem)]))
    server.start()
    pipe.send(port)
    pipe.recv()
    server.stop(None)


def stream_site(pipe: Connection, pem: bytes, port: int, size: int) -> None:
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.max_receive_message_length", MESSAGE)]
    channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(pem), options)
    vector = memoryview(bytes(size))
    grpc.channel_ready_future(channel).result(30)
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        if name == "up":
            chunks = (bytes(vector[at : at + CHUNK]) for at in range(0, size, CHUNK))
            assert int(channel.stream_unary("/bare/up")(chunks)) == size
        else:
            assert sum(len(chunk) for chunk in channel.unary_stream("/bare/down")(b"")) == size
        pipe.send(None)


class Stream:
    """The bare stream between as many processes.

    Args:
        sites: How many.
        size: Bytes of a vector.
    """

    def __init__(self, sites: int, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        certificate = new_certificate([NAME])
        self._server, far = context.Pipe()
        arguments = (far, certificate.pem, certificate.key, size)
        self._processes = [context.Process(target=stream_server, args=arguments)]
        self._processes[0].start()
        port = self._server.recv()
        self._sites = []
        for _ in range(sites):
            near, far = context.Pipe()
            process = context.Process(target=stream_site, args=(far, certificate.pem, port, size))
            process.start()
            self._sites.append(near)
            self._processes.append(process)
        for near in self._sites:
            near.recv()

    def turn(self) -> dict[str, float]:
        return {name: timed(partial(self._all, name)) for name in ("up", "down")}

    def _all(self, name: str) -> None:
        for site in self._sites:
            site.send(name)
        for site in self._sites:
            site.recv()

    def close(self) -> None:
        for pipe in (*self._sites, self._server):
            pipe.send(None)
        for process in self._processes:
            process.join(60)


# Flower's own messages.


def take_tasks(pipe: Connection, address: str, secret: bytes, name: str, size: int) -> None:
    """A site whose requests its SuperNode has."""
    site, over = Site(name, size), threading.Event()
    with Tasks(address, secret) as tasks:
        arguments = (tasks, client_app(lambda _context, _resident: site), over, lambda: None)
        thread = threading.Thread(target=serve_tasks, args=arguments)
        thread.start()
        pipe.recv()
        over.set()
        thread.join()


class Flower:
    """A SuperLink, and for each site a SuperNode and a process that takes its tasks.

    Args:
        sites: How many.
        size: Bytes of a vector.
        folder: For their files.
    """

    def __init__(self, sites: int, size: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self._size, self._opened, self._pipes = size, ExitStack(), []
        parties, secret = Path(folder) / "flower", os.urandom(SECRET)
        links = {name: f"127.0.0.1:{free_port()}" for name in ("superlink", "exchange")}
        names = [f"site-{index}" for index in range(sites)]
        listed = [SiteSection(name=name, contact="benchmark") for name in names]
        provision(
            Provision(
                name="benchmark", site=listed, superlink=links["superlink"], exchange=links["exchange"]
            ),
            parties,
            datetime.now(UTC),
        )
        own = parties / "coordinator"
        (parties / "secret").write_bytes(secret)
        given = ["--isolation", "process", "--superexec-auth-secret-file", str(parties / "secret")]
        address = f"127.0.0.1:{free_port()}"
        pem, key, root = own / "superlink.pem", own / "superlink.key", own / "authority.pem"
        superlink = ["flower-superlink", "--ssl-certfile", str(pem), "--ssl-keyfile", str(key), *given]
        superlink += ["--ssl-ca-certfile", str(root), "--enable-supernode-auth"]
        superlink += ["--fleet-api-address", links["superlink"], "--port", address.rpartition(":")[2]]
        self._start([*superlink, "--disable-runtime-dependency-installation"], parties)
        link = self._opened.enter_context(SuperLink(address, secret, root.read_bytes()))
        keys = {site.name: site.supernode for site in Registry.open(own).federation.sites}
        wait(lambda: link.admit(keys))
        self._processes = []
        for name in names:
            local, home = f"127.0.0.1:{free_port()}", parties / "sites" / name
            supernode = [
                "flower-supernode",
                "--superlink",
                links["superlink"],
                "--root-certificates",
                str(root),
            ]
            supernode += ["--auth-supernode-private-key", str(home / "supernode.key")]
            self._start([*supernode, "--port", local.rpartition(":")[2], *given], home)
            near, far = context.Pipe()
            process = context.Process(target=take_tasks, args=(far, local, secret, name, size))
            process.start()
            self._pipes.append(near)
            self._processes.append(process)
        self._run = self._opened.enter_context(link.run(keys))
        wait(lambda: len(self._run.nodes()) == sites)
        self._turns = 0

    def _start(self, command: list[str], folder: Path) -> None:
        environment = {**QUIET, "FLWR_HOME": str(folder)}
        child = Child(command[0], command[1:], folder / "log", environment=environment)
        self._opened.enter_context(child)

    def turn(self) -> dict[str, float]:
        channel, found = GridChannel(self._run.grid), {}
        for name, vector in (("up", np.ones(1, np.float32)), ("down", np.zeros(self._size // 4, np.float32))):
            self._turns += 1
            vector[0] = self._turns
            request = contribute(vector, self._turns)
            found[name] = timed(partial(ask, channel, request, None))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(60)
        self._opened.close()


def wait(there: Callable[[], object]) -> None:
    """Wait for a process that starts."""
    until, look = time.monotonic() + WAIT_S, threading.Event()
    while time.monotonic() < until:
        with suppress(EngineError):
            if there():
                return
        look.wait(0.2)
    raise SystemExit("a process of Flower does not answer")


def measure(sites: int, size: int, memory: list[int], repeats: int, flower: bool) -> dict[str, Any]:
    """All figures."""
    peaks = {}
    for count in memory:
        with tempfile.TemporaryDirectory() as folder:
            exchange = Exchange(count, size, folder)
            found = exchange.turn()
            exchange.close()
        peaks[str(count)] = {name: round(found[f"{name}_peak"] / 1e6) for name in ("folded", "down")}
    ours, bare, slow = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        exchange, stream = Exchange(sites, size, folder), Stream(sites, size)
        third = Flower(sites, size, folder) if flower else None
        for _ in range(repeats):
            bare.append(stream.turn())
            ours.append(exchange.turn())
            slow += [third.turn()] if third else []
        exchange.close()
        stream.close()
        if third:
            third.close()
    best = {name: min(turn[name] for turn in ours) for name in ("up", "folded", "down")}
    raw = {name: min(turn[name] for turn in bare) for name in ("up", "down")}
    moved = sites * size / 1e6
    theirs = {name: min(turn[name] for turn in slow) for name in ("up", "down")} if slow else {}
    return {
        "sites": sites,
        "mb": size / 1e6,
        **{name: round(moved / best[name], 1) for name in best},
        **{f"stream_{name}": round(moved / raw[name], 1) for name in raw},
        "stream_ratio": round(sum(raw.values()) / (best["up"] + best["down"]), 3),
        **{f"flower_{name}": round(moved / theirs[name], 1) for name in theirs},
        "flower_ratio": round(sum(theirs.values()) / (best["up"] + best["down"]), 1) if theirs else None,
        "phase_ms": round(1000 * statistics.median(ours[-1]["phase"]), 2),
        "memory": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--mb", type=int, default=400, help="megabytes of a vector")
    parser.add_argument("--sites", type=int, default=2, help="sites of the comparison")
    parser.add_argument("--memory", type=int, nargs="*", default=[2, 8], help="sites of the peaks")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--no-flower", action="store_true", help="without Flower's own messages")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # of all processes, as `cloister coordinator start` starts that of a run
    multiprocessing.get_context("forkserver").set_forkserver_preload(["cloister.benchmarks.door"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = options.mb * 10**6 // 4 * 4
    found = measure(options.sites, size, options.memory, options.repeats, not options.no_flower)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
