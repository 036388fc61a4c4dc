"""The game of a planner who sees the results of one run before the next one is planned: what ledgers accept holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from cloister.clients.consent.spending import Spending
from cloister.clients.setup.config import SiteConfig
from cloister.privacy.accounting.accountant import ORDERS, over_runs, spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.policy import Policy
from cloister.privacy.mechanism.events import Event, Gaussian, SampledGaussian, Skellam, to_json
from cloister.protocol.errors import BudgetError
from cloister.tests.parties.federation import RECORD, tiny

LIMIT, DELTA = 1.0, 1e-5
FIRST = 5.0
"""Noise of the first run, which draws every record in its one step."""
Accepts = Callable[[Event], bool]


def tail(epsilon: NDArray[np.float64] | float, noise: float, rate: float) -> NDArray[np.float64]:
    """The exact delta of one step at each epsilon: of (1 - q) N(0, z^2) + q N(1, z^2) against N(0, z^2)."""
    with np.errstate(all="ignore"):
        ratio = (np.exp(epsilon) - (1 - rate)) / rate
        least = np.where(ratio > 0, (2 * noise**2 * np.log(ratio) + 1) / 2, -np.inf)
        present = (1 - rate) * norm.sf(least / noise) + rate * norm.sf((least - 1) / noise)
        return np.asarray(np.maximum(present - np.exp(epsilon) * norm.sf(least / noise), 0.0))


def first_result() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probability of each result of the first run with the record, and its privacy loss."""
    x = np.linspace(-9 * FIRST, 1 + 12 * FIRST, 40_001)
    return norm.pdf((x - 1) / FIRST) / FIRST * (x[1] - x[0]), (2 * x - 1) / (2 * FIRST**2)


def continuations() -> Iterator[tuple[float, float]]:
    """(noise, rate) of second runs: for each rate the least noise within (LIMIT, DELTA) if it were planned beforehand,
    and more of it."""
    weight, loss = first_result()
    for rate in (*np.geomspace(1e-6, 0.5, 12), 1.0):

        def over(noise: float, rate: float = float(rate)) -> float:
            return float((weight * tail(LIMIT - loss, noise, rate)).sum()) - DELTA

        least = 0.05 if over(0.05) <= 0 else brentq(over, 0.05, 200)
        yield from ((least * more, float(rate)) for more in (1.0005, 3.0, 10.0))


def of_a_site(folder: Path) -> Iterator[Accepts]:
    """Each a site with a policy: whether its ledger accepts a run of one round."""
    plan = tiny(*RECORD, f"privacy.delta={DELTA}")
    terms = terms_of(plan, 1)
    assert terms is not None
    policy = Policy(greatest_epsilon=LIMIT, greatest_delta=DELTA)
    for number in range(10**6):
        config = SiteConfig(name="ward", data="data.jsonl", state=str(folder / str(number)), dataset="ward")
        spending, runs = Spending(config), iter("abc")

        def accepts(event: Event, spending: Spending = spending, runs: Iterator[str] = runs) -> bool:
            run, asked = next(runs), replace(terms, round_events=(event,), budget=None)
            # What joins and what charges agree.
            fits = spending.after(plan, asked, run, 1, DELTA) <= LIMIT
            try:
                spending.pay(plan, asked, run, 1, 1, policy)
            except BudgetError:
                return bool(fits)
            assert fits
            return True

        yield accepts


def of_a_dataset(folder: Path) -> Iterator[Accepts]:
    """Each a ledger over simulations, with a limit: whether it accepts a run of one round."""
    for number in range(10**6):
        limited = f"simulation.ledger={folder / str(number)}.sqlite", f"simulation.greatest_epsilon={LIMIT}"
        plan = tiny(*RECORD, f"privacy.delta={DELTA}", *limited, "simulation.dataset=ward")
        terms, ledger, runs = terms_of(plan, 1), DatasetLedger(plan), iter("abc")
        assert terms is not None
        ledger.check(replace(terms, round_events=(SampledGaussian(100.0, 0.01, 1),)), "", (), ["one"])

        def accepts(event: Event, ledger: DatasetLedger = ledger, runs: Iterator[str] = runs) -> bool:
            try:
                ledger.pay(next(runs), 1, "one", 0, [event])
            except BudgetError:
                return False
            expected = (
                DELTA if isinstance(event, SampledGaussian) and event.noise_multiplier == FIRST else 2 * DELTA
            )
            assert ledger.spent().delta == expected
            return True

        yield accepts


@pytest.mark.parametrize("ledgers", [of_a_site, of_a_dataset], ids=["site", "dataset"])
def test_a_second_run_is_refused_that_fits_only_if_it_was_planned_beforehand(
    tmp_path: Path, ledgers: Callable[[Path], Iterator[Accepts]]
) -> None:
    first = SampledGaussian(FIRST, 1.0, 1)
    noise = next(noise for noise, rate in continuations() if rate == 1)
    second = SampledGaussian(noise, 1.0, 1)
    assert spent([first, second], DELTA).epsilon <= LIMIT
    accepts = next(ledgers(tmp_path))
    assert accepts(first)
    assert not accepts(second)


@pytest.mark.slow  # the game itself, with many second runs
@pytest.mark.parametrize("ledgers", [of_a_site, of_a_dataset], ids=["site", "dataset"])
def test_a_run_planned_after_the_results_of_another_stays_within_the_limit(
    tmp_path: Path, ledgers: Callable[[Path], Iterator[Accepts]]
) -> None:
    """The planner takes, for each result of the first run, the second run with the largest exact delta. Composed by
    privacy loss distributions, the ledgers accept runs with which this costs 2.2 times the delta."""
    weight, loss = first_result()
    accepted = [np.maximum(1 - np.exp(LIMIT - loss), 0.0)]  # no second run
    first = SampledGaussian(FIRST, 1.0, 1)
    for accepts, (noise, rate) in zip(ledgers(tmp_path), continuations(), strict=False):
        assert accepts(first)
        if accepts(SampledGaussian(noise, rate, 1)):
            accepted.append(tail(LIMIT - loss, noise, rate))
    assert len(accepted) > 8
    assert (weight * np.max(accepted, axis=0)).sum() <= 2 * DELTA


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "event",
    [
        SampledGaussian(1.0, 0.01, 20),
        SampledGaussian(1.0, 0.01, 20, "owner"),
        Gaussian(2.0, 3),
        Skellam(1e6, 100.0, 1000.0, 2),
        Skellam(1e6, 100.0, 1000.0, 2, honest=6),
    ],
)
def test_runs_of_one_mechanism_cost_what_one_long_run_does(event: Event, accountant: str) -> None:
    """Also where the same noise is that of fewer sites, or trusts more."""
    more = event
    if isinstance(event, SampledGaussian):
        more = replace(event, steps=7, trusts="coordinator")
    elif isinstance(event, Skellam):
        more = replace(event, honest=3)
    fixed = spent([event, event, more], DELTA, "rdp" if accountant == "rdp" else "pld")
    assert over_runs([to_json([event, event]), to_json([more])], DELTA, accountant) == fixed
    assert fixed.delta == DELTA


@pytest.mark.parametrize(
    "events",
    [
        (Gaussian(4.0, 1), Gaussian(5.0, 1)),
        (Gaussian(4.0, 1), Skellam(1e6, 100.0, 1000.0, 2)),
        (SampledGaussian(1.0, 0.01, 1), SampledGaussian(1.0, 0.02, 1)),
        (SampledGaussian(1.0, 0.01, 1), SampledGaussian(1.0, 0.01, 1, "owner")),
    ],
)
def test_mechanisms_that_differ_cost_more_than_if_they_were_planned_beforehand(
    events: tuple[Event, ...],
) -> None:
    found = over_runs([to_json([event]) for event in events], DELTA)
    assert (found.accountant, found.delta) == ("rdp", 2 * DELTA)
    assert math.inf > found.epsilon > spent(events, DELTA).epsilon


def test_the_orders_are_fixed_and_each_has_its_part_of_delta() -> None:
    """Two Gaussians by hand: alpha rho at each order, converted at delta / K (Canonne et al. 2020, Proposition 12)."""
    rho = 1 / (2 * 4.0**2) + 1 / (2 * 5.0**2)
    part = DELTA / len(ORDERS)
    by_hand = min(a * rho + math.log1p(-1 / a) - math.log(part * a) / (a - 1) for a in ORDERS)
    assert over_runs(
        [to_json([Gaussian(4.0, 1)]), to_json([Gaussian(5.0, 1)])], DELTA
    ).epsilon == pytest.approx(by_hand)
