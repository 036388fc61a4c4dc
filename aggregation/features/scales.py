"""The bounds of the blocks of a compressed sum, from what was released before: no site tells anything more for them.

In round 1 all blocks have the bound 3 s, where s, `aggregation.compression.first_scale`, is by default the sum of the
round's learning rates. A step of AdamW (and of Muon, which is scaled to it) moves a coordinate by about its learning
rate at most, so s bounds the root mean square of an update, which the rotation does not change. A step of SGD is as
long as its learning rate times `local.clip_norm` at most, so s is that of d parameters over sqrt(d).

After a round with the released mean m, the total weight W of n sites and the largest weight w_max, block j gets

    B_j = multiple × max(rms_j, rms / 8),        rms_j = W / (n w_max) × ||m_j|| / sqrt(S),

with the root mean square `rms` of all rms_j: m's blocks as they were sent, by the sites' mean weight. A block that did
not move can move again by the second term. Updates of n sites that have nothing in common have a mean that is sqrt(n)
times smaller than each of them, so `multiple` is 3.5 sqrt(n) at first, and with a privacy unit always. Without a unit
it follows the released number of clipped values: a normal coordinate exceeds c root mean squares with probability
p = 2 Phi(-c). The fraction that was clipped gives c, and `multiple` is multiplied by 3 / c, at least 3/4 and at most 2.
It stays between 3, which updates that are all alike need, and 3 n, for one site that moves alone: so a site that lies
in that number can make the steps 3 n / `multiple` times as large, and no more. At c = 3 and 15 levels rounding adds
0.7 % to the squared norm of an update, and clipping less.

All is kept within `aggregation.bound` and 2^-24 of it, which each site checks. The bounds are part of the
instructions of a sum (`messages.Instructions`).

Refused: bounds from the sites' own norms, which would be totals of their own, or a round trip before each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.rotation import ROTATED, Floats, rotated_blocks
from cloister.lm.training.optimizer import learning_rate
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan.plan import Plan

FIRST = 3.0
"""Bound of a block in round 1, in `first_scale`."""
START = 3.5
"""`multiple` over the square root of the number of sites, before anything is known of clipped values."""
TARGET = 3.0
"""Root mean squares of a block at which values should be clipped."""
LEAST_SHARE = 1 / 8
"""Least rms of a block that the bounds assume, as a share of that of all blocks."""
SMALLEST = 2.0**-24
"""Smallest bound of a block, in `aggregation.bound`."""

_FALL, _RISE = 0.75, 2.0
_RAREST = 1e-7
"""Fraction of clipped values below which the bounds are only known to be far too large."""


@dataclass(frozen=True)
class Scales:
    """The bounds of a round."""

    bounds: Floats
    """(blocks,) float32, positive."""
    multiple: float
    """As above, with which the bounds were made; 0 in round 1."""

    @classmethod
    def first(cls, plan: Plan, parameters: int) -> Scales:
        """Those of round 1.

        Args:
            plan: A plan with `aggregation.compression`.
            parameters: Trained parameters of its model.
        """
        compression, local = plan.aggregation.compression, plan.local
        assert compression is not None, "only a plan with compression has scales"
        scale = compression.first_scale
        if scale is None:
            steps = plan.run.rounds * local.steps
            scale = math.fsum(learning_rate(local, step, steps) for step in range(local.steps))
            if local.optimizer == "sgd":
                scale *= local.clip_norm / math.sqrt(parameters)
        bounds = np.full(rotated_blocks(parameters), FIRST * scale)
        return cls(_within(bounds, plan.aggregation.bound), 0.0)

    def after(self, plan: Plan, mean: Floats, sites: int, weight: float, clipped: int | None) -> Scales:
        """Those of the next round.

        Args:
            plan: The plan.
            mean: (d,) float32: the released mean.
            sites: Sites in it.
            weight: Their total weight over the largest weight.
            clipped: Values that they clipped; None where that is not released.
        """
        blocks = len(self.bounds)
        squares = np.zeros(blocks)
        for block in range(blocks):
            part = mean[block * ROTATED : (block + 1) * ROTATED].astype(np.float64)
            squares[block] = part @ part / ROTATED
        squares *= (weight / sites) ** 2
        everywhere = float(squares.mean())
        if everywhere == 0:
            return self
        multiple = self.multiple or START * math.sqrt(plan.cohort.size())
        if clipped is not None and self.multiple:
            share = min(max(clipped / (sites * blocks * ROTATED), _RAREST), 0.9)
            multiple *= min(max(TARGET / -NormalDist().inv_cdf(share / 2), _FALL), _RISE)
        multiple = min(max(multiple, TARGET), TARGET * plan.cohort.size())
        rms = np.sqrt(np.maximum(squares, everywhere * LEAST_SHARE**2))
        return Scales(_within(multiple * rms, plan.aggregation.bound), multiple)

    def to_bytes(self) -> bytes:
        """The bounds as a message carries them: float32, little-endian."""
        return self.bounds.astype("<f4").tobytes()

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """What a checkpoint keeps; `restored` reads it."""
        return {
            "bounds": self.bounds.astype(np.float64),  # exactly
            "multiple": np.array([self.multiple]),
        }

    @classmethod
    def restored(cls, state: Mapping[str, npt.NDArray[np.float64]]) -> Scales:
        """From what `state` returned."""
        return cls(state["bounds"].astype(np.float32), float(state["multiple"][0]))


def bounds_in(sent: bytes, plan: Plan, parameters: int) -> Floats:
    """The bounds in a message, checked.

    Args:
        sent: What `Scales.to_bytes` made, from another party.
        plan: A plan with `aggregation.compression`.
        parameters: Trained parameters of its model.

    Returns:
        (blocks,) float32.

    Raises:
        UpdateError: they are not one finite number for each block, or outside of what the plan allows.
    """
    blocks, largest = rotated_blocks(parameters), plan.aggregation.bound
    if len(sent) != 4 * blocks:
        raise UpdateError(
            "scales", f"{len(sent)} bytes", expected=f"{4 * blocks}: a float32 for each of {blocks} blocks"
        )
    bounds: Floats = np.frombuffer(sent, "<f4").astype(np.float32)
    least, most = _limits(largest)
    within = (bounds >= least) & (bounds <= most)  # false for what is not a number
    if not within.all():
        at = int(np.flatnonzero(~within)[0])
        raise UpdateError(
            f"scales[{at}]",
            float(bounds[at]),
            expected=f"{float(least):.6g} to {float(most):.6g}, which aggregation.bound = {largest:g} allows",
        )
    return bounds


def _limits(largest: float) -> tuple[np.float32, np.float32]:
    return np.float32(largest * SMALLEST), np.float32(largest)


def _within(bounds: npt.NDArray[np.float64], largest: float) -> Floats:
    within: Floats = np.clip(bounds.astype(np.float32), *_limits(largest))
    return within
