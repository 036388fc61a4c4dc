"""Evaluations of a model of a causal task, or of another."""

from typing import Any

from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.task import HeldOut, Task
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.evaluate import Evaluator
from cloister.protocol.plan.plan import DataSection

CAUSAL = Causal(DataSection())


def evaluate(module: Any, sequences: Sequences, *how: Any, task: Task = CAUSAL, **more: Any) -> HeldOut:
    return Evaluator(task, module, *how, **more).held_out(sequences)
