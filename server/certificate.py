"""The certificate of the exchange: a self-signed one, which sites pin, so no authority has to be trusted."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from cloister.protocol.errors import CertificateError
from cloister.protocol.invitation import fingerprint_of


@dataclass(frozen=True)
class Certificate:
    """A server's certificate and its private key."""

    pem: bytes
    """The certificate, and the certificates that issued it, if any."""
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
            found = x509.load_pem_x509_certificate(self.pem).extensions
            names = found.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            names = x509.SubjectAlternativeName([])
        for name in names:
            if isinstance(name, x509.DNSName | x509.IPAddress):
                return str(name.value)
        raise CertificateError("certificate", expected="a subject alternative name, DNS or IP")


def new_certificate(names: Sequence[str], *, days: int = 825, now: datetime | None = None) -> Certificate:
    """A self-signed certificate (ECDSA P-256).

    Args:
        names: The host names and IP addresses in it; sites ask for the first.
        days: How long it is valid, from a day before now, because clocks differ.
        now: The time.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0][:64])])
    started = (now or datetime.now(UTC)) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(started)
        .not_valid_after(started + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certificate(certificate.public_bytes(Encoding.PEM), private)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
