"""Floats as integers modulo 2^b, so that a sum is independent of the order in which its terms arrive.

A value is clipped to ±bound, scaled to at most `levels` steps and rounded stochastically: the result is unbiased, and
the sum of `terms` of them cannot leave (-2^(b-1), 2^(b-1)), so it decodes without ambiguity. Counters are exact: a
64-bit integer travels as limbs that are short enough for `terms` of them to be added without wrapping.

Rounding is keyed by the element's offset in the whole vector (`Dither`). A vector that is coded span by span therefore
gets the same integers. Its seed is secret: whoever knows the draws of one site knows which values of that site alone
could be rounded up, and finds their signs in the sum.

Refused: floating-point addition, which is not associative, so the mean would depend on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector import masks
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK

RingVector = npt.NDArray[np.unsignedinteger[Any]]

_COUNTER_BITS = 64
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_SIGNED: dict[int, type[np.signedinteger[Any]]] = {8: np.int8, 16: np.int16, 32: np.int32}


class Dither:
    """The draws of a stochastic rounding: floor(x + u) is x on average, for u uniform in (0, 1).

    Element e has u = (k + 1/2) / 2^16, where k is the little-endian integer in bytes [2 e, 2 e + 2) of the keystream of
    the seed: the error of the average is at most 2^-17.

    Args:
        seed: 32 bytes, secret; one seed codes one vector.
        offset: Element of the whole vector to begin at.
        most: The most elements of a draw.
    """

    def __init__(self, seed: bytes, offset: int, most: int) -> None:
        self._stream = masks.keystream(seed, 2 * offset)
        self._numbers, self._zeros = np.empty(most, "<u2"), memoryview(bytes(2 * most))

    def draw(self, out: npt.NDArray[np.floating[Any]]) -> None:
        """Fill `out`, of any shape, with u of the next elements."""
        numbers = self._numbers[: out.size]
        self._stream.update_into(self._zeros[: numbers.nbytes], numbers.data.cast("B"))
        np.add(numbers.reshape(out.shape), 0.5, out=out, dtype=out.dtype)
        out *= 2.0**-16


@dataclass(frozen=True)
class Ring:
    """The integers modulo 2^bits, and the fixed-point code of `terms` values in ±bound that are summed in them.

    Args:
        bits: 8, 16 or 32.
        bound: Largest absolute value that can be represented.
        terms: Largest number of vectors in a sum.
    """

    bits: Literal[8, 16, 32]
    bound: float
    terms: int

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"a ring of {self.bits} bits cannot hold the sum of {self.terms} terms")

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The unsigned type whose overflow is the reduction modulo 2^bits."""
        return _UNSIGNED[self.bits]

    @property
    def signed_dtype(self) -> type[np.signedinteger[Any]]:
        """The signed type of the same width, as which a sum is read."""
        return _SIGNED[self.bits]

    @property
    def levels(self) -> int:
        """Steps between 0 and `bound`: the largest L with terms × L <= 2^(bits-1) - 1."""
        return int((2 ** (self.bits - 1) - 1) // self.terms)

    @property
    def scale(self) -> float:
        """Steps for each unit of value."""
        return self.levels / self.bound

    def encode(
        self,
        values: npt.NDArray[np.float32],
        seed: bytes,
        offset: int = 0,
        *,
        factor: float = 1.0,
        out: RingVector | None = None,
    ) -> tuple[RingVector, int]:
        """Code `factor` × clip(values, ±bound), rounded to one of the two nearest steps without bias.

        Args:
            values: (d,) float32, finite: elements [offset, offset + d) of the whole vector.
            seed: Of the rounding, as for `Dither`.
            offset: Element of the whole vector where `values` starts.
            factor: The term's weight in [0, 1].
            out: (d,) ring integers to write into.

        Returns:
            (d,) ring integers, and the number of values that were clipped.

        Raises:
            UpdateError: a value is not finite.
        """
        dither = Dither(seed, offset, BLOCK)
        coded: RingVector = np.empty(values.shape, dtype=self.dtype) if out is None else out
        signed = coded.view(self.signed_dtype)
        clipped = 0
        step, chance = np.empty(BLOCK), np.empty(BLOCK)
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            scaled, draw = step[: block.size], chance[: block.size]
            largest = float(np.abs(block).max())
            if not math.isfinite(largest):
                where = start + int(np.flatnonzero(~np.isfinite(block))[0])
                raise UpdateError(
                    f"update[{offset + where}]", float(values[where]), expected="a finite number"
                )
            np.multiply(block, self.scale * factor, out=scaled, dtype=np.float64)
            if largest >= self.bound:
                clipped += int(np.count_nonzero(np.abs(block.astype(np.float64)) > self.bound))
                limit = self.bound * self.scale * factor
                np.clip(scaled, -limit, limit, out=scaled)
            dither.draw(draw)
            scaled += draw
            np.floor(scaled, out=scaled)
            if largest >= self.bound:
                # Rounding of the product may exceed the range by a step; beyond `levels` a sum could wrap.
                np.clip(scaled, -self.levels, self.levels, out=scaled)
            signed[start : start + BLOCK] = scaled  # whole numbers in range: the cast is exact
        return coded, clipped

    def decode(self, total: RingVector) -> npt.NDArray[np.float64]:
        """Decode a sum of coded vectors to the sum of their values.

        Args:
            total: (d,) sum modulo 2^bits of at most `terms` vectors from `encode`.

        Returns:
            (d,) float64.
        """
        return total.view(self.signed_dtype).astype(np.float64) / self.scale

    @property
    def limbs(self) -> int:
        """Ring elements that one counter takes."""
        return -(-_COUNTER_BITS // self._limb_bits)

    @property
    def _limb_bits(self) -> int:
        return self.bits - (self.terms - 1).bit_length()

    def encode_counters(self, counters: Sequence[int]) -> RingVector:
        """Code integers in [0, 2^64) exactly.

        Returns:
            (len(counters) × limbs,) ring integers.
        """
        width = self._limb_bits
        if any(not 0 <= counter < 1 << _COUNTER_BITS for counter in counters):
            # Do not quote the values: they are private to the site, and an error may be sent.
            raise ValueError("a counter is out of range: expected integers in [0, 2^64)")
        mask = (1 << width) - 1
        limbs = [counter >> (width * limb) & mask for counter in counters for limb in range(self.limbs)]
        return np.array(limbs, dtype=self.dtype)

    def decode_counters(self, total: RingVector) -> list[int]:
        """Decode the exact sums of counters from a sum of at most `terms` vectors from `encode_counters`."""
        width = self._limb_bits
        limbs = [int(limb) for limb in total]
        return [
            sum(limbs[first + limb] << (width * limb) for limb in range(self.limbs))
            for first in range(0, len(limbs), self.limbs)
        ]
