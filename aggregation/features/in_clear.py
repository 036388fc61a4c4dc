"""The code of an update that may be summed as it is: without privacy, or noised already. The totals beside it.

Each value has the ring's own code, with secret rounding: post-processing of an update that unit `record` has noised.
Without a privacy unit the totals of tokens, losses and clipped values are in the sum. With one, they are outside the
privacy budget, and the number of sites is the only total.
"""

from __future__ import annotations

import math
from collections import Counter as Totals
from collections.abc import Sequence
from dataclasses import dataclass

from cloister.aggregation.features.feature import (
    WHOLE,
    AtCoordinator,
    AtSite,
    Basis,
    Clipped,
    Feature,
    Figures,
    Portion,
    Secrets,
    Summed,
)
from cloister.aggregation.vector.average import CLIPPED, WEIGHT, Counter, SumLayout, weight_of
from cloister.aggregation.vector.compression import BlockCode
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.protocol.figure import Figure
from cloister.protocol.plan.plan import AggregationSection, Plan

TOKENS = "tokens"
LOSS = "loss"

LOSS_SCALE = 1 << 20
"""Summed losses are sent as whole multiples of 2^-20 nats."""
LARGEST_LOSS = 1 << 50


def count_of_loss(nats: float) -> int:
    """A summed loss as a counter; one that is not finite, or beyond 2^30 nats, counts as 2^30, and one below 0 as 0."""
    return min(max(round(nats * LOSS_SCALE), 0), LARGEST_LOSS) if math.isfinite(nats) else LARGEST_LOSS


def layout(basis: Basis, blocks: BlockCode | None = None) -> SumLayout:
    """The weighted updates, and the counters.

    Args:
        basis: The plan.
        blocks: The code of rotated blocks; None: each value has the ring's own code.
    """
    plan = basis.plan
    heaviest = plan.most_labels() if plan.aggregation.weighting == "tokens" else 1
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, max(plan.summed()))
    size = basis.parameters if blocks is None else blocks.size
    counters: tuple[Counter, ...] = (Counter(WEIGHT, heaviest, 1),)
    if basis.terms is None:
        counters += (Counter(TOKENS, plan.most_labels()), Counter(LOSS, LARGEST_LOSS), Counter(CLIPPED, size))
    return SumLayout(ring, size, counters, heaviest, blocks=blocks)


@dataclass(frozen=True)
class InClear:
    """A `Code` of values one by one."""

    layout: SumLayout
    """Layout of the sum; only its counters leave the site."""
    rounding: bytes
    """Secret seed of the stochastic rounding (`ring.Dither`)."""
    aggregation: AggregationSection
    """The plan's, which says how a site is weighed."""
    factor: float = 1.0
    """What the update is scaled by: with `local.balance` tokens count by step, as the update does."""

    @property
    def protects(self) -> bool:
        """False: the update may be summed as it is."""
        return False

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """As `Code.release`; any span, and `of.gather` is not used."""
        coded, clipped = self.layout.encode(values, self.weight(tokens), self.rounding, of.offset, of.out)
        return coded, Clipped(values=clipped)

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """As `Code.tail`: the exact counters."""
        return self.layout.tail(
            {
                WEIGHT: self.weight(tokens),
                TOKENS: tokens,
                LOSS: count_of_loss(loss * tokens),
                CLIPPED: sum(span.values for span in clipped),
            }
        )

    def weight(self, tokens: int) -> int:
        """The site's weight.

        Args:
            tokens: What it learned from.
        """
        if self.aggregation.weighting != "tokens":
            return 1
        counted = max(1, round(tokens * self.factor)) if tokens else 0
        return weight_of(counted, self.layout.heaviest, self.aggregation.temperature)


@dataclass(frozen=True)
class _AtSite(AtSite):
    plan: Plan

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: object) -> _AtSite:
        return cls(basis.plan)

    def code(self, layout: SumLayout, secrets: Secrets, factor: float) -> InClear:
        return InClear(layout, secrets.rounding, self.plan.aggregation, factor)


class _AtCoordinator(AtCoordinator):
    def figures(self, sums: Sequence[Summed]) -> Figures:
        totals = Totals[str]()
        for each in sums:
            totals.update(each.counters)
        if TOKENS not in totals:
            return {}
        return {
            "tokens": totals[TOKENS],
            "train_loss": totals[LOSS] / LOSS_SCALE / max(totals[TOKENS], 1),
            "clipped": totals[CLIPPED],
        }


FEATURE = Feature(
    "in clear",
    wanted=lambda _basis: True,
    site=_AtSite,
    coordinator=_AtCoordinator,
    figures=(
        Figure("train_loss", "training loss", ".3f", unit="nats per {label}", better="lower"),
        Figure("tokens", "{label}s learned from", ",", over="sum", in_line=False),
        Figure("clipped", "coordinates clipped", ",", better="lower", over="sum", zero=False),
    ),
    layout=layout,
)
