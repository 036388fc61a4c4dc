"""How models do on the held-out records of a site: each unit's share of right labels, its loss, or its class.

Each row goes through a model alone and at its full length, and what a pass leaves in the model is put back. So what is
found of a unit does not depend, in its last bit, on the units beside it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cloister.lm.measures.entities import count
from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward
from cloister.lm.model.writes import Kept
from cloister.lm.questions.question import Held
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.evaluate import to_device
from cloister.protocol.plan.plan import Plan, QuestionSection
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.vectors import Vectors

_log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What a model does on one row of L labels."""

    wanted: npt.NDArray[np.int64]
    """(L,)."""
    found: npt.NDArray[np.int64]
    """(L,)."""
    loss: float
    """Mean over the labels, in nats."""

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """(L,): which labels are found."""
        return np.equal(self.found, self.wanted)


Unit = Callable[[Plan, Sequence[Sequence[Scored]]], Vectors]
"""From what each model does on each row of a unit to the unit's vector; each row has a label."""


def evaluate(plan: Plan, held: Held, models: tuple[LanguageModel, ...]) -> Iterator[Vectors]:
    """The vector of each held-out unit: means over its rows of their labels' shares and losses, by model."""
    return _units(plan, held, models, _evaluated)


def compare(plan: Plan, held: Held, models: tuple[LanguageModel, ...]) -> Iterator[Vectors]:
    """The vector of each held-out unit: what the first model finds and the second does not, and the reverse."""
    return _units(plan, held, models, _compared)


def _units(plan: Plan, held: Held, models: tuple[LanguageModel, ...], of_unit: Unit) -> Iterator[Vectors]:
    sequences, cells = held.prepared().held_out, kind_of(plan).count(plan)
    scorers = [_Scorer(plan, model, held.device) for model in models]
    ends = (
        [0, len(sequences)] if sequences.starts is None else sequences.starts.tolist()
    )  # none with unit site
    for begin, end in itertools.pairwise(ends):
        rows, vector = [_row(scorers, sequences, row) for row in range(begin, end)], np.zeros(cells)
        if labelled := [row for row in rows if row and len(row[0].wanted)]:
            try:
                vector = of_unit(plan, labelled)
            except Exception as error:  # of what a model gave, and each would reveal that the unit is there
                _log.warning(
                    "a unit has no figures, and counts as 0, which must stay at this site: %s", error
                )
        yield vector[None]


def _row(scorers: Sequence[_Scorer], sequences: Sequences, row: int) -> list[Scored]:
    """What each model does on a row; none if one fails."""
    try:
        return [scorer.row(sequences, row) for scorer in scorers]
    except Exception as error:  # models raise any type, and each would reveal that the unit is there
        _log.warning("a model fails on a row, which does not count and must stay at this site: %s", error)
        return []
    finally:
        for scorer in scorers:
            scorer.kept.put_back()


class _Scorer:
    """Puts rows through one model."""

    def __init__(self, plan: Plan, model: LanguageModel, device: torch.device) -> None:
        self._task, self._device = task_of(plan.data), device
        module = model.module.to(device).eval()
        self._forward = Forward(self._task, module, device, plan.local.precision)
        self.kept = Kept(module, {*model.written, *(name for name, _ in module.named_buffers())})
        """What passes leave in the model."""

    def row(self, sequences: Sequences, row: int) -> Scored:
        """What the model does on one row."""
        rows = slice(row, row + 1)
        targets = self._task.targets(sequences.labels[rows])
        if not (targets != NOT_LEARNED).any():
            return Scored(np.empty(0, np.int64), np.empty(0, np.int64), 0.0)
        tokens, learned = to_device(sequences.tokens[rows], self._device), to_device(targets, self._device)
        with torch.no_grad(), seeded("evaluate", device=self._device):
            logits, wanted = self._forward(tokens, learned)
            losses = self._task.row_losses(logits, wanted).double().sum()
        seen = wanted != NOT_LEARNED
        labels, found = wanted[seen].cpu().numpy(), logits.argmax(-1)[seen].cpu().numpy()
        return Scored(labels, found, float(losses) / len(labels))


def _evaluated(plan: Plan, rows: Sequence[Sequence[Scored]]) -> Vectors:
    of_model = _entities if "entities" in question_of(plan).figures else _figures
    return np.concatenate([of_model(plan, each) for each in zip(*rows, strict=True)])


def _figures(plan: Plan, rows: Sequence[Scored]) -> Vectors:
    """What one model does, as the mean over the labels of all rows."""
    question, outcomes = question_of(plan), len(plan.data.outcomes)

    def of_row(scored: Scored) -> Vectors:
        made = np.ones(1)
        if "confusion" in question.figures:
            made = np.eye(outcomes * outcomes)[int(scored.wanted[0]) * outcomes + int(scored.found[0])]
        elif "accuracy" in question.figures:
            right = float(scored.right.mean())
            made = np.array([right, 1 - right])
        return _with(made, scored.loss, 0.0, question)

    return _mean([len(scored.wanted) for scored in rows], map(of_row, rows))


def _entities(plan: Plan, rows: Sequence[Scored]) -> Vectors:
    """The entities that one model has right, gives, and should give, in all rows; of more than count all are scaled
    down, so that the unit keeps its precision and recall."""
    types, most = len(plan.data.classes), question_of(plan).most_entities
    tags = [(torch.from_numpy(scored.found)[None], torch.from_numpy(scored.wanted)[None]) for scored in rows]
    counts = sum(
        (count(found, wanted, types).double() for found, wanted in tags), torch.zeros(3 * types).double()
    )
    right, given, true = counts.reshape(types, 3).sum(0).tolist()
    counted = min(1.0, most / max(given, true, 1.0))
    beyond = min((1 - counted) * true / most, 1.0)
    return np.array([*(counted * each / most for each in (right, given, true)), beyond])


def _compared(plan: Plan, rows: Sequence[Sequence[Scored]]) -> Vectors:
    question = question_of(plan)

    def of_row(one: Scored, other: Scored) -> Vectors:
        better = float((one.right & ~other.right).mean())
        worse = float((other.right & ~one.right).mean())
        made = np.array([better, worse, 1 - better - worse])
        return _with(made, one.loss - other.loss, -question.most_loss, question)

    return _mean([len(one.wanted) for one, _ in rows], (of_row(*row) for row in rows))


def _mean(labels: Sequence[int], vectors: Iterable[Vectors]) -> Vectors:
    """The mean of the vectors of rows, each with as much weight as it has labels."""
    total = sum(labels)
    weighted = (weight / total * each for weight, each in zip(labels, vectors, strict=True))
    return functools.reduce(np.add, weighted)


def _with(vector: Vectors, loss: float, least: float, question: QuestionSection) -> Vectors:
    """A vector with a loss, if it is asked for."""
    most = question.most_loss
    return np.append(vector, _cut(loss, most, least) / most) if "loss" in question.figures else vector


def _cut(value: float, most: float, least: float) -> float:
    """A value between two others; what is no number is the largest."""
    return min(max(value, least), most) if value == value else most
