"""A confusion matrix, and the figures that follow from it.

Counts add up over batches and sites, exactly, and every figure is a function of the sum; means of the sites' figures
would be other numbers. With c[i][j] the records of class i that the model takes for class j,

    accuracy     = sum_i c[i][i] / sum_ij c[i][j]
    precision(i) = c[i][i] / sum_k c[k][i]
    recall(i)    = c[i][i] / sum_k c[i][k]
    F1(i)        = 2 c[i][i] / (sum_k c[k][i] + sum_k c[i][k])

and 0 where a denominator of the last three is 0. Macro figures are the means over all classes, also over those that no
record has. These are the definitions of scikit-learn's `precision_recall_fscore_support` with all classes in `labels`,
`average=None` or `"macro"`, and `zero_division=0`. The choices of a prompt (`data.choices`) are classes here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

CONFUSION = "confusion"
"""The name of the matrix beside the figures of an evaluation: a table, records of class i, the row, taken for j."""

Counts = tuple[tuple[int, ...], ...]
"""Rows of true classes, columns of those that the model gave."""


@dataclass(frozen=True)
class ClassFigures:
    """The figures of one class, or the means over all classes."""

    precision: float
    recall: float
    f1: float
    support: int
    """Records of the class, or of all classes."""


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix of C classes."""

    counts: Counts
    """(C, C): records of class i, the row, that the model takes for class j, the column."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Confusion:
        """The matrix whose rows, one after the other, are `numbers`, of which there are C squared."""
        size = math.isqrt(len(numbers))
        return cls(tuple(tuple(numbers[row * size : (row + 1) * size]) for row in range(size)))

    @staticmethod
    def names(what: str, size: int) -> tuple[str, ...]:
        """The names of the counters of a matrix, its rows one after the other.

        Args:
            what: What is counted, `class` or `choice`.
            size: Number of classes.
        """
        return tuple(f"{what} {true} taken for {given}" for true in range(size) for given in range(size))

    @classmethod
    def counted(cls, counts: Mapping[str, int], what: str, size: int) -> Confusion:
        """The matrix by the names of its counters; arguments as for `names`."""
        return cls.of([counts.get(name, 0) for name in cls.names(what, size)])

    @property
    def records(self) -> int:
        """Records that were counted."""
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """Fraction of the records that the model takes for their own class; NaN without records."""
        right = sum(row[index] for index, row in enumerate(self.counts))
        return right / self.records if self.records else math.nan

    def by_class(self) -> list[ClassFigures]:
        """The figures of each class, in their order."""
        found = []
        for index, row in enumerate(self.counts):
            right, given, true = row[index], sum(each[index] for each in self.counts), sum(row)
            found.append(
                ClassFigures(share(right, given), share(right, true), share(2 * right, given + true), true)
            )
        return found

    def macro(self) -> ClassFigures:
        """The means over the classes."""
        each = self.by_class()
        return ClassFigures(
            fmean(one.precision for one in each),
            fmean(one.recall for one in each),
            fmean(one.f1 for one in each),
            self.records,
        )

    def figures(self) -> dict[str, Any]:
        """The macro figures, and the matrix, by their names in `figures.py`; none without records."""
        if not self.records:
            return {}
        macro = self.macro()
        named = {"macro_precision": macro.precision, "macro_recall": macro.recall, "macro_f1": macro.f1}
        return named | {CONFUSION: self.counts}

    def to_json(self, classes: Sequence[str]) -> dict[str, Any]:
        """The matrix and its figures for a program.

        Args:
            classes: The names of the classes.
        """
        macro = self.macro()
        return {
            "classes": list(classes),
            "confusion": [list(row) for row in self.counts],
            "records": self.records,
            "accuracy": self.accuracy if self.records else None,
            "macro": {"precision": macro.precision, "recall": macro.recall, "f1": macro.f1},
            "by_class": [
                {"class": name, **asdict(each)} for name, each in zip(classes, self.by_class(), strict=True)
            ],
        }


def share(part: int, whole: int) -> float:
    """A fraction of a whole; 0 of nothing."""
    return part / whole if whole else 0.0
