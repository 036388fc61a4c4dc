"""The cohort of a sum: a public draw that each party repeats, so that no party chooses who is in it.

With `aggregation.groups` the cohort of a round is divided into groups by a second draw, and each group is the cohort of
a sum of its own; so it is with `aggregation.trace_groups`, in the rounds after a sum that no honest sites can have. A
group is a uniform draw from the federation, as a cohort is. Every site of the cohort is in exactly one group, and no
message names it: each party repeats the division.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from cloister.protocol.encoding import Value, pack
from cloister.protocol.messages.messages import TRAIN, Division, Purpose
from cloister.protocol.plan.plan import Plan


@dataclass(frozen=True)
class Draw:
    """How the cohorts of a run's sums of one purpose are drawn."""

    seed: int
    """The plan's seed."""
    purpose: Purpose
    """Trainings and evaluations have draws of their own."""
    size: int
    """Sites in a cohort."""
    in_turn: bool = field(default=False, kw_only=True)
    """Cut the federation into cohorts once, and take them in turn, so that a site's rounds are far apart; otherwise
    each round has a draw of its own. The number of sites is then a multiple of `size`."""
    groups: int = field(default=1, kw_only=True)
    """Groups into which a cohort is divided; 1: it is one group."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sites of each group of a whole cohort: as equal as possible, larger ones first."""
        least, more = divmod(self.size, self.groups)
        return tuple(least + (group < more) for group in range(self.groups))

    def cohort(self, sites: Iterable[str], round_number: int) -> tuple[str, ...]:
        """The cohort of a round: `size` of the sites, uniformly, without replacement, sorted by name.

        Each site has a ticket, and those with the smallest are drawn; `in_turn`, the order of the tickets is cut into
        cohorts, and round r has cohort r modulo their number. A ticket depends on the names of all sites, so that a
        site cannot choose its name for the rounds that will draw it.

        Args:
            sites: Names of the federation's sites, distinct, in any order.
            round_number: The round.
        """
        names = tuple(sorted(sites))
        return names if self.size >= len(names) else _drawn(self, names, round_number)

    def divided(self, sites: Iterable[str], round_number: int) -> tuple[tuple[str, ...], ...]:
        """The groups of a round's cohort, each sorted by name.

        Arguments are those of `cohort`. The cohort in the order of other tickets is cut into the groups, so that where
        one lies depends on no other round's. With fewer sites than `size`, the groups are as equal as possible.
        """
        cohort = self.cohort(sites, round_number)
        return (cohort,) if self.groups == 1 else _divided(self, cohort, round_number)

    def group_of(self, site: str, sites: Iterable[str], round_number: int) -> int:
        """The group of a site in a round; 0 for a site that is not drawn.

        Args:
            site: The site.
            sites: As for `cohort`, like the round.
            round_number: The round.
        """
        groups = self.divided(sites, round_number) if self.groups > 1 else ()
        return next((group for group, members in enumerate(groups) if site in members), 0)


@lru_cache(maxsize=16)  # a process that plays many sites draws once
def _drawn(draw: Draw, names: tuple[str, ...], round_number: int) -> tuple[str, ...]:
    federation = hashlib.sha256(pack("cloister/federation/1", names)).digest()
    which = 0 if draw.in_turn else round_number
    order = _in_order(names, "cloister/cohort/2", federation, draw.seed, draw.purpose, which)
    first = round_number * draw.size % (len(names) // draw.size * draw.size) if draw.in_turn else 0
    return tuple(sorted(order[first : first + draw.size]))


@lru_cache(maxsize=16)
def _divided(draw: Draw, cohort: tuple[str, ...], round_number: int) -> tuple[tuple[str, ...], ...]:
    drawn = hashlib.sha256(pack("cloister/divided/1", cohort)).digest()
    order = _in_order(cohort, "cloister/group/1", drawn, draw.seed, draw.purpose, round_number)
    sizes = replace(draw, size=len(order)).sizes
    ends = list(accumulate(sizes))
    return tuple(tuple(sorted(order[end - size : end])) for size, end in zip(sizes, ends, strict=True))


def _in_order(sites: Iterable[str], *about: Value) -> list[str]:
    """Sites in the order of their tickets, each of which depends on all of this."""
    return sorted(sites, key=lambda site: hashlib.sha256(pack(*about, site)).digest())


def draw_of(plan: Plan, purpose: Purpose, division: Division = "plan") -> Draw:
    """The draw of a plan's sums of one purpose, divided as it says; an evaluation has no groups."""
    groups = plan.aggregation.groups if division == "plan" else plan.aggregation.trace_groups
    return Draw(
        plan.run.seed,
        purpose,
        plan.cohort.size(),
        in_turn=plan.privacy.correlated is not None,
        groups=groups if purpose == TRAIN else 1,
    )
