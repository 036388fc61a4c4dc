"""Ranks and another user of their machine, who cannot take the place of one; what travels between ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cloister.clients.ranks import peers
from cloister.clients.ranks.peers import Connection, check, connections
from cloister.lm.parallel.mesh import Mesh
from cloister.protocol.errors import RankError
from cloister.tests.parties.grid_sites import Events
from cloister.tests.parties.ranks.rank_work import SECRET, TWO, opened
from cloister.tests.parties.ranks.ranks import run_ranks
from cloister.tests.parties.strangers import FOLDER, USER, Stranger, listening, listens_first, stranger
from cloister.tests.tools.raises import raises

NAMES = ["rank 0", "rank 1", "rank 2"]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    events = Events(tmp_path)
    yield events
    events.close()


@pytest.fixture
def attacked(tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stranger]:
    """At the next start of ranks, a stranger is connected to each of them before its peer is."""
    monkeypatch.setattr("cloister.clients.ranks.rank.main", listens_first)
    monkeypatch.setenv(FOLDER, str(tmp_path))

    with stranger() as found:

        def attack() -> None:
            pids = [events.next()[1] for _ in TWO]
            found.connect(pids)
            monkeypatch.undo()
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)

        attacker = threading.Thread(target=attack)
        attacker.start()
        yield found
        attacker.join()


def test_start_is_refused_where_a_stranger_has_taken_the_place_of_a_rank(
    attacked: Stranger, tmp_path: Path
) -> None:
    with opened(tmp_path) as ranks:
        with pytest.raises(RankError) as caught:
            ranks.call("add_a_secret", timeout_s=60)
        assert re.fullmatch(
            r"rank [01] of 2 on cpu: expected connections with ranks of this site only, but at the far end of one, "
            rf"127\.0\.0\.1:\d+, is a process of user {USER}; this start sent nothing; .*",
            str(caught.value),
        )
        assert attacked.loot() == b""
        assert [answer for answer, _, _ in ranks.call("sum", timeout_s=60)] == [3.0, 3.0]


def test_he_would_get_what_a_rank_sends(attacked: Stranger, tmp_path: Path) -> None:
    """Where the check is taken out."""
    with pytest.MonkeyPatch.context() as patch, opened(tmp_path) as ranks:
        patch.setattr(peers, "check", lambda *_: None)
        with pytest.raises(RankError):  # he ends the connection
            ranks.call("add_a_secret", timeout_s=60)
    assert set(np.frombuffer(attacked.loot(), np.float32)) == {SECRET}


def test_stranger_who_comes_later_gets_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ranks, stranger() as late:
        pids = [pid for _, _, pid in ranks.call("place", timeout_s=60)]
        late.connect(pids)
        for _ in range(2):
            assert ranks.call("add_a_secret", timeout_s=60)[0][0] == 2 * SECRET
        assert late.loot() == b""
        assert [len(listening(pid)) > 0 for pid in pids] == [True, True]


def test_peers_are_connected_before_they_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment says that torch shall connect them later."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with opened(tmp_path) as ranks:
        assert [answer for answer, _, _ in ranks.call("sum", timeout_s=60)] == [3.0, 3.0]


def test_connections_of_every_process_group_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Sequence[Connection]] = []
    monkeypatch.setattr(peers, "check", lambda names, found: checked.extend(found))
    later = run_ranks(Mesh(1, 2, 2), connections_of)
    assert [set(each) for each in checked] == [set(each) for each in later]
    assert [len(each) for each in checked] == [3 + 1 + 1] * 4, (
        "with all, in the shard group, in the tensor group"
    )


def connections_of(_: object) -> list[Connection]:
    return connections()


# The check of what ranks see


def end(port: int) -> tuple[str, int]:
    return "127.0.0.1", port


def joined(here: int, there: int) -> list[list[Connection]]:
    """A connection, as each of its ends sees it."""
    return [[Connection(end(here), end(there))], [Connection(end(there), end(here))]]


def test_three_ranks_that_are_connected_pass() -> None:
    (a, b), (c, d), (e, f) = joined(1, 2), joined(3, 4), joined(5, 6)
    check(NAMES, [a + c, b + e, d + f])
    (g, h), (i, j) = joined(7, 8), joined(9, 10)
    check(NAMES, [a + c + g + i + j, b + e + h, d + f])  # of another group, and of a rank with itself
    check(NAMES[:1], [[]])


def test_rank_without_a_connection_to_a_peer_is_refused() -> None:
    (a, b), (c, d) = joined(1, 2), joined(3, 4)
    with raises(RankError, "rank 1", says="rank 2"):
        check(NAMES, [a + c, b, d])
    with raises(RankError, "rank 0", says="rank 1"):
        check(NAMES[:2], [[], []])


@pytest.mark.parametrize("rank", [0, 1])
def test_connection_that_no_rank_has_the_other_end_of_is_refused(rank: int) -> None:
    found = joined(1, 2)
    found[rank].append(Connection(end(1), end(3)))  # beside the right one, as gloo keeps it
    with raises(RankError, f"rank {rank}", says=("127.0.0.1:3", "has closed it")):
        check(NAMES[:2], found)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_process_sees_its_connections_and_who_has_the_far_end(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    before = set(connections())
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as caller,
    ):
        mine = Connection(caller.getsockname()[:2], caller.getpeername()[:2])
        assert set(connections()) - before == {mine}, "not before it is accepted"
        with server.accept()[0]:
            assert set(connections()) - before == {mine, Connection(mine.there, mine.here)}
            with raises(RankError, "rank 0", says=(f":{mine.there[1]},", f"user {os.getuid()};")):
                check(NAMES[:1], [[mine]])
        assert caller.recv(1) == b"", "and still open"
    assert set(connections()) == before


# What travels between ranks


def test_no_source_has_a_collective_of_objects() -> None:
    """They are pickled, and who unpickles them runs what he is sent."""
    root = Path(peers.__file__).resolve().parents[2]
    sources = [
        path for room in ("clients", "lm", "privacy", "aggregation") for path in (root / room).rglob("*.py")
    ]
    assert len(sources) > 50
    objects = re.compile(r"\b\w+_object(_list)?\(")
    assert [path.name for path in sources if objects.search(path.read_text())] == []
