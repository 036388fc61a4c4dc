"""The only exit of a site: a finished update becomes the vector that is summed.

Without privacy, and where the unit is the record (its noise is in the update already), values are coded in the plan's
ring with public rounding. Where the unit is the site, the site-level mechanism makes the integers
(`privacy/site_noise.py`).

What leaves here is kept and sent again in a second attempt at the round: noise is drawn once for an update, so that no
number of sums of it averages the noise away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.aggregation.average import SumLayout
from cloister.aggregation.ring import RingVector
from cloister.aggregation.sums import LOSS, TOKENS, count_of_loss
from cloister.lm.layout import Vector
from cloister.privacy.noise import NoiseStream
from cloister.privacy.site_noise import SiteMechanism


@dataclass(frozen=True)
class Finished:
    """What local training gave."""

    vector: Vector
    """The update, float32."""
    tokens: int
    """Tokens learned from; for the site's own eyes under privacy."""
    loss: float
    """Mean training loss over them; likewise."""


def in_clear_units(
    update: Finished, layout: SumLayout, rounding: np.random.Generator, *, weighted: bool
) -> RingVector:
    """The contribution of an update whose coordinates may be summed as they are.

    Args:
        update: What local training gave.
        layout: Layout of the sum; counters that it does not have do not leave.
        rounding: Source of the stochastic rounding: public, so that a second attempt rounds alike.
        weighted: Weigh it by its tokens; otherwise by 1.
    """
    counters = {TOKENS: update.tokens, LOSS: count_of_loss(update.loss * update.tokens)}
    weight = update.tokens if weighted else 1
    return layout.contribution(update.vector, weight, counters, rounding)


def for_site_unit(
    update: Finished, layout: SumLayout, mechanism: SiteMechanism, clip_norm: float, noise: NoiseStream
) -> RingVector:
    """The contribution of an update that is protected as a whole.

    Args:
        update: What local training gave.
        layout: Layout of the sum.
        mechanism: That of the plan's terms.
        clip_norm: C of the round.
        noise: A stream that nothing else has used.
    """
    return layout.whole(mechanism.encode(update.vector, clip_norm, noise))
