"""`cloister roster show | hash | verify`: the cards of all sites in one file, and the hash that sites pin."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.shared_options import add_json
from cloister.protocol.errors import RosterError

if TYPE_CHECKING:
    from cloister.protocol.roster import Card, Roster

HELP = "show and check rosters: who the sites are"


def options(parser: argparse.ArgumentParser) -> None:
    """The actions `show`, `hash` and `verify`."""
    parser.description = "Work with rosters: the cards of all sites in one file, whose hash every site pins."
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print names, keys and hash",
        description="Print the name and the public key of every site in a roster, and the hash of the roster.",
    )
    hash_ = actions.add_parser(
        "hash",
        help="print the hash that every site pins",
        description="Print the hash of a roster. Every site compares it with the other sites, and pins it.",
    )
    verify = actions.add_parser(
        "verify",
        help="check that a roster has the agreed hash",
        description="Check that a roster has the hash on which the sites agreed; refuse it if not.",
    )
    verify.add_argument("--hash", required=True, metavar="HEX", help="the agreed hash")
    for name, action in {"show": show, "hash": hash_, "verify": verify}.items():
        action.set_defaults(action=name)
        action.add_argument("roster", metavar="FILE", help="the roster")
        add_json(action)


def run(arguments: argparse.Namespace) -> int:
    """Read a roster, and print it, its hash, or whether it has the agreed hash."""
    from cloister.protocol.roster import load_roster

    roster = load_roster(Path(arguments.roster))
    if arguments.action == "verify":
        if not re.fullmatch(r"[0-9a-fA-F]{64}", arguments.hash):
            raise RosterError("--hash", arguments.hash, expected="64 hexadecimal digits")
        roster.pinned(arguments.hash)
    if arguments.json:
        print(json.dumps({"roster": arguments.roster, **_shown(roster)}))
    elif arguments.action == "hash":
        print(roster.hash.hex())
    elif arguments.action == "verify":
        print(f"{arguments.roster}: the agreed roster, of {len(roster.cards)} sites")
    else:
        _print(roster)
    return 0


def _shown(roster: Roster) -> dict[str, object]:
    sites = [{"name": card.name, "key": _key(card)} for card in roster.cards]
    return {"hash": roster.hash.hex(), "sites": sites}


def _print(roster: Roster) -> None:
    width = max(len(name) for name in roster.names)
    for card in roster.cards:
        print(f"{card.name:<{width}}  {_key(card)}")
    print(f"hash {roster.hash.hex()}")


def _key(card: Card) -> str:
    from cloister.protocol.document import to_base64

    return to_base64(card.public)
