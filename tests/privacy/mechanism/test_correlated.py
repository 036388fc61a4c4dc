"""Correlated noise: the matrix against a reference and against brute force, and its rows against the matrix product."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from scipy.stats import norm

from cloister.privacy.accounting.accountant import spent
from cloister.privacy.mechanism.clip import rounded_l2
from cloister.privacy.mechanism.correlated import (
    Blt,
    CorrelatedNoise,
    Participation,
    loss,
    optimal,
    sensitivity,
)
from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Gaussian,
    SampledGaussian,
    from_json,
    to_json,
)
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import central
from cloister.protocol.errors import AccountingError
from cloister.protocol.messages.blocks import BLOCK
from cloister.tests.tools.raises import raises

SECRET = NoiseStream.fresh(lambda size: bytes(range(size)))
REFERENCE = Participation(2000, 342, 6)


def matrix(blt: Blt, rounds: int) -> np.ndarray:
    """C, by its definition from theta and omega."""
    powers = [
        sum(w * t ** (u - 1) for w, t in zip(blt.scale, blt.decay, strict=True)) for u in range(1, rounds)
    ]
    return np.tril(toeplitz([1.0, *powers]))


@st.composite
def blts(draw: st.DrawFn) -> Blt:
    """Matrices of up to three buffers whose decays are not too close."""
    buffers = draw(st.integers(0, 3))
    cuts = draw(st.lists(st.integers(1, 99), min_size=2 * buffers, max_size=2 * buffers, unique=True))
    decays = [cut / 100 for cut in sorted(cuts, reverse=True)]
    return Blt(tuple(decays[::2]), tuple(decays[1::2]))


# The matrix.


def test_the_loss_is_that_of_jax_privacy() -> None:
    """jax-privacy 2.0.0: `buffered_toeplitz.optimize(n=2000, min_sep=342, max_participations=6, error="max")`."""
    assert loss(Blt(), REFERENCE) == pytest.approx(109.54451150103323, rel=1e-8)
    assert loss(Blt(), REFERENCE) == pytest.approx(math.sqrt(2000 * 6), rel=1e-8)
    found = optimal(REFERENCE, 6)
    assert loss(found, REFERENCE) == pytest.approx(10.72251743234035, abs=1e-6)
    assert found.decay == pytest.approx((0.99535711, 0.81385087), abs=1e-5)
    assert found.scale == pytest.approx((0.12714443, 0.32938596), abs=1e-5)
    alone = optimal(REFERENCE, 1)
    assert loss(alone, REFERENCE) == pytest.approx(11.486609905963753, abs=1e-6)
    assert len(optimal(REFERENCE, 0).decay) == 0


@pytest.mark.parametrize("rounds", [2, 10, 300])
def test_one_participation_comes_near_the_best_of_all_toeplitz_matrices(rounds: int) -> None:
    """That matrix is the root of the prefix sum (Fichtenberger et al. 2023): c_k = (-1)^k binomial(-1/2, k)."""
    k = np.arange(1, rounds)
    best = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    pattern = Participation(rounds, 1, 1)
    assert best @ best <= loss(optimal(pattern, 6), pattern) <= (best @ best) * 1.01


@given(blt=blts(), rounds=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_matrix_and_its_inverse_are_inverse(blt: Blt, rounds: int) -> None:
    built = np.tril(toeplitz(blt.coefficients(rounds)))
    np.testing.assert_allclose(built, matrix(blt, rounds), atol=1e-12)
    inverse = np.tril(toeplitz(blt.inverse_coefficients(rounds)))
    np.testing.assert_allclose(built @ inverse, np.eye(rounds), atol=1e-9)
    assert (np.diff(built[:, 0]) <= 0).all()
    assert (built[:, 0] >= 0).all()


@given(blt=blts(), rounds=st.integers(1, 8), separation=st.integers(1, 9), most=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_sensitivity_is_the_largest_of_all_patterns(
    blt: Blt, rounds: int, separation: int, most: int
) -> None:
    c, largest = matrix(blt, rounds), 0.0
    for size in range(1, most + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(late - early >= separation for early, late in itertools.pairwise(chosen)):
                for signs in itertools.product((1, -1), repeat=size):
                    largest = max(largest, float(np.linalg.norm(c[:, chosen] @ signs)))
    found = sensitivity(blt, Participation(rounds, separation, most))
    assert largest <= found <= largest * (1 + 1e-8)


@given(blt=blts(), rounds=st.integers(1, 12), separation=st.integers(1, 5), most=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_the_worst_deviation_of_a_prefix_sum(
    blt: Blt, rounds: int, separation: int, most: int
) -> None:
    pattern = Participation(rounds, separation, most)
    prefixes = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(blt, rounds))
    worst = float(np.linalg.norm(prefixes, axis=1).max())
    assert loss(blt, pattern) == pytest.approx(worst * sensitivity(blt, pattern), rel=1e-7)


@pytest.mark.parametrize(
    ("rounds", "separation", "most"),
    [(1, 1, 1), (10, 2, 5), (40, 5, 8), (100, 4, 25), (500, 50, 10), (30, 1, 30)],
)
def test_correlation_never_makes_the_loss_larger(rounds: int, separation: int, most: int) -> None:
    pattern = Participation(rounds, separation, most)
    found = optimal(pattern, 6)
    assert loss(found, pattern) <= loss(Blt(), pattern)
    if separation > 1:
        assert loss(found, pattern) < 0.9 * loss(Blt(), pattern)


@pytest.mark.parametrize(
    ("decay", "inverse"),
    [((0.5,), (0.6,)), ((1.1,), (0.5,)), ((0.5,), ()), ((0.9, 0.8), (0.7, 0.6)), ((0.5,), (0.0,))],
)
def test_decays_that_do_not_interlace_are_refused(
    decay: tuple[float, ...], inverse: tuple[float, ...]
) -> None:
    """With them the sensitivity could be that of another pattern."""
    with raises(AccountingError, "decay"):
        Blt(decay, inverse)


# The rows.


@pytest.mark.parametrize("size", [5, BLOCK + 3])
@pytest.mark.parametrize("buffers", [0, 1, 3])
def test_the_rows_are_those_of_the_matrix_product(size: int, buffers: int) -> None:
    rounds, sigma = 6, 3e5
    blt = Blt((0.99, 0.8, 0.4)[:buffers], (0.9, 0.6, 0.1)[:buffers])
    z = np.stack([SECRET.child(f"round-{t}").gaussian(size, 1.0) for t in range(1, rounds + 1)])
    expected = sigma * np.linalg.solve(matrix(blt, rounds), z)
    noise = CorrelatedNoise(blt, SECRET, size)
    for number in range(1, rounds + 1):
        total = np.full(size, 2**31 - 1, np.uint32)
        noise.row(number).add_to(total, sigma)
        steps = (total - np.uint32(2**31 - 1)).view(np.int32)
        np.testing.assert_allclose(steps, expected[number - 1], rtol=0, atol=0.5 + 1e-6)


def test_a_row_depends_on_the_key_and_the_round_alone() -> None:
    blt = Blt((0.99, 0.8), (0.9, 0.6))

    def row(noise: CorrelatedNoise, number: int) -> np.ndarray:
        total = np.zeros(50, np.uint32)
        noise.add(total, 1e6, number)
        return total

    straight = CorrelatedNoise(blt, SECRET, 50)
    rows = [row(straight, number) for number in range(1, 6)]
    for order in (
        [5, 5, 1, 3, 2],
        [4],
        [2, 5],
    ):  # a resumed process, repeated rounds, rounds that were passed over
        other = CorrelatedNoise(blt, SECRET, 50)
        for number in order:
            assert np.array_equal(row(other, number), rows[number - 1])
    assert not np.array_equal(row(CorrelatedNoise(blt, SECRET.child("another"), 50), 1), rows[0])


def test_a_row_of_another_length_or_round_is_refused() -> None:
    noise = CorrelatedNoise(Blt((0.9,), (0.5,)), SECRET, 4)
    with raises(ValueError, "row 1 for (5,)"):
        noise.add(np.zeros(5, np.uint32), 1.0, 1)
    with raises(ValueError, "row 0 for (4,)"):
        noise.add(np.zeros(4, np.uint32), 1.0, 0)


# The mechanism of a round, and what it costs.


def test_a_mechanism_takes_no_noise_but_its_own_kind() -> None:
    """Rows where rounds are independent would be too little noise, and a stream where they are not would not cancel."""
    pattern = Participation(10, 2, 5)
    blt = optimal(pattern, 6)
    plain = central(1.0, 4, 3, 32)
    correlated = central(1.0, 4, 3, 32, correlated=(blt, pattern))
    total = np.zeros(4, np.uint32)
    with raises(ValueError, "a row"):
        plain.add_noise(total, CorrelatedNoise(blt, SECRET, 4).row(1))
    with raises(ValueError, "a stream"):
        correlated.add_noise(total, SECRET)
    with raises(ValueError, "row 1 for (4,)"):
        correlated.add_noise(total, CorrelatedNoise(blt, SECRET, 3).row(1))
    assert not total.any()


def test_the_mean_is_divided_by_the_same_number_in_each_round() -> None:
    pattern = Participation(10, 2, 5)
    blt = optimal(pattern, 6)
    mechanism = central(1.0, 400, 4, 32, correlated=(blt, pattern))
    for sites in (3, 4):
        mean, clip = mechanism.decode(np.full(400, 0.25, np.float32), sites, 2.0)
        np.testing.assert_allclose(mean, 2.0 * 0.25 * sites / 4, rtol=1e-5)
        assert clip == 2.0


def test_a_matrix_from_another_machine_gets_the_noise_that_it_needs() -> None:
    pattern = Participation(10, 2, 5)
    mechanism = central(1.0, 4, 3, 32, correlated=(optimal(pattern, 6), pattern))
    other = Blt((0.9,), (0.1,))
    assert sensitivity(other, pattern) > sensitivity(optimal(pattern, 6), pattern)
    moved = mechanism.correlated_by(other, pattern)
    assert moved.correlation == other
    assert moved.scale == mechanism.scale
    bound = rounded_l2(mechanism.scale, 4) / mechanism.scale
    assert moved.deviation == pytest.approx(sensitivity(other, pattern) * bound, rel=1e-12)


@pytest.mark.parametrize("buffers", [1, 6])
@pytest.mark.parametrize(
    ("rounds", "separation", "most"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (10, 2, 5),
        (40, 5, 8),
        (100, 1, 100),
        (500, 50, 1),
        (500, 5, 100),
        (2000, 342, 6),
    ],
)
def test_the_scale_has_room_for_the_noise_and_does_not_depend_on_the_matrix(
    rounds: int, separation: int, most: int, buffers: int
) -> None:
    """Sites and coordinator find the matrix each on its own machine, and must code with the same scale."""
    pattern, n, z, bits = Participation(rounds, separation, most), 20, 1.5, 32
    blt = optimal(pattern, buffers)
    mechanism = central(z, 1000, n, bits, correlated=(blt, pattern))
    longest = np.linalg.norm(np.linalg.inv(matrix(blt, rounds))[-1])
    noise = mechanism.scale * mechanism.deviation * float(longest)
    assert n * (mechanism.scale + 1) + 12 * noise < 2 ** (bits - 1) < 32 * (n * mechanism.scale + 12 * noise)
    assert central(z, 1000, n, bits, correlated=(Blt((0.9,), (0.1,)), pattern)).scale == mechanism.scale


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
def test_a_run_costs_what_one_gaussian_mechanism_does(z: float) -> None:
    event = CorrelatedGaussian(z, 2000, 342, 6)
    epsilon = spent([event], 1e-5).epsilon
    assert epsilon == spent([Gaussian(z, 1)], 1e-5).epsilon
    # Balle and Wang 2018, Theorem 8.
    a, b = 1 / (2 * z), epsilon * z
    assert norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) == pytest.approx(1e-5, rel=1e-5)
    # Two runs, and a run with releases for one record, which doubles its sensitivity.
    assert spent([event, event], 1e-5).epsilon == spent([Gaussian(z, 2)], 1e-5).epsilon
    record = SampledGaussian(5.0, 1.0, 1)
    assert spent([event, record], 1e-5).epsilon == spent([Gaussian(z, 1), record], 1e-5).epsilon
    assert spent([event, record], 1e-5).epsilon > spent([Gaussian(z / 2, 1)], 1e-5).epsilon


def test_the_event_survives_its_json() -> None:
    event = CorrelatedGaussian(1.5, 20, 4, 5)
    assert from_json(to_json([event])) == (event,)
    for wrong in ((0.0, 20, 4, 5), (1.5, 0, 4, 5), (1.5, 20, 0, 5), (1.5, 20, 4, 0)):
        with pytest.raises(AccountingError):
            CorrelatedGaussian(*wrong)
