"""A run in a Flower federation that is there already: Flower's SuperLink, three SuperNodes, and a bundle.

The processes of Flower are those of its own commands, without TLS on loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from cloister.protocol.identity.address import free_port
from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import next_start, reached, run_history
from cloister.server.record.journal import FINISHED
from cloister.simulations.rehearsal.rehearsal import prepare
from cloister.tests.tools.command import found, set_options

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        Version(version("flwr")) < Version("1.40"),
        reason="a bundle needs a SuperLink of Flower 1.40 or later",
    ),
]

SETTINGS = ("cohort.sites=3", "run.rounds=3", "cohort.deadline_s=600", "server.evaluation=none")
PROGRAMS = Path(sys.executable).parent
WAIT_S = 1500.0

ATTACK = '''
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from cloister.protocol.identity.roster import Card, Roster, load_identity
from cloister.protocol.messages.envelope import Sender, body_of
from cloister.protocol.messages.messages import TRAIN, Agree, Begin, Join, SumId
from cloister.protocol.messages.wire import decode_reply, encode, view
from cloister.protocol.plan.soundness import from_json
from cloister.server.door.carrier import array_of

app = ServerApp()


@app.main()
def main(grid, context):
    """A member with its own key sends a join and the begin of the last attempt, and an old request again."""
    said = context.run_config
    plan, run = from_json(said["plan"]), said["of"]
    begin = Agree(SumId(run, bytes.fromhex(plan.digest()), TRAIN, 1), Begin(1, 2**31 - 1, bytes(32)))
    import numpy as np

    join = Join(run, said["plan"], bytes(32), b"", np.empty(0, np.float32))
    member, coordinator = load_identity(Path(said["member"])), load_identity(Path(said["coordinator"]))
    replies = Roster.of([Card.of("member", member)])  # whoever it is, replies are to be sealed
    attacks = [(begin, lambda body: Sender(member, run, 2**20, replies).envelope("site-000", body))]
    attacks += [(join, lambda body: b"")]
    attacks += [(begin, lambda body: Sender(coordinator, run, 0, replies).envelope("site-000", body))]
    told = []
    for request, signed in attacks:
        frames, record = encode(request), ArrayRecord()
        for number, frame in enumerate(map(view, frames)):
            record[f"{number:04d}"] = array_of(frame)
        content = RecordDict({"frames": record, "envelope": ConfigRecord({"signed": signed(body_of(frames))})})
        nodes = list(grid.get_node_ids())
        for reply in grid.send_and_receive([Message(content, node, "query") for node in nodes]):
            answer = reply.content["frames"]
            said_back = decode_reply([answer[name].data for name in sorted(answer)])
            told.append([type(said_back).__name__, getattr(said_back, "reason", "")])
    Path(said["told"]).write_text(json.dumps(told))
'''


class Flower:
    """A SuperLink on loopback, and its connection in Flower's settings.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: dict[str, ExitStack] = {}
        """By site, what ends its SuperNode."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By name, what was started last."""
        home = folder / "home"
        home.mkdir(parents=True)
        settings = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.address}"\ninsecure = true\n'
        (home / "config.toml").write_text(settings)
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        }

    def wait_until_it_listens(self) -> None:
        """Wait for its SuperLink, which tells nobody when it begins."""
        host, _, port = self.address.rpartition(":")
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection((host, int(port)), 5).close()
                return
            except OSError:
                assert time.monotonic() < until, "no SuperLink listens"
                time.sleep(0.2)  # not an event: SuperLink tells nobody when it begins

    def supernode(self, parties: RunFiles, name: str) -> AbstractContextManager[None]:
        """The SuperNode of a site."""
        node = ("--superlink", self.address, "--port", str(free_port()))
        config = ("--node-config", f'site="{parties.sites.config(name)}"')
        return self.started("flower-supernode", *node, *config, name=name)

    @contextmanager
    def started(self, program: str, *arguments: str, name: str = "") -> Iterator[None]:
        """One of its programs, for as long as the context lasts."""
        with (self.folder / f"{name or program}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(PROGRAMS / program), "--insecure", *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self.processes[name or program] = process
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, bundle: Path, done: Callable[[], bool]) -> None:
        """Run a bundle until something is done."""
        command = [str(PROGRAMS / "flwr"), "run", str(bundle), "here"]
        subprocess.run(command, env=self.environment, cwd=self.folder, check=True, timeout=300)
        until = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < until, (self.folder / "flower-superlink.log").read_text()[-4000:]
            time.sleep(0.5)  # not an event: Flower's programs are others, which leave files alone


def state(sites: Path) -> dict[str, bytes]:
    """What the sites keep."""
    return {
        str(path): path.read_bytes()
        for path in sorted(sites.rglob("*"))
        if path.is_file() and path.name not in ("lock", "update.lock")
    }


@pytest.fixture
def parties(small_plan: Path, tmp_path: Path) -> RunFiles:
    """The sites of a federation, and the coordinator's folder."""
    path = tmp_path / "parties"
    with RunFolder.create(path, load(small_plan, SETTINGS)) as folder:
        prepare(folder, lambda _event: None)
    return RunFiles(path)


@pytest.fixture
def flower(parties: RunFiles, tmp_path: Path) -> Iterator[Flower]:
    made = Flower(tmp_path / "flower")
    with ExitStack() as opened:
        port = made.address.rpartition(":")[2]
        arguments = ("--port", port, "--disable-runtime-dependency-installation")
        opened.enter_context(made.started("flower-superlink", *arguments))
        made.wait_until_it_listens()
        for name in parties.sites.names():
            made.nodes[name] = opened.enter_context(ExitStack())
            made.nodes[name].enter_context(made.supernode(parties, name))
        yield made


def test_a_bundle_ends_with_the_weights_of_a_simulation_and_strangers_move_nothing(
    small_plan: Path, tmp_path: Path, parties: RunFiles, flower: Flower, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (str(small_plan), *set_options(SETTINGS))
    simulated = found(capsys, "simulate", *chosen, "--out", str(tmp_path / "simulated"), "--workers", "1")
    bundle, federation = tmp_path / "bundle", parties.federation
    found(capsys, "flower", "bundle", str(federation), *chosen, "--out", str(bundle))
    assert [path.name for path in bundle.rglob("*")] == ["pyproject.toml"], "it brings no code"
    run = RunFiles(federation / "runs" / "tiny")
    flower.run(bundle, lambda: reached(run, FINISHED))
    assert run.metrics()[-1]["params_sha256"] == simulated["params_sha256"]
    assert found(capsys, "report", str(run.path))
    before = state(parties.sites.path)
    answers = attacked(flower, bundle, parties, run, tmp_path)
    assert {kind for kind, _ in answers} == {"Failed"}
    assert len({reason for _, reason in answers if "counter of the request" in reason}) == 1, (
        "the old request"
    )
    assert state(parties.sites.path) == before
    assert next_start(run) == 2


def test_a_supernode_that_starts_again_takes_part_again(
    small_plan: Path, tmp_path: Path, parties: RunFiles, flower: Flower, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another node of Flower's, and the same site: no round is lost, and the weights are those of a simulation."""
    chosen = (str(small_plan), *set_options(SETTINGS))
    simulated = found(capsys, "simulate", *chosen, "--out", str(tmp_path / "simulated"), "--workers", "1")
    bundle, federation = tmp_path / "bundle", parties.federation
    found(capsys, "flower", "bundle", str(federation), *chosen, "--out", str(bundle))
    run, killed = RunFiles(federation / "runs" / "tiny"), list[str]()

    def done() -> bool:
        if not killed and run.journal.exists() and run_history(run).done:
            killed.append("site-000")
            flower.processes["site-000"].kill()
            flower.nodes["site-000"].close()
            flower.nodes["site-000"].enter_context(flower.supernode(parties, "site-000"))
        return reached(run, FINISHED)

    flower.run(bundle, done)
    assert killed
    assert sorted(run_history(run).done) == [1, 2, 3]
    assert run.metrics()[-1]["params_sha256"] == simulated["params_sha256"]


def attacked(
    flower: Flower, bundle: Path, parties: RunFiles, run: RunFiles, folder: Path
) -> list[tuple[str, str]]:
    """What the sites answer to a foreign `ServerApp` on the same SuperLink."""
    foreign, told = folder / "foreign", folder / "told.json"
    foreign.mkdir()
    (foreign / "attack.py").write_text(ATTACK)
    values: dict[str, Any] = {
        "plan": run.plan_file.read_text(),
        "of": run_history(run).run,
        "member": str(parties.sites.site("site-002") / "identity.pem"),
        "coordinator": str(parties.federation / "coordinator.key"),
        "told": str(told),
    }
    head = (bundle / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[0]
    head = head.replace("cloister.server.federation.flower:app", "attack:app").replace(
        "cloister-run", "foreign"
    )
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (foreign / "pyproject.toml").write_text(f"{head}[tool.flwr.app.config]\n{config}")
    flower.run(foreign, told.exists)
    answers = [(kind, reason) for kind, reason in json.loads(told.read_text())]
    assert len(answers) == 3 * 3, "three attacks on three sites"
    return answers
