"""`cloister roster build | show | hash | verify`: the cards of all sites in one file, and the hash that sites pin."""

from __future__ import annotations

import argparse
import base64
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.shared_options import add_json
from cloister.protocol.errors import RosterError

if TYPE_CHECKING:
    from cloister.protocol.roster import Card, Roster

HELP = "build and check rosters: who the sites are"


def options(parser: argparse.ArgumentParser) -> None:
    """The actions `build`, `show`, `hash` and `verify`."""
    parser.description = "Work with rosters: the cards of all sites in one file, whose hash every site pins."
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="make a roster from the cards of all sites",
        description="Make a roster from the cards of all sites, in any order, and print its hash.",
    )
    build.add_argument("cards", nargs="*", metavar="CARD", help="a file with the card of one site")
    build.add_argument(
        "--out", default="roster.toml", metavar="FILE", help="file to write (default: roster.toml)"
    )
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
    for name, action in {"build": build, "show": show, "hash": hash_, "verify": verify}.items():
        action.set_defaults(action=name)
        if action is not build:
            action.add_argument("roster", metavar="FILE", help="the roster")
        add_json(action)


def run(arguments: argparse.Namespace) -> int:
    """Build a roster, or read one and print it, its hash, or whether it has the agreed hash."""
    if arguments.action == "build":
        return _build(arguments)
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


def _build(arguments: argparse.Namespace) -> int:
    from cloister.protocol.roster import Roster, save_roster

    out = Path(arguments.out)
    roster = Roster.of(_read_card(Path(name)) for name in arguments.cards)
    if not out.name or out.is_dir():
        raise RosterError("--out", arguments.out, expected="a file, not a folder")
    if out.exists():
        _check_same(roster, out)
    else:
        save_roster(roster, out)
    if arguments.json:
        print(json.dumps({"roster": str(out), **_shown(roster)}))
        return 0
    _print(roster)
    print(f"\nwritten to {out}. Compare the hash with every other site before you set it as roster_hash.")
    return 0


def _check_same(roster: Roster, out: Path) -> None:
    """Sites may have pinned the roster that is there: refuse to replace it."""
    from cloister.protocol.roster import load_roster

    try:
        same = load_roster(out).hash == roster.hash
    except RosterError:
        same = False
    if not same:
        raise RosterError(
            "--out",
            str(out),
            expected="a new file, or one with this same roster",
            fix="choose another file, or move the old one",
        )


def _read_card(path: Path) -> Card:
    from cloister.protocol.roster import Card

    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RosterError(
            "card", str(path), expected=f"a file that can be read ({error.strerror})"
        ) from error
    except UnicodeDecodeError:
        raise RosterError("card", str(path), expected="text in UTF-8") from None
    try:
        return Card.from_text(text)
    except RosterError as error:
        raise RosterError(
            f"{path}: {error.field}", error.value, expected=error.expected, fix=error.fix
        ) from error


def _shown(roster: Roster) -> dict[str, object]:
    sites = [{"name": card.name, "key": _key(card)} for card in roster.cards]
    return {"hash": roster.hash.hex(), "sites": sites}


def _print(roster: Roster) -> None:
    width = max(len(name) for name in roster.names)
    for card in roster.cards:
        print(f"{card.name:<{width}}  {_key(card)}")
    print(f"hash {roster.hash.hex()}")


def _key(card: Card) -> str:
    return base64.b64encode(card.public).decode()
