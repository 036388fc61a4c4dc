"""Files that are either whole or not there: written beside their place, synced, then renamed over it.

Every durable file of a run goes through here, so that a full disk or a `kill -9` leaves the earlier one untouched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from cloister.protocol.errors import StorageError


def write_file(path: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in the place of `path` in one step.

    Args:
        path: Where the file will stand; its folder is made if needed.
        write: Writes the whole content to the path it is given.
        durable: Sync file and folder before returning, so that the file survives a power cut.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _refusals_of_the_disk(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            if durable:
                _sync(temporary)
            temporary.replace(path)
            if durable:
                _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """`write_file` for bytes at hand."""
    write_file(path, lambda temporary: _fill(temporary, content), durable=durable)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary folder beside `path`, then put it in the place of `path`.

    An existing folder is moved aside first and removed last: there is a moment without `path`, never one without both.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    with _refusals_of_the_disk(path):
        # What a killed process with the same number has left behind is nobody's.
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            fill(temporary)
            for written in sorted(temporary.rglob("*")):
                _sync(written)
            _sync(temporary)
            if path.exists():
                path.rename(aside)
            try:
                temporary.rename(path)
            except OSError:
                if aside.exists():
                    aside.rename(path)
                raise
            _sync(path.parent)
            shutil.rmtree(aside, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def disk_refusal(path: Path, error: Exception) -> StorageError:
    """What a person is told when the disk refuses to write at `path`."""
    reason = getattr(error, "strerror", None) or str(error)
    return StorageError(
        str(path),
        expected=f"a disk that takes the write ({reason})",
        fix="nothing that was there is lost; free space or mend permissions, then go on with: cloister resume",
    )


@contextlib.contextmanager
def _refusals_of_the_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors does not pass the system's error on as it is
        raise disk_refusal(path, error) from error


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
