"""Runs on a real Ray cluster of two nodes on this machine: the weights, a killed worker, Ctrl-C, what is sent, and what
is refused before a run begins."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import cloister
from cloister.protocol.errors import DataError, EngineError
from cloister.protocol.messages.messages import TRAIN, Contribute, Request
from cloister.server.federation.app import GridChannel
from cloister.server.record.folder import RunFiles
from cloister.simulations.engines.flower import run_on_flower
from cloister.simulations.engines.grid import LocalGrid
from cloister.tests.parties.cluster_sites import (
    PATIENCE_S,
    await_,
    make_app,
    make_counting,
    make_endless,
    make_nothing,
    processes,
    raw,
)
from cloister.tests.scenarios.test_async import ASYNC
from cloister.tests.simulations.test_run import RECORDS, SMALL, Backwards
from cloister.tests.tools.command import lone_refusal, ran, refusal, set_options
from cloister.tests.tools.kills import ended, family
from cloister.tests.tools.raises import raises

SITES = 6
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""The titles of a raylet's agents."""
PROGRAMS = ("/dashboard/agent.py", "/runtime_env/agent/main.py")
"""Their programs, which are all that says so until they have a title; on a busy machine that may take minutes."""

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs cloister[ray]")
# Ray leaves the processes that it started, while they still shut down, and their streams to the garbage collector.
ray_leaves = [
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*name='/dev/null':ResourceWarning"),
]
pytestmark = [needs_ray, *ray_leaves]


@dataclass(frozen=True)
class TwoNodes:
    """A cluster whose nodes are called one and two, with a CPU each."""

    address: str
    raylets: Mapping[str, int]
    """By name of the node, the process of its raylet."""

    def workers(self, node: str) -> list[int]:
        """The processes of workers on a node: not all get a title from Ray that says so."""
        raylet = self.raylets[node]
        children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        return [child for child in map(int, children) if title(child) and not is_agent(child)]

    def busy(self) -> list[str]:
        """The command lines of the processes of workers that work, or belong to a run, and of those that they left.

        Ray starts workers ahead, and names a worker when it has begun: until then it is Ray's program of workers.
        """
        lines = [command_of(process) for node in self.raylets for process in self.workers(node)]
        return [
            each for each in lines if not each.startswith("ray::IDLE") and "default_worker.py" not in each
        ]


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def is_agent(process: int) -> bool:
    line = command_of(process)
    return line.partition(" ")[0] in AGENTS or any(program in line for program in PROGRAMS)


def title(process: int) -> str:
    return command_of(process).partition(" ")[0]


@pytest.fixture(scope="module")
def two() -> Iterator[TwoNodes]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it kills workers when others fill the memory
        patch.setenv("RAY_worker_niceness", "0")  # with 15, the default, other tests leave workers no CPU
        cluster = Cluster(
            initialize_head=True, head_node_args={"node_name": "one", "include_dashboard": False}
        )
        try:
            nodes = {"one": cluster.head_node, "two": cluster.add_node(node_name="two")}
            raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in nodes.items()}
            yield TwoNodes(cluster.address, raylets)
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray annotates no result
            del cluster
            gc.collect()


@pytest.fixture
def flower(two: TwoNodes) -> Iterator[list[str]]:
    """The options that choose the cluster."""
    yield ["--ray-address", two.address]
    gc.collect()  # what Ray leaves, inside the test that ignores its warnings


@pytest.mark.slow
def test_two_nodes_give_the_weights_of_one_process_though_a_worker_is_killed_and_stay(
    whole: dict[str, Any],
    small_plan: Path,
    two: TwoNodes,
    flower: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The worker is stopped before a round, so that it keeps the message that it gets, and killed in it. Its site is a
    dropout of the attempt, and takes part in the next one."""
    import ray

    from cloister.simulations.engines.ray_workers import RayWorkers

    at_work: set[str] = set()
    stopped: list[int] = []
    killed: list[int] = []
    pools: list[RayWorkers] = []
    ask, process, build = GridChannel.ask, RayWorkers.process_message, RayWorkers.build

    def built(self: RayWorkers, app_fn: Any) -> None:
        pools.append(self)
        build(self, app_fn)

    def idle() -> dict[str, int]:
        """For each node that has one, the process of an idle worker."""
        workers: list[Any] = list(pools[-1]._idle.queue)
        found = ray.get([worker.__ray_call__.remote(processes) for worker in workers], timeout=PATIENCE_S)
        return {
            node: process for node, raylet in two.raylets.items() for process, of in found if of == raylet
        }

    def both() -> dict[str, int] | None:
        return found if len(found := idle()) == len(two.raylets) else None

    def watched(self: GridChannel, requests: Mapping[int, Request], *arguments: Any, **options: Any) -> Any:
        ready = await_(both)
        at_work.update(ready)
        training = any(isinstance(r, Contribute) and r.sum.purpose == TRAIN for r in requests.values())
        if training and not stopped:
            stopped.append(ready["two"])
            os.kill(stopped[0], signal.SIGSTOP)
        return ask(self, requests, *arguments, **options)

    def kill_it(self: RayWorkers, message: Message, context: Context) -> Any:
        reply = process(self, message, context)
        if stopped and not killed:
            killed.extend(stopped)
            os.kill(killed[0], signal.SIGKILL)
        return reply

    monkeypatch.setattr(GridChannel, "ask", watched)
    monkeypatch.setattr(RayWorkers, "build", built)
    monkeypatch.setattr(RayWorkers, "process_message", kill_it)
    monkeypatch.chdir(tmp_path)  # the nodes have another working directory
    all_sites = ["--set", "cohort.quorum=1.0"]
    code, printed, err = ran(
        capsys, "simulate", str(small_plan), "--out", "run", *all_sites, *flower, "--json"
    )
    assert code == 0, err
    assert killed
    assert "the site's worker process ended" in err
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [(row["attempts"], row["sites"]) for row in rows[1:]] == [(2, 4), (1, 4), (1, 4)]
    assert json.loads(printed.splitlines()[-1])["params_sha256"] == whole["params_sha256"]
    assert at_work == {"one", "two"}
    assert not list(Path("run").glob(".nodes-*"))
    leaves(two)


def leaves(two: TwoNodes) -> None:
    """A run has left the cluster, which stays."""
    try:
        await_(lambda: not two.busy())
    finally:
        assert not two.busy()
    assert all(title(raylet) for raylet in two.raylets.values())


@pytest.mark.slow
def test_a_program_gives_records_and_a_task_to_a_cluster(two: TwoNodes, tmp_path: Path) -> None:
    """They reach workers that a program has not forked."""
    plan, weights = cloister.Plan(**SMALL), []
    for name, address in (("here", None), ("cluster", two.address)):
        run = cloister.simulate(
            plan,
            sites=RECORDS,
            task=Backwards,
            out=tmp_path / name,
            workers=2,
            ray_address=address,
            quiet=True,
        )
        weights.append(run.outcome.params_sha256)
    gc.collect()
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_leaves_the_cluster(
    small_plan: Path, two: TwoNodes, flower: list[str], tmp_path: Path
) -> None:
    """`test_resume.py` continues runs that were stopped."""
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "cloister.cli.main", "simulate", str(small_plan), "--out", str(out)]
    with subprocess.Popen(
        [*command, *flower, "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1: 4 sites") for line in process.stdout)
        ends = [os.pidfd_open(pid) for pid in family(process.pid)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert printed.splitlines()[-1] == f"stopped; continue with: cloister resume {out}"
    assert errors == "cloister: interrupted\n"
    assert all(map(ended, ends))
    leaves(two)


@pytest.mark.slow
def test_asynchronous_rounds_need_only_push_and_pull(
    small_plan: Path, flower: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower's runtime returns replies to who asks again and again, and takes messages meanwhile."""
    out = tmp_path / "run"
    settings = set_options([*ASYNC, "run.rounds=2"])
    code, _, err = ran(capsys, "simulate", str(small_plan), "--out", str(out), *flower, *settings)
    assert code == 0, err
    summed = [row["staleness"] for row in RunFiles(out).metrics() if row["round"]]
    assert len(summed) == 2
    assert all(summed)


def asking(grid: Grid, timeout_s: float, content: RecordDict | None = None) -> list[Message]:
    messages = [Message(content or RecordDict(), node, "train") for node in grid.get_node_ids()]
    return list(grid.send_and_receive(messages, timeout=timeout_s))


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_no_site(two: TwoNodes, flower: list[str], tmp_path: Path) -> None:
    app = ServerApp()
    busy: dict[str, int] = {}
    begun: list[float] = []

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.bind(str(tmp_path / "busy"))
        events.settimeout(PATIENCE_S)

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            content = RecordDict({"busy": ConfigRecord({"address": str(tmp_path / "busy")})})
            for _ in range(2):  # the second message of each site waits for a worker
                assert asking(grid, 0.1, content) == []
            while len(busy) < len(two.raylets):
                node, process = events.recv(1000).decode().split()
                busy[node] = os.pidfd_open(int(process))
            begun.append(time.monotonic())

        run_on_flower(app, make_endless, SITES, two.address)
    assert time.monotonic() - begun[0] < PATIENCE_S
    assert all(ended(process, PATIENCE_S) for process in busy.values())


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(two: TwoNodes, flower: list[str]) -> None:
    app = ServerApp()
    replies: list[Message] = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        replies.extend(asking(grid, PATIENCE_S))

    run_on_flower(app, make_nothing, 2, two.address)
    assert len(replies) == 2
    assert all("LookupError: no such app" in str(reply.error.reason) for reply in replies)


@pytest.mark.slow
def test_as_many_sites_work_at_once_as_there_are_workers(
    two: TwoNodes, flower: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own pool of threads would be the limit; a thread stands for a worker here."""
    from cloister.simulations.engines import cluster
    from cloister.simulations.engines.ray_workers import RayWorkers

    together = threading.Barrier(40)

    def process(self: RayWorkers, message: Message, context: Context) -> tuple[Message, Context]:
        together.wait(PATIENCE_S)
        return Message(RecordDict(), reply_to=message), context

    monkeypatch.setattr(cluster, "room", lambda *_: cluster.Room(40, 1.0, 0.0))
    monkeypatch.setattr(RayWorkers, "build", lambda *_: None)
    monkeypatch.setattr(RayWorkers, "process_message", process)
    app = ServerApp()
    replies: list[Message] = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        replies.extend(asking(grid, PATIENCE_S))

    run_on_flower(app, make_app, 40, two.address)
    assert [reply.has_content() for reply in replies] == [True] * 40


# The same two apps on both engines.

VECTOR = np.arange(100_000, dtype=np.float32)


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


@pytest.mark.slow
def test_both_engines_give_the_same_replies_and_raise_the_coordinators_exception(
    two: TwoNodes, flower: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    app, error = make_counting, DataError("plan", expected="another one")
    local: list[object] = []
    with (
        pytest.raises(DataError) as raised_locally,
        LocalGrid(app, [{"partition-id": n} for n in range(SITES)], workers=[{}, {}]) as grid,
    ):
        server_app(local, error)(grid, Context(1, 0, {}, RecordDict(), {}))
    capfd.readouterr()  # drops the traceback of the site's exception, which its worker prints
    replied: list[object] = []
    with pytest.raises(DataError) as raised_on_flower:
        run_on_flower(server_app(replied, error), app, SITES, two.address)
    assert raised_locally.value is raised_on_flower.value is error
    out = capfd.readouterr()
    assert "Traceback" not in out.out + out.err
    assert local == replied
    assert len(local) == 2
    assert "site.data is 'nowhere': expected a file" in repr(local)


# What is sent.


@pytest.mark.slow
def test_a_vector_is_stored_once_for_all_sites_and_read_where_each_node_has_it(
    two: TwoNodes, flower: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray._private import internal_api
    from ray.exceptions import RaySystemError

    def memory_summary() -> str:
        return str(internal_api.memory_summary())  # type: ignore[no-untyped-call]  # Ray annotates no result

    def released(stored: str) -> bool:
        try:
            return stored not in memory_summary()
        except RaySystemError:  # it connects within 5 s, which a busy machine exceeds, or raises this
            return False

    stored: dict[str, int] = {}
    said: list[dict[str, Any]] = []
    put = ray.put

    def counted(value: Any) -> Any:
        ref = put(value)
        stored[ref.hex()] = value.nbytes
        return ref

    monkeypatch.setattr(ray, "put", counted)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for factor in (1, 2):
            record = ArrayRecord()
            record["vector"] = raw(np.full(100_000, factor, np.float32))
            nodes = ConfigRecord({"folder": str(tmp_path)})
            content = RecordDict({"model": record, "nodes": nodes})
            messages = [Message(content, node, "train") for node in grid.get_node_ids()]
            replies = grid.send_and_receive(messages, timeout=PATIENCE_S)
            said.extend(dict(cast(ConfigRecord, reply.content["said"])) for reply in replies)
        first, second = stored
        await_(lambda: released(first))
        assert second in memory_summary()

    run_on_flower(app, make_app, SITES, two.address)
    assert list(stored.values()) == [400_000, 400_000]  # one for each round
    assert sorted(answer["sum"] for answer in said) == [100_000.0] * SITES + [200_000.0] * SITES
    assert all("plasma" in answer["mapped"] for answer in said)
    assert len({answer["node"] for answer in said}) == 2


# What is refused, before a run begins.


def test_an_address_has_a_port(small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, options = tmp_path / "run", ["--ray-address", "10.0.0.1"]
    line = lone_refusal(capsys, "simulate", str(small_plan), "--out", str(out), *options)
    assert "expected HOST:PORT of a running Ray cluster" in line
    assert not out.exists()


def test_missing_ray_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(EngineError, "--ray-address", says="'cloister[ray]'"):
        run_on_flower(ServerApp(), ClientApp, 3, "127.0.0.1:6379")


@pytest.mark.parametrize("listening", [True, False])
def test_a_cluster_that_does_not_answer_is_refused_soon(
    small_plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listening: bool,
) -> None:
    monkeypatch.setattr("cloister.simulations.engines.cluster.ANSWER_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        options = ["--ray-address", address, "--out", str(tmp_path / "run")]
        begun = time.monotonic()
        line = lone_refusal(capsys, "simulate", str(small_plan), *options)
        assert time.monotonic() - begun < 30  # Ray itself takes minutes
    assert f"--ray-address is '{address}': expected a Ray cluster that answers within 0.2 s" in line


@pytest.mark.slow
def test_a_cluster_of_another_ray_is_refused(
    small_plan: Path,
    flower: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import ray

    monkeypatch.setattr(ray, "__version__", "1.0.0")
    line = refusal(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "run"), *flower)
    assert "expected a cluster with the same Ray and Python" in line
    assert "Ray: 1.0.0" in line


@pytest.mark.slow
def test_a_node_that_does_not_see_the_run_folder_is_refused(
    small_plan: Path,
    flower: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The path means another place in each process, as it would on another machine."""
    monkeypatch.chdir(tmp_path)
    out = Path("/proc/self/cwd/run")
    line = refusal(capsys, "simulate", str(small_plan), "--out", str(out), *flower)
    assert f"node one ({socket.gethostname()}): expected it to share the run folder {out}" in line
    assert "it is not there" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_node_is_refused_for_its_software_a_late_change_and_a_lock_that_does_not_hold(
    two: TwoNodes, flower: list[str], tmp_path: Path
) -> None:
    from cloister.simulations.engines import cluster as module

    def refused() -> str:
        with pytest.raises(EngineError) as raised:
            module.check_nodes(tmp_path)
        assert not list(tmp_path.iterdir())
        return str(raised.value)

    torch = metadata.version("torch").partition("+")[0]
    real = metadata.version
    with module.cluster(two.address):
        module.check_nodes(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metadata, "version", lambda name: "0.1" if name == "torch" else real(name))
            assert f"is 'torch {torch}, not 0.1'" in refused()
        with pytest.MonkeyPatch.context() as patch:  # what this process writes later does not arrive
            patch.setattr(os, "replace", lambda _old, _new: None)
            assert "a change is seen there too late" in refused()
        for lock in ("flock", "lockf"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fcntl, lock, lambda _file, _how: None)
                assert f"a lock that is taken here ({lock}) does not hold there" in refused()


@pytest.mark.slow
def test_workers_are_counted_by_gpus_where_a_node_has_some_else_by_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    from cloister.simulations.engines.cluster import Room, room

    def nodes(*resources: dict[str, float]) -> None:
        described = [
            {"Alive": True, "NodeName": "n", "NodeManagerHostname": "h", "Resources": each}
            for each in resources
        ]
        monkeypatch.setattr(ray, "nodes", lambda: described)

    nodes({"CPU": 3.0}, {"CPU": 8.0})
    assert room(2, 1) == Room(1 + 4, 2.0, 0.0)
    nodes({"CPU": 1.0}, {"CPU": 2.0})
    assert room(4, 1) == Room(1, 2.0, 0.0)
    nodes({"CPU": 16.0}, {"CPU": 16.0, "GPU": 2.0})
    assert room(4, 3) == Room(6, 0.0, 1 / 3)
    nodes({"node:10.0.0.1": 1.0})
    with raises(EngineError, "Ray cluster"):
        room(1, 1)
