"""Prepared sequences on disk: written once, and memory-mapped by every process of a site, or of all sites."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cloister.lm.data.prepare import Prepared
from cloister.lm.text.sequences import Sequences
from cloister.protocol.errors import DataError
from cloister.protocol.machine.storage import on_disk, write_folder

_TYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "labels": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "starts": np.dtype(np.int64),
    "shares": np.dtype(np.float32),
    "answers": np.dtype(np.int32),
}
"""The arrays of `Sequences`, each kind in a file of its own."""
_INDEX = "index.json"

_SHOWN = 8  # sites whose first record that is left out is named


def write_prepared(folder: Path, sites: Iterable[Prepared | None]) -> None:
    """Write the sequences of one site or many into a folder, which `Store` maps.

    Args:
        folder: The folder, which is there and empty.
        sites: The sequences of each site; None: its records could not be used.
    """
    with contextlib.ExitStack() as stack:
        files = {kind: stack.enter_context(open(folder / f"{kind}.bin", "wb")) for kind in _TYPES}
        index = [None if prepared is None else _entry(prepared, files) for prepared in sites]
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _entry(prepared: Prepared, files: Mapping[str, BinaryIO]) -> dict[str, Any]:
    """Append the arrays of a site to the files, and return where they are."""
    entry: dict[str, Any] = {
        "records": prepared.records,
        "left_out": dict(prepared.left_out),
        "places": dict(prepared.places),
    }
    for name, part in prepared.parts():
        arrays = {}
        for kind, type_ in _TYPES.items():
            array = getattr(part, kind)
            if array is not None:
                file = files[kind]
                arrays[kind] = (file.tell() // type_.itemsize, array.shape)
                file.write(np.ascontiguousarray(array, type_).tobytes())
        entry[name] = {"n_bytes": part.n_bytes, "arrays": arrays}
    return entry


class Store:
    """What `write_prepared` wrote, mapped: the arrays are read-only and shared between processes.

    Args:
        folder: The folder.

    Raises:
        DataError: it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._whole():
            self._index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            files = {kind: folder / f"{kind}.bin" for kind in _TYPES}
            self._arrays: dict[str, NDArray[Any]] = {
                kind: np.memmap(path, _TYPES[kind], "r") if path.stat().st_size else np.empty(0, _TYPES[kind])
                for kind, path in files.items()
            }

    def site(self, index: int) -> Prepared | None:
        """The sequences of the site with a number; None if its records could not be used, and it must say why.

        Raises:
            DataError: they are damaged.
        """
        entry = self._index[index]
        if entry is None:
            return None
        with self._whole():
            train, held_out = (self._sequences(entry[part]) for part in ("train", "held_out"))
            asked = self._sequences(entry["asked"]) if "asked" in entry else None
        left_out, places = Counter(entry["left_out"]), entry.get("places", {})
        return Prepared(train, held_out, entry["records"], left_out, places, asked)

    def _sequences(self, entry: dict[str, Any]) -> Sequences:
        arrays: dict[str, Any] = {"positions": None}
        for kind, (offset, shape) in entry["arrays"].items():
            size = int(np.prod(shape))
            arrays[kind] = self._arrays[kind][offset : offset + size].reshape(shape)
        return Sequences(**arrays, n_bytes=entry["n_bytes"])

    def units(self) -> list[int]:
        """The units to train on of each site; 0 where it has none, or the plan has no units."""
        found = []
        for entry in self._index:
            shapes = {} if entry is None else entry["train"]["arrays"]
            found.append(int(shapes["starts"][1][0]) - 1 if "starts" in shapes else 0)
        return found

    def left_out(self) -> tuple[Counter[str], dict[str, str]]:
        """Number of records that the sites leave out, by the reason, and where each site has the first of each."""
        counts, places = Counter[str](), defaultdict[str, list[str]](list)
        for entry in filter(None, self._index):
            counts.update(entry["left_out"])
            for reason, place in entry.get("places", {}).items():
                places[reason] += [place] if place else []
        return counts, {reason: _shown(found) for reason, found in places.items()}

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                "prepared data",
                str(self._folder),
                expected=f"a folder of tokenised data ({error})",
                fix="remove the folder, and the next start makes it again",
            ) from error


def load_prepared(folder: Path) -> Prepared:
    """Map the sequences of one site.

    Raises:
        DataError: the folder is missing or damaged.
    """
    found = Store(folder).site(0)
    assert found is not None, "a site keeps only what it can use"
    return found


def prepared_path(folder: Path, key: str) -> Path:
    """Where `cached` keeps the sequences with a key."""
    return folder / f"tokens-3-{key[:32]}"


def cached(folder: Path, key: str, make: Callable[[], Prepared]) -> Prepared:
    """Return the sequences cached under `key` in `folder`, mapped from disk; make them on a cache miss.

    If several processes miss at the same time, one makes the sequences and the others wait.

    Args:
        folder: The cache folder of one site's tokenised data.
        key: The cache key, from `Preparation.key`.
        make: Makes the sequences; called only on a cache miss.

    Raises:
        DataError: the cached folder is damaged.
        StorageError: the disk is full or refuses the write.
    """
    filed = prepared_path(folder, key)
    if not filed.exists():
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / f".{filed.name}.lock").open("wb")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filed.exists():
                made = make()
                write_folder(filed, lambda temporary: write_prepared(temporary, [made]))
    return load_prepared(filed)


def _shown(places: list[str]) -> str:
    """Places of records, those of a few sites one by one."""
    more = len(places) - _SHOWN
    return "; ".join(places[:_SHOWN]) + (f"; and {more} more sites" if more > 0 else "")
