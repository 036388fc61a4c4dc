"""The law of the number of trials in a private search: its mean, its probabilities, and the draw.

Under a privacy unit a search releases the best of K trials, with K drawn in secret before the first one (Papernot and
Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy"). What that costs is `events.Selection`. A fixed
number of trials is refused: the price of its best one is that of all of them.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator

from scipy.optimize import brentq

from cloister.protocol.errors import AccountingError

_TAIL = 2.0**-53
"""Probability of the numbers that are never drawn, beyond the largest one: that of a float64's last digit."""


def probabilities(mean: float, shape: float | None) -> Iterator[float]:
    """P[K = 0], P[K = 1], ... without end.

    Truncated negative binomial with parameters eta and gamma (Definition 1 of the paper), for k >= 1 and eta > 0

        P[K = k] = (1 - gamma)^k / (gamma^-eta - 1) * prod_{l=0}^{k-1} (l + eta) / (l + 1),

    of mean eta (1 - gamma) / (gamma (1 - gamma^eta)). Its limit at eta = 0 is the logarithmic law, P[K = k] =
    (1 - gamma)^k / (k log(1 / gamma)), of mean (1 / gamma - 1) / log(1 / gamma).

    Args:
        mean: The mean, above 1.
        shape: eta, 0 or more; None: Poisson.
    """
    if shape is None:
        for number in itertools.count():  # in logarithms: exp(-mean) of a large mean is 0 in float64
            yield math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        return
    gamma = _gamma(mean, shape)
    first = (1 - gamma) / math.log(1 / gamma)
    if shape:
        first = shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
    yield 0.0
    one, number = first, 1
    while True:
        yield one
        one *= (1 - gamma) * (number + shape) / (number + 1)
        number += 1


def draw(mean: float, shape: float | None, uniform: Callable[[], float] | None = None) -> int:
    """K, by the inverse of its distribution function, from the system's cryptographic randomness.

    Args:
        mean: As in `probabilities`.
        shape: As in `probabilities`.
        uniform: Draws from [0, 1); None: 53 secret random bits.
    """
    return quantile(mean, shape, secrets.SystemRandom().random() if uniform is None else uniform())


def quantile(mean: float, shape: float | None, level: float) -> int:
    """The least number that K exceeds with a probability of at most 1 - level."""
    below = 0.0
    for number, probability in enumerate(probabilities(mean, shape)):
        below += probability
        if level < below or (number > mean and probability < _TAIL):
            return number
    raise AssertionError("the probabilities have no end")


def _gamma(mean: float, shape: float) -> float:
    """gamma of the truncated negative binomial with a mean, which falls as gamma rises.

    Raises:
        AccountingError: there is none that float64 can state.
    """

    def excess(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        if not shape:
            return math.expm1(-log_gamma) / -log_gamma - mean
        return shape * -math.expm1(log_gamma) / (gamma * -math.expm1(shape * log_gamma)) - mean

    try:
        return math.exp(brentq(excess, -50.0, -1e-9, xtol=1e-14, rtol=1e-14))
    except ValueError:
        raise AccountingError("mean", mean, expected="a number above 1 that the law can have") from None
