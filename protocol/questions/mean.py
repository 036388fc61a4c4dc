"""Mean and variance of a field's numbers."""

from __future__ import annotations

import math

import numpy as np

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Estimate, Totals, count, mean, untold
from cloister.protocol.questions.kind import Kind, question_of


class Mean(Kind):
    """A record with a number is 1, y and y squared, where y is -1 at one end of the range and 1 at the other."""

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """The number of units, the sum and the sum of squares."""
        return "units", "sum", "squares"

    def bound(self, plan: Plan) -> float:
        """The square root of 3."""
        return math.sqrt(3)

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """Mean and variance, and the number of units that have a number."""
        middle, half = ends(plan)
        units, total, squares = map(float, totals)
        counted = totals[:1]
        found = mean("mean", total, counted, deviation, middle, half)
        spread = untold("variance")
        if found.value is not None:
            y, second = total / units, squares / units
            noise = math.sqrt(1 + 4 * y * y + (2 * y * y - second) ** 2) * deviation / units
            spread = Estimate(
                "variance", half * half * min(max(second - y * y, 0.0), 1.0), half * half * noise
            )
        return found, spread, count("units", counted, deviation)

    def middle(self, plan: Plan, units: int) -> Totals:
        """Evenly spread numbers."""
        return np.array([units, 0.0, units / 3])


def ends(plan: Plan) -> tuple[float, float]:
    """The middle of the question's range, and half of its width."""
    wanted = question_of(plan).range
    assert wanted is not None, "a sound question has it"
    low, high = wanted
    return (low + high) / 2, (high - low) / 2
