"""The question that each evaluation of a private run asks its sites: how its model does on their held-out units.

It is one of kind `evaluate`, with the run's own model, so that a run and a question have one mechanism. Each unit is in
every evaluation of a run. So their number is fixed by the plan, and they are calibrated together.
"""

from __future__ import annotations

from cloister.protocol.plan.plan import Plan, QuestionSection

_STEPS = 2**11
"""Steps of the ring for each unit that it has room for: `unit_sum` needs 1,024 in a unit's bound, and the noise has the
other half of the ring."""
_MOST = 10**7


def question_within(plan: Plan) -> Plan:
    """A plan with evaluations that are charged, with the question that each of them asks.

    It is no plan to run: it still trains. The functions of questions read the question, and what it is asked about.
    """
    most = 2 ** (plan.aggregation.ring_bits - 1) // (_STEPS * plan.cohort.size())
    asked = QuestionSection(
        kind="evaluate", figures=("accuracy", "loss"), most_units=min(max(most, 1), _MOST)
    )
    return plan.model_copy(update={"question": asked})
