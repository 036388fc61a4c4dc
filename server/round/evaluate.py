"""Held-out evaluation of the global model: at the coordinator if it has records for that, else at the sites.

The sites' totals of loss, correct labels and labels, and the counters of the plan's task, are summed in the same ring
as updates; the coordinator learns the totals over all sites that answered. Under a privacy unit it learns a noised sum
instead, of one bounded vector for each held-out unit: the figures are those of a question of kind `evaluate`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.aggregation import evaluation
from cloister.aggregation.evaluation import CORRECT
from cloister.aggregation.features.in_clear import LOSS, LOSS_SCALE, TOKENS
from cloister.lm.data.prepare import prepare
from cloister.lm.measures.figures import UNITS, noise_of
from cloister.lm.model.model import LanguageModel, device_for
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.corpus import corpus_records
from cloister.lm.training.evaluate import held_out
from cloister.privacy.mechanism.unit_sum import UnitSum
from cloister.protocol.errors import DataError
from cloister.protocol.messages.messages import EVALUATE
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.within import question_within
from cloister.server.record.progress import NotEvaluated
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sum_over
from cloister.server.sum.wanted import Failed, Total, Wanted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What an evaluation has found of a model."""

    figures: Mapping[str, Any]
    """By name (`lm/measures/figures.py`), and what else the task tells."""
    held_out: HeldOut | None = None
    """The sums that they follow from; None: a noised sum, which has the figures alone."""

    @property
    def told(self) -> Mapping[str, Any]:
        """The figures without those that the noise hides."""
        if self.held_out is not None:
            return self.figures
        return {name: value for name, value in self.figures.items() if math.isfinite(value)}


Evaluation = Callable[[int, npt.NDArray[np.float32]], Measured | None]
"""From a round and its model to what is found of it; None without an evaluation."""


class Evaluations:
    """The last two evaluations, so that the model after a round is evaluated once.

    Args:
        evaluate: Evaluates the model after a round.
    """

    def __init__(self, evaluate: Evaluation) -> None:
        self._evaluate = evaluate
        self._known: dict[int, Measured | None] = {}

    def of(self, number: int, weights: npt.NDArray[np.float32]) -> Measured | None:
        """The evaluation of the model after a round.

        Args:
            number: The round; 0: the initial model.
            weights: (d,) float32, the model after it.
        """
        if number not in self._known:
            self._known = {known: found for known, found in self._known.items() if known == number - 1}
            self._known[number] = self._evaluate(number, weights)
        return self._known[number]

    def repeat(self, number: int) -> None:
        """Take the model after a round for that of the round before: its step was undone."""
        self._known[number] = self._known[number - 1]


def at_sites(party: Party) -> Evaluation:
    """Evaluation by a cohort, each site on its own held-out records: all labels count alike, or under a privacy unit
    all units."""
    asked = evaluation.charged(party.sums)

    def evaluated(round_number: int, weights: npt.NDArray[np.float32]) -> Measured | None:
        total = sum_over(party, Wanted(EVALUATE, round_number, weights))
        if isinstance(total, Failed):
            party.observe(NotEvaluated(round_number, total.attempts, total.spoiled))
            return None
        if asked is not None:
            return _noised(party.plan, total, asked)
        sums = total.opened.counters
        if sums[CORRECT] > sums[TOKENS]:
            wrong = f"{sums[CORRECT]} correct of {sums[TOKENS]} labels"
            party.observe(NotEvaluated(round_number, total.attempts, wrong))
            return None
        task = task_of(party.plan.data)
        counts = {name: sums[name] for name in task.counters()}
        found = HeldOut(sums[LOSS] / LOSS_SCALE, sums[CORRECT], sums[TOKENS], counts)
        return Measured(task.figures(found), found)

    return evaluated


def _noised(plan: Plan, total: Total, asked: UnitSum) -> Measured:
    """The figures of a noised sum, each with the standard deviation of its noise; NaN for one that the noise hides."""
    within, deviation = question_within(plan), asked.deviation(total.sites)
    cells = evaluation.totals(total.opened, total.sites)
    figures: dict[str, float] = {}
    for each in kind_of(within).figures(within, cells, deviation):
        name = {"units": UNITS}.get(each.name, each.name)
        figures[name] = math.nan if each.value is None else each.value
        figures[noise_of(name)] = each.noise
    return Measured(figures)


def nowhere(_round: int, _weights: npt.NDArray[np.float32]) -> None:
    """No evaluation."""


def at_coordinator(plan: Plan, model: LanguageModel, source: str) -> Evaluation:
    """Evaluation on public records, or on the subset of `server.evaluation_sequences`.

    Args:
        plan: The plan.
        model: Its model, whose parameters are overwritten.
        source: Where the records are: a file, a folder, a hub name or a `builtin:` source.

    Raises:
        DataError: there are no records, one cannot be used, or no choices can be compared.
    """
    records = corpus_records(source, field="server.evaluation").records
    prepared = prepare(records, model.tokenizer, plan.data, seed=plan.run.seed, evaluated=True)
    if prepared.left_out:
        _log.warning("public records: %s", prepared.summary())
    if prepared.asked is not None and not len(prepared.asked):
        raise DataError(
            "server.evaluation",
            source,
            expected="a prompt that fits into data.sequence_length with each of data.choices",
            fix="raise data.sequence_length",
        )
    device, task = device_for("auto"), task_of(plan.data)

    def evaluated(round_number: int, weights: npt.NDArray[np.float32]) -> Measured:
        model.layout.scatter(weights, model.module.to(device))
        found = held_out(plan, model, device, prepared)
        return Measured(task.figures(found), found)

    return evaluated
