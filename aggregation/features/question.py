"""A question: the vectors of a site's units in place of an update, with the site's part of the noise.

The mechanism is `privacy/mechanism/unit_sum.py`; here it is put into a sum. The mean of the sites' vectors is the new
"model" of the round, and so a sum that is opened is a checkpoint, as any other (docs/questions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.aggregation.features.feature import WHOLE, AtSite, Basis, Clipped, Feature, Me, Portion, Secrets
from cloister.aggregation.vector.average import WEIGHT, Counter, SumLayout
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.unit_sum import UnitSum
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.vectors import Sparse, Vectors


def asked_of(basis: Basis) -> UnitSum:
    """The mechanism of a question."""
    terms = basis.terms
    assert terms is not None, "a question has a unit"
    assert terms.asked is not None, "a question has a mechanism"
    return terms.asked


def layout(basis: Basis) -> SumLayout:
    """The cells, in steps of the mechanism, and the weight 1."""
    return layout_of(basis.plan, asked_of(basis))


def layout_of(plan: Plan, asked: UnitSum) -> SumLayout:
    """The cells of a mechanism, in its steps, and the weight 1."""
    bits, cohort = plan.aggregation.ring_bits, plan.cohort.size()
    bound = Ring(bits, 1.0, cohort).levels / asked.scale
    return SumLayout(Ring(bits, bound, cohort), asked.shape.cells, (Counter(WEIGHT, 1, 1),))


@dataclass(frozen=True)
class UnitCode:
    """A `Code` of the vectors of units."""

    layout: SumLayout
    """Layout of the sum."""
    asked: UnitSum
    """The mechanism of the plan's terms."""
    noise: NoiseStream
    """A stream that nothing else uses."""

    @property
    def protects(self) -> bool:
        """True."""
        return True

    def answer(self, units: Iterable[Vectors | Sparse]) -> RingVector:
        """The whole vector of a site.

        Args:
            units: As for `UnitSum.encode`.
        """
        vector: RingVector = np.empty(self.layout.length, self.layout.ring.dtype)
        self.asked.encode(units, self.noise, vector[: self.layout.size])
        vector[self.layout.size :] = self.tail((), 0, 0.0)
        return vector

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """As `Code.release`, of a site whose only unit has the vector `values`."""
        coded: RingVector = np.empty(values.shape, self.layout.ring.dtype) if of.out is None else of.out
        self.asked.encode([values.astype(np.float64)[None]], self.noise, coded)
        return coded, Clipped()

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """As `Code.tail`: the weight 1."""
        return self.layout.tail({WEIGHT: 1})


@dataclass(frozen=True)
class _AtSite(AtSite):
    asked: UnitSum

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> _AtSite:
        return cls(asked_of(basis))

    def code(self, layout: SumLayout, secrets: Secrets, factor: float) -> UnitCode:
        assert secrets.noise is not None, "a plan with a unit has noise"
        return UnitCode(layout, self.asked, secrets.noise)


FEATURE = Feature(
    "question", wanted=lambda basis: basis.plan.question is not None, site=_AtSite, layout=layout
)
