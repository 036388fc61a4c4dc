"""The tasks by their names in a plan (`data.task`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.choices import Choices
from cloister.lm.tasks.classify import Classify
from cloister.lm.tasks.prefer import Prefer
from cloister.lm.tasks.sequence_to_sequence import SequenceToSequence
from cloister.lm.tasks.task import Task
from cloister.lm.text.tokenizer import load_tokenizer
from cloister.protocol.plan.plan import DataSection, Plan

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "choices": Choices,
    "classify": Classify,
    "sequence-to-sequence": SequenceToSequence,
    "prefer": Prefer,
}


def task_of(data: DataSection) -> Task:
    """The task of a plan."""
    return TASKS[data.task](data)


def tokenizer_of(plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a plan, for its task.

    Raises:
        ModelError: as `load_tokenizer`.
    """
    return load_tokenizer(plan.model, ends=TASKS[plan.data.task].ends)
