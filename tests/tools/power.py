"""A power cut, or `kill -9`, at every sync of a process: a disk is sure to have what was synced, and nothing else.

Sources: fsync(2), by which the entry of a file is synced with its folder only; Pillai et al. 2014 ("All File Systems
Are Not Created Equal").
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Inode: TypeAlias = tuple[int, int]


class Stopped(BaseException):
    """The process ended here."""


@contextmanager
def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """End the process at a call that writes, cuts or syncs a file, which does not happen; those before it did.

    Args:
        call: Number of calls that do happen.
        monkeypatch: Replaces them in the block.

    Yields:
        A list, which has that number after the block if the process was ended in it.
    """
    ended: list[int] = []
    made = 0

    def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
        def calls(*arguments: Any) -> Any:
            nonlocal made
            if made == call:
                ended[:] = [call]
                raise Stopped  # also in code that unwinds, which a killed process does not run
            made += 1
            return real(*arguments)

        return calls

    with monkeypatch.context() as patch, contextlib.suppress(Stopped):
        for name in ("pwrite", "ftruncate", "fsync"):
            patch.setattr(os, name, stopping(getattr(os, name)))
        yield ended


class Power:
    """The disk under a folder: it has what is in the folder now, and from now on what `os.fsync` was called for.

    A file has the content of its last sync, a folder the entries of its last sync, and what was never synced is empty.
    No sync reaches the real disk. A descriptor of each recorded inode stays open, so that its number is not used again.

    Args:
        folder: The folder.
        monkeypatch: Replaces `os.fsync` until the block ends.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._held: dict[Inode, int] = {}
        self._files: dict[Inode, bytes] = {}
        self._folders: dict[Inode, dict[str, Inode]] = {}
        self._left: int | None = None  # syncs before the process is stopped
        self._stopped = False
        self._monkeypatch, self._really_sync = monkeypatch, os.fsync
        self._take_all()
        monkeypatch.setattr(os, "fsync", self._fsync)

    def __enter__(self) -> Power:
        return self

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.setattr(os, "fsync", self._really_sync)  # what is synced later shall not be held
        self._let_go()

    def _let_go(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        for record in (self._held, self._files, self._folders):
            record.clear()

    def cut(self) -> None:
        """Cut the power, and start the machine again with what the disk has."""
        top = _inode(os.stat(self._folder))
        shutil.rmtree(self._folder)
        self._restore(top, self._folder, {})
        self._let_go()
        self._take_all()

    @contextmanager
    def stopped_at(self, sync: int) -> Iterator[list[int]]:
        """End the process at a sync, which does not happen. Its other writes are there, until the power is cut.

        Args:
            sync: Number of syncs that do happen.

        Yields:
            A list, which has that number after the block if the process was ended in it.
        """
        ended: list[int] = []
        self._left = sync
        try:
            yield ended
        except Stopped:
            ended.append(sync)
        self._left, self._stopped = None, False

    def _fsync(self, descriptor: int) -> None:
        if self._stopped:
            return  # in code that unwinds: a killed process does not run it
        if self._left == 0:
            self._stopped = True
            raise Stopped
        if self._left is not None:
            self._left -= 1
        self._take(descriptor)

    def _take_all(self) -> None:
        for folder, _, names in os.walk(self._folder):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                descriptor = os.open(path, os.O_RDONLY)
                self._take(descriptor)
                os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        """Record what the disk has of an open file or folder."""
        inode = self._hold(os.open(f"/dev/fd/{descriptor}", os.O_RDONLY))  # a duplicate would hold its lock
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._files[inode] = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            return
        names = os.listdir(descriptor)
        self._folders[inode] = {
            name: self._hold(os.open(name, os.O_RDONLY, dir_fd=descriptor)) for name in names
        }

    def _hold(self, descriptor: int) -> Inode:
        inode = _inode(os.fstat(descriptor))
        if self._held.setdefault(inode, descriptor) != descriptor:
            os.close(descriptor)
        return inode

    def _restore(self, inode: Inode, path: Path, made: dict[Inode, Path]) -> None:
        mode = os.fstat(self._held[inode]).st_mode
        if stat.S_ISDIR(mode):
            path.mkdir()
            for name, entry in self._folders.get(inode, {}).items():
                self._restore(entry, path / name, made)
        elif inode in made:
            os.link(made[inode], path)
        else:
            path.write_bytes(self._files.get(inode, b""))
            made[inode] = path
        path.chmod(stat.S_IMODE(mode))


def _inode(found: os.stat_result) -> Inode:
    return found.st_dev, found.st_ino
