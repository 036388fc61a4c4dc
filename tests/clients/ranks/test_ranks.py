"""The ranks of a site: collectives, one error for the failure of any, and no process that outlives its site.

The work of these tests is told what to do by one command for each rank, such as `sum`, `die`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from cloister.clients.ranks import ranks as ranks_module
from cloister.clients.ranks.ranks import Ranks
from cloister.protocol.errors import DataError, RankError
from cloister.protocol.machine import fork_server
from cloister.protocol.machine.segments import SharedVector
from cloister.simulations.engines.grid import LocalGrid
from cloister.tests.parties.grid_sites import Events, said
from cloister.tests.parties.grid_sites import ended as ended_pid
from cloister.tests.parties.ranks.rank_work import (
    TWO,
    Unreadable,
    dies_at_start,
    forgetful_site,
    hanging_site,
    never_connect,
    opened,
    site_app,
)
from cloister.tests.parties.strangers import listening
from cloister.tests.tools.kills import ended
from cloister.tests.tools.raises import raises


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def events(folder: Path) -> Iterator[Events]:
    events = Events(folder)
    yield events
    events.close()


@pytest.fixture(scope="module")
def ranks(folder: Path, events: Events) -> Iterator[Ranks[Any, Any]]:
    """Two ranks for all tests: after an error they start again at the next command."""
    with opened(folder) as ranks:
        yield ranks


def pids(ranks: Ranks[Any, Any]) -> list[int]:
    return [pid for _, _, pid in ranks.call("place", timeout_s=60)]


def watched(ranks: Ranks[Any, Any]) -> list[int]:
    """Descriptors of the ranks' processes."""
    return [os.pidfd_open(pid) for pid in pids(ranks)]


def fails(ranks: Ranks[Any, Any], *commands: Any) -> RankError:
    """The error of a call that must fail soon and leave no process, after which the next call works."""
    processes, begun = watched(ranks), time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.call(*commands, timeout_s=60)
    assert time.monotonic() - begun < 10
    assert all(map(ended, processes))
    assert [answer for answer, _, _ in ranks.call("sum", timeout_s=60)] == [3.0, 3.0]
    return caught.value


@contextmanager
def killed_when_all_have_begun(events: Events, rank: int) -> Iterator[None]:
    """Kill a rank of two as soon as both have told that they have begun."""

    def kill() -> None:
        begun = dict([events.next(), events.next()])
        os.kill(begun[rank], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def test_ranks_answer_together_in_order_and_keep_their_state(ranks: Ranks[Any, Any]) -> None:
    first, second = ranks.call("sum", timeout_s=60), ranks.call("sum", timeout_s=60)
    assert [answer for answer, _, _ in first + second] == [3.0] * 4
    assert [count for _, count, _ in second] == [count + 1 for _, count, _ in first]
    assert [pid for _, _, pid in second] == [pid for _, _, pid in first]
    assert [answer[0] for answer, _, _ in ranks.call("place")] == [0, 1]
    assert [answer for answer, _, _ in ranks.call("nothing", "place")] == [None, (1, 2, "cpu", 1, "")]


def test_commands_are_one_or_one_for_each_rank(ranks: Ranks[Any, Any], folder: Path) -> None:
    before = pids(ranks)
    with raises(ValueError, "commands", says="2 ranks"):
        ranks.call("sum", "sum", "sum")
    with pytest.raises(TypeError, match="pickle"):
        ranks.call("sum", threading.Lock())
    assert pids(ranks) == before
    with raises(ValueError, "devices"):
        opened(folder, [])


def test_place_and_process_are_as_the_site_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder, ["cpu"], threads=3) as ranks:
        monkeypatch.setenv("CLOISTER_TEST", "of this process")  # not of the fork server, which runs already
        ((answer, _, _),) = ranks.call("place", timeout_s=60)
    assert answer == (0, 1, "cpu", 3, "of this process")


def test_rank_killed_while_idle_is_named(ranks: Ranks[Any, Any]) -> None:
    processes = watched(ranks)
    signal.pidfd_send_signal(processes[1], signal.SIGKILL)
    with raises(RankError, "rank 1 of 2 on cpu", says=("an answer", "SIGKILL")):
        ranks.call("sum", timeout_s=60)
    assert all(map(ended, processes))
    assert ranks.call("sum", timeout_s=60)[0][1] == 1  # the factory was called again


@pytest.mark.parametrize(
    ("commands", "error"),
    [
        (("sum", "die"), "rank 1 of 2 on cpu: expected an answer, but it was killed by SIGKILL; see"),
        (
            ("sum", "fork_and_die"),
            "rank 1 of 2 on cpu: expected an answer, but it was killed by SIGKILL; see",
        ),
        (("leave", "sum"), "rank 0 of 2 on cpu: expected an answer, but it exited with status 7; see"),
        (("sum", "cannot_be_pickled"), "rank 1 of 2 on cpu: expected an answer, but it raised site.data is "),
        (("sum", Unreadable()), "rank 1 of 2 on cpu: expected an answer, but it raised UnpicklingError: Val"),
        (
            ("answers_a_lock", "sum"),
            "rank 0 of 2 on cpu: expected an answer, but it raised TypeError: cannot",
        ),
    ],
)
def test_rank_that_fails_while_its_peer_waits_in_a_collective_is_named(
    ranks: Ranks[Any, Any], commands: tuple[Any, Any], error: str
) -> None:
    assert str(fails(ranks, *commands)).startswith(error)


def test_rank_killed_in_a_collective_is_named(ranks: Ranks[Any, Any], events: Events) -> None:
    with killed_when_all_have_begun(events, 0):
        error = fails(ranks, "tell_and_sum", "hang")
    assert str(error).startswith("rank 0 of 2 on cpu: expected an answer, but it was killed by SIGKILL")


def test_rank_that_ended_is_named_and_not_its_peer_whose_error_was_heard_first(
    ranks: Ranks[Any, Any], events: Events
) -> None:
    with killed_when_all_have_begun(events, 1):
        error = fails(ranks, "defect", "hang")
    assert str(error).startswith("rank 1 of 2 on cpu: expected an answer, but it was killed by SIGKILL")


def test_defect_of_a_rank_is_one_line_and_its_traceback_is_in_the_log(
    ranks: Ranks[Any, Any], events: Events, folder: Path
) -> None:
    log = folder / "log"
    before = log.stat().st_size
    error = fails(ranks, "sum", "defect")
    assert str(error) == (
        f"rank 1 of 2 on cpu: expected an answer, but it raised RuntimeError: two lines; see {folder / 'log'}"
    )
    events.next()
    told = log.read_bytes()[before:].decode()  # the other rank may still tell that its peer is gone
    assert "Traceback" in told
    assert "RuntimeError: two\n  lines\n" in told


def test_error_for_a_user_keeps_its_class_and_text(ranks: Ranks[Any, Any]) -> None:
    processes, begun = watched(ranks), time.monotonic()
    with pytest.raises(DataError) as caught:
        ranks.call("sum", "data", timeout_s=60)
    assert time.monotonic() - begun < 10
    assert all(map(ended, processes))
    expected = DataError("site.data", "nowhere", expected="a file")
    assert str(caught.value) == str(expected)
    assert vars(caught.value) == {**vars(expected), "__notes__": ["raised by rank 1 of 2 on cpu"]}


def test_rank_that_hangs_is_late_and_ends_with_what_it_has_started(
    ranks: Ranks[Any, Any], events: Events
) -> None:
    processes = watched(ranks)
    with pytest.raises(RankError) as caught:
        ranks.call("start_another_and_hang", "sum", timeout_s=1)
    late = "rank 0 of 2 on cpu, rank 1 of 2 on cpu: expected an answer within 1 s"
    assert str(caught.value).startswith(late)
    _, child = events.next()
    assert ended_pid(child)
    assert events.next()[0] == 0
    assert all(map(ended, processes))


def test_rank_that_does_not_connect_is_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = set(multiprocessing.active_children())
    monkeypatch.setattr("cloister.clients.ranks.rank.main", never_connect)
    monkeypatch.setattr(ranks_module, "CONNECT_SECONDS", 1.0)
    with opened(folder, ["cpu"]) as ranks:
        with raises(RankError, "rank 0 of 1 on cpu", says=("connects", "within 1 s")):
            ranks.call("sum")
        assert set(multiprocessing.active_children()) == children


def test_rank_killed_before_it_has_answered_is_named_and_all_start_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = set(multiprocessing.active_children())
    with opened(folder) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr("cloister.clients.ranks.rank.main", dies_at_start)
            with raises(RankError, "rank 1 of 2 on cpu", says=("connects", "SIGKILL")):
                ranks.call("sum")
            assert set(multiprocessing.active_children()) == children
        assert [answer for answer, _, _ in ranks.call("sum", timeout_s=60)] == [3.0, 3.0]


def test_call_that_is_interrupted_leaves_no_answer_for_the_next(
    ranks: Ranks[Any, Any], events: Events
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        events.next(), events.next()
        signal.pthread_kill(main, signal.SIGUSR1)

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    processes = watched(ranks)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            ranks.call("hang", "tell_and_sum", timeout_s=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    sender.join()
    assert all(map(ended, processes))
    assert [answer for answer, _, _ in ranks.call("sum", timeout_s=60)] == [3.0, 3.0]


def test_device_that_is_not_there_is_an_error(folder: Path) -> None:
    with (
        opened(folder, ["cpu", "cuda:99"]) as ranks,
        raises(RankError, "rank 1 of 2 on cuda:99", says="connects"),
    ):
        ranks.call("sum", timeout_s=60)


@pytest.mark.parametrize(("fault", "kind"), [("data", DataError), ("die", RankError)])
def test_factory_that_fails_is_an_error_and_leaves_nothing(
    folder: Path, events: Events, fault: str, kind: type[Exception]
) -> None:
    children, files = set(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))
    ranks = opened(folder, fails=fault)
    with pytest.raises(kind):
        ranks.call("sum", timeout_s=60)
    assert ended_pid(events.next()[1])
    assert set(multiprocessing.active_children()) == children
    assert len(os.listdir("/proc/self/fd")) == files


def test_large_vectors_are_shared(ranks: Ranks[Any, Any]) -> None:
    pids(ranks)
    files = len(os.listdir("/proc/self/fd"))
    numbers = np.arange(1_000_003, dtype=np.float32)
    model = SharedVector.of(numbers)
    answers = ranks.call(model, timeout_s=60)
    assert {inode for inode, _, _ in answers} == {os.fstat(model.segment.fd).st_ino}
    assert [writeable for _, writeable, _ in answers] == [False, False]
    spans = [span.array for _, _, span in answers]
    assert [len(span) for span in spans] == [500_002, 500_001]
    np.testing.assert_array_equal(np.concatenate(spans), 2 * numbers)
    with pytest.raises(ValueError, match="read-only"):
        spans[0][0] = 1
    del model, answers, spans
    assert len(os.listdir("/proc/self/fd")) == files
    with raises(TypeError, "a Segment"):
        pickle.dumps(SharedVector(0, np.uint8))


def test_only_this_machine_can_connect_to_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0] if others else "lo")
    with opened(folder) as ranks:
        addresses = [address for pid in pids(ranks) for address, _ in listening(pid)]
    assert len(addresses) >= 2
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


def test_ctrl_c_does_not_reach_ranks(ranks: Ranks[Any, Any], folder: Path) -> None:
    before, log = pids(ranks), (folder / "log").read_bytes()
    for pid in before:
        assert os.getpgid(pid) == pid  # a terminal's Ctrl-C is sent to another group
        os.kill(pid, signal.SIGINT)
    assert pids(ranks) == before
    assert (folder / "log").read_bytes() == log


def test_close_may_be_repeated_and_leaves_nothing(folder: Path) -> None:
    children, files = set(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))
    ranks = opened(folder)
    processes, log = watched(ranks), (folder / "log").read_bytes()
    begun = time.monotonic()
    ranks.close()
    ranks.close()
    assert time.monotonic() - begun < 2
    assert all(map(ended, processes))
    assert set(multiprocessing.active_children()) == children
    assert len(os.listdir("/proc/self/fd")) == files
    assert (folder / "log").read_bytes() == log
    with raises(ValueError, "ranks"):
        ranks.call("sum")


# A site's process of its own.


def site(target: Callable[[Path], None], folder: Path) -> ForkServerProcess:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=(folder,))
    with fork_server.running(["cloister.tests.parties.ranks.rank_work"]):
        process.start()
    return process


def test_ranks_end_when_their_site_is_killed(folder: Path, events: Events) -> None:
    process = site(hanging_site, folder)
    processes = [os.pidfd_open(events.next()[1]) for _ in TWO]
    process.kill()
    assert all(map(ended, processes))
    process.join()
    process.close()


def test_site_that_forgets_to_close_its_ranks_still_exits(folder: Path, events: Events) -> None:
    process = site(forgetful_site, folder)
    process.join(30)
    assert process.exitcode == 0
    process.close()
    assert all(ended_pid(events.next()[1]) for _ in TWO)


def parent(pid: int) -> int:
    """The process that forked this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_of_a_worker_come_from_its_fork_server_and_end_with_it(folder: Path) -> None:
    configs = [{"partition-id": number} for number in range(2)]
    with LocalGrid(partial(site_app, folder), configs, workers=[{}]) as grid:

        def ask() -> dict[str, Any]:
            first, second = (said(reply) for reply in grid.send_and_receive(messages()))
            assert first == second  # one worker's ranks serve all its sites
            assert first["sums"] == [3.0, 3.0]
            return first

        def messages() -> list[Message]:
            return [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]

        found = ask()
        assert {parent(pid) for pid in found["pids"]} == {parent(found["worker"])}
        processes = [os.pidfd_open(pid) for pid in found["pids"]]
        os.kill(found["worker"], signal.SIGKILL)
        assert all(map(ended, processes))
        processes = [os.pidfd_open(pid) for pid in ask()["pids"]]
        begun = time.monotonic()
    assert time.monotonic() - begun < 1.5  # of the 2 s after which the grid kills a worker
    assert all(map(ended, processes))


SITE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from pathlib import Path
from cloister.tests.parties.ranks.rank_work import opened
opened(Path({folder!r})).call("hang", "tell_and_sum")
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_site_and_its_ranks_with_one_traceback(folder: Path, events: Events) -> None:
    """In a process that multiprocessing has not started, as Flower's or Ray's; its fork server ends too."""
    command = [sys.executable, "-c", SITE.format(folder=str(folder))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            ranks = [events.next()[1] for _ in TWO]
            processes = [os.pidfd_open(pid) for pid in {*ranks, *map(parent, ranks)}]
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            told = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    assert len(processes) == 3
    assert all(map(ended, processes))
    assert told.count("Traceback") == 1
    assert told.splitlines()[-1] == "KeyboardInterrupt"
