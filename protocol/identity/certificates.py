"""The coordinator's certificate authority, and the certificate of its door (X.509, RFC 5280).

A federation has an authority of its own, and its sites trust no other. Keys are on P-256, which every TLS library takes
(gRPC's takes no Ed25519). The authority can issue certificates of servers only, and no further authority (path length
0).
"""

from __future__ import annotations

import datetime
import inspect
import ipaddress
import warnings
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cloister.protocol.errors import CertificateError

_SKEW = datetime.timedelta(days=1)  # clocks may differ


def new_key() -> EllipticCurvePrivateKey:
    """A new private key on P-256."""
    return generate_private_key(SECP256R1())


def key_to_pem(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    """A private key as unencrypted PKCS #8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes) -> PrivateKeyTypes | None:
    """Read a private key, such as `key_to_pem` wrote; None: it is no unencrypted key in PEM."""
    try:
        return load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def new_authority(
    key: EllipticCurvePrivateKey, federation: str, now: datetime.datetime, days: int
) -> x509.Certificate:
    """The certificate of a new authority, signed with its own key.

    Args:
        key: Its private key.
        federation: Name of the federation.
        now: The present time, with a zone; the certificate is valid from a day before.
        days: Days from now for which it is valid.
    """
    name, public = _name(f"{federation} authority"), key.public_key()
    builder = _builder(name, name, public, now, now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.sign(key, SHA256())


def issue(
    authority: x509.Certificate,
    authority_key: EllipticCurvePrivateKey,
    key: EllipticCurvePrivateKey,
    names: Sequence[str],
    now: datetime.datetime,
    days: int,
) -> x509.Certificate:
    """A server's certificate.

    Args:
        authority: Certificate of the authority.
        authority_key: Its private key.
        key: The server's private key.
        names: DNS names and IP addresses under which the server is reached; the first is its common name too.
        now: The present time, with a zone.
        days: Days from now for which it is valid, but no longer than the authority.

    Raises:
        CertificateError: the authority is not valid now.
    """
    check_authority(authority, now)
    end = min(now + datetime.timedelta(days=days), authority.not_valid_after_utc)
    public = key.public_key()
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    general = x509.SubjectAlternativeName([_general(name) for name in names])
    builder = _builder(_name(names[0]), authority.subject, public, now, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(general, critical=False)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.add_extension(by, critical=False).sign(authority_key, SHA256())


def names_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names and IP addresses of a server's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def read_certificate(data: bytes, origin: str) -> x509.Certificate:
    """Read one certificate, in PEM or DER.

    Raises:
        CertificateError: it is damaged.
    """
    try:
        load = x509.load_pem_x509_certificate if data[:5] == b"-----" else x509.load_der_x509_certificate
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of encodings that RFC 5280 forbids
            return load(data)
    except (ValueError, Warning):
        raise CertificateError("certificate", origin, expected="one certificate in PEM or DER") from None


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority's key signed a certificate, which may be its own."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def check_authority(certificate: x509.Certificate, now: datetime.datetime) -> None:
    """Check that a certificate is of an authority that signed itself, and is valid now.

    Raises:
        CertificateError: it is not.
    """
    try:
        right = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound):
        right = False
    if not right or not issued_by(certificate, certificate):
        raise CertificateError("authority", expected="the certificate of an authority that signed itself")
    check_valid(certificate, now, "certificate of the authority")


def check_valid(certificate: x509.Certificate, now: datetime.datetime, what: str, fix: str = "") -> None:
    """Check that a certificate is valid at a time.

    Args:
        certificate: The certificate.
        now: The time, with a zone.
        what: What it is, for errors.
        fix: What to do where it has expired.

    Raises:
        CertificateError: it has expired, or is not valid yet.
    """
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    expected = f"one that is valid on {now:%Y-%m-%d %H:%M} UTC"
    if now < first:
        raise CertificateError(
            what, f"valid from {first:%Y-%m-%d %H:%M}", expected=expected, fix="check the clock"
        )
    if now > last:
        instead = fix or "the coordinator has to make a new federation"
        raise CertificateError(
            what,
            f"expired on {last:%Y-%m-%d %H:%M}",
            expected=expected,
            fix=f"check the clock; else: {instead}",
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: EllipticCurvePublicKey,
    now: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(end)


def _name(common: str) -> x509.Name:
    # RFC 5280: at most 64 characters.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(**allowed: bool) -> x509.KeyUsage:
    none = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False)
    return x509.KeyUsage(**{**none, **allowed})
