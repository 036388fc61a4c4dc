"""What the ranks of tests do, and sites that have such ranks; the fork server imports it once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import distributed
from torch.distributed import distributed_c10d

from cloister.clients.ranks.rank import Place, main
from cloister.clients.ranks.ranks import Ranks
from cloister.lm.parallel.mesh import Mesh
from cloister.protocol.errors import DataError
from cloister.protocol.machine.segments import SharedVector

SECRET = 1234.5
"""What ranks send each other."""


class Work:
    """What a rank of these tests does; it tells the socket in `folder` when it begins something that lasts."""

    def __init__(self, folder: Path, fails: str, place: Place) -> None:
        self._folder = folder
        self._place = place
        self._commands = 0
        if fails and place.rank == 1:
            tell(folder, place.rank)
            getattr(self, fails)()

    def __call__(self, command: Any) -> Any:
        self._commands += 1
        if isinstance(command, SharedVector):
            spans = np.array_split(command.array, self._place.count)
            mine = SharedVector.of(2 * spans[self._place.rank])
            return os.fstat(command.segment.fd).st_ino, command.array.flags.writeable, mine
        answer = getattr(self, command)()
        return answer, self._commands, os.getpid()

    def sum(self) -> float:
        total = torch.tensor([float(self._place.rank + 1)])
        distributed.all_reduce(total)
        return total.item()

    def add_a_secret(self) -> float:
        total = torch.full((100,), SECRET)
        distributed.all_reduce(total)
        return total.max().item()

    def tell_and_sum(self) -> float:
        tell(self._folder, self._place.rank)
        return self.sum()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fork_and_die(self) -> None:
        if os.fork():
            self.die()
        threading.Event().wait()

    def leave(self) -> None:
        raise SystemExit(7)

    def hang(self) -> None:
        tell(self._folder, self._place.rank)
        threading.Event().wait()

    def start_another_and_hang(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        tell(self._folder, self._place.rank, child.pid)
        self.hang()

    def data(self) -> None:
        raise DataError("site.data", "nowhere", expected="a file")

    def cannot_be_pickled(self) -> None:
        raise DataError("site.data", threading.Lock(), expected="a file")

    def defect(self) -> None:
        tell(self._folder, self._place.rank)
        raise RuntimeError("two\n  lines")

    def nothing(self) -> None:
        pass

    def answers_a_lock(self) -> Any:
        return threading.Lock()

    def place(self) -> tuple[int, int, str, int, str]:
        found = self._place
        threads, variable = torch.get_num_threads(), os.environ.get("CLOISTER_TEST", "")
        return found.rank, found.count, str(found.device), threads, variable


class Unreadable:
    """A command that a rank cannot build."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def tell(folder: Path, rank: int, pid: int | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.sendto(f"{rank} {pid or os.getpid()}".encode(), str(folder / "events"))


TWO = ["cpu", "cpu"]


def opened(
    folder: Path, devices: Sequence[str] = TWO, *, fails: str = "", threads: int = 1
) -> Ranks[Any, Any]:
    """Ranks for `Work`; `fails` is what the factory of the second does."""
    work = partial(Work, folder, fails)
    mesh = Mesh(replicate=max(1, len(devices)))
    return Ranks(work, mesh, devices, threads=threads, preload=[__name__], log=folder / "log")


def never_connect(theirs: object) -> None:
    """In the place of a rank's main function."""
    threading.Event().wait()


def dies_at_start(theirs: socket.socket) -> None:
    """In the place of a rank's main function: rank 1 is killed before it has answered anything."""
    if multiprocessing.current_process().name.startswith("cloister rank 1 "):
        os.kill(os.getpid(), signal.SIGKILL)
    main(theirs)


def unpickles_nothing_of_peers(theirs: socket.socket) -> None:
    """In the place of a rank's main function; the site's process pickles what it sends for `pipe._Unpickler`."""
    # The ignore: what unpickles is replaced, in this process alone, by a function that raises.
    pickle.load = pickle.Unpickler = distributed_c10d._unpickler = refused  # type: ignore[misc, assignment]
    main(theirs)


def refused(*_: object, **__: object) -> NoReturn:
    """In the place of what unpickles bytes."""
    raise AssertionError("bytes were unpickled")


# A site's process of its own.


def hanging_site(folder: Path) -> None:
    os.setsid()  # it leads a group, as a worker does
    ranks = opened(folder)
    ranks.call("hang", "tell_and_sum")


_forgotten: list[Ranks[Any, Any]] = []


def forgetful_site(folder: Path) -> None:
    _forgotten.append(opened(folder))
    _forgotten[0].call("tell_and_sum")


def site_app(folder: Path) -> ClientApp:
    """An app whose sites take turns at the same ranks."""
    app, ranks = ClientApp(), opened(folder)

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        answers = ranks.call("sum")
        found = {"sums": [total for total, _, _ in answers], "pids": [pid for _, _, pid in answers]}
        return Message(RecordDict({"out": ConfigRecord({**found, "worker": os.getpid()})}), reply_to=message)

    return app
