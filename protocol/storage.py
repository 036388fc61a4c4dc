"""Atomic, durable files: written to a temporary file beside their path, synced (fsync), then renamed over it.

Every durable file of a run is written here, so that a full disk or a `kill -9` leaves the earlier version unchanged.
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
    """Let `write` fill a temporary file beside `path`, then replace `path` by it atomically.

    Args:
        path: The final path; its folder is created if missing.
        write: Writes the whole content to the path that it is given.
        durable: Sync (fsync) file and folder before returning, so that the file survives a power cut.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is unchanged.
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
    """Write `content` with `write_file`."""
    write_file(path, lambda temporary: _fill(temporary, content), durable=durable)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary folder beside `path`, then replace `path` by it.

    An existing folder is moved aside first and removed last: a crash in between can leave `path` missing, but never
    both the old folder and the new one.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    with _refusals_of_the_disk(path):
        # A killed process with the same process id may have left this folder; no process uses it.
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
    """The error for a disk that refuses to write at `path`."""
    reason = getattr(error, "strerror", None) or str(error)
    return StorageError(
        str(path),
        expected=f"a disk that accepts the write ({reason})",
        fix="no earlier file is lost: free space or fix the permissions, then continue with: cloister resume",
    )


@contextlib.contextmanager
def _refusals_of_the_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error
        raise disk_refusal(path, error) from error


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
