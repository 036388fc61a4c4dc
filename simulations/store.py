"""The token sequences of all simulated sites: made in one pass, and mapped from one file for each kind of array.

A deployed site makes its sequences itself (`lm/text/data.py`). For thousands of sites on one machine that costs a
reader, a folder and several synced files for each. Here one process makes those of all sites, from the same records
in the same way, and a worker that plays a site slices what is mapped. Nothing is synced, because it can be made
again: a run that goes on checks the files by their record (`lm/model/saved.py`) first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cloister.lm.model import saved
from cloister.lm.text.data import Prepared, Sequences, prepare, unit_rule
from cloister.lm.text.records import Record
from cloister.protocol.errors import DataError
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.plan.plan import Plan

_TYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "labels": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "starts": np.dtype(np.int64),
    "shares": np.dtype(np.float32),
    "answers": np.dtype(np.int32),
}
_INDEX = "index.json"


def make(
    folder: Path,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    sites: Sequence[Path],
    progress: Callable[[int], None] = lambda _done: None,
) -> Counter[str]:
    """Make the store of a plan's sites, whole or not at all.

    Args:
        folder: The store.
        plan: The plan.
        tokenizer: Its tokenizer.
        sites: For each site its records, in JSONL.
        progress: Receives the number of sites that are done.

    Returns:
        Number of records that are left out, by the reason.

    Raises:
        StorageError: the disk is full or refuses the write.
    """
    left_out: Counter[str] = Counter()

    def fill(temporary: Path) -> None:
        index = []
        with ExitStack() as stack:
            files = {kind: stack.enter_context(open(temporary / f"{kind}.bin", "wb")) for kind in _TYPES}
            for done, path in enumerate(sites, 1):
                prepared = _prepared(path, plan, tokenizer)
                index.append(None if prepared is None else _entry(prepared, files))
                left_out.update({} if prepared is None else prepared.left_out)
                progress(done)
        (temporary / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        saved.record(temporary)

    write_folder(folder, fill, durable=False)
    return left_out


class Store:
    """What `make` wrote, mapped.

    Raises:
        DataError: it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            files = {kind: folder / f"{kind}.bin" for kind in _TYPES}
            self._arrays: dict[str, NDArray[Any]] = {
                kind: np.memmap(path, _TYPES[kind], "r") if path.stat().st_size else np.empty(0, _TYPES[kind])
                for kind, path in files.items()
            }
        except (OSError, ValueError) as error:
            raise DataError(
                "data of the sites",
                str(folder),
                expected=f"a folder of tokenised data ({error})",
                fix="remove the folder, and the next start makes it again",
            ) from error

    def site(self, index: int) -> Prepared | None:
        """The sequences of the site with a number; None if its records could not be used, and it must say why."""
        entry = self._index[index]
        if entry is None:
            return None
        train, held_out = (self._sequences(entry[part]) for part in ("train", "held_out"))
        asked = self._sequences(entry["asked"]) if "asked" in entry else None
        return Prepared(train, held_out, entry["records"], Counter(entry["left_out"]), asked)

    def _sequences(self, entry: dict[str, Any]) -> Sequences:
        arrays: dict[str, NDArray[Any]] = {}
        for kind, (offset, shape) in entry["arrays"].items():
            size = int(np.prod(shape))
            arrays[kind] = self._arrays[kind][offset : offset + size].reshape(shape)
        return Sequences(
            arrays["tokens"],
            arrays["labels"],
            arrays.get("positions"),
            entry["n_bytes"],
            arrays.get("starts"),
            arrays.get("shares"),
            arrays.get("answers"),
        )


def _prepared(path: Path, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> Prepared | None:
    """The sequences of a site; None if it cannot make any: it fails by itself, in its own name, when it is asked."""
    data, private = plan.data, plan.privacy.unit != "none"
    with path.open("rb") as lines:
        records: list[Record] = [json.loads(line) for line in lines]
    try:
        return prepare(
            records,
            tokenizer,
            data,
            seed=plan.run.seed,
            units=unit_rule(data, plan.privacy),
            refuse=not private,
        )
    except DataError:
        return None


def _entry(prepared: Prepared, files: Mapping[str, BinaryIO]) -> dict[str, Any]:
    """Append the arrays of a site to the files, and return where they are."""
    entry: dict[str, Any] = {"records": prepared.records, "left_out": dict(prepared.left_out)}
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
