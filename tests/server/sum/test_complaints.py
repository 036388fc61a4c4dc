"""Complaints of a run: who lied for certain, and who may have."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.soundness import parse
from cloister.server.sum.complaints import involved, liars, suspects
from cloister.server.sum.sum import _sums_before

SITES = tuple("abcdefgh")


@st.composite
def runs(draw: st.DrawFn) -> tuple[set[str], set[tuple[str, str]]]:
    """The sites that lie, at most three of eight, and complaints of which each has a liar in it."""
    lying = draw(st.sets(st.sampled_from(SITES), max_size=3))
    possible = [pair for pair in itertools.permutations(SITES, 2) if lying.intersection(pair)]
    return lying, draw(st.sets(st.sampled_from(possible))) if possible else set()


@given(run=runs())
@settings(max_examples=300, deadline=None)
def test_no_honest_site_is_called_a_liar(run: tuple[set[str], set[tuple[str, str]]]) -> None:
    lying, complaints = run
    assert lying.issuperset(liars(complaints, SITES, len(lying)))


@given(
    run=runs(),
    present=st.sets(st.sampled_from(SITES)),
    turn=st.integers(0, 9),
    least=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_without_the_suspects_there_is_no_complaint(
    run: tuple[set[str], set[tuple[str, str]]], present: set[str], turn: int, least: int
) -> None:
    _, complaints = run
    doubted = suspects(complaints, SITES, present, turn=turn, least=least)
    complaints = {pair for pair in complaints if set(pair) <= present}
    assert all(doubted.intersection(pair) for pair in complaints)
    assert not doubted.difference(itertools.chain.from_iterable(complaints))


def test_more_than_a_others_prove_it_in_either_direction() -> None:
    of = {(site, "a") for site in "bcd"}
    by = {("a", site) for site in "bcd"}
    assert liars(of, SITES, 3) == liars(by, SITES, 3) == {}
    assert liars(of, SITES, 2) == {"a": "3 sites could not open the shares that it sent them"}
    assert liars(by, SITES, 2) == {"a": "it complained of the shares of 3 sites"}


def test_a_pair_counts_once_and_only_in_its_cohort() -> None:
    both = {("a", "b"), ("b", "a"), ("a", "c")}
    assert set(liars(both, SITES, 1)) == {"a"}
    assert liars(both, "ab", 1) == {}
    assert liars({("a", "b"), ("b", "a")}, SITES, 0) == {}


def test_two_bad_senders_do_not_make_liars_of_those_who_complain_of_both() -> None:
    complaints = {(by, of) for by in "cdefgh" for of in "ab"}
    assert set(liars(complaints, SITES, 1)) == {"a", "b"}


@given(run=runs(), present=st.sets(st.sampled_from(SITES)))
@settings(max_examples=300, deadline=None)
def test_each_honest_site_has_a_turn_in_which_it_stays(
    run: tuple[set[str], set[tuple[str, str]]], present: set[str]
) -> None:
    """Whoever is absent: a liar that is absent in some rounds must not take the turn of another site."""
    lying, complaints = run
    turns = sorted({site for pair in complaints for site in pair})
    for turn, site in enumerate(turns):
        if site in present - lying:
            assert site not in suspects(complaints, SITES, present, turn=turn, least=0)


@pytest.mark.parametrize(
    "complaints",
    [
        {("h", "a")},
        {("h", "a"), ("a", "h")},
        {("h", "a"), ("a", "g")},
        {("h", "a"), ("g", "a")},
        {("h", "a"), ("b", "g"), ("c", "g")},
    ],
    ids=["one", "mutual", "of another", "two", "two, and shares that two others cannot open"],
)
def test_liars_do_not_keep_a_site_out_of_all_sums(complaints: set[tuple[str, str]]) -> None:
    """The liars are h and g: a stays in the turn of its own, and then no honest site is left out."""
    turns = len({site for pair in complaints for site in pair})
    doubted = [suspects(complaints, SITES, SITES, turn=turn, least=6) for turn in range(turns)]
    assert any(left_out <= {"g", "h"} for left_out in doubted)
    if len(set(map(frozenset, complaints))) == 1:
        assert sorted(map(sorted, doubted)) == [["a"], ["h"]]


def test_turns_count_the_sums_in_which_the_same_sites_are_in_complaints() -> None:
    """Where cohorts are drawn, a sum with one more site in complaints must not take a turn of the others."""
    names = tuple(f"site-{number:02d}" for number in range(16))
    plan = parse("", ["cohort.sites=16", "cohort.fraction=0.6", "run.rounds=40", "server.evaluation=none"])
    draw, honest = draw_of(plan, TRAIN), names[0]
    complaints = {(names[1], honest), (names[2], honest)}
    party: Any = SimpleNamespace(
        plan=plan, complaints=complaints, left_out={}, groups=lambda _, number: draw.divided(names, number)
    )
    turns: dict[frozenset[str], list[int]] = {}
    for number in range(1, plan.run.rounds + 1):
        (cohort,) = party.groups(TRAIN, number)
        if doubted := involved(complaints, cohort):
            wanted: Any = SimpleNamespace(purpose=TRAIN, round=number)
            turns.setdefault(frozenset(doubted), []).append(_sums_before(party, wanted, doubted))
    assert len(turns) == 3
    for counted in turns.values():
        assert counted == list(range(len(counted))), "each site of them has every turn"


def test_no_site_stays_if_too_few_others_were_left_with_it() -> None:
    complaints = {(by, "h") for by in "abc"}
    assert suspects(complaints, SITES, SITES, turn=3, least=5) == set("abc")
    assert suspects(complaints, SITES, SITES, turn=3, least=6) == {"h"}


def test_of_two_the_accused_is_doubted_if_it_is_not_the_turn_of_either() -> None:
    complaints = {("a", "b"), ("c", "d")}
    assert suspects(complaints, SITES, "abc", turn=3, least=0) == {"b"}
    assert suspects({("a", "b")}, SITES, "ac", turn=0, least=0) == set()
