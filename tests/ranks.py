"""What the ranks of a mesh return for a piece of work, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cloister.clients.rank import Place
from cloister.clients.ranks import Ranks
from cloister.lm.mesh import Mesh, build

TIMEOUT_S = 120

Work = Callable[[DeviceMesh], Any]


def run_ranks(mesh: Mesh, work: Work, *, processes: int | None = None) -> list[Any]:
    """Run `work(ranks)` in every rank of a mesh; return the results, in the order of the ranks.

    Args:
        mesh: The mesh.
        work: Picklable.
        processes: Number of processes, if not that of the mesh.
    """
    with Ranks[Work, Any](partial(_begin, mesh), ["cpu"] * (processes or mesh.size)) as ranks:
        return ranks.call(work, timeout_s=TIMEOUT_S)


def _begin(mesh: Mesh, _place: Place) -> Callable[[Work], Any]:
    ranks = build(mesh, "cpu")
    return lambda work: work(ranks)
