"""The speeds of the sites, by which a plan with `local.balance` gives them local steps.

With `"weighted"` a site declares its speed when it joins. With `"dynamic"` it is measured: the steps of a round
over the seconds in which the site took them. Each site times its own training. Between the coordinator's request
and the answer lie also the start of processes, transfers and, in a simulation, the wait for a worker, which do not
grow with the steps. A site that reports a wrong time changes its own number of steps, within the plan's limits, as
it could by being slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

_LAST = 5
"""Rounds of a site whose median is its speed, so that one odd round does not change it."""
_SHORTEST, _LONGEST = 1e-6, 1e9
"""Seconds that a training may take; others measure nothing."""


def speed_of(steps: int, seconds: float) -> float | None:
    """Steps per second; None where the seconds measure nothing, as those of an update that was kept."""
    return steps / seconds if _SHORTEST <= seconds <= _LONGEST else None


class Measured:
    """The speeds that were measured in finished rounds, in steps per second."""

    def __init__(self) -> None:
        self._of: dict[str, deque[float]] = {}

    def add(self, speeds: Mapping[str, float]) -> None:
        """Take the speeds of a finished round."""
        for site, speed in speeds.items():
            self._of.setdefault(site, deque(maxlen=_LAST)).append(speed)

    def get(self, site: str) -> float | None:
        """The median of a site's newest speeds; None where it has none."""
        return statistics.median(self._of[site]) if site in self._of else None
