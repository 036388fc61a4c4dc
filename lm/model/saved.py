"""A folder of a saved model, or of data, and the record of its files in it: sizes and BLAKE3 hashes, in `saved.json`.

The record is written with the files and put in place with them, so that a file that was truncated, changed or removed
later is found. It detects accidents, not an attack: a party that can write the folder can write the record as well.
Folders without a record, such as those of other programs, are not checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from cloister.protocol.errors import ModelError

RECORD = "saved.json"
"""Its name in the folder."""

ADAPTER = "adapter_config.json"
"""The file by which PEFT knows the folder of an adapter."""


def record(folder: Path) -> None:
    """Write the record of all files in a folder and in the folders below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake3": _hash(path)}
        for path in files
    }
    (folder / RECORD).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def recorded(folder: Path) -> bool:
    """Whether a folder has a record."""
    return (folder / RECORD).exists()


def size(folder: Path) -> int:
    """Bytes of the files in a folder: what `damage` reads."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def damage(folder: Path) -> str:
    """The first file that is not as recorded, in words; empty if there is none, or no record.

    It hashes every file, some 5 GB a second and core where they are in memory, after it has compared their sizes.
    """
    if not recorded(folder):
        return ""
    try:
        found: dict[str, dict[str, Any]] = json.loads((folder / RECORD).read_bytes())
        expected = {str(name): (int(fact["size"]), str(fact["blake3"])) for name, fact in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{RECORD} cannot be read"
    for name, (length, _) in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != length:
            return f"{name} has {file.stat().st_size:,} bytes, and {length:,} were saved"
    for name, (_, digest) in expected.items():
        try:
            same = _hash(folder / name) == digest
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if not same:
            return f"{name} is not as it was saved"
    return ""


def check(folder: Path) -> None:
    """Check that no file is damaged.

    Raises:
        ModelError: one is.
    """
    if why := damage(folder):
        raise ModelError("model", str(folder), expected=f"the files that were saved, but {why}")


def _hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
