"""The tasks by their names in a plan (`data.task`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.choices import Choices
from cloister.lm.tasks.classify import Classify
from cloister.lm.tasks.masked import Masked
from cloister.lm.tasks.prefer import Prefer
from cloister.lm.tasks.sequence_to_sequence import SequenceToSequence
from cloister.lm.tasks.task import Task
from cloister.lm.tasks.token_classify import TokenClassify
from cloister.lm.text.tokenizer import load_tokenizer
from cloister.protocol.errors import PackageError
from cloister.protocol.machine.packages import load
from cloister.protocol.plan.plan import DataSection, Plan
from cloister.protocol.plan.tasks import is_own

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "choices": Choices,
    "classify": Classify,
    "sequence-to-sequence": SequenceToSequence,
    "prefer": Prefer,
    "token-classify": TokenClassify,
    "masked": Masked,
}


def task_of(data: DataSection) -> Task:
    """The task of a plan. That of a package is imported once its files were compared with the plan.

    Raises:
        PackageError: the package is absent, or another one than the plan names, or its name is no task.
    """
    return _class_of(data)(data)


def _class_of(data: DataSection) -> type[Task]:
    if not is_own(data.task):
        return TASKS[data.task]
    if data.task in _TRIED:
        return _TRIED[data.task]
    assert data.package is not None, "a sound plan names its version and files"
    found = load("data.task", "cloister.tasks", data.task, (data.package.version, data.package.sha256))
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise PackageError("data.task", data.task, expected="a subclass of cloister.lm.tasks.task.Task")
    return found


_TRIED: dict[str, type[Task]] = {}


@contextmanager
def trying(task: type[Task]) -> Iterator[str]:
    """The name by which a plan names a class that no package registers yet, in this process and context alone."""
    name = f"tried:{task.__name__}"
    _TRIED[name] = task
    try:
        yield name
    finally:
        _TRIED.pop(name, None)


def tokenizer_of(plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a plan, for its task.

    Raises:
        ModelError: as `load_tokenizer`.
    """
    task = _class_of(plan.data)
    return load_tokenizer(plan.model, ends=task.ends, masks=task.masks)
