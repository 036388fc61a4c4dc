"""A whole deployment on this machine: real processes of coordinator, SuperLink, sites and SuperNodes, TLS, keys."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import io
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, StartRunRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from cloister.cli.main import main
from cloister.clients.checks.heartbeat import heartbeat_path
from cloister.clients.network.superlink import refuses_clock
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import EngineError
from cloister.protocol.identity.address import free_port
from cloister.protocol.identity.supernode import make_supernode_key
from cloister.protocol.machine.child import Child
from cloister.protocol.machine.flower import QUIET, Tasks
from cloister.protocol.plan.soundness import load
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.simulations.rehearsal.rehearsal import prepare, running
from cloister.tests.tools.command import set_options
from cloister.tests.tools.raises import raises

# Flower 1.39 calls pathspec by a name that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

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


FEWER = ("cohort.sites=3", "run.rounds=2")
"""Each site is two processes more, which import torch and Flower for themselves."""


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
        prepare(folder, lambda _event: None, "exchange")
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
    for site in rehearsed.sites():
        state = site.parent / "state"
        assert not list((state / "exchange").iterdir()), "so are those of a site"
        assert any(state.rglob("*.bin")), "it has prepared no records"
        assert not [path for path in state.rglob("*") if path.stat().st_mode & 0o077]


def test_status_tells_of_the_coordinator_and_its_sites(
    rehearsed: Rehearsed, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told("status", str(rehearsed.federation))
    assert [entry["state"] for entry in found["runs"]] == ["done"]
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
    assert main(["logs", str(rehearsed.files.path)]) == 0
    assert "finished 2 rounds" in capsys.readouterr().out


def messages(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, each of which is a JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_process_logs_json(rehearsed: Rehearsed) -> None:
    """With what each line is about."""
    run = messages(rehearsed.files.coordinator_log)
    names = {site.parent.name for site in rehearsed.sites()}
    for line in (*run, *messages(rehearsed.files.path / "federation.log")):
        assert {"time", "level", "logger", "message"} <= set(line)
    (identity,) = {line["run"] for line in run if "run" in line}
    of_round = [line for line in run if line.get("round") == 2]
    assert any(line["message"].startswith(f"round 2: {len(names)} sites") for line in of_round)
    assert {line["attempt"] for line in of_round} == {1}
    assert {line["site"] for line in run if "is connected as" in line["message"]} == names
    for site in rehearsed.sites():
        lines = messages(site.parent / "site.log")
        assert {line["site"] for line in lines} == {site.parent.name}
        (invited,) = [line for line in lines if line["message"].endswith(": invited")]
        assert invited["run"] == identity


def test_no_log_has_a_secret(rehearsed: Rehearsed) -> None:
    """Of keys, tokens and secrets: neither those on disk, in any notation, nor anything that looks like one."""
    folder = rehearsed.files.path
    logs = [*folder.rglob("*.log"), *folder.rglob("*.jsonl")]
    kept = {path.name for path in logs}
    assert {"federation.log", "coordinator.log", "site.log", "events.jsonl", "audit.jsonl"} <= kept
    assert {"superlink.log", "supernode.log"} <= kept
    private: set[str] = {json.loads((rehearsed.federation / "control.json").read_bytes())["key"]}
    for path in (path for path in folder.rglob("*") if path.name == "secret"):
        raw = path.read_bytes()
        private |= {raw.hex(), base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    keys = [path for pattern in ("*.key", "*.pem") for path in folder.rglob(pattern)]
    for path in keys:
        text = path.read_text()
        if "PRIVATE KEY" in text:
            private |= {line for line in text.splitlines() if len(line) > 20 and "PRIVATE" not in line}
    assert len(private) > 10
    for path in logs:
        text = path.read_text(errors="replace")
        assert "PRIVATE KEY" not in text, path
        assert not [secret for secret in private if secret in text], path
    # Tokens are never on disk: nothing of their size is in what the processes log.
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
    assert main(["logs", "--audit", str(path), "--json", "--lines", "1000"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


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
    assert main(["status", "--probe", str(tmp_path / "site.toml")]) == 1
    assert "does not run" in capsys.readouterr().out
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
    assert "a site that no other process serves" in capsys.readouterr().err
    assert main(["coordinator", "start", str(rehearsed.federation)]) == 2
    assert "no other coordinator's process" in capsys.readouterr().err


@dataclass
class Api:
    """The local API of a rehearsal's SuperLink, for a user of the coordinator's machine who means harm."""

    address: str
    secret: bytes
    certificate: bytes

    @classmethod
    def of(cls, rehearsed: Rehearsed) -> Api:
        log = (rehearsed.files.path / "federation.log").read_text()
        port = re.findall(r"started: flower-superlink .* --port ([0-9]+)", log)[-1]
        secret = (rehearsed.federation / "flower" / "secret").read_bytes()
        return cls(f"127.0.0.1:{port}", secret, (rehearsed.federation / "authority.pem").read_bytes())

    def control(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="test")],
        )


def bundle(marker: Path) -> Fab:
    """A bundle whose module writes a file when it is imported."""
    module = (
        f"from pathlib import Path\nPath({str(marker)!r}).write_text('written')\n"
        "from flwr.clientapp import ClientApp\nfrom flwr.serverapp import ServerApp\n"
        "app = ClientApp()\nserver = ServerApp()\n"
    )
    project = (
        '[project]\nname = "cloister"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "cloister"\n'
        '[tool.flwr.app.components]\nserverapp = "evil:server"\nclientapp = "evil:app"\n'
    )
    built, _ = build_fab_from_files({"pyproject.toml": project.encode(), "evil.py": module.encode()})
    return Fab(hashlib.sha256(built).hexdigest(), built, {})


@pytest.mark.slow
def test_a_bundle_with_code_is_not_run_at_any_site(rehearsed: Rehearsed, tmp_path: Path) -> None:
    """A coordinator sends every site messages of each kind in a run whose bundle has a module."""
    marker, api = tmp_path / "marker", Api.of(rehearsed)
    control = api.control()
    number = control.StartRun(StartRunRequest(fab=fab_to_proto(bundle(marker)))).run_id
    with Tasks(api.address, api.secret, api.certificate) as tasks:
        taken = tasks.take("flwr-serverapp")
    assert taken is not None
    client, token = taken
    given = client.PullTaskInput(PullTaskInputRequest())
    assert given.run.run_id == number
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, number
    TaskIdentity.node_id = given.context.node_id
    grid = HttpGrid(api.address, False, api.certificate, token=token)
    grid.set_run(run_from_proto(given.run))
    nodes = [node.node_id for node in grid.get_nodes()]
    assert len(nodes) == len(rehearsed.sites())
    content, kinds = RecordDict({"x": ConfigRecord({"x": 1})}), ("train", "query", "query.invite")
    sent = [Message(content, node, kind) for node in nodes for kind in kinds]
    replies = list(grid.send_and_receive(sent, timeout=WAIT_S))
    assert len(replies) == len(sent)
    for reply in replies:  # the site's own app has answered, or there is none for such a message
        if reply.metadata.message_type == "train":
            assert reply.has_error()
            assert reply.error.reason == "ValueError"
        elif reply.metadata.message_type == "query":
            assert isinstance(reply.content["frames"], ArrayRecord)
        else:
            assert "InvitationError" in str(dict(reply.content["invite"])["reason"])
    grid.close()
    client.close()
    control.close()
    assert not marker.exists()
    for site in rehearsed.sites():
        assert not list(site.parent.rglob("evil*")), "not even unpacked"
        assert told("status", str(site))["well"]


def test_without_the_secret_no_task_is_taken(rehearsed: Rehearsed) -> None:
    api = Api.of(rehearsed)
    for secret in (bytes(32), b"guess"):
        with (
            Tasks(api.address, secret, api.certificate) as tasks,
            raises(EngineError, "Flower's local API", says="Client error '40"),
        ):
            tasks.take("flwr-serverapp")
    site = rehearsed.sites()[0].parent
    address = re.findall(r"--port ([0-9]+)", (site / "site.log").read_text())[-1]
    with (
        Tasks(f"127.0.0.1:{address}", bytes(32)) as tasks,
        raises(EngineError, "Flower's local API", says="Client error '40"),
    ):
        tasks.take("flwr-clientapp")
    assert (site / "state" / "flower" / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_supernode_that_is_not_in_the_federation_does_not_connect(
    rehearsed: Rehearsed, tmp_path: Path
) -> None:
    make_supernode_key(tmp_path / "key")
    superlink = re.findall(r"--superlink (\S+)", (rehearsed.sites()[0].parent / "site.log").read_text())[-1]
    arguments = ["--superlink", superlink, "--root-certificates", str(rehearsed.federation / "authority.pem")]
    arguments += ["--auth-supernode-private-key", str(tmp_path / "key"), "--max-retries", "1"]
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "flower-supernode"),
            *arguments,
            *("--isolation", "process", "--port", "0"),
        ],
        capture_output=True,
        timeout=WAIT_S,
        env={**os.environ, **QUIET, "FLWR_HOME": str(tmp_path)},
    )
    assert done.returncode
    control = Api.of(rehearsed).control()
    nodes = control.ListNodes(ListNodesRequest()).nodes_info
    control.close()
    assert len(nodes) == len(rehearsed.sites())


def test_the_superlink_tells_a_site_that_its_clock_is_wrong(rehearsed: Rehearsed) -> None:
    federation = Registry.open(rehearsed.federation)
    root, now = federation.certificate_bytes("authority"), datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    found = [refuses_clock(federation.federation.superlink, root, now + by) for by in (hour, 0 * hour, -hour)]
    assert found == [True, False, True]
    assert not refuses_clock(f"127.0.0.1:{free_port()}", root, now + hour), "it does not answer"


@pytest.mark.slow
def test_a_site_stays_that_cannot_show_that_it_is_alive(rehearsed: Rehearsed) -> None:
    """As on a full disk. It would be away for the length of a deadline, where others wait for what it could refuse."""
    site, look = rehearsed.sites()[0], threading.Event()
    shown, log = heartbeat_path(read_config(site)), site.parent / "site.log"
    while not shown.is_dir():
        shown.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # it was shown between
            shown.mkdir()
    until = time.monotonic() + WAIT_S
    while not re.search("WARNING.*heartbeat.json: expected a disk that accepts the write", log.read_text()):
        assert time.monotonic() < until
        look.wait(0.05)
    shown.rmdir()
    assert not rehearsed.ended


@pytest.mark.slow
def test_a_child_that_ends_is_started_again(tmp_path: Path) -> None:
    """The child is `cloister --help`, which ends at once, again and again."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Child("cloister", ["--help"], tmp_path / "log", ended=ended.put) as child:
        first = child.pid
        lines = [ended.get(timeout=WAIT_S) for _ in range(2)]
        assert child.pid != first
    assert "exited with status 0; it starts again in 1 s" in lines[0]
    assert "in 2 s" in lines[1]
    with raises(EngineError, "no-such-script"):
        Child("no-such-script", [], tmp_path / "log")
