"""Show a deployed run while it begins and goes on, from the events that its coordinator tells, and its outcome."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from cloister.cli.show.console import PipedConsole
from cloister.protocol.errors import ConsentError, EngineError
from cloister.server.display import Absent, display_for
from cloister.server.federation.control import command
from cloister.server.record.events import from_json
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.progress import Connected, NotJoined, Started


def wait_for_join(federation: Path, path: Path, wait_s: float, earlier: int) -> tuple[Started | None, Absent]:
    """Wait until the sites have answered whether they join a run.

    Args:
        federation: The folder of the federation.
        path: The run folder.
        wait_s: Seconds to wait.
        earlier: Number of the events of earlier processes, which say nothing of this one.

    Returns:
        The event that the sites have joined, or None if the time is over; and who takes no part, with the reason.

    Raises:
        EngineError: too few sites join, or the run ends otherwise before its first round.
    """
    until, absent, lines = time.monotonic() + wait_s, Absent(), 0
    for line in _lines(federation, path):
        lines += bool(line)
        if line and lines > earlier:
            match event := from_json(line):
                case Started():
                    return event, absent
                case Connected(missing=missing):
                    absent.update(missing)
                    for site in event.sites:
                        absent.pop(site, None)
                case NotJoined():
                    absent.event(event)
        if time.monotonic() > until:
            break
    return None, absent


def _lines(federation: Path, path: Path) -> Iterator[str]:
    """The events of a run, as lines, until it is done; an empty one in a pause.

    Raises:
        EngineError: the run has failed or was stopped, or the coordinator has ended.
    """
    for line in command(federation, do="follow", run=str(path)):
        if "state" not in line:
            yield line.get("line", "")
        elif line["state"] != "done":
            raise _ended(federation, path, line["state"], line["reason"])
        else:
            return
    raise EngineError(
        "coordinator",
        str(federation),
        expected="one that answers until the run has ended, and it has ended the connection",
        fix=f"see how the run is: cloister status {shlex.quote(str(federation))}",
    )


def _ended(federation: Path, path: Path, state: str, reason: str) -> EngineError:
    """The error for a run that has failed or was stopped, with what to do."""
    accept = ""
    if ConsentError.__name__ in reason:
        accept = f"let its people accept the plan: cloister site accept SITE.toml {read_plan(path).digest()}; then "
    return EngineError(
        "run",
        str(path),
        expected=f"one that is finished, and it {'has ' if state == 'failed' else 'was '}{state}"
        + (f": {reason}" if reason else ""),
        fix=f"{accept}continue it with: {RunFiles(path).resume_command(str(federation))}",
    )


def follow(federation: Path, path: Path, *, json_: bool) -> int:
    """Show a run until it has ended, and print its outcome; returns the exit code.

    Args:
        federation: The folder of the federation.
        path: The run folder.
        json_: Whether to print the outcome as one line of JSON.

    Raises:
        EngineError: the run has failed, or was stopped; or the coordinator has ended.
    """
    console = PipedConsole(stderr=json_)
    display = display_for(console, read_plan(path), json_=json_)
    started = time.monotonic()
    with display:
        for line in filter(None, _lines(federation, path)):
            display.event(from_json(line))
    from cloister.cli.show.outcome import print_outcome, to_json
    from cloister.server.record.outcome import outcome

    with RunFolder.reopen(path) as folder:
        done = outcome(folder)
        if json_:
            print(
                json.dumps(to_json(folder, done, display.absent, seconds=time.monotonic() - started)),
                flush=True,
            )
        else:
            print_outcome(console, folder, done, None, display.absent)
    return 0
