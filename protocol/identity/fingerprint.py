"""Fingerprints: what two persons compare over another channel than the file came by, such as the telephone.

A fingerprint is a whole SHA-256, in 16 groups of four hexadecimal digits. Refused: fewer digits. A party that makes
both of two files can search for two with the same short fingerprint (a birthday search, 2^32 tries for 16 digits), and
show another file to each site.
"""

from __future__ import annotations

import hmac
import re

from cloister.protocol.errors import RosterError

DIGITS = 64


def shown(fingerprint: bytes) -> str:
    """A fingerprint of 32 bytes as it is read aloud: 16 groups of four digits, with hyphens."""
    digits = fingerprint.hex()
    return "-".join(digits[at : at + 4] for at in range(0, DIGITS, 4))


def given(text: str) -> bytes:
    """The fingerprint that a person typed; hyphens, colons, spaces and case do not matter.

    Raises:
        RosterError: it is not 64 hexadecimal digits.
    """
    digits = re.sub(r"[-:\s]", "", text).lower()
    if not re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", digits):
        raise RosterError("--fingerprint", text, expected=f"{DIGITS} hexadecimal digits, in groups or not")
    return bytes.fromhex(digits)


def same(one: bytes, other: bytes) -> bool:
    """Whether two fingerprints are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)
