"""A figure of a run: what a number means, and how it is shown. Displays, cards and trackers iterate over figures.

A figure is declared where it is computed, and in no other place: what is shown of it follows from here.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["lower", "higher", ""]
Over = Literal["last", "least", "greatest", "mean", "sum", ""]
_OVER: dict[str, Callable[[list[Any]], Any]] = {
    "last": operator.itemgetter(-1),
    "least": min,
    "greatest": max,
    "mean": statistics.fmean,
    "sum": sum,
}


@dataclass(frozen=True)
class Figure:
    """What is known of a figure wherever it is shown."""

    name: str
    """Its name in `metrics.jsonl`, in JSON and at trackers."""
    label: str
    """What it is, in words; `{label}` is what a plan learns from, `token` or `text`."""
    form: str | Callable[[Any], str] = ""
    """Python's format of a value, or what formats it."""
    unit: str = ""
    """As `label`; empty: a count or a ratio, or the format says it."""
    better: Better = ""
    """Which values are better, if any are."""
    over: Over = ""
    """How the values of all rounds become one of the run; empty: they do not."""
    zero: bool = True
    """Whether 0 is shown."""
    in_line: bool = True
    """Whether the line of a round has it."""
    shared: bool = True
    """Whether it may leave a site: it comes from a sum. Others are for the persons of the site."""

    def shown(self, value: Any) -> str:
        """A value for readers, without the label; empty where there is none to show."""
        if value is None or (not value and not self.zero):
            return ""
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)

    def named(self, label: str) -> str:
        """What it is, in words.

        Args:
            label: What the plan learns from, `token` or `text`.
        """
        return self.label.format(label=label) + (f", {self.unit.format(label=label)}" if self.unit else "")

    def line(self, value: Any, label: str) -> str:
        """A value with what it is, for the line of a round; empty where there is none to show there.

        Args:
            value: The value.
            label: As for `named`.
        """
        shown = self.shown(value) if self.in_line else ""
        return f"{self.label.format(label=label)} {shown}" if shown else ""

    def of_run(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """The run's value from those of its rounds; None where no round has one."""
        values = [row[self.name] for row in rows if row.get(self.name) is not None]
        return _OVER[self.over](values) if values and self.over else None


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as JSON has them, which knows neither infinity nor what is no number: None in their place."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
