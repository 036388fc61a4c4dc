"""Complaints of a run: who lied for certain, and who may have."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.server.sum.complaints import liars, suspects

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


@given(run=runs())
@settings(max_examples=300, deadline=None)
def test_without_the_suspects_there_is_no_complaint(run: tuple[set[str], set[tuple[str, str]]]) -> None:
    _, complaints = run
    doubted = suspects(complaints, SITES)
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


def test_of_two_the_accused_is_doubted() -> None:
    assert suspects({("a", "b")}, SITES) == {"b"}
    assert suspects({("a", "b")}, "ac") == set()
