"""`cloister doctor`: find the first hop between a site and its coordinator that fails, and what to do.

Check a party of a federation, hop by hop. With a site's TOML: its federation, keys, releases, disk and devices, then
the way to the coordinator: proxy, DNS, TCP, CONNECT, TLS and ALPN, and whether `cloister coordinator start` answers.
With the folder of a federation: the coordinator's own certificates, disk, name and port. Exit code 0: no hop failed;
1: one did.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.options.shared_options import add_json, chosen_plan
from cloister.protocol.errors import CloisterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cloister.cli.show.console import PipedConsole
    from cloister.protocol.machine.findings import Finding, Hop
    from cloister.protocol.plan.plan import Plan


_FAILED = 1
_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
_LONGEST_S = 600.0


def options(parser: argparse.ArgumentParser) -> None:
    """PATH, --plan and --timeout."""
    parser.add_argument(
        "path", metavar="PATH", help="a site's TOML file, or the folder of a federation at its coordinator"
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="a TOML file, or the name of a shipped plan: check disk and devices for it (default: for a small run)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of each wait for another machine (default: 10)",
    )
    add_json(parser)


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
    return _check_coordinator(path, plan, arguments) if path.is_dir() else _check_site(path, plan, arguments)


def _check_site(path: Path, plan: Plan | None, arguments: argparse.Namespace) -> int:
    from cloister.clients.checks.doctor import SiteDoctor
    from cloister.clients.setup.config import read_config

    config = read_config(path)
    with SiteDoctor(path, config, arguments.timeout, plan) as doctor:
        findings = _examined(f"site {config.name}", doctor.hops(), arguments)
    return _concluded({"party": "site", "site": config.name}, findings, arguments)


def _check_coordinator(path: Path, plan: Plan | None, arguments: argparse.Namespace) -> int:
    from cloister.server.federation.doctor import CoordinatorDoctor

    hops = CoordinatorDoctor(path, arguments.timeout, plan).hops()
    findings = _examined(f"coordinator {path}", hops, arguments)
    return _concluded({"party": "coordinator", "folder": str(path)}, findings, arguments)


def _examined(party: str, hops: Sequence[Hop], arguments: argparse.Namespace) -> list[Finding]:
    """Check the hops, and print what is found at each as soon as it is."""
    from cloister.cli.show.console import PipedConsole
    from cloister.protocol.machine.findings import examine

    findings = []
    console = PipedConsole()
    if not arguments.json:
        limit = sum(hop.limit_s for hop in hops)
        console.say(f"{party}: {len(hops)} hops; it waits at most {limit:g} s for others")
    for finding in examine(hops):
        findings.append(finding)
        if not arguments.json:
            _show(console, finding)
    return findings


def _show(console: PipedConsole, finding: Finding) -> None:
    from rich.text import Text

    line = Text.assemble(
        (f"{finding.state:<7}", _STYLES[finding.state]), f"  {finding.hop:<17}  {finding.what}"
    )
    console.print(line, soft_wrap=True)
    if finding.fix:
        console.say(f"         fix: {finding.fix}")


def _concluded(facts: dict[str, object], findings: list[Finding], arguments: argparse.Namespace) -> int:
    """Say again which hop failed first; returns the exit code."""
    from cloister.cli.show.console import PipedConsole

    first = next((finding for finding in findings if finding.state == "failed"), None)
    if arguments.json:
        found = {"ok": first is None, "first": first.hop if first else None}
        print(json.dumps(facts | found | {"hops": [vars(finding) for finding in findings]}))
    else:
        console = PipedConsole()
        skipped = sum(finding.state == "skipped" for finding in findings)
        if first is None:
            rest = f", but {skipped} were skipped" if skipped else ""
            console.say(f"\nno hop of {len(findings)} failed{rest}")
        else:
            console.say(f"\nfirst failure: {first.hop}: {first.what}", "bold")
            console.say(f"fix: {first.fix}")
    return _FAILED if first else 0
