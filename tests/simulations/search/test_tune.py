"""`cloister tune`: searches over real runs from the command line, what they cost under a privacy unit, and refusals."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import stat
import traceback
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cloister.cli.main import main
from cloister.lm.model.layout import params_sha256
from cloister.lm.model.model import load_model
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import Charge, Ledger, read_history
from cloister.privacy.mechanism.events import Gaussian, SampledGaussian, Selection, from_json
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import EngineError, LedgerError, RunFolderError
from cloister.protocol.machine.storage import lock
from cloister.protocol.plan.soundness import load, parse
from cloister.server.record.folder import RunFiles, read_plan
from cloister.server.record.journal import DONE, Journal
from cloister.server.record.report import gather
from cloister.simulations.search import search as searches
from cloister.simulations.search import trials, tuning
from cloister.simulations.search.search import trial_plan
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
SELECTION = Selection("negative-binomial", 3.0, (ONE,), 2, 1.0)
"""The private search of these tests: a geometric law of mean 3, two rounds of one step."""
LAW = 'sampler = "random"\nlaw = "geometric"\nmean = 3\n'
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
    answer = found(capsys, "tune", "--again", str(out), "--workers", "1")
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
    with SearchFolder.create(out, load(plan), searches.load_search(search)) as folder:
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
        trial.number: trial for trial in Study(out / "study.sqlite", searches.load_search(search), 2).trials()
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
        search = searches.load_search(write_search(tmp_path, text))
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
    found = trial_plan(plan, values).server
    assert (found.optimizer, found.momentum, found.epsilon) == ("adam", 0.9, 0.1)
    assert trial_plan(plan, {"server.learning_rate": 0.5}).server.momentum == 0.3


# Under a privacy unit.

SILENT = "cloister: search: expected trials that end without an error; see {out}/sealed/trials.log"
"""All that an error of a private search says."""
SETTINGS = [{"local.learning_rate": 1e-9}, {"local.learning_rate": 0.05}]
"""What is drawn in the tests: two trials."""


def killed_private_search(plan: Path, search: Path, out: Path) -> None:
    """Begin a private search with two trials, and die before the first one begins."""
    tuning._draw = lambda _folder: SETTINGS  # type: ignore[assignment, return-value]  # this process ends soon
    Processes.start = lambda *_: die()  # type: ignore[method-assign]  # here
    with SearchFolder.create(out, load(plan), searches.load_search(search)) as folder:
        tuning.tune(folder, Engine(workers=1), lambda _trial: None)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, float | None]]:
    """The folder of a private search that was killed and went on, what it printed, and the losses that it compared.

    Its trials are kept beside it, as they were.
    """
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("searched")
    ledger = f'public = 0.2\nledger = "{folder / "over.sqlite"}"\ndataset = "notes"\n'
    plan, search = write_plan(folder, PRIVATE, ledger), write_search(folder, f"{LAW}{RANGE}")
    out = folder / "out"
    kill_while(killed_private_search, plan, search, out)
    assert json.loads((out / "sealed" / "drawn.json").read_bytes()) == SETTINGS
    assert stat.S_IMODE((out / "sealed").stat().st_mode) == 0o700
    assert len(read_history(folder / "over.sqlite").entries) == 1  # charged before the first trial
    losses: dict[int, float | None] = {}
    best = tuning._Sealed.best

    def compared(source: tuning._Sealed) -> int | None:
        losses.update({number: source._loss(number) for number in range(len(source._drawn))})
        shutil.copytree(out / "sealed", folder / "kept")
        return best(source)

    def redrawn(_folder: SearchFolder) -> list[dict[str, Any]]:
        raise AssertionError("the trials were drawn before")

    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(text):
        patched.setattr(tuning._Sealed, "best", compared)
        patched.setattr(tuning, "_draw", redrawn)
        assert main(["tune", "--again", str(out), "--workers", "1"]) == 0
    return out, text.getvalue(), losses


@cache
def price() -> float:
    return spent([SELECTION], 1e-3).epsilon


@pytest.mark.slow
def test_only_the_best_trial_of_a_private_search_is_left(
    searched: tuple[Path, str, dict[int, float | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, printed, losses = searched
    assert set(losses) == {0, 1}
    known = {number: loss for number, loss in losses.items() if loss is not None}
    assert len(known) == 2
    winner = min(known, key=lambda number: known[number])
    assert sorted(path.name for path in out.iterdir()) == [".lock", "best", "drawn", "search.json"]
    answer = found(capsys, "tune", "--again", str(out))
    assert (answer["settings"], answer["loss"]) == (SETTINGS[winner], known[winner])
    assert found(capsys, "tune", "--again", str(out), "--ray-address", "x:1") == answer, "nothing is run"
    assert read_plan(out / "best").local.learning_rate == SETTINGS[winner]["local.learning_rate"]
    assert answer["epsilon"] == price()
    assert "trials" not in answer
    for secret in (f"{known[1 - winner]:.4f}", "trial 0", "trial 1", "2 trials"):
        assert secret not in printed
    assert f"epsilon   {at_most(price())} at delta 0.001" in printed
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert b"sealed" not in path.read_bytes(), f"{path} says where the trial was"
    assert (out / "best" / "final" / "config.json").exists()


def test_what_a_private_search_gives_away_has_no_private_records_and_no_keys(
    searched: tuple[Path, str, dict[int, float | None]],
) -> None:
    sites = RunFiles(searched[0].parent / "kept" / "0000").sites
    folders = [sites.config(name).parent for name in sites.names()]
    lines = [line for folder in folders for line in (folder / "data.jsonl").read_text().splitlines()]
    secrets = [json.loads(line)["text"].encode() for line in lines]
    secrets += [(folder / "identity.pem").read_bytes() for folder in folders]
    best = RunFiles(searched[0] / "best")
    names = {path.name for path in best.sites.path.rglob("*")} - set(sites.names())
    assert names == {"roster.toml", "public.jsonl", "site.toml", "state", "ledger.sqlite"}
    for path in (path for path in searched[0].rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path


def lived(trial: RunFiles, later: float) -> None:
    """Let a trial have run later, and its rounds have taken longer: in each of its files that has a time."""

    def longer(text: str) -> str:
        return text.replace('"seconds": ', '"seconds": 1').replace('"train": ', '"train": 1')

    with sqlite3.connect(trial.journal) as journal:
        journal.create_function("longer", 1, longer)
        journal.execute("UPDATE entries SET time = time + ?, detail = longer(detail)", (later,))
    journal.close()
    trial.metrics_file.write_text(longer(trial.metrics_file.read_text()))
    for path in (trial.ledger, *trial.sites.ledgers().values()):
        entries = read_history(path).entries
        path.unlink()
        clock = partial(next, iter([entry.time + later for entry in entries]))
        again = Ledger(path, entries[0].owner, lambda _texts, _delta: 0.0, clock=clock)
        again.charge_all([entry.charge for entry in entries], None)
    for path in trial.checkpoints.iterdir():
        with safe_open(path, framework="np") as file:
            named = {name: longer(value) for name, value in file.metadata().items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
        save_file(tensors, path, named)
    trial.workers_log.write_text(f"{later}: the trial was slow")
    (events,) = trial.tensorboard.iterdir()
    events.rename(events.with_name(f"events.out.tfevents.{later}"))
    for path in trial.path.rglob("*"):
        os.utime(path, (later, later))


def sealed(searched: Path, out: Path, order: list[int]) -> list[RunFiles]:
    """Make the folder of a search whose trials, of those that a search had, have ended; nothing is chosen yet."""
    trials = [RunFiles(out / "sealed" / f"{place:04d}") for place in range(len(order))]
    for trial, number in zip(trials, order, strict=True):
        shutil.copytree(searched.parent / "kept" / f"{number:04d}", trial.path)
    shutil.copy(searched / "search.json", out)
    (out / "sealed" / "drawn.json").write_text(json.dumps([SETTINGS[number] for number in order]))
    return trials


def winner(searched: Path) -> int:
    """The number of its best trial."""
    return SETTINGS.index(json.loads((searched / "best" / "settings.json").read_bytes()))


def content_of(path: Path) -> object:
    """The bytes of a file; of safetensors, which are written in any order, what is in it."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safe_open(path, framework="np") as file:
        named = file.metadata()
        return named, {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 -- not a dict


def test_no_file_of_a_finished_search_tells_how_many_trials_there_were(
    searched: tuple[Path, str, dict[int, float | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best one of one trial, and the same one as the last of four, which ran later: the same files, byte by byte.

    The ledger over runs is a file of the time when the search ended, and not of its charge.
    """
    best, found = winner(searched[0]), []
    for order in ([best], [1 - best, 1 - best, 1 - best, best]):
        out = tmp_path / "out"
        for place, trial in enumerate(sealed(searched[0], out, order)):
            if place:
                lived(trial, 5000.0 * place)
        charged = searched[0].parent / "over.sqlite"
        os.utime(charged, (1.0, 1.0))
        printed = done(capsys, "tune", "--again", str(out))
        assert charged.stat().st_mtime > 1
        files = {path.relative_to(out): path for path in (out, *out.rglob("*"))}
        assert {path.stat().st_mtime for path in files.values()} == {files[Path()].stat().st_mtime}
        modes = {name: path.stat().st_mode for name, path in files.items()}
        contents = {name: content_of(path) for name, path in files.items() if path.is_file()}
        found.append((printed, modes, contents))
        out.rename(tmp_path / f"of {len(order)}")
    assert found[0] == found[1]
    assert {path.name for path in (tmp_path / "of 4" / "best").iterdir()} == {
        ".lock",
        "checkpoints",
        "final",
        "journal.sqlite",
        "ledger.sqlite",
        "metrics.jsonl",
        "plan.json",
        "settings.json",
        "sites",
    }


@pytest.mark.parametrize("left", ["nothing", "an empty folder of trials"])
def test_a_private_search_whose_result_is_gone_does_not_run_again_for_its_price(
    left: str,
    searched: tuple[Path, str, dict[int, float | None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New draws would be a second search. Its best trial may be moved elsewhere, as a user may do."""

    def redrawn(_folder: SearchFolder) -> list[dict[str, Any]]:
        raise AssertionError("the trials were drawn before")

    out = tmp_path / "out"
    shutil.copytree(searched[0], out)
    (out / "best").rename(tmp_path / "kept")
    if left != "nothing":
        (out / "sealed").mkdir()
    monkeypatch.setattr(tuning, "_draw", redrawn)
    line = refusal(capsys, "tune", "--again", str(out))
    assert "expected the result of this search or its trials, and they were moved or removed" in line
    assert "begin a new search: it is charged" in line
    assert len(read_history(searched[0].parent / "over.sqlite").entries) == 1


@pytest.mark.slow
def test_a_private_search_stops_where_sites_fail_and_goes_on(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that is away makes all sites refuse. That says nothing of a trial, which is not a failed one for it."""
    monkeypatch.setattr(tuning, "_draw", lambda _folder: SETTINGS[1:])
    start, ledger, out = Processes.start, tmp_path / "over.sqlite", tmp_path / "out"

    def without_ledger(processes: Processes, number: int, folder: Path, plan: Any) -> None:
        ledger.rename(tmp_path / "away")
        start(processes, number, folder, plan)

    with monkeypatch.context() as patched:
        patched.setattr(Processes, "start", without_ledger)
        search = write_search(tmp_path, f"{LAW}{RANGE}")
        line = refusal(capsys, "tune", str(private), str(search), "--out", str(out), "--workers", "1")
    assert line == SILENT.format(out=out)
    assert str(ledger) in (out / "sealed" / "trials.log").read_text()
    assert not list((out / "sealed").glob("*/failed.json"))
    (tmp_path / "away").rename(ledger)
    answer = found(capsys, "tune", "--again", str(out), "--workers", "1")
    assert answer["settings"] == SETTINGS[1]
    assert len(read_history(ledger).entries) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reached", [0, 1])
def test_an_error_of_a_private_search_does_not_say_which_trial_it_is_of(
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reached: int,
) -> None:
    """Its number, also in a path, is one that the secret number of trials exceeds."""
    out, search = tmp_path / "out", write_search(tmp_path, f"{LAW}{RANGE}")
    monkeypatch.setattr(tuning, "_draw", lambda _folder: SETTINGS)
    monkeypatch.setattr(tuning._Sealed, "_over", lambda _self, number: number < reached)
    again = ("tune", "--again", str(out), "--workers", "1")
    with monkeypatch.context() as patched:
        patched.setattr(trials, "_work", dead)
        line = refusal(capsys, "tune", str(private), str(search), "--out", str(out))
    assert line == SILENT.format(out=out)
    assert f"trial {reached}: expected a process" in (out / "sealed" / "trials.log").read_text()
    with monkeypatch.context() as patched:  # a site that trains each trial's rounds again
        patched.setattr(tuning, "_AGAIN", 0)
        patched.setattr(tuning, "beyond_a_trial", lambda *_: "site-000 was charged 3 times")
        assert refusal(capsys, *again) == line
    (out / "sealed" / f"{reached:04d}" / "plan.json").write_text("damaged")
    assert refusal(capsys, *again) == line
    with pytest.raises(EngineError) as told:
        main(["--traceback", *again])
    assert "sealed/0" not in "".join(traceback.format_exception(told.value))


def test_a_copy_of_a_private_search_does_not_draw_again(
    searched: tuple[Path, str, dict[int, float | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was made before the first draw; the ledger over runs has the charge."""
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(searched[0] / "search.json", out)
    line = refusal(capsys, "tune", "--again", str(out))
    assert "expected no charge of this search: a copy of its folder has drawn trials" in line
    assert not (out / "sealed").exists()
    assert len(read_history(searched[0].parent / "over.sqlite").entries) == 1


def test_a_failed_trial_is_not_the_best_whatever_its_loss(
    searched: tuple[Path, str, dict[int, float | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The price is that of an order on results in which a failure is the last."""
    best, out = winner(searched[0]), tmp_path / "out"
    first, _ = sealed(searched[0], out, [best, 1 - best])
    (first.path / "failed.json").write_text('"it failed when it had a loss"')
    answer = found(capsys, "tune", "--again", str(out))
    assert answer["settings"] == SETTINGS[1 - best]


def test_a_private_search_is_charged_once(searched: tuple[Path, str, dict[int, float | None]]) -> None:
    (entry,) = read_history(searched[0].parent / "over.sqlite").entries
    assert from_json(entry.charge.event) == (SELECTION,)
    assert (entry.charge.dataset, entry.charge.delta) == ("notes", 1e-3)


def test_the_ledger_over_runs_does_not_say_when_a_search_began(
    searched: tuple[Path, str, dict[int, float | None]],
) -> None:
    """Its charge has no time, and the file is of a time after it (above)."""
    assert [entry.time for entry in read_history(searched[0].parent / "over.sqlite").entries] == [0.0]


def test_the_report_of_the_best_trial_has_the_price(
    searched: tuple[Path, str, dict[int, float | None]],
) -> None:
    best = searched[0] / "best"
    report = gather(best)
    claim = verdict(report)
    assert claim.holds
    assert report.epsilon == price()
    assert report.dataset is not None
    assert (report.dataset.runs, report.dataset.epsilon) == (1, price())
    said = f"epsilon {at_most(price())} for the search of which this run is the best trial (over the 1 run on 'notes'"
    assert said in claim.sentence
    assert "a geometric law with mean 3" in report.search
    assert any(report.search in words for words in report.assumptions)
    assert "Not the owner of the machine" in report.protected_from
    assert {row.epsilon for row in report.rounds} == {price()}
    assert {row.epsilon for row in report.sites} == {price()}
    assert {row.written for row in report.ledger.rows} == {""}, "not that the charges are of 1970"
    assert {row["epsilon"] for row in RunFiles(best).metrics() if row["round"]} == {price()}
    assert spent([ONE, ONE], 1e-3).epsilon < price()


def test_a_trial_that_cost_more_than_its_price_is_not_covered(
    searched: tuple[Path, str, dict[int, float | None]], tmp_path: Path
) -> None:
    """A site that trained a round again, after a crash: the trial is run again, and a report of it claims nothing."""
    folder = tmp_path / "out"
    shutil.copytree(searched[0], folder)
    shutil.copytree(folder / "best", folder / "sealed" / "0000")
    with SearchFolder.reopen(folder) as opened:
        source = tuning._Sealed(opened, SETTINGS[:1], searches.terms(opened.plan))
        assert source.next() is None  # it is over
        path = RunFiles(folder / "sealed" / "0000").sites.ledgers()["site-000"]
        (first, *_) = read_history(path).entries
        charge = Charge(**{**vars(first.charge), "id": "again"})
        Ledger(path, "site-000", lambda _texts, _delta: 0.0).charge(charge, None)
        report = gather(folder / "sealed" / "0000")
        assert not verdict(report).holds
        assert "site-000 was charged 3 times, more than for the whole plan" in verdict(report).sentence
        source = tuning._Sealed(opened, SETTINGS[:1], searches.terms(opened.plan))
        assert source.next() == (0, SETTINGS[0])
        source.end(0, "complete", "")
        assert not (folder / "sealed" / "0000").exists()
        assert source.next() == (0, SETTINGS[0])


def test_a_trial_trains_only_if_its_search_was_charged(
    searched: tuple[Path, str, dict[int, float | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(searched[0] / "best")
    paid = DatasetLedger.of(plan)
    assert paid is not None
    paid.pay("run", 1, "site-000", 0, [ONE])
    assert len(read_history(paid.path).entries) == 1
    other = plan.simulation.model_copy(update={"ledger": str(tmp_path / "other.sqlite")})
    missing = DatasetLedger.of(plan.model_copy(update={"simulation": other}))
    assert missing is not None
    with raises(LedgerError, missing.path, says="missing"):
        missing.pay("run", 1, "site-000", 0, [ONE])
    Ledger(missing.path, "simulation", lambda _texts, _delta: 0.0)
    with raises(LedgerError, missing.path, says="for the search"):
        missing.pay("run", 1, "site-000", 0, [ONE])
    toml = write_plan(tmp_path, PRIVATE, f'public = 0.2\n[simulation.search]\nsearch = "{"0" * 32}"\n')
    toml.write_text(toml.read_text() + 'law = "poisson"\nmean = 3.0\n')
    line = lone_refusal(capsys, "simulate", str(toml))
    assert "simulation.search" in line
    assert "only `cloister tune` sets it" in line


def test_no_trial_gives_the_untrained_model(
    searched: tuple[Path, str, dict[int, float | None]],
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Poisson law may give 0; the search is charged all the same."""
    monkeypatch.setattr(tuning, "draw_number", lambda _mean, _shape: 0)
    out = tmp_path / "out"
    search = write_search(tmp_path, f"{LAW.replace('geometric', 'poisson')}{RANGE}")
    printed = done(capsys, "tune", str(private), str(search), "--out", str(out))
    assert f"no trial: the untrained model is in {out}/untrained/final" in printed
    assert sorted(path.name for path in out.iterdir()) == [".lock", "drawn", "search.json", "untrained"]
    assert len({path.stat().st_mtime for path in (out, *out.rglob("*"))}) == 1, "of no other time"
    initial = facts_of(searched[0] / "best")[0]["params_sha256"]
    section = load(private).model.model_copy(update={"name": str(out / "untrained" / "final"), "config": {}})
    loaded = load_model(load(private).model_copy(update={"model": section}))
    assert params_sha256(loaded.layout.flatten(loaded.module)) == initial
    assert len(read_history(tmp_path / "over.sqlite").entries) == 1


@pytest.mark.parametrize(
    ("partition", "sites"),
    [([], 4), (["simulation.partition=natural", "simulation.field=patient"], 1)],
    ids=["at random", "by owner"],
)
def test_an_owner_who_may_be_at_several_sites_pays_for_a_search_at_each(
    partition: list[str],
    sites: int,
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best trial released what each of its sites did: the two rounds of four sites are eight for the owner."""
    monkeypatch.setattr(tuning, "draw_number", lambda _mean, _shape: 0)
    search = write_search(tmp_path, f"{LAW.replace('geometric', 'poisson')}{RANGE}")
    options = set_options(["privacy.unit=owner", "data.owner=patient", *partition])
    done(capsys, "tune", str(private), str(search), *options, "--out", str(tmp_path / "out"))
    (entry,) = read_history(tmp_path / "over.sqlite").entries
    step = SampledGaussian(1.0, 0.5, 1, "owner")
    assert from_json(entry.charge.event) == (Selection("poisson", 3.0, (step,), 2 * sites),)


def test_a_limit_over_runs_refuses_a_search_as_a_whole(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, search = tmp_path / "out", write_search(tmp_path, f"{LAW}{RANGE}")
    limit = ("--set", f"simulation.greatest_epsilon={price() * 0.999}")
    line = refusal(capsys, "tune", str(private), str(search), *limit, "--out", str(out))
    assert "epsilon" in line
    assert not out.exists()
    assert not read_history(tmp_path / "over.sqlite").entries


def test_trials_are_drawn_from_the_law(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the law gives, each from the whole space, in secret; of a grid with replacement."""
    monkeypatch.setattr(tuning, "draw_number", lambda mean, shape: 40 if (mean, shape) == (3.0, 1.0) else 0)
    schedule = '[[parameter]]\nfield = "local.warmup_steps"\nchoices = [0, 1]\n'
    text = f"{LAW}{RANGE}{schedule}"
    with SearchFolder.create(
        tmp_path / "a", load(private), searches.load_search(write_search(tmp_path, text))
    ) as folder:
        random.seed(0)
        drawn = tuning._draw(folder)
        random.seed(0)
        again = tuning._draw(folder)
    rates = {values["local.learning_rate"] for values in drawn}
    assert rates.isdisjoint(values["local.learning_rate"] for values in again), "no seed decides them"
    assert len(drawn) == len(rates) == 40
    assert all(1e-4 <= float(rate) <= 1e-1 for rate in rates)
    assert {values["local.warmup_steps"] for values in drawn} == {0, 1}
    grid = text.replace("random", "grid").replace(RANGE, "")
    with SearchFolder.create(
        tmp_path / "b", load(private), searches.load_search(write_search(tmp_path, grid))
    ) as folder:
        assert len(tuning._draw(folder)) == 40


def test_the_price_is_known_before_the_search(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = write_search(tmp_path, f"{LAW}{RANGE}")
    answer = found(capsys, "tune", str(private), str(search), "--dry-run", "--out", str(tmp_path / "out"))
    assert (answer["epsilon"], answer["epsilon_of_one"]) == (price(), spent([ONE, ONE], 1e-3).epsilon)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "over.sqlite").exists()
    central = (
        "privacy.unit=site",
        "privacy.trusted_coordinator=true",
        "simulation.ledger=",
        "simulation.dataset=",
    )
    text = private.read_text().replace("sampling_rate = 0.5\n", "")
    private.write_text(text)
    sets = set_options(central)
    answer = found(capsys, "tune", str(private), str(search), *sets, "--dry-run")
    sites = Selection("negative-binomial", 3.0, (Gaussian(1.0, 1),), 2, 1.0)
    assert answer["epsilon"] == spent([sites], 1e-3).epsilon


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
        (f'law = "poisson"\nmean = 3\n{OPEN}', ["law is 'poisson'", "only valid with a privacy unit"]),
        (GRID.replace("[[", "shape = 2.0\n[[", 1), ["shape is 2.0", "negative-binomial"]),
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
        (f"{LAW}{RANGE}".replace("random", "tpe"), (), ["sampler is 'tpe'", "independent trials"]),
        (f'pruner = "median"\n{LAW}{RANGE}', (), ["pruner is 'median'", "independent trials"]),
        (f"trials = 9\n{LAW}{RANGE}", (), ["trials is 9", "costs what all of them cost"]),
        (f"seed = 9\n{LAW}{RANGE}", (), ["seed is 9", "how many there were"]),
        (OPEN.replace("trials = 2\n", ""), (), ["law", "drawn in secret"]),
        (
            f"{LAW}{RATE}choices = [1e-3]\n".replace("mean = 3\n", ""),
            (),
            ["mean", "a value with a privacy unit"],
        ),
        (f"{LAW}{RANGE}".replace("mean = 3", "mean = 1"), (), ["mean", "greater than 1"]),
        (
            f'{LAW}[[parameter]]\nfield = "local.steps"\nchoices = [1, 2]\n',
            (),
            ["local.steps", "does not change what a run costs", "with 2"],
        ),
        (
            f'{LAW}[[parameter]]\nfield = "run.rounds"\nlow = 1\nhigh = 2\n',
            (),
            ["run.rounds", "does not change what a run costs"],
        ),
        (
            f'{LAW}[[parameter]]\nfield = "privacy.noise_multiplier"\nlow = 1\nhigh = 2\n',
            (),
            ["privacy.clip"],
        ),
        (
            f"{LAW}{RANGE}",
            ("server.evaluation=none", "simulation.public=0.0"),
            ["server.evaluation", "held-out"],
        ),
        (
            f"{LAW}{RANGE}",
            ("server.evaluation=", "simulation.public=0.0"),
            ["server.evaluation", "no charge covers"],
        ),
        (f"{LAW}{RANGE}", ("privacy.budget=3.9",), ["privacy.budget is 3.9", "that the search costs"]),
        (
            f"{LAW}{RANGE}",
            ("simulation.noise_seed=1", "simulation.ledger=", "simulation.dataset="),
            ["simulation.noise_seed", "protects nothing"],
        ),
    ],
)
def test_refused_private_searches(
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


def test_a_private_search_on_ray_is_refused(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray has a folder of its own for each trial."""
    search, out = write_search(tmp_path, f"{LAW}{RANGE}"), tmp_path / "out"
    line = refusal(capsys, "tune", str(private), str(search), "--out", str(out), "--ray-address", "x:1")
    assert "--ray-address is 'x:1': expected no value under a privacy unit" in line
    assert not out.exists()


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
        tmp_path / "out", load(plan), searches.load_search(write_search(tmp_path, GRID))
    ).__exit__()
    (tmp_path / "out" / "study.sqlite").write_text("no database" * 100)
    line = refusal(capsys, "tune", "--again", str(tmp_path / "out"))
    assert "study.sqlite: expected the study of a search (DatabaseError: " in line


def dead(*_arguments: object) -> None:
    die()
