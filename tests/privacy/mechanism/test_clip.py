"""Clipping: bounds that hold in exact arithmetic for what is returned, and integers within the published norm."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloister.privacy.mechanism import clip
from cloister.privacy.mechanism.clip import BETA, l2_norm, rounded_l1, rounded_l2
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK
from cloister.tests.tools.raises import raises

STREAM = NoiseStream.from_declared_seed(7)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149

ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.one_of(
    hnp.arrays(np.float32, st.integers(0, 40), elements=ANY_FLOAT),
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1, 1, width=32)),
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-(2.0**-126), 2.0**-126, width=32)),
    hnp.arrays(
        np.float32, st.integers(1, 40), elements=st.sampled_from([LARGEST, -LARGEST, 0.0, 1.0, SMALLEST])
    ),
)
BOUNDS = st.one_of(
    st.floats(1e-3, 1e3),
    st.floats(5e-324, 1e300),
    st.sampled_from([1.0, SMALLEST, LARGEST, 5e-324, 1e-40]),
)


def exact_square(vector: npt.NDArray[Any]) -> Fraction:
    """The square of the L2 norm, in rational numbers."""
    return sum((Fraction(float(x)) ** 2 for x in vector), Fraction(0))


def within(vector: npt.NDArray[Any], bound: float) -> bool:
    return exact_square(vector) <= Fraction(bound) ** 2


def clipped_to(vector: npt.NDArray[np.float32], bound: float) -> npt.NDArray[np.float32]:
    """A copy of a vector, clipped."""
    copied = vector.copy()
    clip.clip(copied, bound)
    return copied


# Norms.


@given(VECTORS)
def test_a_norm_is_the_exact_one(vector: npt.NDArray[np.float32]) -> None:
    found = Fraction(l2_norm(vector)) ** 2
    exact = exact_square(vector)
    assert abs(found - exact) <= exact * Fraction(2) ** -37


def test_a_norm_agrees_with_numpy_over_many_blocks_and_needs_no_copy() -> None:
    vector = STREAM.gaussian(40 * BLOCK + 3, 1.0).astype(np.float32)
    assert math.isclose(l2_norm(vector), float(np.linalg.norm(vector.astype(np.float64))), rel_tol=1e-12)
    tracemalloc.start()
    l2_norm(vector)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 8 * BLOCK < vector.nbytes / 5


def test_norms_whose_squares_leave_float32_are_right() -> None:
    assert math.isclose(l2_norm(np.full(4, LARGEST, np.float32)), 2 * LARGEST, rel_tol=1e-15)
    assert l2_norm(np.full(4, SMALLEST, np.float32)) == 2 * SMALLEST
    assert l2_norm(np.zeros(3, np.float32)) == l2_norm(np.zeros(0, np.float32)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 5, BLOCK, 2 * BLOCK + 1])
def test_what_is_not_finite_is_named_and_nothing_is_written(value: float, where: int) -> None:
    vector = np.full(2 * BLOCK + 7, 100.0, np.float32)
    vector[where:] = value
    before = vector.tobytes()
    with raises(UpdateError, f"update[{where}]", says="finite"):
        clip.clip(vector, 1.0)
    assert vector.tobytes() == before
    with raises(UpdateError, f"update[{where}]"):
        clip.integer_round(vector, 1.0, 1e6, STREAM, vector.size)


# Clipping.


@given(VECTORS, BOUNDS)
@settings(max_examples=500, deadline=None)
def test_a_clipped_vector_is_within_the_bound_in_exact_arithmetic(
    vector: npt.NDArray[np.float32], bound: float
) -> None:
    clipped = clipped_to(vector, bound)
    assert within(clipped, bound)
    if exact_square(vector) <= (Fraction(bound) * (1 - Fraction(2) ** -36)) ** 2:
        assert clipped.tobytes() == vector.tobytes()
    else:  # the direction is kept, to one unit in the last place of each element
        wanted = vector.astype(np.float64) * (bound / l2_norm(vector))
        assert (np.abs(clipped) <= np.abs(vector)).all()
        assert (np.abs(clipped - wanted) <= np.abs(wanted) * 2.0**-22 + SMALLEST).all()


def test_a_clipped_vector_of_many_blocks_is_within_the_bound() -> None:
    vector = STREAM.child("long").gaussian(5 * BLOCK + 11, 3.0).astype(np.float32)
    clipped = clipped_to(vector, 0.1)
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    assert within(clipped, 0.1)
    assert l2_norm(clipped) > 0.1 * (1 - 2.0**-22)
    np.testing.assert_allclose(clipped, vector * (0.1 / norm), rtol=2.0**-22)


def test_rounding_to_nearest_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rounding toward zero about half of all clipped vectors exceed their bound."""
    vectors = [STREAM.child(f"{number}").gaussian(50, 1.0).astype(np.float32) for number in range(40)]
    assert all(within(clipped_to(vector, 1.0), 1.0) for vector in vectors)
    monkeypatch.setattr(clip, "_toward_zero", lambda values: values.astype(np.float32))
    assert not all(within(clipped_to(vector, 1.0), 1.0) for vector in vectors)


def test_what_cannot_be_clipped_is_refused() -> None:
    right = np.ones(4, np.float32)
    wrongs: list[Any] = [np.ones(4), np.ones((2, 2), np.float32), np.ones(4, np.int64)]
    for wrong in wrongs:
        with raises(ValueError, "vector"):
            clip.clip(wrong, 1.0)
    for bound in (0.0, -1.0, math.nan, math.inf):
        with raises(ValueError, "bound"):
            clip.clip(right, bound)
    np.testing.assert_array_equal(right, 1)


# Integers.


@pytest.mark.parametrize(
    ("bound", "d", "expected"),
    [
        # Worked by hand from Kairouz et al. 2021, Algorithm 1: sqrt(2 log(1/beta)) is 1 for exp(-1/2).
        (10.0, 4, math.sqrt(100 + 1 + 1 * (10 + 1))),
        (3.0, 10**6, math.sqrt(9 + 250_000 + 503)),
        (1.0, 1, math.sqrt(1 + 1 / 4 + 1.5)),
    ],
)
def test_the_rounded_norm_is_the_published_formula(bound: float, d: int, expected: float) -> None:
    assert math.isclose(rounded_l2(bound, d), expected, rel_tol=1e-14)


def test_beta_is_the_published_choice() -> None:
    assert math.exp(-0.5) == BETA


@given(hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(-1000, 1000)))
def test_the_l1_norm_of_integers_is_within_its_bound(integers: npt.NDArray[np.int64]) -> None:
    if integers.any():
        l2 = float(np.linalg.norm(integers))
        assert np.abs(integers).sum() <= rounded_l1(l2, integers.size) * (1 + 1e-12)
    assert rounded_l1(3.0, 10**6) == 9.0
    assert rounded_l1(300.0, 4) == 600.0


@given(
    vector=hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(-10, 10, width=32)),
    bound=st.floats(1e-3, 100),
    scale=st.one_of(st.floats(1e-3, 1e6), st.integers(-8, 24).map(lambda e: 2.0**e)),
    number=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_rounded_integers_are_within_the_published_norm(
    vector: npt.NDArray[np.float32], bound: float, scale: float, number: int
) -> None:
    clipped = clipped_to(vector, bound)
    rounded = clip.integer_round(clipped, scale, bound, STREAM.child(f"{number}"), vector.size)
    assert rounded.dtype == np.int64
    assert rounded.shape == vector.shape
    assert (np.abs(rounded - clipped.astype(np.float64) * scale) < 1).all()
    if vector.size:
        largest = rounded_l2(scale * bound, vector.size)
        assert sum(int(x) ** 2 for x in rounded) <= Fraction(largest) ** 2
        again = clip.integer_round(clipped, scale, bound, STREAM.child(f"{number}"), vector.size)
        np.testing.assert_array_equal(again, rounded)


def test_rounding_without_the_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seeds round these halves to a norm above the bound: the condition is what prevents it."""
    vector = np.full(16, 0.5, np.float32)
    bound = 2.0
    largest = rounded_l2(bound, 16)

    def norms() -> list[float]:
        return [
            float(np.linalg.norm(clip.integer_round(vector, 1.0, bound, STREAM.child(f"{seed}"), 16)))
            for seed in range(400)
        ]

    assert max(norms()) <= largest
    monkeypatch.setattr(clip, "rounded_l2", lambda bound, d: math.inf)
    assert max(norms()) > largest


def test_rounding_is_unbiased_where_the_condition_never_bites() -> None:
    d, scale = 200_000, 8.0
    vector = np.full(d, 0.3, np.float32)
    bound = 2 * l2_norm(vector)
    rounded = clip.integer_round(vector, scale, bound, STREAM.child("mean"), d)
    up = float(np.float32(0.3)) * scale - 2
    assert set(np.unique(rounded)) == {2, 3}
    half = 6.1 * math.sqrt(up * (1 - up) / d)  # 1e-9 of a normal lies beyond
    assert abs(float(rounded.mean()) - 2 - up) < half
    assert abs(float(np.trunc(vector * scale).mean()) - 2 - up) > half
    negative = clip.integer_round(-vector, scale, bound, STREAM.child("negative"), d)
    assert abs(float(negative.mean()) + 2 + up) < half


class AlwaysUp(NoiseStream):
    """Uniform numbers that are all zero: every fraction goes up, which no condition allows here."""

    tries = 0
    """Of all of them: a stream is a frozen value."""

    def child(self, purpose: str) -> Self:
        assert purpose == str(self.tries)
        return self

    def uniform(self, size: int, offset: int = 0) -> Iterator[npt.NDArray[np.float64]]:
        AlwaysUp.tries += 1
        return iter([np.zeros(size)])


def test_rounding_ends_though_every_try_misses() -> None:
    vector = np.full(16, 0.8, np.float32)  # 1.6 steps: the nearest integer is not the one toward zero
    random = AlwaysUp(bytes(32), declared=True)
    vector[3] = -0.8
    rounded = clip.integer_round(vector, 2.0, 3.21, random, 16)
    assert random.tries == clip.REDRAWS
    np.testing.assert_array_equal(rounded, np.trunc(vector * 2))
    assert within(rounded, 6.42)
    assert BETA**clip.REDRAWS < 1.3e-14


def test_an_update_that_was_not_clipped_is_not_rounded() -> None:
    with raises(UpdateError, "norm of the update", says=("5.0", "4.9")):
        clip.integer_round(np.array([3, 4], np.float32), 1.0, 4.9, STREAM, 2)


def test_a_grid_too_fine_for_the_ring_and_other_nonsense_is_refused() -> None:
    vector, random = np.zeros(4, np.float32), STREAM
    assert not clip.integer_round(vector, 2.0**31, 2.0, random, 4).any()
    with raises(ValueError, "scale * l2_bound"):
        clip.integer_round(vector, 2.0**31, 2.1, random, 4)
    for value in (0.0, -1.0, math.inf, math.nan):
        with raises(ValueError, "scale"):
            clip.integer_round(vector, value, 1.0, random, 4)
        with raises(ValueError, "l2_bound"):
            clip.integer_round(vector, 1.0, value, random, 4)
        with raises(ValueError, "bound"):
            rounded_l2(value, 4)
        with raises(ValueError, "l2"):
            rounded_l1(value, 4)
