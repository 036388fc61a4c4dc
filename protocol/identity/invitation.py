"""An invitation to the exchange, and how a site proves on it who it is.

The coordinator gives each site an invitation over a channel that is authenticated already (Flower's). The site connects
to the address in it, and accepts no other certificate than the one in it: TLS verifies that the server has its private
key before the site sends anything. The token in it opens one session, and only together with an identity key: the site
signs the run, the token, the certificate's fingerprint and a nonce that the server has drawn for this session. So a
signature is not valid in another session, at another server or in another run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.protocol.encoding import pack, unpack
from cloister.protocol.errors import EncodingError, InvitationError, RosterError, SignatureError
from cloister.protocol.identity.address import check_host, host_of

_INVITATION = "cloister/invitation/1"
_SESSION = "cloister/session/1"
_ID = 16
_SECRET = 32
NONCE = 32
"""Bytes of the nonce of a session."""
_RUN = re.compile(r"[0-9A-Za-z]{1,64}")
LONGEST = 2**14
"""Bytes of the longest invitation."""


@dataclass(frozen=True)
class Invitation:
    """Where a site finds the exchange of a run, and the token that opens one session there."""

    run: str
    """Label of the run, the same in all its invitations: 1 to 64 letters and digits, as sites name a folder by it."""
    address: str
    """HOST:PORT at which sites reach the exchange."""
    server_name: str
    """The name in the certificate that the site asks for (SNI)."""
    certificate: bytes = field(repr=False)
    """The server's certificate, in PEM."""
    token: bytes = field(repr=False)
    """Secret; it opens one session."""

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, 32 bytes.

        Raises:
            InvitationError: the certificate cannot be read.
        """
        return fingerprint_of(self.certificate)

    def to_bytes(self) -> bytes:
        """The invitation for a message; it is a secret."""
        return pack(_INVITATION, self.run, self.address, self.server_name, self.certificate, self.token)

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        """Read what `to_bytes` wrote.

        Raises:
            InvitationError: the bytes are anything else. So is a run that could name another folder of the site, and an
                address other than HOST:PORT, of which gRPC takes more, such as sockets of this machine.
        """
        try:
            values = unpack(data) if len(data) <= LONGEST else ()
        except EncodingError:
            values = ()
        match values:
            case (label, str(run), str(address), str(name), bytes(certificate), bytes(token)) if (
                label == _INVITATION
            ):
                invitation = cls(run, address, name, certificate, token)
                assert len(invitation.fingerprint) == 32  # it raises for a certificate that cannot be read
                if not _RUN.fullmatch(run):
                    raise InvitationError("run of the invitation", run, expected="1 to 64 letters and digits")
                try:
                    host_of(address)
                    check_host(name)
                except RosterError as error:
                    raise InvitationError("invitation", address, expected=str(error)) from None
                return invitation
        raise InvitationError(
            "invitation", f"{len(data)} bytes", expected="an invitation of this release of cloister"
        )


def fingerprint_of(certificate: bytes) -> bytes:
    """SHA-256 of a certificate in PEM, over its DER bytes: what `openssl x509 -fingerprint -sha256` prints.

    Raises:
        InvitationError: it is not one certificate: a site would trust each of several, and all that they issue.
    """
    try:
        (only,) = x509.load_pem_x509_certificates(certificate)
    except ValueError:
        raise InvitationError("certificate", f"{len(certificate)} bytes", expected="one in PEM") from None
    return hashlib.sha256(only.public_bytes(Encoding.DER)).digest()


class Tokens:
    """One-time tokens. Their first bytes are public and find the secret, which is compared in constant time.

    Args:
        clock: Seconds.
        most: Tokens that are kept; that which expires first is dropped for a new one.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock = clock
        self._most = most
        self._issued: dict[bytes, tuple[bytes, float]] = {}

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, lifetime_s: float) -> bytes:
        """A new token, valid for `lifetime_s` seconds."""
        while len(self._issued) >= self._most:
            del self._issued[min(self._issued, key=lambda id: self._issued[id][1])]
        id, secret = os.urandom(_ID), os.urandom(_SECRET)
        self._issued[id] = secret, self._clock() + lifetime_s
        return id + secret

    def expire(self, token: bytes, lifetime_s: float) -> None:
        """Limit the validity of a token, if it has not been used, to `lifetime_s` seconds from now."""
        known = self._issued.get(token[:_ID])
        if known is not None:
            self._issued[token[:_ID]] = known[0], self._clock() + lifetime_s

    def spend(self, token: bytes) -> None:
        """Use a token up.

        Raises:
            InvitationError: it is unknown, used or expired. A token with a wrong secret does not use up the right one.
        """
        id, given = token[:_ID], token[_ID:]
        secret, until = self._issued.get(id, (b"", 0.0))
        if not hmac.compare_digest(secret, given) or not secret:
            raise InvitationError("token", expected="one that was issued and has not been used")
        del self._issued[id]
        if self._clock() >= until:
            raise InvitationError("token", expected="one that has not expired")


def prove(identity: Ed25519PrivateKey, invitation: Invitation, nonce: bytes, name: str) -> bytes:
    """The signature with which the site `name` opens a session.

    Args:
        identity: The site's identity key.
        invitation: What it was invited by.
        nonce: The server's, of this session.
        name: The site's name.
    """
    public = identity.public_key().public_bytes_raw()
    return identity.sign(
        _signed(invitation.run, invitation.token, invitation.fingerprint, nonce, name, public)
    )


def verify_proof(
    signature: bytes, *, run: str, token: bytes, fingerprint: bytes, nonce: bytes, name: str, public: bytes
) -> None:
    """Check what `prove` has signed.

    Args:
        signature: The site's.
        run: Label of the run.
        token: The token that the session was opened with.
        fingerprint: SHA-256 of the server's certificate.
        nonce: Of this session.
        name: The site's name.
        public: The site's public key, 32 bytes.

    Raises:
        SignatureError: the site did not sign this.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, _signed(run, token, fingerprint, nonce, name, public)
        )
    except (ValueError, InvalidSignature):
        raise SignatureError(
            f"session of {name}", expected="a signature of this session with the site's identity key"
        ) from None


def _signed(run: str, token: bytes, fingerprint: bytes, nonce: bytes, name: str, public: bytes) -> bytes:
    return pack(_SESSION, run, token, fingerprint, nonce, name, public)
