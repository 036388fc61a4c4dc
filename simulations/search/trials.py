"""Trials of a search as processes: each is a whole `simulate` in its own run folder, begun or continued there.

A trial's process is forked from the fork server that its workers come from, and ends with the process that asked for
it, so a search that is killed leaves no trial behind. After each evaluation it asks whether it goes on.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from cloister.protocol.errors import (
    BudgetError,
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
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.progress import Evaluated, Event
from cloister.simulations.engines.fork_server import modules, variables
from cloister.simulations.engines.process import environment

_ENDING = StorageError, EngineError, RunFolderError
"""Errors that other trials would meet too: they end the search, which can be continued."""
_SITES = QuorumError, LedgerError, BudgetError
"""Errors that end a search under a privacy unit too: sites never fail by what they train there, so these are not of the
trial's settings."""
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
        self._running: dict[int, tuple[BaseProcess, Connection]] = {}

    def close(self) -> None:
        """End the trials that run."""
        for number in list(self._running):
            self._end(number, kill=True)

    def __len__(self) -> int:
        """Trials that run."""
        return len(self._running)

    def start(self, number: int, folder: Path, plan: Plan) -> None:
        """Begin a trial in a folder that is missing or has no run in it, or continue the run there.

        Raises:
            EngineError: its process cannot be started.
        """
        ours, theirs = Pipe()
        process = get_context("forkserver").Process(
            target=_work,
            args=(theirs, folder, plan.to_json(), self._engine, self._log),
            name=f"trial {number}",
        )
        with environment(variables(plan)), fork_server.running([__name__, *modules(plan)]):
            process.start()
        theirs.close()
        self._running[number] = process, ours

    def hear(self) -> Sequence[Heard]:
        """Wait until a trial has said something; one that is `done`, `pruned` or `failed` has ended.

        Raises:
            CloisterError: a trial met an error that ends the search, or its process was killed.
        """
        by_source = {ours: number for number, (_, ours) in self._running.items()}
        said = []
        for source in connection.wait(list(by_source)):
            assert isinstance(source, Connection), "as they were given"
            number = by_source[source]
            try:
                found = source.recv()
            except (EOFError, OSError):
                status = self._end(number)
                raise EngineError(
                    f"trial {number}",
                    expected=f"a process that ends by itself, and it {fork_server.ending(status)}",
                    fix=f"see {self._log}",
                ) from None
            if isinstance(found, CloisterError):
                self._end(number)
                raise found
            what, round_number, loss, reason = found
            said.append(Heard(number, what, round_number, loss, reason))
            if what != "loss":
                self._end(number)
        return said

    def answer(self, number: int, *, go_on: bool) -> None:
        """Say to a trial that has told its loss whether it goes on."""
        try:
            self._running[number][1].send(go_on)
        except OSError:
            return  # it was killed; `hear` says so

    def _end(self, number: int, *, kill: bool = False) -> int:
        process, ours = self._running.pop(number)
        if kill:
            process.kill()
        process.join()
        ours.close()
        status = process.exitcode
        process.close()
        return status or 0


# In the trial's process.


class _PrunedError(CloisterError):
    """The trial is not to go on."""


def _work(theirs: Connection, path: Path, plan_json: str, engine: Engine, log: Path) -> None:
    fork_server.begin()
    with log.open("ab") as file:
        fork_server.redirect(file.fileno(), file.fileno())
    from cloister.protocol.plan.soundness import from_json

    plan = from_json(plan_json)
    private = plan.privacy.unit != "none"
    try:
        _simulate(theirs, path, plan, engine)
        theirs.send(("done", 0, math.nan, ""))
    except _PrunedError:
        theirs.send(("pruned", 0, math.nan, ""))
    except CloisterError as error:
        ends = isinstance(error, (*_ENDING, *_SITES) if private else _ENDING)
        theirs.send(error if ends else ("failed", 0, math.nan, one_line(error)))


def _simulate(theirs: Connection, path: Path, plan: Plan, engine: Engine) -> None:
    from cloister.simulations.engines.process import collect_rarely
    from cloister.simulations.federation import simulate

    def observe(event: Event) -> None:
        if isinstance(event, Evaluated) and 0 < event.round < plan.run.rounds:
            theirs.send(("loss", event.round, event.figures["loss"], ""))
            if not theirs.recv():
                raise _PrunedError("trial", expected="a loss like those of other trials")

    with _opened(path, plan) as folder:
        if folder.plan != plan:
            raise RunFolderError(str(path), expected="the plan of this trial, and it has another one")
        collect_rarely()
        simulate(
            folder,
            observe,
            workers=engine.workers,
            ray_address=engine.ray_address,
        )


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
