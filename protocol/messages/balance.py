"""Balance: how many local steps each site of a cohort takes, so that a round is not held by its slowest site.

The coordinator decides a round's list once, from the sites' speeds (`balanced`), journals it, and sends all of it
to each site of the cohort with the model. The list is a part of the instructions of the sum (`messages.Instructions`),
which the secure sum binds in the context of every message: sites that were told different lists do not finish a
sum. Each site checks the list against the plan before it trains (`own_steps`). The plan limits the ratio of its
numbers: a coordinator that gave all sites but one a single step would get a sum that is almost that site's update.

A site that takes more steps must not count for more. Its update x_i of tau_i steps is scaled before it is coded, to

    x_i mean(tau) / tau_i

with the mean over the round's list, so the mean of the scaled updates is FedNova's step with uniform weights (Wang
et al. 2020, "Tackling the objective inconsistency problem in heterogeneous federated optimization", section 4:
tau_eff sum_i p_i x_i / |a_i|_1 with |a_i|_1 = tau_i and tau_eff = sum_i p_i tau_i). The list is public, so this
takes no message. tau_eff is that of the whole list, whoever drops out.

It is exact for SGD without momentum and with a constant learning rate on a linear loss, where each step of a site
is the same: the mean is then that of sites that all take mean(tau) steps. On other losses later steps see other
gradients, as in FedNova itself. For AdamW and Muon it is an approximation: a step has about the length of the
learning rate whatever the gradient, so an update grows with tau_i too, but the moments of a site with few steps are
further from their stationary values. The learning rate follows the plan's steps, not the site's (`optimizer.py`):
its mean over a round is about that of the plan for every site, which |a_i|_1 = tau_i needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from cloister.protocol.errors import BalanceError
from cloister.protocol.messages.messages import EVALUATE, LocalSteps, Purpose
from cloister.protocol.plan.plan import LocalSection, Plan


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


def own_steps(
    plan: Plan, purpose: Purpose, steps: LocalSteps, site: str, cohort: tuple[str, ...] | None
) -> OwnSteps:
    """What a list of steps that a coordinator sent says to a site, after a check that the plan allows the list.

    Args:
        plan: The plan.
        purpose: What is summed; an evaluation has no steps.
        steps: The list, as the coordinator sent it.
        site: The site.
        cohort: The cohort as the site has drawn it; None for a sum in clear, where a site knows its size alone.

    Raises:
        BalanceError: the plan allows no list or requires one, its sites are not the cohort, or a number is outside the
            plan's limits.
    """
    balance = plan.local.balance
    if purpose == EVALUATE or balance == "fixed":
        if steps:
            where = "an evaluation" if purpose == EVALUATE else 'local.balance = "fixed"'
            raise BalanceError("local steps", f"a list of {len(steps)} sites", expected=f"none, with {where}")
        return OwnSteps(plan.local.steps)
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
                expected=f'{least} to {most}, as the plan allows with local.balance = "{balance}"',
            )
    own = dict(steps)[site]
    return OwnSteps(own, sum(number for _, number in steps) / (len(steps) * own))
