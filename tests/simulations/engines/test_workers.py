"""Worker processes: crashes, replacement, start failures, and no process that outlives the coordinator."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from cloister.protocol.errors import EngineError
from cloister.protocol.plan.soundness import Plan, parse
from cloister.simulations.engines.fork_server import modules
from cloister.simulations.engines.grid import LocalGrid
from cloister.simulations.engines.workers import Worker
from cloister.tests.parties.grid_sites import (
    Events,
    Open,
    ask,
    ended,
    make_dying_app,
    make_no_app,
    said,
)
from cloister.tests.tools.raises import raises


def test_killed_worker_is_an_error_reply_and_is_replaced(open_grid: Open, events: Events) -> None:
    grid = open_grid(3)
    replies: list[Message] = []

    def kill_each() -> None:
        for _ in range(3):
            os.kill(events.next()[1], signal.SIGKILL)

    killer = threading.Thread(target=kill_each)
    killer.start()
    replies = ask(grid, "hang")
    killer.join()
    expected = Error(ErrorCode.CLIENT_APP_CRASHED, "the site's worker process was killed by SIGKILL")
    assert [reply.error for reply in replies] == [expected] * 3
    assert {reply.metadata.src_node_id for reply in replies} == {1, 2, 3}
    assert len(ask(grid, "who")) == 3


def test_worker_that_exits_is_an_error_reply(open_grid: Open) -> None:
    grid = open_grid(3)
    expected = Error(ErrorCode.CLIENT_APP_CRASHED, "the site's worker process exited with status 7")
    assert [reply.error for reply in ask(grid, "exit")] == [expected] * 3
    assert len(ask(grid, "who")) == 3


def test_worker_killed_between_rounds_costs_no_site(open_grid: Open) -> None:
    grid = open_grid(2)
    pids = {said(reply)["pid"] for reply in ask(grid, "who")}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
    replies = ask(grid, "who")
    assert [reply.has_content() for reply in replies] == [True, True]
    assert not pids & {said(reply)["pid"] for reply in replies}


def test_exception_is_one_line_and_its_traceback_is_in_the_log(open_grid: Open, tmp_path: Path) -> None:
    replies = ask(open_grid(2), "fail")
    reasons = {reply.metadata.src_node_id: (reply.error.code, reply.error.reason) for reply in replies}
    assert reasons == {
        1: (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ValueError: two lines"),
        2: (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "site.data is 'nowhere': expected a file"),
    }
    assert "Traceback" in (tmp_path / "log").read_text()


def test_reply_that_is_none_is_refused(open_grid: Open) -> None:
    (reply,) = ask(open_grid(1), "nothing")
    assert reply.error.reason == "TypeError: the client app returned a NoneType: expected a Message"


@pytest.mark.parametrize("error", [ValueError("no weights"), ImportError("no module")])
def test_client_app_that_cannot_be_made_is_refused(open_grid: Open, error: Exception) -> None:
    grid = open_grid(2, make=partial(make_no_app, error))
    with raises(EngineError, "client app", says=(f"not {type(error).__name__}: {error};", "log")):
        ask(grid, "who")


def test_worker_that_dies_at_every_start_is_refused(open_grid: Open) -> None:
    grid = open_grid(2, make=make_dying_app)
    with raises(EngineError, "worker process", says="SIGKILL"):
        ask(grid, "who")


def test_what_a_site_started_ends_with_it(open_grid: Open, events: Events, tmp_path: Path) -> None:
    replies = open_grid(1).send_and_receive([Message(RecordDict(), 1, "query.family")])
    killer = threading.Thread(target=lambda: os.kill(events.next()[1], signal.SIGKILL))
    killer.start()
    (reply,) = replies
    killer.join()
    assert reply.has_error()
    assert ended(int((tmp_path / "child").read_text()))


def test_close_may_be_repeated_and_ends_everything(open_grid: Open) -> None:
    grid = open_grid(2)
    pids = {said(reply)["pid"] for reply in ask(grid, "who")}
    grid.close()
    grid.close()
    assert all(ended(pid) for pid in pids)
    with raises(EngineError, "grid"):
        ask(grid, "who")


COORDINATOR = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from functools import partial
from pathlib import Path
from flwr.app import Message, RecordDict
from cloister.simulations.engines.grid import LocalGrid
from cloister.tests.parties.grid_sites import make_app, model
grid = LocalGrid(partial(make_app, Path({folder!r})), [{{"partition-id": 0}}] * 4, workers=[{{}}, {{}}])
messages = [Message(model(), node, "query.{action}") for node in grid.get_node_ids()]
{then}
"""


def shared_memory() -> set[str]:
    """Named shared memory of this machine, without semaphores, which other tests' processes make at any time."""
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.exists() else []
    return {name for name in names if not name.startswith("sem.")}


@pytest.mark.slow
def test_workers_and_what_they_started_end_when_the_coordinator_is_killed(
    tmp_path: Path, events: Events
) -> None:
    before = shared_memory()
    code = COORDINATOR.format(
        folder=str(tmp_path), action="family", then="list(grid.send_and_receive(messages))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as coordinator:
        pids = [events.next()[1] for _ in range(2)]
        coordinator.kill()
    pids.append(int((tmp_path / "child").read_text()))
    assert all(ended(pid) for pid in pids)
    assert shared_memory() <= before


@pytest.mark.slow
def test_ctrl_c_ends_the_coordinator_and_its_workers(tmp_path: Path, events: Events) -> None:
    code = COORDINATOR.format(
        folder=str(tmp_path), action="hang", then="with grid:\n    list(grid.send_and_receive(messages))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as coordinator:
        pids = [events.next()[1] for _ in range(2)]
        os.killpg(coordinator.pid, signal.SIGINT)  # as a terminal does
        try:
            assert coordinator.communicate(timeout=60)[1].splitlines()[-1] == b"KeyboardInterrupt"
        finally:
            coordinator.kill()
    assert all(ended(pid) for pid in pids)


@pytest.mark.slow
def test_coordinator_that_forgets_to_close_still_exits(tmp_path: Path, events: Events) -> None:
    code = COORDINATOR.format(
        folder=str(tmp_path), action="hang", then="grid.push_messages(messages)\ngrid.pull_messages([])"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def parent(pid: int) -> int:
    """The process that forked this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def masks(pid: int) -> dict[str, bool]:
    """Whether a process blocks and ignores Ctrl-C."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"(Sig\w+):\s*([0-9a-f]+)", status))
    return {name: bool(int(found[name], 16) >> signal.SIGINT - 1 & 1) for name in ("SigBlk", "SigIgn")}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_never_reaches_the_fork_server_and_is_only_ignored_by_workers() -> None:
    with LocalGrid(ClientApp, [{"partition-id": 0}], workers=[{}]) as grid:
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        (reply,) = grid.send_and_receive([Message(RecordDict(), 1, "query")])
        assert reply.has_error()  # the app knows no message; its worker is there
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        assert masks(worker.pid) == {"SigBlk": False, "SigIgn": True}
        assert masks(parent(worker.pid))["SigBlk"]  # the fork server


FORKED_AFTER = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
process = os.fork()
if process:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
import torch
torch.zeros(1, device="cuda:0")
os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["private-code", "not-private", "classify"])
def test_a_forked_worker_uses_the_gpu(plan: str) -> None:
    preload = [Worker.__module__, *modules(Plan.load(plan))]
    subprocess.run([sys.executable, "-c", FORKED_AFTER, *preload], check=True)


@pytest.mark.slow
def test_no_preload_imports_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for a GPU, after which no forked process can use one."""
    adapted = parse("", ["model.adapter.scheme=ffa-lora"])
    assert "peft" in modules(adapted)
    (tmp_path / "bitsandbytes.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    assert "peft" not in modules(adapted)
    subprocess.run(
        [sys.executable, "-c", FORKED_AFTER.partition("process =")[0], *modules(adapted)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
