"""How a model does on the held-out records of a site: each unit's share of right labels, its loss, or its class.

Each row goes through the model alone and at its full length, and what a pass leaves in the model is put back. So what
is found of a unit does not depend, in its last bit, on the units beside it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import numpy as np
import torch

from cloister.lm.model.model import LanguageModel, seeded
from cloister.lm.model.passes import Forward
from cloister.lm.model.writes import Kept
from cloister.lm.questions.question import Held, Vectors
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.evaluate import to_device
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.questions import cells, question_of

_log = logging.getLogger(__name__)


def evaluate(plan: Plan, held: Held, model: LanguageModel | None) -> Iterator[Vectors]:
    """The vector of each held-out unit: means over its rows, of their labels' shares and losses."""
    assert model is not None, "an evaluation is of a model"
    sequences = held.prepared().held_out
    scorer = _Scorer(plan, model, held.device)
    assert sequences.starts is not None, "a question has units of records or owners"
    for begin, end in itertools.pairwise(sequences.starts.tolist()):
        yield scorer.unit(sequences, range(begin, end))[None]


class _Scorer:
    """Scores the units of one site."""

    def __init__(self, plan: Plan, model: LanguageModel, device: torch.device) -> None:
        self._plan, self._question, self._task = plan, question_of(plan), task_of(plan.data)
        self._width = len(cells(plan))
        self._module, self._device = model.module.to(device).eval(), device
        self._forward = Forward(self._task, self._module, device, plan.local.precision)
        self._kept = Kept(self._module, {*model.written, *(name for name, _ in self._module.named_buffers())})

    def unit(self, sequences: Sequences, rows: range) -> Vectors:
        """The vector of one unit; zeros if the model fails on it."""
        try:
            with torch.no_grad(), seeded("evaluate", device=self._device):
                found = [self._row(sequences, row) for row in rows]
            scored = [(labels, vector) for labels, vector in found if labels]
            labels = sum(labels for labels, _ in scored)
            return sum((count / labels * vector for count, vector in scored), np.zeros(self._width))
        except Exception as error:  # models raise any type, and each would reveal that the unit is there
            _log.warning("the model fails on a unit, which counts as 0 and must stay at this site: %s", error)
            return np.zeros(self._width)
        finally:
            self._kept.put_back()

    def _row(self, sequences: Sequences, row: int) -> tuple[int, Vectors]:
        """The labels of one row, and its vector."""
        rows, question = slice(row, row + 1), self._question
        targets = self._task.targets(sequences.labels[rows])
        tokens, learned = to_device(sequences.tokens[rows], self._device), to_device(targets, self._device)
        logits, wanted = self._forward(tokens, learned)
        found, labels, vector = logits.argmax(-1), int((targets != NOT_LEARNED).sum()), np.zeros(self._width)
        if not labels:
            return 0, vector
        if "confusion" in question.figures:
            vector[int(wanted[0, 0]) * len(self._plan.data.outcomes) + int(found[0, 0])] = 1.0
        elif "accuracy" in question.figures:
            right = int((found == wanted).sum()) / labels
            vector[:2] = right, 1 - right
        else:
            vector[0] = 1.0
        if "loss" in question.figures:
            loss = float(self._task.row_losses(logits, wanted).double().sum()) / labels
            vector[-1] = min(max(loss, 0.0), question.most_loss) / question.most_loss if loss == loss else 1.0
        return labels, vector
