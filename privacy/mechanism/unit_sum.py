"""The mechanism of a question: the sum of one bounded vector for each unit of all sites, with Skellam noise.

With units u, vectors x_u of L2 norm at most B and scale s, the sum that is opened is

    sum over sites (sum over its units round(s x_u)  +  Skellam(v)).

Neighbours: one unit more or less at one site, which changes the sum by one integer vector of L2 norm at most s B. Each
number goes up with the probability of its fraction, by a secret draw of its own, so a sum of many has no bias; a vector
that is too long after it is cut toward zero instead. Only the noise of honest sites that stay in the sum is counted
on, as for unit `site` (`site_noise.py`): v = (z s B)^2 / honest.

A vector is a function of its own unit alone, and so no unit is left out for the number of others: a limit on the units
of a site would let one unit displace another, and the sum would move by both. What is beyond the ring wraps; whatever
that does to the answer is post-processing of the noised sum.

This file is pure: it knows neither plan nor ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.privacy.mechanism.clip import rounded_l1
from cloister.privacy.mechanism.events import Skellam, Unit, positive
from cloister.privacy.mechanism.noise import LARGEST_VARIANCE, NoiseStream
from cloister.privacy.mechanism.site_noise import WRAP_DEVIATIONS
from cloister.protocol.errors import AccountingError
from cloister.protocol.questions.vectors import Sparse, Vectors

_COARSEST = 1024
"""Fewest steps in B: with fewer, what is cut off would be seen in the answer."""
_MARGIN = 2.0**-40
"""Relative error of a norm that is computed in float64, with room: of a vector at most 2^16 cells
are not zero."""
MOST_TOUCHED = 2**16
MOST_CELLS = 2**25
_LARGEST = 1e100
"""Larger numbers are cut: their squares are no float64."""


class Shape(NamedTuple):
    """What the vector of a unit may be."""

    cells: int
    """K: coordinates."""
    touched: int
    """The most of them that are not zero."""
    bound: float
    """B: largest L2 norm."""
    copies: int = 1
    """Most sites that have a vector of the same unit."""


@dataclass(frozen=True)
class UnitSum:
    """How the units of a site become integers with noise. Make one with `unit_sum`."""

    shape: Shape
    scale: float
    """s: integer steps in 1; a power of two, so that scaling is exact."""
    variance: float
    """v: variance of the noise that each site adds to each integer, in steps squared."""
    event: Skellam
    """What the sum costs a unit."""

    def deviation(self, sites: int) -> float:
        """Standard deviation of the noise of so many sites on each cell of the answer."""
        return math.sqrt(sites * self.variance) / self.scale

    @property
    def bound(self) -> float:
        """B: largest L2 norm of a unit's vector at a site."""
        return self.shape.bound

    def encode(
        self, units: Iterable[Vectors | Sparse], noise: NoiseStream, out: npt.NDArray[np.integer[Any]]
    ) -> None:
        """The integers of a site.

        Args:
            units: The vectors of its units, in parts of any number of rows (U, K), or each by its cells that are not
                zero. One that is longer than B is scaled down to it, and one that is not finite, or that has more
                cells than `Shape.touched`, counts as zeros.
            noise: A stream that nothing else uses.
            out: Shape (K,), receives the integers modulo 2^b, where its own have b bits.
        """
        total = noise.child("skellam").skellam(self.shape.cells, self.variance)
        draws = noise.child("rounding").generator()
        for part in units:
            if not isinstance(part, Sparse):
                total += self.steps(part, draws.random(part.shape)).sum(axis=0)
            elif len(part.at) <= self.shape.touched and (np.diff(part.at) > 0).all():
                # Each cell once, so that what is added has the norm of the values.
                total[part.at] += self.steps(part.values[None], draws.random((1, len(part.at))))[0]
        out[:] = total.astype(out.dtype)

    def steps(self, vectors: Vectors, draws: Vectors) -> npt.NDArray[np.int64]:
        """The integers of some units, each row of L2 norm at most s B in exact arithmetic but for a part of 2^-39.

        Args:
            vectors: Shape (U, K).
            draws: Shape (U, K), uniform in [0, 1).
        """
        finite = np.isfinite(vectors).all(axis=1, keepdims=True)
        scaled = np.clip(np.where(finite, vectors, 0.0), -_LARGEST, _LARGEST)
        norms = np.linalg.norm(scaled, axis=1, keepdims=True)
        longer = norms > self.bound * (1 + _MARGIN)
        scaled = np.where(longer, scaled / np.where(longer, norms, 1) * self.bound, scaled)
        scaled *= self.scale
        down = np.floor(scaled)
        rounded = down + (draws < scaled - down)
        within = np.linalg.norm(rounded, axis=1, keepdims=True) <= self.bound * self.scale * (1 + _MARGIN)
        steps: npt.NDArray[np.int64] = np.where(within, rounded, np.trunc(scaled)).astype(np.int64)
        return steps


def unit_sum(
    noise_multiplier: float,
    shape: Shape,
    contributors: int,
    most: float,
    honest: int,
    ring_bits: int,
    unit: Unit,
) -> UnitSum:
    """The mechanism of a question.

    The scale is the largest power of two with v <= `noise.LARGEST_VARIANCE` and room in the ring:

        contributors s most + 12 z B s sqrt(contributors / honest) < 2^(ring_bits - 1).

    With c copies of a unit's vector in a sum, one at each of c sites, B is c times the bound of each.

    Args:
        noise_multiplier: z, of the noise that counts, in units of B.
        shape: Of the vector of a unit at a site.
        contributors: Most sites in a sum.
        most: The most that the units of a site add to a cell.
        honest: Fewest sites in an opened sum that have added their noise and keep it secret.
        ring_bits: b, of the integers modulo 2^b that are summed.
        unit: What neighbours differ in.

    Raises:
        AccountingError: an argument is out of range, or the ring has no room.
    """
    z, each = positive("noise_multiplier", noise_multiplier), positive("bound", shape.bound)
    if not (1 <= shape.cells <= MOST_CELLS and 1 <= shape.touched <= MOST_TOUCHED):
        raise AccountingError(
            "question.kind",
            shape.cells,
            expected=f"1 to {MOST_CELLS:,} cells, of which a unit has {MOST_TOUCHED:,} at most",
            fix="ask for fewer cells",
        )
    b = each * shape.copies
    room = 2.0 ** (ring_bits - 1) / (
        contributors * most + WRAP_DEVIATIONS * z * b * math.sqrt(contributors / honest)
    )
    largest = min(room, math.sqrt(LARGEST_VARIANCE * honest) / (z * b))
    scale = 2.0 ** math.floor(math.log2(largest * (1 - 1e-9)))
    if scale * each < _COARSEST:
        raise AccountingError(
            "question.most_units",
            most,
            expected=f"fewer: a sum of {contributors} sites with so many units each and their noise leaves the vector "
            f"of a unit {scale * each:g} steps in a ring of {ring_bits} bits, and {_COARSEST} are needed",
            fix="lower question.most_units, or take less noise",
        )
    # The same number whatever the sites: equal noise is one mechanism in a ledger.
    whole = (z * b * scale) ** 2
    l2 = scale * each * (1 + 4 * _MARGIN)
    l1 = shape.copies * rounded_l1(l2, shape.touched)
    event = Skellam(whole, shape.copies * l2, l1, 1, unit=unit, asked=unit == "site", honest=honest)
    return UnitSum(shape, scale, whole / honest, event)
