"""Files are whole or not there: a failed write leaves what was there before."""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloister.protocol.errors import StorageError
from cloister.protocol.machine.storage import sync_folders, write_bytes, write_file, write_folder, write_new
from cloister.tests.tools.power import Power
from cloister.tests.tools.raises import raises


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
    with raises(StorageError, "file", says="No space left") as caught:
        write_file(path, full_disk)
    assert str(path) in str(caught.value)
    assert "continue the run" in str(caught.value)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_folder(path, lambda folder: write_bytes(folder / "a", b"one"))
    with raises(StorageError, "folder", says="No space left"):
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


# Files that are never replaced.


def test_the_first_writer_of_a_new_file_determines_its_content(tmp_path: Path) -> None:
    path = tmp_path / "private" / "file"
    write_new(path, b"one")
    write_new(path, b"two")
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["file"]


def test_of_two_writers_at_once_the_first_determines_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has seen that the file is missing, and comes later."""
    link = os.link

    def late(source: Path, target: Path) -> None:
        monkeypatch.undo()
        write_new(target, b"first")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    write_new(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_no_half_of_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises(StorageError, "file", says="No space left"):
        write_new(tmp_path / "file", b"content")
    assert os.listdir(tmp_path) == []


# A power cut.


def fill_deep(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_bytes(b"content")


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "file": (lambda path: write_bytes(path, b"content"), ""),
    "new file": (lambda path: write_new(path, b"content"), ""),
    "folder": (lambda path: write_folder(path, fill_deep), "deep/file"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_written_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With the folders that were made for it; and cut at any sync before that, it is whole or missing."""
    write, inside = WRITERS[kind]
    sync, ended = 0, [0]
    with Power(tmp_path, monkeypatch) as power:
        while ended:
            path = tmp_path / str(sync) / "new" / "path"
            with power.stopped_at(sync) as ended:
                write(path)
            power.cut()
            assert not path.exists() or (path / inside).read_bytes() == b"content"
            sync += 1
        assert (path / inside).read_bytes() == b"content"
    assert sync > 4


def test_a_file_that_is_replaced_survives_a_power_cut_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"one")
    with Power(tmp_path, monkeypatch) as power:
        for sync in range(2):
            with power.stopped_at(sync) as ended:
                write_bytes(path, b"two")
            assert ended
            power.cut()
            assert path.read_bytes() == b"one"
        write_bytes(path, b"two")
        power.cut()
        assert path.read_bytes() == b"two"


def test_a_new_file_whose_writer_was_killed_is_synced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    with Power(tmp_path, monkeypatch) as power:
        with power.stopped_at(1) as ended:
            write_new(path, b"one")
        assert ended
        assert path.exists()
        write_new(path, b"two")
        power.cut()
        assert path.read_bytes() == b"one"


def test_folders_of_a_killed_process_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Power(tmp_path, monkeypatch) as power:
        (tmp_path / "one" / "two").mkdir(parents=True)
        write_bytes(tmp_path / "one" / "two" / "file", b"content")
        sync_folders(tmp_path / "one", tmp_path)
        power.cut()
        assert (tmp_path / "one" / "two" / "file").read_bytes() == b"content"


# Temporaries.


def test_two_threads_write_one_file_at_once(tmp_path: Path) -> None:
    """They have one process id, as processes of two containers can have: each has a temporary of its own."""
    both = threading.Barrier(2)

    def write(content: bytes) -> None:
        def fill(temporary: Path) -> None:
            assert not temporary.exists()
            both.wait(60)
            temporary.write_bytes(content)
            both.wait(60)
            assert temporary.read_bytes() == content

        write_file(tmp_path / "file", fill)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [b"one", b"two" * 1000]))
    assert (tmp_path / "file").read_bytes() in (b"one", b"two" * 1000)
    assert os.listdir(tmp_path) == ["file"]


def test_two_threads_write_one_folder_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def write(name: str) -> None:
        def fill(temporary: Path) -> None:
            both.wait(60)
            (temporary / name).write_bytes(b"content")
            both.wait(60)
            assert os.listdir(temporary) == [name]

        write_folder(tmp_path / "folder", fill)

    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(write, name) for name in ("one", "two")]
    # The second may find that the first has just put its own in place.
    assert sum(future.exception() is None for future in made) >= 1
    assert all(isinstance(future.exception(), StorageError | None) for future in made)
    assert os.listdir(tmp_path / "folder") in (["one"], ["two"])
    assert os.listdir(tmp_path) == ["folder"]


def test_temporaries_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    used: list[Path] = []

    def fill(temporary: Path) -> None:
        used.append(temporary)
        temporary.touch()

    write_file(tmp_path / "file", fill)
    write_folder(tmp_path / "folder", used.append)
    token = used[0].suffixes[-2]
    used[0].write_bytes(b"half")
    used[1].mkdir()
    (used[1] / "half").write_bytes(b"half")
    (tmp_path / f".folder{token}.old").mkdir()
    (tmp_path / f".gone{token}.old").mkdir()  # moved aside by a process that was killed before it went on
    (tmp_path / ".other.tmp").touch()
    everything = sorted(os.listdir(tmp_path))
    write_bytes(tmp_path / "file", b"")
    assert sorted(os.listdir(tmp_path)) == everything
    yesterday = time.time() - 25 * 3600
    for path in tmp_path.iterdir():
        os.utime(path, (yesterday, yesterday))
    write_bytes(tmp_path / "file", b"")
    assert sorted(os.listdir(tmp_path)) == [f".gone{token}.old", ".other.tmp", "file", "folder"]
