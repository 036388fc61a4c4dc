"""An evaluation by the sites, as a sum: exact totals without a privacy unit, and otherwise the vectors of their units.

The second is a question within the run (`protocol/questions/within.py`), by the mechanism of questions: the code of the
units' vectors is that of `question.py`. Both are sums of the purpose `evaluate`, which no feature of training changes.
"""

from __future__ import annotations

import numpy as np

from cloister.aggregation.features import question
from cloister.aggregation.features.feature import Basis
from cloister.aggregation.features.in_clear import LARGEST_LOSS, LOSS, TOKENS
from cloister.aggregation.features.question import UnitCode
from cloister.aggregation.vector.average import Counter, Opened, SumLayout
from cloister.aggregation.vector.ring import Ring
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.unit_sum import UnitSum
from cloister.protocol.questions.estimate import Totals

CORRECT = "correct"
_LARGEST_COUNT = 1 << 48
"""Most tokens or bytes of a site's held-out records where the plan does not bound them."""


def charged(basis: Basis) -> UnitSum | None:
    """The mechanism of an evaluation; None: it has exact totals."""
    terms = basis.terms
    return None if terms is None or terms.evaluated is None else terms.evaluated.mechanism


def layout(basis: Basis) -> SumLayout:
    """The layout of an evaluation's sum: cells, or exact totals with the counters of the plan's task."""
    if (asked := charged(basis)) is not None:
        return question.layout_of(basis.plan, asked)
    from cloister.lm.tasks.registry import task_of  # torch takes seconds to import

    plan = basis.plan
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, plan.cohort.size())
    sequences, most = plan.server.evaluation_sequences, _LARGEST_COUNT
    if sequences is not None:  # otherwise no party knows how many records a site holds out
        most = sequences * plan.data.most_labels
    counters = [Counter(LOSS, LARGEST_LOSS), Counter(CORRECT, most), Counter(TOKENS, most)]
    counters += [Counter(name, _LARGEST_COUNT) for name in task_of(plan.data).counters()]
    return SumLayout(ring, 0, tuple(counters))


def code(basis: Basis, noise: NoiseStream) -> UnitCode:
    """How the vectors of a site's units are coded.

    Args:
        basis: A plan whose evaluations are charged.
        noise: Of the site in that round; training may use it too.
    """
    asked = charged(basis)
    assert asked is not None, "the plan charges evaluations"
    return UnitCode(layout(basis), asked, noise.child("evaluation"))


def totals(opened: Opened, sites: int) -> Totals:
    """(K,): the noised sum over all units, by cell."""
    return opened.mean.astype(np.float64) * sites
