"""The sums of a run: vector layouts and secure-sum contracts, which all parties derive from one plan."""

from __future__ import annotations

import hashlib
import math

from cloister.aggregation import masks
from cloister.aggregation.average import CLIPPED, WEIGHT, Counter, SumLayout
from cloister.aggregation.compression import BlockCode
from cloister.aggregation.ring import Ring
from cloister.aggregation.secure_sum import Contract
from cloister.privacy.terms import terms_of
from cloister.protocol.cohort import draw_of
from cloister.protocol.encoding import pack
from cloister.protocol.errors import PlanError
from cloister.protocol.messages import MOST_SCALES, TRAIN, Purpose
from cloister.protocol.plan import Plan
from cloister.protocol.roster import Roster

TOKENS = "tokens"
LOSS = "loss"
CORRECT = "correct"
BYTES = "bytes"

LOSS_SCALE = 1 << 20
"""Summed losses are sent as whole multiples of 2^-20 nats."""
_LARGEST_LOSS = 1 << 50
_LARGEST_COUNT = 1 << 48
"""Most tokens or bytes of a site's held-out records."""


def count_of_loss(nats: float) -> int:
    """A summed loss as a counter; one that is not finite, or beyond 2^30 nats, counts as 2^30."""
    return min(round(nats * LOSS_SCALE), _LARGEST_LOSS) if math.isfinite(nats) else _LARGEST_LOSS


def training_layout(plan: Plan, parameters: int) -> SumLayout:
    """The layout of a round's sum: the weighted updates, and totals of tokens, losses and clipped values.

    Under privacy the number of sites is the only total: other totals are outside the privacy budget. Where the unit is
    the site, values are in clipping norms, in the steps of the site-level mechanism, which also sets their number.
    With `aggregation.compression` the update has whole rotated blocks.

    Args:
        plan: The plan.
        parameters: Number of trained parameters.

    Raises:
        PlanError: the sum is longer than a mask may be, or has more blocks than a message has room for.
    """
    bits, cohort = plan.aggregation.ring_bits, max(plan.summed())
    terms = terms_of(plan, parameters)
    if terms is not None and terms.mechanism is not None:
        mechanism = terms.mechanism
        bound = mechanism.bound(Ring(bits, 1.0, cohort).levels)
        extra = mechanism.size - parameters
        layout = SumLayout(Ring(bits, bound, cohort), parameters, (Counter(WEIGHT, 1, 1),), extra=extra)
    else:
        heaviest = plan.most_labels() if plan.aggregation.weighting == "tokens" else 1
        weight = Counter(WEIGHT, heaviest, 1)
        ring = Ring(bits, plan.aggregation.bound, cohort)
        compressed = plan.aggregation.compression is not None
        blocks = BlockCode(parameters, plan.run.seed, ring) if compressed else None
        size = parameters if blocks is None else blocks.size
        counters: tuple[Counter, ...] = (weight,)
        if terms is None:
            tokens, loss = Counter(TOKENS, plan.most_labels()), Counter(LOSS, _LARGEST_LOSS)
            counters = (weight, tokens, loss, Counter(CLIPPED, size))
        layout = SumLayout(ring, size, counters, heaviest, blocks=blocks)
        if blocks is not None and 4 * blocks.blocks > MOST_SCALES:
            raise PlanError(
                "trained parameters",
                parameters,
                expected=f"at most {MOST_SCALES // 4} blocks of 2^14 with [aggregation.compression]",
                fix="train an adapter ([model.adapter]), or remove [aggregation.compression]",
            )
    if plan.aggregation.secure and layout.length > masks.LONGEST:
        raise PlanError(
            "trained parameters",
            parameters,
            expected=f"a sum of at most {masks.LONGEST} values under masks, and it has {layout.length}",
            fix="train an adapter ([model.adapter]), or sum in clear (aggregation.secure = false)",
        )
    return layout


def evaluation_layout(plan: Plan) -> SumLayout:
    """The layout of an evaluation's sum: totals over the held-out records of a cohort, and for classes or choices the
    confusion matrix."""
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, plan.cohort.size())
    counts = (CORRECT, TOKENS, BYTES, *confusion_counters(plan))
    counters = Counter(LOSS, _LARGEST_LOSS), *(Counter(name, _LARGEST_COUNT) for name in counts)
    return SumLayout(ring, 0, counters)


def confusion_counters(plan: Plan) -> tuple[str, ...]:
    """The counters of a plan's confusion matrix, its rows one after the other; none without classes or choices."""
    (_, what), outcomes = plan.data.counted, range(len(plan.data.outcomes))
    return tuple(f"{what} {true} taken for {given}" for true in outcomes for given in outcomes)


def layout_for(purpose: Purpose, plan: Plan, parameters: int) -> SumLayout:
    """The layout of a sum of that purpose, `train` or `evaluate`; arguments as for `training_layout`."""
    return training_layout(plan, parameters) if purpose == TRAIN else evaluation_layout(plan)


def contract_for(
    purpose: Purpose,
    plan: Plan,
    roster: Roster,
    run: str,
    parameters: int,
    model: str,
    group: int = 0,
) -> Contract:
    """The contract of the secure sums of one purpose in a run.

    Args:
        purpose: `train` or `evaluate`; each has attempts of its own.
        plan: The plan.
        roster: The sites' identities.
        run: Identity of the run.
        parameters: Number of trained parameters.
        model: Digest of the trained parameters' names and shapes.
        group: The group that is summed.
    """
    layout = layout_for(purpose, plan, parameters)
    ring = layout.ring
    meaning = pack(
        purpose,
        layout.size,
        layout.extra,
        layout.counters,
        layout.heaviest,
        ring.terms,
        float(ring.bound).hex(),
        model,
        *(("rotated blocks", layout.values, layout.blocks.seed) if layout.blocks is not None else ()),
    )
    return Contract(
        run=f"{run}/{purpose}",
        roster=roster,
        plan=bytes.fromhex(plan.digest()),
        draw=draw_of(plan, purpose),
        tolerance=plan.tolerance(),
        ring_bits=plan.aggregation.ring_bits,
        length=layout.length,
        layout=hashlib.sha256(meaning).digest(),
        cipher=plan.aggregation.cipher,
        group=group,
    )
