"""The cohort of a round: a public draw, so that a site can check the cohort that it is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cloister.protocol.plan import Plan


def draw(plan: Plan, sites: Sequence[str], round_number: int) -> list[str]:
    """The cohort of a round: `plan.cohort.size()` of the sites, uniformly, without replacement, in order of name.

    The draw is public and depends only on the plan's seed, the round and the sites' names, so that any party
    can repeat it: each site gets a hash, and the sites with the smallest hashes are drawn.
    """

    def ticket(site: str) -> bytes:
        return hashlib.sha256(f"cohort/{plan.run.seed}/{round_number}/{site}".encode()).digest()

    return sorted(sorted(sites, key=ticket)[: plan.cohort.size()])
