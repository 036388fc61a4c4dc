"""Fingerprints at the command line: shown, asked for, and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cloister.protocol.errors import RosterError, visible
from cloister.protocol.identity.federation import Change, Federation
from cloister.protocol.identity.fingerprint import given, same, shown

FIX = "do not go on: one of you has another file; tell the other side, and get the file again over another channel"


def fingerprint_line(fingerprint: bytes) -> str:
    """A fingerprint as a person reads it aloud."""

    return f"fingerprint  {shown(fingerprint)}"


def version_lines(federation: Federation, changes: Iterable[Change]) -> list[str]:
    """A version of a federation and what is new in it, as a person sees it who decides on it."""
    return [
        f"{federation.name}, version {federation.version}",
        f"address      {federation.door}",
        fingerprint_line(federation.fingerprint),
        f"sites        {len(federation.sites)}",
        *(f"  {site.name:<16}  {visible(site.contact)}" for site in federation.sites),
        *(f"  {change.kind:<8}  {change.what}  {change.detail}" for change in changes),
    ]


def version_facts(federation: Federation, changes: Iterable[Change]) -> dict[str, object]:
    """A version of a federation and what is new in it, for `--json`."""
    return {
        "name": federation.name,
        "version": federation.version,
        "fingerprint": federation.fingerprint.hex(),
        "roster_hash": federation.roster.hash.hex() if federation.sites else "",
        "changes": [vars(change) for change in changes],
    }


def asked(who: str) -> bytes:
    """The fingerprint that the person at the terminal types.

    Args:
        who: Who reads it to them.

    Raises:
        RosterError: there is no terminal, or it is no fingerprint.
    """

    if not sys.stdin.isatty():
        raise RosterError(
            "--fingerprint",
            expected=f"the fingerprint that {who} told you",
            fix="do not copy it from this screen",
        )
    return given(typed_in(f"Type the fingerprint that {who} tells you: "))


def typed_in(prompt: str) -> str:
    """The line that the person at the terminal types."""
    try:
        return input(prompt)
    except EOFError:
        raise KeyboardInterrupt from None


def check(given: bytes, actual: bytes, what: str, fix: str = FIX) -> None:
    """Check that what a person was told is the fingerprint of the file.

    Raises:
        RosterError: it is not.
    """

    if not same(given, actual):
        raise RosterError(
            f"fingerprint of {what}", shown(actual), expected=f"{shown(given)}, which was given", fix=fix
        )
