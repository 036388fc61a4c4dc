"""Trials of a search as processes: each is a whole `simulate` in its own run folder, begun or continued there.

A trial's process is forked from the fork server that its workers come from, and ends with the process that asked for
it, so a search that is killed leaves no trial behind. After each evaluation it asks whether it goes on.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from socket import socket
from typing import Literal

from cloister.protocol.errors import (
    CloisterError,
    EngineError,
    LedgerError,
    QuorumError,
    RunFolderError,
    StorageError,
    one_line,
)
from cloister.protocol.machine import fork_server
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.segments import Channel, packed
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.progress import Evaluated, Event
from cloister.simulations.engines.fork_server import modules, variables
from cloister.simulations.engines.process import environment

_ENDING = StorageError, EngineError, RunFolderError, LedgerError
"""Errors that other trials would meet too: they end the search, which can be continued."""
_EXIT_S = 60.0
"""Seconds for which a trial that is over may end by itself."""
_HELD_S = 60.0
"""Seconds after which a trial of a search that was killed, and that still runs, is an error."""


@dataclass(frozen=True)
class Engine:
    """What runs the sites of each trial: the options of `simulate`."""

    workers: int | None = None
    ray_address: str | None = None


@dataclass(frozen=True)
class Heard:
    """What a trial's process has said."""

    number: int
    """The trial."""
    what: Literal["loss", "done", "pruned", "failed"]
    round: int = 0
    loss: float = math.nan
    """Held-out loss after the round, nats per token; with `loss`."""
    reason: str = ""
    """Why it failed; with `failed`."""


class Processes(Closing):
    """The processes of trials; a context manager that ends those that run.

    Args:
        engine: What runs the sites.
        log: File to which the output of the processes is appended.
    """

    def __init__(self, engine: Engine, log: Path) -> None:
        self._engine = engine
        self._log = log
        self._running: dict[int, tuple[ForkServerProcess, Channel]] = {}

    def close(self) -> None:
        """End the trials that run."""
        for number in list(self._running):
            self._end(number)

    def __len__(self) -> int:
        """Trials that run."""
        return len(self._running)

    def start(self, number: int, folder: Path, plan: Plan) -> None:
        """Begin a trial in a folder that is missing or has no run in it, or continue the run there.

        Raises:
            EngineError: its process cannot be started.
        """
        with environment(variables(plan)), fork_server.running([__name__, *modules(plan)]):
            process, ours = fork_server.start(
                _work, number, folder, plan.to_json(), self._engine, self._log, name=f"trial {number}"
            )
        self._running[number] = process, Channel(ours)

    def hear(self) -> Sequence[Heard]:
        """Wait until a trial has said something; one that is `done`, `pruned` or `failed` has ended.

        Raises:
            CloisterError: a trial met an error that ends the search, or its process was killed.
        """
        sources = {channel.fileno(): number for number, (_, channel) in self._running.items()}
        said = []
        for source in connection.wait(list(sources)):
            assert isinstance(source, int), "as they were given"
            number = sources[source]
            try:
                found: Heard | CloisterError = self._running[number][1].receive()
            except (EOFError, OSError):
                raise EngineError(
                    f"trial {number}",
                    expected=f"a process that ends by itself, and it {self._end(number, _EXIT_S)}",
                    fix=f"see {self._log}",
                ) from None
            if isinstance(found, CloisterError):
                self._end(number, _EXIT_S)
                raise found
            said.append(found)
            if found.what != "loss":
                self._end(number, _EXIT_S)
        return said

    def answer(self, number: int, *, go_on: bool) -> None:
        """Say to a trial that has told its loss whether it goes on."""
        try:
            self._running[number][1].send(packed(go_on))
        except OSError:
            return  # it was killed; `hear` says so

    def _end(self, number: int, patience: float = 0.0) -> str:
        process, channel = self._running.pop(number)
        channel.close()
        return fork_server.end(process, patience)


# In the trial's process.


class _PrunedError(CloisterError):
    """The trial is not to go on."""


def _work(theirs: socket, number: int, path: Path, plan_json: str, engine: Engine, log: Path) -> None:
    fork_server.begin()
    with log.open("ab") as file:
        fork_server.redirect(file.fileno(), file.fileno())
    from cloister.protocol.plan.soundness import from_json

    plan = from_json(plan_json)
    channel, says = Channel(theirs), partial(Heard, number)
    # Under a privacy unit sites do not fail by what they train, so it is not of the trial's settings.
    ending = (*_ENDING, QuorumError) if plan.privacy.unit != "none" else _ENDING
    said: Heard | CloisterError
    try:
        _simulate(channel, says, path, plan, engine)
        said = says("done")
    except _PrunedError:
        said = says("pruned")
    except CloisterError as error:
        said = error if isinstance(error, ending) else says("failed", reason=one_line(error))
    channel.send(packed(said))


def _simulate(channel: Channel, says: Callable[..., Heard], path: Path, plan: Plan, engine: Engine) -> None:
    from cloister.simulations.engines.process import collect_rarely
    from cloister.simulations.federation import simulate

    def observe(event: Event) -> None:
        if isinstance(event, Evaluated) and 0 < event.round < plan.run.rounds:
            channel.send(packed(says("loss", event.round, event.figures["loss"])))
            if not channel.receive():
                raise _PrunedError("trial", expected="a loss like those of other trials")

    with _opened(path, plan) as folder:
        if folder.plan != plan:
            raise RunFolderError(str(path), expected="the plan of this trial, and it has another one")
        collect_rarely()
        simulate(folder, observe, workers=engine.workers, ray_address=engine.ray_address)


def _wait_for(lock: Path) -> None:
    """Wait for a trial of a search that was killed: it ends by itself, but not at once.

    Raises:
        RunFolderError: it has not ended after a minute.
    """
    with lock.open("rb") as held:
        # In a thread, because flock has no timeout; this process ends with the error, and the thread with it.
        waiting = threading.Thread(target=fcntl.flock, args=(held.fileno(), fcntl.LOCK_EX), daemon=True)
        waiting.start()
        waiting.join(_HELD_S)
        if waiting.is_alive():
            raise RunFolderError(
                str(lock.parent),
                expected="a trial that no other process works on",
                fix="end that process, or wait for it",
            )


def _opened(path: Path, plan: Plan) -> RunFolder:
    """The folder of a trial; without a plan it is what a process left that was killed as it made it."""
    files = RunFiles(path)
    if files.lock.exists():
        _wait_for(files.lock)
    if files.plan_file.exists():
        return RunFolder.reopen(path)
    shutil.rmtree(path, ignore_errors=True)
    return RunFolder.create(path, plan)
