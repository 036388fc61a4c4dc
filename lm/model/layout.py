"""The layout: the place of each trained parameter in the one flat vector that the parties exchange.

It is defined by the unsharded model: trained parameters sorted by name, each flattened in row-major order, one after
the other, float32.
Tied weights are one parameter and appear once, under the name that `named_parameters` gives them first. The wire
carries a vector without names, shapes or types, so updates can be summed as plain integers; a dict of arrays would
carry the same numbers in a container format that the parties would have to agree on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cloister.lm.model.transfer import Transfer
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import Span

Vector = npt.NDArray[np.float32]


def params_sha256(weights: Vector) -> str:
    """SHA-256, in hex, of a flat float32 vector's little-endian bytes; it identifies a global model."""
    return hashlib.sha256(np.ascontiguousarray(weights, dtype="<f4").data).hexdigest()


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trained parameters, in the order of the vector."""

    names: tuple[str, ...]
    """Parameter names, sorted."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter."""
    source: str = field(default="", compare=False)
    """Digest of the files that the rest of the model is made from (`origin.py`)."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]]) -> Layout:
        """The layout of the parameters in `module.named_parameters()` that require a gradient."""
        trained = sorted((name, tuple(p.shape)) for name, p in parameters if p.requires_grad)
        return cls(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each parameter in a vector, and as one more element the end of the last parameter."""
        return tuple(itertools.accumulate((math.prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """Number of elements in a vector."""
        return self.offsets[-1]

    def digest(self) -> str:
        """SHA-256, in hex, over names and shapes: parties with equal digests have the same layout."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        listed = json.dumps(list(zip(self.names, self.shapes, strict=True)), separators=(",", ":"))
        return hashlib.sha256(listed.encode()).hexdigest()

    def only(self, names: Iterable[str]) -> Layout:
        """The layout of some of the parameters, in the same order."""
        chosen = set(names)
        kept = [each for each in zip(self.names, self.shapes, strict=True) if each[0] in chosen]
        return Layout(tuple(name for name, _ in kept), tuple(shape for _, shape in kept), self.source)

    def spans(self, part: Layout) -> tuple[Span, ...]:
        """Where the parameters of a part lie in this layout's vector: increasing spans, none next to another."""
        if part.names == self.names:
            return (Span(0, self.size),)
        chosen, found = set(part.names), list[Span]()
        for name, (begin, end) in zip(self.names, itertools.pairwise(self.offsets), strict=True):
            if name in chosen and found and found[-1].stop == begin:
                found[-1] = Span(found[-1].start, end)
            elif name in chosen:
                found.append(Span(begin, end))
        return tuple(found)

    def pick(self, vector: Vector, part: Layout) -> Vector:
        """The elements of a part of this layout, as the vector of the part; of the whole the vector itself."""
        spans = self.spans(part)
        return (
            vector if spans == (Span(0, self.size),) else np.concatenate([span.of(vector) for span in spans])
        )

    def spread(self, vector: Vector, part: Layout) -> Vector:
        """The vector of a part of this layout at its places in one of the whole, and zeros elsewhere."""
        whole, begin = np.zeros(self.size, np.float32), 0
        for span in self.spans(part):
            span.of(whole)[:] = vector[begin : begin + span.size]
            begin += span.size
        return whole

    def flatten(self, module: nn.Module) -> Vector:
        """Copy the trained parameters of `module`, on any device, to a float32 vector of shape (size,)."""
        parameters = dict(module.named_parameters())
        flat: Vector = torch.empty(self.size).numpy()  # torch aligns it for every processor
        with self._transfer(parameters) as transfer:
            for name, part in self.split(flat).items():
                transfer.download(parameters[name].detach(), part)
        return flat

    def place(self, vector: Vector, module: nn.Module) -> None:
        """Let the trained parameters of `module` lie in `vector`: they become views of it, on the CPU.

        Raises:
            UpdateError: the vector is not float32 of shape (size,).
        """
        parameters = dict(module.named_parameters())
        for name, part in self.split(vector).items():
            parameters[name].data = torch.from_numpy(part)

    def split(self, vector: Vector) -> dict[str, Vector]:
        """Views of `vector`, one for each parameter, in its shape.

        Raises:
            UpdateError: the vector is not float32 of shape (size,).
        """
        self.check(vector)
        ends = itertools.pairwise(self.offsets)
        return {
            name: vector[begin:end].reshape(shape)
            for name, shape, (begin, end) in zip(self.names, self.shapes, ends, strict=True)
        }

    def join(self, parts: Mapping[str, npt.NDArray[np.generic]]) -> Vector:
        """The vector whose `split` is `parts`, float32.

        Raises:
            UpdateError: a parameter is missing, unknown, or of another shape.
        """
        if set(parts) != set(self.names):
            different = sorted(set(parts) ^ set(self.names))
            raise UpdateError(
                "the model's parameters", different[0], expected="exactly the parameters of the plan's model"
            )
        for name, shape in zip(self.names, self.shapes, strict=True):
            if parts[name].shape != shape:
                raise UpdateError(
                    f"the model's parameter {name}", parts[name].shape, expected=f"shape {shape}"
                )
        flat = [np.asarray(parts[name], np.float32).reshape(-1) for name in self.names]
        return np.concatenate(flat) if flat else np.empty(0, np.float32)

    def scatter(self, vector: Vector, module: nn.Module) -> None:
        """Copy `vector` into the trained parameters of `module`, in place, one parameter after the other.

        Raises:
            UpdateError: the vector is not float32 of shape (size,).
        """
        parameters = dict(module.named_parameters())
        with self._transfer(parameters) as transfer:
            for name, part in self.split(vector).items():
                transfer.upload(part, parameters[name].detach())

    def _transfer(self, parameters: Mapping[str, nn.Parameter]) -> Transfer:
        """Copies from and to parameters of this layout, which are on one device."""
        device = parameters[self.names[0]].device if self.names else torch.device("cpu")
        return Transfer(device, max(map(math.prod, self.shapes), default=0))

    def check(self, vector: npt.NDArray[np.generic]) -> None:
        """Refuse a vector that does not have this layout.

        Raises:
            UpdateError: the vector is not float32 of shape (size,).
        """
        if vector.dtype != np.float32 or vector.shape != (self.size,):
            raise UpdateError(
                "the model's vector",
                f"{vector.dtype} of shape {vector.shape}",
                expected=f"float32 of shape ({self.size},)",
                fix="use the same plan and model on every party",
            )
