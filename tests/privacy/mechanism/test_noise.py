"""Noise: the keystream against `cryptography`'s AES, the laws within stated confidence, any cut into shards."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from randomgen import AESCounter
from scipy import stats

from cloister.privacy.mechanism import noise
from cloister.privacy.mechanism.noise import LARGEST_VARIANCE, NoiseStream
from cloister.protocol.encoding import pack
from cloister.protocol.messages.blocks import BLOCK
from cloister.tests.tools.raises import raises
from cloister.tests.tools.repeats import repeats

WRONG = 1e-9
"""Probability with which one statistical check of right noise fails, were the seeds not fixed."""
STREAM = NoiseStream.from_declared_seed(2026)
Law = Callable[[NoiseStream, int, int, int], npt.NDArray[Any]]


def gaussian(stream: NoiseStream, size: int, offset: int, _threads: int) -> npt.NDArray[Any]:
    return stream.gaussian(size, 1.5, offset)


def added(stream: NoiseStream, size: int, offset: int, threads: int) -> npt.NDArray[Any]:
    vector = np.arange(offset, offset + size).astype(np.float32)
    stream.add_gaussian(vector, 1.5, offset, threads=threads)
    return vector


def skellam(stream: NoiseStream, size: int, offset: int, _threads: int) -> npt.NDArray[Any]:
    return stream.skellam(size, 2.0**20, offset)


LAWS: list[Law] = [gaussian, added, skellam]


# The source.


KEY = bytes(range(32))


def keystream(law: str, block: int = 0) -> AESCounter:
    """The keystream of a law of `NoiseStream(KEY)`, from a value of the counter that is a multiple of 2^64."""
    key = HKDF(SHA256(), 16, None, pack("cloister/noise/1", "law", law)).derive(KEY)
    return AESCounter(key=np.frombuffer(key, "<u8"), counter=block << 64)


def aes_blocks(key: bytes, first: int, count: int) -> bytes:
    """AES-128 of `count` little-endian counters from `first` on, by OpenSSL."""
    counters = b"".join(((first + at) % 2**128).to_bytes(16, "little") for at in range(count))
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)


def drawn(source: Any, count: int) -> bytes:
    return bytes(source.random_raw(count).astype("<u8").tobytes())


@pytest.mark.parametrize("aesni", [True, False])
@given(key=st.binary(min_size=16, max_size=16), first=st.integers(0, 2**128 - 1))
@settings(max_examples=30, deadline=None)
def test_the_source_is_aes_128_of_a_little_endian_counter(aesni: bool, key: bytes, first: int) -> None:
    source = AESCounter(key=np.frombuffer(key, "<u8"), counter=first)
    source.use_aesni = aesni
    assert drawn(source, 64) == aes_blocks(key, first, 32)


def test_aes_128_is_the_published_one() -> None:
    """NIST SP 800-38A, F.5.1: each counter block of the vector is entered as a little-endian integer."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    source = AESCounter(key=np.frombuffer(key, "<u8"), counter=int.from_bytes(counter, "little"))
    assert drawn(source, 2).hex() == "ec8cdf7398607cb0f2d21675ea9ea1e4"


@pytest.mark.parametrize("number", [0, 1, 7, 2**40])
def test_each_block_starts_at_its_own_place_of_the_counter(number: int) -> None:
    expected = np.random.Generator(keystream("gaussian/float64", number)).standard_normal(100)
    np.testing.assert_array_equal(NoiseStream(KEY).gaussian(100, 1.0, number * BLOCK), expected)


def test_skellam_is_the_difference_of_two_poissons_of_separate_places() -> None:
    parts = [np.random.Generator(keystream("skellam", place)).poisson(50.0, 200) for place in (6, 7)]
    expected = parts[0] - parts[1]
    np.testing.assert_array_equal(NoiseStream(KEY).skellam(200, 100.0, 3 * BLOCK), expected)


# Keys.


def test_a_key_is_drawn_from_what_is_passed_in_and_never_shown() -> None:
    asked: list[int] = []

    def random(count: int) -> bytes:
        asked.append(count)
        return b"\xa5" * count

    stream = NoiseStream.fresh(random)
    assert asked == [32]
    np.testing.assert_array_equal(stream.gaussian(5, 1.0), NoiseStream(b"\xa5" * 32).gaussian(5, 1.0))
    assert repr(stream) == str(stream) == "NoiseStream(declared=False)"
    assert not np.array_equal(NoiseStream.fresh().gaussian(5, 1.0), NoiseStream.fresh().gaussian(5, 1.0))


def test_a_declared_seed_is_declared_and_so_are_its_children() -> None:
    assert not NoiseStream.fresh().declared
    assert not NoiseStream.fresh().child("a").declared
    assert STREAM.declared
    assert STREAM.child("a").child("b").declared
    with pytest.raises(AttributeError):
        STREAM.declared = False  # type: ignore[misc]  # that it cannot be set is the test


def test_children_seeds_and_laws_differ() -> None:
    streams = [
        STREAM,
        NoiseStream.from_declared_seed(2027),
        STREAM.child("a"),
        STREAM.child("b"),
        STREAM.child("a").child("a"),
        STREAM.child("a/a"),
        STREAM.child(""),
    ]
    first = {stream.gaussian(1, 1.0)[0] for stream in streams}
    first |= {stream.generator().standard_normal() for stream in streams}
    assert len(first) == 2 * len(streams)
    assert STREAM.child("a").gaussian(1, 1.0) == STREAM.child("a").gaussian(1, 1.0)


# Shards.


@given(
    law=st.sampled_from(LAWS),
    offset=st.one_of(st.integers(0, 3 * BLOCK), st.integers(2**40, 2**61)),
    length=st.integers(0, 5 * BLOCK // 2),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_shards_and_threads_give_the_same_bytes(
    law: Law, offset: int, length: int, cuts: list[float], threads: int
) -> None:
    whole = law(STREAM, length, offset, 1)
    bounds = [0, *sorted(int(cut * length) for cut in cuts), length]
    parts = [law(STREAM, end - start, offset + start, threads) for start, end in itertools.pairwise(bounds)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("law", LAWS)
def test_a_shard_is_found_out_that_forgets_its_offset(law: Law) -> None:
    whole = law(STREAM, 1000, 0, 1)
    assert law(STREAM, 500, 0, 1).tobytes() != whole[500:].tobytes()


def test_blocks_that_all_start_at_one_place_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_nothing_repeats_between_blocks_and_children` sees when the counter is not moved."""
    monkeypatch.setattr(noise, "_BETWEEN_BLOCKS", 0)
    vector = STREAM.gaussian(2 * BLOCK, 1.0)
    assert correlation(vector[:BLOCK], vector[BLOCK:]) > uncorrelated(BLOCK)


def test_a_vector_is_added_to_in_float64_and_rounded_once() -> None:
    before = STREAM.child("vector").gaussian(2 * BLOCK + 5, 10.0).astype(np.float32)
    after = before.copy()
    STREAM.add_gaussian(after, 0.7, 3)
    expected = before.astype(np.float64) + STREAM.gaussian(before.size, 0.7, 3)
    np.testing.assert_array_equal(after, expected.astype(np.float32))
    doubles = before.astype(np.float64)
    STREAM.add_gaussian(doubles, 0.7, 3)
    np.testing.assert_array_equal(doubles, expected)


def test_noise_is_added_without_a_second_vector() -> None:
    vector = np.zeros(2_000_000, np.float32)
    tracemalloc.start()
    STREAM.add_gaussian(vector, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 8 * BLOCK < vector.nbytes / 10


# The laws.


def variance_interval(n: int, variance: float) -> tuple[float, float]:
    """Where the mean square of n normals of that variance lies with probability 1 - WRONG."""
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], n)
    return variance * low / n, variance * high / n


def skellam_variance_interval(n: int, variance: float) -> tuple[float, float]:
    """The same for Skellam samples, whose excess kurtosis is 1 / variance: a normal approximation."""
    half = stats.norm.isf(WRONG / 2) * math.sqrt((2 + 1 / variance) / n)
    return variance * (1 - half), variance * (1 + half)


def mean_square(samples: npt.NDArray[Any]) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))


def normal_failures(samples: npt.NDArray[Any], sigma: float) -> set[str]:
    """Checks that the samples fail as normals of mean 0 and that standard deviation."""
    n, low_high = samples.size, variance_interval(samples.size, sigma**2)
    failed = set()
    if not low_high[0] <= mean_square(samples) <= low_high[1]:
        failed.add("variance")
    if abs(float(samples.mean(dtype=np.float64))) > stats.norm.isf(WRONG / 2) * sigma / math.sqrt(n):
        failed.add("mean")
    part = samples[:200_000].astype(np.float64)
    if stats.kstest(part, "norm", args=(0, sigma)).pvalue < WRONG:
        failed.add("distribution")
    return failed


def as_made(size: int, sigma: float) -> npt.NDArray[Any]:
    return STREAM.gaussian(size, sigma)


def as_added(size: int, sigma: float) -> npt.NDArray[Any]:
    vector = np.zeros(size, np.float32)
    STREAM.add_gaussian(vector, sigma)
    return vector


@pytest.mark.parametrize("make", [as_made, as_added])
@pytest.mark.parametrize("sigma", [1e-6, 1.0, 37.5])
def test_normals_have_the_standard_deviation_they_claim(
    make: Callable[[int, float], npt.NDArray[Any]], sigma: float
) -> None:
    samples = make(2_000_000, sigma)
    assert not normal_failures(samples, sigma)
    # Twice the variance, or half of it, is found out; so is one part in a hundred, and a shift.
    assert normal_failures(samples * samples.dtype.type(math.sqrt(2)), sigma) >= {"variance", "distribution"}
    assert normal_failures(samples / samples.dtype.type(math.sqrt(2)), sigma) >= {"variance", "distribution"}
    assert "variance" in normal_failures(samples * samples.dtype.type(1.01), sigma)
    assert "mean" in normal_failures(samples + samples.dtype.type(0.01 * sigma), sigma)


def test_the_tails_of_a_normal_are_there() -> None:
    """A count beyond t is binomial; a ziggurat without its tail has none beyond 3.66."""
    samples = np.abs(STREAM.gaussian(4_000_000, 1.0))
    for t in (2.0, 3.0, 3.7, 4.0, 4.5):
        low, high = stats.binom.ppf([WRONG / 2, 1 - WRONG / 2], samples.size, 2 * stats.norm.sf(t))
        assert low <= np.count_nonzero(samples > t) <= high
    expected = samples.size * 2 * stats.norm.sf(3.7)
    assert stats.binom.cdf(0, samples.size, expected / samples.size) < WRONG


def skellam_failures(samples: npt.NDArray[np.int64], variance: float) -> set[str]:
    n = samples.size
    low, high = skellam_variance_interval(n, variance)
    failed = set()
    if not low <= mean_square(samples) <= high:
        failed.add("variance")
    if abs(float(samples.mean())) > stats.norm.isf(WRONG / 2) * math.sqrt(variance / n):
        failed.add("mean")
    return failed


@pytest.mark.parametrize("variance", [0.5, 30.0, 2.0**20, 2.0**30, LARGEST_VARIANCE])
def test_skellam_noise_has_the_variance_it_claims(variance: float) -> None:
    samples = STREAM.skellam(500_000, variance)
    assert samples.dtype == np.int64
    assert not skellam_failures(samples, variance)
    assert "variance" in skellam_failures(samples, 2 * variance)
    assert "variance" in skellam_failures(samples, variance / 2)
    assert "mean" in skellam_failures(samples + math.ceil(math.sqrt(variance) / 20), variance)
    if variance > 1e6:  # the steps are far below the resolution of the test
        assert not normal_failures(samples, math.sqrt(variance))


@pytest.mark.parametrize("variance", [0.3, 4.0, 60.0])
def test_skellam_noise_has_the_published_probabilities(variance: float) -> None:
    samples = STREAM.skellam(500_000, variance)
    assert pmf_test(samples, variance) > WRONG
    assert pmf_test(samples, 1.05 * variance) < WRONG
    assert pmf_test(STREAM.skellam(500_000, 2 * variance), variance) < WRONG


def pmf_test(samples: npt.NDArray[np.int64], variance: float) -> float:
    """The chi-square p-value against `scipy.stats.skellam`; both tails are one cell each."""
    law = stats.skellam(variance / 2, variance / 2)
    reach = int(law.isf(1e-4))
    inside = np.arange(-reach + 1, reach)
    cells = np.concatenate([[law.cdf(-reach)], law.pmf(inside), [law.sf(reach - 1)]])
    found = np.bincount(np.clip(samples, -reach, reach) + reach, minlength=cells.size)
    return float(stats.chisquare(found, cells / cells.sum() * samples.size).pvalue)


def correlation(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    return abs(float(np.corrcoef(one, other)[0, 1]))


def uncorrelated(n: int) -> float:
    """What the correlation of n independent pairs stays below with probability 1 - WRONG."""
    return float(stats.norm.isf(WRONG / 2)) / math.sqrt(n)


@pytest.mark.parametrize("law", [gaussian, skellam])
def test_nothing_repeats_between_blocks_and_children(law: Law) -> None:
    n = 8 * BLOCK
    vector = law(STREAM, n, 0, 1)
    assert repeats(vector, WRONG) is None
    for other in (STREAM.child("a"), STREAM.child("b"), NoiseStream.from_declared_seed(1)):
        assert correlation(vector, law(other, n, 0, 1)) < uncorrelated(n)
    assert correlation(vector, vector + law(STREAM.child("a"), n, 0, 1)) > uncorrelated(n)


# Refusals.


def test_what_cannot_be_noised_is_refused_and_unchanged() -> None:
    vectors: list[Any] = [
        np.zeros(4, np.float16),
        np.zeros(4, np.int64),
        np.zeros((2, 2)),
        np.zeros(8)[::2],
        np.zeros(0, np.complex128),
    ]
    for vector in vectors:
        with raises(ValueError, "vector"):
            STREAM.add_gaussian(vector, 1.0)
        assert not vector.any()
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with raises(ValueError, "vector", says="read-only"):
        STREAM.add_gaussian(frozen, 1.0)
    for offset in (-1, 2**62 - 3):
        with raises(ValueError, "offset"):
            STREAM.gaussian(4, 1.0, offset)
        with raises(ValueError, "offset"):
            STREAM.skellam(4, 1.0, offset)
    with raises(ValueError, "size"):
        STREAM.gaussian(-1, 1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_no_noise_is_not_noise(value: float) -> None:
    vector = np.zeros(4)
    with raises(ValueError, "sigma"):
        STREAM.gaussian(4, value)
    with raises(ValueError, "sigma"):
        STREAM.add_gaussian(vector, value)
    with raises(ValueError, "variance"):
        STREAM.skellam(4, value)
    assert not vector.any()


def test_a_mean_beyond_the_samplers_precision_is_refused() -> None:
    assert STREAM.skellam(3, LARGEST_VARIANCE).any()
    with raises(ValueError, "variance", says="too coarse"):
        STREAM.skellam(3, math.nextafter(LARGEST_VARIANCE, math.inf))


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_has_32_bytes(size: int) -> None:
    with raises(ValueError, "key", says=f"{size} bytes"):
        NoiseStream(bytes(size))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_uniform_numbers_are_one_draw_each_and_are_entered_anywhere(offset: int) -> None:
    """Element e is draw e of the keystream, whose upper 53 bits are the number."""
    size, stream = BLOCK + 100, NoiseStream(KEY)
    whole = np.concatenate([block.copy() for block in stream.uniform(3 * BLOCK + 105)])
    part = np.concatenate([block.copy() for block in stream.uniform(size, offset)])
    np.testing.assert_array_equal(part, whole[offset : offset + size])
    draws = keystream("uniform").random_raw(offset + size)[offset:]
    np.testing.assert_array_equal(part, (draws >> np.uint64(11)) * 2.0**-53)
    assert abs(float(part.mean()) - 0.5) < 6.1 / math.sqrt(12 * size)  # 1e-9 of a normal lies beyond
    with raises(ValueError, "offset"):
        STREAM.uniform(5, -1)
    with raises(ValueError, "size"):
        STREAM.uniform(-1)
