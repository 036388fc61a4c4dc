"""Checkpoints after a kill and a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.lm.model.model import load_model
from cloister.protocol.messages.messages import Confirm
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.checkpoint import Checkpoints
from cloister.tests.parties.federation import tiny
from cloister.tests.tools.power import Power


def test_a_checkpoint_that_a_killed_process_left_is_synced_before_its_round_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal then says for good that it is: a run without that checkpoint could not be resumed."""
    model = load_model(tiny())
    weights = model.layout.flatten(model.module)
    for sync in (0, 1):
        folder = tmp_path / f"{sync}"
        folder.mkdir()
        with Power(folder, monkeypatch) as power:
            with power.stopped_at(sync) as ended:
                Checkpoints(folder, model.layout, 1).save(1, weights, {"round": 1})
            assert ended
            done = Checkpoints(folder, model.layout, 1).done(1)
            assert (done is None) == (sync == 0), "the file has its name when the folder is synced"
            power.cut()
            assert Checkpoints(folder, model.layout, 1).done(1) == done


def test_replies_that_a_killed_process_left_are_synced_before_the_next_step_depends_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [Confirm(bytes(32), "site-1", bytes(32), bytes(64))]
    with Power(tmp_path, monkeypatch) as power:
        with power.stopped_at(1) as ended:
            KeptAttempt(tmp_path).keep(b"context", Confirm, replies)
        assert ended
        assert KeptAttempt(tmp_path).replies(b"context", Confirm) == replies
        power.cut()
        assert KeptAttempt(tmp_path).replies(b"context", Confirm) == replies
