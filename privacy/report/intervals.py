"""The figures of an answer on one axis, each a point with the interval of the noise, for a page without a script."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cloister.privacy.report.figures import visible, with_error
from cloister.privacy.report.report import AnswerRow, FigureRow
from cloister.protocol.questions.estimate import WITHIN

MOST_DRAWN = 30
"""Rows of a drawing; the table beside it has more."""
_NAME = 20
"""Characters of a name that fit beside the axis."""


@dataclass(frozen=True)
class Interval:
    """One figure, in the coordinates of the drawing."""

    name: str
    """Its name, cut where it is too long."""
    whole: str
    """Its name and value with the noise, in words."""
    y: float
    """Height of its line."""
    at: float
    """Its value."""
    noise: tuple[float, float]
    """Ends of the interval that the noise gives with a probability of 0.95."""
    both: tuple[float, float]
    """Ends of that of noise and sampling together."""
    public: float | None
    """The figure of the public records; None without them."""


@dataclass(frozen=True)
class Intervals:
    """The drawing, which is 640 wide."""

    width: ClassVar[int] = 640
    left: ClassVar[int] = 150
    right: ClassVar[int] = 620
    row: ClassVar[int] = 22

    rows: tuple[Interval, ...]
    """The figures."""
    ticks: tuple[tuple[float, str], ...]
    """Places on the axis, each with its label."""
    height: int
    """Height of the drawing; the axis is 20 above its lower end."""


def intervals(answer: AnswerRow) -> Intervals | None:
    """Lay out the figures that are told and of one scale; None if there are none."""
    drawn = [each for each in answer.figures if each.drawn and each.value is not None][:MOST_DRAWN]
    if not drawn:
        return None
    ends = [end for each in drawn for end in (*_ends(each, each.noise), *_ends(each, _both(each)))]
    ends += [each.public for each in drawn if each.public is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)
    high = high if high > low else low + 1.0
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 6 >= high - low)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step

    def x(value: float) -> float:
        span = Intervals.right - Intervals.left
        return round(Intervals.left + span * (value - low) / (high - low), 2)

    def pair(figure: FigureRow, deviation: float | None) -> tuple[float, float]:
        first, last = _ends(figure, deviation)
        return x(first), x(last)

    rows = tuple(
        Interval(
            name=_cut(visible(each.name)),
            whole=f"{visible(each.name)}: {with_error(each.value or 0.0, each.noise or math.nan)} "
            f"± {with_error(WITHIN * (each.noise or 0.0))} by the noise",
            y=Intervals.row * (at + 0.5),
            at=x(each.value or 0.0),
            noise=pair(each, each.noise),
            both=pair(each, _both(each)),
            public=None if each.public is None else x(each.public),
        )
        for at, each in enumerate(drawn)
    )
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = tuple(
        (x(low + n * step), f"{low + n * step:,.{decimals}f}") for n in range(round((high - low) / step) + 1)
    )
    return Intervals(rows, ticks, Intervals.row * len(rows) + 24)


def _ends(figure: FigureRow, deviation: float | None) -> tuple[float, float]:
    """An interval on both sides of a figure."""
    value, wide = figure.value or 0.0, WITHIN * (deviation or 0.0)
    return value - wide, value + wide


def _both(figure: FigureRow) -> float:
    return math.hypot(figure.noise or 0.0, figure.sampling or 0.0)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
