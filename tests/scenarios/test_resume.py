"""A run that is killed, or that the disk refuses, goes on to the same weights; real processes, real crashes."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cloister.protocol.errors import StorageError
from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFolder
from cloister.server.record.journal import DONE, FINISHED, UNMASKING, Journal
from cloister.server.record.progress import Evaluated, Event, Finished, RoundDone, RoundStarted, SiteAnswered
from cloister.simulations.federation import simulate
from cloister.tests.tools.command import found, lone_refusal, ran, refusal
from cloister.tests.tools.kills import Moment, die, die_at, ended, family, kill_while, killed_run
from cloister.tests.tools.raises import raises


def at(kind: type, number: int, event: Event) -> bool:
    """Whether an event is of a kind and round."""
    return isinstance(event, kind) and getattr(event, "round", number) == number


@dataclass(frozen=True)
class Entry:
    """The moment just before, or just after, a journal entry of round 2."""

    step: str
    before: bool = False


ONE_SITE_ANSWERED: Moment = partial(at, SiteAnswered, 2)
KILLS: dict[str, Moment | Entry] = {
    "before anything": partial(at, object, 0),
    "initial model evaluated": partial(at, Evaluated, 0),
    "first round begun": partial(at, RoundStarted, 1),
    "round done, not reported": partial(at, RoundDone, 1),
    "round evaluated, not reported": partial(at, Evaluated, 1),
    "one site answered": ONE_SITE_ANSWERED,
    "shares are about to be revealed": Entry(f"train {UNMASKING}"),
    "checkpoint written, journal not": Entry(DONE, before=True),
    "shares of an evaluation are about to be revealed": Entry(f"evaluate {UNMASKING}"),
    "finished": partial(at, Finished, 3),
}
"""In the order in which a run comes to them."""


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_no_socket_and_no_warning(
    small_plan: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    temporary = Path(tempfile.mkdtemp())  # the path of a socket has at most 107 characters
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan), "--workers", "1"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1: 4 sites") for line in process.stdout)
        assert list(temporary.glob("pymp-*")), "the fork server has its socket there"
        ends = [os.pidfd_open(pid) for pid in family(process.pid)]
        process.kill()
        printed, errors = process.communicate(timeout=60)
    assert len(ends) == 4, "coordinator, fork server, its resource tracker, worker"
    assert all(map(ended, ends))
    assert not list(temporary.glob("pymp-*"))
    assert errors == ""
    assert "warn" not in printed.lower()


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_what_is_imported(small_plan: Path, tmp_path: Path) -> None:
    """The coordinator and the fork server of its workers import at the same time; here neither would ever end."""
    package = tmp_path / "endless" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import threading\nprint('importing', flush=True)\nthreading.Event().wait()\n"
    )
    paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["importing\n"] * 2
        ends = [os.pidfd_open(pid) for pid in family(process.pid)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert errors == "cloister: interrupted\n"
    assert all(map(ended, ends))


def killed(plan: Path, out: Path, kill: Moment | Entry) -> None:
    """Begin a run, or go on with it, and die at a moment of it."""
    record = Journal.record

    def record_and_die(journal: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        if number == 2 and kill == Entry(step, before=True):
            die()
        record(journal, number, attempt, step, *rest)
        if number == 2 and kill == Entry(step):
            die()

    observe = (lambda _event: None) if isinstance(kill, Entry) else die_at(kill)
    with (
        RunFolder.reopen(out) if out.exists() else RunFolder.create(out, load(plan)) as folder,
        mock.patch.object(Journal, "record", record_and_die),
    ):
        simulate(folder, observe, workers=1)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_goes_on_to_the_same_weights(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With optimizer state that sites keep from round to round."""
    plan, out = tmp_path / "keep.toml", tmp_path / "killed"
    plan.write_text(small_plan.read_text().replace("[local]", '[local]\noptimizer_state = "keep"'))
    undisturbed = found(capsys, "simulate", str(plan), "--out", str(tmp_path / "kept"), "--workers", "1")
    assert undisturbed["params_sha256"] != whole["params_sha256"]
    for kill in KILLS.values():
        kill_while(killed, plan, out, kill)
    assert_as_if_undisturbed(out, found(capsys, "resume", str(out), "--workers", "1"), undisturbed)


@pytest.fixture(scope="module")
def interrupted(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed when one site had answered in round 2; do not change its folder."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    kill_while(killed_run, small_plan, out, ONE_SITE_ANSWERED)
    return out


@pytest.mark.slow
def test_what_a_killed_process_has_spent_is_counted_too(
    whole: dict[str, Any], interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On rounds that it finished."""
    out = tmp_path / "killed"
    shutil.copytree(interrupted, out)
    resumed = found(capsys, "resume", str(out), "--workers", "1")
    assert_as_if_undisturbed(out, resumed, whole)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    with Journal(out / "journal.sqlite") as journal:
        end = journal.newest(FINISHED)
    assert end is not None
    laps = [*(row["phase_seconds"] for row in rows), end.detail["phase_seconds"]]
    assert all({"train", "sum", "evaluate"} <= set(row["phase_seconds"]) for row in rows[1:])
    assert resumed["phase_seconds"]["train"] == pytest.approx(sum(lap.get("train", 0.0) for lap in laps))
    assert resumed["round_seconds"] == pytest.approx(sum(row["seconds"] for row in rows[1:]))
    assert sum("join" in lap for lap in laps) == 2, "of both processes"


def assert_as_if_undisturbed(out: Path, resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    for name in ("params_sha256", "initial_loss", "final_loss", "rounds"):
        assert resumed[name] == whole[name], name
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert [row["attempts"] for row in rows[1:]] == [1, 1, 1], "an attempt that was under way did not go on"
    assert not (out / "attempt").exists()


def test_a_finished_run_is_not_run_again(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (Path(whole["run"]) / "metrics.jsonl").read_text()
    again = found(capsys, "resume", whole["run"])
    assert again["params_sha256"] == whole["params_sha256"]
    assert (Path(whole["run"]) / "metrics.jsonl").read_text() == before


def test_what_was_lost_from_a_folder_is_rebuilt_or_named_and_nothing_more_is_lost(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["run"], run)
    shutil.rmtree(run / "final")
    (run / "metrics.jsonl").unlink()
    again = found(capsys, "resume", str(run))
    assert again["params_sha256"] == whole["params_sha256"]
    assert again["tokens_per_second"] == whole["tokens_per_second"]
    assert ran(capsys, "generate", str(run), "--prompt", "patient", "--tokens", "3")[0] == 0
    shutil.copy(Path(whole["run"]) / "metrics.jsonl", run)
    for file in run.glob("journal.sqlite*"):
        file.unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "the journal of this run, which is missing" in refusal(capsys, "resume", str(run))
    kept = {
        path: path.read_bytes()
        for path in before
        if "journal" not in path.name and path.name != "workers.log"
    }
    assert all(before[path] == content for path, content in kept.items())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "name", "why"),
    [
        (cut, "model.safetensors", "bytes, and"),
        (flip, "model.safetensors", "model.safetensors is not as it was saved"),
        (Path.unlink, "config.json", "config.json is missing"),
        (cut, "saved.json", "saved.json cannot be read"),
    ],
)
def test_a_damaged_final_model_is_refused_and_rebuilt(
    spoil: Callable[[Path], None],
    name: str,
    why: str,
    whole: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["run"], run)
    intact = files_of(run / "final")
    spoil(run / "final" / name)
    line = lone_refusal(capsys, "generate", str(run), "--prompt", "patient")
    assert why in line
    assert f"cloister resume {run}" in line
    code, out, err = ran(capsys, "resume", str(run), "--json")
    assert code == 0
    assert json.loads(out)["params_sha256"] == whole["params_sha256"]
    assert "final model again" in err
    assert why in err
    assert files_of(run / "final") == intact
    assert "final model" not in ran(capsys, "resume", str(run), "--json")[2]


def test_a_damaged_checkpoint_is_named(
    interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "killed"
    shutil.copytree(interrupted, out)
    newest = max((out / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:1000])
    line = refusal(capsys, "resume", str(out))
    assert newest.name in line
    assert "restore the file from a backup" in line


@pytest.mark.slow
def test_a_full_disk_while_checkpointing_loses_nothing(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel refuses this process's large writes from round 2 on, as a full disk would; workers are not touched."""
    out = tmp_path / "full"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (Path(whole["run"]) / "checkpoints" / "round-00003.safetensors").stat().st_size // 2

    def fill_disk(event: Event) -> None:
        if isinstance(event, RoundStarted) and event.round == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        with (
            RunFolder.create(out, load(small_plan)) as folder,
            raises(StorageError, "round-00002.safetensors", says="continue the run"),
        ):
            simulate(folder, fill_disk, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "round-00000.safetensors",
        "round-00001.safetensors",
    ]
    assert_as_if_undisturbed(out, found(capsys, "resume", str(out)), whole)
