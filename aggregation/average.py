"""The weighted mean of updates, and exact totals of counters, from one sum of ring vectors.

A site's contribution is one vector: its weighted, coded update and then its counters. The coordinator adds
contributions into one accumulator as they come and opens the total once, so its memory does not grow with the number
of sites and nothing about one site stands apart from the vector:

    mean = (sum_i w_i x_i) / (sum_i w_i)        (McMahan et al. 2017, algorithm 1)

with weights carried as w_i / w_max in [0, 1], so that the heaviest site uses the whole resolution of the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.aggregation.ring import Ring, RingVector
from cloister.protocol.errors import UpdateError

WEIGHT = "weight"
CLIPPED = "clipped"


@dataclass(frozen=True)
class SumLayout:
    """What a summed vector holds: `size` coded values, then one counter for each name.

    Args:
        ring: The ring and its fixed-point code.
        size: Number of values; 0 for a sum of counters alone.
        counters: Names of the counters, in their order.
        heaviest: The largest weight a site can have.
    """

    ring: Ring
    size: int
    counters: tuple[str, ...]
    heaviest: int = 1

    @property
    def length(self) -> int:
        """Ring elements in a vector of this layout."""
        return self.size + len(self.counters) * self.ring.limbs

    def contribution(
        self,
        values: npt.NDArray[np.float32],
        weight: int,
        counters: Mapping[str, int],
        random: np.random.Generator,
    ) -> RingVector:
        """A site's part of a weighted mean.

        Args:
            values: (size,) float32, the update.
            weight: The site's weight, from 1 to `heaviest`; fills the counter `weight`.
            counters: The other counters; `clipped` is filled in here where the layout has it.
            random: Source of the stochastic rounding.

        Returns:
            (length,) ring integers.

        Raises:
            UpdateError: the update is not finite, has another length, or its weight is out of range.
        """
        if values.shape != (self.size,):
            raise UpdateError("update", values.shape, expected=f"a vector of {self.size} values")
        if not 0 < weight <= self.heaviest:
            raise UpdateError("weight", weight, expected=f"from 1 to {self.heaviest}")
        vector: RingVector = np.empty(self.length, dtype=self.ring.dtype)
        _, clipped = self.ring.encode(values, random, factor=weight / self.heaviest, out=vector[: self.size])
        known = {**counters, WEIGHT: weight, CLIPPED: clipped}
        vector[self.size :] = self.ring.encode_counters([known[name] for name in self.counters])
        return vector

    def whole(self, steps: npt.NDArray[np.int64]) -> RingVector:
        """A site's part of a mean of vectors that are whole numbers of steps already, with the weight 1.

        Args:
            steps: (size,) int64; what is beyond the ring is taken modulo 2^bits.

        Returns:
            (length,) ring integers.
        """
        if steps.shape != (self.size,):
            raise UpdateError("update", steps.shape, expected=f"a vector of {self.size} values")
        vector: RingVector = np.empty(self.length, dtype=self.ring.dtype)
        vector[: self.size] = steps.astype(self.ring.dtype)
        vector[self.size :] = self.ring.encode_counters(
            [1 if name == WEIGHT else 0 for name in self.counters]
        )
        return vector

    def open(self, total: RingVector) -> Opened:
        """Decode a finished sum.

        Raises:
            UpdateError: the sum of weights is 0.
        """
        counters = dict(zip(self.counters, self.ring.decode_counters(total[self.size :]), strict=True))
        if not self.size:
            return Opened(np.empty(0, dtype=np.float32), counters)
        if counters[WEIGHT] == 0:
            raise UpdateError("sum of weights", 0, expected="at least one contribution")
        mean = self.ring.decode(total[: self.size])
        mean *= self.heaviest / counters[WEIGHT]
        return Opened(mean.astype(np.float32), counters)


@dataclass(frozen=True)
class Opened:
    """A decoded sum."""

    mean: npt.NDArray[np.float32]
    """(size,) weighted mean of the updates."""
    counters: dict[str, int]
    """Exact totals."""


class PlainSum:
    """The sum in clear: one accumulator, into which contributions are added in any order."""

    def __init__(self, layout: SumLayout) -> None:
        self._layout = layout
        self._total: RingVector = np.zeros(layout.length, dtype=layout.ring.dtype)
        self.terms = 0

    def add(self, vector: RingVector) -> None:
        """Fold in one contribution.

        Raises:
            UpdateError: it has another length or type than the layout; the sum is as it was.
        """
        ring = self._layout.ring
        if vector.dtype != ring.dtype or vector.shape != self._total.shape:
            raise UpdateError(
                "update",
                f"{vector.dtype}{list(vector.shape)}",
                expected=f"{np.dtype(ring.dtype).name}[{self._layout.length}]",
            )
        if self.terms >= ring.terms:
            raise UpdateError("number of updates", self.terms + 1, expected=f"at most {ring.terms}")
        np.add(self._total, vector, out=self._total)
        self.terms += 1

    def open(self) -> Opened:
        """Decode the sum of what was added."""
        return self._layout.open(self._total)
