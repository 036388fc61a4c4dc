"""Accounting: closed forms, a second opinion from Opacus, the true divergence of Skellam noise, and refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom, norm, skellam

from cloister.privacy.accounting.accountant import calibrate, skellam_rdp, spent
from cloister.privacy.mechanism.events import Event, Gaussian, SampledGaussian, Skellam
from cloister.privacy.mechanism.site_noise import skellam_for
from cloister.protocol.errors import AccountingError
from cloister.tests.tools.raises import raises

GRID = [  # noise multiplier, sampling rate, steps
    (0.6, 32 / 11_000, 60),
    (0.8, 0.01, 1_000),
    (2.0, 0.1, 500),
    (5.0, 0.5, 300),
]


def gaussian_delta(z: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, with sensitivity 1."""
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon + norm.logcdf(-0.5 / z - epsilon * z)))


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
@pytest.mark.parametrize(("z", "count"), [(0.7, 1), (2.0, 10), (30.0, 1_000), (5.0, 7)])
def test_gaussians_cost_what_the_closed_form_says(z: float, count: int, delta: float) -> None:
    found = spent([Gaussian(z, count)], delta)
    assert found.accountant == "pld"
    truth = gaussian_delta(z / math.sqrt(count), found.epsilon)
    assert delta * (1 - 1e-4) < truth <= delta
    assert spent([SampledGaussian(z, 1.0, count)], delta) == found
    assert spent([Gaussian(z / math.sqrt(count), 1)], delta).epsilon == pytest.approx(found.epsilon, rel=1e-9)
    assert found.epsilon < spent([Gaussian(z, count)], delta, "rdp").epsilon < 1.3 * found.epsilon + 0.2


def test_the_closed_form_finds_a_planted_bug() -> None:
    halved = spent([Gaussian(1.0, 10)], 1e-5).epsilon
    assert gaussian_delta(1 / math.sqrt(10), halved) == pytest.approx(1e-5, rel=1e-3)
    assert gaussian_delta(2 / math.sqrt(10), halved) < 1e-8
    assert gaussian_delta(1 / math.sqrt(10), spent([Gaussian(2.0, 10)], 1e-5).epsilon) > 1e-2


@pytest.mark.parametrize("steps", [10, 1_000, 100_000])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_a_composition_on_the_grid_is_an_upper_bound(steps: int, delta: float) -> None:
    """At a sampling rate next to 1 the truth is the closed form, but the grid and the Fourier transform are used."""
    z = 0.4 * math.sqrt(steps)
    found = spent([SampledGaussian(z, 1 - 1e-9, steps)], delta)
    exact = spent([Gaussian(z, steps)], delta).epsilon
    assert found.accountant == "pld"
    assert exact * (1 - 1e-8) < found.epsilon < exact * 1.005


def test_the_check_of_an_upper_bound_finds_a_grid_that_rounds_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from dp_accounting.pld import privacy_loss_distribution as distributions

    real = distributions.from_gaussian_mechanism

    def optimistic(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options, pessimistic_estimate=False, use_connect_dots=False)

    monkeypatch.setattr(distributions, "from_gaussian_mechanism", optimistic)
    z, delta = 0.4 * math.sqrt(1_000), 1.1e-5  # results are cached: no other test has this delta
    found = spent([SampledGaussian(z, 1 - 1e-9, 1_000)], delta)
    assert found.accountant == "pld"
    assert found.epsilon < spent([Gaussian(z, 1_000)], delta).epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "steps"), GRID)
def test_opacus_agrees(z: float, rate: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    renyi, prv = RDPAccountant(), PRVAccountant()
    renyi.history = prv.history = [(z, rate, steps)]
    event = [SampledGaussian(z, rate, steps)]
    assert spent(event, 1e-5, "rdp").epsilon == pytest.approx(renyi.get_epsilon(1e-5), rel=0.02)
    found, other = spent(event, 1e-5), prv.get_epsilon(1e-5, eps_error=0.01)
    assert found.accountant == "pld"
    assert other - 0.021 < found.epsilon <= other + 1e-3  # theirs is an upper bound within 2 eps_error
    assert found.epsilon < spent(event, 1e-5, "rdp").epsilon
    halved = spent([SampledGaussian(z / 2, rate, steps)], 1e-5).epsilon
    assert halved > other + 0.1


@pytest.mark.parametrize(("z", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_the_table_of_tensorflow_privacy(z: float, epochs: int, published: float) -> None:
    """MNIST in its README, of 2019: the same curve, with a conversion to epsilon that was improved since."""
    found = spent([SampledGaussian(z, 256 / 60_000, epochs * 60_000 // 256)], 1e-5, "rdp").epsilon
    assert 0.79 * published < found < published


NOISE = st.floats(0.5, 20)


def easier(z: float, rate: float, steps: int) -> list[Event]:
    """Events that cost no more."""
    return [
        SampledGaussian(1.2 * z, rate, steps),
        SampledGaussian(z, 0.8 * rate, steps),
        SampledGaussian(z, rate, max(1, steps // 2)),
    ]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.floats(1, 20), st.floats(1e-4, 0.05), st.integers(1, 1_000))
def test_more_noise_costs_less_and_more_steps_cost_more(z: float, rate: float, steps: int) -> None:
    """Where all orders converge: at large rates `dp_accounting` leaves out the smallest ones, which costs a little."""
    here = spent([SampledGaussian(z, rate, steps)], 1e-5, "rdp").epsilon
    for event in easier(z, rate, steps):
        assert spent([event], 1e-5, "rdp").epsilon <= here * (1 + 1e-9)
    assert spent([SampledGaussian(z, rate, steps)], 1e-6, "rdp").epsilon >= here


@pytest.mark.parametrize(("z", "rate", "steps"), GRID[1:])
def test_on_the_grid_too_more_noise_costs_less(z: float, rate: float, steps: int) -> None:
    here = spent([SampledGaussian(z, rate, steps)], 1e-5).epsilon
    for event in easier(z, rate, steps):
        assert spent([event], 1e-5).epsilon < 0.99 * here


@given(st.lists(st.builds(Gaussian, NOISE, st.integers(1, 9)), min_size=1, max_size=20), st.randoms())
@settings(max_examples=20, deadline=None)
def test_neither_order_nor_grouping_matters(events: list[Gaussian], chance: random.Random) -> None:
    whole = spent(events, 1e-5, "rdp")
    single = [Gaussian(event.noise_multiplier, 1) for event in events for _ in range(event.count)]
    chance.shuffle(single)
    assert spent(single, 1e-5, "rdp") == whole
    assert spent(single, 1e-5).epsilon <= whole.epsilon


def test_a_long_ledger_is_merged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two mechanisms is discretised once, and the merged ledger has the result of the long one."""
    from dp_accounting.pld import privacy_loss_distribution as distributions

    made: list[float] = []
    real = distributions.from_gaussian_mechanism

    def counted(z: float, **options: Any) -> Any:
        made.append(z)
        return real(z, **options)

    monkeypatch.setattr(distributions, "from_gaussian_mechanism", counted)
    rows: list[Event] = [SampledGaussian(1.0 + row % 2, 0.01, 5) for row in range(10_000)]
    merged = [SampledGaussian(1.0, 0.01, 25_000), SampledGaussian(2.0, 0.01, 25_000)]
    assert spent(rows, 1e-5) == spent(merged, 1e-5)
    assert made == [1.0, 2.0]


def test_different_steps_compose_to_less_than_their_sum_and_more_than_each() -> None:
    parts: list[list[Event]] = [[SampledGaussian(0.8, 0.01, 200)], [SampledGaussian(2.0, 0.05, 300)]]
    alone = [spent(part, 1e-5).epsilon for part in parts]
    together = spent([*parts[0], *parts[1]], 1e-5)
    assert together.accountant == "pld"
    assert max(alone) < together.epsilon < sum(alone)
    assert together.epsilon < spent([*parts[0], *parts[1]], 1e-5, "rdp").epsilon


def test_nothing_costs_nothing() -> None:
    for accountant in ("pld", "rdp"):
        assert spent([], 1e-5, accountant).epsilon == 0


def test_where_rounding_would_bear_on_the_result_the_renyi_bound_is_given() -> None:
    for event, delta, why in (
        (SampledGaussian(1.0, 0.01, 100_000), 1e-9, "rounding error"),
        (SampledGaussian(10.0, 1e-4, 10**7), 1e-5, "1,000,000 steps"),
        (SampledGaussian(0.02, 0.5, 1), 1e-5, "span more"),
        (SampledGaussian(0.01, 0.5, 10_000), 1e-5, "span more"),
    ):
        found = spent([event], delta)
        assert (found.accountant, found.epsilon) == ("rdp", spent([event], delta, "rdp").epsilon)
        assert why in found.note


def one_step_delta(z: float, rate: float, epsilon: float) -> float:
    """Hockey-stick divergence of (1 - q) N(0, z^2) + q N(1, z^2) from N(0, z^2): where the ratio is e^epsilon, cut."""
    ratio = math.log1p(math.expm1(epsilon) / rate) if epsilon < 30 else epsilon - math.log(rate)
    cut = z * z * ratio + 0.5
    null, shifted = norm.logsf(cut / z), norm.logsf((cut - 1) / z)
    return rate * float(math.exp(shifted) - math.exp(ratio + null))


@pytest.mark.parametrize("z", [0.04, 0.4, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 1e-3, 0.5])
def test_one_step_costs_what_its_closed_form_says(z: float, rate: float) -> None:
    delta = 1e-5
    found, renyi = (spent([SampledGaussian(z, rate, 1)], delta, which).epsilon for which in ("pld", "rdp"))
    assert one_step_delta(z, rate, found) <= delta
    assert one_step_delta(z, rate, renyi) <= delta
    if found > 0.01 and z >= 0.4:
        assert one_step_delta(z, rate, found * 0.99 - 1e-3) > delta


def divergence(order: float, shift: int, mu: float) -> float:
    """The Renyi divergence of X + shift from X, X the difference of two Poisson(mu / 2), summed over the integers."""
    reach = int(12 * math.sqrt(mu) + 3 * order * abs(shift) + 40)
    k = np.arange(-reach, reach + 1)
    upper, lower = skellam.logpmf(k - shift, mu / 2, mu / 2), skellam.logpmf(k, mu / 2, mu / 2)
    seen = np.isfinite(upper) & np.isfinite(lower)
    return float(logsumexp(order * upper[seen] + (1 - order) * lower[seen]) / (order - 1))


@pytest.mark.parametrize("mu", [1.0, 3.0, 10.0, 60.0])
def test_the_skellam_bound_is_above_the_true_divergence(mu: float) -> None:
    tightest = 0.0
    for shifts in ((1,), (2,), (3, 0), (1, 1, 1), (2, -1, 1)):
        l1, l2 = sum(map(abs, shifts)), math.sqrt(sum(shift * shift for shift in shifts))
        for order in (2, 3, 5, 9):
            truth = sum(divergence(order, shift, mu) for shift in shifts if shift)
            bound = skellam_rdp(order, mu, l2, l1)
            assert truth <= bound * (1 + 1e-9)
            tightest = max(tightest, truth / bound)
    assert tightest > 0.3


def test_the_check_of_the_skellam_bound_finds_less_noise_than_claimed() -> None:
    for order in (2, 3, 5, 9):
        truth = divergence(order, 2, 60.0)
        assert 0.8 * skellam_rdp(order, 60.0, 2.0, 2.0) < truth < skellam_rdp(order, 60.0, 2.0, 2.0)
        assert truth > skellam_rdp(order, 120.0, 2.0, 2.0)  # as if both Poisson variables had variance mu


def test_skellam_noise_tends_to_gaussian_noise() -> None:
    gaussian = spent([Gaussian(3.0, 50)], 1e-5, "rdp").epsilon
    ratios = []
    for step in (4.0, 64.0, 1024.0, 2.0**20):
        found = spent([Skellam((3.0 * step) ** 2, step, 100 * step, 50)], 1e-5)
        assert found.accountant == "rdp"
        ratios.append(found.epsilon / gaussian)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.05
    assert 1 - 1e-3 < ratios[-1] < 1.005  # whole orders only, so slightly more


def test_what_is_released_with_it_is_paid_for() -> None:
    alone, count = Skellam(1e6, 500.0, 5e4, 10), (900.0, 30.0, 30.0)
    both = spent([replace(alone, extra=(count,))], 1e-5).epsilon
    assert both > spent([alone], 1e-5).epsilon + 0.5
    assert both == spent([alone, Skellam(*count, 10)], 1e-5).epsilon


def test_every_event_composes_with_skellam_noise() -> None:
    """Whole orders alone give the other curves too, never below the accountant with all orders."""
    noiseless = Skellam(1e60, 1.0, 1.0, 1)
    for z, rate, steps in GRID:
        event = SampledGaussian(z, rate, steps)
        found = spent([event, noiseless], 1e-5, "rdp").epsilon
        all_orders = spent([event], 1e-5, "rdp").epsilon
        assert all_orders * (1 - 1e-9) <= found < all_orders * 1.12
        # Without a cost of its own it adds nothing to the other accountant either, but a hundredth of delta.
        tight = spent([event], 0.99e-5).epsilon
        assert spent([event, noiseless], 1e-5).epsilon <= min(found, tight * (1 + 1e-9) + 1e-6)


Parts = list[tuple[float, float]]
"""(weight, mean) of each part of a mixture of normals."""
Branches = list[tuple[float, Parts, Parts]]
"""The probability of each case that is public, and the laws under neighbouring data sets there."""


def composed_epsilon(branches: Branches, z: float, steps: int, delta: float) -> float:
    """Epsilon of `steps` steps at `delta`, from mixtures of N(mean, z^2) on a fine grid and one FFT."""
    width, size = 2e-4, 2**18
    one = np.zeros(size)
    for probability, upper, lower in branches:
        means = [mean for _, mean in upper + lower]
        x = np.linspace(min(means) - 9 * z, max(means) + 9 * z, 50_001)
        above, below = (
            logsumexp([math.log(weight) + norm.logpdf(x, mean, z) for weight, mean in parts], axis=0)
            for parts in (upper, lower)
        )
        losses = np.rint((above - below) / width).astype(np.int64)
        one += probability * np.bincount(losses % size, np.exp(above) * (x[1] - x[0]), size)
    whole = np.fft.irfft(np.fft.rfft(one) ** steps, size)
    at = (np.arange(size) + size // 4) % size - size // 4  # losses from a quarter below zero to three above
    values = at * width

    def excess(epsilon: float) -> float:
        above = values > epsilon
        return float((whole[above] * -np.expm1(epsilon - values[above])).sum() - delta)

    return float(brentq(excess, 0, 60))


def worst(z: float, steps: int, *branches: tuple[float, Parts, Parts]) -> float:
    """The larger epsilon of both directions at 1e-5."""
    swapped = [(probability, lower, upper) for probability, upper, lower in branches]
    return max(composed_epsilon(list(each), z, steps, 1e-5) for each in (branches, swapped))


@pytest.mark.slow
def test_four_records_of_one_owner_cost_what_the_reference_says() -> None:
    """What the unit `owner` avoids: one record is drawn as one owner is, and four of one owner each on its own."""
    step = SampledGaussian(1.0, 0.01, 500)
    assert spent([step], 1e-5).epsilon == pytest.approx(1.3261, abs=1e-3)
    assert spent([replace(step, unit="owner")], 1e-5) == spent([step], 1e-5)
    four = spent([step], 1e-5, group=4)
    assert four.accountant == "pld"
    assert four.epsilon == pytest.approx(6.2431, abs=1e-3)
    mixture = [(float(binom.pmf(j, 4, 0.01)), float(j)) for j in range(5)]
    assert worst(1.0, 500, (1.0, mixture, [(1.0, 0.0)])) == pytest.approx(four.epsilon, abs=2e-3)
    one = (1.0, [(0.99, 0.0), (0.01, 1.0)], [(1.0, 0.0)])
    assert worst(1.0, 500, one) == pytest.approx(1.3261, abs=2e-3)


def test_a_group_of_units_in_sums_over_all_sites_has_so_many_times_the_sensitivity() -> None:
    assert spent([Gaussian(6.0, 4)], 1e-5, group=3) == spent([Gaussian(2.0, 4)], 1e-5)
    assert spent([SampledGaussian(6.0, 1.0, 4)], 1e-5, group=3) == spent([Gaussian(2.0, 4)], 1e-5)
    noise = Skellam(100.0, 5.0, 25.0, 3, extra=((9.0, 1.0, 1.0),))
    thrice = [Skellam(100.0, 15.0, 75.0, 3), Skellam(9.0, 3.0, 3.0, 3)]
    assert spent([noise], 1e-5, group=3).epsilon == spent(thrice, 1e-5).epsilon


@pytest.mark.slow
def test_the_renyi_bound_of_a_group_is_one_too() -> None:
    step = [SampledGaussian(8.0, 0.2, 50)]
    assert spent(step, 1e-5, group=2).epsilon < spent(step, 1e-5, "rdp", group=2).epsilon
    assert spent(step, 1e-5, "rdp", group=2) == spent([Gaussian(4.0, 50)], 1e-5, "rdp")


@pytest.mark.parametrize("group", [0, -1, True])
def test_a_group_of_none_is_refused(group: int) -> None:
    with raises(AccountingError, "group"):
        spent([Gaussian(1.0, 1)], 1e-5, group=group)


def test_a_group_where_several_units_were_charged_is_refused() -> None:
    with raises(AccountingError, "group", says="is 2:"):
        spent([Gaussian(1.0, 1), SampledGaussian(1.0, 0.1, 1)], 1e-5, group=2)


@pytest.mark.slow
def test_for_a_record_a_step_on_owners_replaces_what_is_drawn() -> None:
    """One record may change its owner's gradient from any vector of norm C to any other."""
    records, owners = SampledGaussian(1.0, 0.01, 1), SampledGaussian(1.0, 0.01, 400, "owner")
    mixed = spent([records, owners], 1e-5)
    assert mixed.accountant == "pld"
    assert mixed.note == "for one record: releases for owners are counted with twice their sensitivity"
    replaced = worst(1.0, 400, (1.0, [(0.99, 0.0), (0.01, 1.0)], [(0.99, 0.0), (0.01, -1.0)]))
    assert replaced < mixed.epsilon < replaced + 0.02
    assert mixed.epsilon > spent([records, replace(owners, unit="record")], 1e-5).epsilon + 0.5
    everywhere = spent([records, SampledGaussian(6.0, 1.0, 4, "owner")], 1e-5, "rdp")
    assert everywhere.epsilon == spent([records, Gaussian(6.0, 4)], 1e-5, "rdp").epsilon
    renyi = spent([records, owners], 1e-5, "rdp")
    assert renyi.epsilon == spent([records, SampledGaussian(0.5, 1.0, 400)], 1e-5, "rdp").epsilon
    assert renyi.epsilon > mixed.epsilon


@pytest.mark.slow
def test_for_an_owner_a_release_for_sites_has_twice_the_sensitivity() -> None:
    owners = SampledGaussian(1.0, 0.01, 100, "owner")
    mixed = spent([owners, Gaussian(6.0, 4)], 1e-5)
    assert mixed.note == "for one owner: releases for sites are counted with twice their sensitivity"
    assert mixed.epsilon == spent([owners, SampledGaussian(3.0, 1.0, 4, "owner")], 1e-5).epsilon
    all_three = spent([owners, Gaussian(6.0, 4), SampledGaussian(2.0, 0.01, 10)], 1e-5)
    assert "releases for owners and sites" in all_three.note
    assert all_three.epsilon > mixed.epsilon


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_for_a_record_a_release_for_sites_has_twice_the_sensitivity(accountant: Any) -> None:
    """One record may change its site's update from any vector of norm C to any other: 2 C."""
    steps = SampledGaussian(1.0, 0.01, 100)
    mixed = spent([steps, Gaussian(6.0, 4)], 1e-5, accountant)
    assert mixed.epsilon == spent([steps, SampledGaussian(3.0, 1.0, 4)], 1e-5, accountant).epsilon
    assert "one record" in mixed.note
    noise = Skellam(100.0, 5.0, 25.0, 3, extra=((9.0, 1.0, 1.0),))
    doubled = [Skellam(100.0, 10.0, 50.0, 3), Skellam(9.0, 2.0, 2.0, 3)]
    mixed = spent([SampledGaussian(6.0, 1.0, 4), noise], 1e-5, accountant)
    apart = spent([Gaussian(6.0, 4), *doubled], 1e-5, accountant)  # for sites: the sensitivities as they are
    assert mixed.epsilon == apart.epsilon > spent([Gaussian(6.0, 4), noise], 1e-5, accountant).epsilon
    assert "one record" in mixed.note
    assert "one record" not in apart.note
    assert spent([Gaussian(6.0, 4)], 1e-5, accountant).note == ""


EVENTS = st.lists(
    st.one_of(
        st.builds(SampledGaussian, st.floats(1e-3, 1e9), st.floats(1e-9, 1), st.integers(1, 2**40)),
        st.builds(Gaussian, st.floats(1e-3, 1e9), st.integers(1, 2**40)),
        st.builds(
            Skellam,
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.integers(1, 99),
            st.lists(st.tuples(*[st.floats(1e-9, 1e30)] * 3), max_size=2).map(tuple),
        ),
    ),
    max_size=5,
)


@pytest.mark.slow
@given(EVENTS)
@settings(max_examples=15, deadline=None)
def test_any_events_have_a_renyi_bound(events: list[Event]) -> None:
    assert spent(events, 1e-5, "rdp").epsilon >= 0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    with raises(AccountingError, "delta"):
        spent([Gaussian(1.0, 1)], delta)


def test_an_unknown_accountant_is_refused() -> None:
    with raises(AccountingError, "accountant"):
        spent([], 1e-5, "prv")  # type: ignore[arg-type]  # that is the test


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "accountant", "build"),
    [
        (1.0, "pld", lambda z: [SampledGaussian(z, 0.05, 30)]),
        (8.0, "rdp", lambda z: [SampledGaussian(z, 0.01, 5_000)]),
        (0.3, "pld", lambda z: [Gaussian(z, 100)]),
        (30.0, "pld", lambda z: [Gaussian(z, 2)]),
        (4.0, "pld", lambda z: [replace(skellam_for(z, 1.0, 10**6, 8, 5, 32).event, count=40)]),
    ],
)
def test_calibrated_noise_is_enough_and_no_more(target: float, accountant: Any, build: Any) -> None:
    noise = calibrate(target, 1e-5, build, accountant)
    assert spent(build(noise), 1e-5, accountant).epsilon <= target
    assert spent(build(noise * (1 - 1e-3)), 1e-5, accountant).epsilon > target


def test_calibration_says_which_bound_stops_it() -> None:
    def needs_more_than_there_is(noise: float) -> list[Event]:
        return [Gaussian(min(noise, 2.0), 100)]

    with raises(AccountingError, "target_epsilon", says="65536"):
        calibrate(1.0, 1e-5, needs_more_than_there_is)
    with raises(AccountingError, "target_epsilon", says="0.015625"):
        calibrate(1e9, 1e-5, lambda noise: [Gaussian(noise, 1)])
    with raises(AccountingError, "target_epsilon"):
        calibrate(0.0, 1e-5, lambda noise: [Gaussian(noise, 1)])
