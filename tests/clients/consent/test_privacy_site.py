"""A coordinator that lies to a site under privacy: what the site refuses, and that nothing leaves without a charge."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT
from cloister.clients.consent.admission import Admission
from cloister.clients.consent.spending import Spending
from cloister.clients.network.serve import reticent
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.site import Site
from cloister.clients.state.kept import Kept, run_folder, update_path
from cloister.clients.training.dpsgd import ClippedSum, PrivateTrainer
from cloister.lm.model.model import load_model
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.ledger import Ledger
from cloister.privacy.mechanism.events import to_json
from cloister.protocol.errors import (
    BudgetError,
    CloisterError,
    ConsentError,
    EngineError,
    LedgerError,
    PinnedError,
    PlanError,
    PolicyError,
    StaleError,
    StorageError,
    UpdateError,
)
from cloister.protocol.identity.roster import load_identity, new_identity
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import (
    EVALUATE,
    Agree,
    Begin,
    Contribute,
    Contribution,
    Inbox,
    Join,
    Refused,
    Reply,
)
from cloister.protocol.messages.refusal import sign_refusal, verify_refusal
from cloister.protocol.messages.wire import encode
from cloister.protocol.plan.plan import LARGEST_CLIP, SMALLEST_CLIP, AdapterSection
from cloister.server.sum.channel import Failure
from cloister.simulations.federation import declare_rounding
from cloister.tests.parties.federation import (
    CENTRAL,
    CHALLENGE,
    RECORD,
    RUN,
    SKELLAM,
    Federation,
    changed,
    spent_on,
    tiny,
    whole,
    write_records,
)
from cloister.tests.tools.power import Power
from cloister.tests.tools.raises import raises

Federate = Callable[[list[str]], Federation]
UNITS = pytest.mark.parametrize("settings", [RECORD, CENTRAL, SKELLAM], ids=["record", "central", "skellam"])


@pytest.fixture
def federate(tmp_path: Path) -> Federate:
    return lambda settings: Federation(tmp_path, tiny(*settings))


def asked(federation: Federation, **about: Any) -> Contribute:
    """The request for an update; under the secure sum with an inbox, which is empty."""
    inbox = Inbox(bytes(32), (), (), ()) if federation.plan.aggregation.secure else None
    return federation.request(inbox=inbox, **about)


def trainer(settings: list[str]) -> type[Trainer] | type[PrivateTrainer]:
    return PrivateTrainer if settings is RECORD else Trainer


# What is asked for beside the update.


@UNITS
def test_no_evaluation_leaves_a_site_under_privacy(federate: Federate, settings: list[str]) -> None:
    federation = federate(settings)
    site = federation.joined()
    begin = Begin(1, 1, vector_hash(federation.model))
    for request in (
        asked(federation, purpose=EVALUATE),
        Agree(federation.sum_id(purpose=EVALUATE), begin),
    ):
        with raises(PolicyError, "evaluation at a site"):
            site.answer(request)
    assert federation.entries() == ()


def test_each_of_three_guards_keeps_the_losses(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate([*RECORD, "data.held_out=0.3"])
    site = federation.joined()
    monkeypatch.setattr(Admission, "check_unpaid", lambda *_: None)
    with raises(StaleError, "evaluation of round 1", says="due"):
        site.contribute(asked(federation, purpose=EVALUATE))
    monkeypatch.setattr(Admission, "check_round", lambda *_: None)
    with pytest.raises(AssertionError, match="were refused"):
        site.contribute(asked(federation, purpose=EVALUATE))
    assert federation.entries() == ()


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_contribution_has_no_room_for_tokens_losses_or_clipped_counts(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate(settings)
    vector = whole(federation.joined().contribute(asked(federation)))
    layout = Sums(federation.plan, federation.model.size).training
    assert layout.names == ("weight",)
    assert vector.shape == (federation.model.size + layout.ring.limbs,)
    assert layout.ring.decode_counters(vector[federation.model.size :]) == [1]
    open_plan = tiny("aggregation.secure=false")
    assert Sums(open_plan, federation.model.size).training.length > vector.size


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["local.optimizer=muon", "local.proximal=0.1", "local.optimizer_state=keep"],
        ["model.adapter.scheme=ffa-lora", "privacy.unit=owner", "data.owner=patient"],
    ],
    ids=["record", "muon", "owner"],
)
def test_a_contribution_is_a_function_of_the_noised_sums_and_of_what_is_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    """Two sets of records with the same noised sums: the same bytes leave, in each of two rounds. Only sums have the
    noise, so nothing else of a record may get into the update, such as the training loss."""
    people: dict[str, list[dict[str, str]]] = {
        "few": [{"patient": "p0", "text": "a short note"}] * 5,
        "many": [
            {"patient": f"p{number % 7}", "text": f"patient {number} was seen. " * 3} for number in range(60)
        ],
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in people}
    for name, records in people.items():
        files[name].write_text("".join(json.dumps(record) + "\n" for record in records))
    wide = [
        "aggregation.bound=100.0",
        f"simulation.source={files['many']}",
    ]  # so that no value is cut to the bound
    federation, left = Federation(tmp_path, tiny(*RECORD, *wide, *settings)), []
    for name, data in files.items():
        random = np.random.default_rng(7)

        def noised(total: ClippedSum, *_: object, random: np.random.Generator = random) -> torch.Tensor:
            return torch.from_numpy(random.normal(size=total.so_far().shape).astype(np.float32))

        monkeypatch.setattr(ClippedSum, "release", noised)
        state, ledger = tmp_path / f"state of {name}", tmp_path / f"{name}.sqlite"
        declare_rounding(federation.plan, federation.names[0], state)
        site = federation.joined(data=str(data), state=str(state), ledger=str(ledger))
        replies = [site.contribute(federation.request(number=number)) for number in (1, 2)]
        left.append([b"".join(map(bytes, encode(reply))) for reply in replies])
    assert left[0] == left[1]
    assert left[0][0] != left[0][1], "the sums are in it"


# Noise and charge of a second training.


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_second_attempt_gets_the_same_vector_and_is_charged_once(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate(settings)
    site = federation.joined()
    vectors = [whole(site.contribute(asked(federation, tries=tries))) for tries in (1, 2, 3)]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    # So does a new process, which has only the folder.
    again = federation.site(resident=Resident()).contribute(asked(federation, tries=4))
    assert np.array_equal(whole(again), vectors[0])
    (entry,) = federation.entries()
    assert (entry.charge.run, entry.charge.round) == (RUN, 1)


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_an_update_that_left_is_on_disk(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in clear: after a power cut the same vector leaves, without another training, noise and charge."""
    federation = federate(settings)
    site = federation.joined()
    with Power(site.config.folder, monkeypatch) as power:
        first = whole(site.contribute(asked(federation)))
        power.cut()
    again = federation.site(resident=Resident()).contribute(asked(federation, tries=2))
    assert np.array_equal(whole(again), first)
    assert len(federation.entries()) == 1


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_site_that_lost_its_update_is_charged_again_for_new_noise(
    federate: Federate, settings: list[str]
) -> None:
    """This is also the attack on a site without a memory: the mean of such trainings has less noise."""
    federation = federate(settings)
    site = federation.joined()
    first = whole(site.contribute(asked(federation)))
    update_path(run_folder(site.config.folder, RUN), 1).unlink()
    second = whole(site.contribute(asked(federation, tries=2)))
    assert len(federation.entries()) == 2
    terms = terms_of(federation.plan, federation.model.size)
    assert terms is not None
    ledger = Ledger(Path(site.config.ledger), site.name, composed)
    assert spent_on(ledger, site.config.dataset, 1e-3) == pytest.approx(terms.epsilon(2))
    if settings is not CENTRAL:  # where the noise is not the site's
        assert np.count_nonzero(first != second) > first.size / 2


@pytest.mark.parametrize("settings", [RECORD, CENTRAL], ids=["record", "central"])
def test_a_site_trains_no_round_below_one_that_it_was_charged_for(
    federate: Federate, settings: list[str]
) -> None:
    """In clear a coordinator could go to another round and back, and get a second training of the same round."""
    federation = federate(settings)
    site = federation.joined()
    first = whole(site.answer(federation.request(number=1)))
    site.answer(federation.request(number=3))  # its update takes the place of the first one
    for number in (1, 2):
        for served in (site, federation.site(resident=Resident())):
            with pytest.raises(StaleError) as refused:
                served.answer(federation.request(number=number, tries=2))
            assert (refused.value.field, refused.value.value) == ("round", number)
    assert [entry.charge.round for entry in federation.entries()] == [1, 3]
    assert not np.array_equal(whole(site.answer(federation.request(number=3))), first)
    assert len(federation.entries()) == 2


@pytest.mark.parametrize("change", ["clip", "model"])
def test_another_clip_or_model_in_the_same_round_is_refused_and_costs_nothing(
    federate: Federate, change: str
) -> None:
    federation = federate([*CENTRAL, "privacy.adaptive={count_noise=2.0}"])
    site = federation.joined()
    first = whole(site.contribute(federation.request()))
    other: dict[str, Any] = {"clip": 0.5} if change == "clip" else {"model": federation.model + 1}
    with raises(StaleError, "update of round 1", says="instructions"):
        site.contribute(federation.request(**other))
    assert np.array_equal(whole(site.contribute(federation.request())), first)
    assert len(federation.entries()) == 1


@pytest.mark.parametrize("settings", [RECORD, SKELLAM], ids=["record", "skellam"])
@pytest.mark.usefixtures("before_masks")
def test_an_update_of_another_run_is_not_sent_again(federate: Federate, settings: list[str]) -> None:
    """Not even where the site's own TOML has moved its pin to a new plan: the same noise in two sums would cancel."""
    federation = federate(settings)
    first = whole(federation.joined().contribute(asked(federation)))
    other = changed(federation.plan, "run", name="another")
    site = federation.site(plan=other.digest())
    site.join(federation.join_request(other, "another"))
    second = whole(site.contribute(asked(federation, plan=other, run="another")))
    assert np.count_nonzero(first != second) > first.size / 2
    assert [entry.charge.run for entry in federation.entries()] == [RUN, "another"]


# The charge comes first.


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_the_charge_is_on_disk_before_training_begins(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(settings)
    site = federation.joined()
    kind = trainer(settings)
    seen: list[int] = []
    right = kind.train

    def train(*arguments: Any, **options: Any) -> Any:
        seen.append(len(federation.entries()))
        return right(*arguments, **options)

    monkeypatch.setattr(kind, "train", train)
    site.contribute(asked(federation))
    assert seen == [1]
    # The test sees a site that is charged after its training.
    pay, owed = Spending.pay, list[Any]()
    monkeypatch.setattr(Spending, "pay", lambda *what: owed.append(what))
    site.contribute(asked(federation, number=2))
    pay(*owed[0])
    assert seen == [1, 1]
    assert len(federation.entries()) == 2


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_crash_in_training_leaves_the_charge(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(settings)
    site = federation.joined()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer(settings), "train", crash)
    with pytest.raises(KeyboardInterrupt):
        site.contribute(asked(federation))
    assert len(federation.entries()) == 1


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_nothing_leaves_when_the_ledger_cannot_be_written(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    federation = federate(settings)
    trained: list[object] = []
    monkeypatch.setattr(trainer(settings), "train", lambda *_, **__: trained.append(1))
    for where in ("folder", "junk"):
        path = tmp_path / where
        site = federation.joined(ledger=str(path))
        if where == "folder":
            path.mkdir()
        else:
            path.write_bytes(b"no ledger" * 100)
        with pytest.raises(CloisterError):
            site.join(federation.join_request())
        with pytest.raises(CloisterError) as refused:
            site.contribute(asked(federation))
        assert reticent(refused.value).endswith("the reason is in the site's own log")
        assert isinstance(refused.value, StorageError) == (where == "folder")
        assert not update_path(run_folder(site.config.folder, RUN), 1).exists()
    assert trained == []


# Budgets and policies.


def greatest(federation: Federation, rounds: int, delta: float | None = None, room: float = 1.0001) -> str:
    """A policy that allows what some rounds cost at a delta, by default the plan's, and everything else."""
    terms = terms_of(federation.plan, federation.model.size)
    assert terms is not None
    delta = delta or terms.delta
    return (
        f"greatest_epsilon = {composed([to_json(terms.events(rounds))], delta) * room}\n"
        f"greatest_delta = {delta}\n"
        "secure_required = false\ntrusted_coordinator = true\nleast_cohort = 1\n"
    )


EPSILON_OF_ROUND_3 = [
    f"epsilon of data.jsonl with update, per {unit} of round 3 of {RUN}"
    for unit in ("one text, of which the first 64 tokens are used", "all data of the site")
]


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_the_sites_own_budget_stops_it_whatever_is_asked(federate: Federate, settings: list[str]) -> None:
    """The run is within the policy; trainings that the coordinator invents are not."""
    federation = federate(settings)
    site = federation.joined(policy=greatest(federation, 3))
    for number in (1, 2, 3):
        site.contribute(asked(federation, number=number))
    update_path(run_folder(site.config.folder, RUN), 3).unlink()
    with raises(BudgetError, *EPSILON_OF_ROUND_3):
        site.contribute(asked(federation, number=3))
    assert len(federation.entries()) == 3
    # Without a policy it would have gone on.
    federation.site().contribute(asked(federation, number=3))
    assert len(federation.entries()) == 4


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_the_sites_limit_holds_at_the_delta_of_its_policy(federate: Federate, settings: list[str]) -> None:
    """It is larger than the plan's, at which the same rounds have a larger epsilon."""
    federation = federate(settings)
    with raises(PolicyError, "epsilon of the site's data after the run"):
        federation.joined(policy=greatest(federation, 3, 0.05, room=0.999))
    site = federation.joined(policy=greatest(federation, 3, 0.05))
    for number in (1, 2, 3):
        site.contribute(asked(federation, number=number))
    update_path(run_folder(site.config.folder, RUN), 3).unlink()
    with raises(BudgetError, *EPSILON_OF_ROUND_3):
        site.contribute(asked(federation, number=3))


def test_what_other_runs_have_spent_counts_and_does_not_travel(federate: Federate) -> None:
    federation = federate(RECORD)
    federation.joined().contribute(federation.request())  # a run of the past
    spent = federation.entries()
    site = federation.site(policy=greatest(federation, 3), state=str(federation.folder / "new state"))
    new = federation.join_request(run="another")
    with raises(PolicyError, "epsilon of the site's data after the run") as caught:
        site.join(new)
    refused = site.refuse(new, caught.value)
    verify_refusal(refused, federation.roster, run="another", plan=bytes.fromhex(federation.plan.digest()))
    assert refused.reason == "the privacy budget of its data does not allow it"
    assert not any(character.isdigit() for character in refused.reason)
    # The site's own people can read it.
    assert str(caught.value.value) in str(caught.value)
    budget = BudgetError("epsilon of x", 3.14159, expected="at most the budget of 2.71828")
    assert site.refuse(new, budget).reason == refused.reason
    assert federation.entries() == spent
    # A run that it has begun is not counted twice: what it was charged for is part of the run.
    federation.joined(policy=greatest(federation, 3))


@pytest.mark.usefixtures("before_masks")
def test_a_ledger_that_is_lost_or_older_is_found(federate: Federate) -> None:
    """Else the budget of the site's data would begin anew."""
    federation = federate(RECORD)
    site = federation.joined(policy=greatest(federation, 3))
    ledger = Path(site.config.ledger)
    site.contribute(asked(federation, number=1))
    older = ledger.read_bytes()
    site.contribute(asked(federation, number=2))
    newest = ledger.read_bytes()
    ledger.write_bytes(older)
    with raises(LedgerError, ledger):
        federation.site(policy="").contribute(
            asked(federation, number=2)
        )  # its update is kept, its charge is not
    ledger.write_bytes(newest)
    for content in (older, None):
        ledger.unlink()
        if content:
            ledger.write_bytes(content)
        with raises(LedgerError, ledger):
            site.contribute(asked(federation, number=3))
        with raises(LedgerError, ledger):
            site.join(federation.join_request())
    ledger.write_bytes(newest)
    site.contribute(asked(federation, number=3))
    ledger.write_bytes(older)
    with raises(LedgerError, ledger):
        federation.site(policy="").join(federation.join_request())  # by a site without a policy too
    ledger.write_bytes(newest)
    # The person who decides can go on without the lost one.
    ledger.unlink()
    with raises(LedgerError, ledger):
        site.join(federation.join_request())
    heads = site.config.folder / "ledger-heads.json"
    heads.write_bytes(b"")
    with raises(LedgerError, heads):
        site.join(federation.join_request())
    heads.unlink()
    site.join(federation.join_request())


@pytest.mark.usefixtures("before_masks")
def test_another_ledger_is_for_other_data(federate: Federate) -> None:
    """One ledger may be for several data sets, and a site may have several ledgers."""
    federation = federate(RECORD)
    first = federation.joined()
    ledger, other = Path(first.config.ledger), Path(first.config.ledger).with_name("other.sqlite")
    first.contribute(asked(federation, number=1))
    with raises(LedgerError, other):
        federation.site(ledger=str(other)).contribute(asked(federation, number=2))
    second = federation.site(ledger=str(other), dataset="second")
    second.contribute(asked(federation, number=2))
    third = federation.site(dataset="third")
    third.contribute(asked(federation, number=3))
    for site in (first, second, third):
        site.join(federation.join_request())
    ledger.unlink()
    for site in (first, third):
        with raises(LedgerError, ledger):
            site.join(federation.join_request())
    second.join(federation.join_request())


@pytest.mark.usefixtures("before_masks")
@pytest.mark.parametrize("where", ["moved", "linked", "ledger alone"])
def test_a_lost_ledger_is_found_wherever_the_folder_and_the_ledger_are(
    federate: Federate, where: str
) -> None:
    federation = federate(RECORD)
    site = federation.joined()
    site.contribute(asked(federation, number=1))
    ledger = Path(site.config.ledger)
    home, new = ledger.parent, federation.sites_folder / "new"
    match where:
        case "moved":
            home.rename(new)
        case "linked":
            new.symlink_to(home)
        case _:
            new.mkdir()
            ledger.rename(new / ledger.name)
    there = home if where == "ledger alone" else new
    config = read_config(there / "site.toml").model_copy(update={"ledger": str(new / ledger.name)})
    moved = Site(config, federation.resident)
    moved.join(federation.join_request())  # which charges nothing
    (new / ledger.name).unlink()
    with raises(LedgerError, new / ledger.name):
        moved.contribute(asked(federation, number=2))


DEMANDS = [
    ('units = ["record"]', SKELLAM, "unit of privacy"),
    ('units = ["site"]', RECORD, "unit of privacy"),
    ("least_noise = 1.5", RECORD, "noise multiplier"),
    ("greatest_delta = 1e-6", RECORD, "privacy.delta"),
    ("least_cohort = 5", SKELLAM, "fewest sites in a sum"),
    ("secure_required = true", CENTRAL, 'privacy.trusted_coordinator, or privacy.method = "opacus",'),
    ("most_rounds = 2", SKELLAM, "run.rounds"),
    ('models = ["gpt2"]', SKELLAM, "model.name"),
]


@pytest.mark.parametrize(("line", "settings", "field"), DEMANDS, ids=[line for line, *_ in DEMANDS])
@pytest.mark.usefixtures("before_masks")
def test_a_policy_is_checked_at_the_join_and_a_coordinator_that_goes_on_gets_nothing(
    federate: Federate, line: str, settings: list[str], field: str
) -> None:
    federation = federate(settings)
    demands = line if "secure_required" in line else f"secure_required = false\n{line}\n"
    site = federation.site(policy=demands)
    with raises(PolicyError, field):
        site.join(federation.join_request())
    with raises(PinnedError, "run", says="was asked"):
        site.contribute(asked(federation))
    assert federation.entries() == ()
    federation.joined()  # without the policy


@pytest.mark.usefixtures("before_masks")
def test_a_plan_with_less_privacy_is_not_slipped_in_after_a_private_one_was_joined(
    federate: Federate,
) -> None:
    """The policy demands a unit and noise; sums may be in clear, because the noise is in the update."""
    federation = federate(RECORD)
    site = federation.joined(policy='secure_required = false\nleast_noise = 0.5\nunits = ["record"]\n')
    bare = federation.plan.model_copy(update={"privacy": tiny().privacy})
    little = changed(federation.plan, "privacy", noise_multiplier=0.011)
    for plan in (bare, little):
        for purpose in ("train", EVALUATE):
            with raises(PinnedError, "digest of the plan"):
                site.contribute(federation.request(plan=plan, purpose=purpose))
        for run in (RUN, "another"):
            with pytest.raises(ConsentError if run == "another" else PinnedError):
                site.join(federation.join_request(plan, run))
            with pytest.raises(PinnedError):  # to ask for it first was of no use
                site.contribute(federation.request(plan=plan, run=run))
    assert federation.entries() == ()
    site.contribute(federation.request())  # the plan that was joined stays


def test_a_policy_that_cannot_be_read_is_named_without_the_sites_paths(federate: Federate) -> None:
    federation = federate(RECORD)
    site = federation.site(policy="units = 3\n")
    with pytest.raises(PlanError) as caught:
        site.join(federation.join_request())
    assert isinstance(caught.value.__cause__, PolicyError)
    assert str(federation.folder) in str(caught.value.__cause__)  # which is in the site's own log
    assert str(federation.folder) not in str(caught.value)
    assert reticent(caught.value) == "PlanError: the reason is in the site's own log"


# Refusals on their way to the coordinator.


def test_a_refusal_is_signed_and_believed(federate: Federate) -> None:
    federation = federate(SKELLAM)
    heard: list[Failure] = []
    federation.channel.sites["site-001"] = lambda: federation.site(1, policy="most_rounds = 1\n")
    members = federation.members(refused=heard.append)
    assert members.sites == ["site-000", "site-002", "site-003"]
    (failure,) = heard
    assert list(members.refusals) == heard
    assert failure.site == "site-001"
    assert failure.refused
    assert failure.reason.startswith("it refuses, signed: ")
    assert "run.rounds is 3: expected at most 1, by most_rounds of the site's policy" in failure.reason


def signed_by(federation: Federation, site: str, run: str = RUN, plan: bytes = b"") -> Refused:
    """A refusal that this site has signed."""
    key = load_identity(federation.sites_folder / site / "identity.pem")
    return sign_refusal(
        key, site=site, run=run, plan=plan or bytes.fromhex(federation.plan.digest()), reason="no"
    )


FORGED: dict[str, Callable[[Federation], Refused]] = {
    "by a stranger": lambda federation: sign_refusal(
        new_identity(),
        site="site-001",
        run=RUN,
        plan=bytes.fromhex(federation.plan.digest()),
        reason="no",
    ),
    "of another run": lambda federation: signed_by(federation, "site-001", run="past"),
    "of another plan": lambda federation: signed_by(federation, "site-001", plan=bytes(32)),
    "for another site": lambda federation: replace(signed_by(federation, "site-001"), site="site-002"),
    "of a site that is not in the roster": lambda federation: replace(
        signed_by(federation, "site-001"), site="site-009"
    ),
    "of changed words": lambda federation: replace(signed_by(federation, "site-001"), reason="budget"),
    "unsigned": lambda federation: replace(signed_by(federation, "site-001"), signature=b""),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_refusal_that_is_not_the_sites_own_is_not_believed(federate: Federate, how: str) -> None:
    federation = federate(SKELLAM)
    heard: list[Failure] = []
    forged = FORGED[how](federation)

    def tamper(_step: str, reply: Reply) -> Reply:
        return forged if reply.site == "site-001" else reply

    federation.channel.tamper = tamper
    members = federation.members(refused=heard.append)
    assert members.sites == ["site-000", "site-002", "site-003"]
    assert members.refusals == []
    (failure,) = heard
    assert not failure.refused
    assert "a refusal that" in failure.reason


def test_a_refusal_of_one_site_does_not_take_out_another(federate: Federate) -> None:
    federation = federate(SKELLAM)
    members = federation.members()
    shown = signed_by(federation, "site-001")
    federation.channel.tamper = lambda _step, _reply: shown
    (failure,) = members.ask({"site-002": asked(federation)}, 60, group="1")
    assert failure == Failure("site-002", "a refusal that site-001 has signed")
    (failure,) = members.ask({"site-001": asked(federation)}, 60, group="1")
    assert failure == Failure("site-001", "it refuses, signed: no", refused=True)


def test_a_budget_that_is_spent_in_a_round_is_a_signed_refusal(federate: Federate) -> None:
    """As a coordinator hears it: a site that refuses is not asked again."""
    federation = federate(RECORD)
    members = federation.members()
    (first,) = members.ask({"site-000": federation.request()}, 60, group="1")
    assert isinstance(first, Contribution)
    federation.channel.sites["site-000"] = lambda: federation.site(policy=greatest(federation, 1))
    (second,) = members.ask({"site-000": federation.request(number=2)}, 60, group="2")
    assert isinstance(second, Failure)
    assert second.refused
    assert second.reason == "it refuses, signed: the privacy budget of its data does not allow it"
    (third,) = members.ask({"site-000": federation.request(purpose=EVALUATE)}, 60, group="2")
    assert isinstance(third, Failure)
    assert third.refused


def test_too_many_refusals_end_it_with_one_line(federate: Federate) -> None:
    federation = federate(SKELLAM)
    for index, name in enumerate(federation.names):
        federation.channel.sites[name] = partial(federation.site, index, policy="most_rounds = 1\n")
    with raises(EngineError, "sites", says="most_rounds"):
        federation.members()


# What a message may carry.


@pytest.mark.parametrize("settings", [CENTRAL, SKELLAM], ids=["central", "skellam"])
@pytest.mark.usefixtures("before_masks")
def test_a_clipping_norm_out_of_range_is_refused_before_anything_is_charged(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate(settings)
    site = federation.joined()
    for clip in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-7, 1e7):
        with raises(UpdateError, "clipping norm"):
            site.contribute(asked(federation, clip=clip))
    assert federation.entries() == ()


@pytest.mark.parametrize("clip", [SMALLEST_CLIP, LARGEST_CLIP])
def test_no_clipping_norm_makes_a_site_send_more_than_one_norm(federate: Federate, clip: float) -> None:
    federation = federate([*CENTRAL, "privacy.adaptive={count_noise=2.0}"])
    vector = whole(federation.joined().contribute(federation.request(clip=clip)))
    layout = Sums(federation.plan, federation.model.size).training
    update = layout.open(vector, 1).mean[: federation.model.size].astype(np.float64)
    assert float(np.linalg.norm(update)) <= 1.001


def test_a_clipping_norm_that_does_not_adapt_is_the_plans(federate: Federate) -> None:
    federation = federate(CENTRAL)
    site, of_plan = federation.joined(), federation.plan.privacy.clip
    for clip in (of_plan / 2, float(np.nextafter(of_plan, 2))):
        with raises(UpdateError, "clipping norm", says="that of the plan"):
            site.contribute(federation.request(clip=clip))
    assert federation.entries() == ()
    assert whole(site.contribute(federation.request(clip=of_plan))).any()


def test_the_clip_of_a_message_does_not_touch_what_protects_a_record(federate: Federate) -> None:
    """Under the unit `record` the norm is the plan's."""
    federation = federate(RECORD)
    site = federation.joined()
    with raises(UpdateError, "instructions of features", says="this plan"):
        site.contribute(federation.request(clip=1e9))
    assert federation.entries() == ()
    assert whole(site.contribute(federation.request())).any()


BASE = ["public.source=public.txt", "model.adapter.scheme=ffa-lora"]
"""The plan of a run whose coordinator trains a base model on public records."""


def test_a_base_model_of_another_size_leaves_nothing_behind(federate: Federate) -> None:
    federation = federate([*RECORD, *BASE])
    site = federation.site()
    with pytest.raises(UpdateError):
        site.join(federation.join_request(base=np.zeros(10, np.float32)))
    assert not list(site.config.folder.glob("base-*"))
    assert not (site.config.folder / "runs").exists()
    with raises(PinnedError, "run", says="was asked"):
        site.contribute(federation.request())


@pytest.mark.parametrize("settings", [[], BASE[:1], BASE[1:]], ids=["neither", "public", "adapter"])
def test_a_model_that_the_plan_names_is_not_replaced_by_a_base(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate([*RECORD, *settings])
    full = load_model(changed(federation.plan, "model", adapter=AdapterSection()))
    base = full.layout.flatten(full.module)
    with raises(UpdateError, "base model", says="the plan names the model"):
        federation.site().join(federation.join_request(base=base))
    assert not (federation.site().config.folder / "runs").exists()


def test_a_run_that_was_joined_keeps_its_base_model(federate: Federate) -> None:
    """Another join of the same run cannot replace the base, or fill the disk with bases."""
    federation = federate([*RECORD, *BASE])
    full = load_model(changed(federation.plan, "model", adapter=AdapterSection()))
    base = full.layout.flatten(full.module)
    site = federation.site()
    site.join(federation.join_request(base=base))
    site.join(federation.join_request(base=base))
    with raises(PinnedError, "base model"):
        site.join(federation.join_request(base=base + 1))
    assert len(list(site.config.folder.glob("base-*"))) == 1
    assert site.contribute(federation.request())


@pytest.mark.parametrize("which", ["another model", "another length", "not finite"])
def test_a_base_model_that_is_not_the_one_named_is_refused(federate: Federate, which: str) -> None:
    federation = federate([*RECORD, *BASE, "model.adapter.rank=2"])
    base = np.zeros(10, np.float32)
    name = vector_hash(base)
    if which == "another model":
        base = base + 1
    elif which == "another length":
        name = b"../../elsewhere"
    else:
        base[3] = np.nan
        name = vector_hash(base)
    site = federation.site()
    with raises(UpdateError, "base model"):
        site.join(Join(RUN, federation.plan.to_json(), CHALLENGE, name, base))
    assert not list(site.config.folder.glob("base-*"))
    with raises(PinnedError, "run", says="was asked"):
        site.contribute(federation.request())
    assert federation.entries() == ()


def test_sums_in_clear_are_the_sites_own_decision_under_privacy_too(federate: Federate) -> None:
    federation = federate(RECORD)
    with raises(PlanError, "aggregation.secure"):
        federation.joined(secure=True)
    federation.joined()
    with raises(PlanError, "aggregation.secure"):  # also after it has joined
        federation.site(secure=True).contribute(federation.request())
    assert federation.entries() == ()


@pytest.mark.parametrize(
    "kind", [UpdateError, StorageError, BudgetError, PolicyError, PlanError], ids=lambda kind: kind.__name__
)
def test_the_text_of_an_error_tells_nothing_of_the_data(kind: type[CloisterError]) -> None:
    secret = kind("loss of patient 7", 3.14159, expected="/data/ward-3/records.jsonl")
    told = reticent(secret)
    assert told == f"{kind.__name__}: the reason is in the site's own log"
    assert "patient" in str(secret)  # which would have left


@pytest.mark.parametrize("kind", [StorageError, UpdateError], ids=lambda kind: kind.__name__)
def test_training_that_fails_is_charged_and_its_reason_stays(
    kind: type[CloisterError], federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A non-finite update is a fact about the data: zeros leave in its place, as from any other data."""
    federation = federate(CENTRAL)
    federation.channel.explain = reticent
    members = federation.members()

    def fail(*_: object, **__: object) -> None:
        raise kind("loss", 123.456, expected="a finite loss of 'patient 7'")

    monkeypatch.setattr(Trainer, "train", fail)
    (reply,) = members.ask({"site-000": federation.request()}, 60, group="1")
    if kind is UpdateError:
        assert isinstance(reply, Contribution)
        assert not whole(reply)[: federation.model.size].any()  # in this plan the coordinator adds the noise
    else:
        assert reply == Failure("site-000", "StorageError: the reason is in the site's own log")
    assert len(federation.entries()) == 1


@pytest.mark.parametrize("why", ["no records", "not finite"])
def test_a_site_without_an_update_sends_zeros_in_the_count_too(
    why: str, federate: Federate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The neighbour that the charge is for: what it sends differs by r in the count from what others send, not 2 r."""
    federation = federate([*CENTRAL, "privacy.adaptive={count_noise=2.0}"])
    site = federation.joined(
        data=str(write_records(tmp_path / "none.jsonl", 0 if why == "no records" else 9))
    )
    if why == "not finite":
        right = Trainer.train

        def overflow(*given: Any, **how: Any) -> LocalUpdate:
            update = right(*given, **how)
            update.vector[3] = math.inf
            return update

        monkeypatch.setattr(Trainer, "train", overflow)
    layout = Sums(federation.plan, federation.model.size).training
    opened = layout.open(whole(site.contribute(federation.request())).copy(), 1)
    assert (opened.mean.size, opened.counters) == (federation.model.size + 1, {WEIGHT: 1})
    assert not opened.mean.any()  # in this plan the coordinator adds the noise
    monkeypatch.undo()
    other = federation.joined(1)
    assert layout.open(whole(other.contribute(federation.request())).copy(), 1).mean[-1]


# What a policy needs of a site's configuration.


def test_a_limit_over_runs_needs_a_ledger_that_outlives_them(federate: Federate) -> None:
    federation = federate(RECORD)
    folder = federation.site().config.folder
    (folder.parent / "link").symlink_to(folder)
    inside = [folder, folder.parent / "other" / ".." / folder.name, folder.parent / "link"]
    for ledger in ("", *(str(each / "ledger.sqlite") for each in inside)):
        with raises(PlanError, "ledger of site-000"):
            federation.joined(policy=greatest(federation, 3), ledger=ledger)
    federation.joined(policy=greatest(federation, 3))


def test_a_limit_over_runs_needs_a_name_of_the_data(federate: Federate) -> None:
    """Data without one is called as its file, and a file that is moved would have spent nothing."""
    federation = federate(RECORD)
    with raises(PlanError, "dataset of site-000"):
        federation.joined(policy=greatest(federation, 3), dataset="")
    federation.joined(dataset="").contribute(federation.request())
    assert {entry.charge.dataset for entry in federation.entries()} == {"data.jsonl"}


def test_the_name_of_the_data_does_not_depend_on_where_the_configuration_is_read_from(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(RECORD)
    monkeypatch.chdir(federation.sites_folder)
    names = {
        read_config(path).data_name
        for path in (Path("site-000/site.toml"), federation.sites_folder / "site-000" / "site.toml")
    }
    assert names == {"data.jsonl"}


def lose_updates(site: Site) -> None:
    """As a crash before they were synced."""
    for path in site.config.folder.glob("runs/*/update-*"):
        path.unlink()


def test_a_run_costs_no_more_than_its_plan_however_often_a_site_is_asked(federate: Federate) -> None:
    """Without a budget in the plan or a limit in a policy: the plan's rounds, and some for what crashes have lost."""
    federation = federate([*RECORD, "run.rounds=2", "cohort.attempts=1"])
    site = federation.joined()
    for _ in range(3):
        site.contribute(federation.request())
        lose_updates(site)
    with raises(BudgetError, "epsilon of site-000 in this run"):
        site.contribute(federation.request())
    assert len(federation.entries()) == 3


def test_two_processes_cannot_both_spend_what_is_left_of_a_run(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's bound is looked at in the transaction that charges."""
    federation = federate([*RECORD, "run.rounds=1", "cohort.attempts=1"])
    site = federation.joined()
    looked: list[bool] = []
    charge_all = Ledger.charge_all

    def late(self: Ledger, charges: Any, budget: Any, check: Any) -> Any:
        if not looked:  # another process spends all that is left, before this one's transaction begins
            looked.append(True)
            for _ in range(2):
                site.contribute(federation.request())
                lose_updates(site)
        return charge_all(self, charges, budget, check)

    monkeypatch.setattr(Ledger, "charge_all", late)
    monkeypatch.setattr(Kept, "turn", lambda *_: contextlib.nullcontext())  # which lets one process train
    with raises(BudgetError, "epsilon of site-000 in this run"):
        site.contribute(federation.request())
    assert len(federation.entries()) == 2
