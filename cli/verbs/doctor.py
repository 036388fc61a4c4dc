"""`cloister doctor`: find the first hop between a site and its coordinator that fails, and what to do.

Check a party of a federation, hop by hop. With a site's TOML: its federation, keys, releases, disk and devices, then
the way to the coordinator: proxy, DNS, TCP, CONNECT and TLS, and whether `cloister coordinator start` answers.
With the folder of a federation: the coordinator's own certificates, disk, name and port. Exit code 0: no hop failed;
1: one did.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from cloister.cli.options.shared_options import Parser, chosen_plan
from cloister.cli.show.console import PipedConsole
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import CloisterError
from cloister.protocol.machine.findings import Finding, Hop, examine
from cloister.server.federation.doctor import CoordinatorDoctor

_FAILED = 1
_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
_LONGEST_S = 600.0


def options(parser: Parser) -> None:
    """PATH, --plan and --timeout."""
    parser.value("path PATH", "a site's TOML file, or the folder of a federation at its coordinator")
    parser.value(
        "--plan PLAN",
        "a TOML file, or the name of a shipped plan: check disk and devices for it (default: for a small run)",
    )
    parser.value("--timeout S", "seconds of each wait for another machine", 10.0)
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Check the party; returns 1 where a hop fails."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what gRPC logs of a hop that fails is said by the hop
    path = Path(arguments.path)
    if not 0 < arguments.timeout <= _LONGEST_S:
        raise CloisterError("--timeout", arguments.timeout, expected=f"more than 0, at most {_LONGEST_S:g} s")
    if path.is_dir() and (path / "site.toml").exists():
        raise CloisterError(
            "PATH",
            str(path),
            expected="a site's TOML file, or the folder of a federation",
            fix=f"give {path}/site.toml",
        )
    plan = (
        chosen_plan(argparse.Namespace(plan=arguments.plan, sites=None, set=[])) if arguments.plan else None
    )
    if path.is_dir():
        hops = CoordinatorDoctor(path, arguments.timeout, plan).hops()
        return _examine({"party": "coordinator", "folder": str(path)}, hops, arguments)
    from cloister.clients.checks.doctor import SiteDoctor

    config = read_config(path)
    with SiteDoctor(path, config, arguments.timeout, plan) as doctor:
        return _examine({"party": "site", "site": config.name}, doctor.hops(), arguments)


def _examine(facts: dict[str, object], hops: Sequence[Hop], arguments: argparse.Namespace) -> int:
    """Check the hops, print what is found at each as soon as it is, and which failed first; returns the exit code."""
    console, findings = PipedConsole(quiet=arguments.json), []
    limit = sum(hop.limit_s for hop in hops)
    console.say(
        f"{' '.join(map(str, facts.values()))}: {len(hops)} hops; it waits at most {limit:g} s for others"
    )
    for finding in examine(hops):
        findings.append(finding)
        _show(console, finding)
    first = next((finding for finding in findings if finding.state == "failed"), None)
    if first is None:
        skipped = sum(finding.state == "skipped" for finding in findings)
        rest = f", but {skipped} were skipped" if skipped else ""
        console.say(f"\nno hop of {len(findings)} failed{rest}")
    else:
        console.say(f"\nfirst failure: {first.hop}: {first.what}", "bold")
        console.say(f"fix: {first.fix}")
    if arguments.json:
        found = {"ok": first is None, "first": first.hop if first else None}
        print(json.dumps(facts | found | {"hops": [vars(finding) for finding in findings]}))
    return _FAILED if first else 0


def _show(console: PipedConsole, finding: Finding) -> None:

    line = Text.assemble(
        (f"{finding.state:<7}", _STYLES[finding.state]), f"  {finding.hop:<17}  {finding.what}"
    )
    console.print(line, soft_wrap=True)
    if finding.fix:
        console.say(f"         fix: {finding.fix}")
