"""What the vectors of a run sum: the layouts that coordinator and sites derive from the same plan."""

from __future__ import annotations

from cloister.aggregation.average import CLIPPED, WEIGHT, SumLayout
from cloister.aggregation.ring import Ring
from cloister.protocol.plan import Plan

TOKENS = "tokens"
LOSS = "loss"
CORRECT = "correct"
BYTES = "bytes"

LOSS_SCALE = 1 << 20
"""Summed losses travel as whole 2^-20 nats."""


def training_layout(plan: Plan, parameters: int) -> SumLayout:
    """The layout of a round's sum: the weighted updates, and totals of what the sites learned from."""
    heaviest = plan.most_tokens() if plan.aggregation.weighting == "tokens" else 1
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, plan.cohort.size())
    return SumLayout(ring, parameters, (WEIGHT, TOKENS, LOSS, CLIPPED), heaviest)


def evaluation_layout(plan: Plan) -> SumLayout:
    """The layout of an evaluation's sum: totals over all sites' held-out records."""
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, plan.cohort.sites)
    return SumLayout(ring, 0, (LOSS, CORRECT, TOKENS, BYTES))
