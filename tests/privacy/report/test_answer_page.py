"""The answer to a question on the report's page: its table, its drawing, and what questions make of one run's cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cloister.privacy.report.intervals import MOST_DRAWN, Intervals, intervals
from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import AnswerRow, CostRow, FigureRow, QuestionsRow, RunReport, to_json
from cloister.privacy.report.summary import plain, shares
from cloister.protocol.errors import CloisterError
from cloister.protocol.questions.estimate import WITHIN
from cloister.tests.privacy.report.test_page import Reader
from cloister.tests.privacy.report.test_report import read, realistic
from cloister.tests.privacy.report.test_summary import text
from cloister.tests.tools.raises import raises

FIGURES = (
    FigureRow("accuracy", 0.75, 0.02, 0.015, 0.8, drawn=True),
    FigureRow("recall of <b>ill</b>", 0.5, 0.1, 0.05, 0.6, drawn=True),
    FigureRow("precision of ill", None, None, None, None, drawn=True),
    FigureRow("units", 4512.25, 30.0, None, 200.0),
)
ALL = CostRow(2.25, 1e-5)


def answered(**changes: Any) -> RunReport:
    report = realistic(answer=AnswerRow(8, FIGURES, more=3), released="answer")
    asked = QuestionsRow(CostRow(1.6795, 1e-5), None, ALL)
    return dataclasses.replace(report, asked=asked, **changes)


def test_the_page_has_each_figure_with_both_errors_and_that_of_the_public_records() -> None:
    page = Reader(to_html(answered()))
    assert "accuracy0.750± 0.039± 0.0290.800" in page.text
    assert "units4,512± 59200" in page.text
    assert "precision of illnot told" in page.text
    assert "recall of <b>ill</b>0.50" in page.text
    assert "3 more figures are in answer.json." in page.text
    assert "Held-out loss over rounds" in page.text
    without = tuple(dataclasses.replace(each, public=None) for each in FIGURES)
    other = Reader(to_html(answered(answer=AnswerRow(8, without))))
    assert "public records" not in other.text
    assert "more figures" not in other.text
    assert read(to_json(answered())) == answered()


def test_the_drawing_has_the_intervals_to_scale() -> None:
    drawn = intervals(AnswerRow(8, FIGURES))
    assert drawn is not None
    (one, other), ends = drawn.rows, (float(drawn.ticks[0][1]), float(drawn.ticks[-1][1]))
    unit = (Intervals.right - Intervals.left) / (ends[1] - ends[0])
    for row, figure in zip(drawn.rows, FIGURES, strict=False):
        value, noise, sampling, public = figure.value, figure.noise, figure.sampling, figure.public
        assert value is not None
        assert noise is not None
        assert sampling is not None
        assert public is not None
        assert row.at == pytest.approx(Intervals.left + (value - ends[0]) * unit, abs=0.01)
        assert row.noise[1] - row.at == pytest.approx(WITHIN * noise * unit, abs=0.02)
        assert row.at - row.both[0] == pytest.approx(WITHIN * math.hypot(noise, sampling) * unit, abs=0.02)
        assert row.public == pytest.approx(Intervals.left + (public - ends[0]) * unit, abs=0.01)
    assert one.y < other.y
    assert all(Intervals.left <= at <= Intervals.right for row in drawn.rows for at in (*row.both, row.at))


@pytest.mark.parametrize("size", [1e-7, 0.003, 1.0, 7.7e8])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_drawing_of_any_scale_has_some_ticks(size: float, sign: float) -> None:
    drawn = intervals(AnswerRow(3, (FigureRow("a", sign * size, size / 10, None, drawn=True),)))
    assert drawn is not None
    assert 2 <= len(drawn.ticks) <= 9
    assert len({label for _, label in drawn.ticks}) == len(drawn.ticks)


def test_what_is_not_told_or_of_another_scale_is_not_drawn() -> None:
    assert intervals(AnswerRow(8, FIGURES[2:])) is None
    many = tuple(FigureRow(f"w{at}", float(at), 1.0, None, drawn=True) for at in range(50))
    drawn = intervals(AnswerRow(8, many))
    assert drawn is not None
    assert len(drawn.rows) == MOST_DRAWN
    zero = intervals(AnswerRow(8, (FigureRow("a", 0.0, 0.0, None, drawn=True),)))
    assert zero is not None


def test_the_report_of_one_question_has_its_cost_against_all_others() -> None:
    report = answered()
    assert "<dt>epsilon, against all others together</dt><dd>2.25</dd>" in to_html(report)
    said = " ".join(shares(report))
    assert "Then the epsilon of this run is 2.25 at delta 1 × 10⁻⁵." in said
    assert "than the plan assumes to collude" in said
    assert "over all runs" not in said
    assert "If the coordinator and all other sites work together against one site, at most" in text(
        plain(report)
    )
    trained = dataclasses.replace(
        realistic(released="models and evaluations"),
        asked=QuestionsRow(CostRow(0.5, 1e-5), CostRow(1.5, 1e-5), ALL),
    )
    assert "The evaluations alone have epsilon 0.50" in " ".join(shares(trained))
    assert "noise of evaluations" in " ".join(shares(trained))
    assert shares(realistic()) == ()


def test_a_figure_against_all_others_below_that_of_the_run_cannot_be_made() -> None:
    with raises(CloisterError, "asked.against_all"):
        answered(epsilon=2.5, groups=(), budget=None)
