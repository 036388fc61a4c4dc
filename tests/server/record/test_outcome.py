"""What a finished run says of itself: it has ended well, whatever cannot be shown of it."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console

from cloister.cli.show import outcome as shown
from cloister.clients.app import client_app
from cloister.clients.ranks.resident import Resident
from cloister.lm.model.model import load_model
from cloister.protocol.errors import ModelError, PlanError
from cloister.server.display import LineDisplay, LiveDisplay, describe
from cloister.server.door.carrier import identify
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder, read_plan
from cloister.server.record.journal import FINISHED, Journal
from cloister.server.record.outcome import outcome
from cloister.server.record.phases import Phase
from cloister.server.record.progress import Event, Finished, Step
from cloister.simulations import federation, site_losses
from cloister.simulations.federation import make_client_app, open_site
from cloister.tests.parties.federation import tiny
from cloister.tests.tools.command import found, ran, set_options
from cloister.tests.tools.raises import raises

PER_SITE = "Held-out loss of each site"
STEPS = "of 4 held-out losses of sites"


@pytest.fixture(scope="module")
def again(whole: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the undisturbed run, whose sites have no folder for site-002."""
    run = tmp_path_factory.mktemp("again") / "run"
    shutil.copytree(whole["run"], run)
    shutil.rmtree(run / "sites" / "site-002")
    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# Seconds and memory


def test_the_figures_of_time_are_consistent(whole: dict[str, Any]) -> None:
    phases, rows = whole["phase_seconds"], rows_of(Path(whole["run"]))
    assert list(phases) == [phase.value for phase in Phase]
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) <= whole["command_seconds"]
    assert whole["tokens"] == sum(row.get("tokens", 0) for row in rows)
    assert whole["tokens_per_second"] * whole["round_seconds"] == pytest.approx(whole["tokens"])
    assert whole["round_seconds"] == pytest.approx(sum(row.get("seconds", 0.0) for row in rows))
    with Journal(Path(whole["run"]) / "journal.sqlite") as journal:
        end = journal.newest(FINISHED)
    assert end is not None
    for phase, seconds in phases.items():
        laps = [*(row["phase_seconds"] for row in rows), end.detail["phase_seconds"]]
        assert seconds == pytest.approx(sum(lap.get(phase, 0.0) for lap in laps)), phase
    assert {"prepare", "join", "evaluate", "checkpoint"} == set(
        rows[0]["phase_seconds"]
    )  # nothing was trained
    for row in rows[1:]:
        assert set(row["phase_seconds"]) == {"train", "sum", "evaluate", "checkpoint"}
        assert row["seconds"] <= row["phase_seconds"]["train"] + row["phase_seconds"]["sum"]
        assert row["phase_seconds"]["train"] <= row["seconds"]  # one attempt: step 4 is a part of it
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(Path(whole["run"]) / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("phase_seconds/train")] == [1, 2, 3]


def test_peak_memory_is_that_of_the_coordinator_and_of_the_largest_worker(whole: dict[str, Any]) -> None:
    peaks = whole["peak_rss_bytes"]
    assert set(peaks) == {"coordinator", "largest_worker"}
    # The run was in this process, whose peak other tests reset.
    assert all(5e7 < peak < 8e9 for peak in peaks.values())


def test_json_has_null_for_what_is_no_number(whole: dict[str, Any], tmp_path: Path) -> None:
    """A model that has diverged, and a liar whose totals are none: strict parsers read both files."""
    shutil.copytree(whole["run"], tmp_path / "run")
    with RunFolder.reopen(tmp_path / "run") as folder:
        last = folder.metrics()[-1]
        folder.truncate_metrics(last["round"] - 1)
        folder.add_metrics(last | {"loss": math.nan, "perplexity": math.inf})
        assert folder.metrics()[-1] == last | {"loss": None, "perplexity": None}
        found = outcome(folder)
        assert math.isnan(found.figures["loss"])
        written = json.loads(json.dumps(shown.to_json(folder, found, {}, seconds=1.0), allow_nan=False))
    assert (written["final_loss"], written["perplexity"]) == (None, None)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_last_table_fits_a_narrow_terminal(
    columns: int, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = ran(capsys, "resume", whole["run"])
    assert code == 0
    table = out[out.index("Outcome") : out.index("no privacy guarantee")].splitlines()
    assert max(map(len, table)) <= columns
    for pair in ("prepare, join", "train, sum", "evaluate, checkpoint"):
        (line,) = [line for line in table if pair in line]
        figures = [whole["phase_seconds"][name] for name in pair.split(", ")]
        assert ", ".join(f"{seconds:,.1f} s" for seconds in figures) in line
    assert any(f"{whole['tokens_per_second']:,.0f}" in line for line in table if "tokens/s in rounds" in line)
    assert any("GB" in line for line in table if "peak RSS, coordinator" in line)


# The losses of each site


def test_nothing_is_evaluated_site_by_site_that_was_not_asked_for(whole: dict[str, Any]) -> None:
    assert not (Path(whole["run"]) / "sites.json").exists()


def test_each_site_is_evaluated_in_the_workers_and_a_missing_one_is_named(
    again: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(capsys, "resume", str(again), "--per-site")
    assert code == 0
    for done in range(5):
        assert f"{done} {STEPS}" in out
    (line,) = [line for line in out.splitlines() if line.startswith("not shown")]
    assert line.startswith("not shown: the held-out loss of site-002: ")
    assert "site-002/site.toml" in line
    assert PER_SITE in out
    assert "the final model writes: The" in out
    plan, sites = read_plan(again), json.loads((again / "sites.json").read_text())
    assert [site["site"] for site in sites] == ["site-000", "site-001", "site-003"]
    checkpoints = Checkpoints(again / "checkpoints", load_model(plan).layout, 2)
    last = open_site(again / "sites", plan, 3, Resident())
    assert sites[-1]["sequences"] == last.sequences(plan)
    for when, number in (("before", 0), ("after", 3)):
        loss = last.held_out(plan, checkpoints.load(number).weights).loss
        assert sites[-1][when] == pytest.approx(loss, rel=1e-6)
        assert any("site-003" in row and f"{loss:.3f}" in row for row in out.splitlines())


def test_json_comes_first_and_depends_on_nothing_that_follows(
    again: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def no_workers(*_arguments: Any, **_options: Any) -> None:
        order.append(capsys.readouterr().out)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(federation, "LocalGrid", no_workers)
    code, out, err = ran(capsys, "resume", str(again), "--per-site", "--json")
    assert code == 0
    assert out == ""
    assert json.loads(order[0])["params_sha256"] == whole["params_sha256"]
    assert "not shown: the held-out loss of each site: OSError: [Errno 24] Too many open files" in err


def test_a_disk_that_refuses_the_losses_of_sites_does_not_hide_them(
    again: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (again / "sites.json").unlink(missing_ok=True)
    (again / "sites.json" / "in the way").mkdir(parents=True)
    losses = site_losses.Losses((site_losses.SiteOutcome("site-000", 7, 5.125, None),), {})
    monkeypatch.setattr(shown, "per_site", lambda *_arguments, **_options: losses)
    code, out, _ = ran(capsys, "resume", str(again), "--per-site")
    shutil.rmtree(again / "sites.json")
    assert code == 0
    assert "not kept: the held-out loss of each site: " in out
    assert "sites.json" in out
    assert "5.125" in out


def test_ctrl_c_among_the_sites_leaves_a_finished_run_and_says_so(
    again: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_display: LineDisplay, event: Event) -> None:
        if event == Step("held-out losses of sites", 1, 4):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LineDisplay, "event", interrupt)
        code, out, _ = ran(capsys, "resume", str(again), "--per-site")
    assert code == 130
    assert (
        f"the run is finished, and its model is in {again}/final; show its outcome with: cloister resume"
        in out
    )
    assert "continue with" not in out
    assert ran(capsys, "resume", str(again))[0] == 0


def test_no_app_of_a_run_answers_with_the_losses_of_a_site(tmp_path: Path) -> None:
    plan = tiny()
    identify(7, 1)
    context = Context(7, 1, {"partition-id": 0}, RecordDict(), {})
    message = Message(RecordDict({"x": ConfigRecord()}), 1, "query.held_out")

    def asked(app: ClientApp) -> Message:
        return app(message, context)

    with raises(PlanError, "site", says="site-000"):  # those workers take the message, and look for the site
        asked(site_losses.make_losses_app(tmp_path, plan, b""))

    def refuse(*_: object) -> Any:
        raise AssertionError("it was called")

    for app in (make_client_app(tmp_path, plan), client_app(refuse)):
        with pytest.raises(ValueError, match="held_out"):
            asked(app)


# What cannot be shown


def test_a_model_of_few_positions_writes_as_much_as_they_hold_and_no_evaluation_means_none_of_sites(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.config.max_position_embeddings=24", "server.evaluation=none", "run.rounds=1"]
    arguments = set_options([*settings, "simulation.per_site=true"])
    out = tmp_path / "run"
    code, printed, err = ran(
        capsys, "simulate", str(small_plan), *arguments, "--out", str(out), "--workers", "2"
    )
    assert code == 0, err
    assert "the final model writes: The" in printed
    assert "not shown: the held-out loss of each site: server.evaluation: expected" in printed
    assert PER_SITE not in printed
    assert not (out / "sites.json").exists()
    assert read_plan(out).simulation.per_site  # a resumed run shows them too
    code, printed, _ = ran(capsys, "generate", str(out), "--prompt", "The ", "--tokens", "160")
    assert code == 2  # who asks for so many tokens is told


@pytest.mark.parametrize(
    "error", [ModelError("model", expected="a folder with a tokenizer"), IndexError("out of range in self")]
)
def test_a_run_ends_well_whatever_its_sample_cannot_do(
    error: Exception,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> str:
        raise error

    monkeypatch.setattr(shown, "generate", fail)
    code, out, err = ran(capsys, "resume", whole["run"])
    assert code == 0, err
    assert f"not shown: a sample of the final model: {_text(error)}" in out
    assert whole["params_sha256"] in out
    assert found(capsys, "resume", whole["run"])["params_sha256"] == whole["params_sha256"]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"


# Displays


def test_steps_are_a_bar_on_a_terminal_and_a_few_lines_elsewhere() -> None:
    lines = [describe(Step("sites have their data", done, 1000)) for done in range(1001)]
    assert [line for line in lines if line] == [
        f"{done} of 1000 sites have their data" for done in range(0, 1001, 100)
    ]
    step = Step("held-out losses of sites", 5, 8)
    bar, ended = last_frame(step), last_frame(step, Step("held-out losses of sites", 8, 8), Finished(3))
    assert [line.split()[0] for line in bar[-3:]] == ["0/3", "5/8", "5"]
    assert bar[-1] == "5 of 8 held-out losses of sites"
    assert max(map(len, bar)) <= 60
    assert ended[-2].split()[0] == "0/3"
    assert ended[-3:-2] == ["finished 3 rounds"]
    assert ended[-1] == "finished"


def last_frame(*events: Event) -> list[str]:
    """What the live display leaves on a screen of 60 columns."""
    console = Console(file=io.StringIO(), width=60)
    with console.capture() as screen, LiveDisplay(console, 3) as display:
        for event in events:
            display.event(event)
    return [line.rstrip() for line in screen.get().splitlines()]
