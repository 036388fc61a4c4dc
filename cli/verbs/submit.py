"""`cloister submit`: run a plan over the sites of a federation.

Give the coordinator that runs on this machine a plan to run over the sites of its federation. It waits until all sites
are connected, or after --wait seconds until as many are as the plan needs. The command ends when the sites have
answered whether they join; if too few do, it fails and names those that do not. A run that waits for another one, or
for sites that are not connected, goes on waiting when the command has ended.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from cloister.cli.options.shared_options import Parser, check_again, chosen_plan, folder_for, tell
from cloister.cli.show.follow import follow, wait_for_join
from cloister.protocol.errors import EngineError, RunFolderError
from cloister.server.federation.control import command
from cloister.server.federation.deployment import Deployment, check_deployable, check_newest
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFiles, RunFolder, read_plan


def options(parser: Parser) -> None:
    """PLAN, FEDERATION, --name, --again, --wait, --follow."""
    parser.add_deployed("FEDERATION/runs")
    parser.value("--to FEDERATION", "the folder of the federation", required=True)
    parser.value(
        "--wait SECONDS",
        "how long to wait for all sites before the run begins with those that the plan needs (default: 600)",
        type=float,
    )
    parser.flag("--follow", "show the run until it has ended")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Submit it."""

    check_again(arguments, RunFolderError)
    wait = 600.0 if arguments.wait is None else arguments.wait
    if wait < 0:
        raise EngineError("--wait", wait, expected="0 or more seconds")
    federation = Path(arguments.to)
    registry = Registry.open(federation)
    list(command(federation, do="status"))  # before a folder is made
    if arguments.again:
        path = Path(arguments.again).absolute()
        check_newest(RunFiles(path))
    else:
        plan = chosen_plan(arguments, {"run.rounds": arguments.rounds})
        check_deployable(plan, registry.federation)
        path = folder_for(arguments.out, federation / "runs", plan.run.name).absolute()
        with RunFolder.create(path, plan) as folder:
            Deployment(registry.federation.version, wait, str(federation.absolute())).write(folder)
    events = RunFiles(path).events
    earlier = len(events.read_bytes().splitlines()) if events.exists() else 0
    list(command(federation, do="submit", run=str(path)))
    if arguments.follow:
        return follow(federation, path, json_=arguments.json)
    return _joined(arguments, path, Deployment.read(RunFiles(path)).wait_s, earlier)


def _joined(arguments: argparse.Namespace, path: Path, wait_s: float, earlier: int) -> int:
    """Wait for the sites' answers, and tell them."""

    federation = Path(arguments.to)
    how = f"cloister status {shlex.quote(str(federation))} --follow"
    lines = [f"submitted  {path}", f"follow it  {how}"]
    if not arguments.json:  # the sites may take minutes to come
        print(*lines, sep="\n", flush=True)
        lines = []
    (found,) = command(federation, do="status")
    for entry in found["runs"]:
        if entry["state"] == "running" and entry["run"] != str(path):
            after = entry["run"]
            return tell(arguments, {"run": str(path), "after": after}, *lines, f"waits for  {after}")
    most = wait_s + read_plan(path).cohort.deadline_s
    if not arguments.json:
        print(f"waiting    for the sites' answers, at most {most:,.0f} s", flush=True)
    started, absent = wait_for_join(federation, path, most, earlier)
    sites = list(started.sites) if started else []
    lines.append(f"joined     {', '.join(sites) or 'the run waits for sites'}")
    lines += [f"absent     {site}: {reason}" for site, reason in absent.items()]
    return tell(arguments, {"run": str(path), "sites": sites, "absent": absent}, *lines)
