"""Ranks of a mesh as processes, connected by gloo, for tests.

They are forked from pytest's fork server, which has imported torch and transformers once, and run with one thread each.
Every wait has a timeout, and an exception in a rank is raised in the test with the rank's traceback.
"""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cloister.lm.mesh import Mesh, build
from cloister.protocol.soundness import parse
from cloister.simulations import fork_server

TIMEOUT_S = 60


class RankError(Exception):
    """A rank raised; the text is its traceback."""


def run_ranks(
    mesh: Mesh, folder: Path, work: Callable[..., Any], *arguments: Any, processes: int | None = None
) -> list[Any]:
    """Run `work(ranks, *arguments)` in every rank of a mesh; return the results, in the order of the ranks.

    Args:
        mesh: The mesh.
        folder: An existing folder for the ranks' meeting point.
        work: A function of a module; it and its arguments are pickled.
        processes: Number of processes, if not that of the mesh.
    """
    context = multiprocessing.get_context("forkserver")
    fork_server.start(parse("model.adapter.scheme = 'ffa-lora'"))  # it serves the grids of later tests too
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    size = mesh.size if processes is None else processes
    started, pipes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(mesh, rank, size, meeting, there, work, arguments), daemon=True
        )
        process.start()
        there.close()
        started.append(process)
        pipes.append(here)
    try:
        return _results(pipes)
    finally:
        for process in started:
            process.kill()
            process.join(10)


def _results(pipes: list[Connection]) -> list[Any]:
    found: dict[int, Any] = {}
    while waiting := {rank: pipe for rank, pipe in enumerate(pipes) if rank not in found}:
        ready = wait(list(waiting.values()), TIMEOUT_S)
        if not ready:
            raise RankError(f"ranks {sorted(waiting)} have not answered in {TIMEOUT_S} s")
        for rank, pipe in waiting.items():
            if pipe in ready:
                found[rank] = _answer(rank, pipe)
    return [found[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        failed, answer = pipe.recv()
    except EOFError:
        failed, answer = True, "it ended without an answer"
    if failed:
        raise RankError(f"rank {rank}: {answer}")
    return answer


def _rank(
    mesh: Mesh,
    rank: int,
    size: int,
    meeting: Path,
    pipe: Connection,
    work: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        ranks: DeviceMesh = build(mesh, "cpu")
        pipe.send((False, work(ranks, *arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    finally:
        pipe.close()
