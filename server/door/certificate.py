"""What a TLS server shows and what it keeps to itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Certificate:
    """A server's certificate and its private key."""

    pem: bytes
    """The certificate, PEM."""
    key: bytes = field(repr=False)
    """The private key, PKCS #8 in PEM."""
