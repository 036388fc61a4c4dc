"""Checks for the tests of those who write a task of their own (docs/extend.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes seconds to import
    from cloister.lm.tasks.task import Task


def check_per_unit_gradients(
    task: type[Task], records: Sequence[Mapping[str, Any]], *, model: str = "builtin:llama", **data: Any
) -> None:
    """Check that a task gives each record its own rows, loss and gradient, as record-level privacy needs.

    - A record that is added or removed changes no other record's rows.
    - The loss of a row is the same alone and beside other rows.
    - The gradient that DP-SGD clips is that of the record's mean loss, by a single backward pass, and does not depend
      on the records that are trained with it.
    - The counters of an evaluation are the same of rows one by one and together, and `figures` takes them.

    Args:
        task: The class.
        records: Three records or more that it can use, of different contents and lengths.
        model: A `builtin:` model of the task's class.
        **data: Fields of `[data]`, such as `sequence_length=32` or `options={"codes": "I10,E11"}`.

    Raises:
        AssertionError: one of these does not hold; the message says which.
    """
    from cloister.clients.training.per_unit import check

    check(task, records, model, data)
