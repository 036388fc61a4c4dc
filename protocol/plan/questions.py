"""What a question asks of each unit: the cells of the vector that is summed, and how long that vector may be."""

from __future__ import annotations

import itertools
import math

from cloister.protocol.plan.plan import Plan, QuestionSection

OTHER = "other"
"""The cell of what is in no other one."""
RIGHT, WRONG, LOSS = "right", "wrong", "loss"
UNITS, SUM, SQUARES = "units", "sum", "squares"


def question_of(plan: Plan) -> QuestionSection:
    """The question of a plan that has one."""
    assert plan.question is not None, "only such plans are asked"
    return plan.question


def cells(plan: Plan) -> tuple[str, ...]:
    """The names of the cells of a unit's vector, in their order."""
    question = question_of(plan)
    match question.kind:
        case "histogram":
            return (*(question.values or _ranges(question)), OTHER)
        case "mean":
            return UNITS, SUM, SQUARES
        case "evaluate":
            names: tuple[str, ...] = (RIGHT, WRONG)
            if "confusion" in question.figures:
                classes = plan.data.outcomes
                names = tuple(f"{true} as {found}" for true in classes for found in classes)
            elif "accuracy" not in question.figures:
                names = (UNITS,)
            return (*names, LOSS) if "loss" in question.figures else names


def most_of_unit(plan: Plan) -> float:
    """The largest L2 norm of the vector of one unit, a record or the mean over those of an owner: each part of it that
    is one in one cell at most adds 1 to its square."""
    question = question_of(plan)
    match question.kind:
        case "histogram":
            return 1.0
        case "mean":
            return math.sqrt(3)
        case "evaluate":
            return math.sqrt(2) if "loss" in question.figures else 1.0


def _ranges(question: QuestionSection) -> tuple[str, ...]:
    """The ranges between edges, as cells."""
    edges = [edge if isinstance(edge, str) else repr(edge).removesuffix(".0") for edge in question.edges]
    between = (f"{low} to {high}" for low, high in itertools.pairwise(edges))
    return (f"below {edges[0]}", *between, f"{edges[-1]} and above") if edges else ()


def of_sequences(plan: Plan) -> bool:
    """Whether sites make sequences of their records: to train on them, or to evaluate a model. A histogram and a mean
    read fields."""
    return plan.question is None or plan.question.kind == "evaluate"
