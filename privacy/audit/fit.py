"""Tests of fit: what was released, against what was charged for it.

An audit's guesses (`audit.py`) see half of the noise missing, and not a tenth. So an audit also measures the factors of
the mechanism as they were applied. Each is one `Check`: a value, the value that is charged, and the probability of a
value as far from it if the code is honest. A check whose probability is below `LEVEL` does not fit. These tests say
nothing of epsilon.

Two kinds of factors are exact: how far one unit moves what is released under the same noise (`change`), and counts
(`counted`). Draws and noise are random. Draws are tested over all units and steps (`Draws`): that each unit is drawn at
the rate, on its own. Noise is tested over all coordinates and releases (`Noise`): that there is enough of it, and that
no part of it follows from another part, because a difference of two parts would be free of it.
The tests assume normal noise. To their accuracy so are normal noise in whole steps of which its deviation has many, and
Skellam noise of a large variance (its excess kurtosis is 1 / variance).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, minimize_scalar
from scipy.sparse import csr_array, triu
from scipy.special import logsumexp, rel_entr
from scipy.stats import beta, binom, chi2, norm

from cloister.protocol.errors import CloisterError

MISFIT = 5e-5
"""Probability with which any check of honest code fails, at most."""
MOST_CHECKS = 18
"""Checks of one audit, at most."""
LEVEL = MISFIT / MOST_CHECKS
"""Probability with which one check of honest code fails, at most."""
_POWER = 0.99
_SKETCH = 4096
"""Projections of a release."""
_FEWEST = 64
"""Projections of which the variance is compared."""
_COMPARED = 4096
"""Releases that are compared with each other."""
_AROUND = 8
"""Standard deviations around the mean size of a batch within which its law is taken; beyond is a failure."""
_STEEPEST = 50.0
"""Where the exponent of a bound is looked for, at a difference of one unit: then other sizes count no more."""
_LARGEST = 256
"""Samples of a release whose magnitudes are compared, the largest: they are rare, so equal ones are rarer."""
_EQUAL = 2.0**-18
"""Largest difference of equal magnitudes: what is released is rounded to float32."""
_BEFORE = 256
"""Releases before a release with which its coordinates are compared one by one."""
_PLACES = 4096
"""Coordinates of them, drawn once."""
_PEAK = 0.85
"""Above the greatest density of |N(0, 1)|, by what integers of little noise need."""
_HAZARD = 8.0
"""Greatest hazard rate of |N(0, 1)| up to 7.8, which a sample exceeds with a probability of 1e-14."""


@dataclass(frozen=True)
class Check:
    """One factor between charge and release, as it was applied."""

    what: str
    """The factor, in words."""
    found: float
    """Its value as applied."""
    charged: float
    """Its value as charged."""
    p: float
    """Probability of a value as far from the charge, or further; of amounts of noise only to the side that protects
    less."""
    visible: float | None = None
    """The smallest error, as a part of the charged value and to the side that protects less, that is found with a
    probability of 0.99; None: unknown."""


def misfits(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks that fail; of honest code any does with probability `MISFIT` at most."""
    assert len(checks) <= MOST_CHECKS, "each check has its part of MISFIT"
    return tuple(check for check in checks if check.p < LEVEL)


def problem(checks: Sequence[Check]) -> str:
    """The checks that fail, in words; empty if none does."""
    return "; ".join(
        f"{check.what}: {check.found:.4g}, charged {check.charged:.4g}" for check in misfits(checks)
    )


def counted(what: str, found: int, charged: int) -> Check:
    """A number that may not be above what is charged."""
    return Check(what, found, charged, 1.0 if found <= charged else 0.0)


def change(what: str, found: float, charged: float, rounding: float = 0.0) -> Check:
    """The length by which one unit moves what is released, under the same noise.

    Args:
        what: The factor, in words.
        found: The length.
        charged: The largest length that is charged for.
        rounding: The largest error of `found`.
    """
    limit = charged + rounding
    visible = limit / found - 1 if 0 < found <= limit else None
    return Check(what, found, charged, 1.0 if found <= limit else 0.0, visible)


def rate(what: str, drawn: int, places: int, charged: float) -> Check:
    """How often something is drawn: Binomial(places, charged). A lower rate is no sampler as charged either.

    Args:
        what: The factor, in words.
        drawn: How often it was drawn.
        places: How often it could be drawn.
        charged: The rate, above 0 and below 1.
    """
    least = int(binom.isf(LEVEL / 2, places, charged)) + 1  # draws that fail

    def missed(higher: float) -> float:
        return float(binom.cdf(least - 1, places, higher)) - (1 - _POWER)

    seen = brentq(missed, charged, 1.0) / charged - 1 if missed(1.0) < 0 else None
    tails = float(binom.cdf(drawn, places, charged)), float(binom.sf(drawn - 1, places, charged))
    return Check(what, drawn / places, charged, min(1.0, 2 * min(tails)), seen)


def _digits(value: float, digits: int) -> float:
    """A positive number in so many decimal digits, rounded up: a probability stays at least what it is."""
    if value <= 0:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{math.ceil(value / step) * step:.{digits}g}")


class Draws:
    """The units of many steps: each is drawn in each step with probability q, on its own.

    With x_ut = 1 where unit u is drawn in step t, of n units and T steps:

        sum of x_ut                   ~ Binomial(n T, q)           units are drawn too often, or too seldom
        sum over units of a size      as above                     draws depend on how many sequences a unit has
        units with k draws or more    ~ Binomial(n, P[B >= k])     steps repeat or avoid the units of others
        sum over u of x_us x_ut       ~ Binomial(n, q^2)           a step repeats another one
        sum of x_ut x_(u + lag)t      mean n T q^2                 units of a distance are drawn together
        (sum over u of x_ut)          ~ Binomial(n, q)             a step avoids units for others, as at a fixed size

    where B ~ Binomial(T, q). The last sum is over a circle, for each lag. Its terms depend on each other along cycles,
    of which at least a third of the terms is independent, at any rotation, so that (Janson 2004, "Large deviations for
    sums of partly dependent random variables")

        P(sum >= n T s) <= exp(-n T KL(s, q^2) / 3),    KL of two Bernoulli laws, s > q^2.

    The sizes B_t of batches are held against their law by V = sum of (B_t - n q)^2 / (n q (1 - q)), whose tails are
    bounded by Chernoff: P(V >= v), theta > 0, and P(V <= v), theta < 0, are at most (E exp(theta V_t))^T exp(-theta v).

    Args:
        sizes: (n,): sequences of each unit.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self.sizes = sizes
        self._times = np.zeros(sizes.size, np.int64)
        self._spectrum = np.zeros(sizes.size // 2 + 1)
        self._drawn: list[npt.NDArray[np.int64]] = []
        self._others: list[int] = []
        self._beside = 0
        self._steps = 0

    def see(self, drawn: npt.NDArray[np.int64], others: int = 0, of: int = 0) -> None:
        """Take a step: the indices of the units that were drawn, and how many others, of how many in each step."""
        self._others.append(others)
        self._beside = of
        present = np.zeros(self.sizes.size)
        present[drawn] = 1
        self._times[drawn] += 1
        self._spectrum += np.square(np.abs(np.fft.rfft(present)))
        self._drawn.append(drawn)
        self._steps += 1

    def checks(self, charged: float) -> tuple[Check, ...]:
        """What all steps together show.

        Args:
            charged: q; at 1 nothing is drawn, so there is no check.
        """
        if charged >= 1:
            return ()
        each = []
        for size in np.unique(self.sizes):
            times = self._times[self.sizes == size]
            what = f"rate at which units of size {size} are drawn"
            each.append(rate(what, int(times.sum()), times.size * self._steps, charged))
        worst = min(each, key=lambda check: check.p)
        mean = self._steps * charged
        often = max(2, math.floor(mean + math.sqrt(mean * (1 - charged))) + 1)
        share = float(binom.sf(often - 1, self._steps, charged))
        seen, places = int((self._times >= often).sum()), self._times.size
        return (
            rate("rate at which units are drawn", int(self._times.sum()), places * self._steps, charged),
            replace(worst, p=_any(worst.p, len(each)), visible=None),
            *([rate(f"share of units in {often} steps or more", seen, places, share)] if share else ()),
            *([self._again(charged)] if self._steps > 1 else ()),
            self._together(charged),
            self._sizes(charged),
        )

    def _again(self, charged: float) -> Check:
        """The two steps that share most units."""
        units, pairs = np.concatenate(self._drawn), self._steps * (self._steps - 1) // 2
        edges = np.cumsum([0, *map(len, self._drawn)])
        steps = csr_array((np.ones(len(units), np.int64), units, edges), (self._steps, self.sizes.size))
        most = int(triu(steps @ steps.T, 1).max())
        p = _any(float(binom.sf(most - 1, self.sizes.size, charged**2)), pairs)
        return Check("most units that two steps share", most, self.sizes.size * charged**2, p)

    def _sizes(self, charged: float) -> Check:
        """The spread of the sizes of batches, with the other units, over what is expected.

        It is said in two digits: since sizes are whole numbers, the number of other units, which is not public, follows
        from all digits. Few digits tell less, not nothing: the figure stays with who has the records.
        """
        units = self.sizes.size + self._beside
        law = binom(units, charged)
        mean, variance = law.stats()
        around = math.ceil(_AROUND * math.sqrt(variance))
        first, last = max(0, math.floor(mean) - around), min(units, math.ceil(mean) + around)
        every = np.arange(first, last + 1)
        outside, weights = self._steps * float(law.cdf(first - 1) + law.sf(last)), law.logpmf(every)
        squares = (every - mean) ** 2 / variance
        sizes = np.array([len(drawn) for drawn in self._drawn]) + self._others
        found = float(((sizes - mean) ** 2).sum() / variance)

        def bound(theta: float) -> float:
            return self._steps * float(logsumexp(weights + theta * squares)) - theta * found

        exponents = ((-_STEEPEST * float(variance), 0.0), (0.0, 0.5))  # of the lower and the upper tail
        tails = (minimize_scalar(bound, bounds=each, method="bounded").fun for each in exponents)
        p = min(1.0, 2 * (outside + math.exp(min(0.0, *tails))))
        return Check(
            "spread of the sizes of batches", _digits(math.sqrt(found / self._steps), 2), 1.0, _digits(p, 1)
        )

    def _together(self, charged: float) -> Check:
        """The distance at which units are drawn together most often, over what is expected."""
        units = self.sizes.size
        sums = np.fft.irfft(self._spectrum, units)[1 : units // 2 + 1]
        terms, expected = units * self._steps, charged**2
        share = min(1.0, max(expected, float(sums.max()) / terms))
        divergence = float(rel_entr(share, expected) + rel_entr(1 - share, 1 - expected))
        p = _any(math.exp(-terms * divergence / 3), sums.size)
        return Check("draws of two units together, at one distance", share / expected, 1.0, p)


def enough_noise(what: str, squares: float, samples: int) -> Check:
    """The standard deviation of n samples of noise, over the one that is charged: Q ~ chi2(n).

    Args:
        what: The factor, in words.
        squares: Q, the sum of their squares.
        samples: n.

    Raises:
        CloisterError: there is no sample.
    """
    if not samples:
        raise CloisterError("samples of the noise", 0, expected="1 or more")
    visible = 1 - math.sqrt(float(chi2.ppf(LEVEL, samples) / chi2.ppf(_POWER, samples)))
    return Check(what, math.sqrt(squares / samples), 1.0, float(chi2.cdf(squares, samples)), visible)


class Noise:
    """The noise of many releases, over the standard deviation that is charged for it: all samples are N(0, 1), and
    independent.

    With x_r the d samples of release r, some of them left out:

        sum of x_r^2 over coordinates      ~ chi2     a release with less noise
        sum of x_ri^2 over releases        ~ chi2     a coordinate with less noise, or with something that is none
        sum over releases and coordinates  ~ chi2     less noise
        sum of x_ri x_r(i + lag) over both            a part of a release repeats or cancels another part
        <y_r, sign(y_s)> / sqrt(k), s < r  ~ N(0, 1)  a release repeats or cancels another one, or something beside it
        the sum of its squares over pairs             coordinates depend on each other, alike in all releases; not of
                                                      fewer than 64, of which its tails are heavier than those of chi2
        neighbours among the largest |x_ri| of r      a part of a release is another part in any order, with any signs
        coordinates with |x_ri| = |x_si|, s < r       a part of a release is the same part of one before it

    and, if the last coordinate is a count with noise of its own,

        (sum of x_ri x_rd over r)^2 / (sum of x_ri^2  sum of x_rd^2)  ~ Beta(1/2, (releases - 1) / 2)

    where y_r are k random +-1 projections of x_r, disjoint and over all coordinates. Given y_s the signs are constants,
    so the law of one pair is exact. The fourth test from below is over all lags of a circle: such a sum is x'Ax with
    trace 0, |A| <= 1 and |A|_F^2 = n / 2 for n samples (n where a lag is its own opposite), so that

        P(|x'Ax| >= 2 |A|_F sqrt(t) + 2 t) <= 2 exp(-t)    (Laurent and Massart 2000, Lemma 1).

    In the test before the last, given the k + 1 - j smallest of the k + 1 largest magnitudes, the next one is the least
    of j samples beyond the last of them: the gap is g or less with probability j g h at most, h the hazard rate. So the
    number of such gaps has the tail of Binomial(k, g h (k + 1) / 2) at most (Hoeffding 1956). Where samples lie on a
    grid, its step is added to g. In the last test, given x_s, a magnitude is within g of another one with probability
    2 g f at most, on a grid with probability f times its step more, f the greatest density.

    It takes some 40 bytes for each coordinate, 16 KB for each release, and 4 MB.

    Args:
        size: d, coordinates of a release.
        count: Whether the last one is a count with noise of its own.
        grid: The step between values of the noise, over its standard deviation; 0: floats.
    """

    def __init__(self, size: int, *, count: bool = False, grid: float = 0.0) -> None:
        self._gap = _EQUAL + grid
        self._equal_share = _PEAK * (2 * _EQUAL + grid)
        self._places = np.sort(np.random.Generator(np.random.Philox(1)).permutation(size)[:_PLACES])
        self._before: deque[npt.NDArray[np.float64]] = deque(maxlen=_BEFORE)
        self._same = (0, 0)  # of two releases: equal magnitudes, at most, of how many
        self._compared = 0
        self._repeats: list[tuple[int, int]] = []  # of each release: small gaps, gaps
        self._with_count = np.zeros(size) if count else None
        self._squares = np.zeros(size)
        self._counts = np.zeros(size, np.int64)
        self._each: list[tuple[float, int]] = []  # of each release: sum of squares, samples
        self._spectrum = np.zeros(size // 2 + 1)
        bits = np.random.Generator(np.random.Philox(0)).integers(0, 2, size, np.int8)
        self._signs = 2 * bits - 1
        self._sketches: list[npt.NDArray[np.float32]] = []

    @property
    def releases(self) -> int:
        """Releases seen."""
        return len(self._each)

    def see(self, noise: npt.NDArray[np.float64], where: npt.NDArray[np.bool_] | None = None) -> None:
        """Take a release: (d,) values less all that is known, and (d,) where they are noise; None: everywhere."""
        alone = noise if where is None else np.where(where, noise, 0.0)
        squares = alone * alone
        self._squares += squares
        self._counts += 1 if where is None else where
        samples = alone.size if where is None else int(where.sum())
        self._each.append((float(squares.sum()), samples))
        self._spectrum += np.square(np.abs(np.fft.rfft(alone)))
        gaps = min(_LARGEST, samples // 4)
        largest = np.sort(np.partition(np.sqrt(squares), -gaps - 1)[-gaps - 1 :])
        self._repeats.append((int((np.diff(largest) <= _EQUAL).sum()), gaps))
        self._compare(np.abs(noise if where is None else np.where(where, noise, np.nan))[self._places])
        if self._with_count is not None:
            self._with_count += alone * alone[-1]
        if len(self._sketches) < _COMPARED:
            signs = self._signs if where is None else np.where(where, self._signs, 0)
            of_each = np.sqrt(np.maximum(_folded(np.abs(signs)), 1))
            self._sketches.append((_folded(signs * alone) / of_each).astype(np.float32))

    def _compare(self, magnitudes: npt.NDArray[np.float64]) -> None:
        """Count the coordinates at which a release has the magnitude of one before it; NaN where it has no noise."""
        for before in self._before:
            differences = np.abs(magnitudes - before)
            same = int((differences <= _EQUAL).sum()), int((~np.isnan(differences)).sum())
            self._same = max(self._same, same)
        self._compared += len(self._before)
        self._before.append(magnitudes)

    def checks(self, charged: float = 1.0) -> tuple[Check, ...]:
        """What all releases together show.

        Args:
            charged: The standard deviation that is charged, in units of the values that were seen.
        """
        squares, samples = (sum(each) for each in zip(*self._each, strict=True))
        return (
            enough_noise("standard deviation of the noise", squares / charged**2, samples),
            self._least_release(charged),
            self._coordinate(charged),
            self._lag(samples, charged),
            self._repeated(charged),
            *([self._at_one_place(charged)] if self._compared else ()),
            *self._between(charged),
            *(() if self._with_count is None else [self._count(self._with_count)]),
        )

    def _least_release(self, charged: float) -> Check:
        squares, samples = np.array(self._each).T / np.array([[charged**2], [1]])
        below = chi2.cdf(squares, samples)
        least = int(np.argmin(below))
        deviation = math.sqrt(squares[least] / samples[least])
        return Check(
            "least deviation of the noise in a release", deviation, 1.0, _any(float(below[least]), len(below))
        )

    def _coordinate(self, charged: float) -> Check:
        """The coordinate whose noise over the releases is furthest from the charge, to either side."""
        p, deviation = 1.0, 1.0
        for count in np.unique(self._counts[self._counts > 0]):
            of_count = self._squares[self._counts == count] / charged**2
            for squares, tail in ((of_count.min(), chi2.cdf), (of_count.max(), chi2.sf)):
                if tail(squares, count) < p:
                    p, deviation = float(tail(squares, count)), math.sqrt(squares / count)
        tests = 2 * int(np.count_nonzero(self._counts))
        return Check("furthest deviation of the noise at a coordinate", deviation, 1.0, _any(p, tests))

    def _lag(self, samples: int, charged: float) -> Check:
        """The lag at which the noise of releases depends most on itself."""
        size = self._squares.size
        sums = np.fft.irfft(self._spectrum, size)[1 : size // 2 + 1] / charged**2
        if not sums.size:
            return Check("correlation of the noise inside a release", 0.0, 0.0, 1.0)
        norms = np.full(sums.size, math.sqrt(samples / 2))
        if size % 2 == 0:
            norms[-1] = math.sqrt(samples)
        exponents = ((np.sqrt(norms**2 + 2 * np.abs(sums)) - norms) / 2) ** 2
        worst = int(np.argmax(exponents))
        p = min(1.0, 2 * sums.size * math.exp(-exponents[worst]))
        return Check("correlation of the noise inside a release", float(sums[worst]) / samples, 0.0, p)

    def _repeated(self, charged: float) -> Check:
        """The release of which most magnitudes are there twice."""
        repeats, gaps = np.array(self._repeats).T
        shares = np.minimum(1.0, (gaps + 1) / 2 * self._gap * _HAZARD / charged)
        below = binom.sf(repeats - 1, gaps, shares)
        worst = int(np.argmin(below))
        p = _any(float(below[worst]), len(below))
        return Check("magnitudes that are twice in a release", float(repeats[worst]), 0.0, p)

    def _at_one_place(self, charged: float) -> Check:
        """The two releases that have most magnitudes in common, coordinate by coordinate."""
        same, places = self._same
        p = float(binom.sf(same - 1, places, min(1.0, self._equal_share / charged))) if same else 1.0
        return Check(
            "magnitudes that two releases have at the same coordinates", same, 0.0, _any(p, self._compared)
        )

    def _between(self, charged: float) -> tuple[Check, ...]:
        """The projections of releases on the signs of earlier ones: the furthest, and their variance."""
        sketches = np.stack(self._sketches)
        signs = np.sign(sketches)
        both = np.square(signs) @ np.square(signs).T  # projections that two releases share
        projections = (sketches @ signs.T) / np.sqrt(np.maximum(both, 1)) / charged
        earlier = np.tril(both > 0, -1)
        pairs, found = int(earlier.sum()), projections[earlier].astype(np.float64)
        if not pairs:
            return ()
        furthest = float(found[np.argmax(np.abs(found))])
        p = _any(2 * float(norm.sf(abs(furthest))), pairs)
        releases, k = sketches.shape
        # Signs of k numbers are not quite orthogonal, which adds to the variance of the sum.
        freedom = pairs / (1 + 2 * releases / (3 * k))
        variance = float((found**2).mean())
        tails = chi2.cdf(variance * freedom, freedom), chi2.sf(variance * freedom, freedom)
        checks = (
            Check("furthest projection of the noise on that of another release", furthest, 0.0, p),
            Check("variance of these projections", variance, 1.0, min(1.0, 2 * float(min(tails)))),
        )
        return checks if k >= _FEWEST else checks[:1]

    def _count(self, products: npt.NDArray[np.float64]) -> Check:
        """The coordinate with which the noise of the count is correlated most."""
        squares = np.maximum(self._squares[:-1] * products[-1], 1e-300)
        correlations = np.minimum(products[:-1] ** 2 / squares, 1.0)
        worst = float(correlations.max())
        p = float(beta.sf(worst, 0.5, (self.releases - 1) / 2)) if self.releases > 1 else 1.0
        what = "correlation of the count's noise with that of a coordinate"
        return Check(what, math.sqrt(worst), 0.0, _any(p, correlations.size))


def _folded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums of the values whose places are equal modulo `_SKETCH`."""
    size = min(_SKETCH, values.size)
    whole: npt.NDArray[Any] = values[: values.size // size * size].reshape(-1, size).sum(axis=0)
    whole[: values.size % size] += values[values.size - values.size % size :]
    return whole


def _any(p: float, tests: int) -> float:
    """The probability that any of some tests has a p-value as small."""
    return -math.expm1(tests * math.log1p(-p)) if p < 1 else 1.0
