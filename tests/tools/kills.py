"""`kill -9` of a coordinator at a moment of its run.

The process that is killed and its workers are forked from pytest's fork server, which has imported torch and
transformers once for all of them. The workers end with their coordinator, as in a real crash.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFolder
from cloister.server.record.progress import Event
from cloister.simulations.federation import simulate
from cloister.tests.tools.descriptors import readable

Moment = Callable[[Event], bool]


def die() -> None:
    """End this process as `kill -9` would."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: Moment) -> Callable[[Event], None]:
    """An observer that ends its process at a moment of the run."""

    def observe(event: Event) -> None:
        if moment(event):
            die()

    return observe


def killed_run(plan: Path, out: Path, moment: Moment) -> None:
    """Begin a run in a new folder, and die at a moment of it."""
    simulate(RunFolder.create(out, load(plan)), die_at(moment), workers=2)


def killed_again(out: Path, moment: Moment) -> None:
    """Go on with a run, and die at a moment of it."""
    with RunFolder.reopen(out) as folder:
        simulate(folder, die_at(moment), workers=1)


def kill_while(target: Callable[..., None], *arguments: Any) -> None:
    """Run something in a process that dies of SIGKILL in it; the arguments are pickled."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def family(process: int) -> list[int]:
    """The id of a process and those of its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:
        found += [pid for pid, its in parents.items() if its == parent]
    return found


def ended(process: int, within_s: float = 30) -> bool:
    """Whether a process, given by a file descriptor of `os.pidfd_open`, ends in time; closes the descriptor."""
    try:
        return readable(process, within_s)
    finally:
        os.close(process)
