"""One dataset over several runs: what `simulate --ledger` charges, what it stops, and what the report says of it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.privacy.accounting.accountant import composed, over_runs
from cloister.privacy.accounting.claims import charged_unit
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.dataset import DatasetLedger, _note, _noted
from cloister.privacy.ledger.ledger import Charge, Entry, Ledger, read_history
from cloister.privacy.mechanism.events import Skellam, bare, from_json, to_json
from cloister.privacy.report.figures import at_most, scientific
from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import CostRow, QuestionsRow, verdict
from cloister.protocol.errors import BudgetError, LedgerError
from cloister.protocol.messages.messages import Contribute, Request
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import load, parse
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.history import hash_of_plan
from cloister.server.record.outcome import Outcome
from cloister.server.record.progress import BudgetSpent, Event, SiteAnswered
from cloister.server.record.report import gather
from cloister.server.run import run
from cloister.tests.parties.federation import CENTRAL, RECORD, RUN, Federation, changed, tiny
from cloister.tests.tools.command import done, found, lone_refusal, ran, refusal, set_options
from cloister.tests.tools.kills import kill_while, killed_run
from cloister.tests.tools.raises import raises

DELTA = 1e-3
SETTINGS = [*RECORD, "local.steps=1", "run.rounds=2"]
SET = set_options(SETTINGS)
FOUR = ["site-000", "site-001", "site-002", "site-003"]


def epsilon_of(rounds: int, *settings: str) -> float:
    """Epsilon of so many rounds of the tiny plan, by the accountant."""
    terms = terms_of(tiny(*SETTINGS, *settings), 1)
    assert terms is not None
    return terms.epsilon(rounds)


def entries(path: Path) -> list[Entry]:
    return list(read_history(path).entries) if path.exists() else []


def keys(path: Path) -> list[tuple[int, int]]:
    """(round, times) of every charge, in order."""
    return [(entry.charge.round, entry.charge.attempt) for entry in entries(path)]


# Whole runs from the command line.


@pytest.fixture(scope="module")
def three(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with three runs on one dataset, whose limit ends the third after its first round; what each printed."""
    folder = tmp_path_factory.mktemp("dataset")
    limit = ["--set", f"simulation.greatest_epsilon={epsilon_of(5) * 1.0001}"]
    printed = []
    for name, more in (("one", []), ("two", ["--seed", "5"]), ("three", limit)):
        out = ["--out", str(folder / name), "--workers", "2", "--json"]
        over = ["--ledger", str(folder / "over.sqlite"), "--dataset", "2024"]
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main(["simulate", str(small_plan), *SET, *over, *more, *out]) == 0
        printed.append(json.loads(text.getvalue().splitlines()[-1]))
    return folder, printed


@pytest.mark.slow
def test_three_runs_on_one_dataset_are_composed(three: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, printed = three
    ledger = folder / "over.sqlite"
    assert keys(ledger) == [(1, 0), (2, 0), (1, 0), (2, 0), (1, 0)]
    together = composed([entry.charge.event for entry in entries(ledger)], DELTA)
    assert together == epsilon_of(5)
    alone = [epsilon_of(2), epsilon_of(2), epsilon_of(1)]
    assert [each["epsilon"] for each in printed] == alone
    assert max(alone) < together < sum(alone)
    assert [each["dataset"]["epsilon"] for each in printed] == [epsilon_of(2), epsilon_of(4), together]
    for name, own in zip(("one", "three"), (alone[0], alone[2]), strict=True):
        report = gather(folder / name)
        assert report.dataset is not None
        assert (report.dataset.runs, report.dataset.name, report.dataset.problem) == (3, "2024", "")
        assert (report.epsilon, report.dataset.epsilon) == (own, together)
        said = (
            f"with epsilon {at_most(own)} for this run (over the 3 runs on '2024' together it is "
            f"{at_most(together)} at delta {scientific(DELTA)})"
        )
        assert verdict(report).holds
        assert said in verdict(report).sentence
        page = to_html(report)
        assert f"<dt>epsilon, all runs (3)</dt><dd>{at_most(together)}</dd>" in page
        assert "alone" not in verdict(report).sentence


QUESTION = """[question]
kind = "histogram"
field = "ward"
values = ["a", "b"]
[privacy]
unit = "record"
noise_multiplier = {}
delta = 1e-3
[cohort]
sites = 4
[aggregation]
colluders = 0.25
[simulation]
partition = "iid"
ledger = "{}"
dataset = "2024"
"""


def ask(ledger: Path, noise: float) -> tuple[str, Skellam]:
    """Charge a question; the events of the charge, and the same with the noise that one site draws."""
    plan = parse(QUESTION.format(noise, ledger))
    terms = terms_of(plan, 1)
    assert terms is not None
    assert terms.asked is not None
    DatasetLedger(plan).check(terms, "", (), FOUR)
    DatasetLedger(plan).pay(f"question-{noise}", 1, "site-000", 0, terms.events(1))
    return to_json(terms.events(1)), replace(terms.asked.event, variance=terms.asked.variance)


@pytest.fixture
def asked(three: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> tuple[Path, Path]:
    """The first of three runs, and a copy of their ledger with no question yet."""
    out, ledger = tmp_path / "one", tmp_path / "over.sqlite"
    shutil.copy(three[0] / "over.sqlite", ledger)
    shutil.copytree(three[0] / "one", out)
    plan = json.loads((out / "plan.json").read_text())
    plan["simulation"]["ledger"] = str(ledger)
    begun_with(out, plan)
    return out, ledger


def test_runs_and_two_questions_are_reported_with_all_figures(
    asked: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, ledger = asked
    runs = [entry.charge.event for entry in entries(ledger)]
    before = gather(out).dataset
    assert before is not None
    assert before.asked is None
    told = [ask(ledger, noise) for noise in (8.0, 20.0)]
    questions = [text for text, _ in told]
    own = [to_json([event]) for _, event in told]
    together, all_others, alone, rest = (
        over_runs(events, DELTA) for events in ([*runs, *questions], [*runs, *own], questions, runs)
    )
    report = gather(out)
    assert verdict(report).holds
    found = report.dataset
    assert found is not None
    assert (found.runs, found.epsilon, found.delta) == (5, together.epsilon, 2 * DELTA)
    assert found.asked == QuestionsRow(
        questions=CostRow(alone.epsilon, 2 * DELTA),
        rest=CostRow(rest.epsilon, DELTA),
        against_all=CostRow(all_others.epsilon, 2 * DELTA),
    )
    assert rest.epsilon == epsilon_of(5)
    assert rest.epsilon < together.epsilon < all_others.epsilon
    page = to_html(report)
    for figure in (together, all_others, alone, rest):
        assert f"{at_most(figure.epsilon)} at delta {scientific(figure.delta)}" in page
    shown = " ".join(done(capsys, "resume", str(out)).split())
    assert f"against all others together │ {at_most(all_others.epsilon)} at delta 0.002" in shown
    (dataset,) = json.loads(done(capsys, "ledger", "show", str(ledger), "--json"))["datasets"]
    assert dataset["asked"]["against_all"]["epsilon"] == all_others.epsilon


def test_a_question_of_an_earlier_version_has_no_figure_against_all_others(asked: tuple[Path, Path]) -> None:
    """Its charge does not say of how many sites the noise is. All other figures stay."""
    out, ledger = asked
    event, _ = ask(ledger, 8.0)
    known = gather(out).dataset
    assert known is not None
    assert known.asked is not None
    with contextlib.closing(sqlite3.connect(ledger)) as db, db:
        (last,) = db.execute("SELECT what FROM entries ORDER BY number DESC").fetchone()
    paid = Charge(
        id="earlier/1/0",
        dataset="2024",
        run="earlier",
        round=1,
        attempt=0,
        what=last,
        event=to_json(map(bare, from_json(event))),
        delta=DELTA,
    )
    Ledger(ledger, "simulation", composed).charge(paid, None)
    found = gather(out).dataset
    assert found is not None
    assert found.asked is not None
    assert found.asked.against_all is None
    assert "does not say of how many sites" in found.asked.why_not
    assert found.epsilon is not None
    assert known.epsilon is not None
    assert found.epsilon > known.epsilon
    assert "does not say of how many sites" in to_html(gather(out))


def begun_with(run: Path, plan: dict[str, Any]) -> None:
    """Let a run have another plan, as if it had begun with it."""
    (run / "plan.json").write_text(json.dumps(plan))
    with contextlib.closing(sqlite3.connect(run / "journal.sqlite")) as journal, journal:
        (found,) = journal.execute("SELECT detail FROM entries WHERE step = 'created'").fetchone()
        detail = json.loads(found) | {"plan_file": hash_of_plan(RunFiles(run))}
        journal.execute("UPDATE entries SET detail = ? WHERE step = 'created'", (json.dumps(detail),))


def test_a_run_without_a_ledger_is_of_this_run_alone(
    three: tuple[Path, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(three[0] / "one", alone)
    plan = json.loads((alone / "plan.json").read_text())
    plan["simulation"] |= {"ledger": "", "dataset": ""}
    begun_with(alone, plan)
    report = gather(alone)
    assert report.dataset is None
    assert f"with epsilon {at_most(epsilon_of(2))} for this run alone and delta" in verdict(report).sentence
    assert "<dt>epsilon, this run alone</dt>" in to_html(report)
    assert any("nothing in this simulation counts them" in words for words in report.assumptions)
    answer = found(capsys, "report", str(alone))
    assert "for this run alone" in answer["sentence"]
    assert answer["dataset"] is None
    printed = done(capsys, "resume", str(alone))  # prints the outcome of a finished run
    assert "epsilon, this run alone" in printed


def test_the_limit_over_runs_ends_a_run_with_the_model_it_has(
    three: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, printed = three
    assert (printed[2]["rounds"], printed[2]["stopped"]) == (1, "dataset")
    report = gather(folder / "three")
    assert report.stopped_by_budget
    assert any("the limit of its dataset over all runs" in words for words in report.not_covered)
    assert (folder / "three" / "final" / "model.safetensors").exists()
    shown = done(capsys, "resume", str(folder / "three"))
    assert "ended by the limit over all runs" in shown
    assert "epsilon, all runs (3) on 2024" in shown


def test_a_run_that_cannot_begin_says_which_ledger_dataset_and_limit(
    three: tuple[Path, list[dict[str, Any]]],
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = three[0] / "over.sqlite"
    limit = epsilon_of(5) * 1.0001
    before = keys(ledger)
    over = ["--ledger", str(ledger), "--dataset", "2024", "--set", f"simulation.greatest_epsilon={limit}"]
    line = refusal(capsys, "simulate", str(small_plan), *SET, *over, "--out", str(tmp_path / "four"))
    assert f"epsilon of the dataset '2024' in {ledger} is {epsilon_of(5):.4f}" in line
    assert f"simulation.greatest_epsilon = {limit:g}" in line
    assert not (tmp_path / "four").exists()
    assert keys(ledger) == before
    # A limit is of one dataset: another name has spent nothing. Another unit is refused.
    other = [*over, "--set", "privacy.record=window", "--out", str(tmp_path / "five")]
    line = refusal(capsys, "simulate", str(small_plan), *SET, *other)
    assert "update, per one text" in line
    assert "update, per one window of 16 tokens" in line


def test_the_ledger_verb_shows_the_dataset(
    three: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = str(three[0] / "over.sqlite")
    (dataset,) = found(capsys, "ledger", "show", ledger)["datasets"]
    assert (dataset["dataset"], dataset["epsilon"]) == ("2024", epsilon_of(5))
    assert [run["rounds"] for run in dataset["runs"]] == [[1, 2], [1, 2], [1]]
    assert "Ledger of simulation" in done(capsys, "ledger", "show", ledger)


def altered(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'entries_are_not_changed'").fetchone()
        db.execute("DROP TRIGGER entries_are_not_changed")
        db.execute("UPDATE entries SET event = '[]' WHERE number = 2")
        db.execute(sql)


def cut(path: Path) -> None:
    """A ledger without the charges of the first run."""
    path.unlink()
    shutil.copy(path.parent / "empty.sqlite", path)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(altered, "entry 2"), (cut, "for round 1 of the run"), (Path.unlink, "which is missing")],
)
def test_a_lost_or_damaged_ledger_is_named_and_nothing_is_said_over_runs(
    spoil: Callable[[Path], None],
    problem: str,
    three: tuple[Path, list[dict[str, Any]]],
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger, out = tmp_path / "over.sqlite", tmp_path / "one"
    shutil.copy(three[0] / "over.sqlite", ledger)
    shutil.copytree(three[0] / "one", out)
    plan = json.loads((out / "plan.json").read_text())
    plan["simulation"]["ledger"] = str(ledger)
    begun_with(out, plan)
    if spoil is cut:
        shared(tmp_path / "empty.sqlite")
    spoil(ledger)
    report = gather(out)
    assert report.dataset is not None
    assert problem in report.dataset.problem
    assert (report.dataset.epsilon, report.epsilon) == (None, epsilon_of(2))
    sentence = verdict(report).sentence
    assert "for this run alone (what all runs on '2024' cost together is not known)" in sentence
    page = to_html(report)
    assert "epsilon, all runs" not in page
    assert problem in page
    assert problem in done(capsys, "report", str(out))
    if spoil is altered:
        over = ["--ledger", str(ledger), "--dataset", "2024", "--out", str(tmp_path / "new")]
        assert problem in refusal(capsys, "simulate", str(small_plan), *SET, *over)
        assert not (tmp_path / "new").exists()
    assert "epsilon, this run alone" in done(capsys, "resume", str(out))
    assert problem in str(found(capsys, "resume", str(out))["dataset"])
    # A run under way does not go on without its charges.
    with contextlib.closing(sqlite3.connect(out / "journal.sqlite", isolation_level=None)) as db:
        db.execute("DROP TRIGGER IF EXISTS entries_are_not_removed")
        db.execute("DELETE FROM entries WHERE step = 'finished' OR step = 'done' AND round = 2")
    assert problem in refusal(capsys, "resume", str(out))


def shared(ledger: Path, *settings: str) -> DatasetLedger:
    """A new ledger over runs."""
    plan = tiny(*SETTINGS, f"simulation.ledger={ledger}", "simulation.dataset=ward", *settings)
    found, terms = DatasetLedger(plan), terms_of(plan, 1)
    assert terms is not None
    found.check(terms, "", (), FOUR)
    return found


@pytest.mark.parametrize("loss", ["lost", "replaced"])
def test_a_kept_update_is_not_sent_again_without_its_charge(tmp_path: Path, loss: str) -> None:
    """The ledger is gone between the training of a round and its sum: the same update would be free."""
    ledger = tmp_path / "over.sqlite"
    before = shared(ledger)
    plan = tiny(*SETTINGS, f"simulation.ledger={ledger}", "simulation.dataset=ward")
    federation = Federation(tmp_path / "federation", plan)
    site = federation.joined()
    site.contribute(federation.request())
    assert before.spent().runs == 1
    ledger.unlink()
    terms = terms_of(plan, 1)
    assert terms is not None
    with raises(LedgerError, ledger, says="missing"):
        before.check(terms, RUN, (), FOUR)
    assert not ledger.exists()
    if loss == "replaced":
        with raises(LedgerError, ledger, says="the last that was made"):
            shared(ledger)
    with raises(LedgerError, ledger, says="missing" if loss == "lost" else "the last that was made"):
        federation.site().contribute(federation.request(tries=2))


def test_an_earlier_copy_of_the_ledger_ends_all_runs_on_it(tmp_path: Path) -> None:
    """Between two rounds of a run, and for another run: what was spent since would be forgotten."""
    ledger = tmp_path / "over.sqlite"
    before = shared(ledger)
    terms = terms_of(before._plan, 1)
    assert terms is not None
    before.pay("one", 1, "site-000", 0, terms.events(1))
    copy = ledger.read_bytes()
    before.pay("two", 1, "site-000", 0, terms.events(1))
    ledger.write_bytes(copy)
    attempts: list[Callable[[], object]] = [
        lambda: before.pay("one", 2, "site-000", 0, terms.events(1)),
        lambda: before.check(terms, "", (), FOUR),
        lambda: before.check_paid("one", 1),
        before.spent,
    ]
    for attempt in attempts:
        with raises(LedgerError, ledger, says="the last that was made"):
            attempt()
    assert keys(ledger) == [(1, 0)]
    ledger.with_name("over.sqlite.head").unlink()  # the person who decides
    before.pay("one", 2, "site-000", 0, terms.events(1))
    assert keys(ledger) == [(1, 0), (2, 0)]


def test_a_charge_that_is_noted_late_does_not_hide_a_later_one(tmp_path: Path) -> None:
    """Two processes: one charges before the other and notes it after."""
    ledger = tmp_path / "over.sqlite"
    before = shared(ledger)
    terms = terms_of(before._plan, 1)
    assert terms is not None
    for number in (1, 2):
        before.pay("one", number, "site-000", 0, terms.events(1))
    first, second = entries(ledger)
    _note(before._head_file, first)
    assert _noted(before._head_file) == (2, second.hash)


def test_two_runs_of_different_units_that_begin_at_once_are_not_both_charged(tmp_path: Path) -> None:
    """Both have found an empty ledger."""
    ledger = tmp_path / "over.sqlite"
    record = shared(ledger)
    window = DatasetLedger(changed(record._plan, "privacy", record="window"))
    terms = terms_of(record._plan, 1)
    assert terms is not None
    record.check(terms, "", (), FOUR)
    window.check(terms, "", (), FOUR)
    record.pay("one", 1, "site-000", 0, terms.events(1))
    with raises(BudgetError, f"dataset 'ward' in {ledger}"):
        window.pay("two", 1, "site-000", 0, terms.events(1))


def test_windows_of_another_tokenizer_or_field_are_another_unit() -> None:
    window = [*SETTINGS, "privacy.record=window"]
    changes: tuple[list[str], ...] = ([], ["data.text_field=note"], ["data.task=masked"])
    said = {charged_unit(tiny(*window, *change)) for change in changes}
    assert len(said) == 3
    assert all("(bytes)" in each for each in said)


def test_divisions_that_differ_in_the_last_digit_are_other_units() -> None:
    divided = [*CENTRAL, "simulation.partition=dirichlet", "simulation.field=topic", "simulation.public=0.1"]
    divided.append("server.evaluation=simulation:public")
    changes: tuple[list[str], ...] = (
        [],
        ["simulation.public=0.10000000001"],
        ["simulation.alpha=0.50000000001"],
    )
    assert len({charged_unit(tiny(*divided, *change)) for change in changes}) == 3


DIVIDED = [*CENTRAL, "local.steps=1", "simulation.partition=dirichlet", "simulation.field=topic"]


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=5",
        "cohort.sites=5",
        "simulation.partition=iid",
        "simulation.partition=natural",
        "simulation.alpha=0.25",
        "simulation.field=text",
        "simulation.source=builtin:python-stdlib",
        "simulation.split=test",
        "simulation.public=0.2",
        "before",
    ],
)
def test_a_site_of_another_division_is_another_unit(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """By the command line: a run on the same dataset whose sites have other records is not begun."""
    ledger = tmp_path / "over.sqlite"
    over = [*DIVIDED, f"simulation.ledger={ledger}", "simulation.dataset=ward"]
    first = load(small_plan, over)
    terms = terms_of(first, 1)
    assert terms is not None
    DatasetLedger(first).check(terms, "", (), FOUR)
    DatasetLedger(first).pay("first", 1, "site-000", 0, terms.events(1))
    same = load(small_plan, [*over, "run.name=same", "run.rounds=5", "privacy.noise_multiplier=9.0"])
    DatasetLedger(same).check(terms, "", (), FOUR)
    assert DatasetLedger(same).spent().runs == 1
    settings = [*over, change] if change != "before" else over
    if "public" in change:
        settings = [
            *(each for each in settings if "evaluation" not in each),
            "server.evaluation=simulation:public",
        ]
    if change == "simulation.partition=natural":
        settings += ["simulation.alpha=0.5"]
    if change == "before":  # a ledger of an earlier version
        ledger.unlink()
        ledger.with_name("over.sqlite.head").unlink()
        plain = Ledger(ledger, "simulation", composed)
        paid = DatasetLedger(first)._charge("first", 1, "site-000", 0, terms.events(1))
        plain.charge(replace(paid, what="update, per one site"), None)
    line = lone_refusal(
        capsys, "simulate", str(small_plan), *set_options(settings), "--out", str(tmp_path / "run")
    )
    assert "dataset 'ward' in" in line
    assert "epsilons of different units do not add up" in line
    assert "division of the records" in line
    assert not (tmp_path / "run" / "sites").exists()
    assert len(entries(ledger)) == 1


@pytest.mark.slow
def test_kill_9_and_resume_charge_no_release_twice(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, ledger, out = tmp_path / "plan.toml", tmp_path / "over.sqlite", tmp_path / "run"
    overrides = [*SETTINGS, f"simulation.ledger={ledger}", "simulation.dataset=ward"]
    written = json.loads(load(small_plan, overrides).to_json())
    plan.write_text(toml(written))
    kill_while(killed_run, plan, out, Answered(2, 2))
    before = keys(ledger)
    assert before[:2] == [(1, 0), (2, 0)]
    assert found(capsys, "resume", str(out), "--workers", "1")["rounds"] == 2
    # The dataset has, for each round, the charges of the site with most; a site that was killed at work has one more.
    own = Counter[tuple[str, int]]()
    for name, path in ((name, out / "sites" / name / "state" / "ledger.sqlite") for name in FOUR):
        own.update((name, entry.charge.round) for entry in entries(path))
    most = {number: max(own[name, number] for name in FOUR) for number in (1, 2)}
    assert Counter(number for number, _ in keys(ledger)) == most
    assert most[1] == 1
    assert most[2] <= 2
    assert len({entry.charge.id for entry in entries(ledger)}) == len(keys(ledger))


class Answered:
    """The moment at which so many sites have answered in a round."""

    def __init__(self, number: int, times: int) -> None:
        self._number, self._left = number, times

    def __call__(self, event: Event) -> bool:
        self._left -= isinstance(event, SiteAnswered) and event.round == self._number
        return self._left == 0


def toml(tree: dict[str, Any]) -> str:
    """Sections of plain values as TOML."""
    lines = []
    for section, values in tree.items():
        if values is None:
            continue
        plain = {k: v for k, v in values.items() if v is not None and not isinstance(v, dict) and v != []}
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in plain.items())]
        for name, below in values.items():
            if isinstance(below, dict) and below:
                set_ = {k: v for k, v in below.items() if v is not None}
                lines += [f"[{section}.{name}]", *(f"{k} = {json.dumps(v)}" for k, v in set_.items())]
    return "\n".join(lines)


# Runs of real sites in this process.


class Run:
    """A run's folder with its sites, which charge a ledger over runs."""

    def __init__(self, folder: Path, ledger: Path, settings: list[str], *, checks: bool = True) -> None:
        names = [f"simulation.ledger={ledger}", "simulation.dataset=ward"]
        self.federation = Federation(folder, tiny(*settings, *names))
        self.plan = self.federation.plan
        self.out = folder / "run"
        self.events: list[Event] = []
        self.checks = checks
        RunFolder.create(self.out, self.plan).close()
        terms = terms_of(self.plan, self.federation.layout.size)
        assert terms is not None
        DatasetLedger(self.plan).check(terms, "", (), self.federation.names)

    def go(self) -> Outcome:
        roster = self.federation.roster if self.plan.aggregation.secure else None
        dataset = DatasetLedger.of(self.plan) if self.checks else None
        with RunFolder.reopen(self.out) as folder:
            return run(folder, self.federation.channel, self.events.append, roster=roster, dataset=dataset)

    def own(self, index: int) -> list[int]:
        """The rounds that a site's own ledger has."""
        return [entry.charge.round for entry in self.federation.entries(index)]


def limited(rounds: int) -> str:
    return f"simulation.greatest_epsilon={epsilon_of(rounds) * 1.0001}"


@pytest.mark.slow
def test_two_simulations_at_the_same_time_stay_within_one_limit(tmp_path: Path) -> None:
    """The other run takes the last round that fits, after the coordinator of this one has found room for it."""
    ledger = tmp_path / "over.sqlite"
    one, other = (Run(tmp_path / name, ledger, [*SETTINGS, limited(3)]) for name in ("one", "other"))
    ended: list[Outcome] = []

    def between(_site: str, request: Request) -> None:
        if isinstance(request, Contribute) and request.sum.round == 2 and not ended:
            ended.append(other.go())

    one.federation.channel.before = between
    last = one.go()
    assert [(each.rounds, each.stopped) for each in (*ended, last)] == [(2, ""), (1, "dataset")]
    assert len(entries(ledger)) == 3
    assert [one.own(index) for index in range(4)] == [[1]] * 4  # refused before they were charged or trained
    (stop,) = [event for event in one.events if isinstance(event, BudgetSpent)]
    assert (stop.round, stop.dataset, stop.epsilon) == (2, "ward", epsilon_of(3))


@pytest.mark.slow
def test_a_coordinator_that_does_not_check_the_limit_gets_no_update_beyond_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "over.sqlite"
    lying = Run(tmp_path / "one", ledger, [*SETTINGS, limited(1)], checks=False)
    ended = lying.go()
    assert (ended.rounds, ended.stopped) == (1, "refused")
    assert keys(ledger) == [(1, 0)]
    # Without the sites' own check it gets the second round.
    monkeypatch.setattr(DatasetLedger, "pay", lambda *_: None)
    other = Run(tmp_path / "two", tmp_path / "other.sqlite", [*SETTINGS, limited(1)], checks=False)
    assert other.go().rounds == 2


@pytest.mark.slow
def test_a_site_that_trains_again_is_charged_again_and_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "over.sqlite"
    settings = [*SETTINGS, f"simulation.ledger={ledger}", "simulation.dataset=ward"]
    shared(ledger)
    federation = Federation(tmp_path, tiny(*settings))
    sites = [federation.joined(index) for index in (0, 1)]
    for site in sites:
        site.contribute(federation.request())
    assert keys(ledger) == [(1, 0)]
    for times in (1, 2):
        for kept in sites[0].config.folder.glob("runs/*/update-*"):
            kept.unlink()  # as where a crash has lost it
        federation.site(0).contribute(federation.request())
        assert keys(ledger) == [(1, time) for time in range(times + 1)]
    federation.site(1).contribute(federation.request())  # it has its update: nothing is trained or charged
    for kept in sites[1].config.folder.glob("runs/*/update-*"):
        kept.unlink()
    federation.site(1).contribute(federation.request())  # its second: the first site has paid for as many
    assert keys(ledger) == [(1, 0), (1, 1), (1, 2)]
    seen: list[list[tuple[int, int]]] = []

    def trained(*_: object, **__: object) -> None:
        seen.append(keys(ledger))
        raise KeyboardInterrupt

    monkeypatch.setattr("cloister.clients.training.dpsgd.PrivateTrainer.train", trained)
    with pytest.raises(KeyboardInterrupt):
        federation.site(0).contribute(federation.request(number=2))
    assert seen == [[(1, 0), (1, 1), (1, 2), (2, 0)]]


def test_a_crash_between_the_two_ledgers_charges_the_dataset_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "over.sqlite"
    federation = Federation(
        tmp_path, tiny(*SETTINGS, f"simulation.ledger={ledger}", "simulation.dataset=ward")
    )
    shared(ledger)
    site = federation.joined()
    right = DatasetLedger.pay

    def pay(self: DatasetLedger, *charged: Any) -> None:
        right(self, *charged)
        raise KeyboardInterrupt

    monkeypatch.setattr(DatasetLedger, "pay", pay)
    with pytest.raises(KeyboardInterrupt):
        site.contribute(federation.request())
    assert (keys(ledger), federation.entries()) == ([(1, 0)], ())
    monkeypatch.undo()
    federation.site().contribute(federation.request())
    assert keys(ledger) == [(1, 0)]
    assert len(federation.entries()) == 1


@pytest.mark.slow
def test_correlated_noise_is_charged_once_whenever_sites_begin(tmp_path: Path) -> None:
    ledger = tmp_path / "over.sqlite"
    settings = [setting for setting in CENTRAL if "secure" not in setting]
    settings += [
        *("run.rounds=4", "local.steps=1", "cohort.sites=6", "cohort.fraction=0.5"),
        *("aggregation.colluders=0.0", "privacy.delta=1e-4", "privacy.noise_multiplier=2.0"),
        *("privacy.correlated.separation=2", "privacy.correlated.participations=2"),
    ]
    first = Run(tmp_path / "one", ledger, settings)
    first.go()
    begun = {min(first.own(index)) for index in range(6)}
    assert begun == {1, 2}
    assert keys(ledger) == [(1, 0)]
    report = gather(first.out)
    assert report.dataset is not None
    assert report.dataset.epsilon == report.epsilon
    assert report.dataset.problem == ""


OWNER = [
    *(setting for setting in SETTINGS if "unit=" not in setting),
    "privacy.unit=owner",
    "data.owner=patient",
    "privacy.records=3",
    "run.rounds=1",
]


@pytest.mark.parametrize(
    ("partition", "charges"),
    [
        ((), 4),
        (("simulation.partition=natural", "simulation.field=ward"), 4),
        (("simulation.partition=natural", "simulation.field=patient"), 1),
        (("simulation.partition=auto", "simulation.field=patient"), 1),
    ],
    ids=["at random", "by another field", "by owner", "by owner, by itself"],
)
def test_an_owner_who_may_be_at_several_sites_pays_at_each(
    tmp_path: Path, partition: tuple[str, ...], charges: int
) -> None:
    records = [
        {"patient": f"p{number % 8}", "ward": f"w{number % 5}", "text": f"seen on day {number}. " * 3}
        for number in range(40)
    ]
    source = tmp_path / "owners.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    ledger = tmp_path / "over.sqlite"
    case = Run(tmp_path, ledger, [*OWNER, *partition, f"simulation.source={source}"])
    case.go()
    assert len(entries(ledger)) == charges
    held = [
        {json.loads(line)["patient"] for line in path.read_text().splitlines()}
        for path in sorted(case.federation.sites_folder.glob("*/data.jsonl"))
    ]
    apart = sum(map(len, held)) == len(set().union(*held))
    assert apart == (charges == 1)
    spent = DatasetLedger(case.plan).spent()
    terms = terms_of(tiny(*OWNER), 1)
    assert terms is not None
    assert spent.epsilon == terms.epsilon(charges)


def test_processes_that_charge_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    """Eight charges, of which five fit: five are written, whichever come first."""
    from concurrent.futures import ThreadPoolExecutor

    ledger = tmp_path / "over.sqlite"
    over = shared(ledger, limited(5))
    terms = terms_of(tiny(*SETTINGS), 1)
    assert terms is not None
    events = terms.events(1)

    def pay(number: int) -> bool:
        try:
            over.pay(f"run {number % 2}", number, "site-000", 0, events)
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(pay, range(1, 9))) == 5
    assert over.spent().epsilon == epsilon_of(5)
    ledger.unlink()
    with raises(LedgerError, "over.sqlite", says="missing"):  # it does not begin again from nothing
        over.pay("run", 9, "site-000", 0, events)
    assert not ledger.exists()


# Settings.


def test_settings_that_would_charge_nothing_are_refused(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = str(tmp_path / "over.sqlite")
    out = ["--out", str(tmp_path / "run")]
    simulate = partial(lone_refusal, capsys, "simulate", str(small_plan), *out)
    assert "simulation.dataset is 'x': expected no value" in simulate(*SET, "--dataset", "x")
    assert "simulation.dataset is '': expected a value with simulation.ledger" in simulate(
        *SET, "--ledger", ledger
    )
    both = ("--ledger", ledger, "--dataset", "x")
    assert "only valid with privacy.unit" in simulate(*both)
    assert "only valid with simulation.ledger" in simulate(*SET, "--set", "simulation.greatest_epsilon=3")
    assert "simulation.greatest_epsilon" in simulate(*SET, *both, "--set", "simulation.greatest_epsilon=-1")
    assert "simulation.noise_seed is 3" in simulate(*SET, *both, "--set", "simulation.noise_seed=3")
    relative = ("--set", "simulation.ledger=over.sqlite", "--dataset", "x")
    assert "expected an absolute path" in simulate(*SET, *relative)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["/proc/over.sqlite", "missing/over.sqlite", "."])
def test_a_ledger_that_cannot_be_written_stops_the_run_before_it_begins(
    where: str, small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = str(tmp_path / where)
    over = ["--ledger", ledger, "--dataset", "x", "--out", str(tmp_path / "run")]
    line = refusal(capsys, "simulate", str(small_plan), *SET, *over)
    assert ledger.removesuffix("/.") in line
    assert not (tmp_path / "run" / "sites").exists()


def test_the_ledger_of_another_party_is_not_charged(
    three: tuple[Path, list[dict[str, Any]]],
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = tmp_path / "ledger.sqlite"
    shutil.copy(three[0] / "one" / "ledger.sqlite", ledger)
    over = ["--ledger", str(ledger), "--dataset", "x", "--out", str(tmp_path / "run")]
    line = refusal(capsys, "simulate", str(small_plan), *SET, *over)
    assert "expected the ledger of simulation" in line


def test_a_path_is_kept_whole_so_that_a_resume_finds_it(
    small_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept: list[Plan] = []

    def execute(folder: RunFolder, *_: object, **__: object) -> int:
        kept.append(read_plan(folder.path))
        return 0

    monkeypatch.setattr("cloister.cli.show.execution.execute", execute)
    over = [
        "--ledger",
        'a "b" = [1].sqlite',
        "--dataset",
        "ward = 3",
        "--set",
        "simulation.greatest_epsilon=3",
    ]
    assert ran(capsys, "simulate", str(small_plan), *SET, *over, "--out", "run")[0] == 0
    simulation = kept[0].simulation
    assert simulation.ledger == str(tmp_path / 'a "b" = [1].sqlite')
    assert (simulation.dataset, simulation.greatest_epsilon) == ("ward = 3", 3.0)
