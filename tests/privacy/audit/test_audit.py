"""Audits: the paper's values, closed forms, coverage on mechanisms whose epsilon is known, and one that lies."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

from cloister.privacy.audit import lower_bounds as audit

DELTA = 1e-5


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Balle and Wang 2018, Theorem 8, for sensitivity 1."""

    def excess(epsilon: float) -> float:
        above = norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        below = norm.cdf(-1 / (2 * sigma) - epsilon * sigma)
        return float(above - math.exp(epsilon) * below - delta)

    return float(brentq(excess, 0, 100))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def bound_of_a_run(generator: np.random.Generator, m: int, k: int, sigma: float, delta: float) -> float:
    """Audit a Gaussian sum in which every canary has a coordinate of its own, the best case for the auditor."""
    included = generator.random(m) < 0.5
    scores = included + sigma * generator.standard_normal(m)
    correct = audit.right(scores, included, k) + audit.right(-scores, ~included, k)
    return audit.lower_bound(correct, 2 * k, m, delta)


@pytest.mark.parametrize(
    ("m", "guesses", "correct", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_the_paper_prints_these_bounds(
    m: int, guesses: int, correct: int, delta: float, published: float
) -> None:
    """arXiv:2305.08846v1, appendix D (p. 46) and section 7 (p. 28, which cuts the last digit off)."""
    assert abs(audit.lower_bound(correct, guesses, m, delta) - published) < 1e-3
    assert abs(audit.lower_bound(correct, guesses, m, 0.0) - published) > 1e-2  # delta is not a detail


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_the_p_value_is_the_formula_in_fractions(guesses: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, guesses))
    m = data.draw(st.integers(guesses, 40))
    odds = data.draw(st.integers(1, 20))
    delta = Fraction(data.draw(st.integers(0, 50)), 10_000)
    right = Fraction(odds, odds + 1)
    mass = [math.comb(guesses, w) * right**w * (1 - right) ** (guesses - w) for w in range(guesses + 1)]
    largest = max((sum(mass[correct - i : correct]) / i for i in range(1, correct + 1)), default=Fraction(0))
    expected = min(Fraction(1), sum(mass[correct:], Fraction(0)) + 2 * m * delta * largest)
    found = audit.p_value(correct, guesses, m, math.log(odds), float(delta))
    assert found == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0.5, 0.999))
def test_for_pure_privacy_all_correct_has_a_closed_form(guesses: int, confidence: float) -> None:
    """q^r = 1 - confidence, so epsilon = logit((1 - confidence)^(1/r))."""
    expected = max(0.0, logit((1 - confidence) ** (1 / guesses)))
    found = audit.lower_bound(guesses, guesses, guesses, 0.0, confidence)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.integers(2, 2000), st.data())
def test_for_pure_privacy_the_bound_is_clopper_and_pearsons(guesses: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(1, guesses - 1))
    lowest = float(beta.ppf(0.05, correct, guesses - correct + 1))
    expected = max(0.0, logit(lowest))
    assert audit.lower_bound(correct, guesses, 5000, 0.0) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 4), st.floats(0, 0.01), st.data())
def test_the_p_value_covers_mechanisms_that_use_their_delta(
    guesses: int, epsilon: float, delta: float, data: st.DataObject
) -> None:
    """Two (epsilon, delta)-DP mechanisms: each coin is leaked with probability delta, or all of them together."""
    correct = data.draw(st.integers(0, guesses))
    right = 1 / (1 + math.exp(-epsilon))
    covered = audit.p_value(correct, guesses, guesses, epsilon, delta) * (1 + 1e-9)
    assert binom.sf(correct - 1, guesses, delta + (1 - delta) * right) <= covered
    assert delta + (1 - delta) * binom.sf(correct - 1, guesses, right) <= covered


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 400), st.floats(0, 1e-3), st.data())
def test_more_right_guesses_never_lower_the_bound(
    guesses: int, abstained: int, delta: float, data: st.DataObject
) -> None:
    correct = data.draw(st.integers(0, guesses - 1))
    m = guesses + abstained
    fewer = audit.lower_bound(correct, guesses, m, delta)
    assert fewer <= audit.lower_bound(correct + 1, guesses, m, delta) + 1e-12
    assert audit.lower_bound(correct, guesses, m, delta, 0.99) <= fewer
    if fewer > 0:
        assert audit.p_value(correct, guesses, m, fewer * (1 - 1e-6), delta) < 0.05 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_the_bound_is_below_the_truth_in_95_of_100_runs(sigma: float) -> None:
    """Of 300 audits at 95 %, 15 may err; 28 or more would with probability 0.001."""
    repeats, generator = 300, np.random.default_rng(20)
    truth = gaussian_epsilon(sigma, DELTA)
    bounds = [bound_of_a_run(generator, 1000, 50, sigma, DELTA) for _ in range(repeats)]
    assert sum(bound > truth for bound in bounds) <= binom.ppf(0.999, repeats, 0.05)
    assert max(bounds) > 0  # an audit that never finds anything would pass the line above


def test_the_bound_errs_as_often_as_it_says_where_it_is_tight_and_the_test_would_see_more() -> None:
    """Randomised response, the mechanism that meets the pure bound: 2000 audits of 200 coins at epsilon 1."""
    repeats, coins, epsilon = 2000, 200, 1.0
    right = 1 / (1 + math.exp(-epsilon))
    counts = np.random.default_rng(21).binomial(coins, right, repeats)

    def errors(confidence: float) -> int:
        bounds = {int(n): audit.lower_bound(int(n), coins, coins, 0.0, confidence) for n in np.unique(counts)}
        return sum(bounds[int(n)] > epsilon for n in counts)

    allowed = binom.ppf(0.999, repeats, 0.05)
    assert 0.01 * repeats < errors(0.95) <= allowed
    assert errors(0.8) > allowed  # a bound at the wrong confidence is found out


def test_halved_noise_is_caught_and_honest_noise_is_not() -> None:
    claimed = gaussian_epsilon(1.0, DELTA)
    m, k = 50_000, 1500
    halved = [bound_of_a_run(np.random.default_rng(seed), m, k, 0.5, DELTA) for seed in range(10)]
    honest = [bound_of_a_run(np.random.default_rng(seed), m, k, 1.0, DELTA) for seed in range(10)]
    assert min(halved) > claimed > max(honest)
    assert min(halved) < gaussian_epsilon(0.5, DELTA)


def test_coins_that_are_not_fair_break_the_bound() -> None:
    """With nine canaries of ten in the data, blind guesses refute a mechanism that reveals nothing."""
    generator, m = np.random.default_rng(22), 1000
    fair, unfair = generator.random(m) < 0.5, generator.random(m) < 0.9
    assert audit.lower_bound(audit.right(np.zeros(m), fair, 300), 300, m, DELTA) == 0
    assert audit.lower_bound(audit.right(np.zeros(m), unfair, 300), 300, m, DELTA) > 1


def test_the_claims_epsilon_is_the_accountants() -> None:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant().compose(GaussianDpEvent(1.0))
    assert gaussian_epsilon(1.0, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


def runs(
    generator: np.random.Generator, count: int, sigma: float, threshold: float
) -> tuple[int, int, int, int]:
    """Many runs with and without a target of length 1."""
    without = sigma * generator.standard_normal(count)
    present = 1 + sigma * generator.standard_normal(count)
    return int((without > threshold).sum()), count, int((present <= threshold).sum()), count


def test_many_runs_stay_below_the_truth_and_catch_halved_noise() -> None:
    truth, repeats = gaussian_epsilon(1.0, DELTA), 300
    generator = np.random.default_rng(23)
    honest = [audit.distinguish(*runs(generator, 20_000, 1.0, 2.5), DELTA) for _ in range(repeats)]
    assert sum(bound > truth for bound in honest) <= binom.ppf(0.999, repeats, 0.05)
    assert min(honest) > 1
    assert audit.distinguish(*runs(generator, 1_000_000, 0.5, 1.75), DELTA) > truth


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_many_runs_use_both_limits(count: int, data: st.DataObject) -> None:
    """Written out for each side from the beta quantiles; swapping the two kinds of error changes nothing."""
    false_positives, false_negatives = (data.draw(st.integers(0, count)) for _ in range(2))
    found = audit.distinguish(false_positives, count, false_negatives, count, 0.01)
    limits = [
        1.0 if errors == count else float(beta.isf(0.025, errors + 1, count - errors))
        for errors in (false_positives, false_negatives)
    ]
    odds = [(1 - 0.01 - limits[0]) / limits[1], (1 - 0.01 - limits[1]) / limits[0]]
    assert found == pytest.approx(max(0.0, *(math.log(ratio) for ratio in odds if ratio > 0), 0.0), abs=1e-9)
    assert found == audit.distinguish(false_negatives, count, false_positives, count, 0.01)


def test_no_errors_in_n_runs_has_a_closed_form() -> None:
    """The upper limit of 0 errors in n is 1 - level^(1/n)."""
    limit = 1 - 0.025 ** (1 / 1000)
    assert audit.distinguish(0, 1000, 0, 1000, 0.0) == pytest.approx(math.log((1 - limit) / limit))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.data())
def test_guesses_are_the_highest(scores: list[float], data: st.DataObject) -> None:
    values, guesses = np.asarray(scores), data.draw(st.integers(0, len(scores)))
    highest: npt.NDArray[np.bool_] = np.arange(len(scores)) >= len(scores) - guesses
    truth = np.zeros(len(scores), np.bool_)
    truth[np.argsort(values, kind="stable")] = highest
    assert audit.right(values, truth, guesses) == guesses
    assert audit.right(values, ~truth, guesses) == 0
