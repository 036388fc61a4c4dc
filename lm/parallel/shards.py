"""A rank's part of a model's parameters, and its part of the flat vector.

A parameter is a matrix of its first dimension by the rest. Tensor parallelism cuts its rows or its columns, then
sharding cuts the rows of what is left, both as `torch.chunk` does; so a rank has a rectangle of it (`Region`), which
every rank can compute for every other one. From this follow, without asking anyone, the part of the global model that a
rank reads, and which elements which rank sends to which after training, when each rank gets its span of the vector. No
rank ever has more than its own part, its span, and what of one parameter is on the way between the two.

Ranks with equal regions have equal bits: their gradients come out of the same all-reduce. In the norm, a region counts
once. Refused: `DTensor.full_tensor`, which gathers every parameter in every rank; and the optimizer on DTensors, which
checks the placement of each tensor in each operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.weights import Held, Named, Weights, matrix
from cloister.lm.parallel.mesh import Coordinates, Mesh, degrees
from cloister.lm.parallel.parallelize import sharded_modules
from cloister.protocol.messages.blocks import Span, runs, tile


class Region(NamedTuple):
    """A rectangle of a parameter, seen as a matrix."""

    rows: Span
    """Rows of the matrix: indices of the first dimension."""
    columns: Span
    """Columns of the matrix: places in the other dimensions, flattened."""

    @property
    def size(self) -> int:
        """Elements in it."""
        return self.rows.size * self.columns.size

    def within(self, other: Region | Held) -> tuple[slice, slice]:
        """Where it lies in another region that contains it."""
        return (
            slice(self.rows.start - other.rows.start, self.rows.stop - other.rows.start),
            slice(self.columns.start - other.columns.start, self.columns.stop - other.columns.start),
        )


class Cuts(NamedTuple):
    """How the ranks divide a parameter."""

    tensor: int = -1
    """The dimension that tensor parallelism cuts, 0 or 1 of a matrix; -1 if it does not."""
    shard: int = -1
    """The same for sharding."""


BUCKET = 2**22
"""Elements of small gradients that are sent together."""


def region(shape: Sequence[int], cuts: Cuts, mesh: Mesh, at: Coordinates) -> Region:
    """What a rank has of a parameter.

    Args:
        shape: Shape of the unsharded parameter.
        cuts: How it is cut.
        mesh: The mesh.
        at: The rank's place in it.
    """
    sides = [Span(0, size) for size in matrix(shape)]
    for dimension, parts, part in ((cuts.tensor, mesh.tensor, at.tensor), (cuts.shard, mesh.shard, at.shard)):
        if dimension < 0:
            continue
        if dimension and len(shape) != 2:
            raise AssertionError(f"dimension {dimension} of a parameter of shape {tuple(shape)} is cut")
        sides[dimension] = _chunk(sides[dimension], parts, part)
    return Region(*sides)


def between(whole: Region, columns: int, begin: int, end: int) -> Iterator[Region]:
    """The rectangles that a region has of elements [begin, end) of a flattened matrix, in a fixed order.

    Each is a part of one row, or of several rows of which [begin, end) has every element.

    Args:
        whole: The region.
        columns: Columns of the matrix.
        begin: First element.
        end: End of the elements.
    """
    if begin >= end:
        return
    (first, skip), (last, rest) = divmod(begin, columns), divmod(end, columns)
    if first == last:
        found = [Region(Span(first, first + 1), Span(skip, rest))]
    else:
        found = [
            Region(Span(first, first + 1), Span(skip, columns)),
            Region(Span(first + 1, last), Span(0, columns)),
            Region(Span(last, last + 1), Span(0, rest)),
        ]
    for each in found:
        common = Region(_common(each.rows, whole.rows), _common(each.columns, whole.columns))
        if common.size:
            yield common


@dataclass(frozen=True)
class _Part:
    """A parameter in this rank, and where its elements go."""

    parameter: nn.Parameter
    """The parameter as the module has it: a DTensor, or a plain tensor that every rank has."""
    held: Held
    """This rank's region, which may be empty."""
    pieces: list[tuple[int, int, Region]]
    """By sender and receiver: what of the parameter lies in the receiver's span; a rank sends to itself what it has."""

    @property
    def local(self) -> torch.Tensor:
        """The region's elements: a matrix that shares the parameter's memory."""
        return _local(self.parameter).view(self.held.rows.size, self.held.columns.size)


class Shards(Weights):
    """This rank's part of the parameters; `Weights` says what its methods do.

    Args:
        model: The model, after `parallelize`.
        ranks: The mesh that it was divided on.
    """

    def __init__(self, model: LanguageModel, ranks: DeviceMesh) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._rank = dist.get_rank()
        self._mesh = degrees(ranks)
        self._at = self._mesh.coordinates(self._rank)
        self._sharded = sharded_modules(model.module)
        self._steps_on: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._uncounted: set[int] = set()
        self.divided = self._mesh.size > self._mesh.replicate
        self.leads = self._rank == 0
        self.draws: tuple[str, ...] = (f"data-rank-{self._data_rank}",)

    @property
    def _data_rank(self) -> int:
        return self._at.replicate * self._mesh.shard + self._at.shard

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        """Every trained parameter, in layout order."""
        return self._parts_of(self._model.layout)

    def _parts_of(self, layout: Layout) -> dict[str, _Part]:
        """The parameters of a layout, in its order, with their places in its vector."""
        parameters, spans = dict(self._model.module.named_parameters()), tile(layout.size, self._mesh.size)
        return {
            name: self._part(name, parameters[name], offset, spans)
            for name, offset in zip(layout.names, layout.offsets, strict=False)
        }

    def _part(self, name: str, parameter: nn.Parameter, offset: int, spans: Sequence[Span]) -> _Part:
        """A parameter, and where its elements go: `spans` are those of the ranks in the vector in which it begins at
        `offset`."""
        holders: dict[Region, list[int]] = {}
        for rank in range(self._mesh.size):
            its = region_of(parameter, self._mesh, self._mesh.coordinates(rank))
            holders.setdefault(its, []).append(rank)
        mine = region_of(parameter, self._mesh, self._at)
        if _local(parameter).numel() != mine.size:
            raise AssertionError(
                f"a rank has {tuple(_local(parameter).shape)} of {parameter.shape}: expected {mine}"
            )
        size, width = parameter.numel(), matrix(parameter.shape)[1]
        replica = [r for r in holders[mine] if self._mesh.coordinates(r).replicate == self._at.replicate]
        counts, first = (having[0] == self._rank for having in (replica, holders[mine]))
        pieces = [
            (to if to in having else having[to % len(having)], to, piece)
            for to, span in enumerate(spans)
            for whole, having in holders.items()
            for piece in between(whole, width, max(span.start - offset, 0), min(span.stop - offset, size))
        ]
        pieces.sort(key=lambda each: each[:2])
        return _Part(parameter, Held(name, offset, width, *mine, counts, first), pieces)

    def place(self, start: Vector) -> None:
        """Copy this rank's part of the global model into its parameters, without communication."""
        self._model.layout.check(start)
        for module in self._sharded:
            module.reshard()  # weights that were gathered for a forward pass are of the model before
        self._loaded.put_back()
        for part in self._parts.values():
            held = part.held
            whole = start[held.offset : held.offset + part.parameter.numel()].reshape(-1, held.width)
            source = whole[held.rows.start : held.rows.stop, held.columns.start : held.columns.stop]
            if part.local.device.type == "cpu":
                np.copyto(part.local.numpy(), source)
            else:  # torch has no read-only tensors
                part.local.copy_(torch.from_numpy(source.copy()))

    def span(self, part: Layout) -> Span:
        """One of spans of equal size."""
        return tile(part.size, self._mesh.size)[self._rank]

    def trained(self, part: Layout) -> Named:
        """Tensors that share the memory of this rank's parts of the round's parameters."""
        named = [
            (name, each, nn.Parameter(_local(each)) if isinstance(each, DTensor) else each)
            for name, each in self._model.trainable(part)
        ]
        self._steps_on = [(parameter, local) for _, parameter, local in named]
        self._uncounted = {id(local) for name, _, local in named if not self._parts[name].held.first}
        return [(name, local) for name, _, local in named]

    def rows(self, batch_size: int) -> slice:
        """A contiguous part; the parts of all data ranks differ in length by at most one row."""
        begin, end = (batch_size * part // self._mesh.data for part in (self._data_rank, self._data_rank + 1))
        return slice(begin, end)

    def before_backward(self, *, last: bool) -> None:
        """Replicas add up a step's gradients before they exchange them, once."""
        if self._sharded and self._mesh.replicate > 1:
            self._sharded[0].set_requires_all_reduce(last)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move each gradient from the module's parameter to the tensor that the optimizer steps on."""
        for parameter, local in self._steps_on:
            gradient, parameter.grad = parameter.grad, None
            if isinstance(gradient, DTensor):
                assert isinstance(parameter, DTensor)
                # Of a norm of heads: not summed over them yet.
                if gradient.placements != parameter.placements:
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = gradient.to_local()
            local.grad = gradient

    @torch.no_grad()
    def add_replicas(self) -> None:
        """Replicas of a model that is not sharded keep their own gradients in a backward pass, and add them up here,
        many small ones by one all-reduce."""
        if self._mesh.replicate == 1 or self._mesh.shard > 1:
            return
        for _, local in self._steps_on:  # every replica takes part with all of them
            local.grad = torch.zeros_like(local) if local.grad is None else local.grad.contiguous()
        gradients = [local.grad for _, local in self._steps_on if local.grad is not None]
        group = self._ranks.get_group("replicate")
        for begin, end in runs([each.numel() for each in gradients], BUCKET):
            bucket = gradients[begin:end]
            whole = bucket[0] if len(bucket) == 1 else torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(whole, group=group)
            if len(bucket) > 1:
                parts = torch.split(whole, [each.numel() for each in bucket])
                torch._foreach_copy_([each.view(-1) for each in bucket], list(parts))

    def clip(self, trained: list[nn.Parameter], norm: float) -> None:
        """The squares of all regions, each once, are summed by one all-reduce of one number; a replica that is not
        divided has all of them."""
        counted = [
            each.grad
            for each in trained
            if each.grad is not None and not (self.divided and id(each) in self._uncounted)
        ]
        square = get_total_norm(counted).to(self._device, torch.float64).square()
        if self.divided:
            dist.all_reduce(square)
        clip_grads_with_norm_(trained, norm, square.sqrt().float())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over replicas and shards; ranks of a tensor group have the same rows."""
        for dimension in ("replicate", "shard"):
            dist.all_reduce(value, group=self._ranks.get_group(dimension))
        return value

    def least(self, number: int) -> int:
        """One all-reduce."""
        least = torch.tensor(number, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    def update(self, start: Vector, part: Layout) -> Vector:
        """Exchange the parameters, one after the other, so that each rank gets those elements that lie in its span."""
        whole, span = part.names == self._model.layout.names, self.span(part)
        update: Vector = torch.empty(span.size).numpy()  # torch aligns it for every processor
        for each in (self._parts if whole else self._parts_of(part)).values():
            for piece, values in self._exchanged(each):
                _lay(update, each.held, piece, values, span.start)
        update -= span.of(self._model.layout.pick(start, part))
        return update

    def _exchanged(self, part: _Part) -> list[tuple[Region, torch.Tensor]]:
        """What of a parameter lies in this rank's span, from the ranks that have it."""
        sent = [(to, piece) for sender, to, piece in part.pieces if sender == self._rank]
        received = [(sender, piece) for sender, to, piece in part.pieces if to == self._rank]
        own = [part.local[piece.within(part.held)] for _, piece in sent]
        if all(sender == to for sender, to, _ in part.pieces):
            return [(piece, values) for (_, piece), values in zip(sent, own, strict=True)]
        counts, expected = (
            [sum(piece.size for rank, piece in some if rank == each) for each in range(self._mesh.size)]
            for some in (sent, received)
        )
        source = torch.cat([torch.empty(0, device=self._device), *(values.reshape(-1) for values in own)])
        arrived = torch.empty(sum(expected), device=self._device)
        dist.all_to_all_single(arrived, source, expected, counts)
        parts = torch.split(arrived.cpu(), [piece.size for _, piece in received])
        return [
            (piece, values.view(piece.rows.size, piece.columns.size))
            for (_, piece), values in zip(received, parts, strict=True)
        ]

    @property
    def held(self) -> tuple[Held, ...]:
        """What this rank has."""
        return tuple(part.held for part in self._parts.values())

    @property
    def units(self) -> slice:
        """Units are dealt to the replicas in turns."""
        return slice(self._at.replicate, None, self._mesh.replicate)

    def unit_rows(self, n: int) -> slice:
        """The shards divide the rows; ranks of a tensor group have the same ones."""
        begin, end = (n * part // self._mesh.shard for part in (self._at.shard, self._at.shard + 1))
        return slice(begin, end)

    def sum_in_replica(self, values: torch.Tensor) -> torch.Tensor:
        """Over the shards and the tensor group, one after the other."""
        for dimension in ("shard", "tensor"):
            dist.all_reduce(values, group=self._ranks.get_group(dimension))
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """One all-reduce."""
        dist.all_reduce(values, group=self._ranks.get_group("replicate"))
        return values

    @property
    def _device(self) -> torch.device:
        return next(self._model.module.parameters()).device


def region_of(parameter: nn.Parameter, mesh: Mesh, at: Coordinates) -> Region:
    """What any rank has of a parameter, which this rank has after `parallelize`; arguments as for `region`."""
    return region(parameter.shape, _cuts(parameter), mesh, at)


def gathered_at_once(module: nn.Module, mesh: Mesh, at: Coordinates) -> int:
    """Elements of the largest group of parameters that a rank gathers from the others of its shard group at a time.

    Args:
        module: The model, after `parallelize`.
        mesh: The mesh.
        at: The rank's place in it.
    """
    sharded: list[Any] = sharded_modules(module)  # the type does not say that they are modules
    group = {id(p): number for number, each in enumerate(sharded) for p in each.parameters()}
    # Modules inside others come after them, and take theirs.
    sizes = [0] * (1 + max(group.values(), default=0))
    for parameter in module.parameters():
        if id(parameter) in group:
            whole = region(parameter.shape, _cuts(parameter)._replace(shard=-1), mesh, at)
            sizes[group[id(parameter)]] += whole.size
    return max(sizes)


def _lay(update: Vector, part: Held, where: Region, values: torch.Tensor, start: int) -> None:
    """Copy a rectangle of a parameter into the span of the flat vector that begins at `start`."""
    begin = part.offset - start + where.rows.start * part.width
    if where.rows.size == 1:
        target = update[begin + where.columns.start : begin + where.columns.stop].reshape(1, -1)
    else:
        rows = update[begin : begin + where.rows.size * part.width].reshape(-1, part.width)
        target = rows[:, where.columns.start : where.columns.stop]
    torch.from_numpy(target).copy_(values)


def _cuts(parameter: nn.Parameter) -> Cuts:
    """How the ranks divide a parameter."""
    if not isinstance(parameter, DTensor):
        return Cuts()
    names = parameter.device_mesh.mesh_dim_names or ()
    # Shard, and the kind that sharding makes of a dimension that is cut already, have a dimension.
    cut = {
        name: placement.dim
        for name, placement in zip(names, parameter.placements, strict=True)
        if hasattr(placement, "dim")
    }
    return Cuts(**cut)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter, which shares its memory."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _chunk(side: Span, parts: int, part: int) -> Span:
    """What `torch.chunk` gives as part `part` of `parts`; the last parts may be shorter or empty."""
    size = -(-side.size // parts)
    return Span(*(side.start + min(side.size, size * edge) for edge in (part, part + 1)))


def _common(one: Span, other: Span) -> Span:
    start = max(one.start, other.start)
    return Span(start, max(start, min(one.stop, other.stop)))
