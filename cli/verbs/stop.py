"""`cloister stop`: stop a run of a federation.

Stop a run of the federation whose coordinator runs on this machine. Finished rounds are kept; `cloister submit --again
RUN` continues it. The coordinator goes on, with the next run if one waits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser, tell
from cloister.protocol.errors import RunFolderError
from cloister.server.federation.control import command


def options(parser: Parser) -> None:
    """FEDERATION, RUN."""
    parser.add_federation()
    parser.value("run RUN", "the run folder (default: the run that runs)", nargs="?")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Stop it."""

    federation = Path(arguments.federation)
    if arguments.run:
        path = str(Path(arguments.run).absolute())
    else:
        (found,) = command(federation, do="status")
        running = [entry["run"] for entry in found["runs"] if entry["state"] == "running"]
        if not running:
            raise RunFolderError(str(federation), expected="a run that runs")
        path = running[0]
    (stopped,) = command(federation, do="stop", run=path)
    return tell(arguments, {"run": path, "state": stopped["state"]}, f"{stopped['state']}  {path}")
