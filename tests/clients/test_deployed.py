"""A deployed site's stay on the exchange of one run at a time, with an exchange in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.clients import deployed
from cloister.clients.deployed import Stay
from cloister.clients.setup.config import SiteConfig
from cloister.protocol.identity.roster import new_identity, save_identity
from cloister.protocol.messages.messages import Joined, Request
from cloister.tests.parties.door_parties import WAIT_S, Answering, contribute, join_request, open_channel


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Answering, Callable[[], SiteConfig]]:
    """What answers instead of the site of a configuration, and the configuration."""
    save_identity(new_identity(), tmp_path / "identity.pem")
    config = SiteConfig(
        name="site-1",
        data="data.jsonl",
        state=str(tmp_path / "state"),
        identity=str(tmp_path / "identity.pem"),
    )
    answering = Answering()
    monkeypatch.setattr(deployed, "Site", lambda *_args, **_options: answering)
    return answering, lambda: config


def test_a_stay_ends_with_its_run_and_leaves_no_vector(
    site: tuple[Answering, Callable[[], SiteConfig]], tmp_path: Path
) -> None:
    answering, config = site
    with open_channel(tmp_path) as channel:
        stay = Stay(channel.invite(), config)
        assert channel.wait_for(1, WAIT_S) == 1
        assert list(channel.ask({1: contribute(answering.vector)}, WAIT_S, group="1"))
        assert list((config().folder / "exchange" / stay.run).iterdir()), (
            "the model is kept for the next round"
        )
        channel.close(over=True)
    stay.wait(WAIT_S)
    assert stay.over
    assert not (config().folder / "exchange" / stay.run).exists()


def test_a_new_invitation_is_used_at_once_when_the_coordinator_was_started_again(
    site: tuple[Answering, Callable[[], SiteConfig]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site does not sit out the wait before it tries an older invitation again, which is made endless here."""
    _, config = site
    monkeypatch.setattr("cloister.clients.network.door._FIRST_S", 1000.0)
    monkeypatch.setattr("cloister.clients.network.door._LONGEST_S", 1000.0)
    with open_channel(tmp_path / "first") as channel:
        stay = Stay(channel.invite(), config)
        assert channel.wait_for(1, WAIT_S) == 1
    ended = threading.Event()
    while stay.connected:
        ended.wait(0.01)
    with open_channel(tmp_path / "second") as channel:
        stay.invite(channel.invite())
        assert channel.wait_for(1, WAIT_S) == 1
        assert next(iter(channel.ask({1: join_request()}, WAIT_S, group="1")))[1] == Joined("site-1")
        stay.end(WAIT_S)
    assert stay.over


def test_a_stay_that_is_ended_while_it_works_is_not_over_before_the_work_is(
    site: tuple[Answering, Callable[[], SiteConfig]], tmp_path: Path
) -> None:
    answering, config = site
    begun, go_on = threading.Event(), threading.Event()

    def hold(_request: Request) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    answering.during = hold
    with open_channel(tmp_path) as channel:
        stay = Stay(channel.invite(), config)
        assert channel.wait_for(1, WAIT_S) == 1
        asking = threading.Thread(target=lambda: list(channel.ask({1: join_request()}, WAIT_S, group="1")))
        asking.start()
        assert begun.wait(WAIT_S)
        stay.end(0.0)
        assert stay.leaving
        assert not stay.over
        go_on.set()
        stay.end(WAIT_S)
        assert stay.over
        channel.close()
        asking.join(WAIT_S)
        assert not asking.is_alive()
