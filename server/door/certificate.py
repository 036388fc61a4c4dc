"""The certificate of the exchange: a self-signed one, which sites pin, so no authority has to be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509

from cloister.protocol.errors import CertificateError
from cloister.protocol.identity.certificates import (
    certificate_to_pem,
    key_to_pem,
    names_of,
    new_key,
    self_signed,
)
from cloister.protocol.identity.invitation import fingerprint_of


@dataclass(frozen=True)
class Certificate:
    """A server's certificate and its private key."""

    pem: bytes
    """The certificate, self-signed: sites trust it and no other."""
    key: bytes = field(repr=False)
    """The private key, PKCS #8 in PEM."""

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, 32 bytes."""
        return fingerprint_of(self.pem)

    @property
    def name(self) -> str:
        """The first name in it, which sites ask for.

        Raises:
            CertificateError: it has none.
        """
        try:
            return names_of(x509.load_pem_x509_certificate(self.pem))[0]
        except (ValueError, IndexError, x509.ExtensionNotFound):
            raise CertificateError("certificate", expected="a subject alternative name, DNS or IP") from None


def new_certificate(names: Sequence[str], *, days: int = 825, now: datetime | None = None) -> Certificate:
    """A self-signed certificate (ECDSA P-256).

    Args:
        names: The host names and IP addresses in it; sites ask for the first.
        days: How long it is valid; it is valid from a day before now too, because clocks differ.
        now: The time.
    """
    key = new_key()
    made = self_signed(key, names, now or datetime.now(UTC), days)
    return Certificate(certificate_to_pem(made), key_to_pem(key))
