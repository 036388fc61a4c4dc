"""One rank: a process that does its share of a site's training on one device.

`ranks.py` starts it and gives it commands. The work is not of this file: a factory makes it, in this process.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing in the stub of the public name
from torch.distributed.device_mesh import DeviceMesh

from cloister.clients.ranks.peers import connections
from cloister.lm.parallel.mesh import Mesh, build
from cloister.protocol.errors import CloisterError, one_line
from cloister.protocol.machine.fork_server import begin, redirect
from cloister.protocol.machine.segments import Channel, packed

# Not a limit on a rank's work: peers may compute for hours between two collectives. `Ranks.call` has the timeout.
_COLLECTIVE_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Place:
    """A rank among those of its site. Its process groups are ready: gloo for CPU tensors, NCCL for CUDA's."""

    rank: int
    """0 to `count` - 1."""
    count: int
    """The world size."""
    device: torch.device
    """The rank's device; if it is a GPU, the current one."""
    ranks: DeviceMesh
    """All of the site's ranks, connected; no process group is made beside those of this mesh."""


@dataclass(frozen=True)
class Begin:
    """What a rank is told first; its answer is its connections (`peers.py`), when it has a peer at each."""

    rank: int
    count: int
    device: str
    mesh: Mesh
    threads: int
    """Of torch, on the CPU."""
    environment: Mapping[str, str]
    """The environment variables of the site's process, not those of the fork server."""
    factory: bytes
    """Pickled: makes the work from a `Place`, at the first command."""


@dataclass(frozen=True)
class Answered:
    """What the work returned for a command."""

    answer: Any


@dataclass(frozen=True)
class Raised:
    """What was raised instead."""

    reason: str
    """The exception as one line."""
    error: CloisterError | None
    """The exception itself, if it is one for a user."""


def main(theirs: socket.socket) -> None:  # pragma: no cover - in a rank's process
    """The main function of a rank's process.

    Args:
        theirs: Its end of the pipe. File descriptors come first: of the file of the rendezvous, of standard output and
            of standard error.
    """
    begin()
    _, (rendezvous, *output), _, _ = socket.recv_fds(theirs, 1, 3)
    redirect(*output)
    for fd in output:
        os.close(fd)
    pipe, work = Channel(theirs), _Work(rendezvous)
    with suppress(ConnectionError):  # the site's process ends
        while True:
            command: Any = None
            try:
                try:
                    command = pipe.receive()
                except (EOFError, ConnectionError):
                    return
                said = packed(Answered(work(command)))
            except Exception as error:  # any exception is the site's error; this process waits for its end
                traceback.print_exc()
                said = packed(Raised(one_line(error), error if _travels(error) else None))
            pipe.send(said)
            del command, said  # frees their memory while the rank waits


class _Work:  # pragma: no cover - in a rank's process
    """Connects the rank at the first command, makes the work at the second, and passes on to it all but the first."""

    def __init__(self, rendezvous: int) -> None:
        self._rendezvous = rendezvous

    def __call__(self, command: Any) -> Any:
        if isinstance(command, Begin):
            place = _connected(command, self._rendezvous)
            self._made = cache(lambda: pickle.loads(command.factory)(place))
            return connections()
        return self._made()(command)


def _connected(told: Begin, rendezvous: int) -> Place:  # pragma: no cover - in a rank's process
    """The place of this process among its peers, with which it has all of its process groups."""
    os.environ.clear()
    os.environ.update(told.environment)
    # All ranks are on this machine, so nothing listens on an interface that another machine can reach. Peers connect
    # now and not at the first collective, which would be after `peers.check`.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="=lo", TORCH_GLOO_LAZY_INIT="0")
    torch.set_num_threads(told.threads)
    device = torch.device(told.device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        # The file has no name and ends with the processes that have it open. NCCL reads it in later rounds too.
        store=FileStore(f"/proc/self/fd/{rendezvous}", told.count),
        rank=told.rank,
        world_size=told.count,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if gpu else None,
    )
    return Place(told.rank, told.count, device, build(told.mesh, device.type))


def _travels(error: Exception) -> TypeGuard[CloisterError]:  # pragma: no cover - in a rank's process
    """Whether an error is one for a user, which can be pickled."""
    if isinstance(error, CloisterError):
        with suppress(Exception):  # whatever its attributes raise
            return isinstance(pickle.loads(pickle.dumps(error)), CloisterError)
    return False
