"""How models do on held-out records: the share of labels that they find, their loss, their confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import CLEAR, Estimate, Totals, count, part, share, untold
from cloister.protocol.questions.kind import Kind, question_of

RIGHT, WRONG, UNITS, LOSS = "right", "wrong", "units", "loss"
GIVEN, TRUE, BEYOND = "given", "true", "beyond"


class Evaluate(Kind):
    """Each model has the same cells, one model after the other."""

    of_model = True

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """By the figures that are asked for."""
        each = self._of_one(plan)
        return tuple(f"{name}{_of(model)}" for model in models(plan) for name in each)

    def bound(self, plan: Plan) -> float:
        """Of each model the labels' shares, or the pair of classes, add up to 1, and its loss is 1 at most; or each of
        four numbers of entities is."""
        of_one = 4 if _entities(plan) else 1 + self._with_loss(plan)
        return math.sqrt(of_one * len(models(plan)))

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """Those of each model, and the number of units."""
        each = totals.reshape(len(models(plan)), -1)
        found = [
            estimate
            for model, mine in zip(models(plan), each, strict=True)
            for estimate in self._figures(plan, mine, deviation, _of(model))
        ]
        if _entities(plan):
            return tuple(found)
        # Each model has counted every unit.
        seen = each[:, : each.shape[1] - self._with_loss(plan)]
        units, times = count("units", seen.ravel(), deviation), len(each)
        return (*found, Estimate("units", float(seen.sum()) / times, units.noise / times))

    def drawn(self, found: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
        """The shares: each figure but the losses, and the number of units."""
        return tuple(each for each in found if not each.name.startswith((LOSS, UNITS)))

    def middle(self, plan: Plan, units: int) -> Totals:
        """Half of the loss, and as many in each other cell; 2 entities of a unit, half of them right."""
        if _entities(plan):
            each = units / question_of(plan).most_entities
            return np.array([each, 2 * each, 2 * each, 0.0] * len(models(plan)))
        told = len(self._of_one(plan)) - self._with_loss(plan)
        one = [units / told] * told + [units / 2] * self._with_loss(plan)
        return np.array(one * len(models(plan)))

    def _of_one(self, plan: Plan) -> tuple[str, ...]:
        figures = question_of(plan).figures
        if _entities(plan):
            return RIGHT, GIVEN, TRUE, BEYOND
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
        if _entities(plan):
            yield from _of_entities(totals, deviation, of)
            return
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


def _entities(plan: Plan) -> bool:
    return "entities" in question_of(plan).figures


def _of_entities(totals: Totals, deviation: float, of: str) -> Iterator[Estimate]:
    """Precision, recall and F1 of entities, and the part of them that was not counted, by which these may be off."""
    right, given, true, beyond = map(float, totals)
    yield _ratio(f"entity precision{of}", right, given, deviation, 1.0, 1)
    yield _ratio(f"entity recall{of}", right, true, deviation, 1.0, 1)
    yield _ratio(f"entity F1{of}", 2 * right, given + true, deviation, 2.0, 2)
    yield _ratio(f"entities not counted{of}", beyond, true + beyond, deviation, 1.0, 2)


def _ratio(name: str, part: float, whole: float, deviation: float, weight: float, cells: int) -> Estimate:
    """A part over a whole, whose noise is taken as independent: that of `weight` times one cell, and of some cells."""
    if whole < CLEAR * deviation * math.sqrt(cells):
        return untold(name)
    found = part / whole
    noise = deviation * math.sqrt(weight**2 + cells * found * found) / whole
    return Estimate(name, min(max(found, 0.0), 1.0), noise)


def models(plan: Plan) -> tuple[str, ...]:
    """The names of the models that a question is about; that of `[model]` is the first."""
    return "", *question_of(plan).others


def _of(model: str) -> str:
    return f" of {model}" if model else ""
