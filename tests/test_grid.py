"""LocalGrid with real processes and real messages: replies, one copy in memory, and every way to go wrong."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from cloister.protocol.errors import DataError, EngineError
from cloister.simulations.grid import LocalGrid

VECTOR = np.arange(1_000_000, dtype=np.float32)


def make_app(folder: Path) -> ClientApp:
    """What sites do in these tests; `folder` is where they tell that they have begun."""
    app = ClientApp()

    def answer(message: Message, **values: Any) -> Message:
        return Message(RecordDict({"out": ConfigRecord(values)}), reply_to=message)

    def tell(message: Message) -> None:
        """Say on the test's socket which process works for which site; the test waits for it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
            events.sendto(f"{message.metadata.dst_node_id} {os.getpid()}".encode(), str(folder / "events"))

    @app.query("who")
    def who(message: Message, context: Context) -> Message:
        seen = cast(ConfigRecord, context.state.setdefault("seen", ConfigRecord({"count": 0})))
        seen["count"] = cast(int, seen["count"]) + 1
        return answer(
            message,
            node=context.node_id,
            partition=context.node_config["partition-id"],
            count=seen["count"],
            pid=os.getpid(),
            device=os.environ.get("TEST_DEVICE", ""),
            files=len(os.listdir("/dev/fd")),
        )

    @app.query("segment")
    def segment(message: Message, context: Context) -> Message:
        data = cast(ArrayRecord, message.content["model"])["vector"].data
        assert isinstance(data, memoryview)
        assert data.readonly
        (line,) = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "cloister-vector" in line
        ]
        return answer(
            message, inode=line.split()[4], total=float(np.frombuffer(data, np.float32).sum(dtype=np.float64))
        )

    @app.query("double")
    def double(message: Message, context: Context) -> Message:
        record = ArrayRecord()
        for name, array in cast(ArrayRecord, message.content["model"]).items():
            record[name] = raw(np.frombuffer(array.data, np.float32) * context.node_id)
        return Message(RecordDict({"model": record}), reply_to=message)

    @app.query("hang")
    def hang(message: Message, context: Context) -> Message:
        tell(message)
        threading.Event().wait()
        raise AssertionError

    @app.query("meet")
    def meet(message: Message, context: Context) -> Message:
        tell(message)
        (folder / f"gate{context.node_id}").read_bytes()  # until the test opens the other end
        return who(message, context)

    @app.query("hang_some")
    def hang_some(message: Message, context: Context) -> Message:
        return hang(message, context) if context.node_id % 2 else answer(message, node=context.node_id)

    @app.query("family")
    def family(message: Message, context: Context) -> Message:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (folder / "child").write_text(str(child.pid))
        return hang(message, context)

    @app.query("exit")
    def leave(message: Message, context: Context) -> Message:
        os._exit(7)

    @app.query("fail")
    def fail(message: Message, context: Context) -> Message:
        if context.node_id == 1:
            raise ValueError("two\n  lines")
        raise DataError("site.data", "nowhere", expected="a file")

    @app.query("nothing")
    def nothing(message: Message, context: Context) -> Message:
        return cast(Message, None)

    return app


def make_no_app(error: Exception) -> ClientApp:
    raise error


def make_dying_app() -> ClientApp:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def raw(vector: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    array = Array("float32", vector.shape, "raw", b"")
    array.data = vector.data.cast("B")  # type: ignore[assignment]  # Flower says bytes, and takes any buffer
    return array


def model(vector: np.ndarray[Any, np.dtype[np.float32]] = VECTOR) -> RecordDict:
    record = ArrayRecord()
    record["vector"] = raw(vector)
    return RecordDict({"model": record})


class Events:
    """Where workers report; a test waits here instead of sleeping."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(60)
        self._socket.bind(str(folder / "events"))

    def next(self) -> tuple[int, int]:
        """Site and process id of the next site that has begun."""
        node, pid = self._socket.recv(100).decode().split()
        return int(node), int(pid)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    events = Events(tmp_path)
    yield events
    events.close()


Open = Callable[..., LocalGrid]


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This module under a name by which workers can import it; pytest's own name for it is not one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module(Path(__file__).stem)


@pytest.fixture
def open_grid(apps: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens grids for `make_app` and closes them."""
    grids: list[LocalGrid] = []

    def open_(
        sites: int, workers: int = 2, make: Callable[[], ClientApp] | None = None, **options: Any
    ) -> LocalGrid:
        configs = [{"partition-id": number} for number in range(sites)]
        environments = [{"TEST_DEVICE": str(number), "OMP_NUM_THREADS": "1"} for number in range(workers)]
        options.setdefault("log", tmp_path / "log")
        grids.append(
            LocalGrid(make or partial(apps.make_app, tmp_path), configs, workers=environments, **options)
        )
        return grids[-1]

    yield open_
    for grid in grids:
        grid.close()


def ask(grid: LocalGrid, action: str, content: RecordDict | None = None, **options: Any) -> list[Message]:
    """One message of the same content to every site."""
    timeout = options.pop("timeout", None)
    shared = RecordDict() if content is None else content
    messages = [Message(shared, node, f"query.{action}", **options) for node in grid.get_node_ids()]
    return list(grid.send_and_receive(messages, timeout=timeout))


def said(reply: Message) -> dict[str, Any]:
    return dict(cast(ConfigRecord, reply.content["out"]))


def warm(grid: LocalGrid) -> None:
    """Wait until both workers work."""
    devices: set[str] = set()
    while len(devices) < 2:
        devices |= {said(reply)["device"] for reply in ask(grid, "who")}


def ended(pid: int) -> bool:
    """Wait until a process that is not our child is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 30)[0])
    finally:
        os.close(fd)


def test_replies_come_from_every_site_with_its_own_context(open_grid: Open) -> None:
    grid = open_grid(5)
    assert list(grid.get_node_ids()) == [node.node_id for node in grid.get_nodes()] == [1, 2, 3, 4, 5]
    for round in (1, 2):
        replies = ask(grid, "who", group_id="round")
        assert sorted((said(r)["node"], said(r)["partition"]) for r in replies) == [
            (n, n - 1) for n in range(1, 6)
        ]
        assert {said(reply)["count"] for reply in replies} == {round}
        for reply in replies:
            assert reply.metadata.src_node_id == said(reply)["node"]
            assert reply.metadata.dst_node_id == 0
            assert reply.metadata.group_id == "round"
            assert reply.metadata.reply_to_message_id
        assert len({reply.metadata.message_id for reply in replies}) == 5


def test_sites_stay_with_their_worker(open_grid: Open, events: Events, tmp_path: Path) -> None:
    for node in (1, 2):
        os.mkfifo(tmp_path / f"gate{node}")

    def open_gates() -> None:
        for node, _ in (events.next(), events.next()):
            (tmp_path / f"gate{node}").write_bytes(b"")

    opener = threading.Thread(target=open_gates)
    opener.start()
    grid = open_grid(2)
    homes = {said(reply)["node"]: said(reply)["device"] for reply in ask(grid, "meet")}
    opener.join()
    assert set(homes.values()) == {"0", "1"}  # each worker has its own environment
    for _ in range(20):
        assert {said(reply)["node"]: said(reply)["device"] for reply in ask(grid, "who")} == homes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_sites_map_one_read_only_segment(open_grid: Open) -> None:
    replies = ask(open_grid(6), "segment", model())
    assert len({said(reply)["inode"] for reply in replies}) == 1
    assert {said(reply)["total"] for reply in replies} == {VECTOR.sum(dtype=np.float64)}


def test_vectors_arrive_intact_both_ways(open_grid: Open) -> None:
    grid = open_grid(4)
    record = ArrayRecord()
    for number in range(
        300
    ):  # more segments than one message of the kernel's can carry, small ones, and none
        record[f"v{number}"] = raw(VECTOR[number : 2 * number + 5000])
    record["small"], record["empty"], record["large"] = raw(VECTOR[:10]), raw(VECTOR[:0]), raw(VECTOR)
    replies = ask(grid, "double", RecordDict({"model": record}))
    assert len(replies) == 4
    for reply in replies:
        arrays = cast(ArrayRecord, reply.content["model"])
        assert list(arrays) == list(record)
        for name, array in arrays.items():
            assert array.shape == record[name].shape
            expected = np.frombuffer(record[name].data, np.float32) * reply.metadata.src_node_id
            assert np.array_equal(np.frombuffer(array.data, np.float32), expected)


def test_different_vectors_of_one_push_are_not_confused(open_grid: Open) -> None:
    grid = open_grid(8)
    messages = [Message(model(VECTOR + node), node, "query.double") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(messages):
        node = reply.metadata.src_node_id
        array = cast(ArrayRecord, reply.content["model"])["vector"]
        assert np.array_equal(np.frombuffer(array.data, np.float32), (VECTOR + node) * node)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_segment_is_written_again_only_when_nobody_reads_it(open_grid: Open) -> None:
    def segments() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "cloister-vector" in line}

    grid = open_grid(2, workers=1)
    kept: list[tuple[float, Message]] = []
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        kept += [(factor, reply) for reply in ask(grid, "double", model(VECTOR * np.float32(factor)))]
    for factor, reply in kept:
        array = cast(ArrayRecord, reply.content["model"])["vector"]
        expected = VECTOR * np.float32(factor) * reply.metadata.src_node_id
        assert np.array_equal(np.frombuffer(array.data, np.float32), expected)
    assert len(segments()) == len(kept)
    del kept, reply, array
    used: set[str] = set()
    for _ in range(5):
        messages = [Message(model(), node, "query.double") for node in (1, 2)]
        for reply in grid.send_and_receive(messages):
            assert reply.has_content()
            used |= segments()
        del reply
    assert len(used) <= 4  # one that is read, one that is written, and what waits


def test_push_and_pull(open_grid: Open) -> None:
    grid = open_grid(3)
    ids = grid.push_messages([Message(RecordDict(), node, "query.who") for node in (1, 2, 3)])
    assert len(set(ids)) == 3
    replies: list[Message] = []
    while len(replies) < 3:
        replies += grid.pull_messages(ids)
    assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids)
    assert grid.pull_messages(ids) == []


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


def test_deadline_kills_stragglers_and_keeps_what_was_answered(open_grid: Open, events: Events) -> None:
    grid = open_grid(2)
    warm(grid)
    replies = ask(grid, "hang_some", timeout=2)
    _, straggler = events.next()
    assert ended(straggler)
    assert [said(reply)["node"] for reply in replies] == [2]
    assert len(ask(grid, "who")) == 2


def test_deadline_drops_what_was_not_begun(open_grid: Open, events: Events) -> None:
    grid = open_grid(6)
    warm(grid)
    assert ask(grid, "hang", timeout=1) == []
    assert all(ended(events.next()[1]) for _ in range(2))
    events._socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        events.next()


def test_ttl_is_a_deadline_of_its_own(open_grid: Open, events: Events) -> None:
    grid = open_grid(2, workers=1)
    ask(grid, "who")
    replies = ask(grid, "hang", ttl=1)
    assert {reply.error.code for reply in replies} == {
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    }
    assert ended(events.next()[1])


def test_what_a_site_started_ends_with_it(open_grid: Open, events: Events, tmp_path: Path) -> None:
    replies = open_grid(1).send_and_receive([Message(RecordDict(), 1, "query.family")])
    killer = threading.Thread(target=lambda: os.kill(events.next()[1], signal.SIGKILL))
    killer.start()
    (reply,) = replies
    killer.join()
    assert reply.has_error()
    assert ended(int((tmp_path / "child").read_text()))


def test_slots_are_respected(open_grid: Open) -> None:
    working: set[int] = set()
    together: list[set[int]] = []

    def watch(node: int, begins: bool) -> None:
        working.add(node) if begins else working.remove(node)
        together.append(set(working))

    grid = open_grid(8, workers=3, slots=[1, 1, 1, 1, 2, 2, 3, 9], watch=watch)
    for _ in range(5):
        assert len(ask(grid, "who")) == 8
    assert not working
    taken = [1, 1, 1, 1, 2, 2, 3, 3]
    assert max(sum(taken[node - 1] for node in nodes) for nodes in together) == 3


def test_a_site_never_runs_twice_at_once(open_grid: Open) -> None:
    grid = open_grid(1)
    replies = list(grid.send_and_receive([Message(RecordDict(), 1, "query.who") for _ in range(6)]))
    assert sorted(said(reply)["count"] for reply in replies) == [1, 2, 3, 4, 5, 6]


def test_replies_are_not_collected_ahead_of_the_caller(open_grid: Open) -> None:
    begun = 0

    def watch(node: int, begins: bool) -> None:
        nonlocal begun
        begun += begins

    grid = open_grid(20, watch=watch)
    for taken, _ in enumerate(
        grid.send_and_receive([Message(model(), n, "query.double") for n in range(1, 21)]), 1
    ):
        assert begun <= taken + 2


def test_abandoned_iterator_leaves_the_grid_usable(open_grid: Open, events: Events) -> None:
    grid = open_grid(6)
    for _ in range(3):
        messages = [Message(model(), node, "query.hang_some") for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(messages):
            assert said(reply)["node"] % 2 == 0
            break
    assert len(ask(grid, "who")) == 6


def test_unknown_site_is_refused_before_anything_is_sent(open_grid: Open) -> None:
    grid = open_grid(2)
    with pytest.raises(ValueError, match="dst_node_id is 3: expected a site from 1 to 2"):
        grid.push_messages([Message(RecordDict(), node, "query.who") for node in (1, 3)])
    assert {said(reply)["count"] for reply in ask(grid, "who")} == {1}


@pytest.mark.parametrize("error", [ValueError("no weights"), ImportError("no module")])
def test_client_app_that_cannot_be_made_is_refused(open_grid: Open, apps: Any, error: Exception) -> None:
    grid = open_grid(2, make=partial(apps.make_no_app, error))
    with pytest.raises(
        EngineError, match=f"client app: expected .* not {type(error).__name__}: {error}; see .*log"
    ):
        ask(grid, "who")


def test_worker_that_dies_at_every_start_is_refused(open_grid: Open, apps: Any) -> None:
    grid = open_grid(2, make=apps.make_dying_app)
    with pytest.raises(EngineError, match="one that starts, but it was killed by SIGKILL"):
        ask(grid, "who")


def test_close_may_be_repeated_and_ends_everything(open_grid: Open) -> None:
    grid = open_grid(2)
    pids = {said(reply)["pid"] for reply in ask(grid, "who")}
    grid.close()
    grid.close()
    assert all(ended(pid) for pid in pids)
    with pytest.raises(EngineError, match="closed"):
        ask(grid, "who")


def test_nothing_is_left_open_over_many_rounds(open_grid: Open) -> None:
    grid = open_grid(4)

    def open_files() -> dict[int, int]:
        """Of each worker and of this process."""
        counts: dict[int, int] = {}
        while len(counts) < 2:
            counts |= {said(reply)["pid"]: said(reply)["files"] for reply in ask(grid, "who")}
        return counts | {os.getpid(): len(os.listdir("/dev/fd"))}

    before = open_files()
    for _ in range(200):
        ask(grid, "double", model(VECTOR[:10_000]))
    ask(grid, "who")  # tells the workers that nobody reads their segments any more
    after = open_files()
    assert after.keys() == before.keys()
    spare = {pid: 0 if pid == os.getpid() else 2 for pid in before}
    assert all(before[pid] <= after[pid] <= before[pid] + spare[pid] for pid in before)
    for _ in range(5):  # replaced workers, dropped messages
        ask(grid, "exit", model())
        ask(grid, "double", model(), timeout=0)
    assert open_files()[os.getpid()] == before[os.getpid()]


COORDINATOR = """
from functools import partial
from pathlib import Path
from flwr.app import Message, RecordDict
from cloister.simulations.grid import LocalGrid
from test_grid import make_app, model
grid = LocalGrid(partial(make_app, Path({folder!r})), [{{"partition-id": 0}}] * 4, workers=[{{}}, {{}}])
messages = [Message(model(), node, "query.{action}") for node in grid.get_node_ids()]
{then}
"""


@pytest.mark.parametrize("action", ["hang", "family"])
def test_workers_end_when_the_coordinator_is_killed(tmp_path: Path, events: Events, action: str) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    code = COORDINATOR.format(
        folder=str(tmp_path), action=action, then="list(grid.send_and_receive(messages))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as coordinator:
        pids = [events.next()[1] for _ in range(2)]
        coordinator.kill()
    if action == "family":
        pids.append(int((tmp_path / "child").read_text()))
    assert all(ended(pid) for pid in pids)
    if before:
        assert set(os.listdir("/dev/shm")) <= before


def test_ctrl_c_ends_the_coordinator_and_its_workers(tmp_path: Path, events: Events) -> None:
    code = COORDINATOR.format(
        folder=str(tmp_path), action="hang", then="with grid:\n    list(grid.send_and_receive(messages))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as coordinator:
        pids = [events.next()[1] for _ in range(2)]
        os.killpg(coordinator.pid, signal.SIGINT)  # as a terminal does
        assert coordinator.communicate(timeout=60)[1].splitlines()[-1] == b"KeyboardInterrupt"
    assert all(ended(pid) for pid in pids)


def test_coordinator_that_forgets_to_close_still_exits(tmp_path: Path, events: Events) -> None:
    code = COORDINATOR.format(
        folder=str(tmp_path), action="hang", then="grid.push_messages(messages)\ngrid.pull_messages([])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=60, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")
