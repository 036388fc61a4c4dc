"""The answer to a question: figures from the noised totals of its cells, and how far each may be off.

Everything here is post-processing of one noised sum. Two errors are told apart. The noise is known: it has the same
standard deviation in each cell. The sampling error is that of the units that were asked, as a sample of others; of
means and shares it is estimated from the noised totals. Standard deviations of quotients are those of the first order
(the delta method), so that a figure of few units is not told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.questions import cells, question_of

Totals = npt.NDArray[np.float64]
CLEAR = 3.0
"""Deviations of the noise below which a count, or the number of units under a quotient, is not told."""
WITHIN = 1.96
"""Deviations on both sides of 95 of 100 normal values."""
_FORMAT = 1
SIZES = (500, 5_000, 50_000)
"""Numbers of units for which an expected error is told."""


@dataclass(frozen=True)
class Estimate:
    """One figure of an answer."""

    name: str
    value: float | None
    """The figure; None where the noise is too large for one."""
    noise: float
    """Standard deviation by the noise; infinite without a value."""
    sampling: float | None = None
    """Standard deviation by the choice of the units, at most; None: it has none, or none is known."""

    @property
    def low(self) -> float | None:
        """The lower end of the interval that the noise gives with a probability of about 0.95."""
        return None if self.value is None else self.value - WITHIN * self.noise

    @property
    def high(self) -> float | None:
        """The upper end."""
        return None if self.value is None else self.value + WITHIN * self.noise

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        noise = self.noise if math.isfinite(self.noise) else None
        found = {"name": self.name, "value": self.value, "noise": noise, "sampling": self.sampling}
        return found | {"low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave."""
        noise = math.inf if found["noise"] is None else found["noise"]
        return cls(found["name"], found["value"], noise, found["sampling"])


@dataclass(frozen=True)
class Answer:
    """The answer to a question."""

    kind: str
    sites: int
    """Sites in the sum."""
    deviation: float
    """Standard deviation of the noise in each cell."""
    cells: dict[str, float]
    """The noised total over all units, by cell."""
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
            totals: As for `estimates`.
            sites: Sites in the sum.
            deviation: As for `estimates`.
        """
        named = dict(zip(cells(plan), totals.tolist(), strict=True))
        return cls(question_of(plan).kind, sites, deviation, named, estimates(plan, totals, deviation))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what `to_json` gave.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        found = json.loads(text)
        figures = tuple(Estimate.from_json(each) for each in found["figures"])
        return cls(found["kind"], found["sites"], found["noise"], found["cells"], figures)


def estimates(plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
    """The figures of an answer.

    Args:
        plan: The question.
        totals: (K,): the noised sum over all units, by cell.
        deviation: Standard deviation of the noise in each cell.
    """
    match question_of(plan).kind:
        case "histogram":
            return tuple(_counts(cells(plan), totals, deviation))
        case "mean":
            return tuple(_mean(plan, totals, deviation))
        case "evaluate":
            return tuple(_evaluated(plan, totals, deviation))


def expected(plan: Plan, deviation: float, units: int) -> tuple[tuple[str, float], ...]:
    """The standard deviation of each figure by the noise, for so many units in all, at the middle of what it can be.

    Args:
        plan: The question.
        deviation: As for `estimates`.
        units: Units of all sites together.
    """
    names, question = cells(plan), question_of(plan)
    totals = np.full(len(names), units / len(names))
    match question.kind:
        case "mean":
            totals = np.array([units, 0.0, units / 3])  # of evenly spread numbers
        case "evaluate":
            told = len(names) - ("loss" in question.figures)
            totals = np.array([units / told] * told + [units / 2] * (len(names) - told))
    return tuple((each.name, each.noise) for each in estimates(plan, totals, deviation))


def _counts(names: Sequence[str], totals: Totals, deviation: float) -> Iterator[Estimate]:
    """Each cell, and its share of all units; a small one is not told apart from none."""
    everything = float(totals.sum())
    for name, total in zip(names, totals, strict=True):
        told = float(total) if total >= CLEAR * deviation else None
        yield Estimate(name, told, deviation)
    for name, total in zip(names, totals, strict=True):
        told = total >= CLEAR * deviation
        counts = (1, len(names) - 1)
        yield _quotient(f"share of {name}", float(total) if told else math.nan, everything, counts, deviation)
    yield Estimate("units", everything, deviation * math.sqrt(len(names)))


def _share(
    name: str, totals: Totals, deviation: float, right: npt.NDArray[np.bool_], wrong: npt.NDArray[np.bool_]
) -> Estimate:
    """What some cells have of themselves and others together."""
    part, whole = float(totals[right].sum()), float(totals[right | wrong].sum())
    return _quotient(name, part, whole, (int(right.sum()), int(wrong.sum())), deviation)


def _quotient(name: str, part: float, whole: float, counts: tuple[int, int], deviation: float) -> Estimate:
    """A part of a whole.

    Args:
        name: Of the figure.
        part: The total over some cells; no number: it is not told.
        whole: The total over these cells and others.
        counts: Numbers of both kinds of cells.
        deviation: Of the noise in each.
    """
    count, others = counts
    if math.isnan(part) or whole < CLEAR * deviation * math.sqrt(count + others):
        return Estimate(name, None, math.inf)
    share = part / whole
    noise = deviation * math.sqrt(count * (1 - share) ** 2 + others * share**2) / whole
    return Estimate(name, min(max(share, 0.0), 1.0), noise, _sampled(part, whole))


def _sampled(part: float, whole: float) -> float:
    """The most that the choice of the units moves a mean of numbers from 0 to 1, by Bhatia and Davis's bound on their
    variance. Laplace's estimate of the mean keeps it above 0 where all or none were counted."""
    mean = (min(max(part, 0.0), whole) + 1) / (whole + 2)
    return math.sqrt(mean * (1 - mean) / whole)


def _mean(plan: Plan, totals: Totals, deviation: float) -> Iterator[Estimate]:
    question = question_of(plan)
    assert question.range is not None, "a sound question has it"
    low, high = question.range
    middle, half = (low + high) / 2, (high - low) / 2
    units, total, squares = map(float, totals)
    if units < CLEAR * deviation:
        yield Estimate("mean", None, math.inf)
        yield Estimate("variance", None, math.inf)
    else:
        y, second = total / units, squares / units
        each = deviation / units
        sampled = 2 * half * _sampled((units + total) / 2, units)  # (y + 1) / 2 is from 0 to 1
        mean = middle + half * min(max(y, -1.0), 1.0)
        yield Estimate("mean", mean, half * each * math.sqrt(1 + y * y), sampled)
        noise = half * half * each * math.sqrt(1 + 4 * y * y + (2 * y * y - second) ** 2)
        yield Estimate("variance", half * half * min(max(second - y * y, 0.0), 1.0), noise)
    yield Estimate("units", units, deviation)


def _evaluated(plan: Plan, totals: Totals, deviation: float) -> Iterator[Estimate]:
    question, count = question_of(plan), len(totals)
    told = count - ("loss" in question.figures)
    seen = np.arange(count) < told
    if "confusion" in question.figures:
        classes = plan.data.outcomes
        true, found = np.divmod(np.arange(count), len(classes))
        yield _share("accuracy", totals, deviation, seen & (true == found), seen & (true != found))
        for at, name in enumerate(classes):
            mine = seen & (true == at) & (found == at)
            yield _share(f"recall of {name}", totals, deviation, mine, seen & (true == at) & ~mine)
            yield _share(f"precision of {name}", totals, deviation, mine, seen & (found == at) & ~mine)
    elif "accuracy" in question.figures:
        yield _share("accuracy", totals, deviation, np.arange(count) == 0, np.arange(count) == 1)
    units = float(totals[seen].sum())
    if "loss" in question.figures:
        if units < CLEAR * deviation * math.sqrt(told):
            yield Estimate("loss", None, math.inf)
        else:
            part = float(totals[-1]) / units
            noise = question.most_loss * deviation * math.sqrt(1 + told * part * part) / units
            sampled = question.most_loss * _sampled(float(totals[-1]), units)
            yield Estimate("loss", question.most_loss * min(max(part, 0.0), 1.0), noise, sampled)
    yield Estimate("units", units, deviation * math.sqrt(told))
