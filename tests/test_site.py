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
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import (
    MemberError,
    PinnedError,
    PlanError,
    SecureSumError,
    StaleError,
    StorageError,
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
from cloister.protocol.soundness import parse
from cloister.protocol.threshold import parameters
from cloister.tests.federation import RUN, Federation, changed, tiny, whole
from cloister.tests.power import Power


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
        self.coordinator = SecureCoordinator(contract, 1, attempt, model, federation.names)

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
        unmask = coordinator.request()
        for site in left:
            revealed = self.agree(site, unmask)
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
    begin = Begin(1, 1, bytes(32), federation.names, 3)
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
def test_rounds_and_cohorts_are_those_of_the_plan(federation: Federation, purpose: Purpose) -> None:
    site, names, rounds = federation.joined(), federation.names, federation.plan.run.rounds
    begin = Begin(1, 1, vector_hash(federation.model), names, parameters(4, 0, 1).threshold)
    for other, kind in (
        (dataclasses.replace(begin, round=rounds + 1), StaleError),
        (dataclasses.replace(begin, round=10**9), StaleError),
        (dataclasses.replace(begin, cohort=(*names, "stranger")), MemberError),
        (dataclasses.replace(begin, cohort=names[:2]), SecureSumError),
    ):
        request = Agree(federation.sum_id(purpose=purpose, number=other.round), other)
        with pytest.raises(kind):
            site.agree(request)
    assert site.agree(Agree(federation.sum_id(purpose=purpose), begin))


def test_there_is_no_update_for_a_round_that_the_plan_does_not_have(federation: Federation) -> None:
    for number in (0, federation.plan.run.rounds + 1):
        with pytest.raises(StaleError, match="one of the plan's"):
            federation.joined().contribute(federation.request(number=number))


def test_a_site_that_the_plan_does_not_draw_is_in_no_cohort(tmp_path: Path) -> None:
    """A coordinator cannot choose with whom a site is summed."""
    federation = Federation(tmp_path, tiny("cohort.sites=8", "cohort.fraction=0.5"))
    model = vector_hash(federation.model)
    site, names, refused = federation.joined(), federation.names, 0
    for number in range(1, federation.plan.run.rounds + 1):
        begin = Begin(number, 1, model, names[:4], parameters(4, 0, 1).threshold)
        try:
            site.agree(Agree(federation.sum_id(number=number), begin))
        except MemberError:
            refused += 1
    assert refused >= federation.plan.run.rounds - 1  # one cohort of 70 is that one


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


def test_a_site_holds_the_coordinator_to_the_plans_quorum(federation: Federation) -> None:
    """Three of four sites: enough for the site's own minimum, and for a plan that asks for no more."""
    three = Begin(1, 1, vector_hash(federation.model), federation.names[:3], parameters(3, 0, 1).threshold)
    strict, loose = (changed(federation.plan, "cohort", quorum=quorum) for quorum in (1.0, 0.75))
    with pytest.raises(TooFewSitesError, match="at least 4 sites"):
        federation.joined(0, plan=strict, pinned=False).agree(Agree(federation.sum_id(plan=strict), three))
    assert federation.joined(1, plan=loose, pinned=False).agree(Agree(federation.sum_id(plan=loose), three))


@pytest.mark.parametrize("nats", [float("nan"), float("inf"), 1e300])
def test_a_loss_without_measure_is_one_fixed_count_and_no_error(nats: float) -> None:
    """A non-finite or huge loss gives no error, because an error would reveal it."""
    ring = training_layout(parse(""), 1).ring
    assert count_of_loss(nats) == count_of_loss(2.0**40)
    assert ring.decode_counters(ring.encode_counters([count_of_loss(nats)])) == [count_of_loss(nats)]
    assert count_of_loss(1.5) == 3 * 2**19


# A power cut, and what is lost with a disk.


@pytest.mark.parametrize("killed", [False, True], ids=["power cut", "killed, then power cut"])
def test_a_join_is_on_disk_before_it_is_answered(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A power cut at any sync of the join: it can be repeated, and once it was answered there is no other run."""
    sync, ended = 0, [0]
    begin = Begin(1, 1, vector_hash(federation.model), federation.names, parameters(4, 0, 1).threshold)
    while ended:
        (disk := tmp_path / f"disk-{sync}").mkdir()
        state = str(disk / "state")
        with Power(disk, monkeypatch) as power:
            with power.stopped_at(sync) as ended:
                federation.joined(state=state, pinned=False)
            if ended:
                if not killed:
                    power.cut()
                federation.joined(state=state, pinned=False)
            power.cut()
            site = federation.site(state=state, pinned=False)
            with pytest.raises(PinnedError, match="would sum the same updates again"):
                site.join(federation.join_request(run="an0ther"))
            with pytest.raises(PinnedError, match="would sum the same updates again"):
                site.join(federation.join_request(changed(federation.plan, "local", steps=1), "an0ther"))
            for purpose in (TRAIN, EVALUATE):
                assert site.agree(Agree(federation.sum_id(purpose=purpose), begin))
        sync += 1
    assert sync > 20


def test_a_message_relies_on_no_pin_that_is_not_on_disk(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site was killed in the join; the coordinator does not ask it to join again, but to take part."""
    sync, answered = 0, False
    begin = Begin(1, 1, vector_hash(federation.model), federation.names, parameters(4, 0, 1).threshold)
    while not answered:
        (disk := tmp_path / f"disk-{sync}").mkdir()
        state = str(disk / "state")
        with Power(disk, monkeypatch) as power:
            with power.stopped_at(sync) as ended:
                federation.joined(state=state, pinned=False)
            assert ended
            with contextlib.suppress(PinnedError):
                federation.site(state=state, pinned=False).agree(Agree(federation.sum_id(), begin))
                answered = True
            power.cut()
            if answered:
                with pytest.raises(PinnedError, match="would sum the same updates again"):
                    federation.joined(state=state, pinned=False, run="an0ther")
        sync += 1


def test_a_site_without_its_marks_refuses_everything(federation: Federation) -> None:
    """It has pinned the run, so it may have answered in it."""
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    for marks in site.config.folder.glob("secure/*/*/marks"):
        whole = marks.read_bytes()
        marks.unlink()
        with pytest.raises(StorageError, match=r"marks.*missing.*new state folder and keep its ledger"):
            site.join(federation.join_request())
        assert not marks.exists()
        if TRAIN in marks.parts:
            acts: tuple[Callable[[], object], ...] = (
                lambda: attack.agree(site, attack.coordinator.begin),
                lambda: attack.contribute(site, inboxes[site.name]),
            )
            for act in acts:
                with pytest.raises(StorageError, match=r"marks.*missing"):
                    act()
            assert not marks.exists()
        marks.write_bytes(whole)
    assert attack.contribute(site, inboxes[site.name]).statement
