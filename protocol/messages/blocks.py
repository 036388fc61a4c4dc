"""Blocks: a flat vector is cut at fixed global offsets, so that a block is the same wherever a part of the vector lies;
and spans, contiguous ranges of a vector, which meet at blocks.

Noise is seekable at blocks, and a norm is a sum over blocks' sums of squares in their order. Parts of a vector that
begin and end at blocks therefore have the same noise and the same norm as the whole vector, to the last bit. Refused:
blocks relative to a part, which would make floating-point sums depend on the number of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 2**15
"""Elements of a block: 256 KiB of float64. They stay in a core's cache, and such small arrays are not mapped again for
each allocation."""


@dataclass(frozen=True, order=True)
class Span:
    """Elements [start, stop) of a vector; it may be empty.

    Raises:
        ValueError: it is not 0 <= start <= stop.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span is [{self.start}, {self.stop}): expected 0 <= start <= stop")

    @property
    def size(self) -> int:
        """Elements in the span."""
        return self.stop - self.start

    def of(self, vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The span's elements of the whole vector, as a view."""
        return vector[self.start : self.stop]


def tile(length: int, parts: int) -> tuple[Span, ...]:
    """Cut a vector into `parts` spans that meet at block boundaries and differ in length by at most a block.

    A vector with fewer blocks than parts leaves some spans empty.

    Args:
        length: Elements of the vector, 0 or more.
        parts: Spans, 1 or more.

    Raises:
        ValueError: an argument is out of range.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"length is {length}, parts is {parts}: expected 0 or more, and 1 or more")
    blocks = -(-length // BLOCK)
    edges = [min(length, part * blocks // parts * BLOCK) for part in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(edges))


def cut(offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """The blocks under elements [offset, offset + size) of a vector, in their order.

    Yields:
        Where the part of the block begins and ends, counted from `offset`; the block's number; and how many elements of
        the block lie before that part.
    """
    begin = 0
    while begin < size:
        number, skip = divmod(offset + begin, BLOCK)
        end = min(size, begin + BLOCK - skip)
        yield begin, end, number, skip
        begin = end


def all_finite(vector: npt.NDArray[Any]) -> bool:
    """Whether every element of a vector (d,) is a finite number; takes the memory of a block."""
    return all(bool(np.isfinite(vector[begin:end]).all()) for begin, end, _, _ in cut(0, vector.size))


def in_threads(
    work: Callable[[npt.NDArray[Any], int], None],
    vector: npt.NDArray[Any],
    edges: Sequence[int],
    threads: int,
) -> None:
    """Call `work(part, begin)` on the parts of a vector at the same time.

    Args:
        work: What to do with a part; `begin` is where the part begins in the vector.
        vector: Shape (d,).
        edges: Where parts may begin, increasing from 0.
        threads: The most parts, 1 or more.
    """
    count = max(1, min(threads, len(edges)))
    bounds = [edges[part * len(edges) // count] if part else 0 for part in range(count)] + [vector.size]
    if count == 1:
        work(vector, 0)
        return
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda begin, end: work(vector[begin:end], begin), bounds, bounds[1:]))


def runs(sizes: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut a list of things into runs [begin, end) of at most `most` together, or of one thing that is larger.

    Args:
        sizes: The size of each.
        most: Largest size of a run.
    """
    begin = end = together = 0
    for end, size in enumerate(sizes):
        if begin < end and together + size > most:
            yield begin, end
            begin, together = end, 0
        together += size
    if together:
        yield begin, end + 1
