"""`Kind`: what all parties know of a kind of question, whose vectors are made in `lm/questions/`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cloister.protocol.plan.plan import Plan, QuestionSection
from cloister.protocol.questions.estimate import Estimate, Totals


def question_of(plan: Plan) -> QuestionSection:
    """The question of a plan that has one."""
    assert plan.question is not None, "only such plans are asked"
    return plan.question


class Kind(ABC):
    """A kind of question: the cells of the vector that is summed, how long it may be, and what its total tells."""

    of_model = False
    """Whether it is about a model, and so about sequences of held-out records. Other kinds read fields."""

    @abstractmethod
    def cells(self, plan: Plan) -> tuple[str, ...]:
        """The names of the cells of a unit's vector, in their order; none where they are too many to name."""

    def count(self, plan: Plan) -> int:
        """K: number of cells."""
        return len(self.cells(plan))

    def touched(self, plan: Plan) -> int:
        """The most cells of the vector of one unit that are not zero."""
        return self.count(plan)

    @abstractmethod
    def bound(self, plan: Plan) -> float:
        """The largest L2 norm of the vector of one unit, a record or all of those of an owner."""

    @abstractmethod
    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """The figures of an answer.

        Args:
            plan: The question.
            totals: (K,): the noised sum over all units, by cell.
            deviation: Standard deviation of the noise in each cell.
        """

    @abstractmethod
    def middle(self, plan: Plan, units: int) -> Totals:
        """Totals of so many units in the middle of what they can be, for which the expected errors are told."""

    def drawn(self, found: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
        """Those of an answer's figures that a plot compares, all of one scale; none: the kind has none."""
        return ()

    def expected(self, plan: Plan, deviation: float, units: int) -> tuple[tuple[str, float], ...]:
        """The standard deviation of each figure by the noise, for so many units in all."""
        found = self.figures(plan, self.middle(plan, units), deviation)
        return tuple((each.name, each.noise) for each in found)
