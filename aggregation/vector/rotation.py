"""A rotation of blocks, after which the largest coordinate of a block is only a few times its root mean square.

A block of S = 2^14 coordinates x becomes y = H D x / sqrt(S): D is a diagonal of public random signs, H the Hadamard
matrix. This is orthonormal, so y has the norm of x, whose energy is spread over all coordinates: for any x a coordinate
of y exceeds t times the root mean square with a probability of at most 2 exp(-t^2 / 2) over D (Suresh et al. 2017,
"Distributed mean estimation with limited communication", section 3). H is its own inverse up to S, and linear, so a sum
of rotated vectors is the rotated sum.

H of 2^14 is the Kronecker product of Hadamard matrices of 16, 32 and 32. The first two multiply an axis of the block
from the left, the last one from the right, so no axis is moved. On one core this takes four fifths of the time of the
factors 16, 16, 16 and 4, and less than half of that of fourteen butterfly passes in NumPy or of two products with
matrices of 128. No product has more than 2^18 multiplications, up to which OpenBLAS starts no threads: they would cost
more than they save. Each block is multiplied by itself, wherever it is in a vector, so it is the same in any span.

Refused: a rotation over the whole vector, of which no rank of a mesh has all; other signs in each round, with which the
rotated residual of one round could not be added to the next.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt

ROTATED = 2**14
"""Coordinates that are rotated together. A block (`protocol.messages.blocks`) has whole ones."""

Floats = npt.NDArray[np.float32]

_TWO = np.array([[1, 1], [1, -1]], np.float32)
_FIRST, _SECOND, _THIRD = (reduce(np.kron, [_TWO] * power) for power in (4, 5, 5))
"""Hadamard matrices of 16, 32 and 32: of the slowest axis of a block, of the next, and of the fastest."""
_ROWS = 2**18 // _THIRD.size
"""Rows that the last is multiplied with at once."""
assert len(_FIRST) * len(_SECOND) * len(_THIRD) == ROTATED


def rotated_blocks(size: int) -> int:
    """Blocks that `size` coordinates take, the last of them padded with zeros."""
    return -(-size // ROTATED)


@lru_cache(maxsize=4)
def signs(seed: int) -> Floats:
    """D: (ROTATED,) float32, the public signs +1 and -1 of every block, from the plan's seed; read-only."""
    drawn = np.random.Generator(np.random.PCG64DXSM([seed, ROTATED])).integers(0, 2, ROTATED)
    made: Floats = (2 * drawn - 1).astype(np.float32)
    made.flags.writeable = False
    return made


def hadamard_transform(blocks: Floats, other: Floats, scales: Floats) -> Floats:
    """H times each block times a scale of its own.

    Args:
        blocks: (m, ROTATED) float32, contiguous; overwritten.
        other: Memory of the same shape and type, contiguous.
        scales: (m,) float32.

    Returns:
        `other`, with the result.
    """
    m, second, third = len(blocks), len(_SECOND), len(_THIRD)
    np.matmul(_FIRST, blocks.reshape(m, len(_FIRST), -1), out=other.reshape(m, len(_FIRST), -1))
    np.matmul(_SECOND, other.reshape(m, -1, second, third), out=blocks.reshape(m, -1, second, third))
    last = (scales[:, None, None] * _THIRD)[:, None]
    np.matmul(blocks.reshape(m, -1, _ROWS, third), last, out=other.reshape(m, -1, _ROWS, third))
    return other
