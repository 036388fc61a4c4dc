"""Results that decide when a run ends: a limit that was fixed beforehand holds, the figure of what was released not.

An adversary sees Gaussian releases without sampling, keeps the privacy loss L, and chooses when to stop. The claims
epsilon(n) of the possible ends n hold at delta if no rule makes the expectation of max(0, 1 - exp(epsilon(n) - L_n))
larger than delta. The best rule follows from its values backwards, on a grid of losses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm

from cloister.privacy.accounting.accountant import over_runs
from cloister.privacy.mechanism.events import Gaussian, to_json

NOISE, MOST, DELTA = 4.0, 10, 1e-5
RELEASED = [over_runs([to_json([Gaussian(NOISE, 1)])] * count, DELTA).epsilon for count in range(1, MOST + 1)]


def delta_of(claims: list[float], *, stops: bool) -> float:
    """Delta at which some claims hold, one for each number of releases.

    Args:
        claims: Epsilon after each release.
        stops: Whether the adversary chooses the number; else it is that of all.
    """
    deviation = 1 / NOISE
    mean = deviation**2 / 2
    step = deviation / 40
    losses = np.arange(-8.0 * np.sqrt(MOST) * deviation, claims[-1] + 8 * np.sqrt(MOST) * deviation, step)
    moves = np.arange(-360, 361) * step
    odds = norm.cdf(moves + step / 2, mean, deviation) - norm.cdf(moves - step / 2, mean, deviation)

    def gain(epsilon: float) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.maximum(0.0, 1 - np.exp(np.minimum(0.0, epsilon - losses)))
        return found

    value = gain(claims[-1])
    for epsilon in [*claims[-2::-1], None]:
        later = np.convolve(value, odds[::-1], mode="same")
        value = np.maximum(later, gain(epsilon)) if stops and epsilon is not None else later
    return float(np.interp(0.0, losses, value))


def test_a_number_that_was_fixed_beforehand_holds() -> None:
    assert delta_of(RELEASED, stops=False) == pytest.approx(DELTA, rel=0.01)


def test_a_limit_that_was_fixed_beforehand_holds_whatever_results_decide() -> None:
    assert delta_of([RELEASED[-1]] * MOST, stops=True) == pytest.approx(DELTA, rel=0.01)


def test_the_figure_of_what_was_released_does_not() -> None:
    """So reports say what holds instead."""
    assert delta_of(RELEASED, stops=True) == pytest.approx(5.2 * DELTA, rel=0.02)
