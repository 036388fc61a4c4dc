"""Vectors in shared memory: intact in both directions, one copy for all sites, reused safely, nothing left open."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from cloister.simulations.engines.grid import LocalGrid
from cloister.simulations.engines.segments import Channel, LentSegments, PushSegments
from cloister.tests.parties.grid_sites import (
    VECTOR,
    Open,
    ask,
    model,
    opener,
    raw,
    said,
)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGrid]:
    """Eight sites on two workers."""
    with opener(tmp_path_factory.mktemp("grid")) as open_grid:
        yield open_grid(8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_sites_map_one_read_only_segment(grid: LocalGrid) -> None:
    replies = ask(grid, "segment", model())
    assert len({said(reply)["inode"] for reply in replies}) == 1
    assert {said(reply)["total"] for reply in replies} == {VECTOR.sum(dtype=np.float64)}


def test_vectors_arrive_intact_both_ways(grid: LocalGrid) -> None:
    record = ArrayRecord()
    for number in range(
        300
    ):  # more segments than one message of the kernel's can carry, small ones, and none
        record[f"v{number}"] = raw(VECTOR[number : 2 * number + 5000])
    record["small"], record["empty"], record["large"] = raw(VECTOR[:10]), raw(VECTOR[:0]), raw(VECTOR)
    replies = ask(grid, "double", RecordDict({"model": record}))
    assert len(replies) == 8
    for reply in replies:
        arrays = cast(ArrayRecord, reply.content["model"])
        assert list(arrays) == list(record)
        for name, array in arrays.items():
            assert array.shape == record[name].shape
            expected = np.frombuffer(record[name].data, np.float32) * reply.metadata.src_node_id
            assert np.array_equal(np.frombuffer(array.data, np.float32), expected)


def test_different_vectors_of_one_push_are_not_confused(grid: LocalGrid) -> None:
    messages = [Message(model(VECTOR + node), node, "query.double") for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(messages):
        node = reply.metadata.src_node_id
        array = cast(ArrayRecord, reply.content["model"])["vector"]
        assert np.array_equal(np.frombuffer(array.data, np.float32), (VECTOR + node) * node)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_segment_is_reused_only_after_it_is_unmapped(open_grid: Open) -> None:
    def segments() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "cloister-vector" in line}

    before, grid = segments(), open_grid(2, workers=1)
    kept: list[tuple[float, Message]] = []
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        kept += [(factor, reply) for reply in ask(grid, "double", model(VECTOR * np.float32(factor)))]
    for factor, reply in kept:
        array = cast(ArrayRecord, reply.content["model"])["vector"]
        expected = VECTOR * np.float32(factor) * reply.metadata.src_node_id
        assert np.array_equal(np.frombuffer(array.data, np.float32), expected)
    assert len(segments() - before) == len(kept)
    del kept, reply, array
    used: set[str] = set()
    for _ in range(5):
        messages = [Message(model(), node, "query.double") for node in (1, 2)]
        for reply in grid.send_and_receive(messages):
            assert reply.has_content()
            used |= segments() - before
        del reply
    assert len(used) <= 4  # one that is read, one that is written, and the spare ones


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_segment_of_a_large_vector_is_freed_when_it_was_read() -> None:
    def segments() -> set[int]:
        links = {
            int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()
        }
        return {descriptor for descriptor, target in links.items() if "cloister-vector" in target}

    lent, before = LentSegments(), segments()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Channel(ours), Channel(theirs, borrows=True)
        for size, kept in ((2**22, 1), (2**22 + 1, 1)):  # the first one is reused
            vector = np.full(size, 7, np.float32)
            sender.put(raw(vector), lent)
            received = receiver.receive()
            assert np.array_equal(np.frombuffer(received.data, np.float32), vector)
            del received
            lent.take_back(receiver.returned())
            assert len(segments() - before) == kept
    del lent
    assert segments() == before


def test_nothing_is_left_open_over_many_rounds(open_grid: Open) -> None:
    grid = open_grid(4)

    def open_files() -> dict[int, int]:
        """Of each worker and of this process."""
        counts: dict[int, int] = {}
        while len(counts) < 2:
            counts |= {said(reply)["pid"]: said(reply)["files"] for reply in ask(grid, "who")}
        return counts | {os.getpid(): len(os.listdir("/dev/fd"))}

    before = open_files()
    for _ in range(50):
        ask(grid, "double", model(VECTOR[:10_000]))
    ask(grid, "who")  # returns the segments of the last replies to the workers
    after = open_files()
    assert after.keys() == before.keys()
    spare = {pid: 0 if pid == os.getpid() else 2 for pid in before}
    assert all(before[pid] <= after[pid] <= before[pid] + spare[pid] for pid in before)
    for _ in range(5):  # replaced workers, dropped messages
        ask(grid, "exit", model())
        ask(grid, "double", model(), timeout=0)
    assert open_files()[os.getpid()] == before[os.getpid()]


def test_value_that_cannot_be_pickled_sends_nothing_and_leaves_nothing_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/dev/fd"))
        with pytest.raises((AttributeError, pickle.PicklingError)):
            Channel(ours).put([raw(VECTOR), lambda: None], PushSegments())
        assert len(os.listdir("/dev/fd")) == before
        Channel(ours).put(raw(VECTOR), PushSegments(), timeout_s=10)
        array = Channel(theirs).receive(timeout_s=10)
        assert np.array_equal(np.frombuffer(array.data, np.float32), VECTOR)
        assert len(os.listdir("/dev/fd")) == before + 1  # mmap duplicates the descriptor
        del array
        assert len(os.listdir("/dev/fd")) == before
