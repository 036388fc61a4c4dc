"""Masks: published keystreams, any cut into shards, exact removal, and a working set that does not grow."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.vector import masks
from cloister.protocol.errors import MaskError
from cloister.tests.tools.raises import raises

CIPHERS: list[masks.Cipher] = ["aes-256-ctr", "chacha20"]
TYPES: list[Any] = [np.uint8, np.uint16, np.uint32]


def stream(seed: bytes, offset: int, count: int, cipher: masks.Cipher) -> bytes:
    return masks.keystream(seed, offset, cipher).update(bytes(count))


def chacha20_block(key: bytes, counter: int) -> bytes:
    """RFC 8439, section 2.3, written out, with the counter in 64 bits as its first users had it."""

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for one, two, three, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[one] = (x[one] + x[two]) & 0xFFFFFFFF
            y = x[three] ^ x[one]
            x[three] = ((y << bits) | (y >> (32 - bits))) & 0xFFFFFFFF

    data = b"expand 32-byte k" + key + counter.to_bytes(8, "little") + bytes(8)
    start = [int.from_bytes(data[at : at + 4], "little") for at in range(0, 64, 4)]
    x = list(start)
    for _ in range(10):
        for place in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
            quarter(*place)
        for place in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
            quarter(*place)
    return b"".join(((a + b) & 0xFFFFFFFF).to_bytes(4, "little") for a, b in zip(start, x, strict=True))


def test_aes_256_ctr_is_the_published_one() -> None:
    """NIST SP 800-38A, F.5.5: the vector's first counter is entered by its offset."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    found = stream(key, counter * 16, 64, "aes-256-ctr")
    assert bytes(a ^ b for a, b in zip(plain, found, strict=True)) == cipher


def test_chacha20_is_the_published_one() -> None:
    """RFC 8439, A.1, vectors 1 and 2."""
    first = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    second = bytes.fromhex(
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    assert stream(bytes(32), 0, 128, "chacha20") == first + second
    assert chacha20_block(bytes(32), 0) == first


def test_chacha20_goes_on_past_32_bits_of_blocks() -> None:
    key, last = bytes(range(32)), 2**32 - 1
    expected = chacha20_block(key, last) + chacha20_block(key, last + 1)
    assert stream(key, last * 64, 128, "chacha20") == expected
    assert stream(key, (last + 1) * 64, 64, "chacha20") == expected[64:]
    assert stream(key, last * 64 + 5, 100, "chacha20") == expected[5:105]


def test_a_vector_is_masked_past_32_bits_of_blocks() -> None:
    """256 GiB into it, in the middle of a block of the vector."""
    seed, start = bytes(range(32)), 2**38 // 4 - 100
    vector = np.zeros(1000, np.uint32)
    masks.apply(vector, [seed], offset=start, cipher="chacha20")
    first, last = 4 * start // 64, -(-4 * (start + vector.size) // 64)
    blocks = b"".join(chacha20_block(seed, number) for number in range(first, last))
    expected = np.frombuffer(blocks, "<u4")[start % 16 :][: vector.size]
    assert (vector == expected).all()


@given(
    st.sampled_from(CIPHERS), st.binary(min_size=32, max_size=32), st.integers(0, 2000), st.integers(0, 300)
)
def test_a_keystream_can_be_entered_anywhere(
    cipher: masks.Cipher, seed: bytes, offset: int, count: int
) -> None:
    assert stream(seed, offset, count, cipher) == stream(seed, 0, offset + count, cipher)[offset:]


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_mask_is_its_keystream_as_little_endian_integers(cipher: masks.Cipher, dtype: Any) -> None:
    add, subtract = [b"a" * 32, b"b" * 32], [b"c" * 32]
    vector = np.arange(1000, dtype=dtype)
    modulus, width = 2 ** (8 * vector.itemsize), vector.itemsize
    expected = []
    for element in range(1000):
        total = element
        for sign, seeds in ((1, add), (-1, subtract)):
            for seed in seeds:
                total += sign * int.from_bytes(stream(seed, element * width, width, cipher), "little")
        expected.append(total % modulus)
    masks.apply(vector, add, subtract, cipher=cipher)
    assert vector.tolist() == expected


@given(
    cipher=st.sampled_from(CIPHERS),
    dtype=st.sampled_from(TYPES),
    length=st.integers(0, 300_000),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    threads=st.integers(1, 4),
    seeds=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
)
def test_shards_and_threads_give_the_same_bytes(
    cipher: masks.Cipher, dtype: Any, length: int, cuts: list[float], threads: int, seeds: list[bytes]
) -> None:
    whole = np.zeros(length, dtype)
    masks.apply(whole, seeds, seeds[:1], cipher=cipher)
    parts = np.zeros(length, dtype)
    bounds = [0, *sorted(int(cut * length) for cut in cuts), length]
    for start, end in itertools.pairwise(bounds):
        masks.apply(parts[start:end], seeds, seeds[:1], offset=start, cipher=cipher, threads=threads)
    np.testing.assert_array_equal(whole, parts)
    masks.apply(whole, seeds[:1], seeds, cipher=cipher, threads=threads)
    assert not whole.any()


def test_memory_is_blocks_whatever_the_number_of_seeds() -> None:
    vector = np.zeros(4_000_000, np.uint32)
    peaks = []
    for count in (1, 40):
        tracemalloc.start()
        masks.apply(vector, [bytes([at]) * 32 for at in range(count)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 * masks.BLOCK < vector.nbytes / 10


def refuse(vector: npt.NDArray[Any], **options: Any) -> None:
    before = vector.copy()
    with pytest.raises(MaskError):
        masks.apply(vector, [bytes(32)], **options)
    np.testing.assert_array_equal(before, vector)


def test_what_cannot_be_masked_is_refused_and_unchanged() -> None:
    refuse(np.zeros(4, np.int32))
    refuse(np.zeros(4, np.float32))
    refuse(np.zeros((2, 2), np.uint32))
    refuse(np.zeros(8, np.uint32)[::2])
    refuse(np.zeros(8, np.uint32), offset=-1)
    refuse(np.zeros(8, np.uint32), offset=masks.LONGEST - 7)
    refuse(np.zeros(8, np.uint32), cipher="rc4")
    frozen = np.zeros(8, np.uint32)
    frozen.flags.writeable = False
    refuse(frozen)
    with raises(MaskError, "seed", says="31 bytes"):
        masks.apply(np.zeros(8, np.uint32), [bytes(31)])
