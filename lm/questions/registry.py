"""The questions by their kinds in a plan, and the models of a run that asks one."""

from __future__ import annotations

from cloister.lm.questions.evaluate import compare, evaluate
from cloister.lm.questions.question import Question
from cloister.lm.questions.tabular import histogram, mean
from cloister.lm.questions.vocabulary import vocabulary
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.kind import question_of

QUESTIONS: dict[str, Question] = {
    "compare": compare,
    "evaluate": evaluate,
    "histogram": histogram,
    "mean": mean,
    "vocabulary": vocabulary,
}


def asked_by(plan: Plan) -> Question:
    """The question of a plan."""
    return QUESTIONS[question_of(plan).kind]
