"""The schedule of a run: which of the trained parameters a round trains, sums and moves.

A round has the parameters of a part of the layout, whose vector is that of those parameters one after the other
(`Layout.only`): its code, noise, masks and the server's step have their elements alone, and the others keep their
values, moments included. The schedule is public and follows from the plan and the round. So every party computes it,
and no coordinator chooses it.

- `rolora`: B in odd rounds and A in even ones, each exact under averaging (Chen et al. 2024, "Robust federated
  finetuning of LLMs via alternating optimization of LoRA"); a new head in both. A stale update of an asynchronous round
  moves one half beside another half than it was trained with, so there the mean is exact only for updates of one model.
- `aggregation.part` below 1: that share of the blocks of layers, drawn anew for each round. What is outside of the
  layers (embeddings, output layer, last norm) is one more block. Training a random part of a model in each round is
  studied by Pfeiffer et al. 2023 ("Aggregating capacity in FL through successive layer training") and, for random
  blocks, by Nesterov 2012 ("Efficiency of coordinate descent methods on huge-scale optimization problems").

The draw is a permutation of the blocks by SHA-256 of the plan's seed, the round and the block. It is no secret, and no
privacy follows from it. Refused: to draw by the roster's hash too. Its keys are random, so the same plan would end with
other weights each time, and a sum in clear has no roster.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from cloister.lm.model.layout import Layout
from cloister.protocol.encoding import pack
from cloister.protocol.plan.plan import Plan

LOOKED_AT = 16
"""Rounds of which the parts are looked at for an estimate: about as much is trained in all of them."""
HEAD = ".modules_to_save."
"""In the name of each parameter of a head that is trained beside an adapter."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|layer)\.(\d+)\.")
"""The number of a layer in the name of one of its parameters, as transformers names them."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of a plan over a layout."""

    layout: Layout
    """Every parameter that some round trains."""
    rolora: bool
    part: float
    seed: int

    @classmethod
    def of(cls, plan: Plan, layout: Layout) -> Schedule:
        """The schedule of a plan.

        Args:
            plan: The plan.
            layout: The layout of its model.
        """
        rolora = plan.model.adapter.scheme == "rolora"
        return cls(layout, rolora, plan.aggregation.part, plan.run.seed)

    def of_round(self, number: int) -> Layout:
        """What a round, from 1, trains and sums."""
        if not self.rolora and self.part == 1:
            return self.layout
        return _drawn(self, number if self.part < 1 else number % 2)

    def sizes(self, rounds: int) -> set[int]:
        """The numbers of parameters that the first rounds train, without their layouts."""
        if not self.rolora and self.part == 1:
            return {self.layout.size}
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        halves: list[Counter[str]] = []
        for number in (0, 1):
            halves.append(Counter())
            for name in self._half(number):
                halves[-1][_block(name)] += math.prod(shapes[name])
        numbers = range(1, 1 + (rounds if self.part < 1 else min(rounds, 2)))
        return {
            sum(halves[number % 2][block] for block in _chosen(self, halves[number % 2], number))
            for number in numbers
        }

    def _half(self, number: int) -> tuple[str, ...]:
        """The names of which a round trains a part: those of one factor of an adapter with `rolora`."""
        half = ".lora_B." if number % 2 else ".lora_A."
        return tuple(name for name in self.layout.names if not self.rolora or half in name or HEAD in name)

    def layouts(self, rounds: int) -> set[Layout]:
        """What the first rounds train, each layout once; a round of a plan without `part` trains one of two at most."""
        return {
            self.of_round(number) for number in range(1, 1 + (rounds if self.part < 1 else min(rounds, 2)))
        }


@lru_cache(maxsize=4)
def _drawn(schedule: Schedule, number: int) -> Layout:
    names = schedule._half(number)
    if schedule.part < 1:
        chosen = _chosen(schedule, {_block(name) for name in names}, number)
        names = tuple(name for name in names if _block(name) in chosen)
    return schedule.layout.only(names)


def _chosen(schedule: Schedule, blocks: Collection[str], number: int) -> set[str]:
    """The blocks that a round trains, of those of which it trains a part."""
    if schedule.part == 1:
        return set(blocks)

    def place(block: str) -> bytes:
        return hashlib.sha256(pack("cloister/part", schedule.seed, number, block)).digest()

    return set(sorted(sorted(blocks), key=place)[: max(1, round(schedule.part * len(blocks)))])


def _block(name: str) -> str:
    """The block of layers of a parameter: its layer, or '' outside of the layers."""
    found = _LAYER.search(name)
    return name[: found.end()] if found else ""
