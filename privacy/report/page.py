"""The report as one page of HTML, for a data officer to read, print and sign.

The page is a pure function of a `RunReport` and says nothing that is not in it. It opens from disk without a network:
it has no script, no font or image from another address, and its plots are inline SVG. It starts with the guarantee in
one sentence, or with the reason why there is none, and says on its first page what that means for a reader who is not
an engineer (`summary.py`). The template is `report.html.jinja`, beside this file.

Refused: a page that computes in the browser (a reader cannot print and sign what a script shows), and a plotting
library (several megabytes for two lines).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN
from functools import cache
from importlib import resources
from typing import Any, ClassVar

import jinja2

from cloister.privacy.report.figures import at_least, at_most, rounded, scientific, visible, with_error
from cloister.privacy.report.intervals import intervals
from cloister.privacy.report.report import RunReport, meaning, verdict
from cloister.privacy.report.summary import against_all, plain, questions, several, shares
from cloister.protocol.questions.estimate import WITHIN

MOST_POINTS = 200
"""Points of a plotted line, the first and the last round among them; `report.json` has every round."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Where, in the plot's units."""
    label: str
    """Its label."""


@dataclass(frozen=True)
class Plot:
    """A line over rounds, in the coordinates of a drawing that is 360 wide and 224 high."""

    width: ClassVar[int] = 360
    height: ClassVar[int] = 224
    left: ClassVar[int] = 40
    right: ClassVar[int] = 308
    top: ClassVar[int] = 22
    bottom: ClassVar[int] = 184

    title: str
    """What is plotted."""
    description: str
    """The plot in a sentence, for a screen reader."""
    axis: str
    """What the vertical axis counts."""
    points: tuple[tuple[float, float], ...]
    """Points of the line."""
    last: str
    """Value at the last point."""
    x_ticks: tuple[Tick, ...]
    """Marks of the rounds."""
    y_ticks: tuple[Tick, ...]
    """Marks of the values."""
    limit: Tick | None
    """A horizontal line."""


def plot(
    title: str,
    axis: str,
    values: Sequence[tuple[int, float]],
    *,
    write: Callable[[float], str],
    from_zero: bool,
    limit: Tick | None = None,
) -> Plot | None:
    """Lay out a line over rounds.

    Args:
        title: What is plotted.
        axis: What the vertical axis counts.
        values: (round, value), in order of round; at most `MOST_POINTS` of them are drawn, evenly spread.
        write: How a value is written, beside the last point and in the description.
        from_zero: Whether the vertical axis starts at 0.
        limit: A horizontal line at this value, and its label.

    Returns:
        The plot; None without values.
    """
    if not values:
        return None
    if len(values) > MOST_POINTS:  # more than a drawing of this width can show
        values = [values[round(at * (len(values) - 1) / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]
    heights = [value for _, value in values] + ([limit.at] if limit else [])
    low, high = (0.0 if from_zero else min(heights)), max(heights)
    step = _step((high - low) or abs(high) or 1.0, 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if high <= low:
        high = low + step
    first, last = values[0][0], values[-1][0]

    def x(round_number: float) -> float:
        if last == first:
            return (Plot.left + Plot.right) / 2
        return round(Plot.left + (Plot.right - Plot.left) * (round_number - first) / (last - first), 2)

    def y(value: float) -> float:
        return round(Plot.bottom - (Plot.bottom - Plot.top) * (value - low) / (high - low), 2)

    every = max(1, math.ceil(_step(last - first, 6))) if last > first else 1
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    # The first round and multiples of the step; a label too near to the first would overlap it.
    rounds = [first, *(n for n in range(first + 1, last + 1) if n % every == 0 and n - first > every / 2)]
    return Plot(
        title=title,
        description=f"{title}: {write(values[0][1])} after round {first}, {write(values[-1][1])} after round {last}"
        + (f"; {limit.label} at {_number(limit.at)}." if limit else "."),
        axis=axis,
        points=tuple((x(number), y(value)) for number, value in values),
        last=write(values[-1][1]),
        x_ticks=tuple(Tick(x(number), str(number)) for number in rounds),
        y_ticks=tuple(
            Tick(y(low + n * step), f"{low + n * step:.{decimals}f}")
            for n in range(round((high - low) / step) + 1)
        ),
        limit=Tick(y(limit.at), limit.label) if limit else None,
    )


def _step(span: float, parts: int) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that covers `span` in `parts` steps."""
    power: float = 10.0 ** math.floor(math.log10(span / parts))
    return next(
        factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power * parts >= span * (1 - 1e-9)
    )


def _number(value: float) -> str:
    return f"{value:.6g}"


def to_html(report: RunReport) -> str:
    """The report as one page that opens without a network, with every value escaped."""
    claim = verdict(report)
    epsilons = [(row.round, row.epsilon) for row in report.rounds if row.epsilon is not None]
    losses = [(row.round, row.loss) for row in report.rounds if row.loss is not None]
    budget = Tick(report.budget, f"budget {_number(report.budget)}") if report.budget else None
    plots = [
        plot(
            "Epsilon over rounds",
            "epsilon, the largest of the sites",
            epsilons if claim.holds and report.answer is None else [],
            write=at_most,
            from_zero=True,
            limit=budget,
        ),
        plot(
            "Held-out loss over rounds",
            f"nats per {report.label}",
            losses,
            write=lambda loss: str(rounded(loss, 3, ROUND_HALF_EVEN)),
            from_zero=False,
        ),
    ]
    claimed = report.epsilon is not None and report.delta is not None
    return _template().render(
        report=report,
        verdict=claim,
        meaning=meaning(report.epsilon or 0.0, report.delta or 0.0) if claim.holds and claimed else None,
        plain=plain(report),
        questions=questions(report),
        several=several(report),
        shares=shares(report) if claim.holds else (),
        against_all=against_all,
        groups=report.groups if claim.holds else (),
        guess=lambda epsilon: meaning(epsilon, report.delta or 0.0).guess,
        plots=[each for each in plots if each],
        drawn=None if report.answer is None else intervals(report.answer),
        within=WITHIN,
    )


@cache
def _template() -> jinja2.Template:
    """The template of the page, in which every value is escaped; it includes `page.css` and the drawings."""

    def source(file: str) -> str:
        return resources.files("cloister.privacy.report").joinpath(file).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(source),
    )
    filters: dict[str, Any] = {
        "at_most": at_most,
        "at_least": at_least,
        "scientific": scientific,
        "number": _number,
        "visible": visible,
        "with_error": with_error,
        "multiplier": lambda value: f"{rounded(value, 4, ROUND_FLOOR).normalize():f}",
    }
    environment.filters.update(filters)
    return environment.get_template("report.html.jinja")
