"""The answer to a question, as it is kept in a run folder. Everything in it is post-processing of one noised sum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Estimate, Totals
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of

_FORMAT = 1
SIZES = (500, 5_000, 50_000)
"""Numbers of units for which an expected error is told."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question."""

    kind: str
    sites: int
    """Sites in the sum."""
    deviation: float
    """Standard deviation of the noise in each cell."""
    cells: dict[str, float]
    """The noised total over all units, by cell; empty where the cells have no names."""
    figures: tuple[Estimate, ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "sites": self.sites,
            "noise": self.deviation,
            "cells": self.cells,
            "figures": [each.to_json() for each in self.figures],
        }

    @classmethod
    def of(cls, plan: Plan, totals: Totals, sites: int, deviation: float) -> Self:
        """The answer from the noised totals.

        Args:
            plan: The question.
            totals: (K,): the noised sum over all units, by cell.
            sites: Sites in the sum.
            deviation: Standard deviation of the noise in each cell.
        """
        kind = kind_of(plan)
        named = dict(zip(kind.cells(plan), totals.tolist(), strict=False))
        return cls(question_of(plan).kind, sites, deviation, named, kind.figures(plan, totals, deviation))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` gave.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        found = json.loads(text)
        figures = tuple(Estimate.from_json(each) for each in found["figures"])
        return cls(found["kind"], found["sites"], found["noise"], found["cells"], figures)
