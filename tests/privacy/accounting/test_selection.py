"""The price of the best of a random number of runs, and the law of that number."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.privacy.accounting.accountant import spent
from cloister.privacy.accounting.selection import draw, probabilities, quantile
from cloister.privacy.mechanism.events import (
    Event,
    Gaussian,
    SampledGaussian,
    Selection,
    Skellam,
    from_json,
    to_json,
)
from cloister.protocol.errors import AccountingError

RUN = SampledGaussian(1.0, 0.01, 500)
DELTA = 1e-5


def test_the_reference_prices() -> None:
    """q = .01, z = 1, T = 500, delta 1e-5, by Renyi divergences: one run, and the best of about ten."""
    assert spent([RUN], DELTA, "rdp").epsilon == pytest.approx(1.65, abs=1e-2)
    for law, shape, epsilon in (("negative-binomial", 0.0, 2.79), ("poisson", None, 3.18)):
        found = spent([Selection(law, 10, (RUN,), 1, shape)], DELTA)  # type: ignore[arg-type]  # of a tuple
        assert found.epsilon == pytest.approx(epsilon, abs=1e-2)
        assert found.accountant == "rdp"
    steps = Selection("negative-binomial", 10, (SampledGaussian(1.0, 0.01, 50),), 10, 0.0)
    assert (
        spent([steps], DELTA).epsilon
        == spent([Selection("negative-binomial", 10, (RUN,), 1, 0.0)], DELTA).epsilon
    )


def test_a_selection_of_gaussians_is_the_theorem() -> None:
    """Theorem 2 of Papernot and Steinke at its best pair of orders, over a finer list of orders than the library's."""
    z, mean, gamma = 2.0, 4.0, 0.25
    orders = [1 + number / 100 for number in range(1, 40000)]
    inner = min((1 - 1 / order) * order / (2 * z * z) - math.log(gamma) / order for order in orders)
    best = math.inf
    for order in orders:
        rdp = order / (2 * z * z) + math.log(mean) / (order - 1) + 2 * inner
        best = min(best, rdp + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    found = spent([Selection("negative-binomial", mean, (Gaussian(z, 1),), 1, 1.0)], DELTA).epsilon
    assert best - 1e-9 <= found <= best * 1.01


def test_skellam_noise_is_bounded_by_lines() -> None:
    """With much Skellam noise it costs what Gaussian noise costs, and with little more."""
    whole = [
        spent([Selection("negative-binomial", 10, (event,), 10, 0.0)], DELTA).epsilon
        for event in (Gaussian(5.0, 1), Skellam(25e12, 1e6, 1e6, 1), Skellam(25e2, 10.0, 100.0, 1))
    ]
    assert whole[0] * (1 - 1e-6) <= whole[1] <= whole[0] * 1.05
    assert whole[1] < whole[2]
    alone = spent([Skellam(25e2, 10.0, 100.0, 10)], DELTA).epsilon
    assert alone < whole[2]


def test_a_selection_for_a_smaller_unit_counts_twice() -> None:
    """A record may replace the whole term of its site, so a selection for sites has twice the sensitivity for it."""
    sites = Selection("poisson", 3, (Gaussian(4.0, 1),), 2)
    twice = Selection("poisson", 3, (Gaussian(2.0, 1),), 2)
    mixed = spent([SampledGaussian(1e6, 0.01, 1), sites], DELTA).epsilon
    assert mixed == pytest.approx(spent([twice], DELTA).epsilon, rel=1e-6)
    assert spent([sites], DELTA, group=2).epsilon == pytest.approx(spent([twice], DELTA).epsilon, rel=1e-9)


def test_selections_compose_with_all_else() -> None:
    one = Selection("poisson", 3, (RUN,), 1)
    lists: tuple[list[Event], ...] = ([one], [one, RUN], [one, one], [RUN])
    costs = [spent(events, DELTA, "rdp").epsilon for events in lists]
    assert costs[3] < costs[0] < costs[1] < costs[2]


@given(
    law=st.sampled_from((("negative-binomial", 0.0), ("negative-binomial", 0.5), ("poisson", None))),
    mean=st.floats(1.01, 900),
    rounds=st.integers(1, 10**6),
)
def test_selections_come_back_from_json(law: tuple[str, float | None], mean: float, rounds: int) -> None:
    event = Selection(law[0], mean, (RUN, Gaussian(2.0, 3)), rounds, law[1])  # type: ignore[arg-type]  # of a tuple
    assert from_json(to_json([event, RUN])) == (event, RUN)


@pytest.mark.parametrize(
    "wrong",
    [
        {"law": "fixed"},
        {"mean": 1.0},
        {"mean": 2000.0},
        {"shape": None},
        {"shape": -1.0},
        {"law": "poisson"},
        {"rounds": 0},
        {"run": ()},
        {"run": (Selection("poisson", 2, (RUN,), 1),)},
    ],
)
def test_what_is_no_selection(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {
        "law": "negative-binomial",
        "mean": 2.0,
        "shape": 1.0,
        "run": (RUN,),
        "rounds": 1,
    }
    with pytest.raises(AccountingError):
        Selection(**(right | wrong))  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("mean", [1.01, 2.5, 30.0])
@pytest.mark.parametrize("shape", [None, 0.0, 0.3, 1.0, 5.0])
def test_the_law_has_its_mean(mean: float, shape: float | None) -> None:
    listed = list(itertools.islice(probabilities(mean, shape), 6000))
    assert math.fsum(listed) == pytest.approx(1, abs=1e-9)
    assert math.fsum(number * one for number, one in enumerate(listed)) == pytest.approx(mean, rel=1e-9)
    assert (listed[0] > 0) == (shape is None)


def test_the_number_is_drawn_in_secret() -> None:
    """No seed decides it."""
    drawn = set()
    for _ in range(20):
        random.seed(0)
        drawn.add(draw(1000.0, None))
    assert len(drawn) > 5


@pytest.mark.parametrize("shape", [None, 100.0])
def test_the_law_of_the_largest_mean_is_whole(shape: float | None) -> None:
    """exp(-1000) is 0 in float64, and gamma^-100 is 1e104."""
    listed = list(itertools.islice(probabilities(1000.0, shape), 4000))
    assert math.fsum(listed) == pytest.approx(1, abs=1e-9)
    assert len({draw(1000.0, shape) for _ in range(20)}) > 5


def test_known_laws() -> None:
    """The geometric law, and Poisson's, in closed form; the logarithmic law against scipy's."""
    from scipy.stats import geom, logser, poisson

    for mean, shape, law, first in (
        (4.0, 1.0, geom(0.25), 1),
        (4.0, None, poisson(4.0), 0),
        (1 / math.log(2), 0.0, logser(0.5), 1),
    ):
        found = list(itertools.islice(probabilities(mean, shape), 40))
        assert found[first:] == pytest.approx([float(law.pmf(k)) for k in range(first, 40)], rel=1e-9)


def test_draws_follow_the_law() -> None:
    """K is the inverse of the distribution function at the drawn number."""
    found = [draw(4.0, 1.0, iter([level]).__next__) for level in (0.0, 0.2499, 0.2501, 0.43, 0.44)]
    assert found == [1, 1, 2, 2, 3]
    assert draw(4.0, None, lambda: 0.0) == 0
    assert draw(4.0, 0.0, lambda: 1 - 2.0**-53) < 1000
    assert quantile(10.0, 0.0, 0.99) == 81
    drawn = [draw(3.0, 0.0) for _ in range(200)]
    assert min(drawn) == 1
    assert len(set(drawn)) > 2
