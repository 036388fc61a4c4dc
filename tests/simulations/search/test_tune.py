"""`cloister tune`: searches over real runs from the command line, what they cost under a privacy unit, and refusals."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event as dp
from dp_accounting.pld import PLDAccountant

from cloister.cli.main import main
from cloister.cli.options.shared_options import folder_for
from cloister.privacy.accounting.accountant import over_runs
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import read_history
from cloister.privacy.mechanism.events import Gaussian, SampledGaussian, from_json, to_json
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import BudgetError, RunFolderError, SearchError
from cloister.protocol.machine.storage import lock
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import changed, load, parse
from cloister.server.record.folder import RunFiles, read_plan
from cloister.server.record.history import run_history
from cloister.server.record.journal import DONE, Journal
from cloister.server.record.report import gather
from cloister.simulations.search import price, trials, tuning
from cloister.simulations.search import search as searches
from cloister.simulations.search.price import charged_plan, price_of
from cloister.simulations.search.search import ParameterSection, Search
from cloister.simulations.search.study import Study
from cloister.simulations.search.trials import Engine, Processes
from cloister.simulations.search.tuning import SearchFolder
from cloister.tests.parties.federation import TINY, write_records
from cloister.tests.tools.command import done, found, lone_refusal, ran, refusal, set_options
from cloister.tests.tools.kills import die, kill_while
from cloister.tests.tools.raises import raises

RUN = """
[aggregation]
secure = false
weighting = "uniform"
[run]
name = "tiny"
rounds = 2
"""
PRIVATE = """
[server]
evaluation = "simulation:public"
[privacy]
unit = "record"
noise_multiplier = 1.0
sampling_rate = 0.5
delta = 1e-3
"""
ONE = SampledGaussian(1.0, 0.5, 1)
"""A round of a private plan: one step."""
RATE = '[[parameter]]\nfield = "local.learning_rate"\n'
RANGE = f"{RATE}low = 1e-4\nhigh = 1e-1\nlog = true\n"


def write_plan(folder: Path, more: str = "", simulation: str = "") -> Path:
    records = write_records(folder / "records.jsonl")
    base = TINY.replace('[run]\nname = "tiny"\nrounds = 3\n', "").replace("steps = 2", "steps = 1")
    path = folder / "plan.toml"
    path.write_text(f'{RUN}{more}{base}source = "{records}"\ndurable = false\n{simulation}')
    return path


def write_search(folder: Path, text: str) -> Path:
    path = folder / "search.toml"
    path.write_text(text)
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan without a privacy unit."""
    return write_plan(tmp_path)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A plan with the unit `record`, whose dataset has a ledger."""
    ledger = f'public = 0.2\nledger = "{tmp_path / "over.sqlite"}"\ndataset = "notes"\n'
    return write_plan(tmp_path, PRIVATE, ledger)


def facts_of(run: Path) -> dict[int, dict[str, Any]]:
    """The facts of each round that is done in a run folder."""
    with Journal(RunFiles(run).journal) as journal:
        return {entry.round: entry.detail for entry in journal.entries() if entry.step == DONE}


# Without a privacy unit.


@pytest.mark.slow
def test_a_grid_is_pruned_and_goes_on_after_ctrl_c(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second point learns nothing, so it ends after its first round; the search was interrupted before."""
    text = f'sampler = "grid"\npruner = "median"\nstartup = 1\n{RATE}choices = [0.003, 1e-9]\n'
    out = tmp_path / "grid"

    def interrupt(_processes: Processes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Processes, "hear", interrupt)
        code, printed, err = ran(
            capsys, "tune", str(plan), str(write_search(tmp_path, text)), "--out", str(out)
        )
    assert (code, err) == (130, "cloister: interrupted\n")
    assert f"stopped; continue with: cloister tune --again {out}" in printed
    monkeypatch.setattr("cloister.cli.verbs.tune._QUIET_S", 0.0)
    _, printed, err = ran(capsys, "tune", "--again", str(out), "--workers", "1", "--json")
    answer = json.loads(printed)
    assert "trial 0: round 1, held-out loss" in err
    assert [trial["settings"] for trial in answer["trials"]] == [
        {"local.learning_rate": 0.003},
        {"local.learning_rate": 1e-9},
    ]
    assert [trial["state"] for trial in answer["trials"]] == ["complete", "pruned"]
    assert sorted(facts_of(out / "trials" / "0000")) == [0, 1, 2]
    assert sorted(facts_of(out / "trials" / "0001")) == [0, 1]
    assert answer["best"] == str(out / "trials" / "0000")
    last = RunFiles(out / "trials" / "0000").metrics()[-1]
    assert (last["round"], last["loss"]) == (2, answer["loss"])
    shown = done(capsys, "tune", "--again", str(out))
    assert "ended early" in shown
    assert "best      local.learning_rate = 0.003, held-out loss" in shown
    line = lone_refusal(capsys, "tune", str(plan), str(tmp_path / "search.toml"), "--out", str(out))
    assert "this one holds another search" in line
    assert f"cloister tune --again {out}" in line
    line = lone_refusal(capsys, "tune", str(plan), "--again", str(out))
    assert "without PLAN" in line


def killed_search(plan: Path, search: Path, out: Path) -> None:
    """Begin a search, and die as soon as a trial has told the loss of its first round."""
    Study.seen = lambda *_: die()  # type: ignore[method-assign, assignment]  # this process ends there
    with SearchFolder.create(out, load(plan), searches.SEARCH.load(search)) as folder:
        tuning.tune(folder, Engine(workers=1), lambda _trial: None)


@pytest.mark.slow
def test_a_search_goes_on_after_kill_9(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two trials at the same time, chosen by TPE; each is resumed and not begun again, with the settings it had."""
    text = f'sampler = "tpe"\ntrials = 2\nworkers = 2\nseed = 7\npruner = "hyperband"\n{RANGE}'
    search, out = write_search(tmp_path, text), tmp_path / "tpe"
    kill_while(killed_search, plan, search, out)
    before = {
        trial.number: trial for trial in Study(out / "study.sqlite", searches.SEARCH.load(search), 2).trials()
    }
    assert {trial.state for trial in before.values()} == {"running"}
    begun = {
        path.name: facts_of(path) for path in (out / "trials").iterdir() if RunFiles(path).journal.exists()
    }
    assert any(1 in facts for facts in begun.values())
    answer = found(capsys, "tune", "--again", str(out), "--workers", "1")
    assert len(answer["trials"]) == 2
    for trial in answer["trials"]:
        assert trial["state"] in ("complete", "pruned")
        if trial["trial"] in before:
            assert trial["settings"] == before[trial["trial"]].values
    complete = [trial["loss"] for trial in answer["trials"] if trial["state"] == "complete"]
    assert answer["loss"] == min(complete)
    for name, facts in begun.items():
        after = facts_of(out / "trials" / name)
        assert {number: after[number] for number in facts} == facts
        assert load(plan).local.learning_rate != read_plan(out / "trials" / name).local.learning_rate


@pytest.mark.slow
def test_settings_depend_on_the_seed_and_not_on_interruptions(tmp_path: Path) -> None:
    """Random settings are those of the search's seed, whole numbers and choices among them."""
    fields = (
        f"{RANGE}"
        '[[parameter]]\nfield = "local.batch_size"\nlow = 1\nhigh = 9\nstep = 2\n'
        '[[parameter]]\nfield = "local.schedule"\nchoices = ["constant", "cosine"]\n'
    )
    chosen = []
    for name, seed, again in (("one", 1, False), ("two", 1, True), ("three", 2, False)):
        text = f'sampler = "random"\ntrials = 4\nseed = {seed}\n{fields}'
        search = searches.SEARCH.load(write_search(tmp_path, text))
        study = Study(tmp_path / f"{name}.sqlite", search, 2)
        values = []
        for number in range(4):
            if again:
                study = Study(tmp_path / f"{name}.sqlite", search, 2)
            trial = study.begin()
            assert trial is not None
            assert trial.number == number
            values.append(dict(trial.values))
        assert study.begin() is None
        assert [trial.values for trial in study.unfinished()] == values
        assert all(each["local.batch_size"] in (1, 3, 5, 7, 9) for each in values)
        assert all(1e-4 <= float(each["local.learning_rate"]) <= 1e-1 for each in values)
        chosen.append(values)
    assert chosen[0] == chosen[1] != chosen[2]
    assert len({str(values) for values in chosen[0]}) == 4


def test_a_trial_that_fails_does_not_end_the_search(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that are sound each on its own, and not together: found at the trial."""
    keep = '[[parameter]]\nfield = "local.optimizer_state"\nchoices = ["keep"]\n'
    part = '[[parameter]]\nfield = "cohort.fraction"\nchoices = [0.75]\n'
    out = tmp_path / "failed"
    search = write_search(tmp_path, f'sampler = "random"\ntrials = 1\n{keep}{part}')
    masked = set_options(("aggregation.secure=true", "aggregation.colluders=0.0", "cohort.sites=4"))
    code, printed, _ = ran(capsys, "tune", str(plan), str(search), *masked, "--out", str(out), "--json")
    assert code == 1
    answer = json.loads(printed)
    assert (answer["best"], answer["trials"][0]["state"]) == (None, "failed")
    assert "local.optimizer_state is keep" in answer["trials"][0]["reason"].replace("'", "")
    assert "no trial has finished" in ran(capsys, "tune", "--again", str(out))[1]


def test_a_value_without_effect_beside_others_is_no_failure() -> None:
    """A search over kinds has the constants of each."""
    plan = parse('[server]\noptimizer = "nesterov"\nmomentum = 0.3')
    values: dict[str, bool | int | float | str] = {
        "server.optimizer": "adam",
        "server.momentum": 0.5,
        "server.epsilon": 0.1,
    }
    found = changed(plan, values).server
    assert (found.optimizer, found.momentum, found.epsilon) == ("adam", 0.9, 0.1)
    assert changed(plan, {"server.learning_rate": 0.5}).server.momentum == 0.3


# Under a privacy unit.


def composed(*, rounds: int = 0, steps: int = 1, rate: float = 0.5, sites: int = 1) -> float:
    """Epsilon of rounds of private steps at delta 1e-3, by `dp_accounting` alone."""
    step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.0))
    return float(PLDAccountant().compose(step, rounds * steps * sites).get_epsilon(1e-3))


def charges(ledger: Path) -> Counter[tuple[str, int]]:
    """How often each round of each run was charged."""
    return Counter((entry.charge.run, entry.charge.round) for entry in read_history(ledger).entries)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a finished search under the unit `record`, and what it printed, before and at its last trial.

    Three trials by TPE, two at a time; the second one is pruned after its first round. The plan names no ledger.
    """
    folder = tmp_path_factory.mktemp("searched")
    plan = write_plan(folder, PRIVATE, "public = 0.2\n")
    text = f'sampler = "tpe"\ntrials = 3\nworkers = 2\nseed = 5\npruner = "median"\n{RANGE}'
    search, out, printed = write_search(folder, text), folder / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setattr(Study, "seen", lambda _study, number, _round, _loss: number != 1)
        assert main(["tune", str(plan), str(search), "--out", str(out), "--workers", "1"]) == 0
    return out, printed.getvalue().splitlines()


def test_each_trial_is_charged_and_the_price_was_known(searched: tuple[Path, list[str]]) -> None:
    """Two whole trials of two rounds, and the one round that the pruned one released."""
    out, printed = searched
    runs = {run_history(RunFiles(path)).run: path.name for path in sorted((out / "trials").iterdir())}
    charged = {(runs[run], number): times for (run, number), times in charges(out / "ledger.sqlite").items()}
    assert charged == {("0000", 1): 1, ("0000", 2): 1, ("0001", 1): 1, ("0002", 1): 1, ("0002", 2): 1}
    for secret in ("noise.json", "attempt", "spool"):  # of the one that was ended early too
        assert not list((out / "trials").glob(f"*/{secret}"))
    for entry in read_history(out / "ledger.sqlite").entries:
        assert from_json(entry.charge.event) == (ONE,)
    most, one, all_of_them = (at_most(composed(rounds=rounds)) for rounds in (6, 2, 5))
    assert f"epsilon   {most} at delta 0.001 for 3 trials; one run of the plan costs {one}" in printed
    last = next(line for line in reversed(printed) if line.startswith("epsilon"))
    assert last.startswith(f"epsilon   {all_of_them} at delta 0.001 for the 3 runs on ")
    assert str(out / "ledger.sqlite") in last


def test_a_cost_that_two_fields_change_only_together_is_in_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (Gaussian(4.0, 1),), (Gaussian(1.0, 1),)

    def cost(_plan: Plan, values: Mapping[str, object]) -> tuple[Gaussian, ...]:
        both = values.get("model.adapter.scheme") == "full" and values.get("model.config.hidden_size") == 64
        return large if both else small

    monkeypatch.setattr(price, "_run", cost)
    choices: dict[str, tuple[int | str, ...]] = {
        "model.adapter.scheme": ("lora", "full"),
        "model.config.hidden_size": (32, 64),
    }
    parameters = tuple(ParameterSection(field=field, choices=found) for field, found in choices.items())
    assert set(price._corners(parse(""), Search(trials=2, parameter=parameters))) == {small, large}
    many = tuple(ParameterSection(field=f"model.config.n{at}", choices=(1, 2)) for at in range(11))
    with raises(SearchError, "parameter"):
        price._corners(parse(""), Search(trials=2, parameter=many))


def test_the_report_of_each_trial_has_the_epsilon_of_all(
    searched: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = searched
    report = gather(out / "trials" / "0000")
    assert report.epsilon == pytest.approx(composed(rounds=2), rel=1e-3)
    assert report.dataset is not None
    assert (report.dataset.runs, report.dataset.problem) == (3, "")
    assert report.dataset.epsilon == pytest.approx(composed(rounds=5), rel=1e-3)
    assert verdict(report).holds
    assert not any("this run alone" in words for words in report.assumptions)
    printed = done(capsys, "report", str(out / "trials" / "0001"))
    assert f"together it is {at_most(composed(rounds=5))}" in " ".join(printed.split())


def trained(*_: object) -> None:
    """In place of `Processes.start`, where no trial may begin."""
    raise AssertionError("a trial was begun")


def test_a_search_whose_ledger_is_lost_or_older_does_not_go_on(
    searched: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial would make it anew, without what the others have spent."""
    out, _ = searched
    ledger, kept, begun = out / "ledger.sqlite", out / "kept", out / "search.json"
    settings = begun.read_text()
    ledger.rename(kept)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Processes, "start", trained)
            begun.write_text(settings.replace('"trials": 3', '"trials": 4'))
            line = refusal(capsys, "tune", "--again", str(out))
            assert "the ledger of the dataset, which is missing" in line
            assert not ledger.exists()
            with (
                contextlib.closing(sqlite3.connect(kept)) as whole,
                contextlib.closing(sqlite3.connect(ledger)) as older,
            ):
                whole.backup(older)
                guard = "entries_are_not_removed"
                (trigger,) = whole.execute("SELECT sql FROM sqlite_master WHERE name = ?", (guard,))
                older.execute(f"DROP TRIGGER {guard}")
                older.execute("DELETE FROM entries WHERE number = 5")
                older.execute(*trigger)
                older.commit()
            assert "the last that was made" in refusal(capsys, "tune", "--again", str(out))
    finally:
        kept.replace(ledger)
        begun.write_text(settings)
    assert found(capsys, "tune", "--again", str(out))["epsilon"] == pytest.approx(
        composed(rounds=5), rel=1e-3
    )


def test_no_trial_begins_after_the_ledger_is_lost(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, ledger = Study.begin, tmp_path / "over.sqlite"

    def lost(study: Study) -> Any:
        ledger.unlink()
        return begin(study)

    monkeypatch.setattr(Study, "begin", lost)
    monkeypatch.setattr(Processes, "start", trained)
    search = write_search(tmp_path, f'sampler = "random"\ntrials = 2\n{RANGE}')
    line = refusal(capsys, "tune", str(private), str(search), "--out", str(tmp_path / "out"))
    assert "the ledger of the dataset, which is missing" in line
    assert not ledger.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill -9", "Ctrl-C"])
def test_a_resumed_search_charges_each_round_once(
    how: str,
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops when the first trial has told the loss of its first round, and the ledger has had another run before."""
    ledger = DatasetLedger(load(private))
    ledger.create()
    ledger.pay("earlier", 1, "site-000", 0, [ONE])
    search, out = (
        write_search(tmp_path, f'sampler = "grid"\n{RATE}choices = [0.003, 0.03]\n'),
        tmp_path / "out",
    )
    if how == "kill -9":
        kill_while(killed_search, private, search, out)
    else:

        def interrupt(*_: object) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Study, "seen", interrupt)
            begun = ran(capsys, "tune", str(private), str(search), "--out", str(out), "--workers", "1")
        assert begun[0] == 130
    assert sum(charges(ledger.path).values()) == 2
    answer = found(capsys, "tune", "--again", str(out), "--workers", "1")
    assert set(charges(ledger.path).values()) == {1}
    assert answer["epsilon"] == pytest.approx(composed(rounds=5), rel=1e-3)
    assert not (out / "ledger.sqlite").exists(), "the plan's ledger is used"
    assert {trial["state"] for trial in answer["trials"]} == {"complete"}


STEPS = '[[parameter]]\nfield = "local.steps"\n'
ROUNDS = '[[parameter]]\nfield = "run.rounds"\n'


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (f'sampler = "random"\ntrials = 3\n{RANGE}', 3 * 2),
        (f'sampler = "grid"\n{RATE}choices = [0.1, 0.2]\n', 2 * 2),
        (f'sampler = "grid"\n{STEPS}choices = [1, 3]\n{ROUNDS}low = 1\nhigh = 2\n', 1 + 2 + 3 + 6),
        (f'sampler = "tpe"\ntrials = 4\n{STEPS}low = 1\nhigh = 3\n{ROUNDS}choices = [1, 2]\n{RANGE}', 4 * 6),
    ],
    ids=["one cost", "a grid", "a grid of costs", "the largest of bounds and choices"],
)
def test_the_price_is_that_of_all_trials(
    text: str, steps: int, private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `dp_accounting` composes them; nothing is made."""
    command = ("tune", str(private), str(write_search(tmp_path, text)), "--dry-run")
    answer = found(capsys, *command, "--out", str(tmp_path / "out"))
    assert answer["epsilon"] == pytest.approx(composed(rounds=steps), rel=1e-3)
    assert answer["epsilon_of_one"] == pytest.approx(composed(rounds=2), rel=1e-3)
    assert answer["delta"] == 1e-3
    assert answer["exact"] == (steps != 24)
    assert ("at most" in done(capsys, *command)) == (steps == 24)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "over.sqlite").exists()


@pytest.mark.parametrize(
    ("partition", "sites"),
    [([], 4), (["simulation.partition=natural", "simulation.field=patient"], 1)],
    ids=["at random", "by owner"],
)
def test_an_owner_who_may_be_at_several_sites_pays_at_each(
    partition: list[str], sites: int, private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = set_options(["privacy.unit=owner", "data.owner=patient", *partition])
    search = write_search(tmp_path, f'sampler = "random"\ntrials = 3\n{RANGE}')
    answer = found(capsys, "tune", str(private), str(search), *options, "--dry-run")
    assert answer["epsilon"] == pytest.approx(composed(rounds=6, sites=sites), rel=1e-3)


@pytest.mark.slow
def test_trials_of_other_mechanisms_never_cost_more_than_the_price(private: Path) -> None:
    """With a target the noise follows from the steps: what such trials cost holds at twice delta."""
    private.write_text(private.read_text().replace("noise_multiplier = 1.0", "target_epsilon = 2.0"))
    plan = load(private, ["privacy.accountant=rdp"])
    steps = searches.ParameterSection(field="local.steps", low=1, high=4)
    price = price_of(plan, searches.Search(sampler="random", trials=3, parameter=(steps,)))
    assert price is not None
    assert (price.exact, price.delta) == (False, 2e-3)
    runs = []
    for number in range(1, 5):
        tried = changed(plan, {"local.steps": number})
        terms = terms_of(tried, 1)
        assert terms is not None
        runs.append(to_json(DatasetLedger(tried).whole(terms)))
    for drawn in itertools.combinations_with_replacement(runs, 3):
        assert over_runs(drawn, 1e-3, "rdp").epsilon <= price.epsilon


def test_a_search_costs_at_most_the_budget(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the plan is one for all trials, and the limit of the search's own ledger."""
    search, out = write_search(tmp_path, f'sampler = "random"\ntrials = 3\n{RANGE}'), tmp_path / "out"
    limit = composed(rounds=6)
    own = set_options(("simulation.ledger=", "simulation.dataset="))
    for options in ([], own):
        little = set_options([f"privacy.budget={limit * 0.99}"])
        line = lone_refusal(capsys, "tune", str(private), str(search), *options, *little, "--out", str(out))
        assert "privacy.budget is" in line
        assert "that all trials of the search cost together" in line
        assert line == lone_refusal(
            capsys, "tune", str(private), str(search), *options, *little, "--dry-run", "--out", str(out)
        )
        enough = set_options([f"privacy.budget={limit * 1.01}"])
        found(capsys, "tune", str(private), str(search), *options, *enough, "--dry-run")
    assert not out.exists()
    assert not (tmp_path / "over.sqlite").exists()
    plan = load(private, [f"privacy.budget={limit}", "simulation.ledger=", "simulation.dataset="])
    charged = charged_plan(plan, out).simulation
    assert (charged.ledger, charged.greatest_epsilon) == (str(out / "ledger.sqlite"), limit)
    assert charged_plan(load(private), out) == load(private)


def test_the_price_is_the_limit_of_the_searchs_own_ledger(private: Path, tmp_path: Path) -> None:
    """All rounds of all trials are paid, and no round is made again beyond them, as after crashes."""
    search = searches.SEARCH.load(write_search(tmp_path, f'sampler = "random"\ntrials = 3\n{RANGE}'))
    plan = load(private, ["simulation.ledger=", "simulation.dataset="])
    with SearchFolder.create(tmp_path / "out", plan, search) as folder:
        assert folder.plan.simulation.greatest_epsilon == float(at_most(composed(rounds=6)))
        ledger = DatasetLedger(folder.plan)
    ledger.create()
    for trial, number in itertools.product("abc", (1, 2)):
        ledger.pay(trial, number, "site-000", 0, [ONE])
    what = f"epsilon of {ledger.dataset} with update, per one text of round 2 of c"
    with raises(BudgetError, what):
        ledger.pay("c", 2, "site-000", 1, [ONE])
    assert sum(charges(ledger.path).values()) == 6
    with SearchFolder.create(tmp_path / "named", load(private), search) as folder:
        assert folder.plan.simulation.greatest_epsilon is None, "another ledger's limit is its owner's"


@pytest.mark.slow
def test_a_search_costs_at_most_what_the_ledger_has_left(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = DatasetLedger(load(private))
    ledger.create()
    ledger.pay("earlier", 1, "site-000", 0, [ONE])
    search = write_search(tmp_path, f'sampler = "random"\ntrials = 3\n{RANGE}')
    command = ("tune", str(private), str(search), "--out", str(tmp_path / "out"))
    left = set_options([f"simulation.greatest_epsilon={composed(rounds=7) * 1.01}"])
    found(capsys, *command, *left, "--dry-run")
    little = set_options([f"simulation.greatest_epsilon={composed(rounds=7) * 0.99}"])
    assert composed(rounds=6) < composed(rounds=7) * 0.99
    line = lone_refusal(capsys, *command, *little)
    assert "simulation.greatest_epsilon is" in line
    assert "holds, and all trials of the search" in line
    other = set_options(["privacy.unit=owner", "data.owner=patient"])
    assert "epsilons of different units do not add up" in lone_refusal(capsys, *command, *other)
    assert not (tmp_path / "out").exists()
    assert sum(charges(ledger.path).values()) == 1


def test_a_target_is_a_limit_for_all_trials(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The noise is that of one run, so two runs exceed it."""
    private.write_text(private.read_text().replace("noise_multiplier = 1.0", "target_epsilon = 2.0"))
    text = f'sampler = "random"\ntrials = 2\n{RANGE}'
    line = lone_refusal(capsys, "tune", str(private), str(write_search(tmp_path, text)), "--dry-run")
    assert "privacy.target_epsilon is 2.0" in line
    assert "set privacy.noise_multiplier" in line
    search = write_search(tmp_path, text.replace("trials = 2", "trials = 1"))
    assert found(capsys, "tune", str(private), str(search), "--dry-run")["epsilon"] <= 2.0


def trial_of_a_ledger_that_is_away(ledger: Path) -> Any:
    """Starts a trial, and moves the ledger before its process begins."""
    start = Processes.start

    def moved(processes: Processes, number: int, folder: Path, plan: Any) -> None:
        ledger.write_bytes(b"damaged" * 100)
        start(processes, number, folder, plan)

    return moved


@pytest.mark.slow
def test_a_ledger_that_fails_ends_the_search_and_not_the_trial(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other trials would meet it too."""
    ledger, out = tmp_path / "over.sqlite", tmp_path / "out"
    search = write_search(tmp_path, f'sampler = "random"\ntrials = 2\n{RANGE}')
    with monkeypatch.context() as patched:
        patched.setattr(Processes, "start", trial_of_a_ledger_that_is_away(ledger))
        line = refusal(capsys, "tune", str(private), str(search), "--out", str(out), "--workers", "1")
    assert str(ledger) in line
    with SearchFolder.reopen(out) as folder:
        (trial,) = Study(folder.study, folder.search, 2).trials()
    assert trial.state == "running"


# Refusals.

GRID = f'sampler = "grid"\n{RATE}choices = [0.1, 0.2]\n'
OPEN = f'sampler = "random"\ntrials = 2\n{RANGE}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trials = 2\n", ["parameter", "one [[parameter]] or more"]),
        (OPEN.replace("random", "randon"), ["sampler", "'grid', 'random' or 'tpe'"]),
        (OPEN.replace("trials", "trails"), ["trails", "did you mean trials?"]),
        (OPEN.replace("trials = 2\n", ""), ["trials", "a number with sampler"]),
        (f"trials = 3\n{GRID}", ["trials is 3", 'no value with sampler = "grid"']),
        (
            OPEN.replace("local.learning_rate", "local.learning_rat"),
            ["local.learning_rat", "a field of training"],
        ),
        (
            OPEN.replace("local.learning_rate", "run.seed"),
            ["run.seed", "not the data, the evaluation, the seed"],
        ),
        (
            OPEN.replace("local.learning_rate", "simulation.source"),
            ["simulation.source", "a field of training"],
        ),
        (OPEN.replace("local.learning_rate", "privacy.clip"), ["privacy.clip", "there is no privacy unit"]),
        (OPEN.replace("low = 1e-4", "low = 0"), ["log is True", "low above 0"]),
        (OPEN.replace("high = 1e-1\n", ""), ["parameter[0]", "both low and high"]),
        (
            OPEN.replace("high = 1e-1", "high = 1e300"),
            ["parameter[0].high is 1e+300", "less than or equal to"],
        ),
        (OPEN.replace("low = 1e-4", "low = true"), ["parameter[0].low is True: expected a number"]),
        (GRID.replace("[0.1, 0.2]", "[[1, 2], 3]"), ["choices[0] is [1, 2]"]),
        (
            'sampler = "random"\ntrials = 1\n[[parameter]]\nfield = "model.config.hidden_size"\nchoices = [15]\n',
            ["trial with model.config.hidden_size = 15: model.config", "that llama can be built from"],
        ),
        (OPEN.replace("low = 1e-4", "low = 1"), ["low", "a number below high"]),
        (f"{OPEN}choices = [1]\n", ["either choices, or low and high"]),
        (f"{OPEN}{RANGE}", ["parameter[1].field", "each field once"]),
        (OPEN.replace("random", "grid").replace("trials = 2\n", ""), ["step", "choices or a step"]),
        (f'{GRID}[[parameter]]\nfield="local.steps"\nlow=1\nhigh=600\n', ["sampler", "at most 1000 points"]),
        (GRID.replace("0.2", "-1"), ["trial with local.learning_rate = -1", "greater than 0"]),
        (GRID.replace("[[", "startup = 2\n[[", 1), ["startup is 2", 'only valid with pruner = "median"']),
    ],
)
def test_refused_searches(
    text: str, words: list[str], plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = lone_refusal(capsys, "tune", str(plan), str(write_search(tmp_path, text)), "--out", str(out))
    for word in words:
        assert word in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "sets", "words"),
    [
        (
            OPEN.replace("trials = 2\n", 'law = "poisson"\nmean = 3\n'),
            (),
            ["law", "expected one of the keys"],
        ),
        (
            f'{OPEN}[[parameter]]\nfield = "privacy.noise_multiplier"\nlow = 1\nhigh = 2\n',
            (),
            ["privacy.noise_multiplier", "privacy.clip"],
        ),
        (OPEN, ("server.evaluation=none", "simulation.public=0.0"), ["server.evaluation", "held-out"]),
        (
            OPEN,
            ("server.evaluation=sites", "simulation.public=0.0"),
            ["server.evaluation", "no charge covers"],
        ),
        (
            OPEN,
            ("simulation.noise_seed=1", "simulation.ledger=", "simulation.dataset="),
            ["simulation.noise_seed", "protects nothing"],
        ),
    ],
)
def test_refused_searches_under_a_privacy_unit(
    text: str,
    sets: tuple[str, ...],
    words: list[str],
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = set_options(sets)
    search = write_search(tmp_path, text)
    line = lone_refusal(capsys, "tune", str(private), str(search), *options, "--dry-run")
    for word in words:
        assert word in line
    line = refusal(capsys, "tune", str(private), str(search), *options, "--out", str(tmp_path / "out"))
    assert words[-1] in line
    assert not (tmp_path / "out").exists()


def test_a_process_that_is_killed_ends_the_search(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial whose process dies is not a failed trial: the search ends, and can be continued."""
    monkeypatch.setattr(trials, "_work", dead)
    out = tmp_path / "out"
    line = refusal(capsys, "tune", str(plan), str(write_search(tmp_path, GRID)), "--out", str(out))
    assert "trial 0: expected a process that ends by itself, and it was killed by SIGKILL" in line
    with SearchFolder.reopen(out) as folder:
        (trial,) = Study(out / "study.sqlite", folder.search, 2).trials()
    assert trial.state == "running"


def test_a_trial_that_another_process_holds_is_waited_for_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lock(tmp_path / ".lock", "the test's own")
    with monkeypatch.context() as patched:
        patched.setattr(trials, "_HELD_S", 0.01)
        with raises(RunFolderError, tmp_path, says="no other process"):
            trials._wait_for(tmp_path / ".lock")
    held.close()
    trials._wait_for(tmp_path / ".lock")


def test_a_damaged_study_is_one_line(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SearchFolder.create(
        tmp_path / "out", load(plan), searches.SEARCH.load(write_search(tmp_path, GRID))
    ).__exit__()
    (tmp_path / "out" / "study.sqlite").write_text("no database" * 100)
    line = refusal(capsys, "tune", "--again", str(tmp_path / "out"))
    assert "study.sqlite: expected the study of a search (DatabaseError: " in line


def dead(*_arguments: object) -> None:
    die()


def test_a_search_that_is_there_goes_on_with_its_own_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan-search").mkdir()
    (tmp_path / "plan-search" / "search.json").write_text("{}")
    assert folder_for(None, tmp_path, "plan-search") == tmp_path / "plan-search-2"
    told = capsys.readouterr()
    assert f"cloister tune --again {tmp_path / 'plan-search'}" in told.out + told.err
