"""A whole deployment on this machine: real processes of a coordinator and its sites, TLS, keys."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import queue
import re
import shutil
import sqlite3
import ssl
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.clients.checks.heartbeat import heartbeat_path
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import EngineError
from cloister.protocol.identity.address import host_of, port_of
from cloister.protocol.machine.child import Child
from cloister.protocol.plan.soundness import load
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.simulations.rehearsal.rehearsal import prepare, running
from cloister.tests.tools.command import lone_refusal, set_options
from cloister.tests.tools.raises import raises

WAIT_S = 120.0


@dataclass
class Rehearsed:
    """A rehearsal whose run is finished, and whose processes still run."""

    files: RunFiles
    outcome: dict[str, Any]
    ended: list[str]
    """What processes ended, and were started again."""

    @property
    def federation(self) -> Path:
        return self.files.federation

    def sites(self) -> list[Path]:
        return [self.files.sites.config(name) for name in self.files.sites.names()]


def told(*command: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*command, "--json"]) == 0
    found = json.loads(printed.getvalue().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def wait_for(seen: Callable[[], object]) -> None:
    """Wait until something is seen."""
    until, look = time.monotonic() + WAIT_S, threading.Event()
    while not seen():
        assert time.monotonic() < until
        look.wait(0.1)


FEWER = ("cohort.sites=3", "run.rounds=2")
"""Each site is a process more, which imports torch for itself."""


@pytest.fixture(scope="module")
def simulated(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a simulation of the same plan prints."""
    out = tmp_path_factory.mktemp("simulated") / "run"
    options = set_options(FEWER)
    return told("simulate", str(small_plan), *options, "--out", str(out), "--workers", "1")


@pytest.fixture(scope="module")
def rehearsed(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsed]:
    files, plan = RunFiles(tmp_path_factory.mktemp("up") / "run"), load(small_plan, FEWER)
    with RunFolder.create(files.path, plan) as folder:
        prepare(folder, lambda _event: None)
    ended: list[str] = []
    with running(files, plan, ended.append, log_format="json", metrics=("--metrics", "127.0.0.1:0")):
        outcome = told("status", str(files.federation), "--follow")
        yield Rehearsed(files, outcome, ended)


@pytest.mark.slow
def test_a_deployment_ends_with_the_weights_of_a_simulation(
    rehearsed: Rehearsed, simulated: dict[str, Any]
) -> None:
    for figure in ("params_sha256", "initial_loss", "final_loss", "rounds"):
        assert rehearsed.outcome[figure] == simulated[figure]
    assert not rehearsed.ended
    assert not rehearsed.files.spool.exists(), "the uploads are removed"
    written = (rehearsed.files.coordinator_log, rehearsed.files.events, rehearsed.federation / "control.json")
    assert not [path for path in written if path.stat().st_mode & 0o077]
    for site in rehearsed.sites():
        state = site.parent / "state"
        assert not list((state / "door").iterdir()), "so are those of a site"
        assert any(state.rglob("*.bin")), "it has prepared no records"
        assert not [path for path in state.rglob("*") if path.stat().st_mode & 0o077]


def test_status_tells_of_the_coordinator_and_its_sites(
    rehearsed: Rehearsed, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told("status", str(rehearsed.federation))
    assert [entry["state"] for entry in found["runs"]] == ["done"]
    again = told("status", str(rehearsed.federation), "--follow")
    assert again["params_sha256"] == rehearsed.outcome["params_sha256"], (
        "a run that has ended has its outcome"
    )
    moved = found["now"]["Moved"]
    (started,) = [
        event for event in messages(rehearsed.files.path / "events.jsonl") if event["event"] == "Started"
    ]
    model = 4 * started["parameters"]
    names = {site.parent.name for site in rehearsed.sites()}
    assert moved["sent"] == dict.fromkeys(names, 3 * model), "to its end: the initial model and two more"
    assert set(moved["received"]) == names
    assert all(2 * model < bytes_ < 2.1 * model for bytes_ in moved["received"].values())
    assert main(["status", str(rehearsed.federation)]) == 0
    assert "done" in capsys.readouterr().out
    for site in rehearsed.sites():
        assert told("status", str(site))["well"]
        assert main(["status", "--probe", str(site)]) == 0
    assert "an audit log" in lone_refusal(capsys, "logs", str(rehearsed.files.path))
    assert "finished 2 rounds" in rehearsed.files.coordinator_log.read_text()


def messages(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each of which is a JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_process_logs_json(rehearsed: Rehearsed) -> None:
    """With what each line is about."""
    run = messages(rehearsed.files.coordinator_log)
    door = messages(rehearsed.files.path / "federation.log")
    names = {site.parent.name for site in rehearsed.sites()}
    for line in (*run, *door):
        assert {"time", "level", "logger", "message"} <= set(line)
    (identity,) = {line["run"] for line in run if "run" in line}
    of_round = [line for line in run if line.get("round") == 2]
    assert any(line["message"].startswith(f"round 2: {len(names)} sites") for line in of_round)
    assert {line["attempt"] for line in of_round} == {1}
    assert {line["site"] for line in door if line["message"].endswith(" is connected")} == names
    for site in rehearsed.sites():
        lines = messages(site.parent / "site.log")
        assert {line["site"] for line in lines} == {site.parent.name}
        (over,) = [line for line in lines if line["message"].endswith(": over")]
        assert over["run"] == identity


def test_no_log_has_a_secret(rehearsed: Rehearsed) -> None:
    """Of keys and secrets: neither those on disk, nor anything that looks like one."""
    folder = rehearsed.files.path
    logs = [*folder.rglob("*.log"), *folder.rglob("*.jsonl")]
    kept = {path.name for path in logs}
    assert {"federation.log", "coordinator.log", "site.log", "events.jsonl", "audit.jsonl"} <= kept
    private: set[str] = {json.loads((rehearsed.federation / "control.json").read_bytes())["key"]}
    keys = [path for pattern in ("*.key", "*.pem") for path in folder.rglob(pattern)]
    for path in keys:
        held = path.read_bytes()
        if len(held) == 32:  # a bare symmetric key, in each way that a log could show it
            private |= {held.hex(), base64.b64encode(held).decode(), repr(held)}
        elif b"PRIVATE KEY" in held:
            lines = held.decode().splitlines()
            private |= {line for line in lines if len(line) > 20 and "PRIVATE" not in line}
    assert len(private) >= 10, (
        "three lines of each key of the coordinator, one of each site's, that of commands"
    )
    for path in logs:
        text = path.read_text(errors="replace")
        assert "PRIVATE KEY" not in text, path
        assert not [secret for secret in private if secret in text], path
    # Keys of sessions are never on disk: nothing of their size is in what the processes log.
    digests = {rehearsed.outcome["params_sha256"], read_plan(folder).digest()}
    for path in (folder / "federation.log", rehearsed.files.coordinator_log, *folder.rglob("site.log")):
        found = re.findall(r"(?<![\w/+=-])[\w+-]{43,}", path.read_text())
        assert set(found) <= digests, path


def test_audit_logs_have_the_run(rehearsed: Rehearsed, capsys: pytest.CaptureFixture[str]) -> None:
    names = {site.parent.name for site in rehearsed.sites()}
    rounds = [
        (what, number)
        for number in (0, 1, 2)
        for what in ("evaluate", "train")
        if number or what == "evaluate"
    ]
    lines = audit(capsys, rehearsed.federation)
    assert {line["site"] for line in lines if line["what"] == "join"} == names
    releases = Counter(
        (line["detail"].split(",")[0], line["round"]) for line in lines if line["what"] == "release"
    )
    assert releases == dict.fromkeys(rounds, len(names))
    for site in rehearsed.sites():
        own = audit(capsys, site)
        assert [line["what"] for line in own] == ["join", *["release"] * len(rounds)]
        assert {line["site"] for line in own} == {site.parent.name}
        assert {(line["run"], line["plan"]) for line in own} == {(lines[0]["run"], lines[0]["plan"])}


def audit(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    """The lines of an audit log, verified."""
    capsys.readouterr()
    assert main(["logs", str(path), "--json", "--lines", "1000"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_folder_that_is_older_than_the_audit_log_is_refused(
    rehearsed: Rehearsed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a backup from before the last round is."""
    run = tmp_path / "run"
    shutil.copytree(rehearsed.files.path, run, ignore=shutil.ignore_patterns("sites", "federation"))
    commands = ["report", str(run)], ["submit", "--to", str(rehearsed.federation), "--again", str(run)]
    told(*commands[0])
    with contextlib.closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as journal:
        journal.execute("DELETE FROM entries WHERE round > 1")
    for command in commands:
        assert f"{run} is " in lone_refusal(capsys, *command)


def test_metrics_are_those_of_the_run(rehearsed: Rehearsed) -> None:
    log = (rehearsed.files.path / "federation.log").read_text()
    (address,) = re.findall(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", log)
    with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
        text = answer.read().decode()
    assert "cloister_running 0.0\n" in text
    assert 'cloister_rounds_done_total{run="run"} 2.0\n' in text
    assert 'cloister_attempts_failed_total{run="run"} 0.0\n' in text
    sent = re.findall(
        r'^cloister_received_bytes_total\{run="run",site="([^"]+)"\} (\S+)$', text, re.MULTILINE
    )
    moved = told("status", str(rehearsed.federation))["now"]["Moved"]["received"]
    assert {site: float(count) for site, count in sent} == moved


def test_a_probe_fails_where_no_process_runs(
    rehearsed: Rehearsed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = rehearsed.sites()[0]
    (tmp_path / "site.toml").write_text(site.read_text())
    for path in (tmp_path / "site.toml", tmp_path):  # the folder of a site too
        assert main(["status", "--probe", str(path)]) == 1
        assert "does not run" in capsys.readouterr().out
    (tmp_path / "site.toml").unlink()
    assert main(["status", "--probe", str(tmp_path)]) == 1
    assert main(["status", str(tmp_path)]) == 2
    assert "cloister coordinator start" in capsys.readouterr().err


def test_only_who_has_the_secret_commands_the_coordinator(rehearsed: Rehearsed) -> None:
    file = rehearsed.federation / "control.json"
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", json.loads(file.read_bytes())["port"]), authkey=bytes(32))


def test_a_second_process_of_a_site_or_coordinator_is_refused(
    rehearsed: Rehearsed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "start", str(rehearsed.sites()[0])]) == 2
    site = json.loads(heartbeat_path(read_config(rehearsed.sites()[0])).read_bytes())["pid"]
    assert f"a site that no other process serves (process {site} does)" in capsys.readouterr().err
    assert main(["coordinator", "start", str(rehearsed.federation)]) == 2
    assert "no other coordinator's process" in capsys.readouterr().err


@pytest.mark.slow
def test_a_site_stays_that_cannot_show_that_it_is_alive(rehearsed: Rehearsed) -> None:
    """As on a full disk. It would be away for the length of a deadline, where others wait for what it could refuse."""
    site = rehearsed.sites()[0]
    shown, log = heartbeat_path(read_config(site)), site.parent / "site.log"
    while not shown.is_dir():
        shown.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # it was shown between
            shown.mkdir()
    refused = "WARNING.*heartbeat.json: expected a disk that accepts the write"
    wait_for(lambda: re.search(refused, log.read_text()))
    shown.rmdir()
    wait_for(lambda: told("status", str(site))["well"])
    assert not rehearsed.ended


def test_a_renewed_certificate_is_shown_at_once(rehearsed: Rehearsed) -> None:
    file, ends = rehearsed.federation / "door.pem", Registry.open(rehearsed.federation).federation.door
    where = (host_of(ends), port_of(ends))
    assert ssl.get_server_certificate(where) == file.read_text()
    before = file.read_text()
    told("coordinator", "renew", str(rehearsed.federation))
    assert ssl.get_server_certificate(where) == file.read_text() != before
    assert all(told("status", str(site))["connected"] for site in rehearsed.sites())


def test_a_site_that_is_removed_is_disconnected_and_stays_out(rehearsed: Rehearsed) -> None:
    """The last test of the rehearsal: it has a site less then."""
    removed, *others = rehearsed.sites()
    told("coordinator", "remove", removed.parent.name, str(rehearsed.federation))
    wait_for(lambda: main(["status", "--probe", str(removed)]))
    wait_for(lambda: "expected a site of the federation" in (removed.parent / "site.log").read_text())
    assert all(told("status", str(site))["connected"] for site in others)
    assert not rehearsed.ended


@pytest.mark.slow
def test_a_child_that_ends_is_started_again(tmp_path: Path) -> None:
    """The child is `cloister --help`, which ends at once, again and again."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Child("cloister", ["--help"], tmp_path / "log", ended=ended.put):
        lines = [ended.get(timeout=WAIT_S) for _ in range(2)]
    assert "exited with status 0; it starts again in 1 s" in lines[0]
    assert "in 2 s" in lines[1]
    with raises(EngineError, "no-such-script"):
        Child("no-such-script", [], tmp_path / "log")


# Runs follow each other.


def kept_of_runs(files: RunFiles) -> dict[Path, bytes]:
    """What the sites keep of their runs."""
    folders = (files.sites.site(name) / "state" / "runs" for name in files.sites.names())
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_runs_of_one_plan_follow_each_other_by_consent(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, plan = RunFiles(tmp_path / "run"), load(small_plan, FEWER)
    with RunFolder.create(files.path, plan) as folder:
        prepare(folder, lambda _event: None)
    federation, sites = str(files.federation), [files.sites.config(name) for name in files.sites.names()]
    submit = ["submit", str(small_plan), *set_options(FEWER), "--to", federation]

    def accept() -> None:
        for site in sites:
            assert told("site", "accept", str(site), plan.digest())["added"]

    with running(files, plan, lambda _line: None):
        first = told("status", federation, "--follow")
        before = kept_of_runs(files)
        assert before
        assert main(submit) == 2
        refused = capsys.readouterr().err
        assert refused.count("ConsentError: the reason is in the site's own log") == len(sites)
        for site in sites:
            assert site.parent.name in refused
            assert f"cloister site accept SITE.toml {plan.digest()}" in (site.parent / "site.log").read_text()
        assert kept_of_runs(files) == before
        (second,) = (files.federation / "runs").iterdir()
        accept()
        again = told("submit", "--to", federation, "--again", str(second))
        assert again["sites"] == files.sites.names()
        assert told("status", federation, "--follow")["params_sha256"] == first["params_sha256"]
        assert before.items() < kept_of_runs(files).items()
        capsys.readouterr()
        assert "a run that is not finished" in lone_refusal(
            capsys, "submit", "--to", federation, "--again", str(second)
        )

        accept()  # once: of two runs that are submitted together, one gets it
        one, other = told(*submit), told(*submit)
        assert one["sites"] == files.sites.names()
        assert other["after"] == one["run"]

        def states() -> dict[str, str]:
            return {entry["run"]: entry["state"] for entry in told("status", federation)["runs"]}

        wait_for(lambda: {states()[one["run"]], states()[other["run"]]} <= {"done", "failed"})
        assert states()[one["run"]] == "done"
        assert states()[other["run"]] == "failed"
