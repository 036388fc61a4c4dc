"""Read the records of a data holder: text, JSONL, CSV, Parquet and Arrow files, folders of them, and hub data sets.

A site reads its own records one by one (`read_each`), because one record must not decide how others are read, or
whether they are. `Unusable` leaves out what cannot be read, and counts it.

Records that one person owns and divides over sites are a collection (`read_records`): they are read in the same way,
and one that cannot be read is an error, which names its file and line. Refused: files by `datasets`, which infers one
type for a field of all records of JSON, so that one record changes what others read as, and leaves copies of private
files in its cache. It reads hub data sets; this module adds that an absent network fails fast.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cloister.lm.text import tables
from cloister.lm.text.tokenizer import looks_like_path, on_hub
from cloister.protocol.errors import DataError, one_line

_KINDS = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_HASHED_BYTES = 64 << 20
LARGEST_RECORD = 64 << 20
"""Bytes of a line or text file that `read_each` reads: a larger one would exhaust the memory, which others see."""
_NOT_READABLE = "not readable"
_T = TypeVar("_T")
_R = TypeVar("_R")

Record = Mapping[str, Any]


Records = Sequence[Record]


class Unusable:
    """The records that cannot be used: they are left out and counted.

    One such record costs a site nothing else, and under a privacy unit an error would tell, without a charge, that the
    record is there.

    Args:
        open_: Whether an error may tell of a record. Then one on which a chat template runs out of stack or memory is
            an error: a site that has less of them than others would train on other records than they.
        keeps: Whether `first` is kept, which may hold a whole record in memory while others are read.
    """

    def __init__(self, *, open_: bool = False, keeps: bool = True) -> None:
        self._open, self._keeps = open_, keeps
        self.left_out: Counter[str] = Counter()
        """Number of records that were left out, by the reason. A reason says nothing of a record's content."""
        self.place = ""
        """File and line of the record that is read; empty where its reader does not know them."""
        self.places: dict[str, str] = {}
        """Place and field of the first one, by the reason; empty where the reader does not know it."""
        self._first: tuple[str, str, BaseException] | None = None

    @property
    def first(self) -> DataError | None:
        """Why the first one was left out. It may quote the record: it is for the owner of all records."""
        if self._first is None:
            return None
        place, reason, error = self._first
        said = f"a record that can be used ({reason}: {one_line(error)})"
        return error if isinstance(error, DataError) else DataError(place or "data", expected=said)

    def leave_out(self, reason: str, field: str = "") -> None:
        """Count the record that is read as left out.

        Args:
            reason: Why.
            field: The field that is the reason; empty: none alone.
        """
        self.left_out[reason] += 1
        self.places.setdefault(reason, ", field ".join(filter(None, (self.place, field))))

    def tried(self, reason: str, act: Callable[..., _T], *arguments: Any) -> _T | None:
        """The result of `act(*arguments)` for one record; None if it raises."""
        try:
            return act(*arguments)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # of a template or a task anything; a panic in a tokenizer is no `Exception`
            if self._open and isinstance(error.__cause__, RecursionError | MemoryError):
                raise
            self.leave_out(reason, _field_of(error))
            if self._keeps:
                self._first = self._first or (self.place, reason, error.with_traceback(None))
            return None

    def tried_together(
        self, reason: str, act: Callable[[Sequence[_R]], list[_T]], items: Sequence[_R], places: Sequence[str]
    ) -> list[_T | None]:
        """The results of `act` for several records at once; if that raises, for each alone.

        Args:
            reason: Why a record is left out for which `act` raises.
            act: Gives one result for each item, which does not depend on the other items.
            items: What `act` takes, one for each record.
            places: The place of each record.
        """
        together = Unusable().tried(reason, act, items)
        if together is not None:
            return [*together]
        alone = [self.tried(reason, act, [item]) for item, self.place in zip(items, places, strict=True)]
        return [None if each is None else each[0] for each in alone]


def _field_of(error: BaseException) -> str:
    """The record's field that an error of `examples.py` names; empty: none."""
    return error.field.partition(", field ")[2] if isinstance(error, DataError) else ""


def owner_of(record: Record, field: str) -> bytes:
    """Who a record belongs to, in UTF-8: the field's text, or its whole number as text.

    Raises:
        DataError: the record has neither.
        ValueError: the text cannot be encoded.
    """
    value = record.get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    if not (isinstance(value, str) and value):
        raise DataError(f"field {field}", value, expected="text or a whole number")
    return value.encode()


class _AllUsable(Unusable):
    """For a person who owns all records: one that cannot be read is an error."""

    def tried(self, reason: str, act: Callable[..., _T], *arguments: Any) -> _T | None:
        """The result of `act(*arguments)`."""
        return act(*arguments)


def read_records(source: str, *, split: str = "train") -> Records:
    """Read the records of a file, a folder of files, or a hub data set, all of which one person owns.

    Args:
        source: A `.txt` file (one record `{"text": ...}`), a `.jsonl`, `.json`, `.csv`, `.parquet` or `.arrow` file, a
            folder (its files of these kinds, sorted by name; other files are ignored), or a hub name, `owner/name` or
            `owner/name:configuration`. The records are read into memory.
        split: Split of a hub data set; files have none.

    Raises:
        DataError: the source is missing, without records, or broken (with file and line); or the hub lacks the name or
            cannot be reached.
    """
    with _readable(Path(source)):
        records = list(read_each(source, _AllUsable(), split=split, documents=True))
    if not records:
        raise DataError(
            "data", source, expected=f"at least one record, in files that end in {', '.join(_KINDS)}"
        )
    return records


def read_each(
    source: str, unusable: Unusable, *, split: str = "train", documents: bool = False
) -> Iterator[Record]:
    """Read the records of a source one by one, so that none decides whether or how another is read.

    A `.txt` file is one record; each line of a `.jsonl` or `.json` file that is not blank is one, and is parsed alone;
    so is each row of a table (`lm/text/tables.py`) or of a hub data set, whose schema is not inferred from single rows.
    A folder may mix kinds, and a source may have no record at all.

    Args:
        source: As for `read_records`.
        unusable: Counts the lines, texts and rows that cannot be read or have more than `LARGEST_RECORD` bytes; a text
            may have more with `documents`.
        split: As for `read_records`.
        documents: Read a `.json` file that begins with `[` as one list of records. Not under a privacy unit: one record
            may then decide that no other is read.

    Raises:
        DataError: the source is missing, or a file as a whole, other than a text, cannot be read.
        StorageError: the disk is full.
    """
    path = Path(source).expanduser()
    if not path.exists():
        _check_name(source)
        yield from _rows(_read_hub(source, split), unusable)
        return
    for file in _listed(path):
        kind = _KINDS[file.suffix]
        unusable.place = str(file)
        if kind == "text":
            # Of a person who owns all records a text may be as large as the memory.
            most = math.inf if documents else LARGEST_RECORD
            record = unusable.tried(_NOT_READABLE, _one_text, file, most)
            if record is not None:
                yield record
        elif documents and file.suffix == ".json" and _is_document(file):
            for number, record in enumerate(_check_document(file), start=1):
                unusable.place = f"{file}, record {number}"
                yield record
        elif kind == "json":
            yield from _lines(file, unusable)
        else:
            yield from _table_rows(file, kind, unusable)


def check_source(source: str, *, split: str = "train") -> None:
    """Check that a source is there and of a known kind, without a look at any record.

    Args:
        source: As for `read_records`.
        split: As for `read_records`.

    Raises:
        DataError: it is not a folder, a file of a known kind, or a data set that the hub or its local cache has.
    """
    path = Path(source).expanduser()
    if path.exists():
        if not path.is_dir():
            _check_kind(path)
    else:
        _check_name(source)
        name, _, configuration = source.partition(":")
        with _hub(source, split) as datasets:
            datasets.load_dataset_builder(name, configuration or None)


def fingerprint(source: str, *, split: str = "train") -> bytes:
    """SHA-256 that identifies the content of a source, for a cache key.

    It covers a file's name, size and modification time, and up to 64 MiB also its content; of a hub data set only its
    name and split. A file that cannot be read is no error: `read_each` leaves it out.

    Args:
        source: As for `read_records`.
        split: As for `read_records`.

    Raises:
        DataError: the source is a file of another kind, or a folder that cannot be read.
    """
    digest = hashlib.sha256(f"{source}\0{split}\0".encode())
    path = Path(source).expanduser()
    with _readable(path):
        for file in _listed(path) if path.exists() else []:
            digest.update(f"{file.name}\0".encode(errors="surrogateescape"))
            digest.update(Unusable().tried(_NOT_READABLE, _state_of, file) or b"not readable")
    return digest.digest()


def _state_of(file: Path) -> bytes:
    """Size, modification time and, of a small file, the hash of the content."""
    status = file.stat()
    state = f"{status.st_size}\0{status.st_mtime_ns}\0".encode()
    if file.is_file() and status.st_size <= _HASHED_BYTES:
        state += _content_hash(file, status.st_size, status.st_mtime_ns)
    return state


@functools.lru_cache(maxsize=256)
def _content_hash(file: Path, size: int, changed: int) -> bytes:
    """SHA-256 of a file, cached as long as its size and modification time are the same."""
    return hashlib.sha256(file.read_bytes()).digest()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DataError` that names the unreadable file."""
    try:
        yield
    except OSError as error:
        name, reason = error.filename or str(path), error.strerror or str(error)
        raise DataError("data", str(name), expected=f"a readable file or folder ({reason})") from error


def _listed(path: Path) -> list[Path]:
    """The data files at `path`, in order."""
    if not path.is_dir():
        _check_kind(path)
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS and not file.name.startswith("."))
    return (
        _saved(path, files) if {"state.json", "dataset_info.json"} <= {file.name for file in files} else files
    )


def _saved(path: Path, files: list[Path]) -> list[Path]:
    """The files of a data set that `datasets` has saved in a folder; beside them it keeps what was made of them later.

    Raises:
        DataError: its `state.json` does not list them.
    """
    state = path / "state.json"
    try:
        names = {str(each["filename"]) for each in json.loads(state.read_bytes())["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "data", str(state), expected=f"the files of a saved data set ({one_line(error)})"
        ) from error
    return [file for file in files if file.name in names]


def _check_name(source: str) -> None:
    """Refuse what is missing and cannot be the name of a data set."""
    if looks_like_path(source) or Path(source).suffix in _KINDS:
        raise DataError("data", source, expected="an existing file or folder")


def _check_kind(path: Path) -> None:
    if path.suffix not in _KINDS:
        raise DataError("data", str(path), expected=f"a file that ends in {', '.join(_KINDS)}")


def _one_text(file: Path, most: float) -> Record:
    if file.exists() and not (file.is_file() and file.stat().st_size <= most):
        limit = "" if most == math.inf else f" of at most {most} bytes"
        raise DataError("data", str(file), expected=f"a file of text{limit}")
    try:
        return {"text": file.read_text(encoding="utf-8-sig")}
    except UnicodeDecodeError as error:
        expected = f"UTF-8 text, but byte {error.start} is not valid UTF-8"
        raise DataError("data", str(file), expected=expected) from None


def _is_document(file: Path) -> bool:
    """Whether a file's first character, other than white space, is `[`."""
    with _readable(file), open(file, encoding="utf-8-sig", errors="replace") as text:
        while (character := text.read(1)).isspace():
            pass
    return character == "["


def _lines(file: Path, unusable: Unusable) -> Iterator[Record]:
    """The objects of a JSONL file."""
    number = 0
    with _readable(file), open(file, "rb") as lines:
        while line := lines.readline(LARGEST_RECORD + 1):
            number += 1
            unusable.place = f"{file}, line {number}"
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = lines.readline(LARGEST_RECORD)
            if line.strip():
                record = unusable.tried(_NOT_READABLE, _one_line, unusable.place, line)
                if record is not None:
                    yield record
                del record  # it must not take the memory of the next one


def _one_line(place: str, line: bytes) -> Record:
    if len(line) > LARGEST_RECORD:
        raise DataError(place, len(line), expected=f"a line of at most {LARGEST_RECORD} bytes")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", str(error))
        found = line.decode(errors="replace").strip()
        raise DataError(place, found, expected=f"one JSON object ({reason})") from None
    if not isinstance(record, dict):
        raise DataError(place, record, expected="one JSON object")
    return record


def _table_rows(file: Path, kind: str, unusable: Unusable) -> Iterator[Record]:
    """The rows of a table, which may have none; `datasets` refuses a file without rows."""
    for place, row in tables.ROWS[kind](file, LARGEST_RECORD):
        unusable.place = f"{file}, {place}"
        record = unusable.tried(_NOT_READABLE, row)
        if record is not None:
            yield record
        del record, row  # they must not take the memory of the next one


def _rows(records: Records, unusable: Unusable) -> Iterator[Record]:
    """The rows of a data set; the conversion of one can fail."""
    for index in range(len(records)):
        unusable.place = f"record {index + 1}"
        record = unusable.tried(_NOT_READABLE, records.__getitem__, index)
        if record is not None:
            yield record


def _check_document(file: Path) -> list[Record]:
    """The objects of a JSON list; refuses a file that is none."""
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        raise DataError(f"{file}, line {line}", expected=f"a JSON list of objects ({reason})") from None
    objects = document if isinstance(document, list) else []
    for number, record in enumerate(objects, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{file}, record {number}", record, expected="one JSON object")
    return objects


def _read_hub(source: str, split: str) -> Records:
    name, _, configuration = source.partition(":")
    with _hub(source, split) as datasets:
        records: Records = datasets.load_dataset(name, configuration or None, split=split)
    return records


@contextlib.contextmanager
def _hub(source: str, split: str) -> Iterator[Any]:
    """Ask the hub once whether it has a data set, and explain what `datasets`, which is yielded, raises after that."""
    # Imported here: that takes a second, and most processes have their sequences already.
    import datasets  # type: ignore[import-untyped]  # it ships no types

    name = source.partition(":")[0]
    online = on_hub(name, kind="dataset", revision="main", field="data", error=DataError)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its exceptions say what matters
    datasets.disable_progress_bars()
    # Else each load asks a server of the hub, which counts loads.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # Without a network it uses its cache alone: it would retry for half a minute.
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not online
    try:
        yield datasets
    except Exception as error:  # datasets raises many types for a file that it cannot read
        if not online:
            expected = (
                "an existing path, or a data set in the hub's local cache, because the hub cannot be reached"
            )
            raise DataError(
                "data", source, expected=expected, fix="download it first, or connect to the network"
            ) from error
        reason = " ".join(str(error).split())[:200]
        raise DataError("data", source, expected=f"a data set with a split {split!r} ({reason})") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
