"""Runs with compressed updates: masked sum and clear twin, retries, dropouts, a stop, and lying coordinators."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.vector.rotation import ROTATED
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.site import Site
from cloister.lm.model.model import load_model
from cloister.protocol.errors import StaleError, UpdateError
from cloister.protocol.identity.roster import load_roster
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import EVALUATE, Contribute, Failed, Join, Request
from cloister.server.federation.cost import cost
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder, read_plan
from cloister.server.record.outcome import Outcome
from cloister.server.record.progress import (
    AttemptFailed,
    Event,
    RoundAbandoned,
    RoundDone,
    SiteAnswered,
    SiteFailed,
)
from cloister.server.run import run
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.tests.clients.test_site import Attack
from cloister.tests.parties.federation import RECORD, Federation, Loopback, tiny, write_records
from cloister.tests.tools.raises import raises

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
        self.folders = {name: config.folder for name, config in configs.items()}
        self.channel = Loopback({name: partial(Site, config, resident) for name, config in configs.items()})
        self.events: list[Event] = []
        self.told: dict[tuple[int, int], set[str]] = {}
        """By round and try: what sites were told of what they carry."""
        self.channel.before = self._note

    def kept(self, name: str) -> Path:
        """The folder of what a site keeps of the run; before it has joined, one that is missing."""
        return next(self.folders[name].glob("runs/*"), self.folders[name] / "runs" / "none")

    def _note(self, _site: str, request: Request) -> None:
        if isinstance(request, Contribute):
            self.told.setdefault((request.sum.round, request.tries), set()).add(request.told.state)

    def states(self) -> list[str]:
        """What all sites were told in each round, in its last try."""
        last = {number: state for (number, _), state in sorted(self.told.items())}
        assert all(len(state) == 1 for state in self.told.values())
        return [state for number in sorted(last) for state in last[number]]

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
        lost = next(iter(self.folders))

        def tamper(step: str, reply: Any) -> Any:
            if step == "update" and reply.site == lost and reply.sum.round == number:
                return Failed(lost, "its upload was cut")
            return reply

        self.channel.tamper = tamper
        return lost

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def histories(self) -> list[str]:
        """For each site that of what it carries after the run."""
        paths = [sorted(self.kept(name).glob("carried/*/history.json"))[-1] for name in self.folders]
        return [json.loads(path.read_text())["history"] for path in paths]


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
    assert masked.states() == ["fresh", *["carried"] * 3]
    assert clear.states() == ["carried"] * 4
    assert len(set(masked.histories())) == 1
    multiples = [event.figures["multiple"] for event in masked.of(RoundDone)]
    assert multiples[0] == 3.5 * 2  # of four sites
    assert multiples[1:] < multiples[:-1]  # it was far too large at first


def sent_bytes(kept: Path) -> int:
    """Bytes of the vector in a file of a site's state, without the facts behind it and their length."""
    content = kept.read_bytes()
    return len(content) - 8 - int.from_bytes(content[-8:], "little")


def test_an_update_is_one_byte_for_each_value_of_its_blocks(masked: Run) -> None:
    layout = load_model(masked.plan).layout
    assert 0 < layout.size < ROTATED
    update = masked.kept(next(iter(masked.folders))) / "update-00004.ring"
    sent = sent_bytes(update)
    assert ROTATED < sent < ROTATED + 100  # and counters
    found = cost(masked.plan, layout.size, layout.size)
    assert found.bytes_up == sent
    assert found.bytes_down == 4 * (layout.size + 1)  # and one scale
    half = cost(masked.plan, 10**8, 10**8).bytes_up
    assert half == pytest.approx(cost(tiny("aggregation.ring_bits=32"), 10**8, 10**8).bytes_up / 4, rel=2e-4)


def test_retries_count_what_was_left_out_once(masked: Run, tmp_path: Path) -> None:
    """The attempt fails after all sites made their updates; the next one sums the same."""
    again = Run(tmp_path, *FOUR_ROUNDS)
    names = list(again.folders)
    again.channel.lose(*((name, "confirm", 1) for name in names[:2]))
    again.go()
    assert len(again.of(AttemptFailed)) == 4
    assert final(again) == final(masked)
    assert again.told == {
        (number, tried): {"fresh" if number == 1 else "carried"}
        for number in (1, 2, 3, 4)
        for tried in (1, 2)
    }
    assert len(set(again.histories())) == 1


# Who begins with what it carries.

ONE_MAY_MISS = [*FOUR_ROUNDS, "run.rounds=5", "aggregation.dropouts=0.25", "aggregation.colluders=0"]


def test_a_site_that_was_absent_misses_the_next_round_and_then_all_begin_with_nothing(tmp_path: Path) -> None:
    party = Run(tmp_path, *ONE_MAY_MISS)
    absent = next(iter(party.folders))
    party.channel.down = lambda site, _step, request: (
        site == absent and not isinstance(request, Join) and request.sum.round == 2
    )
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 3, 3, 4, 4]
    assert party.states() == ["fresh", "carried", "carried", "fresh", "carried"]
    reasons = [(event.round, event.site, event.reason) for event in party.of(SiteFailed)]
    assert [(number, site) for number, site, _ in reasons if number != 2] == [(3, absent)]
    assert "another history" in reasons[-1][2]
    assert len(set(party.histories())) == 1


def test_a_site_that_stays_away_does_not_take_from_the_others_what_they_carry(tmp_path: Path) -> None:
    party = Run(tmp_path, *ONE_MAY_MISS)
    absent = next(iter(party.folders))
    party.channel.down = lambda site, _step, request: (
        site == absent and not isinstance(request, Join) and request.sum.round >= 2
    )
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 3, 3, 3, 3]
    assert party.states() == ["fresh", *["carried"] * 4]


def test_a_round_after_one_whose_upload_was_cut_begins_with_nothing(tmp_path: Path) -> None:
    """The site has trained, and its masked update did not arrive: what it carries is not what it had summed."""
    party = Run(tmp_path, *ONE_MAY_MISS)
    party.cut_upload(3)
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 4, 3, 4, 4]
    assert party.states() == ["fresh", "carried", "carried", "fresh", "carried"]


def test_a_round_after_one_that_was_given_up_begins_with_nothing(tmp_path: Path) -> None:
    party = Run(tmp_path, *ONE_MAY_MISS, "cohort.attempts=2")
    lost = list(party.folders)[:2]
    party.channel.down = lambda site, step, request: (
        site in lost and step == "unmask" and not isinstance(request, Join) and request.sum.round == 2
    )
    party.go()
    assert [event.round for event in party.of(RoundDone)] == [1, 3, 4, 5]
    assert party.told[2, 1] == party.told[2, 2] == {"carried"}
    assert party.states() == ["fresh", "carried", "fresh", "carried", "carried"]


def test_a_process_that_goes_on_tells_the_same(tmp_path: Path) -> None:
    """It is stopped in a round that begins with nothing, and in one that does not."""
    first = Run(tmp_path, *ONE_MAY_MISS)
    first.cut_upload(1)

    def stop(number: int) -> Callable[[Event], None]:
        def stop(event: Event) -> None:
            if isinstance(event, SiteAnswered) and event.round == number:
                raise StoppedError

        return stop

    for party, number in ((first, 2), (second := Run(tmp_path), 3)):
        with pytest.raises(StoppedError):
            party.go(stop(number))
    last = Run(tmp_path)
    last.go()
    assert first.states() == ["fresh", "fresh"]
    assert second.states() == ["fresh", "carried"]
    assert last.states() == ["carried"] * 3


def test_where_a_part_of_the_sites_is_drawn_all_rounds_begin_with_nothing(tmp_path: Path) -> None:
    settings = ["cohort.sites=5", "cohort.fraction=0.8", "aggregation.colluders=0"]
    party = Run(tmp_path, *FOUR_ROUNDS, *settings, "run.rounds=3")
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4] * 3
    assert party.states() == ["fresh"] * 3


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ([], False),
        (["cohort.fraction=0.75"], True),
        (["cohort.sites=12", "aggregation.groups=3"], False),
        (["cohort.sites=12", "aggregation.groups=3", "local.balance=weighted"], True),
    ],
)
def test_where_lists_or_cohorts_are_drawn_sites_of_a_sum_were_told_other_things(
    settings: list[str], drawn: bool
) -> None:
    assert tiny("aggregation.colluders=0", *settings).drawn == drawn


def test_a_site_that_lies_about_its_history_only_loses_what_is_carried(tmp_path: Path) -> None:
    """It is a dropout, and the next round begins with nothing."""
    party = Run(tmp_path, *ONE_MAY_MISS)
    liar = next(iter(party.folders))

    def before(name: str, request: Request) -> None:
        party._note(name, request)
        if name == liar:
            shutil.rmtree(party.kept(liar) / "carried", ignore_errors=True)

    party.channel.before = before
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 3, 4, 3, 4]
    assert party.states() == ["fresh", "carried", "fresh", "carried", "fresh"]


def test_a_site_whose_residual_is_damaged_misses_one_round_and_then_all_begin_anew(tmp_path: Path) -> None:
    party = Run(tmp_path, *ONE_MAY_MISS)
    name = next(iter(party.folders))

    def before(site: str, request: Request) -> None:
        party._note(site, request)
        path = party.kept(name) / "carried" / "00002" / "residual"
        if site == name and path.exists():
            path.write_bytes(bytes(path.stat().st_size))

    party.channel.before = before
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 4, 3, 4, 4]
    assert party.states() == ["fresh", "carried", "carried", "fresh", "carried"]


def test_sites_of_another_history_leave_no_sum_below_the_smallest_part(tmp_path: Path) -> None:
    """Two of four carry something else: the rest are fewer than a quorum, so nothing is opened, no site trains, and the
    two are named; the run goes on, though a round that is lost after shares were asked for would end it."""
    party = Run(tmp_path, *ONE_MAY_MISS, "run.rounds=3", "cohort.attempts=1")
    assert party.plan.threshold().smallest_part == 3
    lost = list(party.folders)[:2]

    def before(name: str, request: Request) -> None:
        party._note(name, request)
        if name in lost and not isinstance(request, Join) and request.sum.round == 2:
            shutil.rmtree(party.kept(name) / "carried", ignore_errors=True)

    party.channel.before = before
    party.go()
    assert [event.round for event in party.of(RoundDone)] == [1, 3]
    assert [(event.round, event.apart) for event in party.of(RoundAbandoned)] == [(2, True)]
    assert {(event.round, event.site) for event in party.of(SiteFailed)} == {(2, name) for name in lost}
    assert {number for number, _ in party.told} == {1, 3}
    assert party.states() == ["fresh", "fresh"]


# Stops


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
    before, kept = checkpoints.load(3).features, checkpoints.load(4).features
    assert float(kept["compression/multiple"][0]) == masked.of(RoundDone)[-1].figures["multiple"]
    assert kept["compression/bounds"].tolist() != before["compression/bounds"].tolist()


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
    with raises(StaleError, "instructions"):
        attack.sites[1].contribute(request)
    attack.contribute(attack.sites[0], inboxes["site-000"])
    # Or the attempt itself is another one for this site: nothing that it signs is taken, and no masks are agreed.
    second = Attack(federation, attempt=2)
    digest = instructions_digest(federation.told(scales=other))
    begun = SecureCoordinator(second.coordinator.contract, 1, 2, digest)
    reply: Any = second.agree(second.sites[1], begun.begin)
    with raises(StaleError, "message of site-001"):
        second.coordinator.advertised(reply)


def test_a_round_has_one_update_of_one_list_of_scales(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*EIGHT_BITS, "aggregation.secure=false"))
    site = federation.joined()
    site.contribute(federation.request())
    with raises(StaleError, "update of round 1", says="instructions"):
        site.contribute(federation.request(scales=doubled(federation.scales()), tries=2))


@pytest.mark.parametrize("what", ["none", "beyond", "zero", "short"])
def test_scales_that_the_plan_does_not_allow_are_refused_before_training(tmp_path: Path, what: str) -> None:
    federation = Federation(tmp_path, tiny(*EIGHT_BITS, *RECORD))
    site, scales = federation.joined(), federation.scales()
    beyond = np.full(len(scales) // 4, 1.01, np.float32).tobytes()
    told = {"none": b"", "beyond": beyond, "zero": bytes(len(scales)), "short": scales[:-1]}[what]
    with raises(UpdateError, "scales", "scales[0]"):
        site.contribute(federation.request(scales=told))
    assert not list(federation.folder.rglob("update-*"))
    assert federation.entries() == ()  # and before the charge


def test_scales_are_only_for_compressed_updates(federation: Federation, tmp_path: Path) -> None:
    plain = Federation(tmp_path, tiny("aggregation.secure=false"))
    site, scales = plain.joined(), federation.scales()
    for request in (plain.request(scales=scales), plain.request(scales=scales, purpose=EVALUATE)):
        with raises(UpdateError, "instructions of features"):
            site.contribute(request)


def test_a_private_update_is_noised_before_it_is_compressed(tmp_path: Path) -> None:
    """Unit `record`: what is coded has its noise, so bounds follow from the mean alone; it is charged as ever."""
    party = Run(tmp_path, *CLEAR, *RECORD, "run.rounds=2")
    outcome = party.go()
    assert outcome.epsilon is not None
    assert ["clipped" in event.figures for event in party.of(RoundDone)] == [False] * 2
    assert {event.figures["multiple"] for event in party.of(RoundDone)} == {3.5 * 2}
