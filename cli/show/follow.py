"""Show a deployed run while it goes on, from the events that its coordinator tells, and its outcome."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

from cloister.cli.show.console import PipedConsole
from cloister.cli.show.display import Absent, display_for
from cloister.protocol.errors import EngineError
from cloister.server.federation.control import command
from cloister.server.record.events import from_json
from cloister.server.record.folder import RunFiles, RunFolder, read_plan


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
    display = display_for(console, read_plan(path), path, json_=json_)
    started = time.monotonic()
    state, reason, absent = "", "", Absent()
    with display:
        for line in command(federation, do="follow", run=str(path)):
            if "line" in line:
                event = from_json(line["line"])
                absent.event(event)
                display.event(event)
            elif "state" in line:
                state, reason = line["state"], line["reason"]
    if not state:
        raise EngineError(
            "coordinator",
            str(federation),
            expected="one that answers until the run has ended, and it has ended the connection",
            fix=f"see how the run is: cloister status {shlex.quote(str(federation))}",
        )
    if state != "done":
        raise EngineError(
            "run",
            str(path),
            expected=f"one that is finished, and it {'has ' if state == 'failed' else 'was '}{state}"
            + (f": {reason}" if reason else ""),
            fix=f"continue it with: {RunFiles(path).resume_command(str(federation))}",
        )
    from cloister.cli.show.outcome import print_outcome, to_json
    from cloister.server.record.outcome import outcome

    with RunFolder.reopen(path) as folder:
        done = outcome(folder)
        if json_:
            print(json.dumps(to_json(folder, done, absent, seconds=time.monotonic() - started)), flush=True)
        else:
            print_outcome(console, folder, done, None, absent)
    return 0
