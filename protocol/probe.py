"""A check of the way between a site and its coordinator: its sizes, its times, and how a site proves on it who it is.

The coordinator serves a probe (`server/probe.py`) on the address of the exchange, while no run does; a site uses it
(`clients/probe.py`). The server has the certificate that the federation's authority issued. The site signs its
fingerprint, a nonce of the server and its own name, so a signature is not valid at another server or another time, and
not in a session of a run (`invitation.py`), which has another label.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import SignatureError

VERSION = "cloister/probe/1"
"""Sent in the first message; it changes when the messages of the probe do. Also the label of what is signed."""
ECHO = 2**24
"""Bytes that are sent each way."""
LARGEST_SKEW_S = 60.0
"""Seconds by which the clocks of two parties may differ."""
METHOD = "/cloister.Probe/Echo"


def prove(identity: Ed25519PrivateKey, fingerprint: bytes, nonce: bytes, name: str) -> bytes:
    """The signature with which the site `name` uses a probe.

    Args:
        identity: The site's identity key.
        fingerprint: SHA-256 of the server's certificate, 32 bytes.
        nonce: The server's, of this use.
        name: The site's name.
    """
    public = identity.public_key().public_bytes_raw()
    return identity.sign(pack(VERSION, fingerprint, nonce, name, public))


def verify_proof(signature: bytes, *, fingerprint: bytes, nonce: bytes, name: str, public: bytes) -> None:
    """Check what `prove` has signed.

    Args:
        signature: The site's.
        fingerprint: SHA-256 of the server's certificate, 32 bytes.
        nonce: Of this use.
        name: The site's name.
        public: The site's public key, 32 bytes.

    Raises:
        SignatureError: the site did not sign this.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, pack(VERSION, fingerprint, nonce, name, public)
        )
    except (ValueError, InvalidSignature):
        raise SignatureError(
            f"probe by {name}", expected="a signature of this probe with the site's identity key"
        ) from None
