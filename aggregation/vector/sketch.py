"""Sketches: public random projections of vectors of integers, which add up as the vectors do, and show their lengths.

A sketch of a vector x has K = `ROWS` numbers, the products of x with rows whose entries are -1, 0, 0, 1, each with the
probability 1/4, from a public seed. So E s_r^2 = |x|^2 / 2, and

    e(s) = sqrt(2 / K sum_r s_r^2)

estimates |x|. It is linear, so e has the triangle inequality, whatever numbers a liar sends. For one x that is chosen
before the seed is known, with K = 128 (docs/poisoning.md has the proofs; tests/aggregation/vector/test_sketch.py the
numbers):

- P(e > 1.5 |x|) < 2^-40: the even moments of s_r are at most those of a normal variable of the same variance.
- P(e < |x| / 2) < 2^-57: E exp(-t s^2) is at most the largest value that it has for vectors of equal entries (Hoelder).

The numbers are exact: sums in float64 of whole numbers that stay below 2^53, then in int64. They are not reduced modulo
the ring, in which the products of honest vectors would wrap.

Eight of a coordinate's 256 random bits at a time select one of 256 bins, to which the coordinate is added; from the
bins follow the sums of 8 rows. Refused: a product of matrices, for which each bit becomes a float (twice as slow); 2^16
bins (twice as fast for a million coordinates, and ten times slower for a thousand).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector import masks
from cloister.aggregation.vector.rotation import ROTATED
from cloister.aggregation.vector.span import Piece
from cloister.protocol.messages.messages import LONGEST_SKETCH

Integers = npt.NDArray[np.int64]

ROWS = 128
"""K: numbers of a sketch."""
SLACK = 1.5
"""The estimate of an honest vector's length is at most so many times the longest one."""
REACH = 3.0
"""A liar whose estimate is within `SLACK` of the longest is at most so many times as long: an estimate is at least half
of a length."""
SKETCH_BYTES = 8 * ROWS
assert SKETCH_BYTES == LONGEST_SKETCH, "what a message has room for"

_BITS = 2 * ROWS
"""Random bits of a coordinate: row r has the difference of bits r and `ROWS` + r."""
_BYTES = _BITS // 8
_CHUNK = 2**16
"""Coordinates at a time: their bits take 16 MiB as indices."""
_LARGEST = 2**31
"""Absolute value that a coordinate times its weight has at most."""
_EXACT = 2**53 // _LARGEST
"""Coordinates whose sum float64 has exactly."""
_BIT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int64)
_ZEROS = bytes(_CHUNK * _BYTES)


@dataclass(frozen=True)
class Lengths:
    """What of a vector is sketched, and how long an honest one is."""

    size: int
    """The elements [0, size) are sketched: those of the update, and no counter."""
    longest: float
    """Largest L2 norm of an honest vector's integers, each times its weight."""
    weights: Integers | None = None
    """What the elements of each block of 2^14 are multiplied by, from 1 on; None: 1."""
    unit: float = 1.0
    """Weighted steps in an update of norm 1."""

    @property
    def bound(self) -> float:
        """T': `longest` as the norm of an update, with the room for its rounding."""
        return self.longest / self.unit

    @property
    def most(self) -> float:
        """Largest estimate of an honest vector's norm."""
        return SLACK * self.longest

    def norm(self, pieces: Sequence[Piece]) -> float:
        """The norm that `longest` bounds, of one vector whose integers are seen.

        Args:
            pieces: Offset and ring integers of each span of the vector.
        """
        return math.sqrt(math.fsum(float(part @ part) for _, part in self._weighed(pieces)))

    def sketch(self, pieces: Sequence[Piece], seed: bytes) -> Integers:
        """The sketch of a vector, lifted to signed integers.

        Args:
            pieces: Offset and ring integers of each span of the vector; they are only read.
            seed: 32 bytes, public, drawn after the vector was fixed.

        Returns:
            (ROWS,) int64.
        """
        bins, total, seen = np.zeros((_BYTES, 256)), np.zeros(_BITS, np.int64), 0
        for at, part in self._weighed(pieces):
            if seen + part.size > _EXACT:
                total += _by_bit(bins)
                bins[:], seen = 0, 0
            stream = masks.keystream(seed, at * _BYTES).update(_ZEROS[: part.size * _BYTES])
            drawn = np.frombuffer(stream, np.uint8).reshape(part.size, _BYTES).T.astype(np.intp, order="C")
            for row, byte in zip(bins, drawn, strict=True):
                row += np.bincount(byte, part, 256)
            seen += part.size
        total += _by_bit(bins)
        return total[:ROWS] - total[ROWS:]

    def _weighed(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """The sketched elements as signed numbers times their weights, in parts, each with its first element."""
        for offset, vector in pieces:
            signed = vector[: max(0, self.size - offset)].view(np.dtype(f"i{vector.itemsize}"))
            for begin in range(0, signed.size, _CHUNK):
                part = signed[begin : begin + _CHUNK].astype(np.float64)
                if self.weights is not None:
                    places = np.arange(offset + begin, offset + begin + part.size) // ROTATED
                    part *= self.weights[places]
                yield offset + begin, part


def _by_bit(bins: npt.NDArray[np.float64]) -> Integers:
    """For each bit of each byte the sum of the bins that have it: (_BYTES, 256) -> (_BITS,)."""
    return (bins.astype(np.int64) @ _BIT).reshape(_BITS)


def estimate(sketch: Integers) -> float:
    """The length of the vector that has a sketch; exact but for the last rounding."""
    return math.sqrt(2 * sum(int(number) ** 2 for number in sketch) / len(sketch))


def to_bytes(sketch: Integers) -> bytes:
    """A sketch as a message carries it: int64, little-endian."""
    return sketch.astype("<i8").tobytes()


def from_bytes(sent: bytes) -> Integers:
    """What `to_bytes` has made.

    Raises:
        ValueError: it has another length.
    """
    if len(sent) != SKETCH_BYTES:
        raise ValueError(f"a sketch of {len(sent)} bytes: expected {SKETCH_BYTES}")
    return np.frombuffer(sent, "<i8").astype(np.int64)
