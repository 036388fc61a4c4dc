"""A site that spoils sums is found by the groups of later rounds, and no honest site is."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.vector.average import weighted
from cloister.clients.state.kept import Kept
from cloister.privacy.ledger.policy import Policy
from cloister.protocol.errors import PlanError, PolicyError, QuorumError, SpoiledError, StaleError
from cloister.protocol.messages.cohort import Draw, draw_of
from cloister.protocol.messages.messages import TRAIN, Agree, Begin, Request
from cloister.protocol.plan.soundness import parse
from cloister.server.display import describe
from cloister.server.record.folder import RunFolder
from cloister.server.record.progress import RoundAbandoned, RoundDone, RoundStarted, SiteFailed, Traced
from cloister.server.run import run
from cloister.server.sum import sum as sum_module
from cloister.server.sum import trace
from cloister.server.sum.party import Party
from cloister.server.sum.trace import liars
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
    draw, liar = Draw(seed, TRAIN, sites, groups=groups), tuple(names[:lying])
    spoiled: list[tuple[str, ...]] = []
    for number in range(1, 41):
        spoiled += [group for group in draw.divided(names, number) if set(liar).intersection(group)]
        found = liars(spoiled, most)
        assert set(liar).issuperset(found)
        if found == liar:
            return number
    raise AssertionError("not named in 40 rounds")


@pytest.mark.parametrize(
    ("sites", "groups", "most", "lying"), [(9, 3, 1, 1), (20, 4, 1, 1), (20, 4, 2, 1), (20, 4, 2, 2)]
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
    monkeypatch.setattr(trace, "_MOST_STEPS", 0)
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


def test_a_site_has_no_other_division_than_the_plan(tmp_path: Path) -> None:
    whole = federation(tmp_path, "aggregation.trace_groups=1")
    site = whole.joined(0)
    about = dataclasses.replace(whole.sum_id(), division="trace")
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
