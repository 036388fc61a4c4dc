"""Group privacy: the epsilon of k units together, such as k records of one person.

`accounting.spent` composes k units that differ together wherever it knows their worst case. Where it does not (batches
with a limit), the general bound holds: an (epsilon, delta)-DP mechanism is (k epsilon, delta (e^(k epsilon) - 1) /
(e^epsilon - 1))-DP for k units (Vadhan 2017, "The Complexity of Differential Privacy", Lemma 2.2). It is taken at the
largest delta / 10^j for which the second number is at most delta.

The k units may be at several sites: each site's releases are then other coordinates of one noised vector, and equal
gradients at one site are the worst case of it (Choquette-Choo et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cloister.privacy.accounting import spent
from cloister.privacy.events import Event, SampledGaussian, plain

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
            epsilon = max(before, one if size == 1 else _epsilon(events, delta, size, largest))
            before = epsilon if epsilon <= largest else None
        found[size] = before
    return found


def _epsilon(events: Sequence[Event], delta: float, size: int, largest: float) -> float:
    if any(isinstance(event, SampledGaussian) and event.largest_batch for event in plain(events)):
        return _general(events, delta, size, largest)
    return spent(events, delta, group=size, points=_POINTS).epsilon


def _general(events: Sequence[Event], delta: float, size: int, largest: float) -> float:
    at = delta
    while True:
        at /= 10
        epsilon = spent(events, at, points=_POINTS).epsilon
        if not size * epsilon <= largest:
            return math.inf
        if at * math.fsum(math.exp(j * epsilon) for j in range(size)) <= delta:
            return size * epsilon
