"""`cloister status`: show what a coordinator and its sites do, or probe a site.

For the folder of a federation whose coordinator runs on this machine: the runs, and what each site of the present one
does. For a site's TOML: whether its process is alive and connected, and in which run. With --probe only the exit code
counts, 0 if it is well and 1 if not: for systemd, Docker and Kubernetes, because a site listens on no port that could
be probed. A site is well while its coordinator answers it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister.cli.options.shared_options import Parser
from cloister.protocol.errors import EngineError, RunFolderError


def options(parser: Parser) -> None:
    """PATH, --follow, --probe, --json."""
    parser.value("path PATH", "the folder of a federation, or a site's TOML file or folder")
    parser.flag("--follow", "show the present run, or the last one, until it has ended")
    parser.flag("--probe", "print one line; the exit code is 1 if it is not well")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    path = Path(arguments.path)
    if path.is_file() or (path / "site.toml").is_file():
        return _site(path, arguments)
    from cloister.server.federation.control import command

    try:
        (found,) = command(path, do="status")
    except EngineError as error:
        if not arguments.probe:
            raise
        print(error)
        return 1
    if arguments.probe:
        print("the coordinator runs")
        return 0
    if arguments.follow:
        from cloister.cli.show.follow import follow

        running = [entry["run"] for entry in found["runs"] if entry["state"] in ("running", "waiting")]
        # A short run may have ended since it was submitted: then its outcome is what the person waits for.
        submitted = [*running, *(entry["run"] for entry in reversed(found["runs"]))]
        if not submitted:
            raise RunFolderError(
                str(path), expected="a run that was submitted", fix="submit one: cloister submit"
            )
        return follow(path, Path(submitted[0]), json_=arguments.json)
    if arguments.json:
        print(json.dumps(found))
    else:
        _show(found)
    return 0


def _show(found: Mapping[str, Any]) -> None:
    from rich.text import Text

    from cloister.cli.show.console import PipedConsole, columns

    console = PipedConsole()
    if found["runs"]:
        runs = columns("run", "state", "reason", left=3)
        for entry in found["runs"]:
            runs.add_row(*(Text(entry[field]) for field in ("run", "state", "reason")))
        console.print(runs)
    else:
        console.print("no run was submitted")
    now = found["now"] if any(entry["state"] == "running" for entry in found["runs"]) else {}
    begun, done = now.get("RoundStarted"), now.get("RoundDone")
    of = now["Started"]["plan"]["run"]["rounds"] if "Started" in now else None
    if of is not None:
        console.print(f"rounds     {done['round'] if done else now['Started']['done']} of {of} done")
    if begun is not None:
        console.print(f"now        round {begun['round']}, attempt {begun['attempt']}: {begun['purpose']}")
    moved = now.get("Moved", {"sent": {}, "received": {}})
    sites = columns("site", "state", "sent MB", "received MB", left=2)
    missing = now.get("Connected", {}).get("missing", {})
    for site, state in sorted(found["sites"].items()):
        shown = missing.get(site, state) if state == "not connected" else state
        bytes_ = (moved[way].get(site, 0) / 1e6 for way in ("sent", "received"))
        sites.add_row(Text(site), Text(shown), *(f"{each:,.1f}" for each in bytes_))
    console.print(sites)


def _site(path: Path, arguments: argparse.Namespace) -> int:
    """Show or probe a site by the file that its process writes."""
    from cloister.clients.checks.heartbeat import DEAD_S, UNHEARD_S, heartbeat_path
    from cloister.clients.setup.config import read_config
    from cloister.protocol.machine.storage import is_locked

    config = read_config(path)
    file = heartbeat_path(config)
    try:
        seen, age = json.loads(file.read_bytes()), time.time() - file.stat().st_mtime
    except (OSError, ValueError):
        seen, age = None, 0.0
    if seen is None or not is_locked(config.folder / "lock"):
        problem = "its process does not run"
    elif age > DEAD_S:
        problem = f"its process has written no heartbeat for {age:.0f} s"
    elif not seen["connected"] or seen["contact_s"] > UNHEARD_S:
        unheard = "" if seen["contact_s"] is None else f" for {seen['contact_s']:.0f} s"
        problem = f"its coordinator has not been heard{unheard}"
        problem += f": {seen['trouble']}" if seen["trouble"] else ""
    else:
        problem = ""
    if arguments.json:
        print(json.dumps({"well": not problem, "problem": problem} | (seen or {})))
    elif problem:
        print(problem)
    else:
        run_ = f"which runs {seen['run']}" if seen["run"] else "which has no run"
        print(f"well: process {seen['pid']}, connected to its coordinator, {run_}")
    return 1 if arguments.probe and problem else 0
