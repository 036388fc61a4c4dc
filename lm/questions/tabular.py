"""Histograms and means of a field of the records."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cloister.lm.model.model import LanguageModel
from cloister.lm.questions.question import Held, by_unit, of_records
from cloister.lm.tasks.registry import tokenizer_of
from cloister.lm.text.records import Record
from cloister.protocol.plan.plan import Plan, QuestionSection
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.mean import ends
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.vectors import Vectors

_NUMBER = re.compile(r"[ \t]{0,9}[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?[ \t]{0,9}")


def histogram(plan: Plan, held: Held, models: tuple[LanguageModel, ...] = ()) -> Iterator[Vectors]:
    """1 in the cell of each record's value, else 1 in the cell `other`."""
    question, names = question_of(plan), kind_of(plan).cells(plan)
    place, measured = _by_value(question) if question.values else _by_range(question), _measure(plan)

    def vector(record: Record) -> Vectors:
        found, made = place(measured(record)), np.zeros(len(names))
        made[len(names) - 1 if found is None else found] = 1.0
        return made

    return by_unit(plan, of_records(plan, held, vector, np.eye(len(names))[-1]))


def mean(plan: Plan, held: Held, models: tuple[LanguageModel, ...] = ()) -> Iterator[Vectors]:
    """1, y and y squared of each record with a number, where y is -1 at one end of the range and 1 at the other."""
    measured = _measure(plan)
    middle, half = ends(plan)

    def vector(record: Record) -> Vectors:
        value = _number(measured(record))
        if value is None:
            return np.zeros(3)
        y = min(max((value - middle) / half, -1.0), 1.0)
        return np.array([1.0, y, y * y])

    return by_unit(plan, of_records(plan, held, vector, np.zeros(3)))


def _measure(plan: Plan) -> Callable[[Record], Any]:
    """What of a record is asked about: its field, or how long the text in it is."""
    question = question_of(plan)
    field = question.field
    if question.measure == "value":
        return lambda record: record.get(field)
    length = _tokens(tokenizer_of(plan)) if question.measure == "tokens" else len

    def measured(record: Record) -> int | None:
        text = record.get(field)
        return length(text) if isinstance(text, str) else None

    return measured


def _tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Counts the tokens of a text, without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _number(value: Any) -> float | None:
    """A finite number, or a text that is one, as tables of text have them."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        return None
    return float(value)


def _by_value(question: QuestionSection) -> Callable[[Any], int | None]:
    known = {value: at for at, value in enumerate(question.values)}

    def place(value: Any) -> int | None:
        if isinstance(value, bool):
            value = "true" if value else "false"
        if isinstance(value, int):
            value = str(value) if abs(value) < 10**300 else None
        return known.get(value) if isinstance(value, str) else None

    return place


def _by_range(question: QuestionSection) -> Callable[[Any], int | None]:
    edges: list[Any] = list(question.edges)
    texts = isinstance(edges[0], str)

    def place(value: Any) -> int | None:
        found = (value if isinstance(value, str) else None) if texts else _number(value)
        return None if found is None else bisect_right(edges, found)

    return place
