"""Whole runs at the door: real sites in processes of their own, TLS, signed sessions; each party is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cloister.lm.model.model import count_parameters
from cloister.protocol.identity.roster import load_roster
from cloister.protocol.messages.messages import EVALUATE, TRAIN
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import load
from cloister.server.door.grid import most_bytes_of
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import run_history
from cloister.server.record.journal import FINISHED, Journal
from cloister.server.record.progress import Event, RoundStarted
from cloister.server.run import run
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.tests.parties.door_parties import (
    WAIT_S,
    Asked,
    AtDoor,
    CoordinatorProcesses,
    Joinable,
    Moment,
    SiteProcesses,
    laid_out_sender,
)
from cloister.tests.parties.federation import tiny, write_records
from cloister.tests.scenarios.test_compressed_run import FOUR_ROUNDS, Run, final
from cloister.tests.tools.command import found, set_options

STEPS = ("advertise", "share", "update", "confirm", "unmask")


class Federation:
    """The sites of the small plan, and a folder for its run.

    Args:
        path: Where they are.
        plan: The plan.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.plan = plan
        self.sites = path / "sites"
        self.sites.mkdir()
        lay_out(plan, self.sites)
        self.roster = load_roster(self.sites / "roster.toml")
        self.configs = [self.sites / site_name(index) / "site.toml" for index in range(plan.cohort.sites)]
        self.run = path / "run"
        RunFolder.create(self.run, plan).close()
        self.spool = path / "spool"

    def channel(self, door: Joinable) -> AtDoor:
        """The run behind a door."""
        most_bytes = most_bytes_of(self.plan, 10**5)
        sender = laid_out_sender(RunFiles(self.run), self.sites, self.roster)
        return AtDoor(
            self.run.parent,
            door=door.door,
            names=door.names,
            most_bytes=most_bytes,
            run="run",
            sender=sender,
        )

    def assert_undisturbed(self, params_sha256: str) -> None:
        """The run ended as if nothing had happened: each round in its first attempt, each update trained once."""
        with RunFolder.reopen(self.run) as folder, Journal(folder.journal) as journal:
            end = journal.newest(FINISHED)
            assert end is not None
            assert end.detail["params_sha256"] == params_sha256
            done = run_history(folder).done
            numbers = list(range(1, self.plan.run.rounds + 1))
            assert [(done[number]["attempts"], done[number]["sites"]) for number in numbers] == [
                (1, len(self.configs)) for _ in numbers
            ]
        for config in self.configs:
            trained = (config.parent / "trained").read_text().split()
            assert [int(number) for number in trained] == numbers
        assert not any(path.is_file() for path in self.spool.rglob("*"))


@pytest.fixture
def federation(small_plan: Path, tmp_path: Path) -> Federation:
    return Federation(tmp_path, load(small_plan))


@pytest.mark.slow
def test_sites_that_are_killed_at_every_step_lose_nothing(
    federation: Federation, whole: dict[str, Any]
) -> None:
    """One is killed when it has answered and its answer has not left, another between two rounds."""
    plan = federation.plan
    moments: dict[int, list[Moment]] = {
        1: [(TRAIN, 1, step) for step in STEPS],
        2: [(EVALUATE, 1, step) for step in ("update", "unmask")],
    }
    with (
        RunFolder.reopen(federation.run) as folder,
        Joinable(federation.configs) as door,
        federation.channel(door) as channel,
    ):
        processes = SiteProcesses(door.address, federation.configs, moments)
        try:
            assert channel.wait_for(plan.cohort.sites, WAIT_S) == plan.cohort.sites

            def kill_one(event: Event) -> None:
                if isinstance(event, RoundStarted) and (event.round, event.purpose) == (2, TRAIN):
                    processes.kill(0)

            run(folder, channel, kill_one, roster=federation.roster)
            sent = [site.sent for site in channel.connected()]
        finally:
            channel.close(over=True)
            processes.join()
    killed = -signal.SIGKILL
    assert processes.codes == [[killed, 0], [killed] * 5 + [0], [killed] * 2 + [0], [0]]
    federation.assert_undisturbed(whole["params_sha256"])
    # Each model is evaluated, all but the last are trained: each site has fetched each of them once, also those that
    # were killed.
    parameters = count_parameters(plan).trained
    assert sent == [(plan.run.rounds + 1) * 4 * parameters] * plan.cohort.sites


@pytest.mark.slow
def test_a_coordinator_that_is_killed_at_every_step_loses_nothing(
    federation: Federation, whole: dict[str, Any]
) -> None:
    moments: list[Moment] = [(TRAIN, 1, step) for step in STEPS] + [(EVALUATE, 2, "unmask")]
    with Joinable(federation.configs) as door:
        coordinator = CoordinatorProcesses(federation.run, federation.sites, door.door, moments)
        processes = SiteProcesses(door.address, federation.configs)
        try:
            asked = coordinator.run()
        finally:
            processes.join()
    assert processes.codes == [[0]] * 4
    federation.assert_undisturbed(whole["params_sha256"])
    join = ("", 0, "join")
    for before, after, moment in zip(asked, asked[1:], moments, strict=False):
        assert before[-1].moment == moment
        assert before[-1].after is None
        # The next process joins the sites and goes on where this one was killed.
        assert [each.moment for each in after[:2]] == [join, moment]
        if moment[2] in ("confirm", "unmask"):
            assert after[1].after in (0, None), "a vector was uploaded again"
    # Two of the four vectors had arrived when the coordinator was killed: they were not sent again.
    killed, resumed = (one_of(asked[index], (TRAIN, 1, "update")) for index in (2, 3))
    undisturbed = one_of(asked[-1], (TRAIN, 3, "update"))
    assert killed.after is None
    assert resumed.after is not None
    assert undisturbed.after is not None
    assert undisturbed.after - undisturbed.before > 10**5
    assert resumed.after <= (undisturbed.after - undisturbed.before) / 2


def one_of(asked: list[Asked], moment: Moment) -> Asked:
    (found,) = (each for each in asked if each.moment == moment)
    return found


def killed_at_both_ends(folder: Path, *settings: str) -> tuple[Federation, Run]:
    """A run of three rounds or more under masks, at the door, and the same one in this process, undisturbed.

    A site is killed when it has written its second update, another when it has revealed shares and in the next round;
    the coordinator when some sites have answered. Both runs end with the same bits.
    """
    undisturbed = Run(folder / "undisturbed", *settings)
    undisturbed.go()
    plan = tiny(*settings, f"simulation.source={write_records(folder / 'records.jsonl')}")
    federation = Federation(folder, plan)
    moments: dict[int, list[Moment]] = {
        0: [(TRAIN, 2, "update")],
        1: [(TRAIN, 2, "unmask"), (TRAIN, 3, "update")],
    }
    with Joinable(federation.configs) as door:
        at: list[Moment] = [(TRAIN, 2, "update"), (TRAIN, 3, "unmask")]
        coordinator = CoordinatorProcesses(federation.run, federation.sites, door.door, at)
        processes = SiteProcesses(door.address, federation.configs, moments)
        try:
            coordinator.run()
        finally:
            processes.join()
    killed = -signal.SIGKILL
    assert processes.codes == [[killed, 0], [killed, killed, 0], [0], [0]]
    federation.assert_undisturbed(final(undisturbed))
    return federation, undisturbed


@pytest.mark.slow
def test_what_a_compressed_update_has_left_out_counts_once_when_both_ends_are_killed(tmp_path: Path) -> None:
    federation, undisturbed = killed_at_both_ends(tmp_path, *FOUR_ROUNDS)
    for config, state in zip(federation.configs, undisturbed.folders.values(), strict=True):
        kept = sorted(config.parent.rglob("carried/*/residual"))
        expected = sorted(state.glob("runs/*/carried/*/residual"))
        assert [path.read_bytes() for path in kept] == [path.read_bytes() for path in expected]
        assert [path.parent.name for path in kept] == ["00003", "00004"]


@pytest.mark.slow
def test_groups_are_summed_at_the_door_as_in_a_simulation(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In clear, where groups may be as small as these; the requests of all groups are one `ask`."""
    settings = ["aggregation.groups=3", "aggregation.secure=false", "run.rounds=1", "server.evaluation=none"]
    options = set_options(settings)
    whole = found(
        capsys, "simulate", str(small_plan), *options, "--out", str(tmp_path / "whole"), "--workers", "1"
    )
    federation = Federation(tmp_path, load(small_plan, settings))
    with (
        RunFolder.reopen(federation.run) as folder,
        Joinable(federation.configs) as door,
        federation.channel(door) as channel,
    ):
        processes = SiteProcesses(door.address, federation.configs)
        try:
            assert channel.wait_for(4, WAIT_S) == 4
            run(folder, channel, lambda _event: None)
        finally:
            channel.close(over=True)
            processes.join()
    federation.assert_undisturbed(whole["params_sha256"])
    with RunFolder.reopen(federation.run) as folder:
        assert run_history(folder).done[1]["groups"] == [1, 2, 3]
