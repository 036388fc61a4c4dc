"""The work of a question: the vectors of a site's units, made, summed and noised in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from cloister.aggregation.features.question import UnitCode
from cloister.clients.state.attempt import Mask
from cloister.clients.state.kept import Written, write_pieces
from cloister.clients.training.work import Task, masking
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.questions.question import Held
from cloister.lm.questions.registry import asked_by
from cloister.lm.tasks.task import HeldOut
from cloister.protocol.errors import PolicyError
from cloister.protocol.plan.plan import Plan


@dataclass(frozen=True)
class Asked:
    """A `Work` that answers a question."""

    plan: Plan
    model: LanguageModel
    device: torch.device

    elsewhere: ClassVar = False

    def update(self, task: Task, start: Vector, path: Path) -> Written:
        """As `Work.update`; nothing is trained, and `start` is not used."""
        assert isinstance(task.code, UnitCode), "a question has the code of units"
        held = Held(task.records, task.sequences, self.device)
        units = asked_by(self.plan)(self.plan, held, self.model.about)
        return write_pieces(path, [(0, task.code.answer(units))])

    def masking(self, path: Path, size: int, instructions: bytes, threads: int) -> Mask:
        """As `Work.masking`, in place."""
        return masking(instructions, threads)

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """Refused: what a model does on held-out records leaves a site in the answer alone.

        Raises:
            PolicyError: always.
        """
        raise PolicyError("evaluation at a site", "a question", expected="the question itself")

    def measured(
        self, code: UnitCode, weights: Vector, sequences: Callable[[], Prepared], path: Path
    ) -> Written:
        """Refused, as `held_out`.

        Raises:
            PolicyError: always.
        """
        raise PolicyError("evaluation at a site", "a question", expected="the question itself")

    def close(self) -> None:
        """As `Work.close`: there is none."""
