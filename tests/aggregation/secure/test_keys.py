"""Keys: the published vectors of every primitive, and refusal of invalid keys, signatures and shares."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.poly1305 import Poly1305
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.secure import keys
from cloister.protocol.encoding import pack
from cloister.protocol.errors import OneTimeKeyError, ShareError, SignatureError
from cloister.tests.tools.raises import raises

ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
CTX = bytes(range(32))


def test_x25519() -> None:
    """RFC 7748, section 6.1."""
    alice, bob = keys.Exchange(ALICE), keys.Exchange(BOB)
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.secret(bob.public).hex() == bob.secret(alice.public).hex() == shared
    assert keys.public_key(ALICE) == alice.public


@pytest.mark.parametrize(
    "public",
    [
        bytes(32),
        (1).to_bytes(32, "little"),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
        (2**255 - 20).to_bytes(32, "little"),
        bytes(31),
        b"",
    ],
)
def test_keys_that_make_the_secret_known_are_refused(public: bytes) -> None:
    """The points of order 1, 2, 4 and 8 on Curve25519 and its twist; and what is no key."""
    with pytest.raises(OneTimeKeyError):
        keys.Exchange(ALICE).secret(public)


def test_hkdf() -> None:
    """RFC 5869, A.1 and A.3: the first 32 of 42 bytes."""
    material = b"\x0b" * 22
    info = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    assert keys.derive(material, salt=bytes(range(13)), info=info).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    )
    assert keys.derive(material, salt=b"", info=b"").hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    )


def test_chacha20_poly1305() -> None:
    """RFC 8439, section 2.8.2: the primitive; then ours against it put together from its two parts (section
    2.8).
    """
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    nonce, extra = bytes.fromhex("070000004041424344454647"), bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    sealed = ChaCha20Poly1305(bytes(range(0x80, 0xA0))).encrypt(nonce, text, extra)
    assert sealed[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"

    key, share = bytes(range(32)), bytes(range(66))
    extra = pack(CTX, "i", "j")

    def chacha(counter: int, data: bytes) -> bytes:
        start = counter.to_bytes(4, "little") + bytes(12)
        return Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(data)

    ciphertext = chacha(1, share)
    padded = extra + bytes(-len(extra) % 16) + ciphertext + bytes(-len(ciphertext) % 16)
    padded += len(extra).to_bytes(8, "little") + len(ciphertext).to_bytes(8, "little")
    tag = Poly1305.generate_tag(chacha(0, bytes(32)), padded)
    assert keys.encrypt_share(share, key, context=CTX, sender="i", recipient="j") == ciphertext + tag


def test_ed25519() -> None:
    """RFC 8032, section 7.1, test 1; then what `sign` puts under the signature."""
    identity = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    assert identity.sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
        "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    signature = keys.sign(identity, "share", CTX, ("a", b"b"))
    assert signature == identity.sign(pack("cloister/secure-sum/5", "share", CTX, ("a", b"b")))


def test_a_share_opens_only_where_it_was_meant_to() -> None:
    secret = keys.Exchange(ALICE).secret(keys.public_key(BOB))
    names = {"context": CTX, "sender": "i", "recipient": "j"}
    key = keys.share_key(secret, transcript=bytes(32), context=CTX, sender="i", recipient="j")
    sealed = keys.encrypt_share(b"x" * 66, key, context=CTX, sender="i", recipient="j")
    assert keys.decrypt_share(sealed, key, context=CTX, sender="i", recipient="j") == b"x" * 66
    other_keys = {
        keys.share_key(secret, transcript=bytes(32), context=CTX, sender="j", recipient="i"),
        keys.share_key(secret, transcript=b"y" * 32, context=CTX, sender="i", recipient="j"),
        keys.share_key(secret, transcript=bytes(32), context=bytes(32), sender="i", recipient="j"),
        keys.mask_seed(secret, transcript=bytes(32), context=CTX, one="i", other="j"),
    }
    assert len(other_keys | {key}) == 5
    for other in other_keys:
        with raises(ShareError, "share of i", says="made for j"):
            keys.decrypt_share(sealed, other, context=CTX, sender="i", recipient="j")
    for changed in ({"context": bytes(32)}, {"sender": "j"}, {"recipient": "i"}):
        with pytest.raises(ShareError):
            keys.decrypt_share(sealed, key, **(names | changed))  # type: ignore[arg-type]  # of mixed types
    for at in range(len(sealed)):
        altered = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(ShareError):
            keys.decrypt_share(altered, key, context=CTX, sender="i", recipient="j")
    with pytest.raises(ShareError):
        keys.decrypt_share(b"", key, context=CTX, sender="i", recipient="j")


def test_two_sites_find_one_seed() -> None:
    one, other = keys.Exchange(ALICE), keys.Exchange(BOB)
    seeds = {
        keys.mask_seed(one.secret(other.public), transcript=CTX, context=CTX, one="b", other="a"),
        keys.mask_seed(other.secret(one.public), transcript=CTX, context=CTX, one="a", other="b"),
    }
    assert len(seeds) == 1


def test_the_seed_of_a_mask_depends_on_all_that_both_sites_agree_on() -> None:
    """HKDF-SHA256 put together here, salted with the transcript of U1; and another seed for any other part."""
    transcript = bytes(range(100, 132))

    def seed(
        secret: bytes = ALICE, transcript: bytes = transcript, context: bytes = CTX, one: str = "b"
    ) -> bytes:
        return keys.mask_seed(secret, transcript=transcript, context=context, one=one, other="a")

    info = pack("cloister/secure-sum/5", "mask", CTX, "a", "b")
    assert seed() == HKDF(SHA256(), 32, transcript, info).derive(ALICE)
    others = {seed(BOB), seed(transcript=CTX), seed(transcript=b""), seed(context=bytes(32)), seed(one="c")}
    assert len(others | {seed()}) == 6


messages = st.tuples(st.sampled_from(["share", "mask"]), st.binary(max_size=2), st.text(max_size=2))


@given(messages, messages)
def test_a_signature_is_of_one_message_only(
    one: tuple[str, bytes, str], other: tuple[str, bytes, str]
) -> None:
    identity = Ed25519PrivateKey.from_private_bytes(bytes(32))
    signature = keys.sign(identity, *one)
    if one == other:
        keys.verify(identity.public_key(), signature, *other, site="a")
    else:
        with raises(SignatureError, "signature of a"):
            keys.verify(identity.public_key(), signature, *other, site="a")


@pytest.mark.parametrize("signature", [b"", bytes(64), bytes(63), bytes(65)])
def test_what_is_no_signature_is_refused(signature: bytes) -> None:
    identity = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with pytest.raises(SignatureError):
        keys.verify(identity.public_key(), signature, "share", CTX, "body", site="a")


def test_a_signature_that_is_remembered_is_valid_for_nothing_else() -> None:
    """A site that saw a valid signature still checks key, step, context and body, and keeps no invalid one."""
    one, other = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
    right = keys.sign(one, "share", b"ctx", (b"body",))

    def check(key: Ed25519PrivateKey, signature: bytes, step: str, context: bytes, body: bytes) -> None:
        keys.verify(key.public_key(), signature, step, context, (body,), site="a", remember=True)

    for _ in range(2):
        check(one, right, "share", b"ctx", b"body")
        for wrong in (
            (other, right, "share", b"ctx", b"body"),
            (one, bytes(64), "share", b"ctx", b"body"),
            (one, right, "mask", b"ctx", b"body"),
            (one, right, "share", b"other", b"body"),
            (one, right, "share", b"ctx", b"other"),
        ):
            with pytest.raises(SignatureError):
                check(*wrong)
