"""Held-out evaluation of the global model: at the coordinator if it has records for that, else at the sites.

The sites' totals of loss, correct labels and labels, and the counters of the plan's task, are summed in the same ring
as updates; the coordinator learns the totals over all sites that answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features.in_clear import LOSS, LOSS_SCALE, TOKENS
from cloister.aggregation.sums import CORRECT
from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import LanguageModel, device_for
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.corpus import corpus_records
from cloister.lm.training.evaluate import held_out
from cloister.protocol.errors import DataError
from cloister.protocol.messages.messages import EVALUATE
from cloister.protocol.plan.plan import Plan
from cloister.server.record.progress import NotEvaluated
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sum_over
from cloister.server.sum.wanted import Failed, Wanted

_log = logging.getLogger(__name__)

Evaluation = Callable[[int, npt.NDArray[np.float32]], HeldOut | None]
"""From a round and its model to the sums on held-out records; None without an evaluation."""


class Evaluations:
    """The last two evaluations, so that the model after a round is evaluated once.

    Args:
        evaluate: Evaluates the model after a round.
    """

    def __init__(self, evaluate: Evaluation) -> None:
        self._evaluate = evaluate
        self._known: dict[int, HeldOut | None] = {}

    def of(self, number: int, weights: npt.NDArray[np.float32]) -> HeldOut | None:
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
    """Evaluation by a cohort, each site on its own held-out records, weighted by their labels."""

    def evaluated(round_number: int, weights: npt.NDArray[np.float32]) -> HeldOut | None:
        wanted = Wanted(EVALUATE, round_number, weights)
        total = sum_over(party, wanted)
        if isinstance(total, Failed):
            party.observe(NotEvaluated(round_number, total.attempts, total.spoiled))
            return None
        sums = total.opened.counters
        if sums[CORRECT] > sums[TOKENS]:
            wrong = f"{sums[CORRECT]} correct of {sums[TOKENS]} labels"
            party.observe(NotEvaluated(round_number, total.attempts, wrong))
            return None
        counts = {name: sums[name] for name in task_of(party.plan.data).counters()}
        return HeldOut(sums[LOSS] / LOSS_SCALE, sums[CORRECT], sums[TOKENS], counts)

    return evaluated


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
    device = device_for("auto")

    def evaluated(round_number: int, weights: npt.NDArray[np.float32]) -> HeldOut:
        model.layout.scatter(weights, model.module.to(device))
        return held_out(plan, model, device, prepared)

    return evaluated
