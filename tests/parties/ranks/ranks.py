"""What the ranks of a mesh return for a piece of work, for tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch._dynamo  # noqa: F401  # defines a kind of unpickler, which cannot be defined while `no_pickles` is open
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from cloister.clients.ranks.peers import connections
from cloister.clients.ranks.rank import Place
from cloister.clients.ranks.ranks import Ranks
from cloister.lm.parallel.mesh import Mesh
from cloister.tests.parties.ranks.rank_work import refused

TIMEOUT_S = 120

Work = Callable[[DeviceMesh], Any]


def run_ranks(mesh: Mesh, work: Work, *, processes: int | None = None) -> list[Any]:
    """Run `work(ranks)` in every rank of a mesh; return the results, in the order of the ranks.

    Nothing that a rank gets from another is unpickled, and no connection is made after those that were checked.

    Args:
        mesh: The mesh.
        work: Picklable.
        processes: Number of processes, if not that of the mesh.
    """
    with Ranks[Work, Any](_begin, mesh, ["cpu"] * (processes or mesh.size)) as ranks:
        return ranks.call(work, timeout_s=TIMEOUT_S)


def _begin(place: Place) -> Callable[[Work], Any]:
    checked = set(connections())

    def guarded(work: Work) -> Any:
        with no_pickles():
            result = work(place.ranks)
        assert set(connections()) == checked, "a process group was made after the check of the connections"
        return result

    return guarded


@contextmanager
def no_pickles() -> Iterator[None]:
    """A context in which everything raises that unpickles bytes."""
    with (
        mock.patch.multiple(pickle, load=refused, loads=refused, Unpickler=refused),
        mock.patch.object(distributed_c10d, "_unpickler", refused),
    ):
        yield
