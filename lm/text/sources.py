"""Where a source of records lies, and whether it may have records of another one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cloister.protocol.errors import DataError, one_line


def overlap(source: str, records: str, field: str) -> bool:
    """Whether a source may have records of another one, as far as names show it.

    A file or folder does if it is the other one, is in it, or has it; a hub data set if it has the same name, without
    case and configuration. A copy under another name is not known.

    Args:
        source: As `corpus_records` reads it.
        records: The other one.
        field: The field or option that named `source`.

    Raises:
        DataError: a link leads nowhere.
    """
    if source.startswith("builtin:"):
        return source == records
    if not Path(source).expanduser().exists():
        return source.partition(":")[0].lower() == records.partition(":")[0].lower()
    if not Path(records).expanduser().exists():
        return False
    theirs = _places(records, field)
    around = theirs.union(*(each.parents for each in theirs))
    return any(place in around or not theirs.isdisjoint(place.parents) for place in _places(source, field))


def _places(source: str, field: str) -> set[Path]:
    """Where a file or folder is, and each file of the folder, behind all links.

    Raises:
        DataError: a link leads nowhere.
    """
    path = Path(source).expanduser()
    entries = [path]
    if path.is_dir():
        with contextlib.suppress(PermissionError):  # what cannot be listed is not read either
            entries += path.iterdir()
    try:
        return {each.resolve(strict=True) for each in entries}
    except (OSError, RuntimeError) as error:
        raise DataError(field, str(path), expected=f"a file or folder ({one_line(error)})") from error
