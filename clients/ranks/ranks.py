"""The ranks of a site: the processes, one for each device, in which it trains one model.

They are forked from the fork server, start at the first command and are kept for the run. What they do is not of this
file: a factory makes the work in each. If one of them ends, hangs or raises, all are killed, because its peers may wait
for it in a collective; the next command starts all of them again. The site's process waits on pipes and on process
sentinels; nothing polls. Before the first command it checks that the ranks are connected with each other and with
nobody else (`peers.py`).

Alternative refused: torch's elastic agent (`torchrun`). It starts a script in a new interpreter for each rank, starts
it again where a site must report an error, and listens on a port.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from cloister.clients.ranks import peers
from cloister.clients.ranks import rank as rank_process
from cloister.clients.ranks.rank import Answered, Begin, Place
from cloister.lm.parallel.mesh import Mesh
from cloister.protocol.errors import RankError
from cloister.protocol.machine import fork_server
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.segments import Channel, Frame, packed

Command = TypeVar("Command")
Answer = TypeVar("Answer")

CONNECT_SECONDS = 60.0  # until all ranks have their process groups
_EXIT_SECONDS = 1.5  # how long idle ranks, or one that is already ending, have to exit before they are killed
_CAUSE_SECONDS = 1.0  # after an error that may only be the effect of a peer's end, to hear of that


@dataclass(eq=False)
class _Rank:
    """The site's end of one rank's process."""

    name: str
    process: ForkServerProcess
    pipe: Channel


class Ranks(Closing, Generic[Command, Answer]):
    """Processes that answer commands together.

    They belong to one thread of the site's process and end with that process, however it ends; use them as a context
    manager. They are closed when they are garbage-collected and at interpreter exit.

    Args:
        factory: Called in each rank with its `Place`; returns the function that answers commands. Picklable.
        mesh: The mesh of the ranks.
        devices: The torch device of each rank, such as `cuda:1` or `cpu`.
        threads: Threads of torch in each rank.
        preload: Modules that the fork server imports, if it is started here, in addition to torch.
        log: File to which the ranks' output is appended; None leaves it where this process's output goes.

    Raises:
        ValueError: `devices` is empty.
        Exception: `factory` cannot be pickled.
    """

    def __init__(
        self,
        factory: Callable[[Place], Callable[[Command], Answer]],
        mesh: Mesh,
        devices: Sequence[str],
        *,
        threads: int = 1,
        preload: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        if not devices:
            raise ValueError("devices is empty: expected the device of at least one rank")
        self._factory = pickle.dumps(factory)
        self._mesh = mesh
        self._devices = list(devices)
        self._threads = threads
        self._preload = [rank_process.__name__, *preload]
        self._log = log
        self._ranks: list[_Rank] = []
        # Not a weakref.finalize: it must run before multiprocessing waits for its children at exit.
        self._at_exit = util.Finalize(self, _end_all, (self._ranks, _EXIT_SECONDS), exitpriority=0)

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self._devices)

    def close(self) -> None:
        """End all ranks within 2 s, and kill those that are busy; idempotent."""
        self._at_exit()

    def call(self, *commands: Command, timeout_s: float | None = None) -> list[Answer]:
        """Give all ranks a command and wait for all answers.

        Args:
            commands: One for all ranks, or one for each; picklable, with large vectors as `SharedVector`.
            timeout_s: Seconds that the ranks have, with the time of the factory in a first call but not the start of
                the processes; None for no limit.

        Returns:
            The answers, in the order of the ranks.

        Raises:
            CloisterError: a rank has raised it; the first one, if several have.
            RankError: a rank has ended, is late, has raised another exception, or is connected with a process that
                is not a rank of this site. As after any exception but ValueError, all ranks have ended, and the next
                call starts them, and calls the factory, again.
            EngineError: the processes cannot be started.
            ValueError: there are neither one nor as many commands as ranks, or the ranks are closed.
        """
        if not self._at_exit.still_active():
            raise ValueError("ranks are closed: expected no command after that")
        if len(commands) not in (1, len(self)):
            raise ValueError(
                f"commands is {len(commands)}: expected one, or one for each of {len(self)} ranks"
            )
        frames = [packed(command) for command in commands]
        if len(frames) == 1:
            frames *= len(self)
        try:
            if not self._ranks:
                self._start()
            return self._exchange(frames, timeout_s, "an answer")
        except BaseException:  # also Ctrl-C: an answer to this command must not be taken for one to the next
            _end_all(self._ranks)
            raise

    def _start(self) -> None:
        with ExitStack() as opened:
            files = [os.memfd_create("cloister-rendezvous", os.MFD_CLOEXEC)]
            opened.callback(os.close, files[0])
            if self._log:
                log = opened.enter_context(self._log.open("ab"))
                files += [log.fileno(), log.fileno()]
            else:
                files += [1, 2]
            # The pickle names the main module __main__, or __mp_main__ in a process of multiprocessing.
            needs_main = b"_main__" in self._factory
            with fork_server.running(self._preload, needs_main=needs_main):
                for number, device in enumerate(self._devices):
                    name = f"rank {number} of {len(self)} on {device}"
                    process, ours = fork_server.start(rank_process.main, name=name)
                    self._ranks.append(_Rank(name, process, Channel(ours)))
                    socket.send_fds(ours, [b"\0"], files)
        environment = dict(os.environ)
        told = [
            packed(Begin(number, len(self), device, self._mesh, self._threads, environment, self._factory))
            for number, device in enumerate(self._devices)
        ]
        found: list[Any] = self._exchange(told, CONNECT_SECONDS, "one that connects to its peers")
        peers.check([rank.name for rank in self._ranks], found)

    def _exchange(self, frames: Sequence[Frame], timeout_s: float | None, expected: str) -> list[Answer]:
        """Send each rank its frame and wait for all answers.

        A rank that is killed makes the collectives of its peers fail, and their errors may be heard first. So the
        error that is raised is that of a rank's end or one of this project, if it is heard soon after another.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        silent: list[_Rank] = []
        for rank, frame in zip(self._ranks, frames, strict=True):
            silent.append(rank)
            try:
                rank.pipe.send(frame, _left(deadline))
            except TimeoutError:
                raise self._late([rank], timeout_s, expected) from None
            except ConnectionError:  # it has ended, which is found below
                pass
        answers: dict[_Rank, Answer] = {}
        suspect: RankError | None = None
        while silent:
            sources = [rank.pipe.fileno() for rank in silent] + [
                rank.process.sentinel for rank in self._ranks
            ]
            ready = connection.wait(sources, _left(deadline))
            if not ready:
                raise suspect or self._late(silent, timeout_s, expected)
            # The last answer of a process that has ended may still be in its pipe, so that is read first.
            for rank in [rank for rank in silent if rank.pipe.fileno() in ready]:
                try:
                    said = rank.pipe.receive(_left(deadline))
                except TimeoutError:
                    raise self._late([rank], timeout_s, expected) from None
                except (EOFError, ConnectionError):
                    raise self._ended(rank, expected) from None
                silent.remove(rank)
                if isinstance(said, Answered):
                    answers[rank] = said.answer
                elif said.error is not None:
                    said.error.add_note(f"raised by {rank.name}")
                    raise said.error
                elif suspect is None:
                    suspect = self._error(rank, expected, f"raised {said.reason}")
                    soon = time.monotonic() + _CAUSE_SECONDS
                    deadline = soon if deadline is None else min(deadline, soon)
            for rank in self._ranks:
                if rank.process.sentinel in ready:
                    raise self._ended(rank, expected)
        if suspect is not None:
            raise suspect
        return [answers[rank] for rank in self._ranks]

    def _ended(self, rank: _Rank, expected: str) -> RankError:
        rank.process.join(_EXIT_SECONDS)  # a crashing process closes its pipe before its exit status is known
        status = rank.process.exitcode
        return self._error(
            rank, expected, "closed its pipe" if status is None else fork_server.ending(status)
        )

    def _error(self, rank: _Rank, expected: str, happened: str) -> RankError:
        return RankError(rank.name, expected=f"{expected}, but it {happened}", fix=self._see)

    def _late(self, silent: Sequence[_Rank], timeout_s: float | None, expected: str) -> RankError:
        names = ", ".join(rank.name for rank in silent)
        return RankError(names, expected=f"{expected} within {timeout_s:g} s", fix=self._see)

    @property
    def _see(self) -> str:
        return f"see {self._log}" if self._log else ""


def _left(deadline: float | None) -> float | None:
    """Seconds until a time on the monotonic clock, more than 0; None if there is none."""
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def _end_all(ranks: list[_Rank], patience: float = 0.0) -> None:
    """End all ranks and what they have started; idle ones have `patience` seconds to exit before they are killed."""
    deadline = time.monotonic() + patience
    for rank in ranks:
        rank.pipe.close()  # idle ranks exit at this; all of them at the same time
    # Before any is waited for: one that sees the end of a peer would raise an error of its own.
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        fork_server.kill(rank.process)
    while ranks:
        process = ranks.pop().process
        process.join()
        process.close()
