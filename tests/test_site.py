"""What a site refuses, whatever the coordinator sends: each guard, and the same attack where the guard is out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.aggregation.secure_coordinator import SecureCoordinator
from cloister.aggregation.sums import contract_for, count_of_loss, training_layout
from cloister.clients.site import Site
from cloister.protocol.cohort import draw_of
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import (
    MemberError,
    PinnedError,
    PlanError,
    SecureSumError,
    StaleError,
    TooFewSitesError,
    UpdateError,
)
from cloister.protocol.messages import (
    EVALUATE,
    TRAIN,
    Advertise,
    Agree,
    Begin,
    Confirm,
    Contribution,
    Inbox,
    Purpose,
    Reply,
    Reveal,
    Shares,
    Told,
)
from cloister.protocol.plan import Plan
from cloister.protocol.roster import Roster
from cloister.protocol.soundness import parse
from cloister.tests.federation import RUN, Federation, changed, tiny, whole


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path, tiny())


def in_clear(plan: Plan) -> Plan:
    return changed(plan, "aggregation", secure=False)


def without_guard(federation: Federation) -> Site:
    """The first site, whose people let it take part in sums in clear; it has joined one."""
    state = str(federation.folder / "clear")
    return federation.joined(plan=in_clear(federation.plan), secure=False, state=state, pinned=False)


class Attack:
    """A coordinator that may lie, up to the moment at which sites hold each other's shares.

    Args:
        federation: The sites; each joins the run.
        attempt: The attempt.
        config: Of the sites.
    """

    def __init__(self, federation: Federation, attempt: int = 1, **config: Any) -> None:
        self.federation, plan = federation, federation.plan
        self.sites = [federation.joined(index, **config) for index in range(plan.cohort.sites)]
        layout = federation.layout
        contract = contract_for(TRAIN, plan, federation.roster, RUN, layout.size, layout.digest())
        model = vector_hash(federation.model)
        self.coordinator = SecureCoordinator(contract, 1, attempt, model)

    def agree(self, site: Site, told: Told, **about: Any) -> Reply:
        return site.agree(Agree(self.federation.sum_id(**about), told))

    def contribute(self, site: Site, inbox: Inbox, **about: Any) -> Contribution:
        return site.contribute(self.federation.request(inbox=inbox, **about))

    def deal(self) -> dict[str, Inbox]:
        """The honest steps until each site's shares are there."""
        coordinator = self.coordinator
        for site in self.sites:
            advertised = self.agree(site, coordinator.begin)
            assert isinstance(advertised, Advertise)
            coordinator.advertised(advertised)
        peers = coordinator.peers()
        for site in self.sites:
            shares = self.agree(site, peers)
            assert isinstance(shares, Shares)
            coordinator.shared(shares)
        return coordinator.inboxes()

    def carry_through(self, left_out: tuple[str, ...]) -> None:
        """All steps, with the vectors of some sites left out of the sum."""
        coordinator, inboxes = self.coordinator, self.deal()
        left = [site for site in self.sites if site.name not in left_out]
        for site in self.sites:
            contribution = self.contribute(site, inboxes[site.name])
            if site in left:
                assert contribution.statement is not None
                coordinator.fold(contribution.statement, [(0, whole(contribution))])
        survivors = coordinator.survivors()
        for site in left:
            confirmed = self.agree(site, survivors)
            assert isinstance(confirmed, Confirm)
            coordinator.confirmed(confirmed)
        requests = coordinator.request()
        for site in left:
            revealed = self.agree(site, requests[site.name])
            assert isinstance(revealed, Reveal)
            coordinator.revealed(revealed)
        assert coordinator.enough


# Sums in clear.


def test_a_site_gives_nothing_in_clear_whatever_plan_a_message_carries(federation: Federation) -> None:
    clear = in_clear(federation.plan)
    site = federation.joined(pinned=False)
    with pytest.raises(PlanError, match="does not take part in a sum in clear"):
        site.join(federation.join_request(clear))
    for purpose in (TRAIN, EVALUATE):
        # The plan of the sum is the one that the site has joined, and no message can name another.
        with pytest.raises(PinnedError, match="which was joined in this run"):
            site.contribute(federation.request(plan=clear, purpose=purpose))
        # Under that plan there is no update without masks.
        with pytest.raises(UpdateError, match="the shares of the other sites, under the secure sum"):
            site.contribute(federation.request(purpose=purpose))
    # Without the guard the same message opens the site's own update.
    vector = whole(without_guard(federation).contribute(federation.request(plan=clear)))
    assert np.abs(training_layout(clear, federation.layout.size).open(vector).mean).max() > 0


def test_a_site_whose_people_end_sums_in_clear_gives_nothing_in_clear_from_then_on(
    federation: Federation,
) -> None:
    """It has joined such a plan before, and its pins and files say so."""
    clear = in_clear(federation.plan)
    federation.joined(plan=clear, secure=False, pinned=False)
    site = federation.site(secure=True, pinned=False)
    for purpose in (TRAIN, EVALUATE):
        with pytest.raises(PlanError, match="does not take part in a sum in clear"):
            site.contribute(federation.request(plan=clear, purpose=purpose))
    again = federation.site(secure=False, pinned=False)
    assert whole(again.contribute(federation.request(plan=clear))).any()


def test_what_leaves_under_masks_is_not_the_update(federation: Federation) -> None:
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    masked = whole(attack.contribute(site, inboxes[site.name]))
    plain = whole(without_guard(federation).contribute(federation.request(plan=in_clear(federation.plan))))
    assert masked.shape == plain.shape
    assert np.count_nonzero(masked == plain) <= 2  # by chance 2^-32 each


# The model.


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_a_site_hashes_the_model_it_received_itself(federation: Federation, purpose: Purpose) -> None:
    """Masks are bound to the hash: otherwise a coordinator would have sites train from models of their own."""
    request = federation.request(purpose=purpose)
    with pytest.raises(UpdateError, match=r"global model .* expected the model with the hash"):
        federation.joined().contribute(dataclasses.replace(request, model=federation.model + 1))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_a_model_that_is_not_finite_is_refused_before_a_record_is_used(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, purpose: Purpose, value: float
) -> None:
    crafted = federation.model.copy()
    crafted[7] = value
    site = federation.joined()

    def used(*_: object) -> None:
        raise AssertionError("a record was used")

    monkeypatch.setattr("cloister.clients.site.prepared_key", used)
    with pytest.raises(UpdateError, match="finite weights"):
        site.contribute(federation.request(model=crafted, purpose=purpose))


# One plan, one run.


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned in its TOML", "pinned by its first join"])
def test_a_plan_cannot_change_in_the_middle_of_an_attempt(federation: Federation, pinned: bool) -> None:
    attack, plan = Attack(federation, pinned=pinned), federation.plan
    inboxes, site = attack.deal(), attack.sites[0]
    for other in (
        changed(plan, "aggregation", bound=1e-6),
        changed(plan, "local", steps=1),
        changed(plan, "cohort", sites=5),
    ):
        with pytest.raises(PinnedError):
            site.join(federation.join_request(other))
        with pytest.raises(PinnedError, match="which was joined in this run"):
            attack.contribute(site, inboxes[site.name], plan=other)
        with pytest.raises(PinnedError):
            attack.agree(site, attack.coordinator.begin, plan=other, run="an0ther")
    assert attack.contribute(site, inboxes[site.name]).statement


def test_one_plan_is_one_run(federation: Federation) -> None:
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    acts: tuple[Callable[[], object], ...] = (
        lambda: attack.agree(site, attack.coordinator.begin, run="an0ther"),
        lambda: attack.contribute(site, inboxes[site.name], run="an0ther"),
    )
    for act in acts:
        with pytest.raises(PinnedError, match="a run that this site was asked to join first"):
            act()
    with pytest.raises(PinnedError, match="would sum the same updates again"):
        site.join(federation.join_request(run="an0ther"))
    for act in acts:  # the join that was refused has opened nothing
        with pytest.raises(PinnedError):
            act()
    assert attack.contribute(site, inboxes[site.name]).statement


def test_a_message_of_a_run_that_was_not_joined_pins_nothing(federation: Federation) -> None:
    site = federation.site()
    begin = Begin(1, 1, bytes(32))
    with pytest.raises(PinnedError, match="a run that this site was asked to join first"):
        site.agree(Agree(federation.sum_id(run="junk"), begin))
    site.join(federation.join_request())


def test_a_pinned_plan_is_the_only_one(federation: Federation) -> None:
    renamed = changed(federation.plan, "run", name="same-but-for-the-name")
    with pytest.raises(PinnedError, match="which site-000 has pinned"):
        federation.site().join(federation.join_request(renamed))
    # Without a pin in its TOML, the first plan that a site joins is the only one.
    loose = federation.joined(1, plan=renamed, pinned=False)
    with pytest.raises(PinnedError):
        loose.join(federation.join_request(run="0ther"))


def test_a_join_that_is_repeated_changes_nothing(federation: Federation) -> None:
    """A coordinator that was restarted asks all sites again."""
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    assert site.join(federation.join_request()).parameters == federation.layout.size
    assert attack.contribute(site, inboxes[site.name]).statement


# Rounds, cohorts and lists of survivors.


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_rounds_are_those_of_the_plan(federation: Federation, purpose: Purpose) -> None:
    site, rounds = federation.joined(), federation.plan.run.rounds
    begin = Begin(1, 1, vector_hash(federation.model))
    for number in (0 if purpose == TRAIN else -1, rounds + 1, 10**9):
        request = Agree(
            federation.sum_id(purpose=purpose, number=number), dataclasses.replace(begin, round=number)
        )
        with pytest.raises(StaleError, match=f"to {rounds}, as the plan has"):
            site.agree(request)
    assert site.agree(Agree(federation.sum_id(purpose=purpose), begin))


def test_there_is_no_update_for_a_round_that_the_plan_does_not_have(federation: Federation) -> None:
    for number in (0, federation.plan.run.rounds + 1):
        with pytest.raises(StaleError, match="one of 1 to 3, as the plan has"):
            federation.joined().contribute(federation.request(number=number))


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_a_site_takes_part_in_the_sums_that_the_plan_draws_it_for(tmp_path: Path, purpose: Purpose) -> None:
    """A coordinator chooses neither the rounds of a site nor with which sites it is summed."""
    plan = tiny("cohort.sites=8", "cohort.fraction=0.5", "run.rounds=20")
    federation = Federation(tmp_path, plan)
    site, taken = federation.joined(), set()
    for number in range(1, plan.run.rounds + 1):
        begin = Begin(number, 1, vector_hash(federation.model))
        with contextlib.suppress(MemberError):
            site.agree(Agree(federation.sum_id(purpose=purpose, number=number), begin))
            taken.add(number)
    drawn = draw_of(plan, purpose)
    numbers = range(1, plan.run.rounds + 1)
    assert taken == {number for number in numbers if site.name in drawn.cohort(federation.names, number)}
    assert 0 < len(taken) < plan.run.rounds


def test_the_cohort_is_the_draw_whoever_is_there(federation: Federation) -> None:
    """A coordinator that begins with fewer sites gets the n, A and t of the draw all the same."""
    contract = Attack(federation).coordinator.contract
    three = dataclasses.replace(contract, roster=Roster.of(federation.roster.cards[:3]))
    offered = SecureCoordinator(three, 1, 1, vector_hash(federation.model))
    site = federation.joined()
    reply = site.agree(Agree(federation.sum_id(), offered.begin))
    assert isinstance(reply, Advertise)
    with pytest.raises(StaleError, match="the same run, round, attempt, roster, plan, model and cohort"):
        offered.advertised(reply)
    assert reply.context == Attack(federation).coordinator.attempt.context


def test_shares_for_another_site_are_refused(federation: Federation) -> None:
    attack = Attack(federation)
    inboxes = attack.deal()
    first, second = attack.sites[:2]
    with pytest.raises(SecureSumError):
        attack.contribute(first, inboxes[second.name])


def test_a_site_answers_for_one_list_of_survivors_through_attempts(federation: Federation) -> None:
    Attack(federation).carry_through(left_out=())
    again = Attack(federation, attempt=2)
    with pytest.raises(SecureSumError, match="the difference of two sums would reveal updates"):
        again.carry_through(left_out=(federation.names[3],))


@pytest.mark.parametrize(("quorum", "refused"), [(1.0, True), (0.75, False)])
def test_a_site_holds_the_coordinator_to_the_plans_quorum(
    tmp_path: Path, quorum: float, refused: bool
) -> None:
    """Three of four sites: enough for t and for the site's own minimum."""
    federation = Federation(tmp_path, tiny(f"cohort.quorum={quorum}"))
    attack = Attack(federation)
    for site in attack.sites[:3]:
        advertised = attack.agree(site, attack.coordinator.begin)
        assert isinstance(advertised, Advertise)
        attack.coordinator.advertised(advertised)
    peers = attack.coordinator.peers()
    if refused:
        with pytest.raises(TooFewSitesError, match="at least 4 sites"):
            attack.agree(attack.sites[0], peers)
    else:
        assert attack.agree(attack.sites[0], peers)


@pytest.mark.parametrize("nats", [float("nan"), float("inf"), 1e300])
def test_a_loss_without_measure_is_one_fixed_count_and_no_error(nats: float) -> None:
    """A non-finite or huge loss gives no error, because an error would reveal it."""
    ring = training_layout(parse(""), 1).ring
    assert count_of_loss(nats) == count_of_loss(2.0**40)
    assert ring.decode_counters(ring.encode_counters([count_of_loss(nats)])) == [count_of_loss(nats)]
    assert count_of_loss(1.5) == 3 * 2**19
