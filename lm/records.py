"""Read the records of a data holder: text, JSONL and Parquet files, folders of them, and hub data sets.

`datasets` does the reading and maps JSONL and Parquet from disk as Arrow. This module adds that errors name a file and
a line, that no private file leaves a copy in the global cache of `datasets`, and that an absent network fails fast.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import datasets  # type: ignore[import-untyped]  # it ships no types

from cloister.lm.tokenizer import looks_like_path, on_hub
from cloister.protocol.errors import DataError
from cloister.protocol.storage import disk_refusal

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_HASHED_BYTES = 64 << 20

Record = Mapping[str, Any]


class Records(Protocol):
    """A list-like collection of dicts, such as a `datasets.Dataset` or a list."""

    def __len__(self) -> int:
        """Count the records."""

    def __getitem__(self, index: int, /) -> Record:
        """Return one record."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the records in order."""


def owner_of(record: Record, field: str) -> str | None:
    """Who a record belongs to: the field's text, or its whole number as text; None where it has neither."""
    value = record.get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


def read_records(source: str, *, split: str = "train", cache: Path | None = None) -> Records:
    """Read the records of a file, a folder of files of one kind, or a hub data set.

    Args:
        source: A `.txt` file (one record `{"text": ...}`), a `.jsonl`, `.json` or `.parquet` file, a folder (its files
            of these kinds, sorted by name; other files are ignored), or a hub name, `owner/name` or
            `owner/name:configuration`.
        split: Split of a hub data set; files have none.
        cache: Folder for the Arrow files from which large data is mapped. Without one, local files are read into
            memory and leave no copy on disk, and a hub data set uses the hub's own cache.

    Raises:
        DataError: the source is missing, empty, without records, or broken (with file and line); a folder mixes
            kinds; or the hub lacks the name or cannot be reached.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if looks_like_path(source) or path.suffix in _KINDS:
            raise DataError("data", source, expected="an existing file or folder")
        return _read_hub(source, split, cache)
    with _readable(path):
        files, kind = _files(path)
        for file in files:
            if file.stat().st_size == 0:
                raise DataError("data", str(file), expected="a file with records, but it is empty")
        records = _read_texts(files) if kind == "text" else _read_tables(files, kind, cache)
    if len(records) == 0:
        raise DataError("data", source, expected="at least one record")
    return records


def fingerprint(source: str, *, split: str = "train") -> bytes:
    """SHA-256 that identifies the content of a source, for a cache key.

    It covers a file's name, size and modification time, and up to 64 MiB also its content; of a hub data set only its
    name and split.

    Raises:
        DataError: a file or folder has no data or cannot be read.
    """
    digest = hashlib.sha256(f"{source}\0{split}\0".encode())
    path = Path(source).expanduser()
    with _readable(path):
        for file in _files(path)[0] if path.exists() else []:
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            if status.st_size <= _HASHED_BYTES:
                digest.update(_content_hash(file, status.st_size, status.st_mtime_ns))
    return digest.digest()


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


def _files(path: Path) -> tuple[list[Path], str]:
    """The data files at `path`, in order, and their one kind."""
    if path.is_file():
        if path.suffix not in _KINDS:
            raise DataError("data", str(path), expected=f"a file that ends in {', '.join(_KINDS)}")
        return [path], _KINDS[path.suffix]
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS and not file.name.startswith("."))
    kinds = sorted({_KINDS[file.suffix] for file in files})
    if not kinds:
        raise DataError("data", str(path), expected=f"a folder with files that end in {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise DataError(
            "data", str(path), expected=f"files of one kind, but this folder mixes {', '.join(kinds)}"
        )
    return files, kinds[0]


def _read_texts(files: Iterable[Path]) -> Records:
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            expected = f"UTF-8 text, but byte {error.start} is not valid UTF-8"
            raise DataError("data", str(file), expected=expected) from None
        texts.append({"text": text})
    return texts


def _read_tables(files: Sequence[Path], kind: str, cache: Path | None) -> Records:
    with contextlib.ExitStack() as stack:
        folder = str(cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="cloister-")))
        names = [glob.escape(str(file.resolve())) for file in files]
        stack.enter_context(_quiet())
        # By default invalid UTF-8 fails only when a record is read; with a named encoding it fails here.
        options = {"encoding": "utf-8-sig"} if kind == "json" else {}
        try:
            records: Records = datasets.load_dataset(
                kind,
                data_files=names,
                split="train",
                cache_dir=folder,
                keep_in_memory=cache is None,
                **options,
            )
        except Exception as error:  # datasets raises many types for a line that it cannot read
            if kind == "json":
                for file in files:
                    _check_lines(file)
            root = error
            while root.__cause__ is not None:
                root = root.__cause__  # type: ignore[assignment]  # only `Exception`s are chained here
            if "No space left" in str(root):
                raise disk_refusal(Path(folder), root) from error
            reason = str(root).strip().partition("\n")[0]
            where = str(files[0]) if len(files) == 1 else str(files[0].parent)
            raise DataError("data", where, expected=f"readable {kind} records ({reason})") from error
    return records


def _check_lines(file: Path) -> None:
    """Refuse a line that is not a JSON object, and a file without records; `.json` may be one document."""
    objects = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if number == 1 and file.suffix == ".json":
                    return _check_document(file)
                reason = getattr(error, "msg", str(error))
                raise DataError(f"{file}, line {number}", expected=f"one JSON object ({reason})") from None
            if number == 1 and isinstance(record, list) and file.suffix == ".json":
                return _check_document(file)
            if not isinstance(record, dict):
                raise DataError(f"{file}, line {number}", record, expected="one JSON object")
            objects += 1
    if not objects:
        raise DataError("data", str(file), expected="a file with records, but it has none")
    return None


def _check_document(file: Path) -> None:
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        raise DataError(f"{file}, line {line}", expected=f"a JSON list of objects ({reason})") from None
    for number, record in enumerate(document if isinstance(document, list) else [], start=1):
        if not isinstance(record, dict):
            raise DataError(f"{file}, record {number}", record, expected="one JSON object")


def _read_hub(source: str, split: str, cache: Path | None) -> Records:
    name, _, configuration = source.partition(":")
    online = on_hub(name, kind="dataset", revision="main", field="data", error=DataError)
    with _quiet(), _offline(not online):
        try:
            records: Records = datasets.load_dataset(
                name, configuration or None, split=split, cache_dir=None if cache is None else str(cache)
            )
        except Exception as error:  # datasets raises many types for a file that it cannot read
            if not online:
                expected = "an existing path, or a data set in the hub's local cache, because the hub cannot be reached"
                raise DataError(
                    "data", source, expected=expected, fix="download it first, or connect to the network"
                ) from error
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                "data", source, expected=f"a data set with a split {split!r} ({reason})"
            ) from error
    if len(records) == 0:
        raise DataError("data", source, expected="at least one record")
    return records


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable the progress bars and logs of datasets; its exceptions say what matters."""
    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _offline(switch: bool) -> Iterator[None]:
    """Let datasets use only its cache: without a network it would retry for half a minute."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or switch
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
