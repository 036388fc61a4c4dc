"""Where a source of records lies, and whether it may have records of another one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloister.protocol.errors import DataError

_DOCS, _LIBRARY, _PASSAGES = "builtin:python-docs", "builtin:python-stdlib", "builtin:python-passages"
_MADE_FROM = {_PASSAGES: {_DOCS, _LIBRARY}, "builtin:python-functions": {_LIBRARY}}
"""The corpora that are made from other ones."""


def overlap(source: str, records: str, field: str) -> bool:
    """Whether a source may have records of another one, as far as names show it.

    A file or folder does if it is the other one, by a link of any kind, is in it, or has it; a hub data set if it has
    the same name, without case and configuration; a builtin source if one is made from the other. A copy under another
    name is not known.

    Args:
        source: As `corpus_records` reads it.
        records: The other one.
        field: The field or option that named `source`.

    Raises:
        DataError: a link leads nowhere.
    """
    if source.startswith("builtin:"):
        one, other = ({name, *_MADE_FROM.get(name, ())} for name in (source, records))
        return not one.isdisjoint(other)
    if not Path(source).expanduser().exists():
        return source.partition(":")[0].lower() == records.partition(":")[0].lower()
    path = Path(records).expanduser()
    theirs = {each.resolve() for each in (path, *(path.iterdir() if path.is_dir() else ()))}
    around = theirs.union(*(each.parents for each in theirs))
    here = list(places(Path(source), field))
    if any(place in around or not theirs.isdisjoint(place.parents) for place in here):
        return True
    linked = _with_other_names(here)
    return bool(linked) and not linked.isdisjoint(_with_other_names([path, *path.rglob("*")]))


def _with_other_names(files: Iterable[Path]) -> set[tuple[int, int]]:
    """The files that have several names (hard links), whatever these are."""
    found = set()
    for path in files:
        with contextlib.suppress(OSError):  # what cannot be read is not read either
            stat = path.stat()
            if stat.st_nlink > 1 and not path.is_dir():
                found.add((stat.st_dev, stat.st_ino))
    return found


def places(file: Path, field: str) -> Iterator[Path]:
    """Where a file or folder is, and each file of the folder: by its name, and each link on the way to it.

    Args:
        file: The file or folder; a name of something else is none.
        field: The field or option that named it.

    Raises:
        DataError: a link leads nowhere.
    """
    path = file.expanduser()
    files = [path]
    if path.is_dir():
        with contextlib.suppress(PermissionError):  # what cannot be listed is not read either
            files += [entry for entry in path.iterdir() if not entry.is_dir()]
    for each in files:
        yield each.absolute()
        try:
            yield from _hops(each)
        except OSError as error:
            raise DataError(field, str(each), expected=f"a file or folder ({error.strerror})") from error


def _hops(path: Path) -> Iterator[Path]:
    """Each link by which a path leads to its file, where it is, and then the file.

    Raises:
        OSError: there are more links than the system follows, as in a loop, or one cannot be read.
    """
    here, left, links = Path("/"), list(reversed(path.absolute().parts)), 0
    while left:
        # A link's target may have links and `..` in it, and `..` is of the folder where the links before it lead.
        part = left.pop()
        entry = here.parent if part == ".." else here / part
        if not entry.is_symlink():
            here = entry
            continue
        yield entry
        links += 1
        if links > 40:  # as Linux
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        left += reversed(entry.readlink().parts)
    yield here
