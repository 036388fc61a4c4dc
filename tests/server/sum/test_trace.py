"""A site that spoils sums is found by the groups of later rounds, and no honest site is."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.features.feature import Given, Summed
from cloister.aggregation.features.registry import Coordinated
from cloister.aggregation.secure.sketches import Sketches
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT, weighted
from cloister.clients.state.kept import Kept
from cloister.privacy.ledger.policy import Policy
from cloister.protocol.errors import (
    PlanError,
    PolicyError,
    QuorumError,
    SpoiledError,
    StaleError,
    UpdateError,
)
from cloister.protocol.messages.cohort import Draw, draw_of
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Agree, Begin, Join, Purpose, Request
from cloister.protocol.plan.soundness import parse
from cloister.server.display import describe
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import run_history
from cloister.server.record.journal import Entry, Journal
from cloister.server.record.progress import RoundAbandoned, RoundDone, RoundStarted, SiteFailed, Traced
from cloister.server.run import run
from cloister.server.sum import sum as sum_module
from cloister.server.sum import trace
from cloister.server.sum.party import Party
from cloister.server.sum.trace import liars, most_liars
from cloister.tests.aggregation.features.test_norm_bound import BOUNDED, Liar, of
from cloister.tests.parties.federation import Federation, tiny
from cloister.tests.tools.raises import raises

NINE = [
    "cohort.sites=9",
    "cohort.quorum=0.6",
    "aggregation.dropouts=0.3",
    "aggregation.colluders=0.0",
    "aggregation.trace_groups=3",
    "server.evaluation=none",
    "data.held_out=0.0",
    "local.steps=1",
]

# Which sites explain sums.

ROOT = Path(__file__).resolve().parents[3]
SITES = [f"site-{number:02d}" for number in range(24)]


@given(
    most=st.integers(1, 3),
    groups=st.integers(2, 6),
    lying=st.sets(st.sampled_from(SITES), min_size=1, max_size=3),
    chosen=st.lists(st.integers(0, 100), max_size=12),
)
def test_no_honest_site_is_named_whichever_groups_the_liars_spoil(
    most: int, groups: int, lying: set[str], chosen: list[int]
) -> None:
    """In each round the liars choose which of their groups they spoil."""
    lying = set(sorted(lying)[:most])
    draw = Draw(1, TRAIN, len(SITES), groups=groups)
    spoiled: list[tuple[str, ...]] = []
    for number, choice in enumerate(chosen):
        divided = [group for group in draw.divided(SITES, number) if lying.intersection(group)]
        spoiled.append(divided[choice % len(divided)])
    assert lying.issuperset(liars(spoiled, most))


def test_with_more_liars_than_assumed_an_honest_site_can_be_named() -> None:
    """So the number that is assumed matters: two that take turns, where one is assumed."""
    spoiled = [{"a", "x", "y"}, {"b", "x", "z"}]
    assert liars(spoiled, 1) == ("x",)
    assert liars(spoiled, 2) == ()
    assert liars([*spoiled, {"a", "b"}], 1) == (), "nobody explains all: more lie, and nobody is named"


def rounds_until_named(sites: int, groups: int, most: int, lying: int, seed: int) -> int:
    """Each group of a liar is spoiled in each round."""
    names = [f"site-{number:03d}" for number in range(sites)]
    draw, liar = Draw(seed, TRAIN, sites, groups=groups), set(names[:lying])
    spoiled, named = [tuple(names)], set[str]()
    for number in range(1, 41):
        left = [group for group in draw.divided(names, number) if (liar - named).intersection(group)]
        spoiled = [group for group in [*spoiled, *left] if named.isdisjoint(group)]
        found = liars(spoiled, most - len(named))
        named |= set(found)
        assert liar >= named
        if named == liar:
            return number
    raise AssertionError("not named in 40 rounds")


@pytest.mark.parametrize(
    ("sites", "groups", "most", "lying"),
    [(9, 3, 1, 1), (20, 4, 1, 1), (20, 4, 2, 1), (20, 4, 2, 2), (100, 4, 1, 1), (100, 4, 2, 1)],
)
def test_liars_that_go_on_are_named_as_soon_as_the_page_says(
    sites: int, groups: int, most: int, lying: int
) -> None:
    rounds = [rounds_until_named(sites, groups, most, lying, seed) for seed in range(20)]
    row = f"| {sites} | {groups} | {most} | {lying} | {statistics.median(rounds):g} | {max(rounds)} |"
    assert row in (ROOT / "docs" / "poisoning.md").read_text(encoding="utf-8")


def test_a_search_that_is_too_long_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = [{"a", "b", "x"}, {"a", "b", "y"}, {"a", "c", "x"}, {"a", "c", "z"}]
    assert liars(spoiled, 1) == ("a",)
    monkeypatch.setattr(trace, "_MOST_WORK", 1)
    assert liars(spoiled, 1) == ()


def test_a_thousand_sites_take_no_long_search() -> None:
    names = [f"site-{number:04d}" for number in range(1000)]
    draw = Draw(3, TRAIN, 1000, groups=28)
    spoiled = [group for number in range(8) for group in draw.divided(names, number) if names[7] in group]
    assert liars(spoiled, 100) == (), "a hundred other sites explain eight groups"
    assert liars(spoiled, 1) == (names[7],)


def test_the_mean_of_groups_is_that_of_their_sites() -> None:
    means = [np.full(5, value, np.float32) for value in (1.0, 2.0, 4.0)]
    assert weighted(means, [3, 3, 2]).tolist() == [2.125] * 5
    alone = np.arange(3, dtype=np.float32)
    assert weighted([alone], [7]) is alone


def test_groups_count_by_the_weights_of_their_sites() -> None:
    plan = tiny(*BOUNDED, *NINE)
    features = Coordinated(Sums(plan, 20_000), Given())
    sums = [Summed(1, group, (), {WEIGHT: weight}, (), {}, (1,)) for group, weight in enumerate((3, 1))]
    means = [np.full(4, value, np.float32) for value in (1.0, 5.0)]
    assert features.combine(means, sums).tolist() == [2.0] * 4
    assert not features.enough(0, 3)
    assert features.enough(1, 3)


@pytest.mark.parametrize(("colluders", "most"), [(0.0, 1), (0.1, 2), (0.2, 4)])
def test_as_many_sites_may_lie_as_may_collude(colluders: float, most: int) -> None:
    assert most_liars(parse("", ["cohort.sites=20", f"aggregation.colluders={colluders}"])) == most


# Whole runs, with real sites.


def federation(path: Path, *settings: str) -> Federation:
    return Federation(path / "federation", tiny(*BOUNDED, *NINE, "run.rounds=7", *settings))


def go(federation: Federation, path: Path) -> list[object]:
    events: list[object] = []
    with RunFolder.create(path / "run", federation.plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
    return events


class EndedError(Exception):
    """The coordinator is killed."""


def stop_at(federation: Federation, last: str, step: str, number: int) -> None:
    """Kill the coordinator before it asks a site for a step of a round."""

    def before(site: str, request: Request) -> None:
        at = isinstance(request, Agree) and (request.told.STEP.label, request.sum.round) == (step, number)
        if at and site == last:
            raise EndedError

    federation.channel.before = before


def test_a_site_that_sketches_another_vector_is_found_and_only_its_groups_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = federation(tmp_path, "cohort.attempts=1")
    liar = Liar(monkeypatch, lying, 1, honest=False)
    events = go(lying, tmp_path)
    assert [event.round for event in of(events, RoundAbandoned)] == [1], "the first round is lost"
    traced = of(events, Traced)
    assert [event.round for event in traced] == list(range(2, len(traced) + 2))
    assert all(liar.name in event.common and event.groups == 3 for event in traced)
    assert [len(event.common) for event in traced] == sorted(
        (len(each.common) for each in traced), reverse=True
    )
    last = traced[-1].round
    done = {event.round: event.sites for event in of(events, RoundDone)}
    assert last <= 5
    assert done == {number: 6 if number <= last else 8 for number in range(2, 8)}
    out = [event.site for event in of(events, SiteFailed) if "left out of all later sums" in event.reason]
    assert out == [liar.name]
    lines = [describe(event) for event in traced]
    assert lines[0].startswith(
        "round 2: in 3 groups, because of a sum that no honest sites can have; if one site"
    )
    sizes = {event.round: len(event.cohort) for event in of(events, RoundStarted)}
    assert sizes == {number: 3 if 2 <= number <= last else 9 - (number > last) for number in range(1, 8)}


def test_a_group_with_too_few_sites_is_lost_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest site is away in a divided round. A whole cohort would miss it less."""
    lying = federation(tmp_path, "run.rounds=3", "cohort.attempts=2")
    liar = Liar(monkeypatch, lying, 1, honest=False)
    away = lying.names[0]
    lying.channel.down = lambda site, _step, request: site == away and about(request) == 2
    events = go(lying, tmp_path)
    together = any({away, liar.name} <= set(group) for group in divided_in(lying, 2))
    done = {event.round: event.sites for event in of(events, RoundDone)}
    assert done[2] == (6 if together else 3)
    assert [event.round for event in of(events, RoundAbandoned)] == [1]


def about(request: Request) -> int:
    """The round of a request; 0 for one that has none."""
    return 0 if isinstance(request, Join) else request.sum.round


def divided_in(federation: Federation, number: int) -> tuple[tuple[str, ...], ...]:
    return draw_of(federation.plan, TRAIN, "trace").divided(federation.names, number)


def test_a_divided_round_without_any_site_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a whole one: nothing was asked of anybody."""
    lying = federation(tmp_path, "run.rounds=3", "cohort.attempts=1")
    Liar(monkeypatch, lying, 1, honest=False)
    lying.channel.down = lambda _site, _step, request: about(request) == 3
    with pytest.raises(QuorumError):
        go(lying, tmp_path)
    lying.channel.down = lambda _site, _step, _request: False
    events: list[object] = []
    with RunFolder.reopen(tmp_path / "run") as folder:
        run(folder, lying.channel, events.append, roster=lying.roster)
    assert [event.round for event in of(events, RoundDone)] == [3]


def test_a_second_liar_is_named_only_if_two_are_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is one of those that may lie."""
    names = federation(tmp_path).names
    for most, named in ((1, {names[8]}), (2, {names[7], names[8]})):
        party, rounds = Journalled(names), [(1, names), (2, names[6:]), (3, (names[0], names[5], names[8]))]
        monkeypatch.setattr(trace, "most_liars", lambda _plan, most=most: most)
        rounds += [(4, (names[1], names[4], names[8])), (5, (names[2], names[3], names[8]))]
        rounds += [(6, names[5:8]), (7, (names[0], names[1], names[7])), (8, (names[2], names[3], names[7]))]
        for number, sites in rounds:
            party.spoil(number, sites)
            trace.leave_out(cast(Party, party), number)
        assert set(party.left_out) == named


class Journalled:
    """A party, as tracing sees it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.plan, self.left_out, self.journal = parse("", ["cohort.sites=9"]), dict[str, str](), self
        self.entries: list[Entry] = []

    def spoil(self, number: int, sites: Sequence[str]) -> None:
        self.entries.append(Entry(number, 1, "train spoiled", {"sites": list(sites)}))

    def of(self, _step: str) -> list[Entry]:
        return self.entries

    def record(self, *_entry: object) -> None:
        """Nothing: `left_out` has it."""

    def observe(self, _event: object) -> None:
        """Nothing."""


def spoil_round_1(monkeypatch: pytest.MonkeyPatch, federation: Federation) -> None:
    """The sums of round 1 do not fit their sketches."""
    lies = [True]

    def before(_site: str, request: Request) -> None:
        lies[0] = about(request) == 1

    federation.channel.before = before
    monkeypatch.setattr(Sketches, "check_sum", lambda *_: refuse(*_) if lies[0] else None)


def test_rounds_are_whole_again_after_some_that_are_not_spoiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = federation(tmp_path, "run.rounds=8")
    spoil_round_1(monkeypatch, lying)
    events = go(lying, tmp_path)
    assert [event.round for event in of(events, Traced)] == [2, 3, 4, 5]
    assert [event.sites for event in of(events, RoundDone)] == [9] * 7


def test_a_round_whose_groups_are_all_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sites lie than are assumed: one in each group, in each round."""
    lying = federation(tmp_path, "cohort.attempts=2", "run.rounds=7")
    monkeypatch.setattr(Sketches, "check_sum", refuse)
    with raises(SpoiledError, "round 3"):
        go(lying, tmp_path)


def test_a_spoiled_round_in_which_a_site_is_named_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rounds are without that site."""
    lying = federation(tmp_path, "cohort.attempts=2", "run.rounds=7")
    monkeypatch.setattr(Sketches, "check_sum", refuse)

    def named(party: Party, number: int) -> None:
        if number == 2:
            party.left_out[lying.names[0]] = "named"

    monkeypatch.setattr(trace, "leave_out", named)
    with raises(SpoiledError, "round 4"):
        go(lying, tmp_path)


def refuse(_sketches: Sketches, *_others: object) -> None:
    raise UpdateError("sum of the updates", expected="another one")


@pytest.mark.parametrize("ended", ["spoiled", "failed"])
def test_a_round_that_is_spoiled_is_not_opened_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """And it stays whole, although it is what later rounds are divided for."""
    lying = federation(tmp_path, "cohort.attempts=1")
    Liar(monkeypatch, lying, 1, honest=False)
    record = Journal.record

    def killed(journal: Journal, number: int, attempt: int, step: str, *detail: Any) -> None:
        record(journal, number, attempt, step, *detail)
        if step == f"train {ended}":
            raise EndedError

    with monkeypatch.context() as once:
        once.setattr(Journal, "record", killed)
        with pytest.raises(EndedError):
            go(lying, tmp_path)
    asked = len(lying.channel.asked)
    events: list[object] = []
    with RunFolder.reopen(tmp_path / "run") as folder:
        run(folder, lying.channel, events.append, roster=lying.roster)
    assert "unmask" not in {step for step, _ in lying.channel.asked[asked : asked + 15]}
    assert [event.round for event in of(events, RoundAbandoned)] == [1]
    assert of(events, RoundAbandoned)[0].spoiled
    assert [event.round for event in of(events, RoundDone)] == [2, 3, 4, 5, 6, 7]
    with RunFolder.reopen(tmp_path / "run") as folder:
        assert list(run_history(folder).left_out) == [lying.names[-1]]


def test_no_site_uses_what_it_carries_after_a_divided_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of a round may have been told different things."""
    few = ["aggregation.ring_bits=8", "aggregation.compression={}", "run.rounds=5"]
    lying = federation(tmp_path, *few)
    spoil_round_1(monkeypatch, lying)
    events = go(lying, tmp_path)
    assert [event.sites for event in of(events, RoundDone)] == [9] * 4
    with RunFolder.reopen(tmp_path / "run") as folder, Journal(folder.journal) as journal:
        assert [journal.of("done", number)[0].detail["behind"] for number in range(2, 6)] == [True] * 4


def test_a_site_that_keeps_its_sketch_costs_its_group_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as those that send theirs are as many as must finish."""
    lying = federation(tmp_path, "run.rounds=2")
    name = lying.names[3]
    lying.channel.down = lambda site, step, request: (
        site == name and step == "confirm" and about(request) == 2
    )

    spoil_round_1(monkeypatch, lying)
    events = go(lying, tmp_path)
    assert [(event.round, event.attempts, event.sites) for event in of(events, RoundDone)] == [(2, 1, 9)]


def test_an_honest_run_has_no_groups(tmp_path: Path) -> None:
    events = go(federation(tmp_path), tmp_path)
    assert [event.sites for event in of(events, RoundDone)] == [9] * 7
    assert not of(events, Traced)


def test_without_groups_that_trace_it_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying = federation(tmp_path, "aggregation.trace_groups=1", "cohort.attempts=2")
    Liar(monkeypatch, lying, 1, honest=False)
    with raises(SpoiledError, "round 2"):
        go(lying, tmp_path)


@pytest.mark.parametrize("begun", ["advertise", "unmask"])
def test_a_coordinator_that_is_killed_in_a_divided_round_goes_on_with_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    lying = federation(tmp_path)
    liar = Liar(monkeypatch, lying, 1, honest=False)

    stop_at(lying, liar.name, begun, 3)
    with pytest.raises(EndedError):
        go(lying, tmp_path)
    lying.channel.before = lambda _site, _request: None
    events: list[object] = []
    with RunFolder.reopen(tmp_path / "run") as folder:
        run(folder, lying.channel, events.append, roster=lying.roster)
    assert not of(events, RoundAbandoned)
    assert {event.sites for event in of(events, RoundDone)} == {6, 8}
    assert [event.round for event in of(events, RoundDone)] == [3, 4, 5, 6, 7]


# What a coordinator that lies can ask for.


@pytest.mark.parametrize(("lost", "guarded"), [("confirm", True), ("unmask", True), ("confirm", False)])
def test_an_update_of_the_whole_cohort_is_in_no_sum_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, guarded: bool
) -> None:
    """The first attempt at a round is over all; then the coordinator divides the same round."""
    lying = federation(tmp_path, "run.rounds=1")
    stop_at(lying, lying.names[-1], lost, 1)
    with pytest.raises(EndedError):
        go(lying, tmp_path)
    lying.channel.before = lambda _site, _request: None
    monkeypatch.setattr(Party, "division", lambda *_: "trace")
    begin, made = sum_module._begin, Kept.made
    monkeypatch.setattr(sum_module, "_begun", lambda *_: None)
    monkeypatch.setattr(
        sum_module, "_begin", lambda party, wanted, told, _, able: begin(party, wanted, told, None, able)
    )
    if not guarded:  # removes the guard
        monkeypatch.setattr(Kept, "made", lambda kept, about, _, *shape: made(kept, about, {}, *shape))
    events: list[object] = []
    with RunFolder.reopen(tmp_path / "run") as folder, contextlib.suppress(QuorumError):
        run(folder, lying.channel, events.append, roster=lying.roster)
    assert [event.sites for event in of(events, RoundDone)] == ([] if guarded else [9])


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_a_site_has_no_other_division_than_the_plan(tmp_path: Path, purpose: Purpose) -> None:
    evaluated = ["server.evaluation=sites", "data.held_out=0.2", "server.evaluation_epsilon=1.0"]
    groups = 1 if purpose == TRAIN else 3
    whole = federation(tmp_path, f"aggregation.trace_groups={groups}", *evaluated)
    site = whole.joined(0)
    about = dataclasses.replace(whole.sum_id(purpose=purpose), division="trace")
    with raises(StaleError, "division of round 1"):
        site.agree(Agree(about, Begin(1, 1, bytes(32)), 1))


# The plan.


def test_groups_that_trace_are_secure_sums_of_their_own_which_policies_see() -> None:
    plan = parse("", [*BOUNDED, *NINE, "run.rounds=2"])
    assert plan.summed() == (3, 9)
    assert (plan.quorum(), plan.honest()) == (2, 2), "of groups of three, of which one may drop out"
    assert draw_of(plan, TRAIN).groups == 1
    assert draw_of(plan, TRAIN, "trace").sizes == (3, 3, 3)
    least, more = (Policy(sketches=3, least_cohort=fewest) for fewest in (2, 3))
    least.check(plan, noise=1.0, epsilon=1.0, roster_hash="", cohort=plan.quorum())
    with raises(PolicyError, "fewest sites in a sum"):
        more.check(plan, noise=1.0, epsilon=1.0, roster_hash="", cohort=plan.quorum())


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("aggregation.trace_groups", ["aggregation.trace_groups=4"]),  # groups of two sites
        ("aggregation.trace_groups", ["aggregation.trace_groups=10"]),
        ("aggregation.trace_groups", ["aggregation.colluders=0.4"]),
        ("aggregation.trace_groups", ["aggregation.secure=false"]),
        ("aggregation.trace_groups", ["aggregation.groups=3"]),
    ],
)
def test_groups_that_are_no_secure_sums_are_refused(field: str, settings: list[str]) -> None:
    with raises(PlanError, field):
        parse("", [*BOUNDED, *NINE, *settings])
