"""Which site has spoiled sums of a run: by the sites of the sums that honest sites cannot have.

Each of those sums has a site in it that lied. Nothing in one sum says which. So once a plan with
`aggregation.trace_groups` has such a sum, the later rounds are divided into groups by a public draw, as small as the
plan allows, and only the group of a site that lies is lost. The draws are independent, so the sites that could explain
all lost groups soon are few.

A site is named if no A sites explain the groups without it, where A sites may lie: one, or as many as
`aggregation.colluders` assumes, less those that are left out already. So with at most A liars no honest site is named:
the liars explain the groups. If no A sites explain them at all, more lie, and nobody is named. What is named is left
out of all later sums. The rounds are whole again where no other spoiled sum is left, and after some rounds without one.
A plan with `aggregation.groups`, or whose cohorts are drawn anew, is traced in the sums that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.plan import Plan
from cloister.server.record import journal as steps
from cloister.server.record.progress import SiteFailed, Traced
from cloister.server.sum.party import Party

_MOST_WORK = 5_000_000
"""Names that all searches of a round for sites that explain groups look at: about a second."""


_QUIET = 4
"""Rounds that stay divided for each spoiled sum after the newest: a site that spoils the first whole round after them
each time spoils ever fewer."""


class _UndecidedError(Exception):
    """The searches have taken too long."""


def liars(spoiled: Sequence[Collection[str]], most: int) -> tuple[str, ...]:
    """The sites that lied for certain, sorted, if at most `most` sites lie and each of some groups has one of them.

    A site is missing for which the search was not finished.

    Args:
        spoiled: The sites of each group.
        most: A, 1 or more.
    """
    groups, named, left = [frozenset(group) for group in spoiled], [], [_MOST_WORK]
    try:
        # A site that is in every explanation is in this one.
        for site in sorted(_explanation(groups, most, left) or ()):
            if _explanation([group - {site} for group in groups], most, left) is None:
                named.append(site)
    except _UndecidedError:
        pass
    return tuple(named)


def _explanation(groups: Sequence[frozenset[str]], most: int, left: list[int]) -> set[str] | None:
    """At most `most` sites of which each group has one; None: there are none.

    Args:
        groups: The groups.
        most: At least 0.
        left: Names that the searches may still look at; lowered.

    Raises:
        _UndecidedError: it is used up.
    """
    if not groups:
        return set()
    left[0] -= sum(map(len, groups))
    if left[0] < 0:
        raise _UndecidedError
    often = Counter(site for group in groups for site in group)
    if len(groups) > most * max(often.values(), default=0):
        return None
    # One of the sites of each group is among them: so it is for the smallest.
    smallest = min(groups, key=lambda group: len(group))
    for site in sorted(smallest, key=lambda site: (-often[site], site)):
        rest = _explanation([group for group in groups if site not in group], most - 1, left)
        if rest is not None:
            return rest | {site}
    return None


def most_liars(plan: Plan) -> int:
    """A: how many sites of the federation are assumed to lie."""
    sites = plan.cohort.sites
    return max(1, plan.tolerance().colluders_in(sites, sites))


def divide(party: Party, number: int) -> None:
    """1. Decide, durably, whether the cohort of a round is divided to trace a site; a round that has begun stays."""
    if party.plan.aggregation.trace_groups == 1:
        return
    left = _spoiled(party)
    traced = party.division(TRAIN, number) == "trace"
    begun = party.journal.count(steps.of_sum(TRAIN, steps.BEGUN), number)
    if not traced and not begun and left and number - max(each for each, _ in left) <= _QUIET * len(left):
        party.journal.record(number, 0, steps.TRACED, {"spoiled": len(left)})
        traced = True
    if traced and left:
        common = tuple(sorted(frozenset[str].intersection(*(sites for _, sites in left))))
        party.observe(Traced(number, party.plan.aggregation.trace_groups, len(left), common))


def leave_out(party: Party, number: int) -> None:
    """Leave the sites that the spoiled sums name out of all later sums, durably.

    Sums that a known liar explains are no evidence, and it is one of the A that may lie.
    """
    left = [sites for _, sites in _spoiled(party)]
    most = most_liars(party.plan) - len(party.left_out)
    for site in liars(left, most) if left and most > 0 else ():
        own = sum(site in group for group in left)
        reason = f"it was in {own} sums that no honest sites can have, and no other sites explain all of them"
        party.left_out[site] = reason
        party.journal.record(number, 0, steps.LEFT_OUT, {"site": site, "reason": reason})
        party.observe(SiteFailed(number, site, f"left out of all later sums: {reason}"))


def _spoiled(party: Party) -> list[tuple[int, frozenset[str]]]:
    """The round and the sites of each sum of updates that honest sites cannot have, but for those that a known liar
    explains."""
    opened = party.journal.of(steps.of_sum(TRAIN, steps.SPOILED))
    found = [(entry.round, frozenset(entry.detail["sites"])) for entry in opened]
    return [(number, sites) for number, sites in found if sites.isdisjoint(party.left_out)]
