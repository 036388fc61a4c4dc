"""The tasks by their names in a plan (`data.task`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.choices import Choices
from cloister.lm.tasks.classify import Classify
from cloister.lm.tasks.masked import Masked
from cloister.lm.tasks.task import Task
from cloister.lm.tasks.token_classify import TokenClassify
from cloister.lm.text.tokenizer import load_tokenizer
from cloister.protocol.plan.plan import DataSection, Plan

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "choices": Choices,
    "classify": Classify,
    "token-classify": TokenClassify,
    "masked": Masked,
}


def task_of(data: DataSection) -> Task:
    """The task of a plan."""
    return TASKS[data.task](data)


def tokenizer_of(plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a plan, for its task.

    Raises:
        ModelError: as `load_tokenizer`.
    """
    task = TASKS[plan.data.task]
    return load_tokenizer(plan.model, ends=task.ends, masks=task.masks)
