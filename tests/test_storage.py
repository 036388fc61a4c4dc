"""Files are whole or not there: a failed write leaves what was there before."""

import errno
import os
from pathlib import Path

import pytest

from cloister.protocol.errors import StorageError
from cloister.protocol.storage import write_bytes, write_file, write_folder


def full_disk(path: Path) -> None:
    path.write_bytes(b"half of it") if not path.is_dir() else (path / "half").write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_bytes(path, b"one")
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"one")
    with pytest.raises(StorageError, match="No space left on device") as caught:
        write_file(path, full_disk)
    assert str(path) in str(caught.value)
    assert "resume" in str(caught.value)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_folder(path, lambda folder: write_bytes(folder / "a", b"one"))
    with pytest.raises(StorageError, match="No space left on device"):
        write_folder(path, full_disk)
    assert (path / "a").read_bytes() == b"one"
    write_folder(path, lambda folder: write_bytes(folder / "b", b"two"))
    assert os.listdir(path) == ["b"]
    assert os.listdir(tmp_path) == ["folder"]


def test_errors_that_are_not_the_disk_pass_through(tmp_path: Path) -> None:
    def defect(_: Path) -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        write_file(tmp_path / "file", defect)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    write_folder(path, lambda folder: write_bytes(folder / "a", b"one"))
    rename = Path.rename

    def refuse(source: Path, target: Path) -> Path:
        if source.name.endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError):
        write_folder(path, lambda folder: write_bytes(folder / "a", b"two"))
    assert (path / "a").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["folder"]
