"""A coordinator that lies to a site under privacy: what the site refuses, and that nothing leaves unpaid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from cloister.aggregation.average import SumLayout
from cloister.aggregation.sums import EVALUATE, training_layout
from cloister.clients import site as site_module
from cloister.clients.app import client_app, reticent
from cloister.clients.attempt import Attempts
from cloister.clients.dpsgd import PrivateTrainer
from cloister.clients.site import Site, load_site, update_path
from cloister.lm.model import load_model
from cloister.lm.train import Trainer
from cloister.privacy.accounting import composed
from cloister.privacy.ledger import Entry, Ledger
from cloister.privacy.policy import Refusal
from cloister.privacy.terms import terms_of
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import (
    BudgetError,
    CloisterError,
    EngineError,
    PlanError,
    PolicyError,
    StorageError,
    UpdateError,
)
from cloister.protocol.messages import Agree, Contribution, Evaluate, Failure, Join, Train
from cloister.protocol.plan import LARGEST_CLIP, SMALLEST_CLIP, Plan, parse
from cloister.protocol.roster import Roster, load_identity, load_roster, new_identity
from cloister.server.app import GridChannel
from cloister.simulations.federation import lay_out
from cloister.simulations.grid import identify

RUN = "0a1b2c"
TINY = [
    "run.rounds=3",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "data.sequence_length=16",
    "data.held_out=0.0",
    "local.steps=2",
    "local.batch_size=4",
    "cohort.sites=4",
    "cohort.quorum=0.75",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
    "simulation.partition=iid",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-3",
]
RECORD = [*TINY, "aggregation.secure=false", "privacy.unit=record", "privacy.sampling_rate=0.5"]
CENTRAL = [*TINY, "aggregation.secure=false", "privacy.unit=site", "privacy.trusted_coordinator=true"]
SKELLAM = [*TINY, "privacy.unit=site"]
Floats = npt.NDArray[np.float32]


class Federation:
    """Real sites in their folders, and whatever a coordinator may send them."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder = folder
        self.plan: Plan = parse("", settings)
        lay_out(self.plan, folder)
        loaded = load_model(self.plan)
        self.model: Floats = loaded.layout.flatten(loaded.module)
        self.roster: Roster = load_roster(folder / "roster.toml")

    def site(self, number: int = 0, policy: str = "", **config: Any) -> Site:
        site = load_site(self.folder / f"site-{number:03d}" / "site.toml")
        config.setdefault("ledger", str(self.folder / f"site-{number:03d}" / "ledger.sqlite"))
        if policy:
            path = self.folder / f"policy-{number}.toml"
            path.write_text(policy)
            config["policy"] = str(path)
        return dataclasses.replace(site, config=site.config.model_copy(update=config))

    def joined(self, number: int = 0, policy: str = "", **config: Any) -> Site:
        site = self.site(number, policy, **config)
        site.join(Join(self.plan.to_json(), RUN))
        return site

    def request(self, **changes: Any) -> Train:
        clip = self.plan.privacy.clip if self.plan.privacy.unit == "site" else 0.0
        fields: dict[str, Any] = {
            "plan": self.plan.to_json(),
            "round": 1,
            "tries": 1,
            "run": RUN,
            "base": "",
            "clip": clip,
            "model_hash": vector_hash(changes.get("model", self.model)).hex(),
            "model": self.model,
        }
        return Train(**(fields | changes))

    def evaluation(self) -> Evaluate:
        return Evaluate(
            plan=self.plan.to_json(),
            round=1,
            tries=1,
            run=RUN,
            base="",
            model_hash=vector_hash(self.model).hex(),
            model=self.model,
        )

    def entries(self, number: int = 0) -> tuple[Entry, ...]:
        name = f"site-{number:03d}"
        path = self.folder / name / "ledger.sqlite"
        return Ledger(path, name, composed).entries() if path.exists() else ()


@pytest.fixture
def federate(patients: Path, tmp_path: Path) -> Callable[[list[str]], Federation]:
    return lambda settings: Federation(tmp_path, [*settings, f"simulation.source={patients}"])


Federate = Callable[[list[str]], Federation]


@pytest.fixture
def before_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secure sum without its masks: a test can then look at the vector that goes into it."""
    monkeypatch.setattr(
        Attempts, "mask", lambda _self, _private, _round, _model, _threads, make: (b"", make())
    )


UNITS = pytest.mark.parametrize("settings", [RECORD, CENTRAL, SKELLAM], ids=["record", "central", "skellam"])


# What is asked for beside the update.


@UNITS
def test_no_evaluation_leaves_a_site_under_privacy(federate: Federate, settings: list[str]) -> None:
    federation = federate(settings)
    site = federation.joined()
    with pytest.raises(PolicyError, match="a release that nobody has paid for"):
        site.evaluate(federation.evaluation())
    begin = Agree(
        plan=federation.plan.to_json(), run=RUN, purpose=EVALUATE, step=1, round=1, tries=1, base=""
    )
    with pytest.raises(PolicyError, match="a release that nobody has paid for"):
        site.agree(begin, b"")
    assert federation.entries() == ()


def test_without_that_guard_the_losses_would_leave(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate([entry for entry in RECORD if "held_out" not in entry] + ["data.held_out=0.3"])
    site = federation.joined()
    monkeypatch.setattr(site_module, "_check_free", lambda plan, purpose: None)
    assert site.evaluate(federation.evaluation()).vector.any()
    assert federation.entries() == ()  # and nobody would have paid


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_what_leaves_has_no_room_for_tokens_losses_or_clipped_counts(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate(settings)
    vector = federation.joined().train(federation.request()).vector
    layout = training_layout(federation.plan, federation.model.size)
    assert layout.counters == ("weight",)
    assert vector.shape == (federation.model.size + layout.ring.limbs,)
    assert layout.ring.decode_counters(vector[federation.model.size :]) == [1]
    open_plan = parse("", [entry for entry in RECORD if "privacy" not in entry])
    assert training_layout(open_plan, federation.model.size).length > vector.size


# Noise and charge of a second training.


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_second_attempt_gets_the_same_vector_and_is_paid_for_once(
    federate: Federate, settings: list[str]
) -> None:
    federation = federate(settings)
    site = federation.joined()
    vectors = [site.train(federation.request(tries=tries)).vector for tries in (1, 2, 3)]
    assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
    # A process that knows of nothing but the folder gives it too.
    site_module._resident.cache_clear()
    assert np.array_equal(federation.site().train(federation.request(tries=4)).vector, vectors[0])
    (entry,) = federation.entries()
    assert (entry.charge.run, entry.charge.round) == (RUN, 1)


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_site_that_lost_its_update_pays_again_for_new_noise(
    federate: Federate, settings: list[str]
) -> None:
    """This is also the attack on a site without a memory: what is averaged over such trainings has less noise."""
    federation = federate(settings)
    site = federation.joined()
    first = site.train(federation.request()).vector
    update_path(Path(site.config.state), 1).unlink()
    second = site.train(federation.request(tries=2)).vector
    assert len(federation.entries()) == 2
    terms = terms_of(federation.plan, federation.model.size)
    assert terms is not None
    ledger = Ledger(Path(site.config.ledger), "site-000", composed)
    assert ledger.spent(site.config.dataset, 1e-3) == pytest.approx(terms.epsilon(2))
    if settings is not CENTRAL:  # where the noise is not the site's
        assert np.count_nonzero(first != second) > first.size / 2


@pytest.mark.parametrize("change", ["clip", "model"])
def test_another_clip_or_model_in_the_same_round_is_another_training_and_paid_for(
    federate: Federate, change: str
) -> None:
    federation = federate(CENTRAL)
    site = federation.joined()
    first = site.train(federation.request()).vector
    other = (
        federation.request(clip=0.5) if change == "clip" else federation.request(model=federation.model + 1)
    )
    second = site.train(other).vector
    assert not np.array_equal(first, second)
    assert len(federation.entries()) == 2


# The charge comes first.


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_the_charge_is_on_disk_before_training_begins(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(settings)
    site = federation.joined()
    kind = PrivateTrainer if settings is RECORD else Trainer
    seen: list[int] = []
    right = kind.train

    def train(*arguments: Any, **options: Any) -> Any:
        seen.append(len(federation.entries()))  # another connection: what is committed
        return right(*arguments, **options)

    monkeypatch.setattr(kind, "train", train)
    site.train(federation.request())
    assert seen == [1]
    # A site that pays afterwards is seen.
    pay, owed = Site._pay, list[Any]()
    monkeypatch.setattr(Site, "_pay", lambda self, *what: owed.append(what))
    site.train(federation.request(round=2))
    pay(site, *owed[0])
    assert seen == [1, 1]


@UNITS
def test_a_crash_in_training_leaves_the_charge(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(settings)
    site = federation.joined()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PrivateTrainer if settings is RECORD else Trainer, "train", crash)
    monkeypatch.setattr(Attempts, "mask", lambda _self, _a, _b, _c, _d, make: (b"", make()))
    with pytest.raises(KeyboardInterrupt):
        site.train(federation.request())
    assert len(federation.entries()) == 1


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_a_ledger_that_cannot_be_written_means_nothing_leaves(
    federate: Federate, settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    federation = federate(settings)
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").write_bytes(b"no ledger" * 100)
    trained: list[object] = []
    monkeypatch.setattr(
        PrivateTrainer if settings is RECORD else Trainer, "train", lambda *_, **__: trained.append(1)
    )
    for where in ("folder", "junk"):
        site = federation.joined(ledger=str(tmp_path / where))
        with pytest.raises(CloisterError) as refused:
            site.train(federation.request())
        assert reticent(refused.value).endswith("the reason is in the site's own log")
        assert isinstance(refused.value, StorageError) == (where == "folder")
        assert not update_path(Path(site.config.state), 1).exists()
    assert trained == []


# Budgets and policies.


def greatest(federation: Federation, rounds: int) -> str:
    """A policy that allows what some rounds cost, and everything else."""
    terms = terms_of(federation.plan, federation.model.size)
    assert terms is not None
    return (
        f"greatest_epsilon = {terms.epsilon(rounds) * 1.0001}\n"
        f"greatest_delta = {terms.delta}\n"
        "secure_required = false\ntrusted_coordinator = true\nleast_cohort = 1\n"
    )


@UNITS
@pytest.mark.usefixtures("before_masks")
def test_the_sites_own_budget_stops_it_whatever_is_asked(federate: Federate, settings: list[str]) -> None:
    """The run is within the policy; trainings that the coordinator invents are not."""
    federation = federate(settings)
    site = federation.joined(policy=greatest(federation, 3))
    for number in (1, 2, 3):
        site.train(federation.request(round=number))
    update_path(Path(site.config.state), 3).unlink()
    with pytest.raises(BudgetError, match="at most the budget of"):
        site.train(federation.request(round=3))
    assert len(federation.entries()) == 3
    # Without a policy it would have gone on.
    federation.site().train(federation.request(round=3))
    assert len(federation.entries()) == 4


def test_what_other_runs_have_spent_counts_and_is_told_to_nobody(federate: Federate) -> None:
    federation = federate(RECORD)
    federation.joined().train(federation.request(round=1))  # a run of the past
    spent = federation.entries()
    site = federation.site(policy=greatest(federation, 3), state=str(federation.folder / "new state"))
    new = Join(federation.plan.to_json(), "another")
    with pytest.raises(PolicyError, match="epsilon of the site's data after the run") as caught:
        site.join(new)
    refused = site.refuse(new.plan, new.run, caught.value)
    signed = Refusal.from_bytes(refused.statement)
    signed.verify(federation.roster, run="another", plan_digest=federation.plan.digest())
    assert signed.reason == "the privacy budget of its data does not allow it"
    assert not any(character.isdigit() for character in signed.reason)
    # The site's own people can read it.
    assert str(caught.value.value) in str(caught.value)
    budget = BudgetError("epsilon of x", 3.14159, expected="at most the budget of 2.71828")
    assert b"3.14" not in site.refuse(new.plan, new.run, budget).statement
    assert b"2.71" not in site.refuse(new.plan, new.run, budget).statement
    assert federation.entries() == spent
    # A run that it has begun is not counted twice: what it has paid is part of it.
    federation.joined(policy=greatest(federation, 3))


DEMANDS = [
    ('units = ["record"]', SKELLAM),
    ('units = ["site"]', RECORD),
    ("least_noise = 1.5", RECORD),
    ("greatest_delta = 1e-6", RECORD),
    ("least_cohort = 5", SKELLAM),
    ("secure_required = true", CENTRAL),
    ("most_rounds = 2", SKELLAM),
    ('models = ["gpt2"]', SKELLAM),
]


def demanding(line: str) -> str:
    return line if "secure_required" in line else f"secure_required = false\n{line}\n"


@pytest.mark.parametrize(("line", "settings"), DEMANDS, ids=[line for line, _ in DEMANDS])
def test_a_policy_is_checked_when_a_site_is_asked_to_join(
    federate: Federate, line: str, settings: list[str]
) -> None:
    federation = federate(settings)
    with pytest.raises(PolicyError, match="of the site's policy"):
        federation.joined(policy=demanding(line))
    federation.joined()  # without the policy


@pytest.mark.parametrize(("line", "settings"), DEMANDS, ids=[line for line, _ in DEMANDS])
@pytest.mark.usefixtures("before_masks")
def test_a_coordinator_that_goes_on_after_a_refusal_gets_nothing(
    federate: Federate, line: str, settings: list[str]
) -> None:
    federation = federate(settings)
    site = federation.site(policy=demanding(line))
    with pytest.raises(PolicyError):
        site.join(Join(federation.plan.to_json(), RUN))
    with pytest.raises(CloisterError):
        site.train(federation.request())
    assert federation.entries() == ()


@pytest.mark.usefixtures("before_masks")
def test_a_plan_without_privacy_is_not_slipped_in_after_a_private_one_was_joined(federate: Federate) -> None:
    """The policy demands a unit; sums may be in clear, because the noise is in the update."""
    federation = federate(RECORD)
    site = federation.joined(policy='secure_required = false\nunits = ["record"]\n')
    bare = federation.plan.model_copy(update={"privacy": parse("").privacy})
    with pytest.raises(CloisterError):
        site.train(federation.request(plan=bare.to_json()))
    with pytest.raises(CloisterError):
        site.evaluate(dataclasses.replace(federation.evaluation(), plan=bare.to_json()))
    little = federation.plan.model_copy(
        update={"privacy": federation.plan.privacy.model_copy(update={"noise_multiplier": 0.011})}
    )
    loose = federation.site(1, 'secure_required = false\nleast_noise = 0.5\nunits = ["record"]\n')
    loose.join(Join(federation.plan.to_json(), RUN))
    with pytest.raises(CloisterError):
        loose.train(federation.request(plan=little.to_json()))


def test_a_policy_that_cannot_be_read_says_so_without_the_sites_paths(federate: Federate) -> None:
    federation = federate(RECORD)
    site = federation.site(policy="units = 3\n")
    with pytest.raises(PlanError) as caught:
        site.join(Join(federation.plan.to_json(), RUN))
    assert isinstance(caught.value.__cause__, PolicyError)
    assert str(federation.folder) in str(caught.value.__cause__)  # which is in the site's own log
    assert str(federation.folder) not in str(caught.value)
    assert reticent(caught.value) == "PlanError: the reason is in the site's own log"


# Refusals on their way to the coordinator.


def _same(site: Site, _context: Context) -> Site:
    return site


class Wire(Grid):
    """Flower's grid in this process: one site for each node; a test may change what comes back."""

    def __init__(
        self, sites: dict[int, Site], change: Callable[[int, Message], Message] | None = None
    ) -> None:
        self._apps = {node: client_app(partial(_same, site)) for node, site in sites.items()}
        self._change = change or (lambda _node, reply: reply)
        identify(1, 0)

    # The channel asks for the nodes and exchanges messages; a use of anything else of Flower's Grid ends the test.

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self._apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            identify(1, node)
            reply = self._apps[node](message, Context(1, node, {}, RecordDict(), {}))
            replies.append(self._change(node, reply))
            identify(1, 0)
        return replies


def channel(federation: Federation, wire: Wire, heard: list[Failure]) -> GridChannel:
    return GridChannel(wire, federation.plan, RUN, heard.append, roster=federation.roster)


def sites_with_one_that_refuses(federation: Federation) -> dict[int, Site]:
    sites = {number + 1: federation.site(number) for number in range(4)}
    sites[2] = federation.site(1, "most_rounds = 1\n")
    return sites


def test_a_refusal_is_signed_and_believed(federate: Federate) -> None:
    federation = federate(SKELLAM)
    heard: list[Failure] = []
    joined = channel(federation, Wire(sites_with_one_that_refuses(federation)), heard)
    assert joined.sites == ["site-000", "site-002", "site-003"]
    (failure,) = heard
    assert failure.site == "site-001"
    assert failure.refused
    assert failure.reason.startswith("it refuses, signed: ")
    assert "run.rounds is 3: expected at most 1, by most_rounds of the site's policy" in failure.reason


def forged(federation: Federation, how: str) -> Callable[[int, Message], Message]:
    """What somebody on the way makes of the answers of site-001, which is node 2."""
    folder = federation.folder
    key = load_identity(folder / "site-001" / "identity.pem")
    stranger = new_identity()
    digest, reason = federation.plan.digest(), "no"

    def statement() -> tuple[str, bytes]:
        match how:
            case "by a stranger":
                signed = Refusal.sign(stranger, site="site-001", run=RUN, plan_digest=digest, reason=reason)
            case "of another run":
                signed = Refusal.sign(key, site="site-001", run="past", plan_digest=digest, reason=reason)
            case "of another plan":
                signed = Refusal.sign(key, site="site-001", run=RUN, plan_digest="0" * 64, reason=reason)
            case "for another site":
                signed = Refusal.sign(key, site="site-001", run=RUN, plan_digest=digest, reason=reason)
                return "site-002", signed.to_bytes()
            case "of changed words":
                signed = Refusal.sign(key, site="site-001", run=RUN, plan_digest=digest, reason=reason)
                signed = dataclasses.replace(signed, reason="budget")
            case _:
                return "site-001", b"no"
        return "site-001", signed.to_bytes()

    def change(node: int, reply: Message) -> Message:
        if node == 2:
            site, body = statement()
            reply.content["fields"] = ConfigRecord({"site": site, "statement": body})
        return reply

    return change


@pytest.mark.parametrize(
    "how",
    [
        "by a stranger",
        "of another run",
        "of another plan",
        "for another site",
        "of changed words",
        "unsigned",
    ],
)
def test_a_refusal_that_is_not_the_sites_is_not_believed(federate: Federate, how: str) -> None:
    federation = federate(SKELLAM)
    heard: list[Failure] = []
    sites = {number + 1: federation.site(number) for number in range(4)}
    joined = channel(federation, Wire(sites, forged(federation, how)), heard)
    assert joined.sites == ["site-000", "site-002", "site-003"]
    (failure,) = heard
    assert not failure.refused
    assert "refusal that" in failure.reason


def test_a_budget_that_is_spent_in_a_round_is_a_signed_refusal(federate: Federate) -> None:
    """Through the apps, as a coordinator hears it: once a budget is spent, it is asked no more."""
    federation = federate(RECORD)
    sites = {number + 1: federation.site(number) for number in range(4)}
    joined = channel(federation, Wire(sites), [])
    limited = sites | {1: federation.site(0, greatest(federation, 1))}
    (first,) = joined.ask(["site-000"], federation.request(), 60)
    assert isinstance(first, Contribution)
    joined._grid = Wire(limited)
    (second,) = joined.ask(["site-000"], federation.request(round=2), 60)
    assert isinstance(second, Failure)
    assert second.refused
    assert second.reason == "it refuses, signed: the privacy budget of its data does not allow it"
    (third,) = joined.ask(["site-000"], federation.evaluation(), 60)
    assert isinstance(third, Failure)
    assert third.refused


def test_too_many_refusals_end_it_with_one_line(federate: Federate) -> None:
    federation = federate(SKELLAM)
    sites = {number + 1: federation.site(number, "most_rounds = 1\n") for number in range(4)}
    with pytest.raises(EngineError, match="by most_rounds of the site's policy"):
        channel(federation, Wire(sites), [])


# What a message may carry.


@pytest.mark.parametrize("clip", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-7, 1e7])
@pytest.mark.parametrize("settings", [CENTRAL, SKELLAM], ids=["central", "skellam"])
@pytest.mark.usefixtures("before_masks")
def test_a_clipping_norm_without_measure_is_refused_before_anything_is_paid(
    federate: Federate, settings: list[str], clip: float
) -> None:
    federation = federate(settings)
    with pytest.raises(UpdateError, match="clipping norm"):
        federation.joined().train(federation.request(clip=clip))
    assert federation.entries() == ()


@pytest.mark.parametrize("clip", [SMALLEST_CLIP, LARGEST_CLIP])
def test_no_clipping_norm_makes_a_site_send_more_than_one_norm(federate: Federate, clip: float) -> None:
    federation = federate(CENTRAL)
    vector = federation.joined().train(federation.request(clip=clip)).vector
    layout: SumLayout = training_layout(federation.plan, federation.model.size)
    assert float(np.linalg.norm(layout.open(vector).mean.astype(np.float64))) <= 1.001


def test_the_clip_of_a_message_does_not_touch_what_protects_a_record(federate: Federate) -> None:
    """Under the unit `record` the norm is the plan's; what a message says changes nothing but who pays twice."""
    federation = federate([*RECORD, "simulation.noise_seed=5"])
    site = federation.joined()
    site = dataclasses.replace(site)
    clips: list[float] = []
    trainer = PrivateTrainer.train

    def train(self: PrivateTrainer, *arguments: Any, **options: Any) -> Any:
        clips.append(self._plan.privacy.clip)
        return trainer(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateTrainer, "train", train)
        site.train(federation.request(clip=1e9))
    assert clips == [1.0]


@pytest.mark.parametrize("which", ["hash", "not hexadecimal", "not finite"])
def test_a_base_model_that_is_not_the_one_named_is_refused(federate: Federate, which: str) -> None:
    federation = federate([*RECORD, "model.adapter.scheme=ffa-lora", "model.adapter.rank=2"])
    base = np.zeros(10, np.float32)
    name = vector_hash(base).hex()
    if which == "hash":
        base = base + 1
    elif which == "not hexadecimal":
        name = "../../elsewhere"
    else:
        base[3] = np.nan
        name = vector_hash(base).hex()
    site = federation.site()
    with pytest.raises(UpdateError, match="base model"):
        site.join(Join(plan=federation.plan.to_json(), run=RUN, base_hash=name, base=base))
    assert not list(Path(site.config.state).glob("base-*"))
    with pytest.raises(CloisterError):  # it was never given that one
        site.train(federation.request(base=name))
    assert federation.entries() == ()


def test_sums_in_clear_are_the_sites_own_decision_under_privacy_too(federate: Federate) -> None:
    federation = federate(RECORD)
    site = federation.site(secure=True)
    with pytest.raises(PlanError, match="takes part in no sum in clear"):
        site.join(Join(federation.plan.to_json(), RUN))
    with pytest.raises(PlanError, match="takes part in no sum in clear"):
        site.train(federation.request())


@pytest.mark.parametrize(
    "kind", [UpdateError, StorageError, BudgetError, PolicyError, PlanError], ids=lambda kind: kind.__name__
)
def test_the_text_of_an_error_tells_nothing_of_the_data(kind: type[CloisterError]) -> None:
    secret = kind("loss of patient 7", 3.14159, expected="/data/ward-3/records.jsonl")
    told = reticent(secret)
    assert told == f"{kind.__name__}: the reason is in the site's own log"
    assert "patient" in str(secret)  # which would have left


@pytest.mark.parametrize("kind", [StorageError, UpdateError], ids=lambda kind: kind.__name__)
def test_training_that_fails_is_paid_for_and_its_reason_stays(
    kind: type[CloisterError], federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is not finite is a fact about the data: zeros leave in its place, as from any other data."""
    federation = federate(CENTRAL)
    sites = {number + 1: federation.site(number) for number in range(4)}
    joined = channel(federation, Wire(sites), [])

    def fail(*_: object, **__: object) -> None:
        raise kind("loss", 123.456, expected="a finite loss of 'patient 7'")

    monkeypatch.setattr(Trainer, "train", fail)
    (reply,) = joined.ask(["site-000"], federation.request(), 60)
    if kind is UpdateError:
        assert isinstance(reply, Contribution)
        assert not reply.vector[: federation.model.size].any()  # the coordinator is the one to add noise here
    else:
        assert reply == Failure("site-000", "StorageError: the reason is in the site's own log")
    assert len(federation.entries()) == 1


# What a policy needs of a site's configuration.


def test_a_limit_over_runs_needs_a_ledger_that_outlives_them(federate: Federate) -> None:
    federation = federate(RECORD)
    inside = str(federation.folder / "site-000" / "state" / "ledger.sqlite")
    for ledger in ("", inside):
        with pytest.raises(PlanError, match="outside the state folder"):
            federation.joined(policy=greatest(federation, 3), ledger=ledger)
    federation.joined(policy=greatest(federation, 3))


def test_the_name_of_the_data_does_not_depend_on_where_the_configuration_is_read_from(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate(RECORD)
    monkeypatch.chdir(federation.folder)
    names = {
        load_site(path).config.dataset
        for path in (Path("site-000/site.toml"), federation.folder / "site-000" / "site.toml")
    }
    assert names == {"data.jsonl"}


def test_a_run_costs_no_more_than_its_plan_however_often_a_site_is_asked(federate: Federate) -> None:
    """Without a budget in the plan or a limit in a policy: the plan's rounds, and some for what crashes have lost."""
    federation = federate([*RECORD, "run.rounds=2", "cohort.attempts=1"])
    site = federation.joined()
    for number in range(3):
        site.train(federation.request(model=federation.model + np.float32(number)))
    with pytest.raises(BudgetError, match="that the plan allows for it"):
        site.train(federation.request(model=federation.model - 1))
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
        if (
            not looked
        ):  # another process pays for everything that is left, before this one's transaction begins
            looked.append(True)
            for number in (1, 2):
                site.train(federation.request(model=federation.model + np.float32(number)))
        return charge_all(self, charges, budget, check)

    monkeypatch.setattr(Ledger, "charge_all", late)
    with pytest.raises(BudgetError, match="that the plan allows for it"):
        site.train(federation.request())
    assert len(federation.entries()) == 2
