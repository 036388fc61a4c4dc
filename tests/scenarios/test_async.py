"""Asynchronous rounds: what is refused, what a round sums, whom it does not wait for, and what a kill costs."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.aggregation.features.balance import NAME as BALANCE
from cloister.aggregation.features.balance import steps_in
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT
from cloister.aggregation.vector.span import manifest_of
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.site import Site
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import load_model
from cloister.lm.training.optimizer import LocalOptimizer
from cloister.protocol.errors import PlanError, QuorumError
from cloister.protocol.messages.messages import Contribute, Contribution, Reply, Request
from cloister.server.door.grid import most_bytes_of
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.journal import MEASURED, Journal
from cloister.server.record.outcome import Outcome
from cloister.server.record.progress import AttemptFailed, Event, RoundDone, SiteAnswered, SiteFailed
from cloister.server.record.report import gather
from cloister.server.run import run
from cloister.server.sum.channel import Failure
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.tests.parties.door_parties import (
    WAIT_S,
    Answering,
    AtDoor,
    Joinable,
    SiteProcesses,
    connected,
    contribute,
    laid_out_sender,
    open_channel,
)
from cloister.tests.parties.federation import TINY, Loopback, tiny, write_records
from cloister.tests.tools.command import done, set_options
from cloister.tests.tools.kills import die_at, kill_while
from cloister.tests.tools.raises import raises

CLEAR = ["aggregation.secure=false", "server.evaluation=none", "local.steps=1", "server.keep_checkpoints=9"]
ASYNC = [*CLEAR, "cohort.mode=async"]


class Run:
    """A run over sites in this process, whose answers arrive in the order that a test says; made, or found again."""

    def __init__(self, path: Path, *settings: str) -> None:
        self.folder = path / "run"
        if not self.folder.exists():
            path.mkdir(parents=True, exist_ok=True)
            plan = tiny(*settings, f"simulation.source={write_records(path / 'records.jsonl')}")
            lay_out(plan, path / "sites")
            RunFolder.create(self.folder, plan).close()
        self.plan = read_plan(self.folder)
        self.layout = load_model(self.plan).layout
        self.names = [site_name(index) for index in range(self.plan.cohort.sites)]
        resident = Resident()
        configs = {name: read_config(path / "sites" / name / "site.toml") for name in self.names}
        self.channel = Loopback({name: partial(Site, config, resident) for name, config in configs.items()})
        self.events: list[Event] = []

    def go(self, observe: Callable[[Event], None] = lambda _event: None) -> Outcome:
        def seen(event: Event) -> None:
            self.events.append(event)
            observe(event)

        with RunFolder.reopen(self.folder) as folder:
            return run(folder, self.channel, seen)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def model(self, number: int) -> Vector:
        """The model after a round."""
        return Checkpoints(self.folder / "checkpoints", self.layout, 9).load(number).weights


NOISY = ["privacy.noise_multiplier=1.0", "aggregation.weighting=uniform"]


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        (
            ["aggregation.secure=true"],
            "aggregation.secure",
            'only valid with cohort.mode = "sync": the coordinator would choose which updates are summed',
        ),
        (
            [*NOISY, "privacy.unit=record", "privacy.sampling_rate=0.1"],
            "privacy.unit",
            "which no charge covers",
        ),
        (
            [*NOISY, "privacy.unit=owner", "privacy.sampling_rate=0.1", "data.owner=p"],
            "privacy.unit",
            "which no charge covers",
        ),
        ([*NOISY, "privacy.unit=site"], "privacy.unit", "which no charge covers"),
        (["cohort.fraction=0.5"], "cohort.fraction", 'only valid with cohort.mode = "sync"'),
        (["cohort.quorum=0.5"], "cohort.quorum", 'only valid with cohort.mode = "sync"'),
        (["cohort.buffer=5"], "cohort.buffer", "at most 4, the number of sites"),
        (["server.evaluation=sites"], "server.evaluation", "wait for the slowest one"),
        (["cohort.mode=sync", "cohort.buffer=2"], "cohort.buffer", 'only valid with cohort.mode = "async"'),
        (
            ["cohort.mode=sync", "cohort.staleness=2"],
            "cohort.staleness",
            'only valid with cohort.mode = "async"',
        ),
    ],
)
def test_what_is_not_sound_or_has_no_effect_is_refused(settings: list[str], field: str, why: str) -> None:
    tiny(*ASYNC)
    with pytest.raises(PlanError) as caught:
        tiny(*ASYNC, *settings)
    assert caught.value.field == field
    assert why in str(caught.value)


@pytest.mark.parametrize("sites", [1, 4])
def test_a_buffer_of_all_sites_is_a_synchronous_round_to_the_last_bit(tmp_path: Path, sites: int) -> None:
    """One site with a buffer of one is the smallest of these."""
    settings = [f"cohort.sites={sites}", "server.optimizer=nesterov", "run.rounds=2"]
    synchronous = Run(tmp_path / "sync", *CLEAR, *settings)
    buffered = Run(tmp_path / "async", *ASYNC, *settings, f"cohort.buffer={sites}")
    buffered.channel.turn = lambda waiting: waiting[-1]
    assert synchronous.go().params_sha256 == buffered.go().params_sha256
    assert [event.figures["mean_staleness"] for event in buffered.of(RoundDone)] == [0, 0]


@pytest.mark.slow
def test_a_mean_weighs_each_update_by_tokens_and_staleness(tmp_path: Path) -> None:
    """Against numpy, from the vectors as they arrived and the models as they were saved. One site is slow: its first
    update is two rounds old, and its second one three."""
    settings = ["run.rounds=7", "cohort.buffer=2", "cohort.staleness=2", "data.packing=false"]
    party = Run(tmp_path, *ASYNC, *settings, "data.sequence_length=64")
    slow, *_ = party.names
    arrived: list[tuple[int, Contribution]] = []

    def turn(waiting: list[str]) -> str:
        return slow if len(arrived) in (4, 13) else next(name for name in waiting if name != slow)

    def keep(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution):
            arrived.append((len(party.of(RoundDone)) + 1, reply))
        return reply

    party.channel.turn, party.channel.tamper = turn, keep
    party.go()
    layout = Sums(party.plan, party.layout.size).training
    every_weight, every_age = set(), set()
    for event in party.of(RoundDone):
        total, weights, ages = np.zeros(layout.size), 0.0, []
        for reply in (reply for number, reply in arrived if number == event.round):
            age = event.round - reply.sum.round
            if age > 2:
                assert (reply.site, event.figures["too_stale"]) == (slow, 1)
                continue
            vector = np.concatenate(reply.spans)
            tokens = layout.ring.decode_counters(vector[layout.size :])[layout.names.index(WEIGHT)]
            coded = vector[: layout.size].view(np.int32) / layout.ring.scale * layout.heaviest
            total += coded / np.sqrt(1 + age)  # it was coded times its tokens
            weights += tokens / np.sqrt(1 + age)
            ages.append(age)
            every_weight.add(tokens)
            every_age.add(age)
        assert len(ages) == 2, "a round has as many updates as the buffer"
        assert (event.figures["mean_staleness"], event.figures["most_staleness"]) == (
            sum(ages) / 2,
            max(ages),
        )
        expected = party.model(event.round - 1) + total / weights
        np.testing.assert_allclose(party.model(event.round), expected, atol=1e-7)
    assert every_age == {0, 1, 2}
    assert len(every_weight) > 1
    assert [event.figures["too_stale"] for event in party.of(RoundDone)] == [0, 0, 0, 0, 0, 0, 1]
    (failed,) = party.of(SiteFailed)
    assert failed.site == slow
    assert "staleness is 3: expected at most 2" in failed.reason


def test_a_buffer_has_at_most_one_update_of_each_site(tmp_path: Path) -> None:
    """One site answers its stale request in every second round, and would answer the next request at once."""
    party = Run(tmp_path, *ASYNC, "cohort.buffer=2", "run.rounds=6")
    eager = party.names[0]

    def turn(waiting: list[str]) -> str:
        stale = len(party.of(RoundDone)) % 2
        return next((name for name in waiting if (name == eager) == stale), waiting[0])

    party.channel.turn = turn
    party.go()
    buffers = [event.figures["staleness"] for event in party.of(RoundDone)]
    assert [buffer.get(eager) for buffer in buffers] == [None, [1]] * 3
    assert all(len(ages) == 1 for buffer in buffers for ages in buffer.values())
    assert [len(buffer) for buffer in buffers] == [2] * 6


class Taken:
    """The steps that sites take, by what they were told; and answers of one site that come late."""

    def __init__(self, party: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists: list[tuple[int, dict[str, int]]] = []
        """Of each training its model's round and the list that came with it."""
        self.of: list[tuple[str, int]] = []
        """Of each training its site and its steps."""
        step = LocalOptimizer.step

        def counted(optimizer: LocalOptimizer, number: float) -> None:
            site, steps = self.of[-1]
            self.of[-1] = site, steps + 1
            step(optimizer, number)

        def asked(site: str, request: Request) -> None:
            if isinstance(request, Contribute):
                told = dict(request.told.features)[BALANCE]
                self.lists.append((request.sum.round, dict(steps_in(told))))
                self.of.append((site, 0))

        monkeypatch.setattr(LocalOptimizer, "step", counted)
        party.channel.before = asked


@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
def test_each_site_takes_its_own_steps_of_the_model_that_it_was_asked_for(
    weighting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site declares less than half of the others' speed, and no round waits for it."""
    profiles = "simulation.profiles=[{share = 0.25, speed = 0.4}]"
    balance = ["local.balance=weighted", "local.steps=4", f"aggregation.weighting={weighting}", profiles]
    party = Run(tmp_path, *ASYNC, *balance, "cohort.buffer=2", "run.rounds=5")
    slow, *fast = party.names
    taken = Taken(party, monkeypatch)
    party.channel.turn = lambda waiting: (
        slow
        if len(party.of(RoundDone)) == 3 and slow in waiting
        else next(name for name in waiting if name != slow)
    )
    assert party.go().rounds == 5
    assert dict(taken.of) == {slow: 2, **dict.fromkeys(fast, 4)}
    assert len(set(taken.of)) == 4, "a site takes the same steps in each round, because its speed is the same"
    stale = [event.figures["staleness"].get(slow) for event in party.of(RoundDone)]
    assert stale == [None, None, None, [3], None], "one of the first model, and no second one in that buffer"
    assert {(event.figures["least_steps"], event.figures["most_steps"]) for event in party.of(RoundDone)} == {
        (2, 4)
    }


DYNAMIC = [
    *ASYNC,
    "local.balance=dynamic",
    "local.steps=4",
    "aggregation.weighting=uniform",
    "cohort.buffer=3",
]


def in_rounds(party: Run, first: str, *rounds: int) -> Callable[[list[str]], str]:
    """The first answer of some rounds is that of one site; all its others come after those of other sites."""
    left = set(rounds)

    def turn(waiting: list[str]) -> str:
        if (number := len(party.of(RoundDone)) + 1) in left and first in waiting:
            left.remove(number)
            return first
        return next((name for name in waiting if name != first), first)

    return turn


def timed(taken: Taken, seconds: Callable[[str], float]) -> Callable[[str, Reply], Reply]:
    """Sites report so many seconds for each step that they took."""

    def tamper(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution):
            return dataclasses.replace(reply, seconds=taken.of[-1][1] * seconds(reply.site))
        return reply

    return tamper


def measured(party: Run) -> list[dict[str, float]]:
    """The speeds of each round in the journal."""
    with Journal(party.folder / "journal.sqlite") as journal:
        return [entry.detail[BALANCE] for entry in journal.entries() if entry.step == MEASURED]


def test_a_speed_is_measured_by_the_list_that_the_update_was_made_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of the round in which a stale update arrives has another number of steps for its site."""
    party = Run(tmp_path, *DYNAMIC, "cohort.staleness=9", "run.rounds=5")
    slow = party.names[0]
    taken = Taken(party, monkeypatch)
    party.channel.turn = in_rounds(party, slow, 1, 5)
    # From round 2 on the others are as slow.
    party.channel.tamper = timed(taken, lambda site: 4.0 if site == slow or party.of(RoundDone) else 1.0)
    party.go()
    told = dict(taken.lists)
    assert [told[number][slow] for number in sorted(told)] == [4, 2, 2, 4, 4]
    assert [steps for site, steps in taken.of if site == slow] == [4, 2], "of the models 1 and 2"
    assert party.of(RoundDone)[4].figures["staleness"][slow] == [3]
    assert [speeds[slow] for speeds in measured(party) if slow in speeds] == [0.25, 0.25]
    assert all(steps == told[site] for (site, steps), (_, told) in zip(taken.of, taken.lists, strict=True))


def test_an_update_that_is_too_stale_tells_that_its_site_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a site whose updates are all too stale would never take fewer steps."""
    party = Run(tmp_path, *DYNAMIC, "cohort.staleness=1", "run.rounds=5")
    slow = party.names[0]
    taken = Taken(party, monkeypatch)
    party.channel.turn = in_rounds(party, slow, 3)
    party.channel.tamper = timed(taken, lambda site: 4.0 if site == slow else 1.0)
    party.go()
    assert [event.figures["too_stale"] for event in party.of(RoundDone)] == [0, 0, 1, 0, 0]
    assert not any(slow in event.figures["staleness"] for event in party.of(RoundDone))
    assert [speeds.get(slow) for speeds in measured(party)] == [None, None, 0.25, None, None]
    told = {number: steps[slow] for number, steps in taken.lists}
    assert told == {1: 4, 2: 4, 3: 4, 4: 2, 5: 2}


def test_a_weight_that_a_site_cannot_have_is_refused(tmp_path: Path) -> None:
    party = Run(tmp_path, *ASYNC, "cohort.buffer=3", "run.rounds=1")
    liar = party.names[0]
    layout = Sums(party.plan, party.layout.size).training

    def lie(step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == liar:
            counters = dict.fromkeys(layout.names, layout.heaviest + 1)
            vector = np.concatenate([reply.spans[0][: layout.size], layout.tail(counters)])
            return dataclasses.replace(reply, manifest=manifest_of([(0, vector)]), spans=(vector,))
        return reply

    party.channel.tamper = lie
    party.go()
    (round_,) = party.of(RoundDone)
    assert sorted(round_.figures["staleness"]) == sorted(set(party.names) - {liar})
    assert "weight is" in party.of(SiteFailed)[0].reason


@pytest.mark.slow
def test_what_is_dropped_in_an_attempt_that_failed_is_counted(tmp_path: Path) -> None:
    """The buffer is one short: of the other three sites one is down until the next attempt."""
    party = Run(tmp_path, *ASYNC, "cohort.buffer=3", "cohort.staleness=0", "run.rounds=2")
    slow, down, *_ = party.names
    party.channel.turn = lambda waiting: (
        waiting[0] if len(party.of(RoundDone)) or waiting == [slow] else waiting[1]
    )
    party.channel.down = lambda site, step, request: (
        step == "update"
        and isinstance(request, Contribute)
        and request.sum.round == 2
        and request.tries == 1
        and site in (slow, down)
    )
    party.go()
    assert [event.figures["too_stale"] for event in party.of(RoundDone)] == [0, 1]
    assert len(party.of(AttemptFailed)) == 1


def test_a_failed_site_is_asked_again_and_too_few_sites_end_the_run(tmp_path: Path) -> None:
    party = Run(tmp_path, *ASYNC, "cohort.buffer=2", "cohort.attempts=2", "run.rounds=4")
    first, second, *others = party.names
    down = {first}
    party.channel.down = lambda site, step, _request: step == "update" and site in down

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            down.clear()
            down.update([second, *others] if event.round == 2 else [])

    with raises(QuorumError, "round 3", says=("2 of 4 sites", "cohort.buffer")):
        party.go(observe)
    rounds = party.of(RoundDone)
    assert len(rounds) == 2
    assert first not in rounds[0].figures["staleness"]
    assert first in rounds[1].figures["staleness"]
    assert len(party.of(AttemptFailed)) == 2
    asked = party.channel.asked[-8:]
    assert asked.count(("update", second)) <= 2, "a site that fails is asked once in an attempt"
    down.clear()
    assert party.go().rounds == 4, "a later process goes on"


def killed(path: Path) -> None:
    Run(path).go(die_at(lambda event: isinstance(event, SiteAnswered) and event.round == 2))


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_round(tmp_path: Path) -> None:
    """With a buffer of all sites the weights are those of a run that was not killed: the updates in the buffer are
    lost, and sites send the ones that they have kept, or train from the same model."""
    settings = [*ASYNC, "cohort.buffer=4"]
    whole = Run(tmp_path / "whole", *settings).go()
    Run(tmp_path / "killed", *settings)
    kill_while(killed, tmp_path / "killed")
    party = Run(tmp_path / "killed")
    assert party.go().params_sha256 == whole.params_sha256
    assert [event.round for event in party.of(RoundDone)] == [2, 3]
    assert len([each for each in party.channel.asked if each[0] == "update"]) == 8, (
        "no update of round 1 again"
    )


@pytest.mark.slow
def test_a_killed_run_with_stale_updates_goes_on(tmp_path: Path) -> None:
    Run(tmp_path / "run", *ASYNC, "cohort.buffer=1", "run.rounds=4")
    kill_while(killed, tmp_path / "run")
    party = Run(tmp_path / "run")
    assert party.go().rounds == 4
    assert [event.round for event in party.of(RoundDone)] == [2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["aggregation.part=0.5", "aggregation.ring_bits=8", "aggregation.compression={}"],
        ["model.adapter.scheme=rolora"],
    ],
    ids=["plain", "compressed sparse", "rolora"],
)
def test_a_round_does_not_wait_for_a_slow_site(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes; the hardware of one site of three is ten times slower. The run says what it has summed."""
    plan = tmp_path / "plan.toml"
    plan.write_text(TINY)
    settings = [
        *(setting for setting in ASYNC if setting != "local.steps=1"),
        "local.steps=4",
        "cohort.sites=3",
        "cohort.buffer=2",
        "run.rounds=6",
        "simulation.profiles=[{share = 0.34, speed = 0.1}]",
        *more,
        f"simulation.source={write_records(tmp_path / 'records.jsonl')}",
    ]
    options = set_options(settings)
    checked = done(capsys, "plan", "check", str(plan), *options)
    assert "updates in a round, asynchronous (FedBuff)" in checked
    out = tmp_path / "out"
    printed = done(capsys, "simulate", str(plan), *options, "--workers", "3", "--out", str(out))
    summed = [row["staleness"] for row in RunFiles(out).metrics() if row["round"]]
    slow, *fast = (site_name(index) for index in range(3))
    assert len(summed) == 6
    assert all(set(fast) == set(each) for each in summed[:2]), "the first rounds end without the slow site"
    assert sum(len(each.get(slow, [])) for each in summed) <= 2
    assert "mean staleness 0.00, greatest staleness 0" in printed
    assert "mean staleness, rounds" in printed
    done(capsys, "export", str(out), str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| updates in a round, asynchronous (FedBuff) | 2 |" in card
    assert "| sites in a round |" not in card
    rows = {row.name: row.rounds for row in gather(out).sites}
    assert rows == {name: sum(name in each for each in summed) for name in (slow, *fast)}


@pytest.mark.slow
def test_a_site_that_is_killed_holds_no_round_at_the_door(tmp_path: Path) -> None:
    """Real sites in processes of their own; one dies when it has trained for round 1, and sends its update later."""
    made = Run(tmp_path / "made", *ASYNC, "cohort.sites=3", "cohort.buffer=2", "run.rounds=3")
    configs = [tmp_path / "made" / "sites" / name / "site.toml" for name in made.names]
    rounds: list[RoundDone] = []
    most_bytes = most_bytes_of(made.plan, made.layout.size)
    with (
        RunFolder.reopen(made.folder) as folder,
        Joinable(configs) as door,
        AtDoor(
            tmp_path,
            door=door.door,
            names=door.names,
            most_bytes=most_bytes,
            run="run",
            sender=laid_out_sender(folder, tmp_path / "made" / "sites"),
        ) as channel,
    ):

        def observe(event: Event) -> None:
            assert not isinstance(event, SiteFailed)
            if isinstance(event, RoundDone):
                rounds.append(event)
                until = time.monotonic() + WAIT_S
                while event.round == 2 and not all(site.received for site in channel.connected()):
                    assert channel.wait_for(4, 0.05) <= 3
                    assert time.monotonic() < until

        processes = SiteProcesses(door.address, configs, {2: [("train", 1, "update")]})
        try:
            assert channel.wait_for(3, WAIT_S) == 3
            run(folder, channel, observe)
        finally:
            channel.close(over=True)
            processes.join()
    assert processes.codes == [[0], [0], [-signal.SIGKILL, 0]]
    summed = [event.figures.get("staleness") for event in rounds]
    assert [sum(map(len, ages.values())) for ages in summed if ages] == [2, 2, 2]
    assert not all(made.names[2] in (ages or ()) for ages in summed)


def test_requests_outlive_others_at_the_door(tmp_path: Path) -> None:
    """A site that works does not keep another one from its next request; each has a deadline of its own."""
    go_on = threading.Event()
    fast, slow = Answering("site-1"), Answering("site-2")
    slow.during = lambda _request: assert_set(go_on)
    model = np.arange(10, dtype=np.float32)
    with (
        open_channel(tmp_path) as channel,
        connected(channel, fast, tmp_path),
        connected(channel, slow, tmp_path),
    ):
        there = zip(channel.nodes(), channel.connected(), strict=True)
        nodes = {site.name: node for node, site in there}
        coming = [{node: contribute(model) for node in nodes.values()}]
        stream = channel.stream(lambda: coming.pop() if coming else {}, WAIT_S, group="1")
        for number in range(1, 4):
            node, reply = next(stream)
            assert isinstance(reply, Contribution)
            assert (node, reply.sum.round) == (nodes["site-1"], number)
            assert (reply.spans[0] == fast.vector).all()
            if number < 3:
                coming.append({node: contribute(model, number + 1)})
        go_on.set()
        node, reply = next(stream)
        assert isinstance(reply, Contribution)
        assert (node, reply.sum.round) == (nodes["site-2"], 1)
        assert next(stream, None) is None


def test_each_request_at_the_door_has_its_own_deadline(tmp_path: Path) -> None:
    """A site that misses one is asked again, and what it was late with is not taken for the next answer."""
    go_on = threading.Event()
    late = Answering("site-1")
    late.during = lambda request: assert_set(go_on) if late.asked[0] is request else None
    model = np.arange(10, dtype=np.float32)
    with open_channel(tmp_path) as channel, connected(channel, late, tmp_path):
        (node,) = channel.nodes()
        coming = [{node: contribute(model)}]
        stream = channel.stream(lambda: coming.pop() if coming else {}, 0.5, group="1")
        _, failure = next(stream)
        assert isinstance(failure, Failure)
        assert "no answer within 0.5 s" in failure.reason
        go_on.set()
        coming.append({node: contribute(model, 2)})
        _, reply = next(stream)
        assert isinstance(reply, Contribution)
        assert reply.sum.round == 2


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
