"""The same two apps on `LocalGrid` and on Flower's own runtime: the same replies, the same exceptions."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from cloister.protocol.errors import DataError, EngineError
from cloister.simulations.flower import run_on_flower
from cloister.simulations.grid import LocalGrid
from cloister.tests.command import found
from cloister.tests.kills import ended, family

SITES = 3
VECTOR = np.arange(100_000, dtype=np.float32)

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs cloister[ray]")
# Ray leaves the processes that it started, while they still shut down, and their streams to the garbage collector.
ray_leaves = [
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*name='/dev/null':ResourceWarning"),
]


def on_ray(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (*ray_leaves, pytest.mark.usefixtures("collected"), needs_ray):
        test = mark(test)
    return test


def make_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = cast(int, context.node_config["partition-id"])
        if number == 1:
            raise DataError("site.data", "nowhere", expected="a file")
        data = cast(ArrayRecord, message.content["model"])["vector"].data
        record = ArrayRecord()
        record["vector"] = raw(np.frombuffer(data, np.float32) * number)
        calls = cast(ConfigRecord, context.state.setdefault("calls", ConfigRecord({"count": 0})))
        calls["count"] = cast(int, calls["count"]) + 1
        fields = ConfigRecord({"number": number, "calls": calls["count"]})
        return Message(RecordDict({"model": record, "fields": fields}), reply_to=message)

    return app


def raw(vector: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    array = Array("float32", vector.shape, "raw", b"")
    array.data = vector.data.cast("B")  # type: ignore[assignment]  # Flower says bytes, and takes any buffer
    return array


def server_app(heard: list[object], error: Exception) -> ServerApp:
    """Two rounds, then `error`; the answers of the sites are put in `heard`, sorted."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = list(grid.get_node_ids())
        assert len(nodes) == SITES  # on Flower too, which registers them after it has started this app
        record = ArrayRecord()
        record["vector"] = raw(VECTOR)
        for _ in range(2):
            replies = list(
                grid.send_and_receive([Message(RecordDict({"model": record}), n, "train") for n in nodes])
            )
            heard.append(sorted(map(digest, replies), key=repr))
        raise error

    return app


def digest(reply: Message) -> object:
    if reply.has_error():
        return reply.error.code, reply.error.reason
    array = cast(ArrayRecord, reply.content["model"])["vector"]
    fields = dict(cast(ConfigRecord, reply.content["fields"]))
    return fields, array.dtype, array.shape, array.stype, bytes(array.data)


@pytest.fixture
def apps() -> Any:
    """This module under a name by which other processes can import it; pytest's own name for it is not one."""
    return importlib.import_module("cloister.tests.test_flower_engine")


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect what Ray leaves inside the test that ignores its warnings, not in a later one."""
    yield
    gc.collect()


@on_ray
def test_both_engines_give_the_same_replies_and_raise_the_coordinators_exception(
    apps: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    error = DataError("plan", expected="another one")
    local: list[object] = []
    with (
        pytest.raises(DataError) as raised_locally,
        LocalGrid(apps.make_app, [{"partition-id": n} for n in range(SITES)], workers=[{}, {}]) as grid,
    ):
        server_app(local, error)(grid, Context(1, 0, {}, RecordDict(), {}))
    capfd.readouterr()  # drops the traceback of the site's exception, which its worker prints
    flower: list[object] = []
    with pytest.raises(DataError) as raised_on_flower:
        run_on_flower(server_app(flower, error), apps.make_app, SITES)
    assert raised_locally.value is raised_on_flower.value is error
    out = capfd.readouterr()
    assert "Traceback" not in out.out + out.err
    assert local == flower
    assert len(local) == 2
    assert "site.data is 'nowhere': expected a file" in repr(local)


@needs_ray
def test_ctrl_c_stops_the_run_and_all_its_processes_and_it_can_be_resumed(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan), "--out", str(out)]
    with subprocess.Popen(
        [*command, "--engine", "flower"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1: 4 sites") for line in process.stdout)
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
    assert found(capsys, "resume", str(out))["params_sha256"] == whole["params_sha256"]


def test_missing_ray_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        EngineError, match=r"engine is 'flower': expected ray .*pip install 'cloister\[ray\]'"
    ):
        run_on_flower(ServerApp(), ClientApp, SITES)
