"""Asynchronous rounds, as the figures of a round tell of them: the staleness of the updates in the mean.

The attempt itself, which sums the next updates that arrive, is `server/sum/buffered.py`; it notes the
staleness of each update, in server steps since its model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cloister.aggregation.features.feature import AtCoordinator, Feature, Figures, Summed
from cloister.protocol.figure import Figure

STALENESS, TOO_STALE = "staleness", "too_stale"
"""What an attempt notes: by site the staleness of its updates in the sum, and how many were dropped as too stale."""


class _AtCoordinator(AtCoordinator):
    def figures(self, sums: Sequence[Summed]) -> Figures:
        (summed,) = sums
        ages = [age for each in summed.noted[STALENESS].values() for age in each]
        return {
            "mean_staleness": statistics.fmean(ages),
            "most_staleness": max(ages),
            TOO_STALE: summed.noted[TOO_STALE],
            STALENESS: summed.noted[STALENESS],
        }


FEATURE = Feature(
    "asynchronous rounds",
    wanted=lambda basis: basis.plan.cohort.mode == "async",
    coordinator=_AtCoordinator,
    figures=(
        Figure("mean_staleness", "mean staleness", unit="rounds", form=".2f", over="mean"),
        Figure("most_staleness", "greatest staleness", ",", unit="rounds", over="greatest"),
        Figure(TOO_STALE, "updates dropped as too stale", ",", over="sum", zero=False),
    ),
)
