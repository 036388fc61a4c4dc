"""The cohort of a sum: a public draw that each party repeats, so that no party chooses who is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cloister.protocol.encoding import pack
from cloister.protocol.messages import Purpose
from cloister.protocol.plan import Plan


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


@lru_cache(maxsize=16)  # a process that plays many sites draws once
def _drawn(draw: Draw, names: tuple[str, ...], round_number: int) -> tuple[str, ...]:
    federation = hashlib.sha256(pack("cloister/federation/1", names)).digest()

    def ticket(site: str) -> bytes:
        which = 0 if draw.in_turn else round_number
        return hashlib.sha256(
            pack("cloister/cohort/2", federation, draw.seed, draw.purpose, which, site)
        ).digest()

    order = sorted(names, key=ticket)
    first = round_number * draw.size % (len(names) // draw.size * draw.size) if draw.in_turn else 0
    return tuple(sorted(order[first : first + draw.size]))


def draw_of(plan: Plan, purpose: Purpose) -> Draw:
    """The draw of a plan's sums of one purpose."""
    return Draw(plan.run.seed, purpose, plan.cohort.size(), in_turn=plan.privacy.correlated is not None)
