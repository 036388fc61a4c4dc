"""The code that two persons compare by telephone when a site asks over the door to join a federation.

A short authentication string with a commitment (Vaudenay 2005, "Secure Communications over Insecure Channels Based on
Short Authenticated Strings", CRYPTO; ZRTP, RFC 6189, section 4.4.1.1). The site does not know the coordinator's
authority yet, so whoever is between them can show a certificate and keys of its own to each end:

1. The site fetches the certificate that the door shows, and trusts it alone in what follows.
2. The site sends a commitment: the hash of its request, which has its public key, and of its nonce.
3. The door answers with its nonce, and says which federation it is of.
4. The site reveals request and nonce, which the door compares with the commitment. It signs the exchange with the key
   of its request: the request is no secret, and nobody else can let it wait, or replace the code with which it does.
5. Both compute the code: `BITS` of a hash of the exchange, which is the request, both nonces, the federation, its
   authority, and the certificate that the site has seen, or that the door shows.

Whoever is between has to choose its request and nonce towards the door before it learns the door's nonce (2), and its
nonce towards the site before it learns the site's (4). So it cannot search for two exchanges with one code: each
exchange with the door is a try that succeeds with probability 2^-40, and the door answers few of them
(`server/door/enrolments.py`). Refused: a short hash of keys alone, for which 2^40 keys can be tried in advance.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import RosterError, SignatureError
from cloister.protocol.identity.roster import signed_by
from cloister.protocol.identity.session import NONCE, Entrance, Nonces

_COMMITMENT = "cloister/enrolment/commitment/1"
_CODE = "cloister/enrolment/code/1"
_REVEAL = "cloister/enrolment/reveal/1"
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Base 32 of Crockford: without I, L, O and U, which are heard or read as others."""
_ALIKE = str.maketrans("ILO", "110", "- ")
BITS = 40
"""Of the hash that the code shows, five in each letter."""


@dataclass(frozen=True)
class Exchange:
    """What an end has seen of an enrolment."""

    request: str
    """The site's request, as a document."""
    nonces: Nonces
    """Of the site and of the door."""
    entrance: Entrance
    """The federation and its authority; its address is the one that the door names."""
    certificate: bytes
    """The door's, DER."""

    @property
    def code(self) -> str:
        """The code as it is read aloud: two groups of four letters."""
        digest = hashlib.sha256(self._packed(_CODE)).digest()
        number = int.from_bytes(digest, "big") >> (8 * len(digest) - BITS)
        letters = "".join(_LETTERS[number >> shift & 31] for shift in reversed(range(0, BITS, 5)))
        return f"{letters[:4]}-{letters[4:]}"

    def sign(self, identity: Ed25519PrivateKey) -> bytes:
        """The signature with which a site reveals its request, 64 bytes."""
        return identity.sign(self._packed(_REVEAL))

    def verify(self, public: bytes, signature: bytes) -> None:
        """Check what `sign` has signed, with the key of the request.

        Raises:
            SignatureError: the owner of the key did not sign this.
        """
        if not signed_by(public, self._packed(_REVEAL), signature):
            raise SignatureError(
                "request",
                expected="a signature of this exchange with the key of the request",
                fix="run the command again",
            )

    def _packed(self, label: str) -> bytes:
        entrance = self.entrance
        values = (self.request, self.nonces.site, self.nonces.door, self.certificate)
        return pack(label, *values, entrance.federation, entrance.address, entrance.authority)


def commitment(request: str, nonce: bytes) -> bytes:
    """What a site commits itself with to its request, a document, and its nonce; 32 bytes."""
    return hashlib.sha256(pack(_COMMITMENT, request, nonce)).digest()


def check_revealed(committed: bytes, request: str, nonce: bytes) -> None:
    """Check that a site reveals what it has committed itself to.

    Raises:
        RosterError: it is something else.
    """
    if len(nonce) != NONCE or not hmac.compare_digest(committed, commitment(request, nonce)):
        raise RosterError("request", expected="the one of the commitment, with its nonce")


def given(text: str) -> str:
    """The code that a person typed; hyphens, spaces, case and letters that look alike do not matter.

    Raises:
        RosterError: it is no code.
    """
    letters = text.strip().upper().translate(_ALIKE)
    if len(letters) != BITS // 5 or not set(letters) <= set(_LETTERS):
        raise RosterError("code", text, expected=f"{BITS // 5} letters and digits, such as 7KQ2-M9XD")
    return f"{letters[:4]}-{letters[4:]}"
