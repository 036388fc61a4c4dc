"""How much better one model does than another on the same held-out records.

Each unit is asked for the difference of both models, and so the noise is that of one figure. The models of two
evaluations, or of one that is about both, have noise each; and most of what makes one unit hard for one model makes it
hard for the other, which a difference by unit does not have as sampling error.
"""

from __future__ import annotations

import math

import numpy as np

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import CLEAR, Estimate, Totals, count, mean, untold
from cloister.protocol.questions.kind import Kind, question_of

BETTER, WORSE, SAME, LOSS = "better", "worse", "same", "loss"


class Compare(Kind):
    """The shares of a unit's labels that the first model alone finds, that the second alone does, and of the rest."""

    of_model = True

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """With the loss of the first model less that of the second."""
        return (BETTER, WORSE, SAME, LOSS) if "loss" in question_of(plan).figures else (BETTER, WORSE, SAME)

    def bound(self, plan: Plan) -> float:
        """The shares add up to 1, and the loss is 1 at most."""
        return math.sqrt(2) if "loss" in question_of(plan).figures else 1.0

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """The difference of both accuracies, each part of it, and the difference of the losses."""
        question = question_of(plan)
        better, worse, _ = shares = [float(total) for total in totals[:3]]
        units = sum(shares)
        found = [untold(name) for name in ("accuracy gained", "better", "worse")]
        if units >= CLEAR * deviation * math.sqrt(3):
            found = [
                _ratio("accuracy gained", (better, worse), units, deviation, signs=(1, -1)),
                _ratio(BETTER, (better,), units, deviation, signs=(1,)),
                _ratio(WORSE, (worse,), units, deviation, signs=(1,)),
            ]
        if "loss" in question.figures:
            added = mean("loss added", float(totals[3]), totals[:3], deviation, 0.0, question.most_loss)
            found.append(added)
        return (*found, count("units", totals[:3], deviation))

    def drawn(self, found: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
        """The gain and its two parts."""
        return found[:3]

    def middle(self, plan: Plan, units: int) -> Totals:
        """A tenth better and a tenth worse; the same loss."""
        return np.array([0.1 * units, 0.1 * units, 0.8 * units, 0.0])[: self.count(plan)]


def _ratio(
    name: str, parts: tuple[float, ...], units: float, deviation: float, signs: tuple[int, ...]
) -> Estimate:
    """The sum of one or two of the three cells, each with a sign, over the sum of all."""
    found = sum(sign * part for sign, part in zip(signs, parts, strict=True)) / units
    slopes = [*(sign - found for sign in signs), *[-found] * (3 - len(signs))]
    noise = deviation * math.hypot(*slopes) / units
    # A unit's numbers add up to 1 at most, so the square of their difference is at most their sum. Laplace's estimates
    # keep the variance above 0.
    cut = [min(max(part, 0.0), units) for part in parts]
    mean = sum(sign * part for sign, part in zip(signs, cut, strict=True)) / (units + 2)
    sampling = math.sqrt(max(min((sum(cut) + 1) / (units + 2), 1.0) - mean * mean, 0.0) / units)
    return Estimate(name, min(max(found, -1.0 if -1 in signs else 0.0), 1.0), noise, sampling)
