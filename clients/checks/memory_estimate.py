"""Memory estimate: what each rank of a site will hold of a plan's model and update, without memory and devices.

The model is divided by the program that divides it in a real rank (`lm/parallel/parallelize.py`), on tensors without
memory and with torch's fake process group, in which this process takes the place of one rank after the other. Ranks
that lie between two with equal sizes have those sizes too: along a dimension of a mesh, sizes do not rise again after
they have fallen. So a mesh of 64 ranks is built a few times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cloister.aggregation.sums import Sums
from cloister.lm.model import frozen
from cloister.lm.model.model import outline
from cloister.lm.model.schedule import LOOKED_AT, Schedule
from cloister.lm.parallel.mesh import SUM_BYTES, WEIGHT_BYTES, Coordinates, Mesh, build
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.parallel.shards import gathered_at_once
from cloister.lm.training.optimizer import moment_elements
from cloister.protocol.messages.blocks import Span, tile
from cloister.protocol.plan.plan import Plan

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """What a rank has of the model while it trains, in bytes but for the number of parameters; without activations."""

    parameters: int
    """Elements of its parts of the parameters, frozen ones included."""
    weights: int
    gradients: int
    """Of a round's trained parameters."""
    moments: int
    """The optimizer's."""
    sums: int
    """The sum of the clipped gradients of single units, and its release with noise."""
    gathered: int
    """The largest group of weights that it gathers from other ranks at a time."""


@dataclass(frozen=True)
class RankMemory:
    """What a rank has."""

    part: Part
    span: Span
    """Its elements of the update."""
    update: int
    """Bytes of the span, in float32."""
    coded: int
    """Bytes of the span as ring integers."""

    def needed(self, device: str) -> int:
        """Bytes that a device needs for it, without activations; the update is in the CPU's memory.

        Gradients are dropped before the update is taken, and the optimizer's moments after it.
        """
        part = self.part
        released = self.update + self.coded if device == "cpu" else 0
        return part.weights + part.moments + max(part.gradients + part.sums + part.gathered, released)


def estimated_memory(plan: Plan, mesh: Mesh) -> list[RankMemory]:
    """What each rank of a mesh will hold, in their order; of a mesh of one rank, what one process will hold.

    Args:
        plan: The plan.
        mesh: The mesh, checked (`device_mesh.mesh_for`).

    Raises:
        ModelError: the model does not fit the plan or the mesh.
    """
    ranks = {mesh.coordinates(rank): rank for rank in range(mesh.size)}
    layout = outline(plan).layout

    def part(at: tuple[int, ...]) -> Part:
        place = Coordinates(*at)
        if mesh.size == 1:
            return _part(plan, mesh, place, None)
        with _in_place_of(ranks[place], mesh) as connected:
            return _part(plan, mesh, place, connected)

    parts = dict(_over([getattr(mesh, name) for name in Coordinates._fields], part))
    coded = Sums(plan, layout.size).training
    element, sent = np.dtype(coded.ring.dtype).itemsize, tile(coded.size, mesh.size)
    return [
        RankMemory(parts[mesh.coordinates(rank)], span, WEIGHT_BYTES * span.size, element * sent[rank].size)
        for rank, span in enumerate(tile(layout.size, mesh.size))
    ]


def _part(plan: Plan, mesh: Mesh, at: Coordinates, ranks: DeviceMesh | None) -> Part:
    """What this process has of the model."""
    model = outline(plan)
    bytes_of = frozen.element_bytes(model.module, plan.model.adapter.base_precision)
    parts = Schedule.of(plan, model.layout).layouts(min(plan.run.rounds, LOOKED_AT))
    names = [set(part.names) for part in parts]
    model.trainable()
    parallelize(model, ranks, torch.device("meta"), sum_replicas=not plan.privacy.dpsgd)
    own = {name: nn.Parameter(_local(each)) for name, each in model.module.named_parameters()}
    sizes = {name: each.numel() for name, each in own.items()}
    trained = [[(name, own[name]) for name in own if name in chosen] for chosen in names]
    laid_out = sum(sizes[name] for name in model.layout.names) if plan.privacy.dpsgd else 0
    return Part(
        parameters=sum(sizes.values()),
        weights=round(sum(bytes_of[name] * size for name, size in sizes.items())),
        gradients=WEIGHT_BYTES * max(sum(each.numel() for _, each in named) for named in trained),
        moments=WEIGHT_BYTES * max(moment_elements(plan, model.module, named) for named in trained),
        sums=SUM_BYTES * laid_out,
        gathered=WEIGHT_BYTES * gathered_at_once(model.module, mesh, at),
    )


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a parameter."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def _in_place_of(rank: int, mesh: Mesh) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, whose peers do not exist: collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=mesh.size)
    try:
        yield build(mesh, "cpu")
    finally:
        dist.destroy_process_group()


def _over(
    degrees: Sequence[int], part: Callable[[tuple[int, ...]], Part]
) -> Iterator[tuple[tuple[int, ...], Part]]:
    """Every place of a mesh with what its rank has; `part` is called for few of them."""

    def along(prefix: tuple[int, ...], rest: Sequence[int]) -> Any:
        """Nested tuples of what the ranks have whose places begin with `prefix`."""
        if not rest:
            return part(prefix)
        return tuple(_filled(rest[0], lambda index: along((*prefix, index), rest[1:])))

    def flat(found: Any, prefix: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Part]]:
        if len(prefix) == len(degrees):
            yield prefix, found
        else:
            for index, each in enumerate(found):
                yield from flat(each, (*prefix, index))

    return flat(along((), degrees), ())


def _filled(count: int, of: Callable[[int], _T]) -> list[_T]:
    """[of(0), ..., of(count - 1)], where values between two equal ones are equal to them and are not computed."""
    found = {index: of(index) for index in {0, count - 1}}

    def fill(low: int, high: int) -> None:
        middle = (low + high) // 2
        if middle == low:
            return
        if found[low] == found[high]:
            found.update(dict.fromkeys(range(low + 1, high), found[low]))
            return
        found[middle] = of(middle)
        fill(low, middle)
        fill(middle, high)

    fill(0, count - 1)
    return [found[index] for index in range(count)]
