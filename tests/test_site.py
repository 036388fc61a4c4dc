"""What a site refuses, whatever the coordinator sends it: each guard, and the same attack where the guard is out."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from cloister.aggregation.graph import parameters
from cloister.aggregation.secure_messages import (
    Advertise,
    Begin,
    Confirm,
    Masked,
    Reveal,
    Shares,
    from_bytes,
    to_bytes,
)
from cloister.aggregation.secure_sum import Coordinator
from cloister.aggregation.sums import TRAIN, contract_for, count_of_loss, training_layout
from cloister.clients.app import client_app, reticent
from cloister.clients.site import Site, load_site
from cloister.lm.model import load_model
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
from cloister.protocol.messages import Agree, Evaluate, Join, Train
from cloister.protocol.plan import Plan, load, parse
from cloister.protocol.records import to_records
from cloister.protocol.roster import load_roster
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.simulations.process import identify

RUN = "0a1b2c"


@pytest.fixture(scope="module")
def plan(small_plan: Path) -> Plan:
    return load(small_plan)


@pytest.fixture
def folder(plan: Plan, tmp_path: Path) -> Path:
    lay_out(plan, tmp_path)
    return tmp_path


@pytest.fixture
def sites(folder: Path, plan: Plan) -> list[Site]:
    return [load_site(folder / site_name(index) / "site.toml") for index in range(plan.cohort.sites)]


@pytest.fixture(scope="module")
def model(plan: Plan) -> np.ndarray[Any, np.dtype[np.float32]]:
    loaded = load_model(plan)
    return loaded.layout.flatten(loaded.module)


def changed(plan: Plan, section: str, **values: Any) -> Plan:
    return plan.model_copy(update={section: getattr(plan, section).model_copy(update=values)})


def in_clear(plan: Plan) -> Plan:
    return changed(plan, "aggregation", secure=False)


def without_guard(site: Site, clear: Plan) -> Site:
    """The same site, whose people let it take part in a sum in clear."""
    changes = {"secure": False, "plan": "", "state": f"{site.config.state}-clear"}
    open_hearted = dataclasses.replace(site, config=site.config.model_copy(update=changes))
    open_hearted.join(Join(clear.to_json(), RUN))
    return open_hearted


def without_pin(site: Site) -> Site:
    return dataclasses.replace(site, config=site.config.model_copy(update={"plan": ""}))


def test_a_site_gives_nothing_in_clear_whatever_plan_a_message_carries(
    sites: list[Site], plan: Plan, model: np.ndarray[Any, np.dtype[np.float32]]
) -> None:
    site, clear = without_pin(sites[0]), in_clear(plan).to_json()
    site.join(Join(plan.to_json(), RUN))
    train = Train(clear, 1, 1, RUN, vector_hash(model).hex(), model)
    evaluate = Evaluate(clear, 1, 1, RUN, vector_hash(model).hex(), model)
    for act in (
        lambda: site.join(Join(clear, RUN)),
        lambda: site.train(train),
        lambda: site.evaluate(evaluate),
    ):
        with pytest.raises(PlanError, match="takes part in no sum in clear"):
            act()
    # Without the guard the same message opens the site's own update.
    opened = training_layout(in_clear(plan), model.size).open(
        without_guard(site, in_clear(plan)).train(train).vector
    )
    assert np.abs(opened.mean).max() > 0


def test_a_site_hashes_the_model_it_received_itself(
    sites: list[Site], plan: Plan, model: np.ndarray[Any, np.dtype[np.float32]]
) -> None:
    other = model + 1
    sites[0].join(Join(plan.to_json(), RUN))
    for act in (sites[0].train, sites[0].evaluate):
        kind = Train if act == sites[0].train else Evaluate
        with pytest.raises(UpdateError, match="global model"):
            act(kind(plan.to_json(), 1, 1, RUN, vector_hash(model).hex(), other))  # type: ignore[arg-type]  # of its kind


class Attack:
    """A coordinator that may do as it likes, up to the moment at which sites hold each other's shares."""

    def __init__(
        self,
        folder: Path,
        sites: list[Site],
        plan: Plan,
        model: np.ndarray[Any, Any],
        run: str = RUN,
        attempt: int = 1,
    ) -> None:
        self.sites, self.plan, self.model = sites, plan, model
        loaded = load_model(plan)
        roster = load_roster(folder / "roster.toml")
        contract = contract_for(TRAIN, plan, roster, run, model.size, loaded.layout.digest())
        names = [site.config.name for site in sites]
        for site in sites:
            site.join(Join(plan.to_json(), run))
        self.coordinator = Coordinator(contract, 1, attempt, vector_hash(model), names)

    def agree(self, site: Site, step: int, body: bytes, *, plan: Plan | None = None, run: str = RUN) -> bytes:
        return site.agree(Agree((plan or self.plan).to_json(), run, TRAIN, step, 1, 1), body).body

    def train(self, site: Site, inbox: bytes, *, plan: Plan | None = None, run: str = RUN) -> Any:
        request = Train((plan or self.plan).to_json(), 1, 1, run, vector_hash(self.model).hex(), self.model)
        return site.train(request, inbox)

    def deal(self, run: str = RUN) -> dict[str, bytes]:
        for site in self.sites:
            begin = to_bytes(self.coordinator.begin)
            self.coordinator.advertised(from_bytes(Advertise, self.agree(site, 1, begin, run=run)))
        peers = to_bytes(self.coordinator.peers())
        for site in self.sites:
            self.coordinator.shared(from_bytes(Shares, self.agree(site, 2, peers, run=run)))
        return {name: to_bytes(inbox) for name, inbox in self.coordinator.inboxes().items()}

    def carry_through(self, left_out: tuple[str, ...]) -> None:
        """All steps, with the vectors of some sites left out of the sum."""
        for name, inbox in self.deal().items():
            site = next(site for site in self.sites if site.config.name == name)
            contribution = self.train(site, inbox)
            if name not in left_out:
                self.coordinator.fold(from_bytes(Masked, contribution.statement), contribution.vector)
        survivors = to_bytes(self.coordinator.survivors())
        left = [site for site in self.sites if site.config.name not in left_out]
        for site in left:
            self.coordinator.confirmed(from_bytes(Confirm, self.agree(site, 4, survivors)))
        unmask = to_bytes(self.coordinator.request())
        for site in left:
            self.coordinator.revealed(from_bytes(Reveal, self.agree(site, 5, unmask)))
        assert self.coordinator.enough


@pytest.fixture
def attack(folder: Path, sites: list[Site], plan: Plan, model: np.ndarray[Any, Any]) -> Attack:
    return Attack(folder, sites, plan, model)


def test_a_plan_cannot_change_in_the_middle_of_an_attempt(attack: Attack, plan: Plan) -> None:
    inboxes = attack.deal()
    site = attack.sites[0]
    for loose in (site, without_pin(site)):
        for other in (
            changed(plan, "aggregation", bound=1e-6),
            changed(plan, "local", steps=1),
            changed(plan, "cohort", sites=5),
        ):
            with pytest.raises(PinnedError):
                attack.train(loose, inboxes[site.config.name], plan=other)
    assert attack.train(site, inboxes[site.config.name]).statement


def test_one_plan_is_one_run(attack: Attack, plan: Plan) -> None:
    inboxes = attack.deal()
    site = attack.sites[0]
    begin = to_bytes(attack.coordinator.begin)
    for act in (
        lambda: attack.agree(site, 1, begin, run="an0ther"),
        lambda: attack.train(site, inboxes[site.config.name], run="an0ther"),
    ):
        with pytest.raises(PinnedError, match=r"to join it first|would sum the same updates"):
            act()
    with pytest.raises(PinnedError, match="would sum the same updates again"):
        site.join(Join(plan.to_json(), "an0ther"))
    assert attack.train(site, inboxes[site.config.name]).statement


def test_a_message_that_was_not_joined_pins_nothing(sites: list[Site], plan: Plan) -> None:
    with pytest.raises(PinnedError, match="to be asked to join it first"):
        sites[0].agree(Agree(plan.to_json(), "junk", TRAIN, 1, 1, 1), b"")
    sites[0].join(Join(plan.to_json(), RUN))


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_rounds_and_cohorts_are_those_of_the_plan(attack: Attack, purpose: str, plan: Plan) -> None:
    site, begin = attack.sites[0], attack.coordinator.begin
    for other, kind in (
        (dataclasses.replace(begin, round=plan.run.rounds + 1), StaleError),
        (dataclasses.replace(begin, round=10**9), StaleError),
        (dataclasses.replace(begin, cohort=(*begin.cohort, "stranger")), MemberError),
        (dataclasses.replace(begin, cohort=begin.cohort[:2]), SecureSumError),
    ):
        request = Agree(plan.to_json(), RUN, purpose, 1, other.round, 1)
        with pytest.raises(kind):
            site.agree(request, to_bytes(other))


def test_an_error_tells_the_coordinator_nothing_of_the_site(
    folder: Path, sites: list[Site], plan: Plan
) -> None:
    """Whatever goes wrong at a site, records, losses and paths stay there."""
    secret = sites[0].config.data
    nosy = changed(plan, "data", format="messages", messages_field="text")
    app = client_app(lambda _context: without_pin(sites[0]))
    identify(1, 0)
    message = Message(to_records(Join(nosy.to_json(), RUN)), 1, "query.join")
    reply = app(message, Context(1, 1, {}, RecordDict(), {}))
    assert reply.error.reason == "DataError: the reason is in the site's own log"
    open_hearted = client_app(lambda _context: without_pin(sites[0]), explain=str)
    reply = open_hearted(message, Context(1, 1, {}, RecordDict(), {}))
    assert "the quick brown fox" in str(reply.error.reason)  # which shows what would have left
    for error in (ValueError(secret), UpdateError("x", secret, expected="y"), KeyError(secret)):
        assert secret not in reticent(error)


def test_a_model_that_is_not_finite_is_refused_before_a_record_is_seen(
    sites: list[Site], plan: Plan, model: Any
) -> None:
    crafted = model.copy()
    crafted[7] = np.inf
    sites[0].join(Join(plan.to_json(), RUN))
    with pytest.raises(UpdateError, match="finite weights"):
        sites[0].train(Train(plan.to_json(), 1, 1, RUN, vector_hash(crafted).hex(), crafted))


def test_shares_for_another_site_are_refused(attack: Attack) -> None:
    inboxes = attack.deal()
    first, second = attack.sites[0], attack.sites[1]
    with pytest.raises(SecureSumError):
        attack.train(first, inboxes[second.config.name])


def test_what_leaves_under_masks_is_not_the_update(attack: Attack, plan: Plan) -> None:
    inboxes = attack.deal()
    site = attack.sites[0]
    masked = attack.train(site, inboxes[site.config.name]).vector
    request = Train(in_clear(plan).to_json(), 1, 1, RUN, vector_hash(attack.model).hex(), attack.model)
    plain = without_guard(site, in_clear(plan)).train(request).vector
    assert masked.shape == plain.shape
    assert np.count_nonzero(masked == plain) <= 2  # by chance 2^-32 each


def test_a_pinned_plan_is_the_only_one(sites: list[Site], plan: Plan) -> None:
    renamed = changed(plan, "run", name="same-but-for-the-name")
    with pytest.raises(PinnedError, match="which site-000 has pinned"):
        sites[0].join(Join(renamed.to_json(), RUN))
    # Without a pin of its own, the first plan that a site joins is the only one.
    loose = without_pin(sites[1])
    loose.join(Join(renamed.to_json(), RUN))
    with pytest.raises(PinnedError):
        loose.join(Join(plan.to_json(), "0ther"))


def test_a_site_answers_for_one_list_of_survivors_through_attempts(
    folder: Path, sites: list[Site], plan: Plan, model: np.ndarray[Any, Any]
) -> None:
    Attack(folder, sites, plan, model).carry_through(left_out=())
    again = Attack(folder, sites, plan, model, attempt=2)
    with pytest.raises(SecureSumError, match="the difference of two sums would open updates"):
        again.carry_through(left_out=(sites[3].config.name,))


def test_a_site_holds_the_coordinator_to_the_plans_quorum(
    sites: list[Site], plan: Plan, model: np.ndarray[Any, Any]
) -> None:
    """Three of four sites: enough for the site's own minimum, and for a plan that asks for no more."""
    names = tuple(site.config.name for site in sites)
    three = Begin(1, 1, vector_hash(model), names[:3], parameters(3, 0, 1).threshold)
    strict, loose = (changed(plan, "cohort", quorum=quorum) for quorum in (1.0, 0.75))
    for site, chosen in ((without_pin(sites[0]), strict), (without_pin(sites[1]), loose)):
        site.join(Join(chosen.to_json(), RUN))
    request = Agree(strict.to_json(), RUN, TRAIN, 1, 1, 1)
    with pytest.raises(TooFewSitesError, match="at least 4 sites"):
        without_pin(sites[0]).agree(request, to_bytes(three))
    request = Agree(loose.to_json(), RUN, TRAIN, 1, 1, 1)
    assert without_pin(sites[1]).agree(request, to_bytes(three)).body


@pytest.mark.parametrize("nats", [float("nan"), float("inf"), 1e300])
def test_a_loss_without_measure_is_one_fixed_count_and_no_error(nats: float) -> None:
    """An error would tell that it happened, and once told by how much."""
    ring = training_layout(parse(""), 1).ring
    assert count_of_loss(nats) == count_of_loss(2.0**40)
    assert ring.decode_counters(ring.encode_counters([count_of_loss(nats)])) == [count_of_loss(nats)]
    assert count_of_loss(1.5) == 3 * 2**19
