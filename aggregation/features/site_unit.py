"""The unit `site`: each site's whole update is protected, and its clipping norm may follow the updates' norms.

The mechanism is `privacy/mechanism/site_noise.py`; here it is put into a sum. All sites of a sum are told the clipping
norm C of the round. A site's code is the mechanism's: it clips, rounds and, if no coordinator is trusted, adds noise.
The coordinator adds the noise that it is trusted with to each sum, decodes it, and moves C by the noised count.

Noise of a trusted coordinator is a function of the run's key, the round and, unless it is correlated, of the sum
(`of_sum`): a sum that is opened again gets the same noise. Each group of a round has noise for itself, so a site, which
is in one group, pays for one release. C moves by the median of what the groups' noised counts say.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features.feature import (
    WHOLE,
    AtCoordinator,
    AtSite,
    Basis,
    Clipped,
    Feature,
    Figures,
    Given,
    Me,
    Portion,
    Secrets,
    State,
    Summed,
)
from cloister.aggregation.vector.average import WEIGHT, Counter, SumLayout
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.privacy.mechanism.clip import rounded_l2
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import UpdateError
from cloister.protocol.figure import Figure
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import LARGEST_CLIP, SMALLEST_CLIP

NAME = "site unit"
_FLOAT = struct.Struct(">d")


def mechanism_of(basis: Basis) -> SiteMechanism:
    """The mechanism of a plan with the unit `site`, on the parameters of a sum."""
    terms = basis.terms
    assert terms is not None, "a plan with a unit has terms"
    assert terms.mechanism is not None, "unit site has a mechanism"
    return terms.mechanism.on(basis.parameters)


def layout(basis: Basis) -> SumLayout:
    """The updates in clipping norms, in steps of the mechanism, adaptive clipping's coordinate, and the weight 1."""
    plan, mechanism = basis.plan, mechanism_of(basis)
    bits, cohort = plan.aggregation.ring_bits, max(plan.summed())
    bound = mechanism.bound(Ring(bits, 1.0, cohort).levels)
    # Noise at the sites has no bound.
    clipped = math.inf if mechanism.variance else rounded_l2(mechanism.scale, basis.parameters)
    return SumLayout(
        Ring(bits, bound, cohort),
        basis.parameters,
        (Counter(WEIGHT, 1, 1),),
        extra=mechanism.size - basis.parameters,
        most_extra=mechanism.count_step,
        most_norm=clipped,
    )


@dataclass(frozen=True)
class Protected:
    """A `Code` that protects the update as a whole."""

    layout: SumLayout
    """Layout of the sum."""
    mechanism: SiteMechanism
    """The mechanism of the plan's terms."""
    clip_norm: float
    """C of the round."""
    noise: NoiseStream
    """A stream that nothing else uses: one for each update, the same at all its ranks."""

    @property
    def protects(self) -> bool:
        """True."""
        return True

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """As `Code.release`. Nothing here raises because of the update's values; `tokens` are outside the privacy
        budget, and not used."""
        coded: RingVector = np.empty(values.shape, self.layout.ring.dtype) if of.out is None else of.out
        count = self.mechanism.encode(values, self.clip_norm, self.noise, coded, of.offset, of.gather)
        return coded, Clipped(count=count)

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """As `Code.tail`: adaptive clipping's coordinate, and the weight 1; `clipped` of one span is enough."""
        return self.layout.tail({WEIGHT: 1}, self.mechanism.tail(clipped[0].count, self.noise))


@dataclass(frozen=True)
class _AtSite(AtSite):
    mechanism: SiteMechanism
    clip: float

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> _AtSite:
        clip = clip_in(told)
        if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:  # not for what is no number
            raise UpdateError("clipping norm", clip, expected=f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g}")
        privacy = basis.plan.privacy
        if privacy.adaptive is None and clip != privacy.clip:
            raise UpdateError("clipping norm", clip, expected=f"{privacy.clip:g}, that of the plan")
        return cls(mechanism_of(basis), clip)

    def code(self, layout: SumLayout, secrets: Secrets, factor: float) -> Protected:
        assert secrets.noise is not None, "a plan with a unit has noise"
        return Protected(layout, self.mechanism, self.clip, secrets.noise)


class _AtCoordinator(AtCoordinator):
    def __init__(self, basis: Basis, given: Given) -> None:
        super().__init__(basis, given)
        self._mechanism, self._noise = given.mechanism or mechanism_of(basis), given.noise
        self._clip = basis.plan.privacy.clip
        self._next: list[float] = []

    def tell(self, number: int, cohort: Sequence[str]) -> bytes:
        return told_clip(self._clip)

    def protect(self, summed: Summed, total: RingVector) -> None:
        noise = self._noise(summed.round)
        if isinstance(noise, NoiseStream):
            if self.plan.aggregation.groups > 1:
                noise = noise.child(f"group {summed.group}")
            if not self._mechanism.variance:
                noise = of_sum(noise, total, self._clip, summed.names)
        self._on(total.size).add_noise(total, noise)

    def decode(self, summed: Summed, mean: Floats) -> Floats:
        mean, clip = self._on(mean.size).decode(mean, summed.counters[WEIGHT], self._clip)
        self._next.append(clip)
        return mean

    def _on(self, size: int) -> SiteMechanism:
        """The mechanism for a sum of as many values."""
        whole = self._mechanism
        return whole.on(size - (whole.size - whole.dimension))

    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> Figures:
        # Whatever a gate says of the mean: the count was released, and C of the next round follows from it.
        self._clip, self._next = statistics.median(self._next), []
        return {}

    def figures(self, sums: Sequence[Summed]) -> Figures:
        return {"clip": self._clip}

    def state(self) -> State:
        return {"clip": np.array([self._clip])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._clip = float(state["clip"][0])


def told_clip(clip: float) -> bytes:
    """What sites are told of the clipping norm of a round: a float64, big-endian."""
    return _FLOAT.pack(clip)


def clip_in(told: bytes) -> float:
    """The clipping norm in a message; no number where the message has none."""
    return float(_FLOAT.unpack(told)[0]) if len(told) == _FLOAT.size else math.nan


def of_sum(stream: NoiseStream, total: RingVector, clip: float, names: Sequence[str]) -> NoiseStream:
    """The stream of one opened sum; a declared one is the same for all sums, because others know it anyway.

    Args:
        stream: That of the round, or of one group of it.
        total: The sum as it was opened, without noise.
        clip: Clipping norm of the round.
        names: The sites in it.
    """
    if stream.declared:
        return stream
    return stream.child(f"{clip.hex()}/{'/'.join(names)}/{vector_hash(total).hex()}")


FEATURE = Feature(
    NAME,
    wanted=lambda basis: basis.plan.privacy.unit == "site" and basis.plan.question is None,
    site=_AtSite,
    coordinator=_AtCoordinator,
    tells=True,
    figures=(Figure("clip", "clipping norm of the next round", ".4g", over="last", in_line=False),),
    layout=layout,
)
