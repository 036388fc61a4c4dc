"""The answer to a question, as it is kept in a run folder. Everything in it is post-processing of one noised sum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Estimate, Totals
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of

_FORMAT = 1
_EXACT = 1e-9
"""Deviation of totals without noise: a quotient of which nothing was counted is not told."""
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
    public: Mapping[str, float | None] = field(default_factory=dict)
    """The same figures of the public records of the plan, by name, without noise; empty without such records."""

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "sites": self.sites,
            "noise": self.deviation,
            "cells": self.cells,
            "figures": [each.to_json() for each in self.figures],
            **({"public": dict(self.public)} if self.public else {}),
        }

    @classmethod
    def of(
        cls, plan: Plan, totals: Totals, sites: int, deviation: float, public: Totals | None = None
    ) -> Self:
        """The answer from the noised totals.

        Args:
            plan: The question.
            totals: (K,): the noised sum over all units, by cell.
            sites: Sites in the sum.
            deviation: Standard deviation of the noise in each cell.
            public: (K,): the exact sum over public records; None without such records.
        """
        kind = kind_of(plan)
        named = dict(zip(kind.cells(plan), totals.tolist(), strict=False))
        beside = () if public is None else kind.figures(plan, public, _EXACT)
        return cls(
            question_of(plan).kind,
            sites,
            deviation,
            named,
            kind.figures(plan, totals, deviation),
            {each.name: each.value for each in beside},
        )

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` gave.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        found = json.loads(text)
        figures = tuple(Estimate.from_json(each) for each in found["figures"])
        public = found.get("public", {})
        return cls(found["kind"], found["sites"], found["noise"], found["cells"], figures, public)
