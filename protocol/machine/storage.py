"""Atomic, durable files: written to a temporary file beside their path, synced (fsync), then renamed over it.

Every durable file of a run is written here, so that a full disk or a `kill -9` leaves the earlier version unchanged,
and a power cut leaves a version that was whole. A folder that is made on the way has its entry synced too.

A temporary name has a random token, because threads, and processes of several containers, can share a process id.
A killed process leaves its temporary: the next write into the folder removes those that are older than a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from cloister.protocol.errors import CloisterError, StorageError

_STALE_S = 24 * 3600.0
_syncing = True
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(tmp|old)", re.DOTALL)


def sync_to_disk(wanted: bool) -> None:
    """Choose whether this process syncs files; it does unless a simulation, which shows nothing else, says otherwise.

    Without syncs a killed process still leaves whole files, but a power cut may lose what was answered.
    """
    global _syncing
    _syncing = wanted


@contextlib.contextmanager
def without_syncs() -> Iterator[None]:
    """Until exit this process syncs no file: for those that are removed before it ends."""
    before = _syncing
    sync_to_disk(False)
    try:
        yield
    finally:
        sync_to_disk(before)


@contextlib.contextmanager
def own_files() -> Iterator[None]:
    """Let only this user read the files that are made until exit: prepared records, and a run's state."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def sync(descriptor: int) -> None:
    """Sync (fsync) an open file, unless `sync_to_disk` says otherwise.

    Raises:
        OSError: the disk refuses.
    """
    if _syncing:
        os.fsync(descriptor)


def write_file(path: Path, write: Callable[[Path], object], *, durable: bool = True) -> None:
    """Let `write` fill a temporary file beside `path`, then replace `path` by it atomically.

    Args:
        path: The final path; its folder is created if missing.
        write: Writes the whole content to the path that it is given.
        durable: Sync (fsync) the file, its folder and the entries of created folders before returning, so that the
            file survives a power cut.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is unchanged.
    """
    with _placed(path, durable=durable) as temporary:
        write(temporary)
        if durable:
            _sync(temporary)
        temporary.replace(path)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write `content` with `write_file`."""
    write_file(path, lambda temporary: temporary.write_bytes(content), durable=durable)


def write_new(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file that is never replaced, whole; if it exists, its content stays.

    If several processes write it, the first one determines the content. Only its owner can read it, and list the
    folders that are created for it.

    Args:
        path: The final path; its folder is created if missing.
        content: The content.
        durable: As for `write_file`.

    Raises:
        StorageError: the disk is full or refuses the write.
    """
    with _placed(path, durable=durable, mode=0o700) as temporary:
        if not path.exists():
            temporary.touch(0o600)
            temporary.write_bytes(content)
            if durable:
                _sync(temporary)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of some bytes at an offset of an open file.

    Raises:
        OSError: the disk is full or refuses the write.
    """
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(None, "no space left")


def allocate(path: Path, size: int) -> None:
    """Make a new file of zeros that only its owner may read: where the disk is full, no later write finds out.

    Args:
        path: The file, which does not exist.
        size: Its bytes, at least 1.

    Raises:
        OSError: the disk is full or refuses the write.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def write_folder(path: Path, fill: Callable[[Path], object], *, durable: bool = True) -> None:
    """Let `fill` write a temporary folder beside `path`, then replace `path` by it.

    An existing folder is moved aside first and removed last: a crash in between can leave `path` missing, but never
    both the old folder and the new one.

    Args:
        path: The folder.
        fill: Writes the content to the folder that it is given.
        durable: Sync (fsync) all of it before returning, so that it survives a power cut.

    Raises:
        StorageError: the disk is full or refuses the write; `path` is unchanged.
    """
    aside = _beside(path, "old")
    with _placed(path, durable=durable) as temporary:
        temporary.mkdir()
        fill(temporary)
        if durable:
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
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing where it is missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_empty(path: Path, field: str, kind: type[CloisterError]) -> None:
    """Check that a folder can be made at `path`: nothing is there, or an empty folder.

    Raises:
        CloisterError: of class `kind`, about `field`: something is there.
    """
    try:
        free = not path.is_symlink() and (not path.exists() or not any(path.iterdir()))
    except OSError:
        free = False
    if not free:
        raise kind(field, str(path), expected="a new folder, or an empty one")


def sync_folders(folder: Path, top: Path) -> None:
    """Sync the entries of `folder` and of the folders above it, the last of which is `top`.

    After this a power cut loses none of them, even where the process that made one was killed before it synced it.

    Raises:
        StorageError: the disk refuses.
    """
    with on_disk(folder):
        for one in (folder, *folder.parents):
            _sync(one)
            if one == top:
                break


def lock(path: Path, expected: str) -> IO[bytes]:
    """Lock a file, which is made if missing, until the returned file is closed or this process ends.

    Args:
        path: The file.
        expected: What another process that has it locked means; the error adds that process's number.

    Raises:
        StorageError: another process has it locked, or the disk refuses.
    """
    with on_disk(path):
        file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with file:
            if not isinstance(error, BlockingIOError):
                raise disk_refusal(path, error) from error
            file.seek(0)
            holder = f" (process {number.decode()} does)" if (number := file.read(20)).isdigit() else ""
        raise StorageError(str(path.parent), expected=f"{expected}{holder}") from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
    return file


def is_locked(path: Path) -> bool:
    """Whether a process has a file locked by `lock`; without waiting, and without a change."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def disk_refusal(path: Path, error: Exception) -> StorageError:
    """The error for a disk that refuses to write at `path`."""
    reason = getattr(error, "strerror", None) or str(error)
    return StorageError(
        str(path),
        expected=f"a disk that accepts the write ({reason})",
        fix="no earlier file is lost: free space or fix the permissions, then run the command again, or continue the "
        "run",
    )


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Raise `disk_refusal` in place of what the disk refuses.

    Raises:
        StorageError: a call of the system failed.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error
        raise disk_refusal(path, error) from error


@contextlib.contextmanager
def readable(path: Path, field: str, kind: type[CloisterError], fix: str = "") -> Iterator[None]:
    """Raise an error about `field` in place of what the disk refuses to read at `path`.

    Raises:
        CloisterError: of class `kind`: a call of the system failed.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            field, str(path), expected=f"a file that can be read ({error.strerror})", fix=fix
        ) from error


@contextlib.contextmanager
def _placed(path: Path, *, durable: bool, mode: int = 0o777) -> Iterator[Path]:
    """A context that puts something into the place of a temporary path beside `path`, in a folder that is made; the
    folder is synced also for a file whose writer was killed before it did so."""
    temporary = _beside(path, "tmp")
    with on_disk(path):
        try:
            _make(path.parent, durable=durable, mode=mode)
            yield temporary
            if durable:
                _sync(path.parent)
        finally:
            remove(temporary)
        _remove_stale(path.parent)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _make(folder: Path, *, durable: bool, mode: int = 0o777) -> None:
    """Make a folder and those above it; a durable one has the entry of each that was missing synced."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(mode, exist_ok=True)
        if durable:
            _sync(made.parent)


def _remove_stale(folder: Path) -> None:
    """Remove the temporaries of killed processes, but no folder that was moved aside and has no successor."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # another process may remove them too
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or time.time() - entry.stat(follow_symlinks=False).st_mtime < _STALE_S:
                continue
            if found[2] == "old" and not (folder / found[1]).exists():
                continue
            remove(Path(entry.path))


def _sync(path: Path) -> None:
    if not _syncing:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
