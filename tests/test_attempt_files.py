"""What a site keeps of its attempts at secure sums, and what remains after a crash, a full disk or a power cut."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloister.aggregation.secure_sum import Answered
from cloister.clients.attempt_files import AttemptFiles, Kept, State
from cloister.protocol.errors import StorageError
from cloister.protocol.messages import Step

SEED = bytes(range(32))
ANSWERED = Answered("run", 1, 1, b"digest")


@contextmanager
def turn(folder: Path) -> Iterator[AttemptFiles]:
    with AttemptFiles.turn(folder, "run") as files:
        yield files


def read(folder: Path) -> State:
    with turn(folder) as files:
        return files.state(None)


def fill(folder: Path) -> list[State]:
    """An attempt through all its steps; the state after each."""
    states = []
    with turn(folder) as files:
        states.append(files.state(None))
        states.append(files.begin(states[-1], Kept((0, 0), (1, 1), SEED, ((Step.ADVERTISE, b"begin"),))))
        states.append(files.keep(states[-1], (Step.SHARE, b"peers")))
        states.append(files.mark_masking(states[-1]))
        states.append(files.keep(states[-1], (Step.UPDATE, b"inbox")))
        states.append(files.mark_answered(states[-1], ANSWERED))
        states.append(files.end(states[-1]))
    return states


def test_another_process_finds_what_one_has_kept(tmp_path: Path) -> None:
    with turn(tmp_path) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED, ((Step.ADVERTISE, b"begin"),)))
        state = files.mark_masking(files.keep(state, (Step.SHARE, b"peers")))
    found = read(tmp_path)
    assert found == state
    assert found.kept == Kept((0, 0), (1, 1), SEED, ((Step.ADVERTISE, b"begin"), (Step.SHARE, b"peers")))
    assert found.marks.joined == found.marks.masking == (1, 1)


def test_only_the_site_can_read_them_and_the_seed_is_gone_in_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "secure"
    with turn(folder) as files:
        files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
    assert SEED in (folder / "attempt").read_bytes()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    fill(folder)
    assert (folder / "attempt").read_bytes() == b""
    assert all(SEED not in path.read_bytes() for path in folder.iterdir())
    assert read(folder).marks.answered == ANSWERED


@pytest.mark.parametrize("name", ["marks", "attempt"])
def test_a_torn_file_is_the_state_before_it_and_the_next_append_is_found(tmp_path: Path, name: str) -> None:
    """The file is cut at every byte: each time the state that is found is one that was there."""
    states = fill(tmp_path)[:-1]
    with turn(tmp_path) as files:
        state = files.begin(files.state(None), Kept((1, 1), (1, 2), SEED, ((Step.ADVERTISE, b"again"),)))
        files.mark_masking(files.keep(state, (Step.SHARE, b"peers")))
    whole = (tmp_path / name).read_bytes()
    known = {state.marks for state in (*states, state, read(tmp_path))}
    for end in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:end])
        found = read(tmp_path)
        assert found.marks in known
        assert found.kept is None or found.kept.now == found.marks.joined
    (tmp_path / name).write_bytes(whole[:-3] + b"???")
    with turn(tmp_path) as files:
        files.mark_answered(
            files.begin(files.state(None), Kept((1, 2), (2, 1), SEED)), Answered("run", 2, 1, b"other")
        )
    found = read(tmp_path)
    assert found.marks.joined == (2, 1)
    assert found.marks.answered == Answered("run", 2, 1, b"other")
    assert found.kept == Kept((1, 2), (2, 1), SEED)


def test_the_secrets_of_an_attempt_are_not_used_after_the_mark_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was killed between the mark of a new attempt and its first message: no attempt is at hand."""
    write = os.pwrite

    def killed(descriptor: int, data: bytes, at: int) -> int:
        raise Killed

    def last(descriptor: int, data: bytes, at: int) -> int:
        monkeypatch.setattr(os, "pwrite", killed)
        return write(descriptor, data, at)

    with turn(tmp_path) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
        monkeypatch.setattr(os, "pwrite", last)
        with pytest.raises(Killed):
            files.begin(state, Kept((1, 1), (1, 2), bytes(32)))
    assert SEED in (tmp_path / "attempt").read_bytes()
    found = read(tmp_path)
    assert found.marks.joined == (1, 2)
    assert found.kept is None


class Killed(BaseException):
    """The process ended here."""


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path) -> None:
    fill(tmp_path)
    known = read(tmp_path)
    with turn(tmp_path) as files:
        assert files.state(known) is known
        changed = files.begin(known, Kept((1, 1), (2, 1), SEED))
        assert files.state(known) == changed != known


def test_a_full_disk_is_named_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with turn(tmp_path) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:5], at))
        with pytest.raises(StorageError, match="no space left"):
            files.keep(state, (Step.SHARE, b"peers"))
        monkeypatch.undo()
    assert read(tmp_path) == state
