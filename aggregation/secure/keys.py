"""The cryptographic primitives of the secure sum, each with the exact encoding that it is used with.

All of them come from `cryptography`: X25519 (RFC 7748) agrees on a secret, HKDF-SHA256 (RFC 5869) derives keys from
it, ChaCha20-Poly1305 (RFC 8439) encrypts a share on its way from one site to another through the coordinator, Ed25519
(RFC 8032) signs. The input of a signature or key derivation is `protocol.encoding.pack` of its parts, so no two
different inputs have the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.protocol.encoding import Value, pack
from cloister.protocol.errors import OneTimeKeyError, ShareError, SignatureError

PROTOCOL = "cloister/secure-sum/5"
"""First part of every input that is signed or from which a key is derived; it changes with the protocol."""
KEY = 32
"""Bytes of an X25519 key, of a seed, and of a share-encryption key."""

_NONCE = bytes(12)  # constant: each key is derived for one share from one site to another, and used once


def public_key(private: bytes) -> bytes:
    """The X25519 public key of the 32 bytes `private`."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class Exchange:
    """One private X25519 key, used with many public ones."""

    def __init__(self, private: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()

    def secret(self, public: bytes) -> bytes:
        """The shared secret, 32 bytes: the owners of both keys can compute it.

        Raises:
            OneTimeKeyError: `public` is not 32 bytes, or is a point of low order, which would make the secret known.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise OneTimeKeyError(
                "one-time key", public.hex(), expected="an X25519 key of full order"
            ) from None


def derive(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 of `secret`: a key of 32 bytes."""
    return HKDF(SHA256(), KEY, salt, info).derive(secret)


def share_key(secret: bytes, *, transcript: bytes, context: bytes, sender: str, recipient: str) -> bytes:
    """The key under which `sender` encrypts its share for `recipient`, from their agreed X25519 secret."""
    return derive(secret, salt=transcript, info=pack(PROTOCOL, "share", context, sender, recipient))


def mask_seed(secret: bytes, *, transcript: bytes, context: bytes, one: str, other: str) -> bytes:
    """The seed of the mask that two sites share; the order in which they are named does not matter.

    The context contains the hash of the global model: sites that were given different models get different seeds.
    """
    first, second = sorted((one, other))
    return derive(secret, salt=transcript, info=pack(PROTOCOL, "mask", context, first, second))


def encrypt_share(share: bytes, key: bytes, *, context: bytes, sender: str, recipient: str) -> bytes:
    """Encrypt `share`, authenticated with context, sender and recipient; the result is 16 bytes longer."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, share, pack(context, sender, recipient))


def decrypt_share(sealed: bytes, key: bytes, *, context: bytes, sender: str, recipient: str) -> bytes:
    """Decrypt a share that `encrypt_share` encrypted.

    Raises:
        ShareError: the ciphertext was altered, or made with other keys, in another context, or for another site.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, pack(context, sender, recipient))
    except InvalidTag:
        raise ShareError(
            f"share of {sender}", expected=f"a ciphertext that {sender} made for {recipient}"
        ) from None


def random_from(seed: bytes) -> Callable[[int], bytes]:
    """A random source that gives the same bytes in every process: the ChaCha20 keystream of 32 secret bytes.

    It lets a site's attempt survive a crash of the process. The site draws one seed for the attempt, keeps it as secret
    as its identity key, stores each message before it replies, and rebuilds its `SecureSite` by replaying the messages.
    Never use a seed for two attempts.
    """
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
    return lambda size: stream.update(bytes(size))


def sign(identity: Ed25519PrivateKey, step: str, context: bytes, body: Value) -> bytes:
    """The signature of `body` as a message of `step` in the attempt that `context` identifies."""
    return identity.sign(pack(PROTOCOL, step, context, body))


def verify(
    public: Ed25519PublicKey,
    signature: bytes,
    step: str,
    context: bytes,
    body: Value,
    *,
    site: str,
    remember: bool = False,
) -> None:
    """Verify a signature that `sign` made.

    With `remember`, for short messages that many sites check, a process verifies each valid signature once.

    Raises:
        SignatureError: it is not a signature of exactly this message with the key `public` of `site`.
    """
    check = _verify_once if remember else _verify
    try:
        check(public.public_bytes_raw(), signature, step, context, body)
    except InvalidSignature:
        raise SignatureError(
            f"signature of {site}", expected=f"one that {site}'s key made for {step}"
        ) from None


def _verify(public: bytes, signature: bytes, step: str, context: bytes, body: Value) -> None:
    Ed25519PublicKey.from_public_bytes(public).verify(signature, pack(PROTOCOL, step, context, body))


_verify_once = lru_cache(maxsize=4096)(_verify)  # an invalid signature raises, and is not kept
