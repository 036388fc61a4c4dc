"""Group privacy: the epsilon of k units together, such as k records of one person.

`accounting.spent` composes k units that differ together. They may be at several sites: each site's releases are then
other coordinates of one noised vector, and equal gradients at one site are the worst case of it (Choquette-Choo et al.
2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from cloister.privacy.accounting.accountant import spent
from cloister.privacy.mechanism.events import Event

SIZES = (1, 2, 5, 10, 100)
"""k of a report."""
_POINTS = 2**12
"""Grid of a report's figures: at most 2 % above those of the finest grid, in a tenth of the time."""


def epsilons(events: Sequence[Event], delta: float, one: float, largest: float) -> dict[int, float | None]:
    """An upper bound on epsilon at `delta` for each size of a group; it rises with the size.

    Args:
        events: What was released, for one unit.
        delta: Above 0 and below 1.
        one: Epsilon of one unit.
        largest: Epsilon above which no figure is computed, for this size and all larger ones.

    Returns:
        For each of `SIZES` its epsilon; None above `largest`.
    """
    found: dict[int, float | None] = {}
    before: float | None = one
    for size in SIZES:
        if before is not None:
            epsilon = one if size == 1 else spent(events, delta, group=size, points=_POINTS).epsilon
            epsilon = max(before, epsilon)
            before = epsilon if epsilon <= largest else None
        found[size] = before
    return found
