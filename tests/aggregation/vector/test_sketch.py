"""Sketches: exact, linear, and how often an estimate is wrong."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from cloister.aggregation.vector import masks
from cloister.aggregation.vector.rotation import ROTATED
from cloister.aggregation.vector.sketch import (
    REACH,
    ROWS,
    SKETCH_BYTES,
    SLACK,
    Integers,
    Lengths,
    estimate,
    from_bytes,
    to_bytes,
)

SEED = bytes(range(32))


def seeds(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def rows(size: int, seed: bytes) -> Integers:
    """(ROWS, size): the entries, from the definition."""
    stream = np.frombuffer(masks.keystream(seed, 0).update(bytes(32 * size)), np.uint8)
    bits = np.unpackbits(stream.reshape(size, 32), axis=1, bitorder="little").astype(np.int64)
    return (bits[:, :ROWS] - bits[:, ROWS:]).T


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_sketch_is_the_product_of_signed_integers_with_the_rows_and_no_counter(
    dtype: Any, weighed: bool
) -> None:
    size = 2 * ROTATED + 100
    vector = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, size + 7, dtype, endpoint=True)
    weights = np.array([1, 5, 4096]) if weighed else None
    signed = vector[:size].view(f"i{vector.itemsize}").astype(np.int64)
    by_hand = signed if weights is None else signed * weights[np.arange(size) // ROTATED]
    lengths = Lengths(size, 1.0, weights)
    sketch = lengths.sketch([(0, vector)], SEED)
    np.testing.assert_array_equal(sketch, rows(size, SEED) @ by_hand)
    assert lengths.norm([(0, vector)]) == pytest.approx(
        math.sqrt(float(np.square(by_hand.astype(float)).sum()))
    )


@pytest.mark.slow
def test_sums_beyond_what_a_float_has_are_exact() -> None:
    """All of the largest size: five million of them are more than 2^53."""
    size = 5_000_000
    vector = np.full(size, 2**31 - 1, np.uint32)
    stream = np.frombuffer(masks.keystream(SEED, 0).update(bytes(32 * size)), np.uint8).reshape(size, 32)
    for row in (0, 77):
        ones = [
            np.unpackbits(stream[:, at // 8])[7 - at % 8 :: 8].sum(dtype=np.int64) for at in (row, ROWS + row)
        ]
        got = Lengths(size, 1.0).sketch([(0, vector)], SEED)[row]
        assert got == (int(ones[0]) - int(ones[1])) * (2**31 - 1)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_spans_sketch_their_part_and_sketches_add_up(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    cuts = sorted(data.draw(st.sets(st.integers(0, size), max_size=4)))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    one, other = (draw.integers(-(2**29), 2**29, size).astype(np.int32) for _ in range(2))
    lengths = Lengths(size, 1.0)
    edges = [0, *cuts, size]
    pieces = [(at, one.view(np.uint32)[at:end]) for at, end in itertools.pairwise(edges)]
    whole = [lengths.sketch([(0, vector.view(np.uint32))], SEED) for vector in (one, other, one + other)]
    np.testing.assert_array_equal(lengths.sketch(pieces, SEED), whole[0])
    np.testing.assert_array_equal(whole[0] + whole[1], whole[2])


def test_a_sketch_travels_as_1024_bytes() -> None:
    sketch = np.array([-(2**62), 2**62, *range(ROWS - 2)])
    assert len(to_bytes(sketch)) == SKETCH_BYTES == 1024
    np.testing.assert_array_equal(from_bytes(to_bytes(sketch)), sketch)
    with pytest.raises(ValueError, match="1024"):
        from_bytes(bytes(1016))


def test_entries_have_their_probabilities() -> None:
    drawn = rows(4000, SEED)
    for value, probability in ((-1, 0.25), (0, 0.5), (1, 0.25)):
        assert (drawn == value).mean() == pytest.approx(probability, abs=4e-3)
    together = drawn[:8] @ drawn[:8].T / 4000
    assert abs(together - np.eye(8) / 2).max() < 0.04


# How often an estimate is wrong: docs/poisoning.md has the proofs.

T = 1.15
"""t of the bound on the lower tail, nearly the best."""


def moment(share: float) -> float:
    """E |cos(g a / sqrt 2)|^(2 / a^2), g normal with the variance 2 T, for a vector whose entries are all a."""
    z = np.linspace(-9, 9, 3001)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    cosine = np.abs(np.cos(z * math.sqrt(T) * share))
    return float((density * cosine ** (2 / share**2)).sum() * (z[1] - z[0]))


def test_the_lower_tail_of_every_vector_is_below_2_to_the_minus_57() -> None:
    """By Hoelder the largest moment over all a in (0, 1] counts. Between two points of the grid, whose ratio is 1 + r,
    it changes by less than r (2 / e + E |g|)."""
    normal = (1 + 2 * T) ** -0.5
    least, ratio = 0.25, 1 + 2e-4
    steps = math.ceil(math.log(1 / least, ratio))
    between = (ratio - 1) / 2 * (2 / math.e + math.sqrt(2 * T * 2 / math.pi))
    largest = max(moment(least * ratio**step) for step in range(steps)) + between
    # Below 1/4 the cosine is at most exp(-x^2 / 2) but for |g| > pi / (a sqrt 2), which is rare.
    beyond = math.erfc(math.pi / (least * math.sqrt(2)) / math.sqrt(2 * T) / math.sqrt(2))
    largest = max(largest, normal + beyond)
    assert largest < 0.5509
    assert ROWS * (math.log(largest) + T / 4) / math.log(2) < -57


def test_the_upper_tail_is_below_2_to_the_minus_40() -> None:
    assert SLACK == 1.5
    assert -ROWS / 2 * (SLACK**2 - 1 - math.log(SLACK**2)) / math.log(2) < -40
    for half in range(
        1, 40
    ):  # each even moment of an entry, 1/2, is at most that of a normal variable of its variance
        assert math.prod(range(1, 2 * half, 2)) / 2**half >= 1 / 2


def _one(size: int) -> Integers:
    vector = np.zeros(size, np.int64)
    vector[0] = 1000
    return vector


def _equal(size: int) -> Integers:
    return np.full(size, 1000)


def _falling(size: int) -> Integers:
    return (2**20 * 0.7 ** np.arange(size)).astype(np.int64)


@pytest.mark.parametrize("vector", [_one, _equal, _falling])
@pytest.mark.parametrize("few", [4, 8])
def test_misses_of_few_rows_match_the_law(vector: Callable[[int], Integers], few: int) -> None:
    """With 128 rows nobody sees a miss. With 4 and 8 they are as often as the law says."""
    size, tries = 64, 600
    x: npt.NDArray[np.uint32] = vector(size).astype(np.int32).view(np.uint32)
    lengths = Lengths(size, 1.0)
    norm = lengths.norm([(0, x)])
    found = np.array(
        [estimate(part) for seed in seeds(tries) for part in lengths.sketch([(0, x)], seed).reshape(-1, few)]
    )
    missed = (found < norm / 2).mean()
    if vector is not _falling:
        law = binom.cdf(0, few, 0.5) if vector is _one else chi2.cdf(few / 4, few)  # a row is 0 by half
        assert missed == pytest.approx(law, abs=4 * math.sqrt(law / found.size) + 0.01 * (vector is _equal))
    # The bound for any vector, with its own t for so few rows.
    bound = min(
        (max((1 + 2 * t) ** -0.5, (1 + math.exp(-2 * t)) / 2) * math.exp(t / 4)) ** few
        for t in np.linspace(0.1, 3, 60)
    )
    assert missed <= bound
    assert (found > SLACK * norm).mean() <= math.exp(-few / 2 * (SLACK**2 - 1 - math.log(SLACK**2)))


def test_128_rows_do_not_miss() -> None:
    for vector in (_one, _equal, _falling):
        x = vector(64).astype(np.int32).view(np.uint32)
        lengths = Lengths(64, 1.0)
        norm = lengths.norm([(0, x)])
        found = [estimate(lengths.sketch([(0, x)], seed)) / norm for seed in seeds(1000)]
        assert min(found) > SLACK / REACH
        assert max(found) < SLACK
