"""What the coordinator does to an opened sum where the unit of privacy is the site.

The sum is of updates divided by the clipping norm C. If the plan trusts the coordinator, it adds the Gaussian noise
here, before anything else is computed from the sum. Adaptive clipping (Andrew et al. 2021, eq. 2) moves C by
exp(-eta (b - gamma)), b the noised fraction of updates that were not clipped, gamma the quantile that is aimed at; that
is post-processing of what was paid for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cloister.aggregation.average import WEIGHT, Opened
from cloister.lm.layout import Vector
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import Coding
from cloister.protocol.plan import LARGEST_CLIP, SMALLEST_CLIP, AdaptiveSection

_FURTHEST = math.log(10.0)
"""Most that the logarithm of C moves in a round: the noise on a fraction of few sites has no bound. C itself stays
where sites take it."""


@dataclass(frozen=True)
class Released:
    """What was made of a sum."""

    mean: Vector
    """The mean update, with its noise."""
    clip: float
    """C of the next round."""


def released(
    opened: Opened, coding: Coding, clip: float, adaptive: AdaptiveSection | None, noise: NoiseStream
) -> Released:
    """Noise, where it is the coordinator's to add, and scale.

    Args:
        opened: The decoded sum.
        coding: How the plan's terms code updates.
        clip: C of this round.
        adaptive: How C follows the updates' norms; None: it stays.
        noise: A stream that nothing else has used; not used where the sites have added the noise.
    """
    sites = opened.counters[WEIGHT]
    central = not coding.variance
    mean = opened.mean[:-1] if coding.count_step else opened.mean
    mean = mean.copy()
    if central:
        noise.child("update").add_gaussian(mean, coding.deviation / sites)
    mean *= np.float32(clip)
    if adaptive is None or not coding.count_step:
        return Released(mean, clip)
    unclipped = (float(opened.mean[-1]) * coding.scale / coding.count_step + 1) / 2
    if central:
        unclipped += float(noise.child("count").gaussian(1, coding.count_deviation)[0]) / sites
    move = -adaptive.learning_rate * (unclipped - adaptive.quantile)
    moved = clip * math.exp(min(max(move, -_FURTHEST), _FURTHEST))
    return Released(mean, min(max(moved, SMALLEST_CLIP), LARGEST_CLIP))
