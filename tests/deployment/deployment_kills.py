"""The kill of each process of a deployment, with SIGKILL, while a run goes on; `make test-deployment` runs it.

It takes minutes, most of them until processes have imported what they need, so it is no part of the suite.
`tests/server/door/test_door_run.py` kills each party at each step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.protocol.errors import EngineError
from cloister.protocol.plan.soundness import load
from cloister.server.federation.control import command
from cloister.server.record.events import from_json
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.progress import RoundStarted
from cloister.simulations.rehearsal.rehearsal import prepare, running
from cloister.tests.tools.descriptors import readable

PARTIES = ["coordinator run", "coordinator start", "site start"]
ROUNDS = 2 * len(PARTIES)

pytestmark = pytest.mark.timeout(1200)


def processes(*words: str) -> list[int]:
    """Processes whose command line has all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if entry.name.isdecimal() and all(word in line for word in words):
                found.append(int(entry.name))
    return sorted(found)


def kill(*words: str) -> None:
    (first, *_) = processes("cloister.protocol.machine.child", *words)
    os.kill(first, signal.SIGKILL)


def wait_for_end(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            descriptor = os.pidfd_open(pid)
            assert readable(descriptor, 60), f"process {pid} goes on"
            os.close(descriptor)


def simulated(plan: Path, out: Path, *options: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["simulate", str(plan), "--out", str(out), *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return found


def test_a_run_survives_the_kill_of_each_process(small_plan: Path, tmp_path: Path) -> None:
    options = ["--rounds", str(ROUNDS)]
    whole = simulated(small_plan, tmp_path / "simulated", *options)
    plan = load(small_plan, [f"run.rounds={ROUNDS}"])
    files = RunFiles(tmp_path / "deployed")
    with RunFolder.create(files.path, plan) as folder:
        prepare(folder, lambda _event: None)
    ended: list[str] = []
    left = {2 * number + 2: party for number, party in enumerate(PARTIES)}
    state: dict[str, Any] = {}
    with running(files, plan, ended.append):
        while not state:
            with contextlib.suppress(EngineError):  # its coordinator was killed, and starts again
                for line in command(files.federation, do="follow", run=str(files.path)):
                    event = from_json(line["line"]) if "line" in line else None
                    if isinstance(event, RoundStarted) and event.purpose == "train" and event.round in left:
                        kill(left.pop(event.round), str(files.path))
                    if "state" in line:
                        state = dict(line)
    assert not left
    assert state == {"state": "done", "reason": ""}
    with RunFolder.reopen(files.path) as folder:
        from cloister.server.record.outcome import outcome

        assert outcome(folder).params_sha256 == whole["params_sha256"]
    wait_for_end(processes("cloister.protocol.machine.child", str(tmp_path)))


def test_a_rehearsal_that_was_killed_leaves_no_process_and_goes_on(small_plan: Path, tmp_path: Path) -> None:
    whole = simulated(small_plan, tmp_path / "simulated")
    out = tmp_path / "deployed"
    up = [sys.executable, "-m", "cloister.cli.main", "up", str(small_plan), "--out", str(out)]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1: ") for line in process.stdout)
        before = processes("cloister.protocol.machine.child", str(out))
        assert before
        process.kill()
    wait_for_end(before)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["up", "--again", str(out), "--json"]) == 0
    assert json.loads(printed.getvalue().splitlines()[-1])["params_sha256"] == whole["params_sha256"]
