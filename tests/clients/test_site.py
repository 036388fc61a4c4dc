"""What a site refuses, whatever the coordinator sends: each guard, and the same attack where the guard is out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cloister.aggregation.features.in_clear import count_of_loss
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.sums import Sums
from cloister.clients.ranks.resident import Resident
from cloister.clients.site import Site
from cloister.clients.state import attempt_files
from cloister.clients.state.kept import ROUNDING_KEY, Kept, run_folder, update_path
from cloister.clients.training.work import Here
from cloister.lm.model.model import from_config
from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.policy import Policy
from cloister.protocol.errors import (
    AnsweredError,
    ConsentError,
    MemberError,
    PinnedError,
    PlanError,
    PolicyError,
    RosterError,
    SecureSumError,
    SignatureError,
    StaleError,
    StepError,
    StorageError,
    TooFewSitesError,
    UpdateError,
)
from cloister.protocol.identity.roster import Card, Roster, load_identity
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.joining import verify_joined
from cloister.protocol.messages.messages import (
    EVALUATE,
    TRAIN,
    Advertise,
    Agree,
    Begin,
    Confirm,
    Contribution,
    Inbox,
    Joined,
    Peers,
    Purpose,
    Reply,
    Request,
    Reveal,
    Shares,
    Step,
    Survivors,
    Told,
)
from cloister.protocol.messages.wire import encode
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.sum.channel import Failure
from cloister.tests.parties.federation import (
    CENTRAL,
    PRIVATE,
    RECORD,
    RUN,
    SKELLAM,
    Federation,
    changed,
    consents_of,
    tiny,
    whole,
)
from cloister.tests.tools.power import Power
from cloister.tests.tools.raises import raises
from cloister.tests.tools.touched import touched


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
        clip: The clipping norm that sites are told, if the unit of privacy is the site.
        purpose: What is summed.
        number: The round.
        config: Of the sites.
    """

    def __init__(
        self,
        federation: Federation,
        attempt: int = 1,
        clip: float = 0.0,
        purpose: Purpose = TRAIN,
        number: int = 1,
        **config: Any,
    ) -> None:
        self.federation, self.purpose, self.number = federation, purpose, number
        plan = federation.plan
        self.sites = [federation.joined(index, **config) for index in range(plan.cohort.sites)]
        layout = federation.layout
        model = layout.digest() + layout.source
        contract = Sums(plan, layout.size, model).contract(purpose, RUN, federation.roster)
        digest = instructions_digest(federation.told(purpose=purpose, clip=clip, number=number))
        self.coordinator = SecureCoordinator(contract, number, attempt, digest)

    def agree(self, site: Site, told: Told, **about: Any) -> Reply:
        about = {"purpose": self.purpose, "number": self.number, **about}
        return site.agree(Agree(self.federation.sum_id(**about), told))

    def contribute(self, site: Site, inbox: Inbox, **about: Any) -> Contribution:
        about = {"purpose": self.purpose, "number": self.number, **about}
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

    def fold(self, left_out: tuple[str, ...] = ()) -> None:
        """All steps until the vectors are summed, but for those of some sites."""
        coordinator, inboxes = self.coordinator, self.deal()
        for site in self.sites:
            contribution = self.contribute(site, inboxes[site.name])
            if site.name not in left_out:
                assert contribution.statement is not None
                coordinator.fold(contribution.statement, [(0, whole(contribution))])

    def carry_through(self, left_out: tuple[str, ...]) -> None:
        """All steps, with the vectors of some sites left out of the sum."""
        self.fold(left_out)
        coordinator, survivors = self.coordinator, self.coordinator.survivors()
        left = [site for site in self.sites if site.name not in left_out]
        for site in left:
            confirmed = self.agree(site, survivors)
            assert isinstance(confirmed, Confirm)
            coordinator.confirmed(confirmed)
        requests = coordinator.request()
        for site in left:
            revealed = self.agree(site, requests[site.name])
            assert isinstance(revealed, Reveal)
            coordinator.revealed(revealed)
        assert not coordinator.lacking


# Sums in clear.


def test_a_site_gives_nothing_in_clear_whatever_plan_a_message_carries(federation: Federation) -> None:
    clear = in_clear(federation.plan)
    site = federation.joined(pinned=False)
    with raises(PlanError, "aggregation.secure"):
        site.join(federation.join_request(clear))
    for purpose in (TRAIN, EVALUATE):
        # The plan of the sum is the one that the site has joined, and no message can name another.
        with raises(PinnedError, "digest of the plan", says="joined"):
            site.contribute(federation.request(plan=clear, purpose=purpose))
        # Under that plan there is no update without masks.
        with raises(UpdateError, "inbox"):
            site.contribute(federation.request(purpose=purpose))
    # Without the guard the same message opens the site's own update.
    vector = whole(without_guard(federation).contribute(federation.request(plan=clear)))
    assert np.abs(Sums(clear, federation.layout.size).training.open(vector, 1).mean).max() > 0


def test_a_site_whose_people_end_sums_in_clear_gives_nothing_in_clear_from_then_on(
    federation: Federation,
) -> None:
    """It has joined such a plan before, and its pins and files say so."""
    clear = in_clear(federation.plan)
    federation.joined(plan=clear, secure=False, pinned=False)
    site = federation.site(secure=True, pinned=False)
    for purpose in (TRAIN, EVALUATE):
        with raises(PlanError, "aggregation.secure"):
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
    with raises(UpdateError, "global model", says="hash"):
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

    monkeypatch.setattr("cloister.clients.site.preparation_of", used)
    with raises(UpdateError, "global model", says="non-finite"):
        site.contribute(federation.request(model=crafted, purpose=purpose))


# One plan, one run.


@pytest.mark.parametrize("pinned", [True, False], ids=["named in its TOML", "accepted by a command"])
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
        with raises(PinnedError, "digest of the plan", says="joined"):
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
        with raises(PinnedError, "run", says="was asked"):
            act()
    with pytest.raises(ConsentError):
        site.join(federation.join_request(run="an0ther"))
    for act in acts:  # the join that was refused has opened nothing
        with pytest.raises(PinnedError):
            act()
    assert attack.contribute(site, inboxes[site.name]).statement


def test_a_message_of_a_run_that_was_not_joined_takes_no_consent(federation: Federation) -> None:
    site = federation.site()
    begin = Begin(1, 1, bytes(32))
    with raises(PinnedError, "run", says="was asked"):
        site.agree(Agree(federation.sum_id(run="junk"), begin))
    site.join(federation.join_request())


def test_a_site_joins_no_plan_that_its_people_did_not_consent_to(federation: Federation) -> None:
    renamed = changed(federation.plan, "run", name="same-but-for-the-name")
    with pytest.raises(ConsentError):
        federation.site().join(federation.join_request(renamed))
    with pytest.raises(ConsentError):
        federation.site(pinned=False).join(federation.join_request())
    loose = federation.joined(1, plan=renamed, pinned=False)
    with pytest.raises(ConsentError):
        loose.join(federation.join_request(run="0ther"))


def test_a_run_has_one_plan(federation: Federation) -> None:
    site, other = federation.joined(), changed(federation.plan, "run", name="other")
    consents_of(site).give(other.digest())
    with pytest.raises(PinnedError):
        site.join(federation.join_request(other))
    assert not consents_of(site).runs(other.digest())


def test_the_files_of_a_run_may_be_removed_but_it_is_not_begun_again(federation: Federation) -> None:
    attack = Attack(federation)
    attack.carry_through(())
    for site in attack.sites:
        shutil.rmtree(run_folder(site.config.folder, RUN))
        with pytest.raises(StorageError):
            site.join(federation.join_request())


def test_a_join_that_is_repeated_changes_nothing(federation: Federation) -> None:
    """A coordinator that was restarted asks all sites again."""
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    assert site.join(federation.join_request()).site == site.name
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
        with raises(StaleError, "round", says=f"to {rounds},"):
            site.agree(request)
    assert site.agree(Agree(federation.sum_id(purpose=purpose), begin))


def test_there_is_no_update_for_a_round_that_the_plan_does_not_have(federation: Federation) -> None:
    for number in (0, federation.plan.run.rounds + 1):
        with raises(StaleError, "round", says="1 to 3"):
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
    offered = SecureCoordinator(three, 1, 1, instructions_digest(federation.told()))
    site = federation.joined()
    reply = site.agree(Agree(federation.sum_id(), offered.begin))
    assert isinstance(reply, Advertise)
    with raises(StaleError, "message of site-000"):
        offered.advertised(reply)
    assert reply.context == Attack(federation).coordinator.attempt.context


@pytest.mark.parametrize(
    "settings", [SKELLAM, [*PRIVATE, "privacy.unit=record", "privacy.sampling_rate=0.5"], []]
)
@pytest.mark.parametrize("what", ["model", "clip"])
def test_a_round_has_one_update(tmp_path: Path, settings: list[str], what: str) -> None:
    """From two updates of one site, each summed with the same others, a coordinator computes their difference."""
    federation = Federation(
        tmp_path, tiny(*settings, *(["privacy.adaptive={count_noise=2.0}"] if settings == SKELLAM else []))
    )
    plain = federation.plan.privacy.unit != "site"
    clip = 0.0 if plain else 1.0
    attack = Attack(federation, clip=clip)
    inboxes, site = attack.deal(), attack.sites[0]
    other: dict[str, Any] = {"model": federation.model + 1} if what == "model" else {"clip": 2.0}
    # The attempt has another model or norm: nothing is trained, and nothing is charged.
    with pytest.raises(StaleError if not (plain and what == "clip") else UpdateError):
        attack.contribute(site, inboxes[site.name], **other)
    assert federation.entries() == ()
    first = attack.contribute(site, inboxes[site.name])
    paid = len(federation.entries())
    # A later attempt has it, too, and the site has made its update.
    again = Attack(federation, attempt=2, clip=other.get("clip", clip))
    told = federation.told(**{"clip": clip, **other})
    again.coordinator = SecureCoordinator(again.coordinator.contract, 1, 2, instructions_digest(told))
    later = again.deal()
    with pytest.raises((StaleError, UpdateError)):
        again.contribute(site, later[site.name], **other)
    assert len(federation.entries()) == paid
    third = Attack(federation, attempt=3, clip=clip)
    repeated = third.contribute(site, third.deal()[site.name])
    assert first.manifest != repeated.manifest  # other masks
    assert len(federation.entries()) == paid


def test_two_processes_make_one_update(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow process of an ended attempt does not replace an update that another one has sent, and pays alone."""
    clear = Federation(federation.folder / "clear", tiny(*CENTRAL))
    slow, fast = clear.joined(), clear.site(resident=Resident())
    inside, released = threading.Event(), threading.Event()
    train = Here.update  # the guard is around it

    def trained(self: Here, *arguments: Any) -> Any:
        if not inside.is_set():
            inside.set()
            assert released.wait(60)
        return train(self, *arguments)

    monkeypatch.setattr(Here, "update", trained)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.contribute, clear.request())
        assert inside.wait(60)
        with raises(StepError, "update", says="one process"):
            fast.contribute(clear.request(tries=2))
        released.set()
        assert np.array_equal(whole(first.result()), whole(fast.contribute(clear.request(tries=3))))
    assert len(clear.entries()) == 1


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (["server.evaluation=none"], 0),
        (["server.evaluation=none"], 3),
        (["server.evaluate_every=2"], 1),
        (["server.evaluation=records.jsonl"], 3),
    ],
)
def test_a_site_evaluates_only_what_the_plan_lets_it(
    tmp_path: Path, settings: list[str], number: int
) -> None:
    federation = Federation(tmp_path, tiny(*settings))
    site = federation.joined()
    begin = Begin(number, 1, vector_hash(federation.model))
    for request in (
        Agree(federation.sum_id(purpose=EVALUATE, number=number), begin),
        federation.request(purpose=EVALUATE, number=number),
    ):
        with raises(StaleError, f"evaluation of round {number}", says="due"):
            site.answer(request)


@pytest.mark.parametrize("purpose", [TRAIN, EVALUATE])
def test_a_contribution_that_was_lost_is_sent_again_byte_for_byte_without_the_work(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, purpose: Purpose
) -> None:
    """Also after a power cut: what is masked was on disk before its masks were used."""
    attack = Attack(federation, purpose=purpose)
    inbox = attack.deal()[federation.names[0]]
    with Power(attack.sites[0].config.folder, monkeypatch) as power:
        first = attack.contribute(attack.sites[0], inbox)
        power.cut()

        def work(*_: object) -> None:
            raise AssertionError("the work is done again")

        monkeypatch.setattr(Here, "update", work)
        monkeypatch.setattr(Here, "held_out", work)
        again = attack.contribute(federation.site(resident=Resident()), inbox)
    assert np.array_equal(whole(again), whole(first))
    assert (again.statement, again.manifest, again.seconds) == (
        first.statement,
        first.manifest,
        first.seconds,
    )


def test_an_update_with_other_noise_is_not_masked_in_its_place(tmp_path: Path) -> None:
    """The file of the update is gone, and the site trains again; the coordinator could subtract the two."""
    federation = Federation(tmp_path, tiny(*SKELLAM))
    attack = Attack(federation, clip=1.0)
    site, inbox = attack.sites[0], attack.deal()[federation.names[0]]
    first = attack.contribute(site, inbox, clip=1.0)
    update_path(run_folder(site.config.folder, RUN), 1).unlink()
    with raises(StaleError, "update of round 1", says="lost"):
        attack.contribute(site, inbox, clip=1.0)
    assert first.statement is not None


@pytest.mark.parametrize("unit", ["site", "none"])
def test_a_model_that_fails_on_a_record_makes_no_dropout_of_a_site_that_is_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """It sends zeros with its noise, as for an update that is not finite: whether a record fails depends on data."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise IndexError("index 290 is out of bounds")

    told: dict[str, Any] = {"clip": 1.0} if unit == "site" else {}
    settings = SKELLAM if unit == "site" else ()
    attack = Attack(Federation(tmp_path, tiny(*settings)), **told)
    site, inboxes = attack.sites[0], attack.deal()
    monkeypatch.setattr(Trainer, "train", fail)
    if unit == "none":
        with pytest.raises(IndexError):
            attack.contribute(site, inboxes[site.name], **told)
    else:
        assert attack.contribute(site, inboxes[site.name], **told).statement is not None


def test_what_a_site_keeps_is_readable_by_its_owner_alone(federation: Federation) -> None:
    attack = Attack(federation)
    attack.contribute(attack.sites[0], attack.deal()[attack.sites[0].name])
    (update,) = attack.sites[0].config.folder.glob("runs/*/update-*.ring")
    assert update.stat().st_mode & 0o077 == 0


def test_rounding_is_a_secret_of_the_site(federation: Federation) -> None:
    """A coordinator that knew the draws would read single sites' signs in a sum of small values."""
    plan, made = in_clear(federation.plan), []
    for state in ("one", "one", "other"):  # all that is public is the same
        folder = federation.folder / state
        site = federation.joined(plan=plan, secure=False, state=str(folder), pinned=False)
        made.append(whole(site.contribute(federation.request(plan=plan)))[: federation.layout.size])
        update_path(run_folder(site.config.folder, RUN), 1).unlink()  # the next one makes it again
    one, again, other = (vector.view(np.int32).astype(int) for vector in made)
    assert np.array_equal(one, again)
    assert np.abs(other - one).max() == 1, "both round the same update"
    assert 0.2 < np.mean(one != other) < 0.5, "the chance is 2 u (1 - u): a third on average"
    kept = Kept(federation.folder / "one", federation.folder)
    assert kept.rounding_key(RUN) != kept.rounding_key("another run"), (
        "sums of one run show no draws of another"
    )
    key = federation.folder / "one" / ROUNDING_KEY
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"")
    with raises(StorageError, key):
        federation.joined(plan=plan, secure=False, state=str(key.parent), pinned=False).contribute(
            federation.request(plan=plan)
        )


def test_shares_for_another_site_are_refused(federation: Federation) -> None:
    attack = Attack(federation)
    inboxes = attack.deal()
    first, second = attack.sites[:2]
    with pytest.raises(SecureSumError):
        attack.contribute(first, inboxes[second.name])


def test_a_site_answers_for_one_list_of_survivors_through_attempts(federation: Federation) -> None:
    Attack(federation).carry_through(left_out=())
    again = Attack(federation, attempt=2)
    with raises(AnsweredError, "survivors"):
        again.carry_through(left_out=(federation.names[3],))


@pytest.mark.parametrize("revealed", [True, False])
def test_a_site_makes_no_second_update_of_a_round_for_which_it_has_masked_one(
    federation: Federation, revealed: bool
) -> None:
    """Its update is lost. The difference of two sums with another one is that of one site's updates; the first sum is
    opened by the shares of others, whether the site itself reveals or not."""
    first = Attack(federation)
    if revealed:
        first.carry_through(left_out=())
    else:
        first.fold()
    update_path(run_folder(first.sites[0].config.folder, RUN), 1).unlink()
    with raises(StaleError, "update of round 1", says="lost"):
        Attack(federation, attempt=2).fold()


def test_what_a_killed_process_has_written_is_on_disk_before_its_vector_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed at any sync of a contribution, the next one makes it, and then the power is cut. Without the
    mark or the update the site would make a second one: the difference of two sums would be one site's."""
    for sync in itertools.count():
        federation = Federation(tmp_path / f"{sync}", tiny(*SKELLAM))
        attack = Attack(federation, clip=federation.plan.privacy.clip)
        inbox = attack.deal()[attack.sites[0].name]
        folder = attack.sites[0].config.folder

        def contribution(attack: Attack = attack, inbox: Inbox = inbox) -> bytes:
            """What another process of the site sends."""
            process = attack.federation.site(0, resident=Resident())
            return whole(
                attack.contribute(process, inbox, clip=attack.federation.plan.privacy.clip)
            ).tobytes()

        with Power(folder, monkeypatch) as power:
            with power.stopped_at(sync) as ended:
                contribution()
            sent = contribution()
            power.cut()
            with attempt_files.AttemptFiles.turn(
                run_folder(folder, RUN) / "secure" / TRAIN, attack.coordinator.contract.run
            ) as files:
                assert files.state(None).marks.masked == 1
            assert contribution() == sent
        if not ended:
            break
    assert sync > 4


OTHER_MODELS = [
    "model.safetensors",
    "config.json",
    "tokenizer_config.json",
    "additional_chat_templates/default.jinja",
]


@pytest.mark.parametrize(
    "changed_file", [*OTHER_MODELS, "shards/model.safetensors", "named/model.safetensors"]
)
def test_sites_with_other_files_of_the_model_sign_no_sum_together(tmp_path: Path, changed_file: str) -> None:
    """A branch on the hub moves between two downloads, so that frozen weights, configuration or tokenizer of one site
    differ, and the others' updates are zero or known. Which files are read follows from the content of others."""
    folder = tmp_path / "base"
    made = AutoConfig.for_model(
        "llama",
        vocab_size=264,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    from_config(made, CAUSAL).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "other": "{{ messages }}"}
    tokenizer.save_pretrained(folder)
    path = folder / changed_file
    if path.parent.name in ("shards", "named"):
        path.parent.mkdir()
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(path)
    if path.parent.name == "shards":
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, changed_file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif path.parent.name == "named":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": changed_file}))
    elif path.suffix == ".jinja":
        path.write_text("{{ messages }}")
    model = [
        f"model.name={folder}",
        "model.config={}",
        "model.tokenizer=auto",
        "model.adapter.scheme=ffa-lora",
    ]
    federation = Federation(tmp_path / "sites", tiny(*model))
    attack = Attack(federation)
    if path.suffix == ".safetensors":
        weights = load_file(path)
        weights["lm_head.weight"].zero_()
        save_file(weights, path, {"format": "pt"})
    elif path.suffix == ".jinja":
        path.write_text("{{ messages[0] }}")
    else:
        path.write_text(path.read_text().rstrip()[:-1] + ', "another": 1}')
    attack.sites[0] = federation.joined(0, resident=Resident())
    advertised = []
    for site in attack.sites:
        keys_of_site = attack.agree(site, attack.coordinator.begin)
        assert isinstance(keys_of_site, Advertise)
        advertised.append(keys_of_site)
    with pytest.raises(SecureSumError):
        attack.coordinator.advertised(advertised[0])
    context = attack.coordinator.attempt.context
    for site in attack.sites:
        with pytest.raises(SecureSumError):
            attack.agree(site, Peers(context, tuple(advertised)))


class Damage(Attack):
    """It damages a slot of each site's marks, the newest or the other, as soon as the site has answered a step."""

    def __init__(
        self, federation: Federation, attempt: int, number: int, step: Step, *, newest: bool
    ) -> None:
        super().__init__(federation, attempt, number=number)
        self.step, self.newest = step, newest

    def agree(self, site: Site, told: Told, **about: Any) -> Reply:
        answer = super().agree(site, told, **about)
        self._damage(site, told.STEP)
        return answer

    def contribute(self, site: Site, inbox: Inbox, **about: Any) -> Contribution:
        contribution = super().contribute(site, inbox, **about)
        self._damage(site, Step.UPDATE)
        return contribution

    def _damage(self, site: Site, step: Step) -> None:
        if step is self.step:
            (file,) = site.config.folder.glob(f"runs/*/secure/{TRAIN}/marks")
            slots = [bytearray(part) for part in (file.read_bytes()[:4096], file.read_bytes()[4096:])]
            found = [attempt_files._marks_in(RUN, bytes(slot)) for slot in slots]
            order = sorted((marks.writes, place) for place, marks in enumerate(found) if marks is not None)
            slots[order[-1 if self.newest else 0][1]][9] ^= 1
            file.write_bytes(b"".join(slots))


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("newest", [True, False])
def test_a_site_with_a_damaged_slot_answers_for_one_list_of_survivors(tmp_path: Path, newest: bool) -> None:
    """Damaged after each step of the attempt that it answers, or of the next one: each time in another round."""
    before = [(1, step) for step in Step] + [(2, Step.ADVERTISE), (2, Step.SHARE), (2, Step.UPDATE)]
    federation = Federation(tmp_path, tiny(f"run.rounds={len(before)}"))
    for number, (attempt, step) in enumerate(before, 1):
        first, second = (
            Damage(federation, each, number, step, newest=newest)
            if each == attempt
            else Attack(federation, each, number=number)
            for each in (1, 2)
        )
        first.carry_through(left_out=())
        with raises(AnsweredError, "survivors"):
            second.carry_through(left_out=(federation.names[3],))


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
        with raises(TooFewSitesError, "sites with keys", says="at least 4"):
            attack.agree(attack.sites[0], peers)
    else:
        assert attack.agree(attack.sites[0], peers)


@pytest.mark.parametrize("nats", [float("nan"), float("inf"), 1e300])
def test_a_loss_without_measure_is_one_fixed_count_and_no_error(nats: float) -> None:
    """A non-finite or huge loss gives no error, because an error would reveal it."""
    ring = Sums(parse(""), 1).training.ring
    assert count_of_loss(nats) == count_of_loss(2.0**40)
    assert ring.decode_counters(ring.encode_counters([count_of_loss(nats)])) == [count_of_loss(nats)]
    assert count_of_loss(-1.5) == 0
    assert count_of_loss(1.5) == 3 * 2**19


# A policy that is tightened after the join.

LAX = {
    "units": '["none", "record", "window", "owner", "site"]',
    "trusted_coordinator": "true",
    "least_cohort": "1",
    "secure_required": "false",
    "sketches": "3",
}
"""A policy that allows every plan of these tests."""
WINDOW = [*RECORD, "privacy.record=window"]
SKETCHED = [*RECORD, "aggregation.secure=true", "aggregation.norm_bound=1.0"]
OWNED = [
    *PRIVATE,
    "aggregation.secure=false",
    "privacy.unit=owner",
    "privacy.sampling_rate=0.5",
    "data.owner=text",
]

TIGHTER: dict[str, tuple[list[str], dict[str, str]]] = {
    "units": (SKELLAM, {"units": '["record"]'}),
    "owner_fields": (OWNED, {"owner_fields": '["person"]'}),
    "least_window": (WINDOW, {"least_window": "17"}),
    "least_noise": (SKELLAM, {"units": '["site"]', "least_noise": "1.5"}),
    "greatest_epsilon": (
        SKELLAM,
        {"units": '["site"]', "greatest_epsilon": "0.001", "greatest_delta": "0.5"},
    ),
    "greatest_delta": (SKELLAM, {"units": '["site"]', "greatest_delta": "1e-6"}),
    "trusted_coordinator": (CENTRAL, {"trusted_coordinator": "false"}),
    "least_cohort": (SKELLAM, {"least_cohort": "5"}),
    "secure_required": (CENTRAL, {"secure_required": "true"}),
    "sketches": (SKETCHED, {"sketches": "0"}),
    "roster_hash": (SKELLAM, {"roster_hash": f'"{"ab" * 32}"'}),
    "models": (SKELLAM, {"models": '["gpt2"]'}),
    "tokenizers": (SKELLAM, {"tokenizers": '["gpt2"]'}),
    "adapters": (SKELLAM, {"adapters": '["lora"]'}),
    "most_rounds": (SKELLAM, {"most_rounds": "2"}),
}
"""For each demand a plan, and what its policy becomes after the join."""


class Watched:
    """A federation whose first site has a policy that its people change.

    Args:
        folder: Of the federation.
        settings: Of its plan.
    """

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.federation = Federation(folder, tiny(*settings))
        self.name = self.federation.names[0]
        self.policy = LAX
        self.federation.channel.sites[self.name] = self.site
        self.members = self.federation.members()

    def site(self) -> Site:
        text = "".join(f"{demand} = {value}\n" for demand, value in self.policy.items())
        return self.federation.site(policy=text)

    def begin(self) -> Agree:
        return Agree(self.federation.sum_id(), Begin(1, 1, vector_hash(self.federation.model)))

    def ask(self, request: Request) -> Reply | Failure:
        """What the coordinator makes of the site's answer."""
        (answer,) = self.members.ask({self.name: request}, 60, group="1")
        return answer


def refusal_of(answer: Reply | Failure, demand: str) -> None:
    assert isinstance(answer, Failure)
    assert answer.refused
    assert answer.reason.startswith("it refuses, signed: ")
    reason = "the privacy budget of its data" if demand == "greatest_epsilon" else f"by {demand} of the site"
    assert reason in answer.reason


def test_every_demand_can_be_tightened() -> None:
    # `families` is a consent, and no demand; `packages` is in tests/protocol/machine/test_packages.py.
    assert set(TIGHTER) == set(Policy.model_fields) - {
        "families",
        "packages",
        "questions",
        "greatest_question_epsilon",
    }


@pytest.mark.parametrize("demand", TIGHTER)
def test_a_policy_that_is_tightened_after_the_join_holds_from_the_next_attempt(
    tmp_path: Path, demand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site refuses before it uses a record; its refusal is signed, and the coordinator accepts it."""
    settings, change = TIGHTER[demand]
    watched = Watched(tmp_path, settings)
    assert watched.name in watched.members.sites
    requests: list[Request] = [watched.federation.request()]
    if watched.federation.plan.aggregation.secure:
        requests.append(watched.begin())
    trained: list[object] = []
    monkeypatch.setattr("cloister.clients.site.Site._update", lambda *_: trained.append(None))
    watched.policy = LAX | change
    for request in requests:
        refusal_of(watched.ask(request), demand)
    assert not trained
    assert watched.federation.entries() == ()
    # As it was at the join, it allows the same requests.
    monkeypatch.undo()
    watched.policy = LAX
    answers = [watched.ask(request) for request in reversed(requests)]
    assert not any(isinstance(answer, Failure) and answer.refused for answer in answers)
    assert isinstance(answers[0], Advertise | Contribution)


def test_a_policy_that_is_tightened_in_an_attempt_stops_training_and_not_what_follows(
    federation: Federation,
) -> None:
    """After its vector is masked, a refusal of the site would end the attempt and protect nothing."""
    tight = "".join(f"{demand} = {value}\n" for demand, value in (LAX | {"most_rounds": "2"}).items())
    attack = Attack(federation)
    inboxes, names = attack.deal(), federation.names
    with raises(PolicyError, "run.rounds"):
        attack.contribute(federation.site(policy=tight), inboxes[names[0]])
    for site in attack.sites:
        contribution = attack.contribute(site, inboxes[site.name])
        assert contribution.statement is not None
        attack.coordinator.fold(contribution.statement, [(0, whole(contribution))])
    survivors = attack.coordinator.survivors()
    after = [federation.site(index, policy=tight) for index in range(len(names))]
    for site in after:
        confirmed = attack.agree(site, survivors)
        assert isinstance(confirmed, Confirm)
        attack.coordinator.confirmed(confirmed)
    requests = attack.coordinator.request()
    for site in after:
        assert isinstance(attack.agree(site, requests[site.name]), Reveal)


def test_the_last_round_is_tried_again_under_a_policy_that_its_run_uses_up(tmp_path: Path) -> None:
    """A retry sums the update that is kept: it costs nothing more."""
    watched = Watched(tmp_path, [*RECORD, "run.rounds=1"])
    terms = terms_of(watched.federation.plan, watched.federation.layout.size)
    assert terms is not None
    limit = {"greatest_epsilon": f"{terms.epsilon(1) * 1.0001}", "greatest_delta": f"{terms.delta}"}
    watched.policy = {**LAX, **limit, "units": '["record"]'}
    first, again = (watched.ask(watched.federation.request(tries=tries)) for tries in (1, 2))
    assert isinstance(first, Contribution)
    assert isinstance(again, Contribution)
    assert np.array_equal(whole(again), whole(first))
    assert len(watched.federation.entries()) == 1


def test_a_policy_is_checked_at_each_message_at_little_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's chain is not hashed again, the rounds are not drawn again and the model is not counted again."""
    watched = Watched(tmp_path, [*RECORD, "cohort.fraction=0.75"])
    watched.policy = {**LAX, "units": '["record"]', "greatest_epsilon": "1e6", "greatest_delta": "0.5"}
    assert isinstance(watched.ask(watched.federation.request()), Contribution)
    assert isinstance(watched.ask(watched.federation.request(tries=2)), Contribution)
    assert len(watched.federation.entries()) == 1

    def again(*_: object) -> None:
        raise AssertionError("it was computed again")

    for name in (
        "privacy.ledger.ledger.link",
        "protocol.messages.cohort.Draw.cohort",
        "clients.consent.admission.count_parameters",
    ):
        monkeypatch.setattr(f"cloister.{name}", again)
    assert isinstance(watched.ask(watched.federation.request(tries=3)), Contribution)


# The size of the roster.


@pytest.mark.parametrize("sites", [3, 5])
def test_a_roster_of_another_size_than_the_plans_is_refused_at_the_join(
    federation: Federation, sites: int
) -> None:
    """Ring, draw and threshold are computed from cohort.sites: more sites would wrap the ring of an evaluation."""
    plan = changed(federation.plan, "cohort", sites=sites)
    site = federation.consenting(plan=plan)
    with raises(RosterError, "roster", says=("4 sites", f"expected {sites} sites", "set cohort.sites = 4")):
        site.answer(federation.join_request(plan))
    with pytest.raises(ConsentError):
        site.answer(federation.join_request())
    assert federation.consenting().answer(federation.join_request())


def test_in_clear_a_roster_does_not_say_who_takes_part(federation: Federation) -> None:
    plan = changed(in_clear(federation.plan), "cohort", sites=5)
    assert federation.joined(plan=plan, secure=False, pinned=False)


# What a site signs when it joins.


def test_a_site_signs_its_answer_to_the_join_that_it_was_asked(federation: Federation) -> None:
    request, plan = federation.join_request(), bytes.fromhex(federation.plan.digest())
    joined = federation.site().answer(request)
    assert isinstance(joined, Joined)
    verify_joined(joined, federation.roster, request, plan=plan)
    for other in (
        dataclasses.replace(request, challenge=bytes(32)),
        dataclasses.replace(request, run="an0ther"),
        dataclasses.replace(request, base_hash=bytes(32)),
    ):
        with pytest.raises(SignatureError):
            verify_joined(joined, federation.roster, other, plan=plan)
    with pytest.raises(SignatureError):
        verify_joined(joined, federation.roster, request, plan=bytes(32))
    for name, error in (("site-001", SignatureError), ("stranger", MemberError)):
        with pytest.raises(error):
            verify_joined(dataclasses.replace(joined, site=name), federation.roster, request, plan=plan)
    # Nor is it the answer of a site with that key and another name.
    key = load_identity(federation.sites_folder / "site-000" / "identity.pem")
    renamed = dataclasses.replace(joined, site="renamed")
    with pytest.raises(SignatureError):
        verify_joined(renamed, Roster.of([Card.of("renamed", key)]), request, plan=plan)


def test_a_site_without_an_identity_joins_sums_in_clear_without_a_signature(federation: Federation) -> None:
    plan = in_clear(federation.plan)
    site = federation.consenting(plan=plan, secure=False, identity="", roster="")
    assert site.answer(federation.join_request(plan)) == Joined("site-000", b"")


# The attempt that a process has in memory, and what is read again.


def in_own_processes(federation: Federation) -> Attack:
    """An attempt of sites that share no process."""
    attack = Attack(federation)
    attack.sites = [federation.joined(index, resident=Resident()) for index, _ in enumerate(federation.names)]
    return attack


def test_a_signature_under_the_survivors_takes_ten_files(federation: Federation) -> None:
    """So much of the product runs between the request and 32 signed bytes, at the site and at the coordinator."""
    attack = in_own_processes(federation)
    attack.fold()
    with touched() as built:
        survivors = attack.coordinator.survivors()
    for site in attack.sites:
        request = Agree(federation.sum_id(), survivors)
        with touched() as signed:
            assert isinstance(site.answer(request), Confirm)
        assert {"clients/site.py", "clients/state/attempt_files.py"} < signed.files
        assert len(signed.files) <= 10, sorted(signed.files)
    assert len(built.files) <= 2, sorted(built.files)


def test_a_process_that_restarts_in_an_attempt_answers_the_same(federation: Federation) -> None:
    """Each message to the process that has the attempt in memory, to a new one, and to the first again."""
    attack = in_own_processes(federation)
    coordinator, site = attack.coordinator, attack.sites[0]

    def answered(request: Request) -> Reply:
        answers = [each.answer(request) for each in (site, federation.site(resident=Resident()), site)]
        frames = [[bytes(frame) for frame in encode(answer)] for answer in answers]
        assert frames[0] == frames[1] == frames[2]
        return answers[0]

    def told(message: Told) -> Reply:
        return answered(Agree(federation.sum_id(), message))

    took = {Begin: coordinator.advertised, Peers: coordinator.shared, Survivors: coordinator.confirmed}

    def all_told(message: Told) -> None:
        take: Any = took[type(message)]
        take(told(message))
        for other in attack.sites[1:]:
            take(attack.agree(other, message))

    all_told(coordinator.begin)
    all_told(coordinator.peers())
    inboxes = coordinator.inboxes()
    for each in attack.sites:
        request = federation.request(inbox=inboxes[each.name])
        contribution = answered(request) if each is site else each.answer(request)
        assert isinstance(contribution, Contribution)
        assert contribution.statement is not None
        coordinator.fold(contribution.statement, [(0, whole(contribution))])
    all_told(coordinator.survivors())
    requests = coordinator.request()
    assert isinstance(told(requests[site.name]), Reveal)


@pytest.mark.parametrize("file", ["consents/*.taken", "consents/run-*", "runs/*/joined.json"])
def test_a_consent_or_plan_that_changes_in_an_attempt_counts_in_a_new_process_and_at_the_next_attempt(
    federation: Federation, file: str
) -> None:
    attack = in_own_processes(federation)
    attack.fold()
    survivors, site = attack.coordinator.survivors(), attack.sites[0]
    (path,) = site.config.folder.glob(file)
    path.write_bytes(b"0ther")
    with pytest.raises(PinnedError):
        attack.agree(federation.site(resident=Resident()), survivors)
    assert isinstance(attack.agree(site, survivors), Confirm)
    begin = dataclasses.replace(attack.coordinator.begin, attempt=2)
    for message in (begin, survivors):  # a `Begin` that is refused leaves nothing in memory
        with pytest.raises(PinnedError):
            attack.agree(site, message)


def test_a_site_has_the_attempt_that_it_joined_last_in_memory_until_it_reveals(
    federation: Federation,
) -> None:
    attack, resident = Attack(federation), federation.resident
    attack.fold()
    survivors = attack.coordinator.survivors()
    first = {key: attempts for key, (*_, attempts) in resident.opened.items()}
    assert len(first) == len(attack.sites)
    again = Attack(federation, attempt=2)
    again.deal()
    assert first.keys() == resident.opened.keys()
    assert not any(resident.opened[key][2] is attempts for key, attempts in first.items())
    with pytest.raises(SecureSumError):
        attack.agree(attack.sites[0], survivors)
    totals = Attack(federation, purpose=EVALUATE)
    totals.deal()
    assert {about.purpose for _, about, _ in resident.opened.values()} == {EVALUATE}
    without_guard(federation)  # another plan, for which the process drops what it has loaded
    assert resident.opened == {}
    Attack(federation, attempt=3).carry_through(())
    assert resident.opened == {}


def test_the_attempt_in_memory_answers_for_its_own_sum_alone(federation: Federation) -> None:
    attack = Attack(federation)
    attack.fold()
    survivors, site = attack.coordinator.survivors(), attack.sites[0]
    others: tuple[dict[str, Any], ...] = (
        {"run": "an0ther"},
        {"plan": in_clear(federation.plan)},
        {"purpose": EVALUATE},
        {"number": 2},
    )
    for other in others:
        with pytest.raises(SecureSumError):
            attack.agree(site, survivors, **other)
    (pin,) = site.config.folder.glob("consents/*.taken")
    # What is derived again is refused now: none of those messages has dropped the attempt.
    pin.write_bytes(b"0ther")
    assert isinstance(attack.agree(site, survivors), Confirm)


@pytest.mark.parametrize("failing", [Step.SHARE, Step.CONFIRM])
def test_a_step_that_is_not_on_disk_is_not_taken_in_memory_either(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Step
) -> None:
    """The disk is full once. A copy of the site's folder gives the later request that is asked too early."""
    attack = in_own_processes(federation)
    coordinator, site = attack.coordinator, attack.sites[0]
    if failing is Step.SHARE:
        for each in attack.sites:
            advertised = attack.agree(each, coordinator.begin)
            assert isinstance(advertised, Advertise)
            coordinator.advertised(advertised)
    else:
        attack.fold()
    message = coordinator.peers() if failing is Step.SHARE else coordinator.survivors()
    shutil.copytree(site.config.folder, tmp_path / "copy")

    def full(*_: object) -> None:
        raise StorageError("attempt", expected="a disk that accepts the write")

    with monkeypatch.context() as disk:
        disk.setattr(attempt_files.AttemptFiles, "keep", full)
        with pytest.raises(StorageError):
            attack.agree(site, message)
    copy = federation.site(state=str(tmp_path / "copy"), resident=Resident())
    answers = [attack.agree(each, message) for each in (copy, *attack.sites[1:])]
    for answer in answers:
        if isinstance(answer, Shares):
            coordinator.shared(answer)
        elif isinstance(answer, Confirm):
            coordinator.confirmed(answer)
    later: Request
    if failing is Step.SHARE:
        later = federation.request(inbox=coordinator.inboxes()[site.name])
    else:
        later = Agree(federation.sum_id(), coordinator.request()[site.name])
    for process in (federation.site(resident=Resident()), site):
        with pytest.raises(StepError):
            process.answer(later)
    assert encode(attack.agree(site, message)) == encode(answers[0])
    assert isinstance(site.answer(later), Contribution | Reveal)


def test_an_edit_of_its_configuration_leaves_one_attempt_of_a_site_in_memory(federation: Federation) -> None:
    attack, resident = in_own_processes(federation), Resident()
    attack.sites[0] = site = federation.site(resident=resident)
    attack.fold()
    survivors, edited = attack.coordinator.survivors(), federation.site(resident=resident, minimum_cohort=4)
    assert isinstance(attack.agree(edited, survivors), Confirm)
    assert len(resident.opened) == 1
    (pin,) = site.config.folder.glob("consents/*.taken")
    joined = pin.read_bytes()
    pin.write_bytes(b"0ther")
    with pytest.raises(PinnedError):  # edited back, it derives the attempt again
        attack.agree(site, survivors)
    pin.write_bytes(joined)
    assert isinstance(attack.agree(site, survivors), Confirm)
    again = Attack(federation, attempt=2)
    again.sites = [edited, *attack.sites[1:]]
    again.carry_through(())
    assert resident.opened == {}


def test_a_site_that_raises_its_minimum_holds_to_it_in_the_attempt_that_is_under_way(
    federation: Federation,
) -> None:
    attack = Attack(federation)
    attack.fold()
    survivors = attack.coordinator.survivors()
    more = len(attack.sites) + 1
    with raises(TooFewSitesError, "cohort", says=f"at least {more}"):
        attack.agree(federation.site(minimum_cohort=more), survivors)
    assert isinstance(attack.agree(federation.site(), survivors), Confirm)


# A power cut, and what is lost with a disk.


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["power cut", "killed, then power cut"])
def test_a_join_is_on_disk_before_it_is_answered(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A power cut at any sync of the join: it can be repeated, and once it was answered there is no other run."""
    sync, ended = 0, [0]
    begin = Begin(1, 1, vector_hash(federation.model))
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
            with pytest.raises(ConsentError):
                site.join(federation.join_request(run="an0ther"))
            with pytest.raises(ConsentError):
                site.join(federation.join_request(changed(federation.plan, "local", steps=1), "an0ther"))
            for purpose in (TRAIN, EVALUATE):
                assert site.agree(Agree(federation.sum_id(purpose=purpose), begin))
        sync += 1
    assert sync > 20


def test_a_message_relies_on_no_consent_that_is_not_on_disk(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site was killed in the join; the coordinator does not ask it to join again, but to take part."""
    sync, answered = 0, False
    begin = Begin(1, 1, vector_hash(federation.model))
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
                with pytest.raises(ConsentError):
                    federation.joined(state=state, pinned=False, run="an0ther")
        sync += 1


def test_a_site_that_lost_its_marks_and_its_consents_refuses_the_run(federation: Federation) -> None:
    """It keeps the run's plan, so it may have answered in it."""
    attack = Attack(federation)
    attack.carry_through(())
    for site in attack.sites:
        shutil.rmtree(site.config.folder / "consents")
        for folder in site.config.folder.glob("runs/*/secure"):
            shutil.rmtree(folder)
        with raises(StorageError, "marks", says="missing"):
            site.join(federation.join_request())


def test_the_difference_of_two_sums_is_an_update_if_sites_forget_what_they_joined(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attack(federation).carry_through(())
    for site in (federation.site(index) for index in range(len(federation.names))):
        shutil.rmtree(site.config.folder / "consents")
        for folder in site.config.folder.glob("runs/*/secure"):
            shutil.rmtree(folder)
    monkeypatch.setattr(Kept, "knows", lambda *_: False)  # removes the guard
    federation.resident = Resident()
    Attack(federation, attempt=2).carry_through((federation.names[-1],))


@pytest.mark.slow
def test_a_site_without_its_marks_refuses_everything(federation: Federation) -> None:
    """The run has taken its consent, so it may have answered in it."""
    attack = Attack(federation)
    inboxes, site = attack.deal(), attack.sites[0]
    for marks in site.config.folder.glob("runs/*/secure/*/marks"):
        whole = marks.read_bytes()
        marks.unlink()
        with raises(StorageError, "marks", says="missing"):
            site.join(federation.join_request())
        assert not marks.exists()
        if TRAIN in marks.parts:
            acts: tuple[Callable[[], object], ...] = (
                lambda: attack.agree(site, attack.coordinator.begin),
                lambda: attack.contribute(site, inboxes[site.name]),
            )
            for act in acts:
                with raises(StorageError, "marks", says="missing"):
                    act()
            assert not marks.exists()
        marks.write_bytes(whole)
    assert attack.contribute(site, inboxes[site.name]).statement


def test_dropout_of_the_model_does_not_reach_an_update(tmp_path: Path) -> None:
    """A coordinator that knows its masks could choose the round in which one site alone has an update."""
    sent = []
    for dropout in (0.99994, 0.0):
        settings = ["aggregation.secure=false", "model.adapter.scheme=lora", "model.adapter.rank=2"]
        plan = tiny(*settings, f"model.config.attention_dropout={dropout}")
        federation = Federation(tmp_path / f"{dropout}", plan)
        sites = [federation.joined(number) for number in range(2)]
        sent.append([whole(site.contribute(federation.request())) for site in sites])
    for dropping, plain in zip(*sent, strict=True):
        assert np.array_equal(dropping, plain)
        assert dropping[:-4].any()
