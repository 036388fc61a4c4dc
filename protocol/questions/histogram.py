"""How many units have which value of a field."""

from __future__ import annotations

import itertools
import math

import numpy as np

from cloister.protocol.plan.plan import Plan, QuestionSection
from cloister.protocol.plan.soundness import SHARE
from cloister.protocol.questions.estimate import CLEAR, Estimate, Totals, count, quotient
from cloister.protocol.questions.kind import Kind, question_of

OTHER = "other"
"""The cell of what is in no other one."""


class Histogram(Kind):
    """A record is 1 in the cell of its value or range, or in `OTHER`."""

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """The values or ranges, and `OTHER`."""
        question = question_of(plan)
        return (*(question.values or _ranges(question)), OTHER)

    def bound(self, plan: Plan) -> float:
        """1."""
        return 1.0

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """Each cell, and its share of all units; a small one is not told apart from none."""
        names, everything = self.cells(plan), float(totals.sum())
        told = [float(total) if total >= CLEAR * deviation else None for total in totals]
        found = [Estimate(name, total, deviation) for name, total in zip(names, told, strict=True)]
        for name, total in zip(names, told, strict=True):
            part = math.nan if total is None else total
            cells = (1, len(names) - 1)
            found.append(quotient(f"{SHARE}{name}", part, everything, cells, deviation))
        return (*found, count("units", totals, deviation))

    def drawn(self, found: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
        """The numbers of the cells: each figure but the shares, and the number of all units."""
        return found[: (len(found) - 1) // 2]

    def middle(self, plan: Plan, units: int) -> Totals:
        """As many in each cell."""
        cells = self.count(plan)
        return np.full(cells, units / cells)


def _ranges(question: QuestionSection) -> tuple[str, ...]:
    """The ranges between edges, as cells."""
    edges = [edge if isinstance(edge, str) else repr(edge).removesuffix(".0") for edge in question.edges]
    between = (f"{low} to {high}" for low, high in itertools.pairwise(edges))
    return (f"below {edges[0]}", *between, f"{edges[-1]} and above") if edges else ()
