"""The engine `flower` on a Ray that the run starts for itself: Ctrl-C, and what is said where Ray is missing."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from cloister.protocol.errors import EngineError
from cloister.server.record.folder import RunFiles
from cloister.simulations.engines.flower import run_on_flower
from cloister.tests.scenarios.test_async import ASYNC
from cloister.tests.tools.command import set_options
from cloister.tests.tools.kills import ended, family
from cloister.tests.tools.raises import raises

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs cloister[ray]")
# Ray leaves the processes that it started, while they still shut down, and their streams to the garbage collector.
ray_leaves = [
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*name='/dev/null':ResourceWarning"),
]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where Ray makes its folders: a path that is short enough for its sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def strangers_answer(folder: Path) -> str:
    """What a process without the token hears from the Ray whose folder this is."""
    import ray

    compiled: Any = ray._raylet  # without types
    (port,) = folder.glob("*/ray/session_latest/gcs_server_port_*")
    with pytest.raises(ray.exceptions.AuthenticationError) as refused:
        compiled.GcsClient(address=f"127.0.0.1:{port.read_text()}")
    return str(refused.value)


@pytest.mark.slow
@needs_ray
def test_ctrl_c_stops_the_run_and_all_its_processes(
    small_plan: Path, tmp_path: Path, ray_folder: Path
) -> None:
    """On a Ray that the run has started for itself, which no other can use, and of which nothing is left;
    `test_resume.py` continues runs that were stopped."""
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan), "--out", str(out)]
    with subprocess.Popen(
        [*command, "--engine", "flower", "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RAY_TMPDIR": str(ray_folder)},
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1: 4 sites") for line in process.stdout)
        assert "InvalidAuthToken" in strangers_answer(ray_folder)
        assert [stat.S_IMODE(made.stat().st_mode) for made in ray_folder.iterdir()] == [0o700]
        ends = [os.pidfd_open(pid) for pid in family(process.pid)]
        assert len(ends) > 3, "Ray's own processes are among them"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert printed.splitlines()[-1] == f"stopped; continue with: cloister resume {out}"
    assert errors == "cloister: interrupted\n"
    assert all(map(ended, ends))
    assert not list(ray_folder.iterdir())


def processes_of(folder: Path) -> list[str]:
    """The command lines that name a folder."""
    lines = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(os.fsdecode(Path("/proc", process, "cmdline").read_bytes()))
    return [line for line in lines if str(folder) in line]


@pytest.mark.slow
@needs_ray
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed file .*name='/dev/null':ResourceWarning")
def test_a_start_of_ray_that_is_interrupted_leaves_nothing(
    ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.node import Node

    from cloister.simulations.engines.cluster import cluster

    start: Callable[[Any], None] = Node.start_ray_processes

    def interrupted(node: Any) -> None:
        start(node)
        assert len(processes_of(ray_folder)) > 2
        raise KeyboardInterrupt

    monkeypatch.setattr(Node, "start_ray_processes", interrupted)
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))
    with pytest.raises(KeyboardInterrupt), cluster(None):
        raise AssertionError("it has begun")
    assert not processes_of(ray_folder)
    assert not list(ray_folder.iterdir())
    gc.collect()  # what Ray leaves, inside the test that ignores its warnings


@needs_ray
def test_a_folder_with_too_long_a_path_for_ray_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloister.simulations.engines.cluster import cluster

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "0123456789"))
    with (
        raises(EngineError, "RAY_TMPDIR", says="21 bytes"),
        cluster(None),
    ):
        raise AssertionError("it has begun")


def test_missing_ray_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(EngineError, "engine", says="'cloister[ray]'"):
        run_on_flower(ServerApp(), ClientApp, 3)


@pytest.mark.slow
@needs_ray
def test_asynchronous_rounds_need_only_push_and_pull(
    small_plan: Path, tmp_path: Path, ray_folder: Path
) -> None:
    """Flower's runtime returns replies to who asks again and again, and takes messages meanwhile."""
    out = tmp_path / "run"
    settings = set_options([*ASYNC, "run.rounds=2"])
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan), "--out", str(out)]
    subprocess.run(
        [*command, "--engine", "flower", "--workers", "2", *settings],
        check=True,
        capture_output=True,
        timeout=240,
        env=os.environ | {"RAY_TMPDIR": str(ray_folder)},
    )
    summed = [row["staleness"] for row in RunFiles(out).metrics() if row["round"]]
    assert len(summed) == 2
    assert all(summed)
