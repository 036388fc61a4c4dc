"""`cloister submit`: give a coordinator a plan to run over the sites of its federation."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from cloister.cli.options.shared_options import add_deployed, add_json, check_again, chosen_plan
from cloister.protocol.errors import EngineError

HELP = "run a plan over the sites of a federation"


def options(parser: argparse.ArgumentParser) -> None:
    """PLAN, FEDERATION, --name, --again, --transport, --wait, --follow."""
    parser.description = (
        "Give the coordinator that runs on this machine a plan to run over the sites of its federation. It waits until "
        "all sites are connected, or after --wait seconds until as many are as the plan needs."
    )
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

    check_again(arguments)
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
        check_deployable(plan, registry.federation, arguments.transport or "exchange")
        path = Path(arguments.out) if arguments.out else free_name(federation / "runs", plan.run.name)
        path = path.absolute()
        with RunFolder.create(path, plan) as folder:
            Deployment(registry.federation.version, arguments.transport or "exchange", wait).write(folder)
    list(command(federation, do="submit", run=str(path)))
    if arguments.follow:
        from cloister.cli.show.follow import follow

        return follow(federation, path, json_=arguments.json)
    if arguments.json:
        print(json.dumps({"run": str(path)}))
    else:
        print(f"submitted  {path}")
        print(f"follow it  cloister status {shlex.quote(str(federation))} --follow")
    return 0


def free_name(folder: Path, name: str) -> Path:
    """A path in a folder that nothing has: `name`, or `name-2` and so on."""
    paths = (folder / (name if number == 1 else f"{name}-{number}") for number in range(1, 10**6))
    return next(path for path in paths if not path.exists())
