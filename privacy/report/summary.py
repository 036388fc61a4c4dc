"""A report in words: one page for a reader who is not an engineer, and the questions of NIST SP 800-226.

NIST SP 800-226 ("Guidelines for Evaluating Differential Privacy Guarantees", 2025) lists what to ask of a claim of
differential privacy. The questions here are in our own words; each answer holds the facts of one run. Both are pure
functions of a `RunReport`, and claim nothing where `verdict` does not. The sentences are in `summary.jinja`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cloister.privacy.accounting.prose import Prose
from cloister.privacy.report.figures import at_least, at_most, scientific
from cloister.privacy.report.report import (
    CostRow,
    DatasetRow,
    QuestionsRow,
    RunReport,
    meaning,
    protects,
    protects_together,
    verdict,
)


@dataclass(frozen=True)
class Part:
    """A question or heading, and what is said under it."""

    title: str
    """The question or heading."""
    lines: tuple[str, ...]
    """Sentences."""


def plain(report: RunReport) -> tuple[Part, ...]:
    """The run for a reader who is not an engineer: no formula, no Greek letter."""
    return _parts(_PROSE.said("plain", report, verdict(report)))


def questions(report: RunReport) -> tuple[Part, ...]:
    """The questions of NIST SP 800-226 with the answers of this run; none without a privacy unit."""
    return () if report.unit == "none" else _parts(_PROSE.said("questions", report, verdict(report)))


def shares(report: RunReport) -> tuple[str, ...]:
    """What questions make of the cost of the run, or of all runs, in sentences; none without a question."""
    return _PROSE.said("shares", report) if _asked(report) else ()


def against_all(asked: QuestionsRow, delta: float | None = None) -> str:
    """The cost against the coordinator and all other sites together, in short; without its delta if that is `delta`."""
    found = asked.against_all
    if found is None:
        return "no figure"
    return _figure(found) if found.delta != delta else _epsilon(found)


def _figure(cost: CostRow) -> str:
    return f"{_epsilon(cost)} at delta {scientific(cost.delta)}"


def _epsilon(cost: CostRow) -> str:
    return "no bound" if cost.epsilon is None else at_most(cost.epsilon)


def _parts(lines: Iterable[str]) -> tuple[Part, ...]:
    """The parts that the lines of a page make."""
    found: list[Part] = []
    for line in lines:
        if line.startswith("# "):
            found.append(Part(line.removeprefix("# "), ()))
        else:
            found[-1] = Part(found[-1].title, (*found[-1].lines, line))
    return tuple(found)


def several(report: RunReport) -> str:
    """Units that differ together, in words."""
    if report.unit == "record":
        return f"{report.units} of one person"
    return f"{report.units} together"


def _counts(dataset: DatasetRow | None) -> bool:
    return dataset is not None and not dataset.problem


def _asked(report: RunReport) -> QuestionsRow | None:
    """What questions make of the cost of all runs that are counted; None without a question."""
    dataset = report.dataset
    return report.asked if dataset is None or dataset.problem else dataset.asked


def _runs(dataset: DatasetRow) -> str:
    return "1 run" if dataset.runs == 1 else f"{dataset.runs} runs"


def _one_in(delta: float) -> str:
    """1 / delta, rounded down."""
    return f"{math.floor(1 / delta * (1 + 1e-12)):,}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_PROSE = Prose(
    "cloister.privacy.report",
    "summary.jinja",
    of_questions=_asked,
    at_least=at_least,
    at_most=at_most,
    capital=_capital,
    counts=_counts,
    figure=_figure,
    meaning=meaning,
    one_in=_one_in,
    protects=protects,
    runs=_runs,
    scientific=scientific,
    several=several,
    protects_together=protects_together,
)
