"""What a site carries, and its history: `clients/state/carried.py` alone, without a model."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import numpy as np
import pytest

from cloister.clients.state.carried import Carried, extended
from cloister.lm.training.moments import Carry
from cloister.protocol.errors import StepError, UpdateError
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import NOTHING_CARRIED, TRAIN, Instructions, SumId
from cloister.tests.tools.raises import raises


def told(number: int, *, fresh: bool = False, model: bytes = bytes(32)) -> Instructions:
    return Instructions(SumId("run", bytes(32), TRAIN, number), model, state="fresh" if fresh else "carried")


def carried(folder: Path, plan: str = "plan", model: str = "model") -> Carried:
    return Carried(folder, plan, model)


def update(site: Carried, number: int, *, fresh: bool = False) -> str:
    """Make the update of a round, which leaves its number; what it began with."""

    def make(carry: Carry) -> str:
        (carry.after / "left").write_text(str(number))
        return (carry.before / "left").read_text() if carry.before else "nothing"

    return site.make(told(number, fresh=fresh), site.history(number), make, durable=False)


def folders(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "carried").iterdir())


def test_a_history_names_all_instructions_in_order(tmp_path: Path) -> None:
    site, expected = carried(tmp_path), NOTHING_CARRIED
    assert site.history(1) == NOTHING_CARRIED
    for number, began in ((1, "nothing"), (2, "1"), (5, "2")):
        assert update(site, number) == began
        expected = extended(expected, told(number))
        assert site.history(number + 1) == carried(tmp_path).history(9) == expected
    one, two = told(1), told(2)
    forward, back = (extended(extended(NOTHING_CARRIED, a), b) for a, b in ((one, two), (two, one)))
    histories = {forward, back, extended(NOTHING_CARRIED, one), extended(NOTHING_CARRIED, two)}
    assert len(histories) == 4


@pytest.mark.parametrize(
    "other",
    [told(2), told(1, fresh=True), told(1, model=b"m" * 32)],
    ids=["round", "fresh", "model"],
)
def test_other_instructions_have_another_history(other: Instructions) -> None:
    assert extended(NOTHING_CARRIED, other) != extended(NOTHING_CARRIED, told(1))


def test_a_fresh_round_begins_with_nothing_and_so_does_its_history(tmp_path: Path) -> None:
    site = carried(tmp_path)
    for number in (1, 2):
        update(site, number)
    assert update(site, 3, fresh=True) == "nothing"
    assert site.history(4) == extended(NOTHING_CARRIED, told(3, fresh=True))
    assert update(site, 4) == "3"


def test_an_update_that_is_made_again_begins_with_the_same(tmp_path: Path) -> None:
    """After a crash between what is carried and the update; also where a fresh round is made again."""
    site = carried(tmp_path)
    for number in (1, 2):
        update(site, number)
    for fresh, began in ((False, "2"), (True, "nothing"), (False, "2")):
        before = site.history(3)
        assert update(carried(tmp_path), 3, fresh=fresh) == began
        assert site.history(3) == before
    assert site.history(4) == extended(before, told(3))


def test_an_update_that_fails_leaves_what_was_carried(tmp_path: Path) -> None:
    site = carried(tmp_path)
    update(site, 1)
    history = site.history(2)

    def fail(_carry: Carry) -> None:
        raise UpdateError("update", expected="finite numbers")

    with pytest.raises(UpdateError):
        site.make(told(2), history, fail, durable=False)
    assert folders(tmp_path) == ["00001"]
    assert site.history(3) == history
    assert update(site, 2) == "1"


def test_only_the_last_two_updates_leave_something_which_only_the_owner_may_read(tmp_path: Path) -> None:
    site = carried(tmp_path)
    for number in (1, 2, 7, 8):
        update(site, number)
    assert folders(tmp_path) == ["00007", "00008"]
    update(site, 9, fresh=True)
    assert folders(tmp_path) == ["00008", "00009"]  # the update may be made again by other instructions
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "carried").iterdir()}
    assert modes == {0o700}


DAMAGED = [b"", b"{", b"[]", b'{"plan": "plan", "model": "model", "history": 7}', b"\xff"]


@pytest.mark.parametrize("content", [None, *DAMAGED, b'{"plan": "plan", "model": "model", "history": "00"}'])
def test_damaged_state_is_nothing_and_is_warned_of(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    site = carried(tmp_path)
    update(site, 1)
    path = tmp_path / "carried" / "00001" / "history.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert site.history(2) == NOTHING_CARRIED
    assert "what the site carried is lost" in caplog.text
    assert update(site, 2) == "nothing"
    assert site.history(3) == extended(NOTHING_CARRIED, told(2))


@pytest.mark.parametrize("content", [None, b"", b"3", b"22"], ids=["missing", "empty", "changed", "longer"])
def test_damaged_files_are_nothing_and_neither_is_what_was_left_before(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    site = carried(tmp_path)
    for number in (1, 2):
        update(site, number)
    path = tmp_path / "carried" / "00002" / "left"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert site.history(3) == NOTHING_CARRIED
    assert "what the site carried is lost" in caplog.text
    assert update(site, 3) == "nothing"
    assert site.history(4) == extended(NOTHING_CARRIED, told(3))


def test_no_update_is_made_from_state_of_another_history(tmp_path: Path) -> None:
    site, made = carried(tmp_path), list[Carry]()
    update(site, 1)
    with raises(StepError, "carried state"):
        site.make(told(2), NOTHING_CARRIED, made.append, durable=False)
    assert not made
    site.make(told(2, fresh=True), NOTHING_CARRIED, made.append, durable=False)
    assert [carry.before for carry in made] == [None]


@pytest.mark.parametrize("other", [{"plan": "other"}, {"model": "other"}], ids=["plan", "model"])
def test_state_of_another_model_is_not_used(tmp_path: Path, other: dict[str, str]) -> None:
    update(carried(tmp_path, **other), 1)
    assert carried(tmp_path).history(2) == NOTHING_CARRIED
    assert update(carried(tmp_path), 2) == "nothing"
    assert folders(tmp_path) == ["00002"]


def test_what_is_kept_names_plan_and_model(tmp_path: Path) -> None:
    update(carried(tmp_path), 1)
    kept = json.loads((tmp_path / "carried" / "00001" / "history.json").read_text())
    files = {"left": vector_hash(np.frombuffer(b"1", np.uint8)).hex()}
    history = extended(NOTHING_CARRIED, told(1)).hex()
    assert kept == {"plan": "plan", "model": "model", "history": history, "files": files}
