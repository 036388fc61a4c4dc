"""Figures from noised totals, and how far each may be off.

Two errors are told apart. The noise is known: it has the same standard deviation in each cell. The sampling error is
that of the units that were asked, as a sample of others; it is estimated from the noised totals. Standard deviations of
quotients are those of the first order (the delta method), so that a figure of few units is not told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Totals = npt.NDArray[np.float64]
CLEAR = 3.0
"""Deviations of the noise below which a count, or the number of units under a quotient, is not told."""
WITHIN = 1.96
"""Deviations on both sides of 95 of 100 normal values."""


@dataclass(frozen=True)
class Estimate:
    """One figure of an answer."""

    name: str
    value: float | None
    """The figure; None where the noise is too large for one."""
    noise: float
    """Standard deviation by the noise; infinite without a value."""
    sampling: float | None = None
    """Standard deviation by the choice of the units, at most; None: it has none, or none is known."""

    @property
    def low(self) -> float | None:
        """The lower end of the interval that the noise gives with a probability of about 0.95."""
        return None if self.value is None else self.value - WITHIN * self.noise

    @property
    def high(self) -> float | None:
        """The upper end."""
        return None if self.value is None else self.value + WITHIN * self.noise

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        noise = self.noise if math.isfinite(self.noise) else None
        found = {"name": self.name, "value": self.value, "noise": noise, "sampling": self.sampling}
        return found | {"low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave."""
        noise = math.inf if found["noise"] is None else found["noise"]
        return cls(found["name"], found["value"], noise, found["sampling"])


def count(name: str, totals: Totals, deviation: float) -> Estimate:
    """The sum of some cells, each with noise of a deviation."""
    return Estimate(name, float(totals.sum()), deviation * math.sqrt(len(totals)))


def untold(name: str) -> Estimate:
    """A figure for which the noise is too large."""
    return Estimate(name, None, math.inf)


def share(
    name: str, totals: Totals, deviation: float, right: npt.NDArray[np.bool_], wrong: npt.NDArray[np.bool_]
) -> Estimate:
    """What some cells have of themselves and others together."""
    some, whole = float(totals[right].sum()), float(totals[right | wrong].sum())
    return quotient(name, some, whole, (int(right.sum()), int(wrong.sum())), deviation)


def quotient(name: str, some: float, whole: float, cells: tuple[int, int], deviation: float) -> Estimate:
    """A part of a whole.

    Args:
        name: Of the figure.
        some: The total over some cells; no number: it is not told.
        whole: The total over these cells and others.
        cells: Numbers of both kinds of cells.
        deviation: Of the noise in each.
    """
    mine, others = cells
    if math.isnan(some) or whole < CLEAR * deviation * math.sqrt(mine + others):
        return untold(name)
    found = some / whole
    noise = deviation * math.sqrt(mine * (1 - found) ** 2 + others * found**2) / whole
    return Estimate(name, min(max(found, 0.0), 1.0), noise, sampled(some, whole))


def part(name: str, total: float, counted: Totals, deviation: float, most: float) -> Estimate:
    """The mean of numbers from 0 to `most`, from the total of number / most, which is a cell of its own.

    Args:
        name: Of the figure.
        total: That total.
        counted: The cells of which the sum is the number of units.
        deviation: Of the noise in each.
        most: The largest number.
    """
    units = float(counted.sum())
    if units < CLEAR * deviation * math.sqrt(len(counted)):
        return untold(name)
    found = total / units
    noise = most * deviation * math.sqrt(1 + len(counted) * found * found) / units
    return Estimate(name, most * min(max(found, 0.0), 1.0), noise, most * sampled(total, units))


def mean(name: str, total: float, counted: Totals, deviation: float, middle: float, half: float) -> Estimate:
    """The mean of numbers from middle - half to middle + half, from the total of (number - middle) / half.

    Args: as for `part`.
    """
    units = float(counted.sum())
    if units < CLEAR * deviation * math.sqrt(len(counted)):
        return untold(name)
    y = total / units
    noise = half * deviation * math.sqrt(1 + len(counted) * y * y) / units
    sampling = 2 * half * sampled((units + total) / 2, units)  # (y + 1) / 2 is from 0 to 1
    return Estimate(name, middle + half * min(max(y, -1.0), 1.0), noise, sampling)


def sampled(some: float, whole: float) -> float:
    """The most that the choice of the units moves a mean of numbers from 0 to 1, by Bhatia and Davis's bound on their
    variance. Laplace's estimate of the mean keeps it above 0 where all or none were counted."""
    found = (min(max(some, 0.0), whole) + 1) / (whole + 2)
    return math.sqrt(found * (1 - found) / whole)
