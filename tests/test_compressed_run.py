"""Runs with compressed updates: masked sum and clear twin, retries, dropouts, a stop, and lying coordinators."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.aggregation.rotation import ROTATED
from cloister.aggregation.secure_coordinator import SecureCoordinator
from cloister.clients.config import read_config
from cloister.clients.resident import Resident
from cloister.clients.site import Site
from cloister.lm.model import load_model
from cloister.protocol.digest import instructions_digest
from cloister.protocol.errors import StaleError, UpdateError
from cloister.protocol.messages import EVALUATE, TRAIN, Failed
from cloister.protocol.roster import load_roster
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints
from cloister.server.cost import cost
from cloister.server.folder import RunFolder, read_plan
from cloister.server.journal import Journal
from cloister.server.outcome import Outcome
from cloister.server.progress import AttemptFailed, Event, RoundDone, SiteAnswered
from cloister.server.run import run
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.tests.federation import RECORD, Federation, Loopback, tiny, write_records
from cloister.tests.test_site import Attack

EIGHT_BITS = ["aggregation.ring_bits=8", "aggregation.compression={}"]
FOUR_ROUNDS = [
    *EIGHT_BITS,
    "run.rounds=4",
    "local.steps=1",
    "server.evaluation=none",
    "server.optimizer=nesterov",
]
CLEAR = [*FOUR_ROUNDS, "aggregation.secure=false"]


class StoppedError(Exception):
    """The coordinator's process ends here."""


class Run:
    """A run over sites in this process; made, or found again by a new process of coordinator and sites."""

    def __init__(self, path: Path, *settings: str) -> None:
        self.folder, sites = path / "run", path / "sites"
        if not self.folder.exists():
            path.mkdir(parents=True, exist_ok=True)
            plan = tiny(*settings, f"simulation.source={write_records(path / 'records.jsonl')}")
            lay_out(plan, sites)
            RunFolder.create(self.folder, plan).close()
        self.plan = read_plan(self.folder)
        self.roster = load_roster(sites / "roster.toml") if self.plan.aggregation.secure else None
        names = [site_name(index) for index in range(self.plan.cohort.sites)]
        resident = Resident()
        configs = {name: read_config(sites / name / "site.toml") for name in names}
        self.states = {name: config.folder for name, config in configs.items()}
        self.channel = Loopback({name: partial(Site, config, resident) for name, config in configs.items()})
        self.events: list[Event] = []

    def go(self, observe: Callable[[Event], None] = lambda _event: None) -> Outcome:
        def seen(event: Event) -> None:
            self.events.append(event)
            observe(event)

        with RunFolder.reopen(self.folder) as folder:
            return run(folder, self.channel, seen, roster=self.roster)

    def stop_at(self, *moments: Callable[[Event], bool]) -> Run:
        """Run to each of the moments, where the process ends, and from there to the end in another one."""
        path = self.folder.parent
        for moment in moments:

            def stop(event: Event, moment: Callable[[Event], bool] = moment) -> None:
                if moment(event):
                    raise StoppedError

            with pytest.raises(StoppedError):
                Run(path).go(stop)
        last = Run(path)
        last.go()
        return last

    def cut_upload(self, number: int) -> str:
        """Let the first site train in a round, and its update not arrive; the site."""
        lost = next(iter(self.states))

        def tamper(step: str, reply: Any) -> Any:
            if step == "update" and reply.site == lost and reply.sum.round == number:
                return Failed(lost, "its upload was cut")
            return reply

        self.channel.tamper = tamper
        return lost

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def histories(self) -> list[str]:
        """For each site the history of what its last update has left."""
        last = self.plan.run.rounds
        entries = [folder / "carried" / f"{last:05d}" / "history.json" for folder in self.states.values()]
        return [json.loads(entry.read_text())["history"] for entry in entries]

    def fresh(self) -> list[bool]:
        """For each round whether its instructions let no site use what it carries."""
        with Journal(self.folder / "journal.sqlite") as journal:
            begun = [entry for entry in journal.entries() if entry.step == f"{TRAIN} {steps.BEGUN}"]
        return [
            {entry.detail["fresh"] for entry in begun if entry.round == number} == {True}
            for number in range(1, self.plan.run.rounds + 1)
        ]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under masks that nothing disturbed."""
    made = Run(tmp_path_factory.mktemp("masked"), *FOUR_ROUNDS)
    made.go()
    return made


def final(made: Run) -> str:
    return str(made.of(RoundDone)[-1].params_sha256)


def test_the_masked_sum_and_its_clear_twin_have_the_same_bits(masked: Run, tmp_path: Path) -> None:
    clear = Run(tmp_path, *CLEAR)
    clear.go()
    digests = [event.params_sha256 for event in clear.of(RoundDone)]
    assert digests == [event.params_sha256 for event in masked.of(RoundDone)]
    assert len({*masked.histories()}) == 1
    assert masked.fresh() == [True, False, False, False]
    multiples = [event.multiple for event in masked.of(RoundDone)]
    assert multiples[0] == 3.5 * 2  # of four sites
    assert multiples[1:] < multiples[:-1]  # it was far too large at first


def test_an_update_is_one_byte_for_each_value_of_its_blocks(masked: Run) -> None:
    layout = load_model(masked.plan).layout
    assert 0 < layout.size < ROTATED
    update = next(iter(masked.states.values())) / "update-00004.ring"
    sent = update.stat().st_size
    assert ROTATED < sent < ROTATED + 100  # and counters
    found = cost(masked.plan, layout.size, layout.size)
    assert found.bytes_up == sent
    assert found.bytes_down == 4 * (layout.size + 1)  # and one scale
    half = cost(masked.plan, 10**8, 10**8).bytes_up
    assert half == pytest.approx(cost(tiny("aggregation.ring_bits=32"), 10**8, 10**8).bytes_up / 4, rel=2e-4)


def test_retries_count_what_was_left_out_once(masked: Run, tmp_path: Path) -> None:
    """The attempt fails after all sites made their updates; the next one sums the same."""
    again = Run(tmp_path, *FOUR_ROUNDS)
    names = list(again.states)
    again.channel.lose(*((name, "confirm", 1) for name in names[:2]))
    again.go()
    assert len(again.of(AttemptFailed)) == 4
    assert final(again) == final(masked)
    assert again.fresh() == [True, False, False, False]


def test_after_an_update_that_was_not_summed_no_site_adds_what_it_has_left_out(tmp_path: Path) -> None:
    """In round 3 the first site trains, and its masked update does not arrive: so it is no survivor."""
    party = Run(tmp_path, *FOUR_ROUNDS, "aggregation.dropouts=0.25", "aggregation.colluders=0")
    party.cut_upload(3)
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 4, 3, 4]
    assert party.fresh() == [True, False, False, True]
    assert len({*party.histories()}) == 1


@pytest.mark.parametrize("secure", [True, False])
def test_a_run_that_stopped_goes_on_to_the_same_weights(masked: Run, tmp_path: Path, secure: bool) -> None:
    party = Run(tmp_path, *(FOUR_ROUNDS if secure else CLEAR)).stop_at(
        lambda event: isinstance(event, SiteAnswered) and event.round == 1,
        lambda event: isinstance(event, RoundDone) and event.round == 2,
        lambda event: isinstance(event, SiteAnswered) and event.round == 4,
    )
    assert final(party) == final(masked)


def test_scales_are_kept_with_the_checkpoint(masked: Run) -> None:
    checkpoints = Checkpoints(masked.folder / "checkpoints", load_model(masked.plan).layout, 2)
    before, kept = checkpoints.load(3).scales, checkpoints.load(4).scales
    assert kept is not None
    assert before is not None
    assert kept.multiple == masked.of(RoundDone)[-1].multiple
    assert kept.bounds.tolist() != before.bounds.tolist()


# A coordinator that lies about the scales


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation(tmp_path_factory.mktemp("federation"), tiny(*EIGHT_BITS))


def doubled(scales: bytes) -> bytes:
    return bytes((2 * np.frombuffer(scales, np.float32)).tobytes())


def test_sites_that_were_told_different_scales_do_not_finish_a_sum(federation: Federation) -> None:
    other = doubled(federation.scales())
    # The same attempt for all, but one site is told other scales with the model.
    attack = Attack(federation)
    inboxes = attack.deal()
    request = federation.request(inbox=inboxes["site-001"], scales=other)
    with pytest.raises(StaleError, match="instructions"):
        attack.sites[1].contribute(request)
    attack.contribute(attack.sites[0], inboxes["site-000"])
    # Or the attempt itself is another one for this site: nothing that it signs is taken, and no masks are agreed.
    second = Attack(federation, attempt=2)
    digest = instructions_digest(federation.told(scales=other))
    begun = SecureCoordinator(second.coordinator.contract, 1, 2, digest)
    reply: Any = second.agree(second.sites[1], begun.begin)
    with pytest.raises(StaleError, match="instructions"):
        second.coordinator.advertised(reply)


def test_a_round_has_one_update_of_one_list_of_scales(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*EIGHT_BITS, "aggregation.secure=false"))
    site = federation.joined()
    site.contribute(federation.request())
    with pytest.raises(StaleError, match="instructions"):
        site.contribute(federation.request(scales=doubled(federation.scales()), tries=2))


@pytest.mark.parametrize("what", ["none", "beyond", "zero", "short"])
def test_scales_that_the_plan_does_not_allow_are_refused_before_training(tmp_path: Path, what: str) -> None:
    federation = Federation(tmp_path, tiny(*EIGHT_BITS, *RECORD))
    site, scales = federation.joined(), federation.scales()
    beyond = np.full(len(scales) // 4, 1.01, np.float32).tobytes()
    told = {"none": b"", "beyond": beyond, "zero": bytes(len(scales)), "short": scales[:-1]}[what]
    with pytest.raises(UpdateError, match=r"^scales"):
        site.contribute(federation.request(scales=told))
    assert not list(federation.folder.rglob("update-*"))
    assert federation.entries() == ()  # and before the charge


def test_scales_are_only_for_compressed_updates(federation: Federation, tmp_path: Path) -> None:
    plain = Federation(tmp_path, tiny("aggregation.secure=false"))
    site, scales = plain.joined(), federation.scales()
    for request in (plain.request(scales=scales), plain.request(scales=scales, purpose=EVALUATE)):
        with pytest.raises(UpdateError, match="only valid for an update under a plan with aggregation"):
            site.contribute(request)


def test_a_private_update_is_noised_before_it_is_compressed(tmp_path: Path) -> None:
    """Unit `record`: what is coded has its noise, so bounds follow from the mean alone; it is charged as ever."""
    party = Run(tmp_path, *CLEAR, *RECORD, "run.rounds=2")
    outcome = party.go()
    assert outcome.epsilon is not None
    assert [event.clipped for event in party.of(RoundDone)] == [None] * 2
    assert {event.multiple for event in party.of(RoundDone)} == {3.5 * 2}
