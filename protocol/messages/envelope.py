"""The signed envelope of a request, by which a site knows the coordinator whatever carries the message.

The coordinator signs, for each request and site: run, site, hash of the first frame, a counter, and the key to which
the reply is sealed. The first frame states the hash of each vector behind it, which the site checks before it uses the
vector (`check_sent`). So the signature covers all frames, and no vector is hashed for it.

A counter never falls in a run: its upper half is the number of the coordinator's start, which is durable before the
first request of that start, and its lower half counts the requests of the start.

Replies over a carrier that is not ours are sealed (`Seal`): X25519 agrees on a key that HKDF-SHA256 binds to the
envelope, ChaCha20-Poly1305 encrypts, and the site's identity key signs its half of the agreement. Who carries a reply
can neither read it nor make one, nor give it for another request.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.protocol.encoding import pack
from cloister.protocol.errors import EncodingError, MemberError, SignatureError
from cloister.protocol.identity.roster import Roster, signed_by
from cloister.protocol.messages.messages import Digest, Key, Limit, Name, Signature
from cloister.protocol.messages.wire import Buffer, from_bytes, to_bytes, view

_ENVELOPE = "cloister/envelope/1"
_SEAL = "cloister/seal/1"
_STARTS = 32  # bits of the counter below the number of the start
LARGEST_SEALED = 2**31 - 1
"""Bytes of the largest frame that is sealed: what ChaCha20-Poly1305 takes in one call."""


@dataclass(frozen=True)
class Envelope:
    """Around a request; `Sender` signs it and `verified` checks it."""

    run: Name
    """Identity of the run."""
    site: Name
    """The site that it is for."""
    body: Digest
    """SHA-256 of the request's first frame."""
    counter: int
    """Higher than that of each earlier request of the run."""
    reply_key: Annotated[bytes, Limit(32)] = b""
    """X25519 public key to which the reply is sealed; empty where the connection is the coordinator's own."""
    signature: Signature = b""
    """With the coordinator's key."""

    @property
    def signed(self) -> bytes:
        """What is signed."""
        return pack(_ENVELOPE, self.run, self.site, self.body, self.counter, self.reply_key)


def body_of(frames: Sequence[Buffer]) -> bytes:
    """What an envelope has of a request's frames, 32 bytes."""
    return hashlib.sha256(view(frames[0]) if frames else b"").digest()


class Sender:
    """The coordinator's side of a run.

    Args:
        key: The coordinator's.
        run: Identity of the run.
        start: Number of the coordinator's start in this run, durable.
        sealed_by: The sites whose replies are sealed; None: the carrier is ours, and no reply is sealed.
    """

    def __init__(self, key: Ed25519PrivateKey, run: str, start: int, sealed_by: Roster | None = None) -> None:
        self._key = key
        self._run = run
        self._numbers = itertools.count((start << _STARTS) + 1)
        self._reply = None if sealed_by is None else X25519PrivateKey.generate()
        self._sites = sealed_by

    def envelope(self, site: str, body: bytes) -> bytes:
        """The signed envelope of a request with this body, the next in the run."""
        reply_key = self._reply.public_key().public_bytes_raw() if self._reply else b""
        bare = Envelope(self._run, site, body, next(self._numbers), reply_key)
        return to_bytes(replace(bare, signature=self._key.sign(bare.signed)))

    def opened(self, site: str, envelope: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The frames of a reply to the request with this envelope.

        Raises:
            EncodingError, SignatureError: it is not the reply that the site has sealed.
        """
        if self._reply is None or self._sites is None:
            return frames
        return open_sealed(self._reply, self._sites.key(site), envelope, frames)


def verified(data: bytes, coordinator: bytes, site: str, frames: Sequence[Buffer] | None) -> Envelope:
    """Check an envelope, before anything in the frames is decoded.

    Args:
        data: Its bytes.
        coordinator: The coordinator's public key, 32 bytes.
        site: The name of this site.
        frames: The request; None: it is not there yet, and its body is not checked.

    Raises:
        EncodingError: the bytes are not an envelope.
        SignatureError: the coordinator did not sign it, or signed it for other frames.
        MemberError: it is for another site.
    """
    envelope = from_bytes(Envelope, data)
    if not signed_by(coordinator, envelope.signed, envelope.signature):
        raise SignatureError(
            "request", expected="a signature with the coordinator's key, as the federation names it"
        )
    if envelope.site != site:
        raise MemberError("site of the request", envelope.site, expected=site)
    if frames is not None and envelope.body != body_of(frames):
        raise SignatureError("body of the request", expected="the one that the coordinator has signed")
    return envelope


@dataclass(frozen=True)
class Seal:
    """The first frame of a sealed reply."""

    key: Key
    """X25519 public key that the site has drawn for this reply."""
    signature: Signature
    """Of that key and the envelope, with the site's identity key."""


def seal(
    identity: Ed25519PrivateKey, reply_key: bytes, envelope: bytes, frames: Sequence[Buffer]
) -> list[Buffer]:
    """A reply to the request with this envelope, for the coordinator alone.

    Args:
        identity: The site's.
        reply_key: As in the envelope.
        envelope: Its bytes.
        frames: The reply, each frame of at most `LARGEST_SEALED` bytes.
    """
    drawn = X25519PrivateKey.generate()
    public = drawn.public_key().public_bytes_raw()
    cipher = _cipher(drawn.exchange(X25519PublicKey.from_public_bytes(reply_key)), envelope, public)
    sealed: list[Buffer] = [to_bytes(Seal(public, identity.sign(_signed(envelope, public))))]
    for number, frame in enumerate(frames):
        sealed.append(cipher.encrypt(_nonce(number), view(frame), _about(len(frames))))
    return sealed


def open_sealed(
    private: X25519PrivateKey, site: Ed25519PublicKey, envelope: bytes, frames: Sequence[Buffer]
) -> list[Buffer]:
    """The frames of a sealed reply.

    Args:
        private: The key that belongs to the envelope's `reply_key`.
        site: The identity key of the site that was asked.
        envelope: The bytes of its request's envelope.
        frames: What has arrived.

    Raises:
        EncodingError: it is no sealed reply.
        SignatureError: the site has not sealed it for this request, or it was altered.
    """
    if len(frames) < 2:
        raise EncodingError("reply", f"{len(frames)} frames", expected="a sealed reply")
    head, count = from_bytes(Seal, bytes(view(frames[0]))), len(frames) - 1
    wrong = SignatureError("reply", expected="what the site that was asked has sealed for this request")
    try:
        site.verify(head.signature, _signed(envelope, head.key))
        secret = private.exchange(X25519PublicKey.from_public_bytes(head.key))
    except (ValueError, InvalidSignature):
        raise wrong from None
    cipher = _cipher(secret, envelope, head.key)
    try:
        return [
            cipher.decrypt(_nonce(number), view(frame), _about(count))
            for number, frame in enumerate(frames[1:])
        ]
    except InvalidTag:
        raise wrong from None


def _signed(envelope: bytes, key: bytes) -> bytes:
    return pack(_SEAL, hashlib.sha256(envelope).digest(), key)


def _cipher(secret: bytes, envelope: bytes, key: bytes) -> ChaCha20Poly1305:
    """The cipher of one reply: its key is never used for another one, so that nonces may count frames."""
    salt = hashlib.sha256(envelope).digest()
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt, pack(_SEAL, key)).derive(secret))


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _about(frames: int) -> bytes:
    """What is authenticated with each frame: how many there are."""
    return pack(_SEAL, frames)
