"""Identities: a site's identity key, its card, and the roster of all cards; every site pins its hash.

A site creates an Ed25519 identity key once and keeps it. Its card contains its name and public key and is signed with
that key, so that a damaged card is detected and a party cannot show a key that is not its own. The operators of the
sites agree on the roster by the fingerprint of the federation that it is part of (`federation.py`), over another
channel than the files came by: from then on the coordinator cannot invent a site. The roster's hash covers the names
and keys, sorted by name, and does not depend on the layout of the file.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import MemberError, RosterError
from cloister.protocol.identity.certificates import key_from_pem, key_to_pem
from cloister.protocol.identity.document import from_base64, table, to_base64
from cloister.protocol.machine.storage import readable, write_bytes, write_new
from cloister.protocol.plan.settings import Section, Settings
from cloister.protocol.plan.threshold import LARGEST

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of sites and federations."""
_CARD = "cloister-card-1"
_ROSTER = "cloister-roster-1"


def new_identity(random: Callable[[int], bytes] = os.urandom) -> Ed25519PrivateKey:
    """A new identity key from 32 random bytes."""
    return Ed25519PrivateKey.from_private_bytes(random(32))


def save_identity(identity: Ed25519PrivateKey, path: Path, *, durable: bool = True) -> None:
    """Write a new identity to `path`, readable by its owner only; never overwrite a file.

    Args:
        identity: The identity.
        path: Its file.
        durable: Sync the file before this returns.

    Raises:
        RosterError: the file exists already.
        StorageError: the file cannot be written.
    """
    if os.path.lexists(path):
        raise RosterError(
            "identity",
            str(path),
            expected="a path without a file",
            fix="keep the existing identity: it cannot be created again",
        )
    pem = key_to_pem(identity)
    write_new(path, pem, durable=durable)
    if _read(path) != pem:
        raise RosterError("identity", str(path), expected="one process at a time that makes it")


def check_private(path: Path, what: str) -> None:
    """Check that a file with a secret can be read and written by its owner only.

    Args:
        path: The file.
        what: What it holds, for errors, such as `identity`.

    Raises:
        RosterError: the file is missing, or its permissions allow more.
    """
    with readable(path, what, RosterError):
        mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise RosterError(
            f"permissions of {path}",
            f"{mode:04o}",
            expected="0600: it is secret, and others can read or write it",
            fix=f"chmod 600 {shlex.quote(str(path))}; if others may have read it, replace the key",
        )


def load_identity(path: Path) -> Ed25519PrivateKey:
    """Read the identity at `path`.

    Raises:
        RosterError: the file is missing, unreadable or not an identity, or others than its owner can read it.
    """
    check_private(path, "identity")
    identity = key_from_pem(_read(path))
    if not isinstance(identity, Ed25519PrivateKey):
        raise RosterError("identity", str(path), expected="an unencrypted Ed25519 private key in PEM")
    return identity


@dataclass(frozen=True)
class Card:
    """A site's name and public key, signed. Create it with `Card.of`."""

    name: str
    """Name of the site: letters, digits, dots, dashes, underscores, at most 64."""
    public: bytes
    """Ed25519 public key, 32 bytes."""
    signature: bytes
    """Signature of name and key with that key, 64 bytes."""

    @classmethod
    def of(cls, name: str, identity: Ed25519PrivateKey) -> Card:
        """The card of the site `name` whose identity key is `identity`.

        Raises:
            RosterError: the name is not allowed.
        """
        check_name(name)
        public = identity.public_key().public_bytes_raw()
        return cls(name, public, identity.sign(pack(_CARD, name, public)))

    def verify(self) -> None:
        """Check the name, the key and the signature.

        Raises:
            RosterError: one of them is wrong.
        """
        check_name(self.name)
        signed = pack(_CARD, self.name, self.public)
        if not _has_full_order(self.public) or not known_signed_by(self.public, signed, self.signature):
            raise RosterError(
                "card",
                self.name,
                expected="a signature made with the key on it",
                fix=f"ask {self.name} for the card again",
            )


def signed_by(key: bytes, content: bytes, signature: bytes) -> bool:
    """Whether `signature` is of `content` with the Ed25519 public key `key`."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (ValueError, InvalidSignature):
        return False
    return True


known_signed_by = functools.lru_cache(maxsize=4 * LARGEST)(signed_by)
"""As `signed_by`, checked once in a process: for what is read again and again, such as the cards of a federation."""


def check_name(name: str, what: str = "card name") -> None:
    """Check the name of a site, or of `what` else.

    Raises:
        RosterError: a card may not have it.
    """
    if not NAME.fullmatch(name):
        raise RosterError(what, name, expected="1 to 64 letters, digits, dots, dashes, underscores")


def check_public(public: bytes, field: str) -> None:
    """Check an Ed25519 public key.

    Raises:
        RosterError: it is none, or anybody can make signatures for it.
    """
    if not _has_full_order(public):
        raise RosterError(field, public.hex(), expected="an Ed25519 public key of full order")


@functools.lru_cache(maxsize=LARGEST)
def _has_full_order(public: bytes) -> bool:
    """Whether bytes are an Ed25519 key that has not low order: anybody can make signatures for one that has.

    Its point has the same order on the birationally equivalent Curve25519, u = (1 + y) / (1 - y) (RFC 7748, section
    4.1), where an agreement with a point of low order is refused.
    """
    field = 2**255 - 19
    y = int.from_bytes(public, "little") & (2**255 - 1)
    try:
        u = (1 + y) * pow(1 - y, -1, field) % field  # y = 1, the neutral point, has no inverse: ValueError
        X25519PrivateKey.from_private_bytes(bytes(32)).exchange(
            X25519PublicKey.from_public_bytes(u.to_bytes(32, "little"))
        )
        Ed25519PublicKey.from_public_bytes(public)
    except ValueError:
        return False
    return True


def check_distinct(field: str, what: str, values: list[tuple[str | bytes, str]]) -> None:
    """Refuse a value that several have.

    Args:
        field: What the error is about.
        what: What may be there once, such as `card for each name`.
        values: The values, each with the name of who has it.

    Raises:
        RosterError: one is there twice; it names all who have it.
    """
    counts = collections.Counter(value for value, _ in values)
    names = [name for value, name in values if counts[value] > 1]
    if names:
        raise RosterError(field, ", ".join(names), expected=f"one {what}: it is taken")


@dataclass(frozen=True)
class Roster:
    """The cards of a federation, sorted by name. `Roster.of` and `Roster.from_toml` create and check it."""

    cards: tuple[Card, ...]

    @classmethod
    def of(cls, cards: Iterable[Card]) -> Roster:
        """The roster of `cards`, in any order.

        Raises:
            RosterError: there is no card, a card does not verify, or two have the same name or the same key.
        """
        sorted_cards = tuple(sorted(cards, key=lambda card: card.name))
        if not sorted_cards:
            raise RosterError("roster", expected="at least one card")
        for card in sorted_cards:
            card.verify()
        check_distinct("roster", "card for each name", [(card.name, card.name) for card in sorted_cards])
        check_distinct("roster", "card for each key", [(card.public, card.name) for card in sorted_cards])
        return cls(sorted_cards)

    @functools.cached_property
    def hash(self) -> bytes:
        """SHA-256 over the canonical bytes of names and keys; every site pins it."""
        return hashlib.sha256(pack(_ROSTER, tuple((card.name, card.public) for card in self.cards))).digest()

    @functools.cached_property
    def _keys(self) -> dict[str, Ed25519PublicKey]:
        return {card.name: Ed25519PublicKey.from_public_bytes(card.public) for card in self.cards}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites, sorted."""
        return tuple(card.name for card in self.cards)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def key(self, name: str) -> Ed25519PublicKey:
        """The public key of the site `name`.

        Raises:
            MemberError: the site is not in the roster.
        """
        if name not in self._keys:
            raise MemberError("site", name, expected="a site of the roster")
        return self._keys[name]

    def pinned(self, expected: str) -> Roster:
        """This roster, if its hash is `expected` (hex).

        Raises:
            RosterError: the hash is another.
        """
        if self.hash.hex() != expected.strip().lower():
            raise RosterError(
                "roster hash",
                self.hash.hex(),
                expected=f"the pinned {expected}",
                fix="agree on the roster with the other sites before pinning another",
            )
        return self

    def to_toml(self) -> str:
        """The roster as TOML, with its hash."""
        parts = [table({"format": _ROSTER, "hash": self.hash.hex()})]
        for card in self.cards:
            keys = {"key": to_base64(card.public), "signature": to_base64(card.signature)}
            parts.append("[[site]]\n" + table({"name": card.name, **keys}))
        return "\n".join(parts)

    @classmethod
    def from_toml(cls, text: str, origin: str = "roster") -> Roster:
        """Read a roster that `to_toml` wrote, and check all of it.

        Raises:
            RosterError: the text is not a roster, a card does not verify, or the hash is of other cards.
        """
        file = _FILE.from_json(_FILE.to_json(text, origin=origin), origin=origin)
        roster = cls.of(
            Card(site.name, from_base64(site.key, origin), from_base64(site.signature, origin))
            for site in file.site
        )
        if file.hash != roster.hash.hex():
            raise RosterError(
                "roster hash", file.hash, expected=f"{roster.hash.hex()}, the hash of its cards"
            )
        return roster


class _Site(Section):
    name: str
    key: str
    signature: str


class _File(Section):
    format: Literal["cloister-roster-1"]
    hash: str
    site: tuple[_Site, ...]


_FILE = Settings(_File, "roster", RosterError)


def save_roster(roster: Roster, path: Path) -> None:
    """Write `roster` to `path`, whole or not at all.

    Raises:
        StorageError: the file cannot be written.
    """
    write_bytes(path, roster.to_toml().encode())


def load_roster(path: Path) -> Roster:
    """Read the roster at `path`.

    Raises:
        RosterError: the file is missing or is not a valid roster.
    """
    return Roster.from_toml(_FILE.read(path), str(path))


def _read(path: Path) -> bytes:
    with readable(path, "identity", RosterError):
        return path.read_bytes()
