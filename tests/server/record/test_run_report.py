"""The report of real runs: its claims, checked by an independent accountant, and the cases without a claim."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from safetensors.numpy import load_file, save_file

from cloister.cli.main import main
from cloister.privacy.accounting.accountant import Spent, composed, spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.ledger import Charge, Entry, Ledger, read_history
from cloister.privacy.mechanism.events import Event, SampledGaussian, to_json
from cloister.privacy.mechanism.events import from_json as events_from_json
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import RunReport, verdict
from cloister.privacy.report.report import to_json as report_to_json
from cloister.protocol.errors import RunFolderError
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import load
from cloister.server.record import report as server_report
from cloister.server.record.folder import RunFiles, RunFolder, checkpoint_file, read_plan
from cloister.server.record.history import identity
from cloister.server.record.journal import DONE, LEFT_OUT, OPENING, REFUSED, Journal, of_sum
from cloister.server.record.report import COMPOSED, gather, most_charges
from cloister.server.sum.spending import Spending
from cloister.simulations.federation import simulate
from cloister.tests.parties.federation import CENTRAL, tiny
from cloister.tests.privacy.report.test_report import read
from cloister.tests.tools.command import done, found
from cloister.tests.tools.raises import raises

PRIVATE = (
    "data.held_out=0.0",
    "aggregation.weighting=uniform",
    "aggregation.dropouts=0.25",
    "aggregation.colluders=0.25",
)
RECORD = (
    *PRIVATE,
    "privacy.unit=record",
    "privacy.noise_multiplier=1.5",
    "privacy.sampling_rate=0.2",
    "server.evaluation=simulation:public",
    "simulation.public=0.1",
)
SITE = (*PRIVATE, "privacy.unit=site", "privacy.noise_multiplier=4.0", "server.evaluation=none")
NOW = 1_800_000_000.0


def run(small_plan: Path, out: Path, *overrides: str) -> Path:
    with RunFolder.create(out, load(small_plan, overrides)) as folder:
        simulate(folder, lambda _event: None, workers=2)
    return out


@pytest.fixture(scope="module")
def record(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, which its budget ended before the third; a site dropped out of one."""
    terms = terms_of(load(small_plan, RECORD), 1)
    assert terms is not None
    budget = f"privacy.budget={terms.epsilon(2) * 1.001}"
    folder = tmp_path_factory.mktemp("report") / "record"
    return run(small_plan, folder, *RECORD, budget, "faults.update=0.12", "run.seed=2")


@pytest.fixture(scope="module")
def site(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small_plan, tmp_path_factory.mktemp("report") / "site", *SITE, "run.rounds=2")


@pytest.fixture(scope="module")
def none(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = ("run.rounds=1", "aggregation.secure=false")
    return run(small_plan, tmp_path_factory.mktemp("report") / "none", *plain)


@pytest.fixture
def copy(record: Path, tmp_path: Path) -> Path:
    """The run under `record`, to be spoiled."""
    shutil.copytree(record, tmp_path / "run")
    return tmp_path / "run"


def edit(path: Path, *statements: str) -> None:
    """Run SQL on a ledger or journal as somebody does who can write the file, around its guards."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        guards = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            assert db.execute(statement).rowcount != 0, statement
        for _, sql in guards:
            db.execute(sql)


def remade(folder: Path, change: Callable[[Entry], Charge]) -> None:
    """Make the coordinator's ledger anew, with other charges and a chain that holds."""
    path = folder / "ledger.sqlite"
    entries = read_history(path).entries
    path.unlink()
    ledger = Ledger(path, "coordinator", composed)
    ledger.charge_all([change(entry) for entry in entries], None)


# runs as they were


@pytest.mark.slow
def test_a_private_run_claims_what_an_independent_accountant_finds(record: Path) -> None:
    report = gather(record)
    reference = PLDAccountant()
    step = PoissonSampledDpEvent(0.2, GaussianDpEvent(1.5))
    for number, row in enumerate(report.rounds, 1):
        reference.compose(SelfComposedDpEvent(step, 2))  # local.steps
        assert row.round == number
        assert row.epsilon == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)
    assert len(report.rounds) == 2
    assert report.epsilon == report.rounds[-1].epsilon == max(site.epsilon or 0 for site in report.sites)
    assert report.delta == 1e-5
    assert report.stopped_by_budget
    assert report.budget is not None
    assert report.epsilon is not None
    assert report.budget / 1.002 < report.epsilon <= report.budget
    assert (report.noise_multiplier, report.sampling_rate, report.clip) == (1.5, 0.2, 1.0)
    assert report.ledger.verified
    assert report.ledger.head == read_history(record / "ledger.sqlite").verified().head
    claim = verdict(report)
    assert claim.holds
    assert "rounds 1 to 2" in claim.sentence
    assert "one text, of which the first 64 tokens are used" in claim.sentence
    assert "adding or removing one such text" in claim.sentence
    assert any("budget" in item and "Rounds 3 to 3" in item for item in report.not_covered)
    assert any("one machine or cluster with one owner" in item for item in report.trusted)
    assert all(row.loss is not None and 0 < row.loss < 8 for row in report.rounds)


@pytest.mark.slow
def test_several_units_are_bounded_by_the_charges_of_the_run(record: Path, site: Path) -> None:
    for folder, words in ((record, "texts"), (site, "sites")):
        report = gather(folder)
        assert [row.units for row in report.groups] == [1, 2, 5, 10, 100]
        assert report.groups[0].epsilon == report.epsilon
        assert report.epsilon is not None
        assert report.allowed is not None
        assert report.allowed >= report.epsilon * (1 - 1e-9), (
            "no site is charged for more than the plan allows"
        )
        entries = read_history(folder / "ledger.sqlite").entries
        events = [
            event
            for entry in entries
            if entry.charge.dataset == "site-000"
            for event in events_from_json(entry.charge.event)
        ]
        two, claimed = spent(events, report.delta or 0.0, group=2).epsilon, report.groups[1].epsilon
        assert claimed is not None
        assert two * (1 - 1e-12) <= claimed <= two * 1.02
        assert report.groups[-1].epsilon is None
        assert report.units == words
        assert all((report.trust_model, report.protected_from, report.responsible, report.exposure))


def test_each_site_has_what_the_journal_and_the_ledger_say(record: Path) -> None:
    report = gather(record)
    with Journal(record / "journal.sqlite") as journal:
        survivors = {e.round: e.detail["survivors"] for e in journal.entries() if e.step == "train unmasking"}
    assert min(map(len, survivors.values())) == 3, "the plan's faults were to take a site out"
    entries = read_history(record / "ledger.sqlite").entries
    for row in report.sites:
        paid = [entry for entry in entries if entry.charge.dataset == row.name]
        dropped = sum(row.name not in names for names in survivors.values())
        assert (len(paid), row.rounds) == (2, 2 - dropped)
        assert ("in the sum of" in row.notes) == (dropped > 0)
    assert [row.sites for row in report.rounds] == [len(survivors[number]) for number in (1, 2)]


def test_the_site_as_the_unit(site: Path) -> None:
    report = gather(site)
    tensors = load_file(site / "checkpoints" / "round-00002.safetensors")
    dimension = sum(tensor.size for name, tensor in tensors.items() if name.startswith("model/"))
    terms = terms_of(report_plan(report), dimension)
    assert terms is not None
    assert terms.mechanism is not None
    assert report.epsilon == pytest.approx(terms.epsilon(2), rel=1e-12)
    again = read_plan(site).cohort.attempts
    assert report.allowed == pytest.approx(terms.epsilon(2 + again), rel=1e-12)
    assert any(f"It is that of {2 + again} rounds" in item for item in report.assumptions)
    assert verdict(report).holds
    assert "everything that one site holds" in verdict(report).sentence
    assert "adding or removing all records of one site, which sends zeros" in verdict(report).sentence
    assert report.sampling_rate is None
    assert "Skellam" in report.mechanism
    assert "Skellam" in report.accountant
    # 3 of 4 sites are in the smallest sum, and 1 of them may work with the coordinator.
    assert any(
        item.startswith("At least 2 sites in every sum that can be opened added their noise")
        for item in report.assumptions
    )
    assert math.sqrt(2 * terms.mechanism.variance) / terms.mechanism.scale == pytest.approx(
        terms.mechanism.deviation
    )
    assert terms.mechanism.deviation >= 4.0
    assert report.secure is not None
    assert (report.secure.sites, report.secure.threshold, report.secure.colluders) == (4, 3, 1)
    assert report.roster_hash is not None
    assert len(report.ledger.rows) == 8


def test_a_run_without_privacy_claims_nothing(none: Path) -> None:
    report = gather(none)
    assert not verdict(report).holds
    assert "no privacy guarantee" in verdict(report).sentence
    assert report.epsilon is None
    assert report.secure is None
    assert report.roster_hash is None
    assert report.ledger.rows == ()
    assert report.assumptions == ()
    assert report.mechanism == ""
    assert [site.rounds for site in report.sites] == [1, 1, 1, 1]
    assert any("every site's update in clear" in item for item in report.trusted)
    assert "The guarantee" not in to_html(report)


@pytest.mark.parametrize("name", ["record", "site", "none"])
def test_a_report_is_the_same_each_time_and_reads_back(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    kept = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".json", ".jsonl", ".safetensors")
    }
    report = gather(folder, clock=lambda: NOW)
    assert report.created == "2027-01-15T08:00:00Z"
    assert report == gather(folder, clock=lambda: NOW)
    assert read(report_to_json(report)) == report
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert (report.plan_digest, report.run) == (report_plan(report).digest(), "tiny")


def report_plan(report: RunReport) -> Plan:
    return soundness.from_json(report.plan)


# what makes a report claim nothing, or more


def no_claim(folder: Path) -> str:
    """The ledger's problem, in a report that claims nothing."""
    report = gather(folder)
    claim = verdict(report)
    assert not claim.holds
    assert "is differentially private" not in claim.sentence
    page = to_html(report)
    assert "The guarantee<" not in page
    assert "An epsilon on this page is what the accountant counted. It is not a claim." in page
    assert not report.ledger.verified
    assert report.ledger.problem in page.replace("&#39;", "'")
    return report.ledger.problem


def test_an_altered_ledger_carries_no_claim(copy: Path) -> None:
    edit(copy / "ledger.sqlite", "UPDATE entries SET round = 2 WHERE number = 1")
    assert "entry 1" in no_claim(copy)
    report = gather(copy)
    assert report.epsilon is None
    assert {row.epsilon for row in report.rounds} == {row.epsilon for row in report.sites} == {None}


def test_a_lost_ledger_carries_no_claim(copy: Path) -> None:
    (copy / "ledger.sqlite").unlink()
    assert "which is missing" in no_claim(copy)
    assert not (copy / "ledger.sqlite").exists()


def test_charges_of_an_earlier_version_are_those_of_the_plan(site: Path, tmp_path: Path) -> None:
    """It did not say of how many sites the noise is, which does not change what a round costs."""
    before = gather(site)
    copy = tmp_path / "run"
    shutil.copytree(site, copy)

    def earlier(entry: Entry) -> Charge:
        assert '"honest":2' in entry.charge.event
        return charge_like(entry, event=entry.charge.event.replace('"honest":2,', ""))

    remade(copy, earlier)
    report = gather(copy)
    assert verdict(report).holds
    assert report.epsilon == before.epsilon
    assert "Skellam noise of 2 sites on a sum" in before.ledger.rows[0].event
    assert "Skellam noise on a sum" in report.ledger.rows[0].event
    remade(
        copy, lambda entry: charge_like(entry, event=entry.charge.event.replace('"l1"', '"honest":3,"l1"'))
    )
    assert "row 1 charges" in no_claim(copy)


GUARDS = ("_foreign_charge", "_unpaid", "_contradiction")


def cut(folder: Path) -> None:
    edit(folder / "ledger.sqlite", "DELETE FROM entries WHERE number > 4")


def cheaper(folder: Path) -> None:
    event = to_json([SampledGaussian(15.0, 0.2, 2)])
    remade(folder, lambda entry: charge_like(entry, event=event))


def looser(folder: Path) -> None:
    remade(folder, lambda entry: charge_like(entry, delta=1e-3))


def charge_like(entry: Entry, *, event: str = "", delta: float = 0.0) -> Charge:
    old = entry.charge
    return Charge(
        id=old.id,
        dataset=old.dataset,
        run=old.run,
        round=old.round,
        attempt=old.attempt,
        what=old.what,
        event=event or old.event,
        delta=delta or old.delta,
    )


def forgetful(folder: Path) -> None:
    """A journal that has another epsilon than the charges come to."""
    edit(
        folder / "journal.sqlite",
        "UPDATE entries SET detail = json_set(detail, '$.epsilon', 0.01) WHERE step = 'done' AND round = 2",
    )


def elsewhere(folder: Path) -> None:
    """Make it the run of a deployment, whose coordinator has no site's own ledger."""
    shutil.rmtree(folder / "sites")
    edit(
        folder / "journal.sqlite",
        "UPDATE entries SET detail = json_set(detail, '$.simulated', json('false')) WHERE step = 'created'",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut, "holds no charge for site-000, whose update is in the sum of round 2"),
        (cheaper, "row 1 charges 2 Poisson-sampled Gaussian steps, noise multiplier 15"),
        (looser, "row 1 is at delta 0.001, and the plan's is 1e-05"),
        (forgetful, "epsilon after round 2 is "),
    ],
)
def test_a_ledger_that_contradicts_plan_or_journal_carries_no_claim(
    copy: Path, spoil: Callable[[Path], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(copy)
    true = gather(copy).epsilon
    spoil(copy)
    assert read_history(copy / "ledger.sqlite").verified()  # the chain alone does not show it
    assert problem in no_claim(copy)
    for guard in GUARDS:
        monkeypatch.setattr(server_report, guard, lambda *_: "")
    unguarded = gather(copy)
    assert verdict(unguarded).holds
    assert true is not None
    assert unguarded.epsilon is not None
    assert unguarded.epsilon < true or spoil in (looser, forgetful)


def test_noise_of_a_declared_seed_carries_no_claim(copy: Path) -> None:
    plan = json.loads((copy / "plan.json").read_text())
    plan["simulation"]["noise_seed"] = 7
    (copy / "plan.json").write_text(json.dumps(plan))
    report = gather(copy)
    assert report.declared_noise
    assert not verdict(report).holds
    assert "declared seed" in verdict(report).sentence
    assert not any("under a secret key" in item for item in report.assumptions)


def test_charges_of_other_runs_are_not_of_this_one(copy: Path) -> None:
    before = gather(copy)
    ledger = Ledger(copy / "ledger.sqlite", "coordinator", composed)
    event = to_json([SampledGaussian(0.5, 0.5, 100)])
    ledger.charge(
        Charge(
            id="x", dataset="site-000", run="other", round=1, attempt=0, what="u", event=event, delta=1e-5
        ),
        None,
    )
    after = gather(copy)
    assert (after.epsilon, after.sites, len(after.ledger.rows)) == (before.epsilon, before.sites, 8)
    assert after.ledger.head != before.ledger.head


@pytest.mark.slow
def test_the_own_ledger_of_a_site_that_counts_more_is_believed(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by the command that ends the run, and by an audit."""
    assert most_charges(RunFiles(copy)) == (2, 2)
    before = gather(copy)
    own = copy / "sites" / "site-001" / "state" / "ledger.sqlite"
    paid = read_history(own).entries[-1].charge
    again = Charge(**{**vars(paid), "id": "again"})
    Ledger(own, "site-001", composed).charge(again, None)
    after = gather(copy)
    assert verdict(after).holds
    assert before.epsilon is not None
    assert after.epsilon is not None
    assert after.epsilon > before.epsilon
    row = next(row for row in after.sites if row.name == "site-001")
    assert row.epsilon == after.epsilon
    assert "its own ledger, which has 3 charges" in row.notes
    assert most_charges(RunFiles(copy)) == (2, 3)
    assert found(capsys, "resume", str(copy))["epsilon"] == after.epsilon
    assert at_most(after.epsilon) in done(capsys, "resume", str(copy))
    edit(own, "UPDATE entries SET round = 9 WHERE number = 1")
    assert "the ledger of site-001 itself does not verify" in no_claim(copy)


def test_a_plan_that_is_not_that_of_the_run_carries_no_claim(copy: Path) -> None:
    """Another unit costs as much, and the report would claim it."""
    plan = json.loads((copy / "plan.json").read_text())
    for edited in (
        plan | {"data": plan["data"] | {"sequence_length": 2 * plan["data"]["sequence_length"]}},
        plan
        | {"simulation": plan["simulation"] | {"durable": False}},  # the digest has nothing of a simulation
    ):
        (copy / "plan.json").write_text(json.dumps(edited))
        assert "is not the plan with which the run began" in no_claim(copy)
        with RunFolder.reopen(copy) as folder, raises(RunFolderError, folder.plan_file):
            identity(folder)


@pytest.mark.parametrize("unit", ["record", "site"])
def test_a_site_whose_own_ledger_is_lost_carries_no_claim(
    unit: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """It may count more than the coordinator's, as the report would otherwise say that it does not."""
    copy = tmp_path / "lost"
    shutil.copytree(request.getfixturevalue(unit), copy)
    assert verdict(gather(copy)).holds or unit == "site"  # whose epsilon is too large
    (copy / "sites" / "site-001" / "state" / "ledger.sqlite").unlink()
    problem = gather(copy).ledger.problem
    assert "the sites' own ledgers hold" in problem
    assert problem in no_claim(copy)
    row = next(row for row in gather(copy).sites if row.name == "site-001")
    assert "It has no ledger of its own" in row.notes


def test_a_simulation_whose_sites_are_all_lost_carries_no_claim_and_is_not_resumed(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no deployment, whose sites keep their ledgers elsewhere; new sites would begin at zero."""
    journal = copy / "journal.sqlite"
    assert main(["report", str(copy)]) == 0
    assert "No privacy guarantee" not in capsys.readouterr().out
    shutil.rmtree(copy / "sites")
    assert main(["report", str(copy)]) == 0
    assert capsys.readouterr().out.startswith("No privacy guarantee")
    problem = no_claim(copy)
    assert "the sites' own ledgers hold no charge for site-" in problem
    assert any("one machine or cluster with one owner" in item for item in gather(copy).trusted)
    edit(journal, "DELETE FROM entries WHERE step = 'finished' OR step = 'done' AND round = 2")
    assert main(["resume", str(copy)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{copy / 'sites'}: expected the sites of this run with their ledgers, which are missing" in line
    assert not (copy / "sites").exists()


@pytest.mark.slow
def test_a_site_that_never_trained_needs_no_ledger(small_plan: Path, tmp_path: Path) -> None:
    clear = ("aggregation.secure=false", "run.rounds=1", "faults.update=0.3", "run.seed=2")
    folder = run(small_plan, tmp_path / "run", *RECORD, *clear)
    report = gather(folder)
    absent = [row.name for row in report.sites if "It has no ledger of its own" in row.notes]
    assert len(absent) == 4 - report.rounds[0].sites > 0
    assert verdict(report).holds
    next(iter(RunFiles(folder).sites.ledgers().values())).unlink()
    assert "the sites' own ledgers hold no charge for" in no_claim(folder)


@pytest.mark.parametrize("settings", [CENTRAL, (*RECORD, "aggregation.secure=false")], ids=["site", "record"])
def test_the_charge_of_an_update_that_was_lost_stands_for_no_other_site(
    small_plan: Path, tmp_path: Path, settings: Sequence[str]
) -> None:
    faults = ("run.rounds=1", "faults.update=0.3", "run.seed=2")
    folder = run(small_plan, tmp_path / "run", *settings, *faults)
    owned = RunFiles(folder).sites.ledgers()
    (asked, *_), (name, lost) = set(RunFiles(folder).sites.names()) - set(owned), owned.popitem()
    paid = read_history(lost).entries[-1].charge
    path = RunFiles(folder).sites.state(asked) / "ledger.sqlite"  # it trained, and its update did not arrive
    Ledger(path, asked, composed).charge(Charge(**{**vars(paid), "dataset": asked}), None)
    assert not gather(folder).ledger.problem
    assert [row.rounds for row in gather(folder).sites if row.name == asked] == [0]
    lost.unlink()
    found = no_claim(folder)
    assert found == f"the sites' own ledgers hold no charge for {name}, whose update is in the sum of round 1"


def test_a_journal_that_does_not_name_the_sites_of_a_sum_carries_no_claim(
    small_plan: Path, tmp_path: Path
) -> None:
    folder = run(small_plan, tmp_path / "run", *RECORD, "aggregation.secure=false", "run.rounds=1")
    assert verdict(gather(folder)).holds
    edit(folder / "journal.sqlite", f"DELETE FROM entries WHERE step = 'train {OPENING}'")
    found = no_claim(folder)
    assert found == "the journal names 0 of the 4 sites in the sum of round 1"
    assert [row.rounds for row in gather(folder).sites] == [0, 0, 0, 0]


# how far a run has come


def test_a_run_under_way_is_reported_with_what_was_charged_and_not_yet_done(copy: Path) -> None:
    whole = gather(copy)
    edit(
        copy / "journal.sqlite", "DELETE FROM entries WHERE step = 'finished' OR step = 'done' AND round = 2"
    )
    report = gather(copy)
    assert verdict(report).holds
    assert [row.round for row in report.rounds] == [1]
    assert "round 1:" not in verdict(report).sentence
    assert "over round 1 is" in verdict(report).sentence
    assert report.epsilon == whole.epsilon  # the records were used in round 2
    assert report.rounds == whole.rounds[:1]
    assert "not finished. 1 of 3 rounds are done" in report.not_covered[0]
    assert not report.stopped_by_budget


def test_refusals_are_told_at_their_site(copy: Path) -> None:
    with Journal(copy / "journal.sqlite") as journal:
        for _ in range(2):
            journal.record(1, 0, REFUSED, {"site": "site-002", "reason": "<its policy>"})
        journal.record(2, 1, REFUSED, {"site": "site-002", "reason": "its budget"})
    report = gather(copy)
    row = next(row for row in report.sites if row.name == "site-002")
    assert row.notes.count("Refused after round 1: <its policy>.") == 1
    assert row.notes.count("Refused in round 2: its budget.") == 1, "while it was under way"
    assert "<its policy>" not in to_html(report)


def test_sites_that_lied_are_told(copy: Path) -> None:
    with Journal(copy / "journal.sqlite") as journal:
        journal.record(2, 1, LEFT_OUT, {"site": "site-001", "reason": "it <lied>"})
    report = gather(copy)
    row = next(row for row in report.sites if row.name == "site-001")
    assert "Left out after it lied in the secure sum in round 2: it <lied>." in row.notes
    assert "<lied>" not in to_html(report)


def test_an_audit_is_in_the_report_and_can_refute_it(copy: Path) -> None:
    row = {"canaries": 100, "guesses": 50, "correct": 30, "confidence": 0.95, "epsilon": 0.01}
    (copy / "audit.json").write_text(json.dumps({"row": row}))
    report = gather(copy)
    assert report.audit is not None
    assert report.audit.correct == 30
    assert verdict(report).holds
    (copy / "audit.json").write_text(json.dumps({"row": {**row, "epsilon": 99.0}}))
    assert "an audit found" in verdict(gather(copy)).sentence
    for text in ("{", "[]", "{}", json.dumps({"row": {**row, "correct": "many"}})):
        (copy / "audit.json").write_text(text)
        with raises(RunFolderError, copy / "audit.json"):
            gather(copy)


def test_a_folder_that_is_no_run_or_has_not_begun_is_refused(tmp_path: Path, small_plan: Path) -> None:
    with raises(RunFolderError, tmp_path, says="plan.json"):
        gather(tmp_path)
    RunFolder.create(tmp_path / "new", load(small_plan)).close()
    with raises(RunFolderError, tmp_path / "new", says="begun"):
        gather(tmp_path / "new")
    assert not (tmp_path / "new" / "journal.sqlite").exists()
    Journal(tmp_path / "new" / "journal.sqlite").__exit__()
    with raises(RunFolderError, tmp_path / "new", says="begun"):
        gather(tmp_path / "new")


# a run of many rounds

MANY = 60


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of many rounds, as a run leaves it, with a mechanism that is composed in closed form."""
    plan = tiny(*CENTRAL, f"run.rounds={MANY}", "privacy.noise_multiplier=20.0")
    out = tmp_path_factory.mktemp("report") / "long"
    with RunFolder.create(out, plan) as folder, Journal(folder.journal) as journal:
        terms, run = terms_of(plan, 16), identity(folder)
        assert terms is not None
        spending = Spending(terms, run, folder.ledger)
        folder.checkpoints.mkdir()
        save_file({"model/w": np.zeros((4, 4), np.float32)}, checkpoint_file(folder.checkpoints, MANY))
        for number in range(1, MANY + 1):
            sites = [f"site-{site:03d}" for site in range(4) if (number + site) % 7]
            spending.before_opening(number, sites)
            journal.record(number, 1, of_sum(TRAIN, OPENING), {"survivors": sites})
            facts = {"round": number, "sites": len(sites), "epsilon": spending.epsilon()}
            journal.record(number, 1, DONE, facts)
            folder.add_metrics({"round": number, "loss": 1.0})
    return out


def after_rounds(folder: Path) -> list[float | None]:
    """For each round the largest epsilon of a site, each composed anew from the ledger's charges."""
    terms = terms_of(read_plan(folder), 16)
    assert terms is not None
    entries = read_history(folder / "ledger.sqlite").entries
    sites = {entry.charge.dataset for entry in entries}
    counts = [
        max(sum(e.charge.dataset == site and e.charge.round <= number for e in entries) for site in sites)
        for number in range(1, MANY + 1)
    ]
    return [terms.epsilon(count) for count in counts]


def test_a_report_of_many_rounds_composes_few_figures_and_shows_all(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[int] = []

    def counted(events: Sequence[Event], *rest: Any) -> Spent:
        composed.append(len(events))
        return spent(events, *rest)

    monkeypatch.setattr(server_report, "spent", counted)
    report = gather(long)
    assert len(composed) <= COMPOSED + 1, "and once more the claim itself"
    assert verdict(report).holds
    expected = after_rounds(long)
    assert [row.epsilon for row in report.rounds] == expected
    assert report.epsilon == expected[-1]
    assert len(set(expected)) > 3 * COMPOSED
    paid: Counter[str] = Counter()
    by_count = dict(enumerate(sorted({0.0, *(each for each in expected if each)})))
    for row in report.ledger.rows:
        paid[row.site] += 1
        assert row.epsilon == by_count[paid[row.site]]
    assert {row.name: row.epsilon for row in report.sites} == {
        site: by_count[count] for site, count in paid.items()
    }
    monkeypatch.setattr(server_report, "COMPOSED", 10 * MANY)
    assert replace(gather(long), created=report.created) == report


@pytest.mark.parametrize("number", [1, 31, MANY - 1, MANY])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_journal_that_lies_about_one_of_many_rounds_carries_no_claim(
    long: Path, tmp_path: Path, number: int, factor: float
) -> None:
    run = tmp_path / "run"
    shutil.copytree(long, run)
    lie = (after_rounds(run)[number - 1] or 0.0) * factor
    where = f"step = 'done' AND round = {number}"
    edit(
        run / "journal.sqlite",
        f"UPDATE entries SET detail = json_set(detail, '$.epsilon', {lie}) WHERE {where}",
    )
    assert f"epsilon after round {number} is" in no_claim(run)
    edit(
        run / "journal.sqlite",
        f"UPDATE entries SET detail = json_remove(detail, '$.epsilon') WHERE {where}",
    )
    assert [row.epsilon for row in gather(run).rounds] == after_rounds(run)


# the command


def test_the_command(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(record), "--output", str(tmp_path / "to"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    report = read((tmp_path / "to" / "report.json").read_bytes())
    assert facts["guarantee"] is True
    assert facts["epsilon"] == report.epsilon
    assert facts["sentence"] == verdict(report).sentence
    assert Path(facts["html"]).read_text(encoding="utf-8") == to_html(report)
    assert main(["report", str(tmp_path / "to")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cloister: ")
    assert "plan.json" in line


def test_the_command_says_what_is_wrong_with_a_ledger(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(copy)
    assert main(["report", str(copy)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("No privacy guarantee")
    assert "holds no charge for site-000" in out
    assert (copy / "report.html").exists()
    assert main(["report", str(copy), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["guarantee"], facts["epsilon"], facts["delta"]) == (False, None, None)
