"""How a site proves to the coordinator's door who it is.

The site trusts one authority, whose certificate the federation's file has: TLS verifies that the server has a
certificate of it for the host that the site asks for, before the site sends anything. Then the site signs with its
identity key both ends' nonces, its own name, the federation's name and the fingerprint of the authority. So a signature
is not valid in another session, at the door of another federation, or for another site.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import SignatureError
from cloister.protocol.identity.address import host_of
from cloister.protocol.identity.certificates import certificate_to_pem, read_certificate
from cloister.protocol.identity.roster import signed_by

_SESSION = "cloister/session/2"
NONCE = 32
"""Bytes of each end's nonce of a session."""


@dataclass(frozen=True)
class Entrance:
    """Where sites reach the coordinator, and which authority its certificate is of."""

    federation: str
    """Name of the federation."""
    address: str
    """HOST:PORT."""
    authority: bytes
    """Certificate of the federation's authority, DER."""

    @property
    def server_name(self) -> str:
        """The name in the server's certificate that a site asks for (SNI)."""
        return host_of(self.address)

    @property
    def root(self) -> bytes:
        """The only certificate that a site trusts, in PEM."""
        return certificate_to_pem(read_certificate(self.authority, "authority"))


@dataclass(frozen=True)
class Nonces:
    """What each end has drawn for one session, `NONCE` bytes each."""

    site: bytes
    door: bytes


def prove(identity: Ed25519PrivateKey, name: str, entrance: Entrance, nonces: Nonces) -> bytes:
    """The signature with which the site `name` opens a session, 64 bytes."""
    public = identity.public_key().public_bytes_raw()
    return identity.sign(_signed(name, public, entrance, nonces))


def verify_proof(signature: bytes, name: str, public: bytes, entrance: Entrance, nonces: Nonces) -> None:
    """Check what `prove` has signed.

    Args:
        signature: The site's.
        name: The site's name.
        public: Its Ed25519 public key, 32 bytes.
        entrance: Of the federation; its address is not signed, since sites may reach one door at several.
        nonces: Of this session.

    Raises:
        SignatureError: the site did not sign this.
    """
    if not signed_by(public, _signed(name, public, entrance, nonces), signature):
        raise SignatureError(
            f"session of {name}", expected="a signature of this session with the site's identity key"
        )


def _signed(name: str, public: bytes, entrance: Entrance, nonces: Nonces) -> bytes:
    authority = hashlib.sha256(entrance.authority).digest()
    return pack(_SESSION, nonces.site, nonces.door, name, public, entrance.federation, authority)
