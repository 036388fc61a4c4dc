"""`cloister track`: what a tracker gets of a run is read back from the tracker's own files."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.journal import FINISHED, Journal
from cloister.server.record.tracking import parameters
from cloister.server.run import run
from cloister.tests.parties.federation import CENTRAL, Federation, tiny
from cloister.tests.tools.command import done, found, lone_refusal

Curves = dict[str, dict[int, float]]
"""By figure, the value of each round."""


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a privacy unit."""
    folder = tmp_path_factory.mktemp("tracking")
    federation = Federation(folder, tiny(*CENTRAL))
    with RunFolder.create(folder / "run", federation.plan) as made:
        run(made, federation.channel, lambda _event: None)
    return folder / "run"


def records(file: bytes) -> Iterator[bytes]:
    """The records of a file in the log format of LevelDB (its doc/log_format.md), after a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 < len(file):
        left = 2**15 - at % 2**15
        if left < 7:  # no header fits: the rest of the block is empty
            at += left
            continue
        length, kind = int.from_bytes(file[at + 4 : at + 6], "little"), file[at + 6]
        at += 7
        whole += file[at : at + length]
        at += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def from_wandb(run: Path) -> Iterator[Any]:
    """The records in the files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    recorded: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]  # its generated module has no types
    for path in run.glob("wandb/offline-run-*/*.wandb"):
        yield from map(recorded.FromString, records(path.read_bytes()))


def in_wandb(run: Path) -> tuple[Curves, dict[str, Any]]:
    """What the files of offline runs hold: curves and parameters."""
    curves: Curves = {}
    config: dict[str, Any] = {}
    for record in from_wandb(run):
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        for name, value in row.items():
            if not name.startswith("_"):
                curves.setdefault(name, {})[row["_step"]] = value
    return curves, config


def in_mlflow(folder: Path) -> tuple[Curves, dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("trials")
    assert experiment is not None
    (there,) = client.search_runs([experiment.experiment_id])
    assert there.info.status == "FINISHED"
    histories = {name: client.get_metric_history(there.info.run_id, name) for name in there.data.metrics}
    curves = {name: {each.step: each.value for each in history} for name, history in histories.items()}
    return curves, dict(there.data.params)


def to_tracker(private: Path, tracker: str, store: Path) -> list[str]:
    there = ["--offline"] if tracker == "wandb" else ["--uri", store.as_uri(), "--project", "trials"]
    return ["track", str(private), "--to", tracker, *there]


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_has_the_figures_of_each_round_once(
    tracker: str,
    private: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    command = to_tracker(private, tracker, tmp_path)
    assert found(capsys, *command)["sent"] == [0, 1, 2, 3]
    assert found(capsys, *command)["sent"] == []
    curves, config = in_wandb(private) if tracker == "wandb" else in_mlflow(tmp_path)
    rows = {row["round"]: row for row in RunFiles(private).metrics()}
    assert curves["epsilon"] == {number: rows[number]["epsilon"] for number in (1, 2, 3)}
    assert len(set(curves["epsilon"].values())) == 3
    assert curves["update_norm"] == {number: rows[number]["update_norm"] for number in (1, 2, 3)}
    assert not {"train_loss", "tokens", "clipped"} & set(curves), "what the unit keeps at the sites"
    assert config["privacy.unit"] == '"site"'
    assert not any(name.startswith("simulation") for name in config)
    everything = json.dumps([curves, config])
    assert "site-00" not in everything
    assert str(private.parent) not in everything
    if tracker == "wandb":
        own = list(from_wandb(private))
        kinds = {record.WhichOneof("record_type") for record in own}
        assert kinds == {"header", "run", "telemetry", "history", "summary", "exit"}, "nothing of the machine"
        assert {record.run.host for record in own if record.HasField("run")} == {"cloister"}
        assert not list(private.glob("wandb/offline-run-*/files/*"))
        logs = list(private.glob("wandb/offline-run-*/logs/debug-core.log"))
        starts = [json.loads(log.read_text().splitlines()[0]) for log in logs]
        assert {start["disable-analytics"] for start in starts} == {True}, "no reports to its maker"
    else:
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
        assert found(capsys, *command[:-1], "elsewhere")["sent"] == [0, 1, 2, 3], (
            "another project has none yet"
        )


@pytest.mark.slow
def test_weights_and_biases_opens_a_run_without_host_path_or_user(private: Path) -> None:
    """At a server, which refuses the run."""
    heard: list[dict[str, Any]] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            resumes = heard[-1]["operationName"] == "RunResumeStatus"
            answer = b'{"data": {"model": null}}' if resumes else b'{"errors": [{"message": "no"}]}'
            self.send_response(200 if resumes else 400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
            there = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "a" * 40}
            command = [sys.executable, "-m", "cloister.cli.main", *to_tracker(private, "wandb", private)[:-1]]
            done = subprocess.run(command, env=own | there, capture_output=True, text=True, timeout=120)
        finally:
            server.shutdown()
    assert done.returncode == 2
    assert "expected a tracker that accepts the run (no)" in done.stderr
    sent = heard[-1]["variables"]
    known = {name: value for name, value in sent.items() if value not in (None, [], "")}
    config = json.loads(known.pop("config"))
    assert set(config) == {"_wandb", *parameters(read_plan(private))}
    assert config["privacy.unit"]["value"] == '"site"'
    assert set(known) == {"name", "project", "displayName", "program"}
    assert known["program"] == "cloister"


def test_a_run_that_goes_on_is_sent_to_its_newest_round_but_one(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest may get an evaluation yet; the rest follows when it is finished."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    files = RunFiles(tmp_path / "run")
    files.path.mkdir()
    files.plan_file.write_bytes((private / "plan.json").read_bytes())
    lines = (private / "metrics.jsonl").read_text().splitlines(keepends=True)
    files.metrics_file.write_text("".join(lines[:3]))
    command = to_tracker(files.path, "mlflow", tmp_path / "store")
    assert found(capsys, *command)["sent"] == [0, 1]
    with Journal(files.journal) as journal:
        files.metrics_file.write_text("".join(lines))
        assert found(capsys, *command)["sent"] == [2]
        journal.record(3, 1, FINISHED, {})
    assert done(capsys, *command) == "sent the round 3\n"
    curves, _ = in_mlflow(tmp_path / "store")
    assert set(curves["epsilon"]) == {1, 2, 3}


def test_a_password_in_the_address_is_not_shown(
    private: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://user:s3cret@127.0.0.1:9"
    line = lone_refusal(capsys, "track", str(private), "--to", "mlflow", "--uri", address)
    assert "127.0.0.1" in line
    kept = [path for path in private.iterdir() if path.is_file()]
    assert kept
    assert not [path for path in kept if b"s3cret" in path.read_bytes()]
    assert "s3cret" not in line


@pytest.mark.parametrize(
    "address",
    ["user:s3cret@127.0.0.1:9", "http://u:s3cret@[::1", "http://u:s3cret@h:x", "postgresql://u:s3cret@h/d"],
)
def test_what_is_no_address_is_refused_without_a_word_of_it(
    private: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    line = lone_refusal(capsys, "track", str(private), "--to", "mlflow", "--uri", address)
    assert "--uri: expected the address of an MLflow server" in line
    assert "s3cret" not in line


def test_a_tracker_that_is_not_there_is_one_line(
    private: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for given, field in (
        (["--to", "mlflow"], "--uri: expected the address of an MLflow server"),
        (["--to", "mlflow", "--offline"], "--offline: expected only with --to wandb"),
        (["--to", "wandb", "--uri", "x"], "--uri: expected no address; it is only valid with --to mlflow"),
        (
            ["--to", "mlflow", "--uri", "http://127.0.0.1:9"],
            "--to is 'mlflow': expected a tracker that accepts the run",
        ),
    ):
        assert field in lone_refusal(capsys, "track", str(private), *given)
