"""Audits: lower bounds on epsilon from guesses about what was in the data, to compare with the claim.

An accountant's epsilon is an upper bound that is valid only if the code does what the accountant assumes. An audit
plays the membership game that differential privacy bounds and counts the correct guesses: more of them than
(epsilon, delta) allows refute the claim, at a stated confidence. A count within the bound proves nothing; an audit
never shows that a mechanism is private.

There are two games. In one run (Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS
2023, arXiv:2305.08846): each of m canaries is put into the data by its own fair coin; the auditor sees the released
models, scores every canary, guesses some coins and abstains from the others. In many runs (Jagielski, Ullman and Oprea
2020; Nasr et al. 2021): the mechanism is run repeatedly with and without one target, and a test distinguishes the two.
The second game needs thousands of runs and is the reference for mechanisms that are cheap to run.

Guesses see half of the noise missing, and not a tenth. So an audit also compares what was released with what was
charged (`fit.py`).

A bound is valid only if everything that determines the guesses (the score, the number of guesses, the threshold) was
fixed before the coins were seen. To try several and keep the best, divide 1 - confidence by their number. Refused:
bounds from a hypothesised trade-off curve (Mahloujifar et al. 2025), which are tighter, but hold for a mechanism that
is assumed to be the one that ran.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, binom

ALARM = 1 - 5e-5
"""Confidence of the bound that refutes a claim: guesses do so for honest code with a probability of 5e-5 at most."""
_BISECTIONS = 60


def right(scores: npt.NDArray[np.float64], included: npt.NDArray[np.bool_], guesses: int) -> int:
    """How many guesses are right, of guesses that the canaries with the highest scores were in the data.

    Args:
        scores: Shape (m,), finite: higher for a canary that looks more like training data.
        included: Shape (m,): the coins.
        guesses: How many canaries to guess as in; equal scores are taken in their order.
    """
    assert np.isfinite(scores).all(), "a score that is no number has no place in the order"
    order = np.argsort(scores, kind="stable")
    return int(included[order[scores.size - guesses :]].sum())


def p_value(correct: int, guesses: int, m: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of this many correct guesses, or more, against any (epsilon, delta)-DP mechanism.

    Steinke, Nasr and Jagielski 2023, Theorem 3.1 (appendix D of the arXiv version has it in code): with
    W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),

        P[correct >= v] <= P[W >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= W < v] / i.

    Neighbours are data sets with and without one canary.

    Args:
        correct: v, right guesses.
        guesses: r, guesses that were made.
        m: Canaries, each included by its own fair coin, guessed or not.
        epsilon: Of the mechanism under test, 0 or more.
        delta: Of the mechanism under test.
    """
    if correct == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return tail
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)  # W = v - 1, v - 2, ..., 0
    share = float((np.cumsum(below) / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * m * delta * share)


def lower_bound(correct: int, guesses: int, m: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that one run's guesses refute: the mechanism is (epsilon, delta)-DP for no smaller one.

    Found by bisection of `p_value` = 1 - confidence, from below. The statement errs with probability 1 - confidence at
    most: a mechanism that is (epsilon, delta)-DP is so for every larger epsilon, and for fixed m and r what refutes one
    number of correct guesses refutes every larger number.

    Args:
        correct: v, right guesses.
        guesses: r, guesses that were made: fixed before the coins were seen.
        m: Canaries, each included by its own fair coin, guessed or not.
        delta: Delta at which epsilon is stated.
        confidence: Probability with which the bound is true.

    Returns:
        Epsilon; 0 where nothing is refuted.
    """
    assert 0 <= correct <= guesses <= m, "a guess is of one canary"
    level = 1 - confidence
    if p_value(correct, guesses, m, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(correct, guesses, m, high, delta) < level:  # ends: P[W >= v] goes to 1
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if p_value(correct, guesses, m, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low


def distinguish(
    false_positives: int,
    negatives: int,
    false_negatives: int,
    positives: int,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """The largest epsilon that many independent runs with and without one target refute.

    A test between the two of an (epsilon, delta)-DP mechanism has (Kairouz, Oh and Viswanath 2015, Theorem 2.1)

        FPR + e^epsilon FNR >= 1 - delta   and   FNR + e^epsilon FPR >= 1 - delta,

    so epsilon >= max(ln((1 - delta - FPR) / FNR), ln((1 - delta - FNR) / FPR)). Both rates are replaced by their upper
    Clopper-Pearson limits, each at half of 1 - confidence.

    Args:
        false_positives: Runs without the target in which the test said that it was there.
        negatives: Runs without the target.
        false_negatives: Runs with the target in which the test said that it was not there.
        positives: Runs with the target.
        delta: Delta at which epsilon is stated.
        confidence: Probability with which the bound is true.

    Returns:
        Epsilon; 0 where nothing is refuted.
    """
    level = (1 - confidence) / 2
    fpr = _upper_limit(false_positives, negatives, level)
    fnr = _upper_limit(false_negatives, positives, level)
    bounds = (
        math.log((1 - delta - one) / other) if 1 - delta > one else 0.0
        for one, other in ((fpr, fnr), (fnr, fpr))
    )
    return max(0.0, *bounds)


def _upper_limit(errors: int, runs: int, level: float) -> float:
    """The rate at which this few errors, or fewer, have the probability `level` (Clopper and Pearson 1934)."""
    return 1.0 if errors == runs else float(beta.ppf(1 - level, errors + 1, runs - errors))
