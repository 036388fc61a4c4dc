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

TYPES: list[Any] = [np.uint8, np.uint16, np.uint32]


def stream(seed: bytes, offset: int, count: int) -> bytes:
    return masks.keystream(seed, offset).update(bytes(count))


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
    found = stream(key, counter * 16, 64)
    assert bytes(a ^ b for a, b in zip(plain, found, strict=True)) == cipher


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2000), st.integers(0, 300))
def test_a_keystream_can_be_entered_anywhere(seed: bytes, offset: int, count: int) -> None:
    assert stream(seed, offset, count) == stream(seed, 0, offset + count)[offset:]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mask_is_its_keystream_as_little_endian_integers(dtype: Any) -> None:
    add, subtract = [b"a" * 32, b"b" * 32], [b"c" * 32]
    vector = np.arange(1000, dtype=dtype)
    modulus, width = 2 ** (8 * vector.itemsize), vector.itemsize
    expected = []
    for element in range(1000):
        total = element
        for sign, seeds in ((1, add), (-1, subtract)):
            for seed in seeds:
                total += sign * int.from_bytes(stream(seed, element * width, width), "little")
        expected.append(total % modulus)
    masks.apply(vector, add, subtract)
    assert vector.tolist() == expected


@given(
    dtype=st.sampled_from(TYPES),
    length=st.integers(0, 300_000),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    threads=st.integers(1, 4),
    seeds=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
)
def test_shards_and_threads_give_the_same_bytes(
    dtype: Any, length: int, cuts: list[float], threads: int, seeds: list[bytes]
) -> None:
    whole = np.zeros(length, dtype)
    masks.apply(whole, seeds, seeds[:1])
    parts = np.zeros(length, dtype)
    bounds = [0, *sorted(int(cut * length) for cut in cuts), length]
    for start, end in itertools.pairwise(bounds):
        masks.apply(parts[start:end], seeds, seeds[:1], offset=start, threads=threads)
    np.testing.assert_array_equal(whole, parts)
    masks.apply(whole, seeds[:1], seeds, threads=threads)
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
    frozen = np.zeros(8, np.uint32)
    frozen.flags.writeable = False
    refuse(frozen)
    with raises(MaskError, "seed", says="31 bytes"):
        masks.apply(np.zeros(8, np.uint32), [bytes(31)])
