"""What a question about models finds on public records, exactly and at no cost, beside the answer of the sites."""

from __future__ import annotations

import logging

import numpy as np

from cloister.lm.data.prepare import UnitRule, prepare
from cloister.lm.model.model import LanguageModel, device_for
from cloister.lm.questions.question import Held
from cloister.lm.questions.registry import asked_by
from cloister.lm.text.corpus import corpus_records
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Totals
from cloister.protocol.questions.registry import kind_of

_log = logging.getLogger(__name__)


def public_totals(plan: Plan, model: LanguageModel, source: str) -> Totals:
    """The totals (K,) of a question's cells over public records, each of which is a unit, whoever owns it.

    Args:
        plan: A question about models.
        model: Its model.
        source: Where the records are: a file, a folder, a hub name or a `builtin:` source.

    Raises:
        DataError: the records cannot be read, or none of them can be used.
    """
    records = corpus_records(source, field="server.evaluation").records
    data = plan.data.model_copy(update={"held_out": 1.0})
    rule = UnitRule(plan.privacy.record, plan.privacy.windows)
    prepared = prepare(records, model.tokenizer, data, seed=plan.run.seed, units=rule)
    if prepared.left_out:
        _log.warning("public records: %s", prepared.summary())
    held = Held(lambda _unusable: iter(records), lambda: prepared, device_for("auto"))
    totals = np.zeros(kind_of(plan).count(plan))
    for vectors in asked_by(plan)(plan, held, model.about):
        assert isinstance(vectors, np.ndarray), "a question about models fills all of its cells"
        totals += vectors.sum(axis=0)
    if not totals.any():
        raise DataError(
            "server.evaluation",
            source,
            expected=f"public records that the task can use ({prepared.summary()})",
            fix="name others, or remove server.evaluation",
        )
    return totals
