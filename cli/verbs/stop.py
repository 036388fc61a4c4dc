"""`cloister stop`: end a deployed run, so that it can be continued."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cloister.cli.options.shared_options import add_json
from cloister.protocol.errors import RunFolderError

HELP = "stop a run of a federation"


def options(parser: argparse.ArgumentParser) -> None:
    """FEDERATION, RUN."""
    parser.description = (
        "Stop a run of the federation whose coordinator runs on this machine. Finished rounds are kept; "
        "`cloister submit --again RUN` continues it. The coordinator goes on, with the next run if one waits."
    )
    parser.add_argument("federation", metavar="FEDERATION", help="the folder of the federation")
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run folder (default: the run that runs)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stop it."""
    from cloister.server.federation.control import command

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
    print(
        json.dumps({"run": path, "state": stopped["state"]})
        if arguments.json
        else f"{stopped['state']}  {path}"
    )
    return 0
