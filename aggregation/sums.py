"""The sums of a run: `Sums`, of which both ends, ranks and reports ask what a sum is made of."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

from cloister.aggregation import evaluation
from cloister.aggregation.features.feature import Basis
from cloister.aggregation.features.registry import layout_of
from cloister.aggregation.secure.secure_sum import Contract
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.average import SumLayout
from cloister.lm.model.layout import Layout
from cloister.lm.model.schedule import Schedule
from cloister.protocol.encoding import pack
from cloister.protocol.errors import PlanError
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.cohort import Draw, draw_of
from cloister.protocol.messages.messages import TRAIN, Division, Purpose
from cloister.protocol.plan.plan import Plan


@dataclass(frozen=True)
class Sums(Basis):
    """The sums of a plan over a model: layout, privacy, draw and contract of each, alike at all parties.

    Everything is derived once and kept: each message of a round asks for it.
    """

    model: str = ""
    """Digest of the trained parameters' names and shapes, and of what is frozen; part of each contract."""
    trained: Layout | None = None
    """The layout of what a sum of updates has; None: that of all trained parameters."""

    @classmethod
    def over(cls, plan: Plan, layout: Layout, base_hash: bytes) -> Sums:
        """The sums over a model that was built.

        Args:
            plan: The plan.
            layout: The layout of its trained parameters.
            base_hash: Hash of the frozen parameters that the run has made; empty: those of the plan.

        Raises:
            PlanError: a round of the plan trains too few parameters for the sketches of them.
        """
        model = layout.digest() + layout.source + base_hash.hex()
        schedule = Schedule.of(plan, layout)
        if plan.sketches:
            for size in schedule.sizes(plan.run.rounds):  # here, and not in the round that has it
                layout_of(Basis(plan, size, most=layout.size))
        return cls(plan, layout.size, model, schedule=schedule)

    def of_round(self, purpose: Purpose, number: int) -> Sums:
        """The sums of one purpose in a round: those of updates have what the round trains."""
        if purpose != TRAIN or self.schedule is None:
            return self
        trained = self.schedule.of_round(number)
        if trained is self.schedule.layout:
            return self
        known = self._parts.get(trained.digest())
        if known is None:
            self._parts.clear()  # a round asks for its own again and again
            model = self.model + trained.digest()
            known = replace(self, parameters=trained.size, most=self.parameters, model=model, trained=trained)
            self._parts[trained.digest()] = known
        return known

    @cached_property
    def _parts(self) -> dict[str, Sums]:
        return {}

    @cached_property
    def training(self) -> SumLayout:
        """The layout of a round's sum: the updates as their code has them, and its totals (`features/`).

        Raises:
            PlanError: the sum is longer than a mask may be, or a feature has no layout for so many parameters.
        """
        plan, parameters, layout = self.plan, self.parameters, layout_of(self)
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
        """The layout of an evaluation's sum, of all of a model (`evaluation.py`)."""
        return evaluation.layout(self)

    def layout(self, purpose: Purpose) -> SumLayout:
        """The layout of a sum of that purpose, `train` or `evaluate`."""
        return self.training if purpose == TRAIN else self.evaluation

    @property
    def update_bytes(self) -> int:
        """Bytes of an update on its way, all bits packed."""
        return math.ceil(self.training.length * self.plan.aggregation.ring_bits / 8)

    def draw(self, purpose: Purpose, division: Division = "plan") -> Draw:
        """The draw of the cohorts of the sums of one purpose, and of their groups."""
        return draw_of(self.plan, purpose, division)

    def quorum(self, purpose: Purpose, group: int = 0, division: Division = "plan") -> int:
        """The least number of sites in the sum of a group."""
        return self.plan.quorum(self.draw(purpose, division).sizes[group])

    def contract(
        self, purpose: Purpose, run: str, roster: Roster, group: int = 0, division: Division = "plan"
    ) -> Contract:
        """The contract of the secure sums of one purpose in a run; each purpose has attempts of its own.

        Args:
            purpose: `train` or `evaluate`.
            run: Identity of the run.
            roster: The sites' identities.
            group: The group that is summed.
            division: Of the round's cohort.
        """
        plan, layout = self.plan, self.layout(purpose)
        ring, bounded = layout.ring, math.isfinite(layout.norm_bound)
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
            *(("norm bound", layout.norm_bound.hex()) if bounded else ()),
        )
        return Contract(
            run=f"{run}/{purpose}",
            roster=roster,
            plan=bytes.fromhex(plan.digest()),
            draw=self.draw(purpose, division),
            tolerance=plan.tolerance(),
            ring_bits=plan.aggregation.ring_bits,
            length=layout.length,
            layout=hashlib.sha256(meaning).digest(),
            group=group,
            sketches=bounded,
        )
