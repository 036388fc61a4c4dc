"""The sums of a run: `Sums`, of which both ends, ranks and reports ask what a sum is made of."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

from cloister.aggregation.secure.secure_sum import Contract
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.average import CLIPPED, WEIGHT, Counter, SumLayout
from cloister.aggregation.vector.compression import BlockCode
from cloister.aggregation.vector.ring import Ring
from cloister.lm.model.layout import Layout
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.protocol.encoding import pack
from cloister.protocol.errors import PlanError
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.cohort import Draw, draw_of
from cloister.protocol.messages.messages import MOST_SCALES, TRAIN, Purpose
from cloister.protocol.plan.plan import Plan

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


def confusion_counters(plan: Plan) -> tuple[str, ...]:
    """The counters of a plan's confusion matrix, its rows one after the other; none without classes or choices."""
    (_, what), outcomes = plan.data.counted, range(len(plan.data.outcomes))
    return tuple(f"{what} {true} taken for {given}" for true in outcomes for given in outcomes)


@dataclass(frozen=True)
class Sums:
    """The sums of a plan over a model: layout, privacy, draw and contract of each, alike at all parties.

    Everything is derived once and kept: each message of a round asks for it.
    """

    plan: Plan
    parameters: int
    """Number of trained parameters."""
    model: str = ""
    """Digest of the trained parameters' names and shapes, and of what is frozen; part of each contract."""

    @classmethod
    def over(cls, plan: Plan, layout: Layout, base_hash: bytes) -> Sums:
        """The sums over a model that was built.

        Args:
            plan: The plan.
            layout: The layout of its trained parameters.
            base_hash: Hash of the frozen parameters that the run has made; empty: those of the plan.
        """
        return cls(plan, layout.size, layout.digest() + layout.source + base_hash.hex())

    @cached_property
    def terms(self) -> Terms | None:
        """The plan's privacy; None without a privacy unit.

        Raises:
            PlanError: as `terms_of`.
        """
        return terms_of(self.plan, self.parameters)

    @cached_property
    def training(self) -> SumLayout:
        """The layout of a round's sum: the weighted updates, and totals of tokens, losses and clipped values.

        Under privacy the number of sites is the only total: other totals are outside the privacy budget. Where the unit
        is the site, values are in clipping norms, in the steps of the site-level mechanism, which also sets their
        number. With `aggregation.compression` the update has whole rotated blocks.

        Raises:
            PlanError: the sum is longer than a mask may be, or has more blocks than a message has room for.
        """
        plan, terms, parameters = self.plan, self.terms, self.parameters
        bits, cohort = plan.aggregation.ring_bits, max(plan.summed())
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

    @cached_property
    def evaluation(self) -> SumLayout:
        """The layout of an evaluation's sum: totals over the held-out records of a cohort, and for classes or choices
        the confusion matrix."""
        plan = self.plan
        ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, plan.cohort.size())
        counts = (CORRECT, TOKENS, BYTES, *confusion_counters(plan))
        counters = Counter(LOSS, _LARGEST_LOSS), *(Counter(name, _LARGEST_COUNT) for name in counts)
        return SumLayout(ring, 0, counters)

    def layout(self, purpose: Purpose) -> SumLayout:
        """The layout of a sum of that purpose, `train` or `evaluate`."""
        return self.training if purpose == TRAIN else self.evaluation

    @property
    def update_bytes(self) -> int:
        """Bytes of an update on its way, all bits packed."""
        return math.ceil(self.training.length * self.plan.aggregation.ring_bits / 8)

    def draw(self, purpose: Purpose) -> Draw:
        """The draw of the cohorts of the sums of one purpose, and of their groups."""
        return draw_of(self.plan, purpose)

    def quorum(self, purpose: Purpose, group: int = 0) -> int:
        """The least number of sites in the sum of a group."""
        return self.plan.quorum(self.draw(purpose).sizes[group])

    def contract(self, purpose: Purpose, run: str, roster: Roster, group: int = 0) -> Contract:
        """The contract of the secure sums of one purpose in a run; each purpose has attempts of its own.

        Args:
            purpose: `train` or `evaluate`.
            run: Identity of the run.
            roster: The sites' identities.
            group: The group that is summed.
        """
        plan, layout = self.plan, self.layout(purpose)
        ring = layout.ring
        meaning = pack(
            purpose,
            layout.size,
            layout.extra,
            layout.counters,
            layout.heaviest,
            ring.terms,
            float(ring.bound).hex(),
            self.model,
            *(("rotated blocks", layout.values, layout.blocks.seed) if layout.blocks is not None else ()),
        )
        return Contract(
            run=f"{run}/{purpose}",
            roster=roster,
            plan=bytes.fromhex(plan.digest()),
            draw=self.draw(purpose),
            tolerance=plan.tolerance(),
            ring_bits=plan.aggregation.ring_bits,
            length=layout.length,
            layout=hashlib.sha256(meaning).digest(),
            cipher=plan.aggregation.cipher,
            group=group,
        )
