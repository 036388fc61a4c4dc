"""The kinds of questions by their names in a plan."""

from __future__ import annotations

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.compare import Compare
from cloister.protocol.questions.evaluate import Evaluate
from cloister.protocol.questions.histogram import Histogram
from cloister.protocol.questions.kind import Kind, question_of
from cloister.protocol.questions.mean import Mean
from cloister.protocol.questions.vocabulary import Vocabulary

KINDS: dict[str, Kind] = {
    "compare": Compare(),
    "evaluate": Evaluate(),
    "histogram": Histogram(),
    "mean": Mean(),
    "vocabulary": Vocabulary(),
}


def kind_of(plan: Plan) -> Kind:
    """The kind of a plan's question."""
    return KINDS[question_of(plan).kind]


def of_sequences(plan: Plan) -> bool:
    """Whether sites make sequences of their records: to train on them, or to evaluate a model."""
    return plan.question is None or kind_of(plan).of_model
