"""What the ranks of tests do; it imports little, because every rank that is started imports it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from cloister.clients.pipe import SharedVector
from cloister.clients.rank import Place
from cloister.protocol.errors import DataError


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
            return os.fstat(command.fileno()).st_ino, command.array.flags.writeable, mine
        answer = getattr(self, command)()
        return answer, self._commands, os.getpid()

    def sum(self) -> float:
        total = torch.tensor([float(self._place.rank + 1)])
        distributed.all_reduce(total)
        return total.item()

    def tell_and_sum(self) -> float:
        tell(self._folder, self._place.rank)
        return self.sum()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

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


def tell(folder: Path, rank: int, pid: int | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.sendto(f"{rank} {pid or os.getpid()}".encode(), str(folder / "events"))


def never_connect(theirs: object) -> None:
    """In the place of a rank's main function."""
    threading.Event().wait()
