"""`cloister submit`: run a plan over the sites of a federation.

Give the coordinator that runs on this machine a plan to run over the sites of its federation. It waits until all sites
are connected, or after --wait seconds until as many are as the plan needs.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from cloister.cli.options.shared_options import (
    add_deployed,
    add_json,
    check_again,
    chosen_plan,
    folder_for,
    tell,
)
from cloister.protocol.errors import EngineError, RunFolderError


def options(parser: argparse.ArgumentParser) -> None:
    """PLAN, FEDERATION, --name, --again, --wait, --follow."""
    add_deployed(parser, "FEDERATION/runs")
    parser.add_argument("--to", required=True, metavar="FEDERATION", help="the folder of the federation")
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="how long to wait for all sites before the run begins with those that the plan needs (default: 600)",
    )
    parser.add_argument("--follow", action="store_true", help="show the run until it has ended")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Submit it."""
    from cloister.server.federation.control import command
    from cloister.server.federation.deployment import Deployment, check_deployable
    from cloister.server.federation.registry import Registry
    from cloister.server.record.folder import RunFolder

    check_again(arguments, RunFolderError)
    wait = 600.0 if arguments.wait is None else arguments.wait
    if wait < 0:
        raise EngineError("--wait", wait, expected="0 or more seconds")
    federation = Path(arguments.to)
    registry = Registry.open(federation)
    list(command(federation, do="status"))  # before a folder is made
    if arguments.again:
        path = Path(arguments.again).absolute()
    else:
        if arguments.sites is None:
            arguments.sites = len(registry.federation.sites)
        plan = chosen_plan(arguments, {"run.rounds": arguments.rounds})
        check_deployable(plan, registry.federation)
        path = folder_for(arguments.out, federation / "runs", plan.run.name).absolute()
        with RunFolder.create(path, plan) as folder:
            Deployment(registry.federation.version, wait).write(folder)
    list(command(federation, do="submit", run=str(path)))
    if arguments.follow:
        from cloister.cli.show.follow import follow

        return follow(federation, path, json_=arguments.json)
    how = f"cloister status {shlex.quote(str(federation))} --follow"
    return tell(arguments, {"run": str(path)}, f"submitted  {path}", f"follow it  {how}")
