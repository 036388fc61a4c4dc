"""A run that has begun goes on with the roster and the keys with which its sites joined it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cloister.clients.network.serve import Served
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.setup.templates import with_values
from cloister.clients.site import Site
from cloister.protocol.identity.roster import load_roster
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFolder
from cloister.server.record.progress import Event, RoundDone, SiteFailed
from cloister.server.run import run
from cloister.tests.parties.federation import Loopback, tiny, write_records
from cloister.tests.parties.provisioned import NAMES, Parties

PLAN = ("cohort.sites=3", "run.rounds=2", "server.evaluation=none", "cohort.attempts=1")
WEIGHTED = ("local.balance=weighted", "local.steps=4", "aggregation.weighting=uniform")


pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def parties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Parties:
    """Three sites with data, which have installed a federation."""
    parties = Parties(tmp_path, capsys)
    parties.made()
    for name in NAMES:
        write_records(parties.folder(name) / "data.jsonl")
    return parties


def trained(parties: Parties, folder: Path, plan: Plan) -> list[Event]:
    """A run, in which the sites install, after a round, another key of a site and a roster without one of them."""
    resident, events = Resident(), list[Event]()
    for name in NAMES:
        settings = parties.folder(name) / "site.toml"
        without = with_values(settings.read_text(), {"policy": "", "plan": plan.digest()}, name)
        settings.write_text(without)

    def served(name: str) -> Served:
        return Site(
            read_config(parties.folder(name) / "site.toml"), resident
        )  # for each message, as deployed

    def observe(event: Event) -> None:
        events.append(event)
        if isinstance(event, RoundDone) and event.round == 1:
            second = parties.approve(parties.rotate("a-hospital"))
            third = parties.change("remove", "c-lab")
            for name in NAMES[:2]:
                parties.install(name, second)
                parties.install(name, third)

    channel = Loopback({name: partial(served, name) for name in NAMES})
    roster = load_roster(Path(read_config(parties.folder("b.bank") / "site.toml").roster))
    with RunFolder.create(folder, plan) as run_folder:
        run(run_folder, channel, observe, roster=roster)
    return events


@pytest.mark.parametrize("settings", [(), WEIGHTED], ids=["fixed", "weighted"])
def test_a_version_that_is_installed_during_a_run_does_not_change_it(
    settings: tuple[str, ...], parties: Parties, tmp_path: Path
) -> None:
    """Neither the keys, nor the cohort for whose sites a list of local steps is."""
    events = trained(parties, tmp_path / "run", tiny(*PLAN, *settings))
    assert [event.round for event in events if isinstance(event, RoundDone)] == [1, 2]
    assert not [event for event in events if isinstance(event, SiteFailed)]
    config = read_config(parties.folder("a-hospital") / "site.toml")
    assert Path(config.identity).name == "identity-2.pem"  # of the next run
    assert load_roster(Path(config.roster)).names == NAMES[:2]
