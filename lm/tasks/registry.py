"""The tasks by their names in a plan (`data.task`)."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
        PackageError: the package is absent, or another one than the plan names; or its name is no task, or that of one
            with more labels for a row than the sums have room for.
    """
    task = _class_of(data)(data)
    if is_own(data.task) and task.labels_each > data.sequence_length:
        raise PackageError(
            "data.task",
            data.task,
            expected=f"a task with at most data.sequence_length = {data.sequence_length} labels for each row, and it "
            f"has {task.labels_each}: weights and totals of labels have room for no more",
            fix="raise data.sequence_length",
        )
    return task


def _class_of(data: DataSection) -> type[Task]:
    if not is_own(data.task):
        return TASKS[data.task]
    assert data.package is not None, "a sound plan names its version and files"
    if (own := _OBJECTS.get((data.task, data.package.sha256))) is not None:
        return own
    if data.task.startswith(OBJECT):
        raise PackageError(
            "data.task",
            data.task,
            expected="a task of a package; a class that a program gave is known to the simulation that it gave it to",
            fix="give it again to go on with the run: run.resume(task=...); for all else make a package of it",
        )
    found = load("data.task", "cloister.tasks", data.task, (data.package.version, data.package.sha256))
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise PackageError("data.task", data.task, expected="a subclass of cloister.lm.tasks.task.Task")
    return found


_OBJECTS: dict[tuple[str, str], type[Task]] = {}
"""Classes that a Python program gave and no package registers, by name and SHA-256, in this process alone."""


class Pin(NamedTuple):
    """What stands in a plan for a class that is no package's."""

    task: str
    sha256: str

    @classmethod
    def of(cls, task: type[Task]) -> Pin:
        """The name and the SHA-256, in hex, of the source of a class. What it inherits and imports is not covered.

        Raises:
            PackageError: its source is not known, as of a class that was typed in at a prompt.
        """
        source = _source_of(task)
        if source is None:
            raise PackageError(
                "task",
                task.__name__,
                expected="a class whose source Python knows",
                fix="write it into a file",
            )
        return cls(f"{OBJECT}{task.__name__}", hashlib.sha256(source.encode()).hexdigest())


def _source_of(task: type) -> str | None:
    """The source of a class; of one in a notebook that of the last cell that has a class of its name."""
    try:
        return inspect.getsource(task)
    except (
        OSError,
        TypeError,
    ):  # Python looks for a class in the file of its module, and a notebook has none
        cells = [
            lines[2] for name, lines in linecache.cache.items() if len(lines) == 4 and not Path(name).exists()
        ]
    for cell in reversed(["".join(lines) for lines in cells]):
        with suppress(SyntaxError):  # a cell may have more than Python
            for node in ast.walk(ast.parse(cell)):
                if isinstance(node, ast.ClassDef) and node.name == task.__name__:
                    return ast.get_source_segment(cell, node)
    return None


OBJECT = "object:"
"""How the name of such a class begins in a plan."""


@contextmanager
def using(task: type[Task], pin: Pin | None = None) -> Iterator[Pin]:
    """A context in which a class is what a plan names by its pin, in this process."""
    pin = pin or Pin.of(task)
    _OBJECTS[pin] = task
    try:
        yield pin
    finally:
        _OBJECTS.pop(pin, None)


def carried(data: DataSection) -> bytes:
    """The class that a plan names by a pin, by value, for `take` in another process; empty of any other task."""
    if not data.task.startswith(OBJECT):
        return b""
    import cloudpickle

    task = _class_of(data)
    module = sys.modules[task.__module__]
    # By value also from a module, which the other process may not find.
    apart = module.__name__ != "__main__" and not module.__name__.startswith("cloister.")
    if apart:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(task))
    finally:
        if apart:
            cloudpickle.unregister_pickle_by_value(module)


def take(data: DataSection, task: bytes) -> None:
    """Let this process know a class that `carried` gave; nothing if it gave none."""
    if task:
        assert data.package is not None, "a sound plan has a pin"
        _OBJECTS[Pin(data.task, data.package.sha256)] = pickle.loads(task)


def tokenizer_of(plan: Plan) -> PreTrainedTokenizerBase:
    """The tokenizer of a plan, for its task.

    Raises:
        ModelError: as `load_tokenizer`.
    """
    task = _class_of(plan.data)
    return load_tokenizer(plan.model, ends=task.ends, masks=task.masks)
