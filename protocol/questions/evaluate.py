"""How models do on held-out records: the share of labels that they find, their loss, their confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Estimate, Totals, count, part, share
from cloister.protocol.questions.kind import Kind, question_of

RIGHT, WRONG, UNITS, LOSS = "right", "wrong", "units", "loss"


class Evaluate(Kind):
    """Each model has the same cells, one model after the other."""

    of_model = True

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """By the figures that are asked for."""
        each = self._of_one(plan)
        return tuple(f"{name}{_of(model)}" for model in models(plan) for name in each)

    def bound(self, plan: Plan) -> float:
        """Of each model the labels' shares, or the pair of classes, add up to 1, and its loss is 1 at most."""
        return math.sqrt((1 + self._with_loss(plan)) * len(models(plan)))

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """Those of each model, and the number of units."""
        each = totals.reshape(len(models(plan)), -1)
        found = [
            estimate
            for model, mine in zip(models(plan), each, strict=True)
            for estimate in self._figures(plan, mine, deviation, _of(model))
        ]
        # Each model has counted every unit.
        seen = each[:, : each.shape[1] - self._with_loss(plan)]
        units, times = count("units", seen.ravel(), deviation), len(each)
        return (*found, Estimate("units", float(seen.sum()) / times, units.noise / times))

    def middle(self, plan: Plan, units: int) -> Totals:
        """Half of the loss, and as many in each other cell."""
        told = len(self._of_one(plan)) - self._with_loss(plan)
        one = [units / told] * told + [units / 2] * self._with_loss(plan)
        return np.array(one * len(models(plan)))

    def _of_one(self, plan: Plan) -> tuple[str, ...]:
        figures = question_of(plan).figures
        names: tuple[str, ...] = (RIGHT, WRONG)
        if "confusion" in figures:
            classes = plan.data.outcomes
            names = tuple(f"{true} as {found}" for true in classes for found in classes)
        elif "accuracy" not in figures:
            names = (UNITS,)
        return (*names, LOSS) if self._with_loss(plan) else names

    @staticmethod
    def _with_loss(plan: Plan) -> bool:
        return "loss" in question_of(plan).figures

    def _figures(self, plan: Plan, totals: Totals, deviation: float, of: str) -> Iterator[Estimate]:
        question, cells = question_of(plan), np.arange(len(totals))
        told = len(totals) - self._with_loss(plan)
        seen = cells < told
        if "confusion" in question.figures:
            classes = plan.data.outcomes
            true, found = np.divmod(cells, len(classes))
            yield share(f"accuracy{of}", totals, deviation, seen & (true == found), seen & (true != found))
            for at, name in enumerate(classes):
                mine = seen & (true == at) & (found == at)
                yield share(f"recall of {name}{of}", totals, deviation, mine, seen & (true == at) & ~mine)
                yield share(f"precision of {name}{of}", totals, deviation, mine, seen & (found == at) & ~mine)
        elif "accuracy" in question.figures:
            yield share(f"accuracy{of}", totals, deviation, cells == 0, cells == 1)
        if self._with_loss(plan):
            yield part(f"loss{of}", float(totals[-1]), totals[:told], deviation, question.most_loss)


def models(plan: Plan) -> tuple[str, ...]:
    """The names of the models that a question is about; that of `[model]` is the first."""
    return "", *question_of(plan).others


def _of(model: str) -> str:
    return f" of {model}" if model else ""
