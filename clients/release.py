"""The only exit of a site: a finished update becomes the vector that is summed.

Without privacy, and where the unit is the record (its noise is in the update already), values are coded in the plan's
ring with public rounding. Where the unit is the site, the update is divided by the clipping norm C, clipped to norm 1,
rounded to integers whose norm is bounded (Kairouz et al. 2021, conditional rounding), and, unless the coordinator is
trusted to add the noise, given the site's part of Skellam noise. Under adaptive clipping (Andrew et al. 2021) one more
integer says whether the update was clipped, under the same noise.

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
from cloister.privacy.clip import clip, integer_round, l2_norm
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import Coding


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
    update: Finished, layout: SumLayout, coding: Coding, clip_norm: float, noise: NoiseStream
) -> RingVector:
    """The contribution of an update that is protected as a whole.

    Args:
        update: What local training gave.
        layout: Layout of the sum.
        coding: How the plan's terms code an update.
        clip_norm: C of the round.
        noise: A stream that nothing else has used.
    """
    # Nothing here may fail because of what the update is: that it failed would be seen, and nobody has paid for that.
    vector = update.vector if np.isfinite(update.vector).all() else np.zeros_like(update.vector)
    norm = l2_norm(vector)
    scaled = np.multiply(vector, 1 / max(norm, clip_norm), dtype=np.float64).astype(np.float32)
    scaled, _ = clip(scaled, 1.0)  # by what the division was rounded
    steps = integer_round(scaled, coding.scale, 1.0, noise.child("rounding").generator())
    if coding.count_step:
        steps = np.append(steps, np.int64(coding.count_step if norm <= clip_norm else -coding.count_step))
    if coding.variance:
        steps += noise.child("skellam").skellam(steps.size, coding.variance)
    return layout.whole(steps)
