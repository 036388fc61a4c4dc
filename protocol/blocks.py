"""Blocks: a flat vector is cut at fixed global offsets, so that a block is the same wherever a part of the vector lies.

Noise is seekable at blocks, and a norm is a sum over blocks' sums of squares in their order. Parts of a vector that
begin and end at blocks therefore have the same noise and the same norm as the whole vector, to the last bit. Refused:
blocks relative to a part, which would make floating-point sums depend on the number of parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 2**15
"""Elements of a block: 256 KiB of float64. They stay in a core's cache, and such small arrays are not mapped again for
each allocation."""


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
