"""The door against a bare stream of gRPC for Python with the same TLS, on loopback, in one run.

- `up`, `down`: megabytes a second over all sites, each of which sends, then receives a vector. On the way up that is
  until the coordinator has the vectors of all sites, hashed, on disk and mapped; on the way down, until all reply.
  `folded`: as `up`, until the coordinator has also added each vector to a sum.
- `stream_up`, `stream_down`: the same bytes by a threaded server of gRPC, in chunks of the same size, dropped.
- `stream_ratio`: the bare stream's seconds over the door's, up and down together.
- `phase_ms`: a request without a vector to all sites, until the last has replied; the median.
- `memory`: for each number of sites the peaks in megabytes of the door's process and of the run's, while the run adds
  the sites' vectors, and while they receive.

The door, the run and the sites are processes of their own. The sides take turns, and the best of each is compared.

    python benchmarks/door.py [--json] [--mb N] [--sites N] [--memory N [N ...]] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from cloister.clients.network.door import DoorSite, Visitor
from cloister.clients.network.guard import Guard
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import CloisterError
from cloister.protocol.identity.certificates import (
    certificate_to_pem,
    issue,
    key_to_pem,
    new_authority,
    new_key,
)
from cloister.protocol.identity.roster import load_identity, new_identity
from cloister.protocol.identity.session import Entrance
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.envelope import Sender
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
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.door.grid import DoorGrid
from cloister.server.door.process import ENVIRONMENT, prepare
from cloister.server.federation.app import GridChannel
from cloister.server.federation.registry import Registry
from cloister.server.sum.channel import Channel
from cloister.simulations.rehearsal.provision import Provision, SiteSection, provision

WAIT_S = 600.0
PHASES = 100


class Site:
    """Contributes a vector of so many bytes, or one element where the model is large."""

    def __init__(self, name: str, size: int, coordinator: str) -> None:
        self.name = name
        self._coordinator = coordinator
        self._large = np.arange(size // 4, dtype=np.uint32)
        self._manifest = ((0, self._large.size, vector_hash(self._large)),)
        self._small = np.zeros(1, np.uint32)

    @property
    def guard(self) -> Guard:
        return Guard(self.name, self._coordinator, Path("nowhere"), lambda _run: new_identity())

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


def serve_site(home: Path, entrance: Entrance, size: int, folder: str) -> None:
    config = read_config(home / "site.toml")
    site = Site(config.name, size, config.coordinator)
    DoorSite(
        Visitor(config.name, lambda: load_identity(Path(config.identity)), lambda: entrance),
        lambda: site,
        Path(folder) / "sites" / config.name,
    ).run()


def open_door(pipe: Connection, federation: Path, far: socket.socket) -> None:
    """Serve one run, and tell peaks of memory, until the pipe is closed."""
    prepare()
    registry = Registry.open(federation)
    pem, key = ((federation / f"door.{kind}").read_bytes() for kind in ("pem", "key"))
    certificate = ServerCertificate(pem, key)
    with Door(lambda: certificate, lambda: registry.federation, "127.0.0.1:0") as door:
        door.serve(far)
        pipe.send(door.address)
        while pipe.recv() is not None:
            pipe.send(peak())
            forget_peak()


def coordinate(
    pipe: Connection, door: Connection, near: socket.socket, registry: Registry, size: int, folder: str
) -> None:
    """Send the seconds of each direction, of an empty phase, and the peaks."""
    names = registry.federation.roster.names
    with DoorGrid(near, "run", Path(folder) / "spool", names, size) as grid:
        assert grid.wait_for(len(names), WAIT_S) == len(names)
        channel = GridChannel(grid, Sender(registry.signing_key(), "run", 1), dict(enumerate(names, 1)))
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
                door.send(name)
                door.recv()
                request = contribute(vector, 3 * number + step)
                found[name] = timed(partial(ask, channel, request, total if name == "folded" else None))
                door.send(name)
                found[f"{name}_peak"] = peak(), door.recv()
            pipe.send(found)
        door.send(None)


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


class Deployment:
    """A door, a run behind it, and sites, in processes.

    Args:
        sites: How many.
        size: Bytes of a vector.
        folder: For their files.
    """

    def __init__(self, sites: int, size: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        parties = Path(folder) / "parties"
        listed = [SiteSection(name=f"site-{index}", contact="benchmark") for index in range(sites)]
        provision(Provision(name="benchmark", site=listed, door="127.0.0.1:9443"), parties, datetime.now(UTC))
        registry = Registry.open(parties / "coordinator")
        near, far = socket.socketpair()
        door, other = context.Pipe()
        self._pipe, end = context.Pipe()
        self._processes = [context.Process(target=open_door, args=(other, registry.path, far))]
        self._processes[0].start()
        entrance = replace(registry.federation.entrance, address=door.recv())
        arguments = (end, door, near, registry, size, folder)
        self._processes.append(context.Process(target=coordinate, args=arguments))
        self._sites = [
            context.Process(target=serve_site, args=(parties / "sites" / each.name, entrance, size, folder))
            for each in listed
        ]
        for process in (self._processes[1], *self._sites):
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
        for process in self._sites:
            process.kill()


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


def stream_site(pipe: Connection, root: bytes, port: int, size: int) -> None:
    options = [("grpc.max_receive_message_length", MESSAGE)]
    channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root), options)
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
        key, now = new_key(), datetime.now(UTC)
        authority = new_authority(key, "benchmark", now, 1)
        server = new_key()
        made = issue(authority, key, server, ["127.0.0.1"], now, 1)
        root = certificate_to_pem(authority)
        self._server, far = context.Pipe()
        arguments = (far, certificate_to_pem(made), key_to_pem(server), size)
        self._processes = [context.Process(target=stream_server, args=arguments)]
        self._processes[0].start()
        port = self._server.recv()
        self._sites = []
        for _ in range(sites):
            near, far = context.Pipe()
            process = context.Process(target=stream_site, args=(far, root, port, size))
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


def measure(sites: int, size: int, memory: list[int], repeats: int) -> dict[str, Any]:
    """All figures."""
    peaks = {}
    for count in memory:
        with tempfile.TemporaryDirectory() as folder:
            deployment = Deployment(count, size, folder)
            found = deployment.turn()
            deployment.close()
        peaks[str(count)] = {
            name: {
                who: round(each / 1e6)
                for who, each in zip(("run", "door"), found[f"{name}_peak"], strict=True)
            }
            for name in ("folded", "down")
        }
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        deployment, stream = Deployment(sites, size, folder), Stream(sites, size)
        for _ in range(repeats):
            bare.append(stream.turn())
            ours.append(deployment.turn())
        deployment.close()
        stream.close()
    best = {name: min(turn[name] for turn in ours) for name in ("up", "folded", "down")}
    raw = {name: min(turn[name] for turn in bare) for name in ("up", "down")}
    moved = sites * size / 1e6
    return {
        "sites": sites,
        "mb": size / 1e6,
        **{name: round(moved / best[name], 1) for name in best},
        **{f"stream_{name}": round(moved / raw[name], 1) for name in raw},
        "stream_ratio": round(sum(raw.values()) / (best["up"] + best["down"]), 3),
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
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # of the bare stream's processes too
    multiprocessing.get_context("forkserver").set_forkserver_preload(["cloister.benchmarks.door"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = options.mb * 10**6 // 4 * 4
    found = measure(options.sites, size, options.memory, options.repeats)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
