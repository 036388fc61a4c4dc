"""A site's request: its card and whom to call, signed with the key on the card.

The site makes it, the coordinator approves it, and every site gets it in the file of the federation. Its fingerprint is
a hash of all that the identity key signed. A person at the site and one at the coordinator compare it over another
channel than the file came by: the signature alone shows only that the file was not damaged.

A request that replaces a key is signed by the old key too. Every site checks that with the old key that it installed.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import CloisterError, RosterError
from cloister.protocol.identity.document import changed, check_exact, from_base64, table, to_base64, tree_of
from cloister.protocol.identity.roster import Card, known_signed_by

_REQUEST = "cloister-request-2"
_ROTATION = "cloister-rotation-1"
_FIELDS = ("name", "key", "card", "contact", "date", "signature", "rotation")
LONGEST_CONTACT = 200


@dataclass(frozen=True)
class Request:
    """A request that was checked. Create it with `Request.of` or `Request.from_toml`."""

    card: Card
    """Name and public key of the site."""
    contact: str
    """Who answers for the site, and how to reach them; at most 200 printable characters."""
    date: str
    """Day on which it was made, as YYYY-MM-DD."""
    signature: bytes
    """Signature of all the above with the key on the card, 64 bytes."""
    rotation: bytes = b""
    """Signature of the fingerprint with the key that this one replaces, 64 bytes; empty if it replaces none."""

    @classmethod
    def of(
        cls,
        name: str,
        identity: Ed25519PrivateKey,
        contact: str,
        day: datetime.date,
        replaces: Ed25519PrivateKey | None = None,
    ) -> Request:
        """The request of the site `name`.

        Args:
            name: The site's name.
            identity: Its identity key.
            contact: Who answers for the site.
            day: Today.
            replaces: The identity key that this one replaces; None: it replaces none.

        Raises:
            RosterError: a value is not allowed.
        """
        unsigned = cls(Card.of(name, identity), contact, day.isoformat(), b"")
        request = replace(unsigned, signature=identity.sign(unsigned._content))
        if replaces is not None:
            request = replace(request, rotation=replaces.sign(_rotation(request.fingerprint)))
        request.verify()
        return request

    @property
    def name(self) -> str:
        """Name of the site."""
        return self.card.name

    @property
    def key(self) -> bytes:
        """Its Ed25519 public key, 32 bytes."""
        return self.card.public

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over all that the identity key signed, 32 bytes."""
        return hashlib.sha256(self._content).digest()

    @property
    def packed(self) -> tuple[str | bytes, ...]:
        """All of its values, for the hash of a federation."""
        return (*self._signed_values, self.signature, self.rotation)

    def rotates(self, key: bytes) -> bool:
        """Whether the owner of the public key `key` signed that this request replaces it."""
        return bool(self.rotation) and known_signed_by(key, _rotation(self.fingerprint), self.rotation)

    def verify(self) -> None:
        """Check every value and the signature; that of a rotation needs the old key (`rotates`).

        Raises:
            RosterError: one of them is wrong.
        """
        self.card.verify()
        check_contact(self.contact)
        try:
            right = datetime.date.fromisoformat(self.date).isoformat() == self.date
        except ValueError:
            right = False
        if not right:
            raise RosterError(f"date of {self.name}", self.date, expected="a day as YYYY-MM-DD")
        if not known_signed_by(self.key, self._content, self.signature):
            raise RosterError(
                f"request of {self.name}",
                expected="a signature of all of it with the key on its card",
                fix=f"ask {self.name} for the request again",
            )

    def to_toml(self) -> str:
        """The request as a document."""
        return table({"format": _REQUEST}) + self.lines

    @functools.cached_property
    def lines(self) -> str:
        """Its values as lines of TOML."""
        values = (value if isinstance(value, str) else to_base64(value) for value in self.packed)
        return table(dict(zip(_FIELDS, values, strict=True)))

    @classmethod
    def from_toml(cls, text: str, origin: str = "request") -> Request:
        """Read a document that `to_toml` wrote, and check all of it.

        Raises:
            RosterError: it was damaged or edited, or a value or signature is wrong.
        """
        tree = tree_of(text, "request", origin)
        if tree.pop("format", None) != _REQUEST:
            raise RosterError("request", origin, expected=f"a file that begins with format = {_REQUEST!r}")
        request = cls.from_table(tree, "request", origin)
        check_exact(text, request.to_toml(), "request", origin)
        return request

    @classmethod
    def from_table(cls, values: Mapping[str, Any], what: str, origin: str) -> Request:
        """Read values that `lines` wrote, and check them.

        Raises:
            RosterError: a value is missing, or it or a signature is wrong.
        """
        if set(values) != set(_FIELDS) or not all(isinstance(value, str) for value in values.values()):
            raise changed(what, origin, f"a request has {', '.join(_FIELDS)}")
        try:
            key, signed, signature, rotation = (
                from_base64(values[field], field) for field in ("key", "card", "signature", "rotation")
            )
            card = Card(values["name"], key, signed)
            request = cls(card, values["contact"], values["date"], signature, rotation)
            request.verify()
        except CloisterError as error:
            raise changed(what, origin, str(error)) from error
        return request

    @property
    def _signed_values(self) -> tuple[str | bytes, ...]:
        card = self.card
        return (card.name, card.public, card.signature, self.contact, self.date)

    @property
    def _content(self) -> bytes:
        return pack(_REQUEST, *self._signed_values)


def check_contact(contact: str) -> None:
    """Check a site's contact.

    Raises:
        RosterError: it is blank, too long, or has a character that is not printable.
    """
    if not contact.isprintable() or not contact.strip() or len(contact) > LONGEST_CONTACT:
        raise RosterError("contact", contact, expected=f"1 to {LONGEST_CONTACT} printable characters")


def _rotation(fingerprint: bytes) -> bytes:
    return pack(_ROTATION, fingerprint)
