"""A bound on the length of every site's update (`aggregation.norm_bound`), which an honest site keeps by scaling.

The site scales its finished update down to the bound, after the noise of its unit: post-processing, which costs no
privacy. What checks the bound is the sum. Under masks each site sends a sketch of its integers
(`aggregation/vector/sketch.py`), and in clear the coordinator computes the norm of each vector (`SumLayout.check`).
docs/poisoning.md has what a lying site can still do.

`norm_bound = "auto"` is what the steps of a round can move a model, with lr the learning rate, S the most local steps
of a site, d the parameters of the round, and r the root mean square of a step's coordinates at lr = 1 (`Kind.rms`):

    S lr r sqrt(d)

With DP-SGD and SGD a step is the clipped sum of a batch and its noise over B, so it is lr C (1 + z sqrt(d) / B) long,
and the noise of the steps adds up as sqrt(S): S lr C + sqrt(S) lr z C sqrt(d) / B, times 1.1, beyond which the noise of
10,000 parameters is not once in 2^100 rounds. With AdamW and Muon a step is as long with noise as without.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cloister.aggregation.features.feature import WHOLE, AtSite, Basis, Clipped, Code, Feature, Me, Portion
from cloister.aggregation.vector.average import SumLayout
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.aggregation.vector.sketch import ROWS
from cloister.privacy.mechanism.clip import clip
from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import AUTO, LARGEST_CLIP, SMALLEST_CLIP

_HIDDEN = 4
"""Values of an update for each number that its sketches show, at least: the values are small whole numbers, so fewer
numbers than values can tell them."""
_ROOM = 1.1
"""Of the noise's norm, over its mean."""


def bound_of(basis: Basis) -> float:
    """The L2 norm to which an honest site scales its update; infinite without a bound."""
    given = basis.plan.aggregation.norm_bound
    if given is None:
        return math.inf
    if given != AUTO:
        return float(given)
    return min(max(by_steps(basis), SMALLEST_CLIP), LARGEST_CLIP)


def signal_share(basis: Basis) -> float:
    """The largest share of a step's length that comes from records: 1 without noise, else 1 / sqrt(1 + z^2 d / B^2).

    C is the longest signal of a batch of the expected size B, and z C sqrt(d) the noise.
    """
    plan = basis.plan
    z = 0.0 if basis.terms is None else basis.terms.noise_multiplier
    ratio = z / (plan.local.batch_size * plan.local.accumulation)
    return 1 / math.sqrt(1 + ratio**2 * basis.parameters)


def longest_signal(basis: Basis) -> float:
    """The longest part of an honest update that comes from records, within the bound."""
    plan = basis.plan
    if basis.terms is not None and plan.local.optimizer == "sgd":
        return min(bound_of(basis), _steps(basis) * plan.local.learning_rate * plan.privacy.clip)
    return min(bound_of(basis), by_steps(basis)) * signal_share(basis)


def _steps(basis: Basis) -> int:
    local = basis.plan.local
    return local.steps if local.balance == "fixed" else local.step_limits()[1]


def by_steps(basis: Basis) -> float:
    """What the steps of a round can move the model: `auto`."""
    from cloister.lm.training.optimizer import optimizer_of  # torch takes seconds to import

    plan, d = basis.plan, basis.parameters
    local, steps = plan.local, _steps(basis)
    if basis.terms is not None and local.optimizer == "sgd":
        share = signal_share(basis)
        noise = math.sqrt(1 / share**2 - 1)  # over C
        return local.learning_rate * plan.privacy.clip * (steps + _ROOM * math.sqrt(steps) * noise)
    return steps * local.learning_rate * optimizer_of(local).rms(local, d) * math.sqrt(d)


@dataclass(frozen=True)
class Bounded:
    """A `Code` of updates that are scaled down to the bound before another code."""

    inner: Code
    bound: float

    @property
    def layout(self) -> SumLayout:
        """That of the other code."""
        return self.inner.layout

    @property
    def protects(self) -> bool:
        """As the other code."""
        return self.inner.protects

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """As `Code.release`; the values are overwritten."""
        clip(values, self.bound, of.offset, of.gather)
        return self.inner.release(values, tokens, of)

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """As `Code.tail`."""
        return self.inner.tail(clipped, tokens, loss)


@dataclass(frozen=True)
class _AtSite(AtSite):
    bound: float

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> _AtSite:
        return cls(bound_of(basis))

    def around(self, code: Code) -> Code:
        return Bounded(code, self.bound)


def _bounded(basis: Basis, layout: SumLayout) -> SumLayout:
    shown = basis.plan.cohort.attempts * ROWS
    if basis.plan.sketches and basis.parameters < _HIDDEN * shown:
        raise PlanError(
            "cohort.attempts",
            basis.plan.cohort.attempts,
            expected=f"at most {basis.parameters // (_HIDDEN * ROWS)} with aggregation.norm_bound: so many sketches, "
            f"of {ROWS} numbers each, would show nearly all of an update of {basis.parameters:,} values",
            fix="lower it, train more parameters, or remove aggregation.norm_bound",
        )
    return dataclasses.replace(layout, norm_bound=bound_of(basis))


FEATURE = Feature(
    "norm bound",
    wanted=lambda basis: basis.plan.aggregation.norm_bound is not None,
    site=_AtSite,
    within=_bounded,
)
