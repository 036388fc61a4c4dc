"""Whom an epsilon trusts: what a list of events costs against all other parties together, and the share of questions.

An epsilon over a dataset composes events that trust different parties. The noise of DP-SGD is that of the unit's own
site and holds against everybody else. That of a question is of several honest sites together, and holds as long as no
more sites collude than its plan assumes. So a list with questions has two epsilons: the one that the accountant
composes, and a larger one against the coordinator and all other sites together.

Refused: the share of questions as a part of one epsilon. Epsilons do not add up, so the parts are composed alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cloister.privacy.accounting.accountant import Spent, spent
from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    Skellam,
    from_json,
)

_BY_COORDINATOR = "in one of the runs the coordinator adds the noise, so nothing holds against it"
_CRAFTED = "in one of the runs the coordinator is trusted to send no crafted weights"
_UNKNOWN = "one of the charges does not say of how many sites its noise is, as those of earlier versions"


class Alone(NamedTuple):
    """Events against all other parties together."""

    events: tuple[Event, ...]
    """The events with the noise of the unit's own site alone; none if one of them does not hold, or is not known to."""
    why_not: str = ""
    """Why there are none; empty if there are."""


def alone(events: Iterable[Event]) -> Alone:
    """What the coordinator and all other sites see together, of the site of one unit.

    A `SampledGaussian` has no other noise than that of the unit's own site, and stays as it is. In a sum they know the
    vectors and the noise of all other sites, and subtract them: what is left is the vector of the site with its own
    part of the noise, Skellam of variance mu / honest. Neighbours still differ in one unit of that site, so the
    sensitivities are the same. It needs neither the secure sum nor the noise of another site.
    """
    found: list[Event] = []
    for event in events:
        match event:
            case Gaussian() | CorrelatedGaussian():
                return Alone((), _BY_COORDINATOR)
            case SampledGaussian(trusts="coordinator"):
                return Alone((), _CRAFTED)
            case Skellam(honest=0):
                return Alone((), _UNKNOWN)
            case Skellam() as shared:
                found.append(_own_part(shared))
            case own:
                found.append(own)
    return Alone(tuple(found))


def _own_part(event: Skellam) -> Skellam:
    """The same sums with the noise of one site."""
    extra = tuple((variance / event.honest, l2, l1) for variance, l2, l1 in event.extra)
    return replace(event, variance=event.variance / event.honest, extra=extra, honest=1)


def is_question(event: Event) -> bool:
    """Whether an event is the noised sum of what units are asked: training sums updates of whole sites."""
    return isinstance(event, Skellam) and (event.asked or event.unit != "site")


@dataclass(frozen=True)
class Shares:
    """What a list of events with questions costs in other ways than as a whole. Each part has a delta of its own."""

    against_all: Spent | None
    """All events, against the coordinator and all other sites together, and so at least what `over_runs` gives; None:
    there is no figure."""
    why_not: str
    """Why there is none; empty if there is."""
    questions: Spent
    """The questions alone, against those who know the noise of no more sites than their plans assume."""
    rest: Spent | None
    """All other events alone; None: there are none."""


def shares(
    events: Iterable[str], delta: float, accountant: str = "pld", *, adaptive: bool = True
) -> Shares | None:
    """The figures beside that of `accountant.over_runs`, or of one run, composed in the same way; None: no question.

    Args:
        events: The events of ledger entries, each as JSON.
        delta: As for `over_runs`.
        accountant: As for `over_runs`.
        adaptive: Whether they are of several runs, as for `spent`.
    """
    listed = [event for text in events for event in from_json(text)]
    questions = [event for event in listed if is_question(event)]
    if not questions:
        return None
    rest = [event for event in listed if not is_question(event)]

    def cost(part: Iterable[Event]) -> Spent:
        return spent(part, delta, "rdp" if accountant == "rdp" else "pld", adaptive=adaptive)

    own, why_not = alone(listed)
    against_all = None
    if not why_not:
        found = cost(own)
        # The same noise of one site may be one mechanism where the sums are several, which are composed less tightly.
        against_all = replace(found, epsilon=max(found.epsilon, cost(listed).epsilon))
    return Shares(against_all, why_not, cost(questions), cost(rest) if rest else None)
