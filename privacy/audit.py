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

Guesses see half of the noise missing, and not a tenth. So an audit also looks at what it can see of the mechanism's
factors themselves, and compares them with what was charged (`Fit`): the noise where no canary is, the length to which
canaries are clipped, how often they are drawn, and the number of releases. These are tests of fit at a stated level and
say nothing of epsilon: they assume that the noise is normal, which Skellam noise of a large variance is to the accuracy
of the tests (its excess kurtosis is 1 / variance).

A bound is valid only if everything that determines the guesses (the score, the number of guesses, the threshold) was
fixed before the coins were seen. To try several and keep the best, divide 1 - confidence by their number. Refused:
bounds from a hypothesised trade-off curve (Mahloujifar et al. 2025), which are tighter, but hold for a mechanism that
is assumed to be the one that ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.protocol.errors import CloisterError

ALARM = 1 - 5e-5
"""Confidence of the bound that refutes a claim: guesses do so for honest code with a probability of 5e-5 at most."""
MISFIT = 5e-5
"""Probability with which any factor of honest code does not fit its charge."""
FALSE_ALARM = 1 - ALARM + MISFIT
"""Probability of an alarm in an audit of honest code, at most."""
_BISECTIONS = 60


def guess(scores: npt.ArrayLike, k_plus: int, k_minus: int) -> npt.NDArray[np.int8]:
    """Guess the canaries with the most extreme scores: the highest were in the data, the lowest were not.

    Args:
        scores: Shape (m,), finite: higher for a canary that looks more like training data.
        k_plus: Number of canaries to guess as in.
        k_minus: Number of canaries to guess as out.

    Returns:
        Shape (m,): 1 for in, -1 for out, 0 for no guess. Equal scores are taken in their order.

    Raises:
        CloisterError: the scores are not one finite vector, or there are more guesses than canaries.
    """
    scores_m = np.asarray(scores, dtype=np.float64)
    if scores_m.ndim != 1 or not np.isfinite(scores_m).all():
        raise CloisterError(
            "scores", f"an array {list(scores_m.shape)}", expected="one vector of finite numbers"
        )
    if k_plus < 0 or k_minus < 0 or k_plus + k_minus > scores_m.size:
        raise CloisterError(
            "k_plus and k_minus",
            [k_plus, k_minus],
            expected=f"0 or more each, and no more than the {scores_m.size} canaries together",
        )
    order = np.argsort(scores_m, kind="stable")
    guesses_m = np.zeros(scores_m.size, np.int8)
    guesses_m[order[:k_minus]] = -1
    guesses_m[order[scores_m.size - k_plus :]] = 1
    return guesses_m


def count(guesses: npt.ArrayLike, included: Sequence[bool] | npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Count (correct, guesses): how many guesses were right, and how many there were.

    Args:
        guesses: Shape (m,), of 1, -1 and 0, as `guess` gives them.
        included: Shape (m,), bool: the coins.

    Raises:
        CloisterError: the number of coins is not the number of canaries.
    """
    guesses_m, included_m = np.asarray(guesses), np.asarray(included, dtype=np.bool_)
    if guesses_m.shape != included_m.shape:
        raise CloisterError(
            "included",
            list(included_m.shape),
            expected=f"one coin for each guess, an array {list(guesses_m.shape)}",
        )
    right_m = guesses_m == np.where(included_m, 1, -1)
    return int(right_m.sum()), int(np.count_nonzero(guesses_m))


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

    Raises:
        CloisterError: not 0 <= v <= r <= m, or epsilon or delta is out of range.
    """
    _check_counts(correct, guesses, m)
    _check_delta(delta)
    if not epsilon >= 0:
        raise CloisterError("epsilon", epsilon, expected="0 or more")
    return _p_value(correct, guesses, m, epsilon, delta)


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

    Raises:
        CloisterError: not 0 <= v <= r <= m, or delta or confidence is out of range.
    """
    _check_counts(correct, guesses, m)
    _check_delta(delta)
    level = 1 - _checked_confidence(confidence)
    if _p_value(correct, guesses, m, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while _p_value(correct, guesses, m, high, delta) < level:  # ends: P[W >= v] goes to 1
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _p_value(correct, guesses, m, middle, delta) < level:
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

    Raises:
        CloisterError: more errors than runs, or delta or confidence is out of range.
    """
    _check_delta(delta)
    level = (1 - _checked_confidence(confidence)) / 2
    fpr = _upper_limit("false_positives", false_positives, negatives, level)
    fnr = _upper_limit("false_negatives", false_negatives, positives, level)
    bounds = (
        math.log((1 - delta - one) / other) if 1 - delta > one else 0.0
        for one, other in ((fpr, fnr), (fnr, fpr))
    )
    return max(0.0, *bounds)


@dataclass(frozen=True)
class Check:
    """One factor between charge and noise, as it was applied."""

    what: str
    """The factor, in words."""
    found: float
    """Its value as applied."""
    charged: float
    """Its value as charged."""
    p: float
    """Probability of a value as far from the charge, or further, to the side that protects less."""


class Fit:
    """What was released, against what was charged: noise, canaries, draws, releases.

    Values are in clipping norms. With n samples x of noise where no canary is, of which n_c in k coordinates c, and
    noise multiplier z:

        Q = sum of x^2,    Q / z^2 ~ chi2(n)                              less noise makes Q smaller
        the same in each of r releases; the smallest of r p-values p      one release with less noise
        is below p with probability 1 - (1 - p)^r
        S = sum over c of (sum of x in c)^2 / n_c,
            (S / k) / ((Q - S) / (n - k)) ~ F(k, n - k)                   a release whose noise repeats another's, or
                                                                          cancels it, makes this larger or smaller
        mean y of the j canaries that were in a release,
            (y - 1) / sqrt(Q / n / j) ~ t(n) at most                      a longer canary makes it larger
        draws ~ Binomial(places, q) at most

    Args:
        coordinates: Coordinates of a release that are looked at.
    """

    def __init__(self, coordinates: int) -> None:
        self._sums = np.zeros(coordinates)
        self._counts = np.zeros(coordinates, np.int64)
        self._squares = 0.0
        self._each: list[tuple[float, int]] = []  # of each release: sum of squares, samples
        self._canaries = 0.0
        self.releases = 0
        """Releases seen."""
        self.drawn = 0
        """Canaries in them."""

    def see(self, noise: npt.NDArray[np.float64], free: npt.NDArray[np.bool_]) -> None:
        """Take a release: (coordinates,) values less all that is known, and where they are noise alone."""
        alone = np.where(free, noise, 0.0)
        self._sums += alone
        self._counts += free
        self._squares += float(alone @ alone)
        self._each.append((float(alone @ alone), int(free.sum())))
        self.releases += 1

    def see_canaries(self, values: npt.NDArray[np.float64]) -> None:
        """Take (j,) values of which each is a canary's length, at most 1, and noise."""
        self._canaries += float(values.sum())
        self.drawn += len(values)

    @property
    def samples(self) -> int:
        """n."""
        return int(self._counts.sum())

    def checks(
        self, z: float, released: int, charged: int, places: int = 0, rate: float = 1.0
    ) -> tuple[Check, ...]:
        """Each factor, against what was charged.

        Args:
            z: The noise multiplier that was charged.
            released: Releases that cost something.
            charged: Those that were charged.
            places: How often a canary could be drawn; 0: canaries are not drawn.
            rate: q.
        """
        from scipy import stats

        n, coordinates = self.samples, self._counts > 0
        k = int(coordinates.sum())
        between = float((self._sums[coordinates] ** 2 / self._counts[coordinates]).sum())
        deviation = math.sqrt(self._squares / max(n, 1))
        missing = float(stats.chi2.cdf(self._squares / z**2, n)) if n else 0.0
        found = [
            Check("standard deviation of the noise, in clipping norms", deviation, z, missing),
            Check("releases", released, charged, 1.0 if released <= charged else 0.0),
        ]
        seen = [(squares, samples) for squares, samples in self._each if samples]
        if len(seen) > 1:
            p, least = min(
                (float(stats.chi2.cdf(squares / z**2, samples)), math.sqrt(squares / samples))
                for squares, samples in seen
            )
            any_release = -math.expm1(len(seen) * math.log1p(-p)) if p < 1 else 1.0
            found.append(Check("least standard deviation of the noise in a release", least, z, any_release))
        if n > k:
            ratio = (between / k) / max((self._squares - between) / (n - k), 1e-300)
            tails = stats.f.cdf(ratio, k, n - k), stats.f.sf(ratio, k, n - k)
            found.append(
                Check("variance of the noise summed over releases", ratio, 1.0, 2 * float(min(tails)))
            )
        if self.drawn:
            length = self._canaries / self.drawn
            above = (length - 1) * math.sqrt(self.drawn) / max(deviation, 1e-9)
            found.append(
                Check("length of a clipped canary", length, 1.0, float(stats.t.sf(above, max(n, 1))))
            )
        if places:
            often = float(stats.binom.sf(self.drawn - 1, places, rate))
            found.append(Check("rate at which canaries are drawn", self.drawn / places, rate, often))
        return tuple(found)


def misfits(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks that fail; of honest code any does with probability `MISFIT` at most."""
    return tuple(check for check in checks if check.p < MISFIT / len(checks))


def problem(checks: Sequence[Check]) -> str:
    """The checks that fail, in words; empty if none does."""
    return "; ".join(
        f"{check.what}: {check.found:.4g}, charged {check.charged:.4g}" for check in misfits(checks)
    )


def visible(samples: int, checks: int, power: float = 0.99) -> float:
    """The part of the noise's standard deviation whose lack one of the checks finds with probability `power`.

    Args:
        samples: n.
        checks: Checks that share `MISFIT`.
        power: That probability.
    """
    from scipy.stats import chi2

    return 1 - math.sqrt(float(chi2.ppf(MISFIT / checks, samples) / chi2.ppf(power, samples)))


def _p_value(correct: int, guesses: int, m: int, epsilon: float, delta: float) -> float:
    from scipy.stats import binom

    if correct == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return tail
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)  # W = v - 1, v - 2, ..., 0
    share = float((np.cumsum(below) / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * m * delta * share)


def _upper_limit(field: str, errors: int, runs: int, level: float) -> float:
    """The rate at which this few errors, or fewer, have the probability `level` (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    if not 0 <= errors <= runs or runs < 1:
        raise CloisterError(
            field, errors, expected=f"0 to {runs}, the number of runs, which must be at least 1"
        )
    return 1.0 if errors == runs else float(beta.ppf(1 - level, errors + 1, runs - errors))


def _check_counts(correct: int, guesses: int, m: int) -> None:
    if not 0 <= correct <= guesses <= m:
        raise CloisterError(
            "correct, guesses and canaries",
            [correct, guesses, m],
            expected="correct <= guesses <= canaries, each at least 0",
        )


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise CloisterError("delta", delta, expected="from 0 to below 1")


def _checked_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise CloisterError("confidence", confidence, expected="between 0 and 1")
    return confidence
