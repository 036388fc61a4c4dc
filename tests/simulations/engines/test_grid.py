"""LocalGrid as a scheduler: every site answers once, on its own worker, within its slots and its deadlines."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode

from cloister.simulations.engines.grid import LocalGrid
from cloister.tests.parties.grid_sites import (
    Events,
    Open,
    ask,
    ended,
    model,
    said,
    warm,
)
from cloister.tests.tools.raises import raises


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


def test_sites_that_are_asked_again_and_again_keep_no_other_waiting(open_grid: Open) -> None:
    grid = open_grid(4, workers=1)
    coming = [[query(node) for node in range(1, 5)]]
    answered = []
    for reply in stream(grid, coming):
        answered.append(reply.metadata.src_node_id)
        if len(answered) <= 4:
            coming.append([query(reply.metadata.src_node_id)])
    assert answered == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_site_that_needs_both_workers_has_its_turn_among_others_that_are_asked_again(
    open_grid: Open,
) -> None:
    grid = open_grid(3, workers=2, slots=[1, 1, 2])
    coming = [[query(node) for node in (1, 2, 3)]]
    answered: list[int] = []
    for reply in stream(grid, coming):
        answered.append(reply.metadata.src_node_id)
        if len(answered) < 12 and answered[-1] != 3:
            coming.append([query(answered[-1])])
    assert 3 in answered[:5]


def stream(grid: LocalGrid, coming: list[list[Message]]) -> Iterator[Message]:
    """Push what comes, now and before each wait, and yield each reply."""
    waiting: dict[str, None] = {}
    while True:
        waiting |= dict.fromkeys(grid.push_messages(coming.pop() if coming else []))
        if not waiting:
            return
        grid.wait()
        for reply in grid.pull_messages(waiting):
            del waiting[reply.metadata.reply_to_message_id]
            yield reply


def query(node: int) -> Message:
    return Message(RecordDict(), node, "query.who")


def test_push_and_pull(open_grid: Open) -> None:
    grid = open_grid(3)
    ids = grid.push_messages([Message(RecordDict(), node, "query.who") for node in (1, 2, 3)])
    assert len(set(ids)) == 3
    replies: list[Message] = []
    while len(replies) < 3:
        replies += grid.pull_messages(ids)
    assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids)
    assert grid.pull_messages(ids) == []


def test_deadline_kills_stragglers_and_keeps_what_was_answered(open_grid: Open, events: Events) -> None:
    grid = open_grid(2)
    warm(grid)
    replies = ask(grid, "hang_some", timeout=1)
    _, straggler = events.next()
    assert ended(straggler)
    assert [said(reply)["node"] for reply in replies] == [2]
    assert len(ask(grid, "who")) == 2


@pytest.mark.slow
def test_deadline_drops_what_was_not_begun(open_grid: Open, events: Events) -> None:
    grid = open_grid(6)
    warm(grid)
    assert ask(grid, "hang", timeout=1) == []
    assert all(ended(events.next()[1]) for _ in range(2))
    assert events.empty()


@pytest.mark.slow
def test_ttl_is_a_deadline_of_its_own(open_grid: Open, events: Events) -> None:
    grid = open_grid(2, workers=1)
    ask(grid, "who")
    replies = ask(grid, "hang", ttl=1)
    assert {reply.error.code for reply in replies} == {
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    }
    assert ended(events.next()[1])


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
    for _ in range(2):
        messages = [Message(model(), node, "query.hang_some") for node in grid.get_node_ids()]
        for reply in grid.send_and_receive(messages):
            assert said(reply)["node"] % 2 == 0
            break
    assert len(ask(grid, "who")) == 6


def test_unknown_site_is_refused_before_anything_is_sent(open_grid: Open) -> None:
    grid = open_grid(2)
    with raises(ValueError, "dst_node_id", says="1 to 2"):
        grid.push_messages([Message(RecordDict(), node, "query.who") for node in (1, 3)])
    assert {said(reply)["count"] for reply in ask(grid, "who")} == {1}
