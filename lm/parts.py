"""The part of the flat vector that a round sums: one span, which every party derives from plan, layout and round.

Three schedules, of which a plan has one:

- Every round sums the whole vector.
- `aggregation.fragments = P` (Streaming DiLoCo: Douillard et al. 2025, "Streaming DiLoCo with overlapping
  communication"): P spans tile the vector, and round r sums span (r - 1) mod P. Sites train everything in every round
  and keep what they have not sent (`clients/drift.py`). Spans meet where a layer ends.
- `model.adapter.redraw = R`: the vector has one span for each phase of R rounds, and a round sums that of its phase.
  Nothing else is trained in it.

Fragments are as nearly equal as whole layers allow: the sum of the squares of their sizes is the least possible one.
Fragments of one size would cut a matrix in two, of which each half would then be of another time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from cloister.lm.layout import Layout, phase_of
from cloister.protocol.blocks import Span
from cloister.protocol.errors import PlanError
from cloister.protocol.plan import Plan


@dataclass(frozen=True)
class Parts:
    """The spans that the rounds of a run sum; they tile the vector."""

    spans: tuple[Span, ...]
    rounds: int = 1
    """Rounds in a row that sum the same span."""

    def of(self, round: int) -> Span:
        """The span that a round, from 1, sums."""
        return self.spans[(round - 1) // self.rounds % len(self.spans)]

    @property
    def largest(self) -> int:
        """Elements of the largest span, for which the noise of a round is priced."""
        return max(span.size for span in self.spans)


def parts_of(plan: Plan, layout: Layout) -> Parts:
    """The parts of a plan's rounds.

    Args:
        plan: The plan.
        layout: That of its model.

    Raises:
        PlanError: the plan asks for more fragments than the model has layers to cut between.
    """
    return _parts(plan.aggregation.fragments, plan.model.adapter.redraw, layout)


@lru_cache(maxsize=16)
def _parts(fragments: int, redraw: int | None, layout: Layout) -> Parts:
    ends = itertools.pairwise(layout.offsets)
    named = list(zip(layout.names, (end - begin for begin, end in ends), strict=True))
    if redraw is not None:
        phases = [
            sum(size for _, size in found)
            for _, found in itertools.groupby(named, lambda each: phase_of(each[0]))
        ]
        return Parts(_spans(phases), redraw)
    if fragments == 1:
        return Parts((Span(0, layout.size),))
    groups = [
        sum(size for _, size in found) for _, found in itertools.groupby(named, lambda each: _layer(each[0]))
    ]
    if fragments > len(groups):
        raise PlanError(
            "aggregation.fragments",
            fragments,
            expected=f"at most {len(groups)}, the layers of the model (with embeddings and the like) between which its "
            "trained parameters can be cut",
            fix=f"set aggregation.fragments = {len(groups)} or less",
        )
    return Parts(_spans(_joined(groups, fragments)))


def _layer(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or else the name of its module."""
    path = name.split(".")
    numbers = [place for place, word in enumerate(path) if word.isdigit()]
    return ".".join(path[: numbers[0] + 1] if numbers else path[:-1])


def _joined(sizes: list[int], parts: int) -> list[int]:
    """Join neighbours to so many sizes that the sum of their squares is the least; of equal ones the first found."""
    before = list(itertools.accumulate(sizes, initial=0))
    count = len(sizes)
    # best[end]: the least sum of squares of the first `end` sizes in as many parts as the loop has reached.
    best: list[int | None] = [0] + [None] * count
    cuts: list[list[int]] = []
    for _ in range(parts):
        found: list[int | None] = [None] * (count + 1)
        chosen = [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                known = best[begin]
                if known is None:
                    continue
                total = known + (before[end] - before[begin]) ** 2
                least = found[end]
                if least is None or total < least:
                    found[end], chosen[end] = total, begin
        best = found
        cuts.append(chosen)
    edges = [count]
    for chosen in reversed(cuts):
        edges.append(chosen[edges[-1]])
    return [before[end] - before[begin] for begin, end in itertools.pairwise(reversed(edges))]


def _spans(sizes: list[int]) -> tuple[Span, ...]:
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return tuple(Span(begin, end) for begin, end in ends)
