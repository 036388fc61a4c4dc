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
from cloister.protocol.messages.messages import TRAIN, Purpose
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.within import question_within

_DIGITS = 4
"""Decimals to which a calibrated noise multiplier is rounded, upwards, so that all parties show the same."""


@dataclass(frozen=True)
class Evaluated:
    """The evaluations of a run by its sites, which are charged."""

    mechanism: UnitSum
    """How the units' vectors are summed in each."""
    due: tuple[int, ...]
    """The rounds whose models are evaluated; 0 is the initial model."""
    epsilon: float
    """The largest epsilon of all of them together."""


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
    evaluated: Evaluated | None = None
    """How sites evaluate the run's models; None: they do not, or without a charge."""

    @property
    def evaluations(self) -> tuple[Event, ...]:
        """What all evaluations of the run cost together."""
        return () if self.evaluated is None else (self.evaluated.mechanism.event,) * len(self.evaluated.due)

    def cost(self, purpose: Purpose, paid: int = 0) -> tuple[Event, ...]:
        """What one more contribution to a sum costs a site that was charged for `paid` others of that purpose."""
        return self.events(1, paid) if purpose == TRAIN else self.evaluations[:1]

    def events(self, rounds: int, paid: int = 0) -> tuple[Event, ...]:
        """What `rounds` more rounds cost a site that was charged for `paid` other rounds of the run.

        Correlated noise is charged for the whole run in a site's first round, and its later rounds cost nothing more.
        """
        if any(isinstance(event, CorrelatedGaussian) for event in self.round_events):
            return self.round_events if rounds and not paid else ()
        return self.round_events * rounds

    def whole(self, rounds: int) -> tuple[Event, ...]:
        """What a run costs a site that takes part in `rounds` rounds and in all evaluations."""
        return self.events(rounds) + self.evaluations

    def epsilon(self, rounds: int) -> float:
        """Epsilon of a site that took part in `rounds` rounds and in all evaluations."""
        return epsilon_of(self.whole(rounds), self.delta, self.accountant)

    def allowed(self, rounds: int, again: int) -> float:
        """Largest epsilon of a site in a run: the budget; without one, that of all its rounds and some more, and of all
        evaluations.

        Args:
            rounds: Rounds of the plan in which the site takes part.
            again: How often it may train again an update that a crash has lost, and how often it may evaluate again.
        """
        if self.budget is not None:
            return self.budget
        return epsilon_of(self.events(rounds + again) + self.reserved(again), self.delta, self.accountant)

    def reserved(self, again: int) -> tuple[Event, ...]:
        """The most that a site's evaluations cost in a run; `again` as in `allowed`, without a budget only.

        Training never spends it, and evaluations spend nothing else: how many of both there may be is fixed before the
        run, whatever results decide.
        """
        return self.evaluations + self.evaluations[:1] * (again if self.budget is None else 0)

    def allowed_evaluations(self, again: int) -> float:
        """Epsilon of that."""
        return epsilon_of(self.reserved(again), self.delta, self.accountant)


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
    evaluated = _evaluated(plan)
    others = () if evaluated is None else (evaluated.mechanism.event,) * len(evaluated.due)
    try:
        if privacy.noise_multiplier is not None:
            noise = privacy.noise_multiplier
        else:
            assert privacy.target_epsilon is not None, "a sound plan has one of the two"
            _check_target(privacy.target_epsilon, evaluated)
            least = calibrate(
                privacy.target_epsilon,
                privacy.delta,
                lambda z: _round(plan, z, dimension).events * times + others,
                privacy.accountant,
            )
            noise = _rounded_up(least)
        cost = _round(plan, noise, dimension)
    except AccountingError as error:
        field = error.field if error.field.startswith(("privacy.", "question.")) else f"privacy.{error.field}"
        raise PlanError.of(error, field) from error
    assert privacy.unit != "none"
    budget = privacy.budget if privacy.target_epsilon is None else privacy.target_epsilon
    terms = Terms(
        privacy.unit,
        noise,
        privacy.delta,
        cost.events,
        budget,
        privacy.accountant,
        cost.mechanism,
        cost.asked,
        evaluated,
    )
    if evaluated is not None:
        _check_room(terms, plan)
    return terms


def _check_target(target: float, evaluated: Evaluated | None) -> None:
    if evaluated is not None and target <= evaluated.epsilon:
        raise AccountingError(
            "target_epsilon",
            target,
            expected=f"more than the {evaluated.epsilon:g} of server.evaluation_epsilon: it is for training and "
            "evaluations together",
            fix="raise it, or lower server.evaluation_epsilon",
        )


def _check_room(terms: Terms, plan: Plan) -> None:
    """Refuse a budget that would end before the evaluations that were planned for.

    Raises:
        PlanError: the run costs more.
    """
    budget, whole = plan.privacy.budget, terms.epsilon(plan.run.rounds)
    if budget is not None and not whole <= budget:
        found = AccountingError(
            "privacy.budget",
            budget,
            expected=f"at least the {whole:.6g} that all rounds and all evaluations cost together",
            fix="raise it, add noise, take fewer rounds, or lower server.evaluation_epsilon",
        )
        raise PlanError.of(found)


def _rounded_up(noise: float) -> float:
    return math.ceil(noise * 10.0**_DIGITS) / 10.0**_DIGITS


def _evaluated(plan: Plan) -> Evaluated | None:
    """The evaluations of a run, with the least noise by which all of them together cost what the plan states.

    Raises:
        PlanError: no noise does, or the ring has no room for it.
    """
    most, due = plan.server.evaluation_epsilon, plan.charged_evaluations
    if most is None:
        return None
    asked, privacy = question_within(plan), plan.privacy
    try:
        least = calibrate(
            most, privacy.delta, lambda z: (_asked(asked, z).event,) * len(due), privacy.accountant
        )
        return Evaluated(_asked(asked, _rounded_up(least)), due, most)
    except AccountingError as error:
        field = "server.evaluation_epsilon"
        fix = "take a larger one, fewer evaluations (server.evaluate_every), or aggregation.ring_bits = 32"
        raise PlanError(field, most, expected=error.expected, fix=fix) from error


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
    assert unit != "none", "a sound question has a unit"
    shape = Shape(kind.count(plan), kind.touched(plan), kind.bound(plan), question.sites_of_owner)
    sites, bits = plan.cohort.size(), plan.aggregation.ring_bits
    most = 1 if unit == "site" else question.most_units
    return unit_sum(noise, shape, sites, most, plan.honest(), bits, unit)


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
