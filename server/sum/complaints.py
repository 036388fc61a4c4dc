"""The complaints of a run's secure sums: which site could not open the share of which other.

Of two sites of which one complains of the other, at least one lies: a share and its hash are signed by their maker, and
an honest holder opens what an honest maker has sent. At most A sites of a cohort lie, so a site that is in complaints,
made by it or of it, with more than A other sites of the cohort is a liar: otherwise all of those would be.

Complaints are kept over all attempts and rounds, and a run that is resumed knows them. So a liar can complain of, or be
complained of by, A others at most before it is known, and each attempt that ends by complaints tells of another pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

Complaint = tuple[str, str]
"""The site that complains, and the one that it complains of."""


def liars(complaints: Iterable[Complaint], cohort: Collection[str], most: int) -> dict[str, str]:
    """The sites of a cohort that lied for certain, each with what it did, if at most `most` of the cohort lie.

    The site in most complaints is taken first, and explains its complaints: so two liars, where only one is assumed, do
    not make liars of all who complain of both.

    Args:
        complaints: Those of the run.
        cohort: The sites that are drawn.
        most: A. One complaint proves nothing, even where no site is assumed to lie.
    """
    left = _within(complaints, cohort)
    found: dict[str, str] = {}
    while (worst := _worst(left)) is not None and len(_others(left, worst)) > max(1, most):
        of = {by for by, accused in left if accused == worst}
        by = {accused for complaining, accused in left if complaining == worst}
        found[worst] = (
            f"{len(of)} sites could not open the shares that it sent them"
            if len(of) >= len(by)
            else f"it complained of the shares of {len(by)} sites"
        )
        left = _without(left, worst)
    return found


def suspects(
    complaints: Iterable[Complaint],
    cohort: Collection[str],
    present: Collection[str],
    *,
    turn: int,
    least: int,
) -> set[str]:
    """Sites without which no complaint is left among those present, few of them.

    An honest site is in complaints with liars only. So if the other sites of its complaints are left out instead of it,
    at most A sites are, and all of them lied. Nobody knows which site is honest. So the sites in complaints of the
    cohort take turns to stay: without the turns a liar that complains of one honest site, once in each round, would
    keep it out of all sums.

    Of the complaints that are left, always the site in most of them is left out; where two sites are in as many, the
    one that the other complains of. The same is done with all complaints if the site whose turn it is is absent, or if
    too few sites were left with it.

    Args:
        complaints: Those of the run.
        cohort: The sites that could be in sums, present or not: absence must not change whose turn it is.
        present: The sites that can be asked, all in the cohort.
        turn: Counts the turns.
        least: The fewest sites that a sum needs.
    """
    turns = sorted(involved(complaints, cohort))
    left = _within(complaints, present)
    if turns and (stays := turns[turn % len(turns)]) in present:
        others = _others(left, stays)
        found = others | _covering({pair for pair in left if others.isdisjoint(pair)})
        if len(present) - len(found) >= least:
            return found
    return _covering(left)


def involved(complaints: Iterable[Complaint], cohort: Collection[str]) -> set[str]:
    """The sites of a cohort that are in complaints with others of it."""
    return {site for pair in _within(complaints, cohort) for site in pair}


def _covering(left: set[Complaint]) -> set[str]:
    """The sites that are in most of some complaints, one after the other, until none of these is left."""
    found = set[str]()
    while (worst := _worst(left)) is not None:
        found.add(worst)
        left = _without(left, worst)
    return found


def _worst(complaints: Iterable[Complaint]) -> str | None:
    """The site that is in complaints with most others."""
    pairs = {frozenset(each) for each in complaints}
    others = Counter(site for pair in pairs for site in pair)
    accused = Counter(accused for _, accused in complaints)
    return min(others, key=lambda site: (-others[site], -accused[site], site), default=None)


def _others(complaints: Iterable[Complaint], site: str) -> set[str]:
    return {other for pair in complaints if site in pair for other in pair} - {site}


def _within(complaints: Iterable[Complaint], sites: Collection[str]) -> set[Complaint]:
    return {each for each in complaints if each[0] in sites and each[1] in sites}


def _without(complaints: Iterable[Complaint], site: str) -> set[Complaint]:
    return {each for each in complaints if site not in each}
