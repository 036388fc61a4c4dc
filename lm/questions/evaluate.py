"""How models do on the held-out records of a site: each unit's share of right labels, its loss, or its class.

Each row goes through a model alone and at its full length, and what a pass leaves in the model is put back. So what is
found of a unit does not depend, in its last bit, on the units beside it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward
from cloister.lm.model.writes import Kept
from cloister.lm.questions.question import Held
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.evaluate import to_device
from cloister.protocol.plan.plan import Plan
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


Row = Callable[[Plan, Sequence[Scored]], Vectors]
"""From what each model does on a row to the row's vector."""


def evaluate(plan: Plan, held: Held, models: tuple[LanguageModel, ...]) -> Iterator[Vectors]:
    """The vector of each held-out unit: means over its rows of their labels' shares and losses, by model."""
    return _units(plan, held, models, _evaluated)


def compare(plan: Plan, held: Held, models: tuple[LanguageModel, ...]) -> Iterator[Vectors]:
    """The vector of each held-out unit: what the first model finds and the second does not, and the reverse."""
    return _units(plan, held, models, _compared)


def _units(plan: Plan, held: Held, models: tuple[LanguageModel, ...], of_row: Row) -> Iterator[Vectors]:
    sequences, cells = held.prepared().held_out, kind_of(plan).count(plan)
    scorers = [_Scorer(plan, model, held.device) for model in models]
    assert sequences.starts is not None, "a question has units of records or owners"
    for begin, end in itertools.pairwise(sequences.starts.tolist()):
        vector = np.zeros(cells)
        try:
            rows = [[scorer.row(sequences, row) for scorer in scorers] for row in range(begin, end)]
            labelled = [(len(row[0].wanted), of_row(plan, row)) for row in rows if len(row[0].wanted)]
            labels = sum(count for count, _ in labelled)
            vector = sum((count / labels * each for count, each in labelled), vector)
        except Exception as error:  # models raise any type, and each would reveal that the unit is there
            _log.warning("a model fails on a unit, which counts as 0 and must stay at this site: %s", error)
        finally:
            for scorer in scorers:
                scorer.kept.put_back()
        yield vector[None]


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


def _evaluated(plan: Plan, row: Sequence[Scored]) -> Vectors:
    return np.concatenate([_of_model(plan, scored) for scored in row])


def _of_model(plan: Plan, scored: Scored) -> Vectors:
    figures, made = question_of(plan).figures, np.ones(1)
    if "confusion" in figures:
        classes = len(plan.data.outcomes)
        made = np.eye(classes * classes)[int(scored.wanted[0]) * classes + int(scored.found[0])]
    elif "accuracy" in figures:
        right = float(scored.right.mean())
        made = np.array([right, 1 - right])
    if "loss" in figures:
        most = question_of(plan).most_loss
        made = np.append(made, _cut(scored.loss, most, 0.0) / most)
    return made


def _compared(plan: Plan, row: Sequence[Scored]) -> Vectors:
    one, other = row
    better = float((one.right & ~other.right).mean())
    worse = float((other.right & ~one.right).mean())
    made = np.array([better, worse, 1 - better - worse])
    if "loss" in question_of(plan).figures:
        most = question_of(plan).most_loss
        made = np.append(made, _cut(one.loss - other.loss, most, -most) / most)
    return made


def _cut(value: float, most: float, least: float) -> float:
    """A value between two others; what is no number is the largest."""
    return min(max(value, least), most) if value == value else most
