"""The questions by their kinds in a plan, and the model of a run that asks one."""

from __future__ import annotations

from cloister.lm.questions.evaluate import evaluate
from cloister.lm.questions.question import Question
from cloister.lm.questions.tabular import histogram, mean
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.questions import question_of

QUESTIONS: dict[str, Question] = {"evaluate": evaluate, "histogram": histogram, "mean": mean}


def asked_by(plan: Plan) -> Question:
    """The question of a plan."""
    return QUESTIONS[question_of(plan).kind]
