"""Memory estimate: what each rank of a site will hold of a plan's model and update, without memory and devices.

The model is divided by the program that divides it in a real rank (`lm/parallel/parallelize.py`), on tensors without
memory and with torch's fake process group, in which this process takes the place of the first rank. How a parameter is
cut is the same in all ranks, and gives the part of each (`shards.region_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cloister.aggregation.sums import Sums
from cloister.lm.model import frozen
from cloister.lm.model.model import outline
from cloister.lm.model.schedule import LOOKED_AT, Schedule
from cloister.lm.parallel.mesh import SUM_BYTES, WEIGHT_BYTES, Coordinates, Mesh, build
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.parallel.shards import gathered_at_once, region_of
from cloister.lm.training.optimizer import moment_elements
from cloister.protocol.messages.blocks import Span, tile
from cloister.protocol.plan.plan import Plan


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
    model = outline(plan)
    bytes_of = frozen.element_bytes(model.module, plan.model.adapter.base_precision)
    layouts = Schedule.of(plan, model.layout).layouts(min(plan.run.rounds, LOOKED_AT))
    model.trainable()
    with _first_of(mesh) as ranks:
        parallelize(model, ranks, torch.device("meta"), sum_replicas=not plan.privacy.dpsgd)

    def part(at: Coordinates) -> Part:
        parameters = model.module.named_parameters()
        sizes = {name: region_of(parameter, mesh, at).size for name, parameter in parameters}
        trained = [{name: sizes[name] for name in layout.names} for layout in layouts]
        laid_out = sum(sizes[name] for name in model.layout.names) if plan.privacy.dpsgd else 0
        return Part(
            parameters=sum(sizes.values()),
            weights=round(sum(bytes_of[name] * size for name, size in sizes.items())),
            gradients=WEIGHT_BYTES * max(sum(each.values()) for each in trained),
            moments=WEIGHT_BYTES * max(moment_elements(plan, model.module, each) for each in trained),
            sums=SUM_BYTES * laid_out,
            gathered=WEIGHT_BYTES * gathered_at_once(model.module, mesh, at),
        )

    coded = Sums(plan, model.layout.size).training
    element, sent = np.dtype(coded.ring.dtype).itemsize, tile(coded.size, mesh.size)
    return [
        RankMemory(part(mesh.coordinates(rank)), span, WEIGHT_BYTES * span.size, element * sent[rank].size)
        for rank, span in enumerate(tile(model.layout.size, mesh.size))
    ]


@contextmanager
def _first_of(mesh: Mesh) -> Iterator[DeviceMesh | None]:
    """Be the first rank of a mesh, whose peers do not exist: collectives do nothing. None for a mesh of one rank."""
    if mesh.size == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=mesh.size)
    try:
        yield build(mesh, "cpu")
    finally:
        dist.destroy_process_group()
