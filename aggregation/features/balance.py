"""Balance: how many local steps each site of a cohort takes, so that a round is not held by its slowest site.

The coordinator decides a round's list once, from the sites' speeds (`balanced`), journals it, and tells all of it to
each site of the cohort. The secure sum binds what is told in the context of every message: sites that were told
different lists do not finish a sum. Each site checks the list against the plan before it trains (`own_steps`). The plan
limits the ratio of its numbers: a coordinator that gave all sites but one a single step would get a sum that is almost
that site's update. Within the limits a crafted model can still single out a site by its steps; a privacy unit bounds
what the coordinator learns by it.

A site that takes more steps must not count for more. Its update x_i of tau_i steps is scaled before it is coded, to

    x_i mean(tau) / tau_i

with the mean over the round's list, so the mean of the scaled updates is FedNova's step with uniform weights (Wang
et al. 2020, "Tackling the objective inconsistency problem in heterogeneous federated optimization", section 4:
tau_eff sum_i p_i x_i / |a_i|_1 with |a_i|_1 = tau_i and tau_eff = sum_i p_i tau_i). The list is public, so this
takes no message. tau_eff is that of the whole list, whoever drops out.

With weights by tokens a site's tokens are scaled by the same factor before they are its weight: it counts by the
tokens of a step, not by its number of steps.

It is exact for SGD without momentum and with a constant learning rate on a linear loss, where each step of a site
is the same: the mean is then that of sites that all take mean(tau) steps. On other losses later steps see other
gradients, as in FedNova itself. For AdamW and Muon it is an approximation: a step has about the length of the
learning rate whatever the gradient, so an update grows with tau_i too, but the moments of a site with few steps are
further from their stationary values. The learning rate follows the plan's steps, not the site's (`optimizer.py`):
its mean over a round is about that of the plan for every site, which |a_i|_1 = tau_i needs.

The speeds: with `"weighted"` a site declares its speed when it joins. With `"dynamic"` it is measured: the steps of a
round over the seconds in which the site took them. Each site times its own training. Between the coordinator's request
and the answer lie also the start of processes, transfers and, in a simulation, the wait for a worker, which do not
grow with the steps. A site that reports a wrong time changes its own number of steps and, by the median, those of the
others, within the plan's limits, as it could by being slow.

In asynchronous rounds a site takes the steps of the list that came with its model. Its update is scaled by the mean of
that list, and its speed is the steps of that list over its seconds, whatever round the update is summed in. The lists
of two rounds can have different means, and staleness weighs updates too, so the mean is FedNova's step only roughly.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from cloister.aggregation.features.feature import (
    AtCoordinator,
    AtSite,
    Basis,
    Feature,
    Figures,
    Given,
    Me,
    Summed,
)
from cloister.protocol.errors import BalanceError
from cloister.protocol.figure import Figure
from cloister.protocol.messages.messages import Limit, Name
from cloister.protocol.messages.wire import from_bytes, to_bytes
from cloister.protocol.plan.plan import LocalSection, Plan
from cloister.protocol.plan.threshold import LARGEST

NAME = "balance"

LocalSteps: TypeAlias = Annotated[tuple[tuple[Name, int], ...], Limit(LARGEST)]
"""The optimizer steps of each site of a round's cohort, sorted by name."""

_LAST = 5
"""Rounds of a site whose median is its speed, so that one odd round does not change it."""
_SHORTEST, _LONGEST = 1e-6, 1e9
"""Seconds that a training may take; others measure nothing."""


@dataclass(frozen=True)
class Steps:
    """What all sites of a sum are told; `steps_in` reads it."""

    of: LocalSteps


def steps_in(told: bytes) -> LocalSteps:
    """The list in what was told.

    Raises:
        EncodingError: it has none.
    """
    return from_bytes(Steps, told).of


@dataclass(frozen=True)
class OwnSteps:
    """What a round's list says to one site."""

    steps: int
    """Its optimizer steps."""
    factor: float = 1.0
    """What its update is scaled by."""


def balanced(local: LocalSection, speeds: Mapping[str, float | None]) -> LocalSteps:
    """The steps of a cohort: `local.steps` at the median of the known speeds, others in proportion, within the limits.

    Args:
        local: The plan's section.
        speeds: For each site of the cohort its speed, positive and finite, in any unit that is the same for all; None
            if it is not known: the site takes `local.steps`.

    Returns:
        Sites and their steps, sorted by name.
    """
    known = [speed for speed in speeds.values() if speed is not None]
    median = statistics.median(known) if known else 1.0
    least, most = local.step_limits()

    def steps(speed: float | None) -> int:
        wanted = local.steps if speed is None else round(local.steps * speed / median)
        return min(max(wanted, least), most)

    return tuple((site, steps(speed)) for site, speed in sorted(speeds.items()))


def own_steps(plan: Plan, steps: LocalSteps, site: str, cohort: tuple[str, ...] | None) -> OwnSteps:
    """What a list of steps that a coordinator sent says to a site, after a check that the plan allows the list.

    Args:
        plan: A plan with `local.balance`.
        steps: The list, as the coordinator sent it.
        site: The site.
        cohort: The cohort as the site has drawn it; None for a sum in clear, where a site knows its size alone.

    Raises:
        BalanceError: its sites are not the cohort, or a number is outside the plan's limits.
    """
    names = tuple(name for name, _ in steps)
    if cohort is not None and names != cohort:
        raise BalanceError(
            "local steps",
            f"a list of {len(names)} sites",
            expected=f"one number for each of the {len(cohort)} sites of the cohort, sorted by name",
        )
    if not 0 < len(names) <= plan.cohort.size() or names != tuple(sorted(set(names))) or site not in names:
        raise BalanceError(
            "local steps",
            f"a list of {len(names)} sites",
            expected=f"one number for {site} and each other site of the cohort, at most {plan.cohort.size()}, sorted "
            "by name",
        )
    least, most = plan.local.step_limits()
    for name, number in steps:
        if not least <= number <= most:
            raise BalanceError(
                f"local steps of {name}",
                number,
                expected=f'{least} to {most}, as the plan allows with local.balance = "{plan.local.balance}"',
            )
    own = dict(steps)[site]
    return OwnSteps(own, sum(number for _, number in steps) / (len(steps) * own))


def speed_of(steps: int, seconds: float) -> float | None:
    """Steps per second; None where the seconds measure nothing, as those of an update that was kept."""
    return steps / seconds if _SHORTEST <= seconds <= _LONGEST else None


class Measured:
    """The speeds that were measured in finished rounds, in steps per second."""

    def __init__(self) -> None:
        self._of: dict[str, deque[float]] = {}

    def add(self, speeds: Mapping[str, float]) -> None:
        """Take the speeds of a finished round."""
        for site, speed in speeds.items():
            self._of.setdefault(site, deque(maxlen=_LAST)).append(speed)

    def get(self, site: str) -> float | None:
        """The median of a site's newest speeds; None where it has none."""
        return statistics.median(self._of[site]) if site in self._of else None


@dataclass(frozen=True)
class _AtSite(AtSite):
    own: OwnSteps
    measured: bool

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> _AtSite:
        own = own_steps(basis.plan, steps_in(told), me.name, me.cohort())
        return cls(own, basis.plan.local.balance == "dynamic")

    def steps(self, steps: int) -> int:
        return self.own.steps

    def factor(self) -> float:
        return self.own.factor

    def timed(self) -> bool:
        return self.measured


class _AtCoordinator(AtCoordinator):
    def __init__(self, basis: Basis, given: Given) -> None:
        super().__init__(basis, given)
        self._declared = given.declared
        self._measured = Measured()
        self._dynamic = basis.plan.local.balance == "dynamic"

    def tell(self, number: int, cohort: Sequence[str]) -> bytes:
        speed = self._measured.get if self._dynamic else self._declared
        return to_bytes(Steps(balanced(self.plan.local, {site: speed(site) for site in cohort})))

    def keeps(self) -> bool:
        return True

    def cohort(self, told: bytes, cohort: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(site for site, _ in steps_in(told))

    def timed(self, trainings: Mapping[str, tuple[bytes, float]]) -> dict[str, float] | None:
        if not self._dynamic:
            return None
        speeds = {
            site: speed_of(dict(steps_in(told))[site], seconds) for site, (told, seconds) in trainings.items()
        }
        return {site: speed for site, speed in speeds.items() if speed is not None} or None

    def recall(self, noted: Any) -> None:
        self._measured.add(noted)

    def figures(self, sums: Sequence[Summed]) -> Figures:
        taken = [steps for summed in sums for _, steps in steps_in(dict(summed.told).get(NAME, b""))]
        return {"least_steps": min(taken), "most_steps": max(taken)}


FEATURE = Feature(
    NAME,
    wanted=lambda basis: basis.plan.local.balance != "fixed",
    site=_AtSite,
    coordinator=_AtCoordinator,
    tells=True,
    figures=(
        Figure("least_steps", "fewest local steps", ",", over="least"),
        Figure("most_steps", "most local steps", ",", over="greatest"),
    ),
)
