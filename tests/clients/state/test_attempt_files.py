"""What a site keeps of its attempts at secure sums, and what remains after a crash, a full disk or damage."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.aggregation.secure.secure_sum import Answered
from cloister.clients.state.attempt_files import MASKED, AttemptFiles, Kept, Marks, State
from cloister.protocol.errors import StorageError
from cloister.protocol.messages.messages import Step
from cloister.tests.tools.power import Power, killed_at
from cloister.tests.tools.raises import raises

SEED = bytes(range(32))
BEGIN = (Step.ADVERTISE, b"begin")


def answered_in(attempt: int) -> Answered:
    return Answered("run", 1, attempt, bytes([attempt]) * 32)


@contextmanager
def turn(folder: Path) -> Iterator[AttemptFiles]:
    with AttemptFiles.turn(folder, "run") as files:
        yield files


def read(folder: Path) -> State:
    with turn(folder) as files:
        return files.state(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AttemptFiles.create(tmp_path / "run", tmp_path)
    return tmp_path / "run"


def steps_of(attempt: int) -> list[Callable[[AttemptFiles, State], object]]:
    """What a site writes in an attempt, in this order."""
    return [
        lambda files, state: files.begin(state, Kept((1, attempt - 1), (1, attempt), SEED, (BEGIN,))),
        lambda files, state: files.keep(state, (Step.SHARE, b"peers")),
        lambda files, state: files.keep(state, (Step.UPDATE, b"inbox")),
        lambda files, state: files.keep_revealed(
            files.mark_answered(state, answered_in(attempt)), b"request", b"answer"
        ),
        lambda files, state: files.end(state),
    ]


def fill(folder: Path, attempt: int = 1) -> list[State]:
    """An attempt through all its steps; the state before the first one and after each."""
    states = []
    with turn(folder) as files:
        states.append(files.state(None))
        for step in steps_of(attempt):
            step(files, states[-1])
            states.append(files.state(None))
    return states


def test_another_process_finds_what_one_has_kept(folder: Path) -> None:
    with turn(folder) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED, (BEGIN,)))
        state = files.keep(files.keep(state, (Step.SHARE, b"peers")), (Step.SHARE, b"peers"))
    found = read(folder)
    assert found == state
    assert found.kept == Kept((0, 0), (1, 1), SEED, (BEGIN, (Step.SHARE, b"peers")))
    assert found.marks.joined == (1, 1)
    fill(folder, attempt=2)
    assert read(folder).marks == Marks((1, 2), answered_in(2), 4)


def test_only_the_site_can_read_them_and_the_seed_is_gone_in_the_end(folder: Path) -> None:
    with turn(folder) as files:
        files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
    assert SEED in (folder / "attempt").read_bytes()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    fill(folder, attempt=2)
    assert (folder / "attempt").read_bytes() == b""
    assert all(SEED not in path.read_bytes() for path in folder.iterdir())


def test_the_secrets_of_an_attempt_are_gone_after_a_power_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Power(folder, monkeypatch) as power:
        with turn(folder) as files:
            state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED, (BEGIN,)))
        power.cut()
        assert read(folder).kept == state.kept  # they were there before
        with turn(folder) as files:
            files.end(files.state(None))
        power.cut()
        assert SEED not in (folder / "attempt").read_bytes()
        assert read(folder).kept is None


def test_an_attempt_that_is_not_marked_is_not_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was killed between the seed of a new attempt and its mark: no attempt is at hand."""
    with Power(folder, monkeypatch) as power, turn(folder) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
        with power.stopped_at(0) as ended:
            files.begin(state, Kept((1, 1), (1, 2), bytes(32)))
    assert ended
    assert SEED not in (folder / "attempt").read_bytes()
    found = read(folder)
    assert found.marks.joined == (1, 1)
    assert found.kept is None
    with turn(folder) as files:
        state = files.begin(found, Kept((1, 1), (1, 2), SEED))
    assert read(folder) == state


def test_an_answer_is_kept_for_its_own_request_until_there_is_another(folder: Path) -> None:
    with turn(folder) as files:
        state = State(Marks(answered=answered_in(1)), None, 0)
        assert files.revealed(b"request") is None
        files.keep_revealed(state, b"request", b"a longer answer")
        assert files.revealed(b"request") == b"a longer answer"
        assert files.revealed(b"another request") is None
        files.keep_revealed(state, b"another request", b"answer")
        assert files.revealed(b"another request") == b"answer"
        assert files.revealed(b"request") is None
    torn = (folder / "revealed").read_bytes()[:-1]
    (folder / "revealed").write_bytes(torn)
    with turn(folder) as files:
        assert files.revealed(b"another request") is None


def test_files_that_have_not_changed_are_not_read_again(folder: Path) -> None:
    fill(folder)
    known = read(folder)
    with turn(folder) as files:
        assert files.state(known) is known
        changed = files.begin(known, Kept((1, 1), (2, 1), SEED))
        assert files.state(known) == changed != known


def test_a_full_disk_is_named_and_what_was_there_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with turn(folder) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED))
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:5], at))
        acts: list[Callable[[], object]] = [
            lambda: files.keep(state, (Step.SHARE, b"peers")),
            lambda: files.mark_answered(state, answered_in(1)),
            lambda: files.keep_revealed(state, b"request", b"answer"),
        ]
        for act in acts:
            with raises(StorageError, folder, says="no space left"):
                act()
            found = files.state(
                None
            )  # of a slot that is torn it is assumed that a vector was masked, and sketched
            assumed = replace(found.marks, masked=state.marks.masked, sketched=state.marks.sketched)
            assert replace(found, marks=assumed) == state
        with raises(StorageError, folder, says="no space left"):
            files.begin(state, Kept((1, 1), (1, 2), SEED))
        assert files.state(None).marks.joined == state.marks.joined
        assert files.state(None).kept is None, "the attempt before is over"
        monkeypatch.undo()
        assert files.revealed(b"request") is None


# Damage.


@pytest.mark.parametrize("name", ["marks", "attempt"])
def test_a_file_that_is_missing_is_not_made_again(folder: Path, name: str) -> None:
    """A site without its marks would join old attempts, and answer for other survivors."""
    fill(folder)
    (folder / name).unlink()
    with raises(StorageError, folder / name, says="missing"):
        read(folder)
    assert not (folder / name).exists()


def test_files_that_exist_stay_as_they_are(folder: Path) -> None:
    fill(folder)
    before = read(folder)
    AttemptFiles.create(folder, folder.parent)
    assert read(folder) == before


flips = st.dictionaries(
    st.integers(0, 120) | st.integers(4096, 4096 + 120) | st.integers(0, 8191),
    st.integers(1, 255),
    max_size=4,
)


@pytest.mark.slow
@given(attempts=st.integers(1, 3), flips=flips, size=st.just(8192) | st.integers(0, 9000))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_makes_a_site_refuse_and_forget_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    attempts: int,
    flips: dict[int, int],
    size: int,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    folder = tmp_path_factory.mktemp("damaged")
    AttemptFiles.create(folder, folder.parent)
    written = [state.marks for attempt in range(1, attempts + 1) for state in fill(folder, attempt)]
    whole = bytearray((folder / "marks").read_bytes())
    for place, flip in flips.items():
        whole[place] ^= flip
    (folder / "marks").write_bytes(whole[:size].ljust(size, b"\0"))
    places = {place // 4096 for place in flips}
    try:
        found = read(folder).marks
    except StorageError:
        assert size != 8192 or len(places) == 2
    else:
        assert size == 8192
        assert (found.joined, found.answered) == (written[-1].joined, written[-1].answered)
        assert found == written[-1] or places
        assert found.masked in (written[-1].masked, found.joined[0])
        # The next mark replaces the damaged slot, and is found.
        with turn(folder) as files:
            state = files.begin(files.state(None), Kept(found.joined, (2, 1), SEED))
        assert read(folder) == state


@pytest.mark.parametrize("slot", [0, 1])
def test_the_other_files_know_what_a_damaged_slot_said(folder: Path, slot: int) -> None:
    """After each step of three attempts. The other files must be whole then, or the site refuses."""
    marks, revealed, attempted = folder / "marks", folder / "revealed", folder / "attempt"
    for attempt in (1, 2, 3):
        for step in steps_of(attempt):
            with turn(folder) as files:
                step(files, files.state(None))
            known, whole, sent = read(folder), marks.read_bytes(), revealed.read_bytes()
            damaged = bytearray(whole)
            damaged[slot * 4096 + 10] ^= 1
            marks.write_bytes(damaged)
            found = read(folder)
            assert (found.marks.joined, found.marks.answered) == (known.marks.joined, known.marks.answered)
            assert found.kept == known.kept
            for cut in (sent[:-1], b""):
                revealed.write_bytes(cut)
                with raises(StorageError, revealed, says="a slot of marks too"):
                    read(folder)
            revealed.write_bytes(sent)
            if content := attempted.read_bytes():
                attempted.write_bytes(content[:-1])
                with raises(StorageError, attempted, says="a slot of marks too"):
                    read(folder)
                attempted.write_bytes(content)
            marks.write_bytes(whole)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("begun", [False, True])
def test_a_damaged_slot_does_not_hide_that_a_vector_was_masked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, first: int
) -> None:
    """Nor if the next attempt at the round was begun, by a process that was killed before its mark."""
    with turn(folder) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, first), SEED, (BEGIN,)))
        state = files.keep(files.mark_masked(state, 1), (MASKED, b"digest"))
        if begun:
            with killed_at(5, monkeypatch) as ended:
                files.begin(state, Kept((1, first), (1, first + 1), SEED, (BEGIN,)))
            assert ended
    damaged = bytearray((folder / "marks").read_bytes())
    damaged[state.marks.writes % 2 * 4096 + 10] ^= 1
    (folder / "marks").write_bytes(damaged)
    assert read(folder).marks == replace(
        state.marks, writes=state.marks.writes - 1, joined=(1, first + begun), sketched=(1, first + begun, 1)
    )


def test_sketches_are_counted_for_each_round_and_none_is_forgotten(folder: Path) -> None:
    counts = []
    for attempt, number in ((1, 1), (2, 1), (3, 1), (1, 2)):
        with turn(folder) as files:
            state = files.begin(files.state(None), Kept((0, 0), (number, attempt), SEED, (BEGIN,)))
            files.mark_sketched(files.mark_sketched(state))
        counts.append(read(folder).marks.sketched)
        whole = (folder / "marks").read_bytes()
        for slot in (0, 1):
            damaged = bytearray(whole)
            damaged[slot * 4096 + 10] ^= 1
            (folder / "marks").write_bytes(damaged)
            assert read(folder).marks.sketched >= counts[-1]
        (folder / "marks").write_bytes(whole)
    assert counts == [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 1, 1)]


def test_a_count_of_sketches_that_is_assumed_is_written_before_one_leaves(folder: Path) -> None:
    """Otherwise it is assumed again for the next attempt, which counts no more for it."""
    with turn(folder) as files:
        state = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED, (BEGIN,)))
    damaged = bytearray((folder / "marks").read_bytes())
    damaged[state.marks.writes % 2 * 4096 + 10] ^= 1
    (folder / "marks").write_bytes(damaged)
    with turn(folder) as files:
        assumed = files.state(None)
        assert assumed.marks.sketched == (1, 1, 1)
        written = files.mark_sketched(assumed)
    assert read(folder).marks == written.marks
    assert written.marks.writes > assumed.marks.writes


def test_a_first_attempt_that_a_power_cut_has_torn_is_begun_again(folder: Path) -> None:
    (folder / "attempt").write_bytes(b"torn")
    found = read(folder)
    assert (found.marks.joined, found.kept) == ((0, 0), None)


@pytest.mark.parametrize("attempt", [1, 2])
def test_marks_of_an_earlier_time_beside_later_shares_are_damage(folder: Path, attempt: int) -> None:
    """Otherwise the site would answer another list in the same round."""
    for number in range(1, attempt):
        fill(folder, number)
    with turn(folder) as files:
        for step in steps_of(attempt)[:3]:
            step(files, files.state(None))
    old = (folder / "marks").read_bytes()
    fill(folder, attempt)
    assert read(folder).marks.answered == answered_in(attempt)
    (folder / "marks").write_bytes(old)
    with raises(StorageError, folder / "marks"):
        read(folder)


def test_a_slot_of_an_earlier_time_is_damage(folder: Path) -> None:
    fill(folder)
    old = (folder / "marks").read_bytes()[:4096]
    fill(folder, attempt=2)
    fill(folder, attempt=3)
    marks = bytearray((folder / "marks").read_bytes())
    marks[:4096] = old
    (folder / "marks").write_bytes(marks)
    with raises(StorageError, folder / "marks", says="damaged"):
        read(folder)


@pytest.mark.slow
@given(place=st.integers(0, 10**4), flip=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_attempt_that_is_damaged_is_over(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    place: int,
    flip: int,
    cut: bool,
) -> None:
    """Also where its last frame is: it may have been answered."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    folder = tmp_path_factory.mktemp("damaged")
    AttemptFiles.create(folder, folder.parent)
    with turn(folder) as files:
        first = files.begin(files.state(None), Kept((0, 0), (1, 1), SEED, (BEGIN,)))
        state = files.keep(first, (Step.SHARE, b"peers"))
    whole = bytearray((folder / "attempt").read_bytes())
    place %= len(whole)
    if cut:
        del whole[place:]
    else:
        whole[place] ^= flip
    (folder / "attempt").write_bytes(whole)
    kept = read(folder).kept
    if cut and kept is not None:  # between two frames: no power cut does that, because each was synced
        assert kept in (Kept((0, 0), (1, 1), SEED), first.kept)
    elif flip and not cut:
        assert kept is None
    with turn(folder) as files:
        state = files.begin(files.state(None), Kept((1, 1), (1, 2), SEED, (BEGIN,)))
    assert read(folder) == state
