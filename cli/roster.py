"""`cloister roster build | show | hash | verify`: the sites' cards as one roster, and the hash that every site pins."""

from __future__ import annotations

import argparse
import base64
import json
import re
from pathlib import Path

from cloister.protocol.errors import RosterError
from cloister.protocol.roster import Card, Roster, load_roster, save_roster


def run(arguments: argparse.Namespace) -> int:
    """Build a roster, or read one and show it, print its hash, or compare that with the hash that was agreed."""
    if arguments.action == "build":
        return _build(arguments)
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
        print(f"{arguments.roster}: the roster of {len(roster.cards)} sites that was agreed")
    else:
        _print(roster)
    return 0


def _build(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    roster = Roster.of(_read_card(Path(name)) for name in arguments.cards)
    if not out.name or out.is_dir():
        raise RosterError("--out", arguments.out, expected="a file, and this is a folder")
    if out.exists():
        _check_same(roster, out)
    else:
        save_roster(roster, out)
    if arguments.json:
        print(json.dumps({"roster": str(out), **_shown(roster)}))
        return 0
    _print(roster)
    print(f"\nwritten to {out}. Compare the hash with every other site before you pin it as roster_hash.")
    return 0


def _check_same(roster: Roster, out: Path) -> None:
    """A roster that sites have pinned is not replaced by another."""
    try:
        same = load_roster(out).hash == roster.hash
    except RosterError:
        same = False
    if not same:
        raise RosterError(
            "--out",
            str(out),
            expected="no file there yet, or this same roster",
            fix="name another file, or move that one away",
        )


def _read_card(path: Path) -> Card:
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
