"""`cloister provision FEDERATION.toml --out DIR`: a whole federation, for a rehearsal or for one operator."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from cloister.cli.options.shared_options import add_json
from cloister.cli.show.agreement import fingerprint_line

HELP = "make all parties of a federation at once: a rehearsal, or one operator"


def options(parser: argparse.ArgumentParser) -> None:
    """FEDERATION.toml and --out."""
    parser.description = (
        "Make a whole federation from one file: a folder for the coordinator and one for each site, which can be "
        "copied to their machines. For a rehearsal, or where one operator runs all machines: this operator then has "
        "the keys of all parties."
    )
    parser.add_argument("settings", metavar="FEDERATION.toml", help="names, addresses and sites")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make; missing, or empty")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the federation, and print its fingerprint."""
    from cloister.simulations.rehearsal.provision import PROVISION, provision

    out = Path(arguments.out)
    federation = provision(PROVISION.load(Path(arguments.settings)), out, datetime.datetime.now(datetime.UTC))
    folders = {site.name: str(out / "sites" / site.name) for site in federation.sites}
    if arguments.json:
        found = {"name": federation.name, "fingerprint": federation.fingerprint.hex(), "sites": folders}
        print(json.dumps(found | {"coordinator": str(out / "coordinator")}))
        return 0
    print(f"coordinator  {out / 'coordinator'}")
    for folder in folders.values():
        print(f"site         {folder}")
    print(f"{fingerprint_line(federation.fingerprint)}\n")
    print(
        "This machine has had the keys of all parties: its operator could act as any of them. In a federation of"
    )
    print("several institutions, each site makes its own keys: cloister site request.")
    return 0
