"""The privacy terms of a plan: the noise of a round, what it costs, and how much may be spent.

The coordinator and the sites each derive them from the plan alone, so neither has to trust the other's figures. All
figures are for one site in one round that it takes part in; the ledgers compose them over a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from cloister.privacy.accounting.accountant import Accountant, calibrate, epsilon_of
from cloister.privacy.mechanism.correlated import Participation, optimal
from cloister.privacy.mechanism.events import CorrelatedGaussian, Event, SampledGaussian, Unit
from cloister.privacy.mechanism.site_noise import SiteMechanism, central, distributed
from cloister.privacy.mechanism.unit_sum import Shape, UnitSum, unit_sum
from cloister.protocol.errors import AccountingError, PlanError
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of

_DIGITS = 4
"""Decimals to which a calibrated noise multiplier is rounded, upwards, so that all parties show the same."""


@dataclass(frozen=True)
class Terms:
    """The privacy of a plan."""

    unit: Unit
    noise_multiplier: float
    """z that is charged: standard deviation of the noise over the clipping norm, on a sum of clipped terms."""
    delta: float
    round_events: tuple[Event, ...]
    """What one round costs a site that takes part in it; with correlated noise, all of its rounds together."""
    budget: float | None
    """Largest epsilon of a site over the run."""
    accountant: Accountant
    mechanism: SiteMechanism | None
    """How updates are summed; unit `site` only."""
    asked: UnitSum | None = None
    """How the units' vectors are summed; a question only."""

    def events(self, rounds: int, paid: int = 0) -> tuple[Event, ...]:
        """What `rounds` more rounds cost a site that was charged for `paid` other rounds of the run.

        Correlated noise is charged for the whole run in a site's first round, and its later rounds cost nothing more.
        """
        if any(isinstance(event, CorrelatedGaussian) for event in self.round_events):
            return self.round_events if rounds and not paid else ()
        return self.round_events * rounds

    def epsilon(self, rounds: int) -> float:
        """Epsilon of a site that took part in `rounds` rounds."""
        return epsilon_of(self.events(rounds), self.delta, self.accountant)

    def allowed(self, rounds: int, again: int) -> float:
        """Largest epsilon of a site in a run: the budget; without one, that of all its rounds and some more.

        Args:
            rounds: Rounds of the plan in which the site takes part.
            again: How often it may train again an update that a crash has lost.
        """
        return self.epsilon(rounds + again) if self.budget is None else self.budget


def terms_of(plan: Plan, dimension: int) -> Terms | None:
    """The privacy of `plan`, whose updates have `dimension` coordinates; None if it has no privacy unit.

    Raises:
        PlanError: the target epsilon cannot be met, or the ring has no room for the noise.
    """
    return None if plan.privacy.unit == "none" else _terms(plan.to_json(), dimension)


@lru_cache(maxsize=16)
def _terms(plan_json: str, dimension: int) -> Terms:
    plan = soundness.recorded(plan_json)  # the caller has checked it
    privacy = plan.privacy
    times = 1 if privacy.correlated else plan.run.rounds  # correlated noise has one event for all rounds
    try:
        if privacy.noise_multiplier is not None:
            noise = privacy.noise_multiplier
        else:
            assert privacy.target_epsilon is not None, "a sound plan has one of the two"
            least = calibrate(
                privacy.target_epsilon,
                privacy.delta,
                lambda z: _round(plan, z, dimension).events * times,
                privacy.accountant,
            )
            noise = math.ceil(least * 10**_DIGITS) / 10**_DIGITS
        cost = _round(plan, noise, dimension)
    except AccountingError as error:
        field = error.field if error.field.startswith(("privacy.", "question.")) else f"privacy.{error.field}"
        raise PlanError.of(error, field) from error
    assert privacy.unit != "none"
    budget = privacy.budget if privacy.target_epsilon is None else privacy.target_epsilon
    return Terms(
        privacy.unit,
        noise,
        privacy.delta,
        cost.events,
        budget,
        privacy.accountant,
        cost.mechanism,
        cost.asked,
    )


def participation(plan: Plan) -> Participation | None:
    """How often a site takes part in a run with correlated noise, as the plan states it; None: the noise is
    independent."""
    correlated = plan.privacy.correlated
    if correlated is None:
        return None
    return Participation(plan.run.rounds, correlated.separation, correlated.participations)


class _Round(NamedTuple):
    """What a round costs, and how its sum is noised; as in `Terms`."""

    events: tuple[Event, ...]
    mechanism: SiteMechanism | None = None
    asked: UnitSum | None = None


def _asked(plan: Plan, noise: float) -> UnitSum:
    """The mechanism of a question with a noise multiplier."""
    unit, kind, question = plan.privacy.unit, kind_of(plan), question_of(plan)
    assert unit in ("record", "owner"), "a sound question has one of them"
    shape = Shape(kind.count(plan), kind.touched(plan), kind.bound(plan), question.sites_of_owner)
    sites, bits = plan.cohort.size(), plan.aggregation.ring_bits
    return unit_sum(noise, shape, sites, question.most_units, plan.honest(), bits, unit)


def _round(plan: Plan, noise: float, dimension: int) -> _Round:
    """What a round costs with a noise multiplier, and the mechanism of its sum, where that adds the noise."""
    privacy, bits = plan.privacy, plan.aggregation.ring_bits
    if plan.question is not None:
        asked = _asked(plan, noise)
        return _Round((asked.event,), asked=asked)
    if privacy.unit in ("record", "owner"):
        assert privacy.sampling_rate is not None, "a sound plan has it"
        trusts: Literal["", "coordinator"] = "coordinator" if privacy.trusts_coordinator else ""
        event = SampledGaussian(noise, privacy.sampling_rate, plan.local.steps, privacy.unit, trusts)
        return _Round((event,))
    # With groups each group's sum has noise for itself, and a site is in one group.
    sites = max(plan.summed())
    if privacy.trusted_coordinator:
        pattern = participation(plan)
        correlated = None
        if pattern is not None and privacy.correlated is not None:
            correlated = optimal(pattern, privacy.correlated.buffers), pattern
        mechanism = central(noise, dimension, sites, bits, privacy.adaptive, correlated)
    else:
        mechanism = distributed(noise, dimension, sites, plan.honest(), bits, privacy.adaptive)
    return _Round((mechanism.event,), mechanism)
