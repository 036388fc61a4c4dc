"""A sum as it is wanted, and as it ends; and what an attempt at it asks sites for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cloister.aggregation.features.feature import Summed
from cloister.aggregation.vector.average import Opened
from cloister.lm.model.layout import Vector
from cloister.protocol.messages.messages import ByFeature, Purpose, Reply, Request, Step
from cloister.server.record import journal as steps
from cloister.server.sum.channel import Failure


@dataclass(frozen=True)
class Wanted:
    """A sum to make."""

    purpose: Purpose
    round: int
    """The round; in an evaluation the round of the model."""
    model: Vector
    """The global model's trained parameters; they do not change during the sum."""
    group: int = 0
    """The group of the round's cohort that is summed."""

    def step(self, name: str) -> str:
        """The journal's name of a step of this sum."""
        return steps.of_sum(self.purpose, name, self.group)


@dataclass(frozen=True)
class Total:
    """A sum that was opened."""

    opened: Opened
    names: tuple[str, ...]
    """Sites whose vectors are in it, sorted."""
    cohort: int
    """Sites that were drawn; in an asynchronous round those whose request has ended in it."""
    attempts: int
    seconds: float
    """Seconds from the first request of the successful attempt to the decoded sum."""
    told: ByFeature
    """What its sites were told by the plan's features."""
    behind: bool
    """As in `Course`."""
    noted: Mapping[str, Any]
    """As in `Course`."""

    @property
    def sites(self) -> int:
        """The number of sites whose vectors are in it."""
        return len(self.names)

    def summed(self, wanted: Wanted) -> Summed:
        """It, as features see it."""
        opened, rounds = self.opened, self.opened.rounds or (wanted.round,)
        counters = opened.counters
        return Summed(wanted.round, wanted.group, self.names, counters, self.told, self.noted, rounds)


@dataclass(frozen=True)
class Failed:
    """All attempts at a sum ended with too few sites."""

    attempts: int
    """Attempts that failed."""
    bound: bool
    """No later attempt at the round can have other sites: shares were requested in one of them, and the sites that
    answered will answer for no other survivors; or sites carry another history in this round and not in the next."""
    spoiled: str = ""
    """The total of the opened sum that no honest sites can have: a site lied in its counters, and another attempt would
    sum the same again."""
    dropped: str = field(default="", compare=False)
    """The site that dropped out last, and why."""
    apart: bool = False
    """Whether sites carry another history. No shares were asked for, and the next round uses nothing that is
    carried."""


@dataclass(frozen=True)
class Asking:
    """What an attempt asks sites for, before it goes on."""

    turn: tuple[int, Step]
    """Attempts at the sum in this process, and the step: of several sums those with the least are asked first."""
    requests: Mapping[str, Request]
    """By site."""
    take: Callable[[Reply | Failure], None]
    """Takes each answer as it arrives."""


T = TypeVar("T")
Asks = Generator[Asking, None, T]
