"""Evaluations by the sites within a private run: what they tell, what they cost, and what no coordinator gets.

A site's vector is looked at where it is kept, before its masks; whole runs have real sites and the secure sum.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.clients.ranks.device_mesh import mesh_for
from cloister.clients.state.kept import run_folder
from cloister.lm.questions.evaluate import evaluate
from cloister.lm.questions.question import Held
from cloister.privacy.accounting.accountant import composed, epsilon_of
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.privacy.ledger.ledger import Entry, Ledger, read_history
from cloister.privacy.mechanism.events import Event as Cost
from cloister.privacy.mechanism.events import SampledGaussian, Skellam, from_json
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import (
    BudgetError,
    CloisterError,
    ModelError,
    PlanError,
    PolicyError,
    StaleError,
)
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Agree, Begin, Inbox
from cloister.protocol.plan.plan import NO_EVALUATION, MeshSection
from cloister.protocol.plan.plan import Plan as Contract
from cloister.protocol.plan.soundness import Plan, parse
from cloister.protocol.plan.template import to_toml
from cloister.protocol.questions.within import question_within
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import run_history
from cloister.server.record.outcome import outcome
from cloister.server.record.progress import Evaluated, Event, RoundStarted, SiteAnswered
from cloister.server.record.report import gather
from cloister.server.run import run
from cloister.server.sum.spending import Spending
from cloister.simulations.audit.audited import played
from cloister.tests.clients.test_site import Attack
from cloister.tests.parties.federation import RUN, TINY, Federation, tiny, whole, write_records
from cloister.tests.tools.command import done, found, refusal, set_options
from cloister.tests.tools.kills import kill_while, killed_run
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

KILLED = (AssertionError, CloisterError)
"""A mutant is found by a check here, or a guard in the code stops it."""
NUMBERS = itertools.count()
SETTINGS = [
    "aggregation.weighting=uniform",
    "aggregation.colluders=0.0",
    "data.held_out=0.5",
    "privacy.unit=record",
    "privacy.sampling_rate=0.2",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-5",
    "privacy.accountant=rdp",
    "server.evaluation_epsilon=4.0",
    "server.keep_checkpoints=10",
    "simulation.durable=false",
]
OWNER = ["privacy.unit=owner", "data.owner=patient", "privacy.records=2"]
Vectors = npt.NDArray[np.float64]


def plan_of(*settings: str) -> Plan:
    return parse(TINY, [*SETTINGS, *settings])


def known(plan: Contract) -> Terms:
    terms = terms_of(plan, 1)
    assert terms is not None
    assert terms.evaluated is not None
    return terms


def costs(entries: tuple[Entry, ...]) -> list[Cost]:
    return [event for entry in entries for event in from_json(entry.charge.event)]


def exact(federation: Federation, weights: npt.NDArray[np.float32]) -> Vectors:
    """The cells of the whole federation without noise."""
    found: Vectors = np.sum(
        [cells_of(federation, index, weights) for index in range(len(federation.names))], axis=0
    )
    return found


def cells_of(federation: Federation, index: int, weights: npt.NDArray[np.float32]) -> Vectors:
    """The cells of one site without noise."""
    site, plan = federation.site(index), federation.plan
    asked = question_within(plan)
    loaded = site._load(plan, b"")
    loaded.model.layout.scatter(weights, loaded.model.module)
    held = Held(lambda _unusable: iter(()), lambda: site._prepared(loaded), torch.device("cpu"))
    units: Vectors = np.concatenate([np.asarray(each) for each in evaluate(asked, held, (loaded.model,))])
    found: Vectors = units.sum(axis=0)
    return found


def evaluated(federation: Federation, number: int, index: int = 0) -> Vectors:
    """The cells that a site sends after a round, in units."""
    inbox = Inbox(bytes(32), (), (), ())
    request = federation.request(purpose=EVALUATE, number=number, inbox=inbox)
    vector = whole(federation.joined(index).contribute(request))
    asked = known(federation.plan).evaluated
    assert asked is not None
    return vector[: asked.mechanism.shape.cells].view(np.int32) / asked.mechanism.scale


# What is told: the noise, the figures, and nothing else.

HALF = Mutant("privacy.mechanism.unit_sum:UnitSum.encode", "self.variance)", "self.variance / 4)")
NONE_OF_THE_NOISE = Mutant(
    "privacy.accounting.terms:_evaluated",
    "_asked(asked, _rounded_up(least)), due",
    "_asked(asked, 1e-3), due",
)
FREE = Mutant(
    "clients.consent.spending:Spending.pay",
    "terms.cost(purpose, len(set(rounds_paid)))",
    'terms.cost(purpose, len(set(rounds_paid))) if purpose == "train" else ()',
)
UNPAID = Mutant(
    "clients.site:Site._evaluated",
    "noise = self._charged(loaded, told.sum, tries)",
    "noise = self._simulated.noise(0)",
)


def noise_is_that_of_the_charge(federation: Federation, evaluations: int) -> None:
    """One site's vectors of one model in many rounds: their mean is the exact total, and their spread that of the
    site's part of the noise in its ledger."""
    seen = np.stack([evaluated(federation, number) for number in range(evaluations)])
    events = costs(federation.entries())
    assert len(events) == evaluations
    (event,) = set(events)
    assert isinstance(event, Skellam)
    assert event.unit == federation.plan.privacy.unit
    asked = known(federation.plan).evaluated
    assert asked is not None
    assert epsilon_of([event] * len(asked.due), 1e-5, "rdp") == pytest.approx(4.0, rel=0.01)
    # A unit is charged for shares of labels that add up to 1, and a loss of 1 at most.
    assert event.l2 >= asked.mechanism.scale * math.sqrt(2) * (1 - 1e-9)
    part = math.sqrt(event.variance / event.honest) / asked.mechanism.scale
    noise = seen - cells_of(federation, 0, federation.model)
    assert noise.std() == pytest.approx(part, rel=0.2)
    assert (np.abs(noise.mean(axis=0)) < 5 * part / math.sqrt(evaluations)).all()
    assert event.honest == federation.plan.honest()


def records_of_owners(folder: Path) -> Path:
    """Sixty records, two of each owner."""
    path = folder / "records.jsonl"
    records = [
        {"text": f"patient {number} was seen on day {number}. ", "patient": f"p{number // 2}"}
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def seen(folder: Path, *unit: str) -> Federation:
    source, name = records_of_owners(folder), f"run.name=seen-{next(NUMBERS)}"
    return Federation(folder / "sites", plan_of("run.rounds=40", f"simulation.source={source}", name, *unit))


@pytest.mark.slow
@pytest.mark.parametrize("unit", [(), OWNER], ids=["record", "owner"])
@pytest.mark.usefixtures("before_masks")
def test_the_noise_of_an_evaluation_is_that_of_its_charge(tmp_path: Path, unit: tuple[str, ...]) -> None:
    noise_is_that_of_the_charge(seen(tmp_path, *unit), 40)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [HALF, NONE_OF_THE_NOISE, FREE, UNPAID], ids=str)
@pytest.mark.usefixtures("before_masks")
def test_less_noise_or_no_charge_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises(KILLED):
        noise_is_that_of_the_charge(seen(tmp_path), 40)


def simulated(folder: Path, *settings: str, records: int = 160) -> tuple[Federation, RunFiles, list[Event]]:
    """A finished run in this process."""
    source = write_records(folder / "records.jsonl", records)
    federation = Federation(folder / "parties", plan_of(f"simulation.source={source}", *settings))
    events = list[Event]()
    with RunFolder.create(folder / "made", federation.plan) as made:
        run(made, federation.channel, events.append, roster=federation.roster)
    return federation, RunFiles(folder / "made"), events


@pytest.mark.slow
def test_a_private_run_has_a_curve_of_the_real_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation, files, events = simulated(tmp_path, "server.evaluate_every=2")
    plan, terms = federation.plan, known(federation.plan)
    rows = {row["round"]: row for row in files.metrics()}
    checkpoints = Checkpoints(files.checkpoints, federation.layout, 10)
    assert [number for number, row in rows.items() if "loss" in row] == [0, 2, 3]
    shown = {event.round: event.figures for event in events if isinstance(event, Evaluated)}
    for number in (0, 2, 3):
        row = rows[number]
        right, wrong, loss = exact(federation, checkpoints.load(number).weights)
        for name, value in (
            ("held_out_units", right + wrong),
            ("accuracy", right / (right + wrong)),
            ("loss", 10 * loss / (right + wrong)),
        ):
            assert abs(row[name] - value) < 5 * row[f"{name}_noise"] + 1e-3, name
            assert row[f"{name}_noise"] > 0
        assert shown[number]["loss"] == row["loss"]
        assert 0 <= row["accuracy"] <= 1
    end = outcome(files)
    assert end.figures["loss"] == rows[3]["loss"]
    assert end.initial_loss == rows[0]["loss"]

    # Each site and the coordinator paid for three rounds and three evaluations, which is what `plan check` says.
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(plan, comments=False))
    checked = found(capsys, "plan", "check", str(path))
    assert checked["evaluations"] == 3
    assert checked["evaluations_epsilon"] <= 4.0
    assert checked["against_all_epsilon"] > checked["epsilon"]
    assert set(checked["expected_errors"]["500"]) == {"accuracy", "loss", "units"}
    assert end.epsilon == pytest.approx(checked["epsilon"])
    for index in range(4):
        entries = federation.entries(index)
        assert [(entry.charge.purpose, entry.charge.round) for entry in entries] == [
            (EVALUATE, 0), (TRAIN, 1), (TRAIN, 2), (EVALUATE, 2), (TRAIN, 3), (EVALUATE, 3),
        ]  # fmt: skip
        assert epsilon_of(costs(entries), terms.delta, "rdp") == pytest.approx(checked["epsilon"])
        assert len({entry.charge.id for entry in entries}) == 6
    report = gather(files.path)
    assert (report.ledger.verified, report.ledger.problem) == (True, "")
    assert report.epsilon == pytest.approx(checked["epsilon"])
    assert report.rounds[-1].epsilon == pytest.approx(checked["epsilon"])
    assert "with all evaluations by its sites" in verdict(report).sentence
    assert report.asked is not None
    assert report.asked.rest is not None
    assert report.asked.against_all is not None
    assert report.asked.against_all.epsilon == pytest.approx(checked["against_all_epsilon"])
    (dataset, *_) = found(capsys, "ledger", "show", str(files.ledger))["datasets"]
    assert (dataset["runs"][0]["rounds"], dataset["runs"][0]["evaluations"]) == ([1, 2, 3], [0, 2, 3])
    assert "evaluations" in done(capsys, "ledger", "show", str(files.ledger))
    assert found(capsys, "ledger", "verify", str(files.ledger))["entries"] == 24
    reads_no_other_charge(files, terms)


def reads_no_other_charge(files: RunFiles, terms: Terms) -> None:
    """The report of the run whose ledger has one charge more, or lacks one."""
    identity = run_history(files).run
    entries = read_history(files.ledger).entries
    kept = files.ledger.read_bytes()
    Spending(terms, identity, files.ledger).before_evaluating(1, ["site-000"])
    assert "evaluation after round 1" in gather(files.path).ledger.problem
    for without in (0, 3):
        files.ledger.unlink()
        charges = [entry.charge for entry in entries]
        left = [
            each
            for each in charges
            if (each.purpose, each.round, each.dataset) != (EVALUATE, without, "site-001")
        ]
        assert len(left) == len(charges) - 1
        Ledger(files.ledger, "coordinator", composed).charge_all(left, None)
        problem = gather(files.path).ledger.problem
        assert "site-001" in problem
        assert f"the model of round {without}" in problem
    files.ledger.write_bytes(kept)
    trained = next(each.event for each in charges if each.purpose == TRAIN)
    other = [replace(each, event=trained) if each.purpose == EVALUATE else each for each in charges]
    files.ledger.unlink()
    Ledger(files.ledger, "coordinator", composed).charge_all(other, None)
    assert "not the cost" in gather(files.path).ledger.problem
    files.ledger.write_bytes(kept)


# What it costs, before the first round.

LEFT_OUT = [
    Mutant(
        "privacy.accounting.terms:Terms.whole",
        "self.events(rounds) + self.evaluations",
        "self.events(rounds)",
    ),
    Mutant("privacy.accounting.terms:_terms", "* times + others", "* times"),
    Mutant("privacy.accounting.terms:_evaluated", "* len(due)", "* 1"),
]


def the_plan_has_room_for_all() -> None:
    """A target is that of training and evaluations together, and each part of it is what it says."""
    target = {"privacy.noise_multiplier": None, "privacy.target_epsilon": 6.0}
    plan = plan_of().changed(target | {"run.name": f"room-{next(NUMBERS)}"})
    terms = known(plan)
    training = [SampledGaussian(terms.noise_multiplier, 0.2, 2)] * 3
    assert terms.evaluated is not None
    assert terms.evaluated.due == (0, 1, 2, 3)
    evaluations = [terms.evaluated.mechanism.event] * 4
    assert 3.9 < epsilon_of(evaluations, 1e-5, "rdp") <= 4.0
    assert 5.9 < epsilon_of([*training, *evaluations], 1e-5, "rdp") <= 6.0
    assert terms.epsilon(3) == epsilon_of([*training, *evaluations], 1e-5, "rdp")
    assert terms.allowed(3, 2) == 6.0


@pytest.mark.slow
def test_the_plan_has_room_for_training_and_evaluations() -> None:
    the_plan_has_room_for_all()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", LEFT_OUT, ids=str)
def test_evaluations_that_are_left_out_of_the_terms_are_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises(KILLED):
        the_plan_has_room_for_all()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["privacy.budget=3.9"], "privacy.budget"),
        (["privacy.budget=4.5"], "privacy.budget"),
        (["server.evaluation=none"], "server.evaluation_epsilon"),
        (["server.evaluation=simulation:public", "simulation.public=0.1"], "server.evaluation_epsilon"),
        (["server.evaluation_sequences=5"], "server.evaluation_epsilon"),
        (["data.held_out=0.0"], "data.held_out"),
        (["aggregation.secure=false"], "server.evaluation_epsilon"),
        (["privacy.method=opacus"], "server.evaluation_epsilon"),
        (["aggregation.groups=3", "cohort.sites=24"], "server.evaluation_epsilon"),
        (["aggregation.ring_bits=16"], "server.evaluation_epsilon"),
        (["data.task=masked"], "server.evaluation_epsilon"),
        (["server.evaluation_epsilon=1e-9"], "server.evaluation_epsilon"),
        (["server.gate.loss=0.1"], "server.gate.loss"),
    ],
)
def test_what_is_unsound_with_evaluations_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], field: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(plan_of(), comments=False))
    line = refusal(capsys, "plan", "check", str(path), *set_options(settings))
    assert f" {field} is " in line or f" {field}: " in line


def test_evaluations_and_their_epsilon_go_together() -> None:
    for unit in ("site", "none"):
        with pytest.raises(PlanError):
            tiny("server.evaluation_epsilon=1.0", f"privacy.unit={unit}")
    plan = plan_of()
    with raises(PlanError, "server.evaluation", says="no charge covers"):
        plan.changed({"server.evaluation_epsilon": None})
    with raises(PlanError, "privacy.target_epsilon", says="evaluations together"):
        known(plan.changed({"privacy.noise_multiplier": None, "privacy.target_epsilon": 4.0}))


def test_no_model_is_divided_over_devices() -> None:
    with raises(ModelError, "mesh"):
        mesh_for(plan_of(), MeshSection(replicate=2), "cpu")


def test_a_limit_over_runs_refuses_before_the_first_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round would have room, and all of them and the evaluations have not."""
    path, ledger = tmp_path / "plan.toml", tmp_path / "over.sqlite"
    path.write_text(to_toml(plan_of(), comments=False))
    one = known(plan_of()).epsilon(1)
    limit = [
        "--ledger",
        str(ledger),
        "--dataset",
        "mine",
        "--set",
        f"simulation.greatest_epsilon={one + 0.3}",
    ]
    line = refusal(capsys, "simulate", str(path), *limit, "--out", str(tmp_path / "run"), "--workers", "1")
    assert "all rounds and evaluations of the run" in line
    assert read_history(ledger).entries == ()
    by = ["privacy.unit=owner", "data.owner=patient"]
    line = refusal(capsys, "simulate", str(path), *limit, *set_options(by))
    assert "server.evaluation_epsilon" in line


def test_a_policy_lists_evaluations_and_limits_their_epsilon(tmp_path: Path) -> None:
    federation = Federation(tmp_path, plan_of())
    accepts = 'units = ["record"]\nleast_cohort = 3\n'
    asks = accepts + 'questions = ["evaluate"]\n'
    with raises(PolicyError, "evaluations by the sites"):
        federation.site(policy=accepts).join(federation.join_request())
    with raises(PolicyError, "server.evaluation_epsilon"):
        limit = "greatest_question_epsilon = 4.0\ngreatest_delta = 1e-5\n"
        federation.site(policy=asks + limit).join(federation.join_request())
    whole_run = known(federation.plan).epsilon(3)
    with raises(PolicyError, "epsilon of the site's data after the run"):
        limit = f"greatest_epsilon = {known(federation.plan).epsilon(3) - 1.0}\ngreatest_delta = 1e-5\n"
        federation.site(policy=asks + limit, ledger=str(tmp_path / "own.sqlite")).join(
            federation.join_request()
        )
    assert whole_run > 4.0
    most = known(federation.plan).allowed_evaluations(3)  # with those that are made again
    limit = f"greatest_question_epsilon = {most}\ngreatest_delta = 1e-5\n"
    federation.site(policy=asks + limit).join(federation.join_request())
    assert federation.entries() == ()


# A coordinator that lies, and a process that dies.


def test_a_site_evaluates_one_model_after_each_round_that_is_due(tmp_path: Path) -> None:
    federation = Federation(tmp_path, plan_of("server.evaluate_every=2"))
    site, inbox = federation.joined(), Inbox(bytes(32), (), (), ())
    for number in (1, 4):  # not due, and not in the plan
        begin = Begin(number, 1, vector_hash(federation.model))
        with pytest.raises(StaleError):
            site.agree(Agree(federation.sum_id(purpose=EVALUATE, number=number), begin))
        with pytest.raises(StaleError):
            site.contribute(federation.request(purpose=EVALUATE, number=number, inbox=inbox))
    assert federation.entries() == ()
    first = Attack(federation, purpose=EVALUATE, number=2)
    inboxes = first.deal()
    first.contribute(first.sites[0], inboxes["site-000"])
    assert len(federation.entries()) == 1
    # Another attempt gets the same vector; one with other weights gets none, and costs nothing.
    again = Attack(federation, attempt=2, purpose=EVALUATE, number=2)
    inboxes = again.deal()
    again.contribute(again.sites[0], inboxes["site-000"])
    federation.model = federation.model * np.float32(2)
    other = Attack(federation, attempt=3, purpose=EVALUATE, number=2)
    inboxes = other.deal()
    with raises(StaleError, "totals of round 2"):
        other.contribute(other.sites[0], inboxes["site-000"])
    # Nor where the vector is lost: it was masked, and may be in a sum.
    for kept in run_folder(site.config.folder, RUN).glob("totals-*"):
        kept.unlink()
    lost = Attack(federation, attempt=4, purpose=EVALUATE, number=2)
    inboxes = lost.deal()
    with raises(StaleError, "evaluation of round 2"):
        lost.contribute(lost.sites[0], inboxes["site-000"])
    assert len(federation.entries()) == 1


@pytest.mark.parametrize(("budget", "again"), [((), 3), (("privacy.budget=9.0",), 0)], ids=["none", "budget"])
@pytest.mark.usefixtures("before_masks")
def test_a_vector_that_is_made_again_is_charged_again_up_to_a_limit(
    tmp_path: Path, budget: tuple[str, ...], again: int
) -> None:
    """Without a budget as often as the plan has attempts."""
    federation = Federation(tmp_path, plan_of(*budget))
    assert federation.plan.cohort.attempts == 3
    first = evaluated(federation, 0)
    assert (evaluated(federation, 0) == first).all()  # it was kept
    runs = run_folder(federation.site().config.folder, RUN)
    (runs / "totals-00000.ring").unlink()
    assert (evaluated(federation, 0) != first).any()
    assert [entry.charge.round for entry in federation.entries()] == [0, 0]
    evaluated(federation, 2)
    with raises(StaleError, "round"):  # its vector is removed, and may have been released
        evaluated(federation, 1)
    for _ in range(1 + again):
        evaluated(federation, 3)
        (runs / "totals-00003.ring").unlink()
    with raises(BudgetError, "evaluations of site-000 in this run"):
        evaluated(federation, 3)
    assert len(federation.entries()) == 4 + again
    assert epsilon_of(costs(federation.entries()), 1e-5, "rdp") <= known(federation.plan).allowed_evaluations(
        3
    )


NOT_RESERVED = Mutant("clients.consent.spending:Spending._check_room", "*events, *reserved)", "*events)")


def training_leaves_room(folder: Path) -> None:
    """A site whose updates are lost again and again trains as often as the budget has room beside all evaluations."""
    limit = known(plan_of()).epsilon(3) + 0.6
    federation = Federation(folder, plan_of(f"privacy.budget={limit}", f"run.name=room-{next(NUMBERS)}"))
    site, inbox = federation.joined(), Inbox(bytes(32), (), (), ())
    trained = 0
    with raises(BudgetError, "epsilon of site-000 in this run"):
        while True:
            site.contribute(federation.request(inbox=inbox))
            trained += 1
            for kept in run_folder(site.config.folder, RUN).glob("update-*"):
                kept.unlink()
    assert trained >= 3
    for number in range(4):
        evaluated(federation, number)
    assert len(federation.entries()) == trained + 4
    assert epsilon_of(costs(federation.entries()), 1e-5, "rdp") <= limit


@pytest.mark.usefixtures("before_masks")
def test_training_that_is_repeated_leaves_room_for_all_evaluations(tmp_path: Path) -> None:
    training_leaves_room(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("before_masks")
def test_without_that_reserve_the_budget_would_be_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NOT_RESERVED.plant(monkeypatch)
    with pytest.raises(KILLED):
        training_leaves_room(tmp_path)


def test_an_audit_plays_the_training_with_its_own_noise() -> None:
    target = {"privacy.noise_multiplier": None, "privacy.target_epsilon": 6.0}
    plan = plan_of().changed(target)
    terms = known(plan)
    alone = played(plan, terms)
    assert alone.server.evaluation == NO_EVALUATION
    without = terms_of(alone, 1)
    assert without is not None
    assert without.evaluated is None
    assert without.noise_multiplier == terms.noise_multiplier


class Evaluating:
    """The moment at which all sites have sent their vectors in the evaluation after a round."""

    def __init__(self, number: int) -> None:
        self._number, self._left = number, 0

    def __call__(self, event: Event) -> bool:
        if isinstance(event, RoundStarted):
            due = (event.purpose, event.round) == (EVALUATE, self._number)
            self._left = len(event.cohort) if due else 0
        if not isinstance(event, SiteAnswered) or not self._left:
            return False
        self._left -= 1
        return self._left == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_an_evaluation_that_a_crash_interrupts_is_charged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    source, path, out = (
        write_records(tmp_path / "records.jsonl", 80),
        tmp_path / "plan.toml",
        tmp_path / "run",
    )
    over = [f"simulation.ledger={tmp_path / 'over.sqlite'}", "simulation.dataset=mine"]
    plan = plan_of(f"simulation.source={source}", "run.rounds=1", *over)
    path.write_text(to_toml(plan, comments=False))
    kill_while(killed_run, path, out, Evaluating(number))
    files = RunFiles(out)
    assert not any(row["round"] == number for row in files.metrics())
    told = found(capsys, "resume", str(out), "--workers", "1")
    assert [row["round"] for row in files.metrics() if row.get("loss") is not None] == [0, 1]
    expected = [(EVALUATE, 0), (TRAIN, 1), (EVALUATE, 1)]
    for ledger in (*files.sites.ledgers().values(), tmp_path / "over.sqlite"):
        entries = read_history(ledger).entries
        assert [(entry.charge.purpose, entry.charge.round) for entry in entries] == expected
    assert told["epsilon"] == pytest.approx(found(capsys, "plan", "check", str(path))["epsilon"])
    report = gather(out)
    assert report.ledger.verified
    assert report.dataset is not None
    assert report.dataset.problem == ""
    shutil.rmtree(out)
