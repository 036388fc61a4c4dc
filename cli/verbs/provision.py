"""`cloister provision`: make all parties of a federation at once: a rehearsal, or one operator.

Make a whole federation from one file: a folder for the coordinator and one for each site, which can be copied to their
machines. For a rehearsal, or where one operator runs all machines: this operator then has the keys of all parties.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from cloister.cli.options.shared_options import Parser, tell
from cloister.cli.show.agreement import fingerprint_line
from cloister.simulations.rehearsal.provision import PROVISION, provision


def options(parser: Parser) -> None:
    """FEDERATION.toml and --out."""
    parser.value("settings FEDERATION.toml", "names, addresses and sites")
    parser.value("--out DIR", "the folder to make; missing, or empty", required=True)
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Make the federation, and print its fingerprint."""

    out = Path(arguments.out)
    federation = provision(PROVISION.load(Path(arguments.settings)), out, datetime.datetime.now(datetime.UTC))
    folders = {site.name: str(out / "sites" / site.name) for site in federation.sites}
    facts = {"name": federation.name, "fingerprint": federation.fingerprint.hex(), "sites": folders}
    return tell(
        arguments,
        facts | {"coordinator": str(out / "coordinator")},
        f"coordinator  {out / 'coordinator'}",
        *(f"site         {folder}" for folder in folders.values()),
        f"{fingerprint_line(federation.fingerprint)}\n",
        "This machine has had the keys of all parties: its operator could act as any of them. In a federation of",
        "several institutions, each site makes its own keys: cloister site request.",
    )
