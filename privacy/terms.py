"""What a plan's privacy comes to: the noise of a round, what it costs, and how much may be spent.

Coordinator and sites each derive it from the plan alone, so neither has to believe the other. All figures are of one
site in one round that it takes part in; a run composes them in the ledgers.

For the unit `site` an update is divided by the clipping norm C before it is clipped to norm 1, coded and noised, so
what a round costs does not depend on C, which adaptive clipping changes from round to round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cloister.privacy.accounting import (
    WRAP_DEVIATIONS,
    Event,
    Gaussian,
    SampledGaussian,
    Unit,
    calibrate,
    from_json,
    noised_with,
    relation,
    skellam_for,
    spent,
)
from cloister.privacy.clip import rounded_l2
from cloister.protocol import soundness
from cloister.protocol.errors import AccountingError, PlanError
from cloister.protocol.plan import Plan

_DIGITS = 4
"""Decimals to which a calibrated noise multiplier is rounded, upwards, so that all parties show the same."""


@dataclass(frozen=True)
class Coding:
    """How a site's update, divided by the clipping norm, becomes integers (unit `site`)."""

    scale: float
    """Integer steps in the clipping norm."""
    variance: float
    """Variance of the Skellam noise that each site adds to each integer; 0 where the coordinator adds the noise."""
    deviation: float
    """Standard deviation of the noise on the decoded sum that counts, in units of the clipping norm."""
    count_step: int
    """Adaptive clipping: the integer r that a site adds as +r (not clipped) or -r; 0 without it."""
    count_deviation: float
    """Standard deviation of the noise on the number of unclipped sites; 0 without adaptive clipping."""


@dataclass(frozen=True)
class Terms:
    """The privacy of a plan."""

    unit: Unit
    noise_multiplier: float
    """z that is charged: standard deviation of the noise over the clipping norm, on a sum of clipped terms."""
    delta: float
    round_events: tuple[Event, ...]
    """What one round costs a site that takes part in it."""
    budget: float | None
    """Largest epsilon of a site over the run."""
    accountant: str
    coding: Coding | None
    """Unit `site` only."""

    @property
    def relation(self) -> str:
        """How neighbours differ."""
        return relation(self.unit)

    def epsilon(self, rounds: int) -> float:
        """Epsilon of a site that took part in `rounds` rounds."""
        return epsilon_of(self.round_events * rounds, self.delta, self.accountant)


def composed(events: Sequence[str], delta: float) -> float:
    """Epsilon of ledger entries' events, for `ledger.Ledger`: by the tighter accountant that can compose them."""
    return spent([event for text in events for event in from_json(text)], delta).epsilon


def epsilon_of(events: Sequence[Event], delta: float, accountant: str) -> float:
    """`accounting.spent`, as a number."""
    return spent(events, delta, "rdp" if accountant == "rdp" else "pld").epsilon


def terms_of(plan: Plan, dimension: int) -> Terms | None:
    """The privacy of `plan`, whose updates have `dimension` coordinates; None where it has no privacy unit.

    Raises:
        PlanError: the target epsilon cannot be met, or the ring has no room for the noise.
    """
    return None if plan.privacy.unit == "none" else _terms(plan.to_json(), dimension)


@lru_cache(maxsize=16)
def _terms(plan_json: str, dimension: int) -> Terms:
    plan = soundness.from_json(plan_json)
    privacy, rounds = plan.privacy, plan.run.rounds
    try:
        if privacy.noise_multiplier is not None:
            noise = privacy.noise_multiplier
        else:
            assert privacy.target_epsilon is not None, "a sound plan has one of the two"
            least = calibrate(
                privacy.target_epsilon,
                privacy.delta,
                lambda z: _round(plan, z, dimension)[0] * rounds,
                privacy.accountant,
            )
            noise = math.ceil(least * 10**_DIGITS) / 10**_DIGITS
        events, coding = _round(plan, noise, dimension)
    except AccountingError as error:
        field = error.field if error.field.startswith("privacy.") else f"privacy.{error.field}"
        raise PlanError(field, error.value, expected=error.expected, fix=error.fix) from error
    assert privacy.unit != "none"
    budget = privacy.budget if privacy.target_epsilon is None else privacy.target_epsilon
    return Terms(privacy.unit, noise, privacy.delta, events, budget, privacy.accountant, coding)


def _round(plan: Plan, noise: float, dimension: int) -> tuple[tuple[Event, ...], Coding | None]:
    """What a round costs with a noise multiplier, and how updates are coded for it."""
    privacy = plan.privacy
    if privacy.unit == "record":
        assert privacy.sampling_rate is not None, "a sound plan has it"
        return (SampledGaussian(noise, privacy.sampling_rate, plan.local.steps),), None
    sigma_b = 0.0 if privacy.adaptive is None else privacy.adaptive.count_noise
    on_update = noised_with(noise, sigma_b) if sigma_b else noise
    if privacy.trusted_coordinator:
        return (Gaussian(noise, 1),), _central(plan, on_update, sigma_b, dimension)
    cohort = plan.cohort.size()
    colluders = plan.threshold().colluders
    found = skellam_for(
        on_update, 1.0, dimension, cohort, plan.cohort.needed(), colluders, plan.aggregation.ring_bits
    )
    event, step = found.event, 0
    if sigma_b:
        step = max(1, math.floor(math.sqrt(event.variance) / (2 * sigma_b)))
        _check_count_fits(step, found.variance_per_site, cohort, sigma_b, plan.aggregation.ring_bits)
        event = dataclasses.replace(event, extra=((event.variance, float(step), float(step)),))
    deviation = math.sqrt(event.variance) / found.scale
    of_count = math.sqrt(event.variance) / (2 * step) if step else 0.0
    return (event,), Coding(found.scale, found.variance_per_site, deviation, step, of_count)


def _check_count_fits(step: int, variance: float, cohort: int, sigma_b: float, ring_bits: int) -> None:
    """A count with little noise takes large steps, and `skellam_for` has left room for those of the update alone.

    Raises:
        AccountingError: the sum of the count, with its noise, could wrap.
    """
    if cohort * step + WRAP_DEVIATIONS * math.sqrt(cohort * variance) >= 2.0 ** (ring_bits - 1):
        raise AccountingError(
            "privacy.adaptive.count_noise",
            sigma_b,
            expected=f"more: with so little noise a count of {cohort} sites does not fit in a ring of {ring_bits} bits",
            fix="raise privacy.adaptive.count_noise",
        )


def _central(plan: Plan, on_update: float, sigma_b: float, dimension: int) -> Coding:
    """The finest code whose sum fits in the ring; the noise is for the rounded vectors' own, larger norm.

    The mean is rounded to float32 before the noise, by at most 2^-24 of itself, and its norm is at most that of a term;
    so two means of neighbours are further apart by up to 2^-23 of a term's norm, and their sums by n times that.
    """
    room = 2.0 ** (plan.aggregation.ring_bits - 1) / plan.cohort.size() - 2
    if room < 2:
        raise AccountingError(
            "ring_bits", plan.aggregation.ring_bits, expected=f"a ring that holds {plan.cohort.size()} terms"
        )
    scale = 2.0 ** math.floor(math.log2(room))
    apart = rounded_l2(scale, dimension) * (1 + plan.cohort.size() * 2.0**-23)
    deviation = on_update * apart / scale
    return Coding(scale, 0.0, deviation, int(scale) // 2 if sigma_b else 0, sigma_b)
