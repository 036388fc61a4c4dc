"""Copies between the vectors of this process and the memory of a GPU.

A GPU copies to and from pinned memory only. For any other memory the driver pins a small buffer, page after page, and
nothing else runs meanwhile. Here two pinned buffers take turns: while the GPU copies one piece, the processor copies
the one before (`docs/performance.md` has both rates).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

PIECE = 8 << 20
"""Elements of a buffer."""

Floats = npt.NDArray[np.float32]


class Transfer:
    """A context in which float32 is copied between this process and a device; all copies are done at its exit.

    On the CPU nothing is buffered.

    Args:
        device: The device.
        most: Elements of the largest copy.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        self._piece = max(1, min(PIECE, most))
        self._turn = 0

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            # torch keeps pinned memory that was freed and gives it out again.
            self._buffers = [torch.empty(self._piece, pin_memory=True) for _ in range(2)]
            event: Any = torch.cuda.Event  # torch leaves it untyped
            self._copied = [event(), event()]
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if self._device.type == "cuda":
            for each in self._copied:
                each.synchronize()

    def download(self, source: torch.Tensor, target: Floats) -> None:
        """Copy a tensor of the device to a contiguous array of as many elements; it is there at the return."""
        into = torch.from_numpy(target).view(-1)
        if self._device.type != "cuda" or source.dtype != torch.float32:
            into.view(source.shape).copy_(source)
            return
        pieces = (torch.split(each, self._piece) for each in (into, source.reshape(-1)))
        waiting: tuple[torch.Tensor, int] | None = None
        for here, there in zip(*pieces, strict=True):
            turn = self._next()
            self._buffers[turn][: len(there)].copy_(there, non_blocking=True)
            self._copied[turn].record()
            if waiting is not None:
                self._take(*waiting)
            waiting = here, turn
        if waiting is not None:
            self._take(*waiting)

    def upload(self, source: Floats, target: torch.Tensor) -> None:
        """Copy an array, which may be read-only, to a tensor of the device of its shape, which is contiguous."""
        if self._device.type == "cpu":
            np.copyto(target.numpy(), source)
            return
        if self._device.type != "cuda" or target.dtype != torch.float32:
            target.copy_(torch.from_numpy(source.copy()))
            return
        flat, into = source.reshape(-1), target.view(-1)
        for begin in range(0, flat.size, self._piece):
            part, turn = flat[begin : begin + self._piece], self._next()
            np.copyto(self._buffers[turn].numpy()[: part.size], part)
            into[begin : begin + part.size].copy_(self._buffers[turn][: part.size], non_blocking=True)
            self._copied[turn].record()

    def _next(self) -> int:
        """The buffer whose turn it is, when the device is done with it."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        return self._turn

    def _take(self, target: torch.Tensor, turn: int) -> None:
        """Copy what the device has put into a buffer."""
        self._copied[turn].synchronize()
        target.copy_(self._buffers[turn][: len(target)])
