"""Errors compared by their class and by the field that they name, so that a sentence can be made better in one place.

The sentences themselves are in `tests/pages/sentences.txt`, which `sentences.py` there writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from cloister.protocol.errors import CloisterError

Raised = TypeVar("Raised", bound=BaseException)
VERB = re.compile(r" (?:is|are|has|was|cannot) |: ")


def named(error: BaseException) -> str:
    """What an error is about: its field, or the text before the verb or colon where it is no `CloisterError`."""
    return error.field if isinstance(error, CloisterError) else VERB.split(str(error), maxsplit=1)[0]


def is_named(found: str, field: str | Path) -> bool:
    """Whether an error that names `found` names `field`; of a path its last parts are enough."""
    return found == str(field) or (found.startswith("/") and found.endswith(f"/{field}"))


@contextmanager
def raises(
    kind: type[Raised], *fields: str | Path, says: str | tuple[str, ...] = ()
) -> Iterator[pytest.ExceptionInfo[Raised]]:
    """A block that raises an error of exactly this class, not of a subclass.

    Args:
        kind: The class.
        fields: What the error may name, one of them; all cases of a test, where it has several.
        says: Words of the sentence, where several errors have this class and field and the test is about one of them,
            or a value that the test knows.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}, not {kind.__name__}: {error}"
    found = named(error)
    assert any(is_named(found, field) for field in fields), f"{found!r} is none of {fields}: {error}"
    for words in (says,) if isinstance(says, str) else says:
        assert words in str(error), f"{words!r} is not in: {error}"
