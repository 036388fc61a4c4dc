"""No choice of a lying coordinator opens less than is promised; without a check the search finds the attack.

`attack_search.py` and `value_search.py` say what is searched, and why that is all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation.secure import secure_sum
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.secure.secure_sum import Contract, answered_digest
from cloister.clients.state.carried import extended
from cloister.protocol.messages.messages import NOTHING_CARRIED, TRAIN, Advertise, Begin, Inbox, Masked, Peers
from cloister.protocol.plan.threshold import Parameters, Tolerance
from cloister.tests.aggregation.secure.attack_search import (
    OTHER_MODEL,
    Decisions,
    Story,
    Upload,
    members,
    opened_sums,
    search_attempt,
    search_two_attempts,
    set_of,
    setting,
    smallest_combination,
    subsets,
    tell,
)
from cloister.tests.aggregation.secure.test_secure_site import OfThose, Those
from cloister.tests.aggregation.secure.value_search import Found, Rules, Symbol, Values
from cloister.tests.parties.protocol_parties import MODEL, Parties


@dataclass(frozen=True)
class Fixed(Tolerance):
    """A graph that is not complete, which the real parameters have above 64 sites only."""

    fixed: Parameters

    def parameters(self, sites: int, n: int) -> Parameters:
        return self.fixed


def small_graph(n: int, *, dropouts: int, colluders: int = 0, k: int = 2) -> Tolerance:
    """k neighbours, and t as the real parameters have it: 2 t > k + A."""
    return Fixed(0.0, 0.0, Parameters(n, dropouts, colluders, k, (k + colluders) // 2 + 1))


def without(*checks: str) -> type[SecureSite]:
    """Sites in which these checks are removed."""
    assert all(callable(getattr(SecureSite, check)) for check in checks)
    return type("Without" + "".join(checks), (SecureSite,), dict.fromkeys(checks, lambda *_: None))


RING_4, RING_5 = small_graph(4, dropouts=2), small_graph(5, dropouts=2)
QUARTER, NONE = Tolerance(0.0, 0.25), Tolerance(0.0, 0.0)

HOLDERS = "_check_holders"  # 3f, 4c
ALIKE = "_check_masked_alike"  # 6e
ONE_LIST = "_check_one_list"  # 5d, 6a
REPEAT = "_check_repeat"  # one answer in an attempt
AGREEMENT = "_check_agreement"  # 6b
EXCLUSIVE = "_check_exclusive"  # 6d
EARLIER = "_check_earlier"  # 5c
SIGNATURES = "_check_signatures"  # 3d, 6b, 6e


# What the coordinator computes.

SAME, OTHER = (1, 1, 1), (1, 1, 2)


def test_a_set_of_sites_is_its_bits() -> None:
    assert members(0b1011) == (0, 1, 3)
    assert set_of((0, 1, 3)) == 0b1011
    assert subsets(0b101) == (0b101, 0b001, 0b100, 0)


@pytest.mark.parametrize(
    ("uploads", "b", "s", "expected"),
    [
        # all masks are shared by two uploads: only the sum of all
        ({0: (SAME, 0b110), 1: (SAME, 0b101), 2: (SAME, 0b011)}, 0b111, 0, {0b111}),
        # the b of one of them is not known
        ({0: (SAME, 0b110), 1: (SAME, 0b101), 2: (SAME, 0b011)}, 0b011, 0, set()),
        # 2 has dropped out and its s is known
        ({0: (SAME, 0b110), 1: (SAME, 0b101)}, 0b011, 0b100, {0b011}),
        # 2 has dropped out and its s is not known: it hides both
        ({0: (SAME, 0b110), 1: (SAME, 0b101)}, 0b011, 0, set()),
        # both secrets of 0
        ({0: (SAME, 0b110), 1: (SAME, 0b101), 2: (SAME, 0b011)}, 0b111, 0b001, {0b001, 0b110}),
        # 0 was told that there are no others; they add a mask with it that is in no other upload
        ({0: (SAME, 0), 1: (SAME, 0b101), 2: (SAME, 0b011)}, 0b111, 0, {0b001}),
        # 0 was told of 1 only: the mask of 2 with 0 hides 2, and so 1 and 0
        ({0: (SAME, 0b010), 1: (SAME, 0b101), 2: (SAME, 0b011)}, 0b111, 0, set()),
        # 0 was shown other keys: no mask is shared with it
        ({0: (OTHER, 0b010), 1: (SAME, 0b101), 2: (SAME, 0b010)}, 0b111, 0, set()),
        ({0: (OTHER, 0), 1: (SAME, 0b100), 2: (SAME, 0b010)}, 0b111, 0, {0b001, 0b110}),
    ],
)
def test_the_sums_that_follow_from_uploads_and_secrets(
    uploads: Mapping[int, tuple[tuple[int, ...], int]], b: int, s: int, expected: set[int]
) -> None:
    assert opened_sums({i: Upload(*it) for i, it in uploads.items()}, b, s, 0) == expected


def test_masks_with_colluding_sites_are_known() -> None:
    assert opened_sums({0: Upload(SAME, 0b100), 1: Upload(SAME, 0b100)}, 0b011, 0, 0b100) == {0b01, 0b10}


@pytest.mark.parametrize(
    ("sums", "below", "expected"),
    [
        (set(), 3, None),
        ({0b111}, 3, None),
        ({0b111}, 4, 0b111),
        ({0b0011, 0b1100}, 2, None),
        ({0b111, 0b011}, 2, 0b100),  # a difference
        ({0b0111, 0b1110}, 2, None),
        ({0b0111, 0b1110}, 3, 0b1001),
        ({0b011, 0b110, 0b101}, 2, 0b001),  # half of one sum and another less the third
    ],
)
def test_the_fewest_updates_in_a_combination(sums: set[int], below: int, expected: int | None) -> None:
    assert smallest_combination(frozenset(sums), below) == expected


def test_shares_made_under_other_keys_are_not_opened() -> None:
    """The search counts on it: a ciphertext from a site that was shown other keys is as good as a damaged one."""
    parties = Parties(4)
    peers = parties.advertise()
    fewer = dataclasses.replace(peers, advertised=peers.advertised[:3])
    replies = {name: parties.sites[name].share(peers) for name in parties.names[1:3]}
    site, own = parties.sites["site-000"], "site-000"
    site.share(Peers(fewer.context, fewer.advertised))
    sealed = tuple((name, dict(reply.sealed)[own]) for name, reply in replies.items())
    hashes = tuple(
        (name, *next(it[1:] for it in reply.hashes if it[0] == own)) for name, reply in replies.items()
    )
    statement = parties.mask(own, Inbox(peers.context, parties.names[:3], sealed, hashes))
    assert isinstance(statement, Masked)
    assert statement.complaints == parties.names[1:3]


# All checks are in place.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "colluders", "tolerance", "covered", "opening"),
    [(4, 1, QUARTER, 30_000, 150), (5, 2, QUARTER, 80_000, 250), (5, 0, RING_5, 10**8, 1)],
    ids=["4 sites, one colludes", "5 sites, two collude", "ring of 5"],
)
def test_no_attempt_opens_less_than_promised(
    n: int, colluders: int, tolerance: Tolerance, covered: int, opening: int
) -> None:
    outcome = search_attempt(Decisions(setting(SecureSite, n, colluders, tolerance)))
    assert not outcome.attack, outcome.attack
    assert outcome.covered >= covered
    assert outcome.played >= outcome.opening >= opening


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "colluders", "tolerance", "models", "opening"),
    [
        (4, 1, QUARTER, (MODEL, OTHER_MODEL), 200),
        (4, 0, NONE, (MODEL,), 150),
        (4, 0, RING_4, (MODEL, OTHER_MODEL), 1),
    ],
    ids=["4 sites, one colludes", "4 sites", "ring of 4"],
)
def test_no_two_attempts_at_one_round_open_less_than_promised(
    n: int, colluders: int, tolerance: Tolerance, models: tuple[bytes, ...], opening: int
) -> None:
    """The second attempt has the model of the first or another one."""
    sites = setting(SecureSite, n, colluders, tolerance)
    first = Decisions(sites)
    for model in models:
        outcome = search_two_attempts(first, Decisions(sites, 2, model))
        assert not outcome.attack, outcome.attack
        assert outcome.played >= outcome.opening >= opening


# One check is removed, or two that stand for one another.


@pytest.mark.parametrize(
    ("removed", "n", "colluders", "tolerance", "expected"),
    [
        ((HOLDERS, ALIKE), 4, 0, RING_4, "updates of the sites (3,) alone"),
        ((AGREEMENT,), 4, 0, RING_4, "alone is open"),
        ((SIGNATURES,), 5, 0, RING_5, "alone is open"),
        ((EXCLUSIVE,), 4, 1, QUARTER, "both secrets"),
        ((ONE_LIST,), 5, 0, RING_5, "alone is open"),
        ((ONE_LIST, REPEAT), 4, 1, QUARTER, "both secrets"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_an_attack_is_found_where_a_check_is_removed(
    removed: tuple[str, ...], n: int, colluders: int, tolerance: Tolerance, expected: str
) -> None:
    outcome = search_attempt(Decisions(setting(without(*removed), n, colluders, tolerance)))
    assert expected in outcome.attack
    print(outcome.attack)


@pytest.mark.parametrize(
    ("removed", "tolerance", "colluders"),
    [(HOLDERS, RING_4, 0), (ALIKE, RING_4, 0), (REPEAT, QUARTER, 1)],
    ids=[HOLDERS, ALIKE, REPEAT],
)
def test_some_checks_alone_are_backed_by_others_at_this_size(
    removed: str, tolerance: Tolerance, colluders: int
) -> None:
    """4c and 6e back one another, and the one list (5d, 6a) backs the one answer: without both there is an attack."""
    outcome = search_attempt(Decisions(setting(without(removed), 4, colluders, tolerance)))
    assert not outcome.attack, outcome.attack
    assert outcome.played >= outcome.opening >= 1


class ForgetsTheModel(SecureSite):
    """The mark binds the survivors and not the model."""

    def _check_earlier(self, survivors: tuple[str, ...]) -> None:
        roster = self.contract.roster.hash
        known = {answered_digest(roster, model, survivors) for model in (MODEL, OTHER_MODEL)}
        earlier = self._past.answered
        if earlier is None or earlier.survivors not in known:
            super()._check_earlier(survivors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model", "expected"),
    [
        (without(EARLIER), MODEL, "updates of the sites (2,) alone"),
        (ForgetsTheModel, OTHER_MODEL, "sums of two models"),
    ],
    ids=["no mark", "no model in the mark"],
)
def test_an_attack_is_found_where_the_mark_is_not_checked(
    kind: type[SecureSite], model: bytes, expected: str
) -> None:
    sites = setting(kind, 4, 1, QUARTER)
    outcome = search_two_attempts(Decisions(sites), Decisions(sites, 2, model))
    assert expected in outcome.attack
    print(outcome.attack)


def test_an_attack_is_found_where_the_coordinator_chooses_the_cohort() -> None:
    """Of five sites two may collude; of a cohort of four that is not drawn only one is assumed to, and it has both.

    Sites that draw the cohort themselves cannot be offered one: `test_no_attempt_opens_less_than_promised` has these
    five sites, too.
    """
    sites = setting(SecureSite, 5, 2, QUARTER)
    chosen = Those(0, TRAIN, 4, sites.names[1:])
    offered = dataclasses.replace(sites.contract, draw=chosen, tolerance=OfThose(0.0, 0.25))
    outcome = search_attempt(Decisions(sites, contract=offered))
    assert "both secrets" in outcome.attack
    print(outcome.attack)


# A larger graph is sampled.

SAMPLED = 7
GRAPH = small_graph(SAMPLED, dropouts=4, k=4)


def two_attempts(kind: type[SecureSite]) -> tuple[Decisions, Decisions]:
    """The sites of the sampled graph, in two attempts; they remember what they were asked before."""
    sites = setting(kind, SAMPLED, 0, GRAPH)
    return Decisions(sites), Decisions(sites, 2)


REAL = two_attempts(SecureSite)
WITHOUT_4C_6E = two_attempts(without(HOLDERS, ALIKE))


@dataclass(frozen=True)
class Told:
    """What a coordinator tells the sites in two attempts: up to two stories in each, and who is asked for shares."""

    stories: tuple[tuple[Story, Story], ...]
    second: tuple[int, ...]
    asked: tuple[int, ...]


def of(n: int) -> st.SearchStrategy[Told]:
    """What n sites may be told; often all the truth, often one site that its neighbours are missing."""
    every = 2**n - 1
    neighbours = REAL[0].neighbours

    def about(victim: int) -> st.SearchStrategy[Told]:
        some = st.integers(0, every)
        missing = st.sampled_from((0, 1 << victim, neighbours[victim])) | some
        present = missing.map(lambda sites: every & ~sites)
        story = st.builds(Story, present, present, present)
        one_missing = Story(every, every, every & ~(1 << victim))
        pair = st.tuples(st.sampled_from((Story(every, every, every), one_missing)) | story, story)
        second, asked = st.sampled_from((0, 1 << victim)) | some, st.just(every) | some
        return st.builds(Told, st.tuples(pair, pair), st.tuples(second, second), st.tuples(asked, asked))

    return st.integers(0, n - 1).flatmap(about)


def tell_all(attempts: Sequence[Decisions], told: Told) -> tuple[int, str]:
    """How many sums these stories open, and the attack if they are one."""
    before, opened = None, 0
    for decisions, stories, second, asked in zip(
        attempts, told.stories, told.second, told.asked, strict=True
    ):
        chosen = {i: stories[second >> i & 1] for i in range(SAMPLED)}
        before, attack = tell(decisions, chosen, asked, before)
        opened += len(before.sums)
        if attack:
            return opened, attack
    return opened, ""


@pytest.mark.slow
def test_no_sampled_stories_open_less_than_promised() -> None:
    sums: list[int] = []

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(of(SAMPLED))
    def sample(told: Told) -> None:
        opened, attack = tell_all(REAL, told)
        assert not attack, attack
        sums.append(opened)

    sample()
    assert len(sums) >= 100
    assert sum(opened > 0 for opened in sums) >= 10


@pytest.mark.parametrize("victim", range(SAMPLED))
def test_one_of_these_stories_opens_a_site_that_masks_with_few_others(victim: int) -> None:
    every = 2**SAMPLED - 1
    alone = Story(every, every & ~REAL[0].neighbours[victim], every)
    pair = (Story(every, every, every), alone)
    told = Told((pair, pair), (1 << victim, 1 << victim), (every, every))
    _, attack = tell_all(WITHOUT_4C_6E, told)
    assert f"updates of the sites ({victim},) alone" in attack
    assert not tell_all(REAL, told)[1]


# What sites are told and carry.

CARRIED, FRESH, OTHERWISE = Symbol("a"), Symbol("a", "fresh"), Symbol("b")


def values(*symbols: Symbol, rounds: int = 2, **rules: Any) -> Found:
    return Values(Rules(**rules), symbols, rounds).search()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("symbols", "rounds", "states", "sums"),
    [((CARRIED, FRESH, OTHERWISE), 2, 85, 430), ((CARRIED, FRESH), 3, 480, 2000)],
    ids=["two rounds", "three rounds"],
)
def test_all_vectors_of_a_sum_depend_on_the_same(
    symbols: tuple[Symbol, ...], rounds: int, states: int, sums: int
) -> None:
    found = values(*symbols, rounds=rounds)
    assert not found.attack, found.attack
    assert found.states >= states
    assert found.sums >= sums


def test_moments_and_residuals_of_different_rounds_are_found_in_a_sum() -> None:
    """One site makes no update in round 1; in round 2 all are told the same."""
    found = values(CARRIED, kind=without("_check_one_history"))
    assert "round 2" in found.attack
    assert "carries nothing" in found.attack
    print(found.attack)


def test_a_round_that_ends_when_the_next_has_begun_is_found() -> None:
    """An update of round 1 ends when its site has advertised, as all others, that it carries nothing into round 2."""
    found = values(CARRIED, compares=False)
    assert "round 2" in found.attack
    assert "carries nothing" in found.attack
    assert "carries a carried of round 1" in found.attack


def test_histories_that_sites_do_not_sign_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advertise, "body", lambda self: (self.site, self.share_key, self.mask_key))
    found = values(CARRIED)
    assert "round 2" in found.attack
    assert "carries nothing" in found.attack


@pytest.mark.parametrize(
    "extend",
    [
        lambda _history, _told: NOTHING_CARRIED,
        lambda history, _told: bytes([history[0] + 1]) * 32,
        lambda history, told: extended(history, dataclasses.replace(told, model=bytes(32))),
    ],
    ids=["constant", "number of rounds", "without the model"],
)
def test_a_history_that_does_not_name_all_that_state_depends_on_is_found(extend: Any) -> None:
    found = values(CARRIED, OTHERWISE, extend=extend)
    assert "is opened" in found.attack
    print(found.attack)


def test_instructions_for_one_site_are_found_where_no_context_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = secure_sum.context

    def nameless(contract: Contract, begin: Begin, *rest: Any) -> bytes:
        return real(contract, dataclasses.replace(begin, instructions=bytes(32)), *rest)

    monkeypatch.setattr(secure_sum, "context", nameless)
    found = values(FRESH, OTHERWISE, rounds=1)
    assert "is told a fresh" in found.attack
    assert "is told b carried" in found.attack


def test_instructions_for_one_site_are_found_where_it_does_not_compare_them() -> None:
    found = values(CARRIED, OTHERWISE, rounds=1, kind=without("_check_instructions"))
    assert "is told a carried" in found.attack
    assert "is told b carried" in found.attack


def test_a_field_that_is_told_to_one_site_is_found() -> None:
    """As SCAFFOLD's `summed` was: in the request, and in no context."""
    found = values(FRESH, Symbol("a", "fresh", "for one site"), rounds=1)
    assert "is told a fresh for one site" in found.attack


@pytest.mark.parametrize("symbol", [CARRIED, FRESH])
def test_a_vector_that_is_carried_and_is_in_no_history_is_found(symbol: Symbol) -> None:
    """As fragments were: what a site had not sent yet was carried whatever the history said."""
    found = values(symbol, FRESH, carry_more=True)
    assert "round 2" in found.attack
    assert " and a " in found.attack
    print(found.attack)
