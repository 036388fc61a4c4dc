"""The coordinate-wise median of the means of groups of sites, instead of the mean of all sites.

A site that sends a poisoned update moves the mean of its group as far as it likes, and no other mean. The median of G
numbers of which f are arbitrary, 2 f < G, lies between the least and the largest of the others (Yin et al. 2018,
"Byzantine-robust distributed learning: towards optimal statistical rates"; Chen et al. 2017, "Distributed statistical
machine learning in adversarial settings: Byzantine gradient descent", which groups the sites). With half of the groups
poisoned there is no such bound.

The groups count alike, whatever their weights and sizes; for an even G it is the mean of the two numbers in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.aggregation.features.feature import AtCoordinator, Feature, Figures, Summed
from cloister.aggregation.vector.rotation import Floats
from cloister.protocol.figure import Figure
from cloister.protocol.messages.blocks import cut


def median(means: Sequence[Floats]) -> Floats:
    """The coordinate-wise median, in the memory of the first.

    Blocks are sorted across the means by odd-even transposition: G (G - 1) / 2 minima and maxima of whole blocks, which
    for few groups is many times faster than a sort of each coordinate.

    Args:
        means: (d,) float32 each, finite; one or more of equal length. The first is overwritten.
    """
    first, count = means[0], len(means)
    for begin, end, _, _ in cut(0, first.size if count > 1 else 0):
        rows = [mean[begin:end].copy() for mean in means]
        for turn in range(count):
            for low in range(turn % 2, count - 1, 2):
                least = np.minimum(rows[low], rows[low + 1])
                np.maximum(rows[low], rows[low + 1], out=rows[low + 1])
                rows[low] = least
        middle = rows[count // 2]
        if count % 2 == 0:
            middle = rows[count // 2 - 1] * np.float32(0.5) + middle * np.float32(0.5)
        first[begin:end] = middle
    return first


class _AtCoordinator(AtCoordinator):
    def enough(self, opened: int, groups: int) -> bool:
        return 2 * opened > groups

    def combine(self, means: Sequence[Floats]) -> Floats:
        return median(means)

    def figures(self, sums: Sequence[Summed]) -> Figures:
        return {"groups": [summed.group + 1 for summed in sums]}


FEATURE = Feature(
    "groups",
    wanted=lambda basis: basis.plan.aggregation.groups > 1,
    coordinator=_AtCoordinator,
    figures=(Figure("groups", "groups in the median", lambda groups: str(len(groups))),),
)
