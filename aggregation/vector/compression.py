"""The code of an update in few bits: rotated blocks, a scale for each, stochastic rounding, and a residual.

An update x of d values is cut into blocks of S = 2^14, the last padded with zeros. With L = `ring.levels` (15 for 8
sites and 8 bits: 31 values), the bound B_j of block j, its rotation R (`rotation.py`), and the residual r that the
site has kept from its last sum, a site of weight w_i sends

    z = R(w_i / w_max x)_j L / B_j + r_j,        q = floor(clip(z, -L, L) + u),        r' = z - q,

with u uniform in [0, 1): multiples of 2^-16, by which q is biased by 2^-17 of a step. The sum of q over the sites
cannot leave the ring, and decodes as R^-1(B_j / L sum q) / (sum_i w_i / w_max).

r' is what q leaves out, rounding and clip together. The site adds it before it codes its next update (error feedback:
Seide et al. 2014; Karimireddy et al. 2019, "Error feedback fixes SignSGD"), so that over rounds nothing is lost: the
sum of what was sent differs from the sum of what should have been by one residual. r' is cut at M = max(1, L / 4)
steps, and kept in as many bits as the ring has, in integers of M / 127 or M / 32767 steps. It is cut at M steps of the
new bounds once more when it is added. So whatever the bounds were, a residual moves a value by a quarter of L, or by
one step. Residuals that filled the range would make what sites send constants, and a sum of constants and one other
vector shows that vector.

Draws are keyed by the offset, as in `ring.py`: element e takes bytes 2 e and 2 e + 1 of the keystream of AES-256-CTR
(`masks.py`) with the seed as its key. The seed is a secret of the site (`Dither`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.ring import Dither, Ring, RingVector
from cloister.aggregation.vector.rotation import ROTATED, Floats, hadamard_transform, rotated_blocks, signs
from cloister.aggregation.vector.sketch import Lengths
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK, Span

Residual = npt.NDArray[np.signedinteger[Any]]
"""What a code leaves out, in integers of the ring's signed type."""

MOST_KEPT = 1 / 4
"""Share of the L steps of a bound beyond which a residual is cut. One step, which rounding may leave, is not."""

_STEP = 2**17
"""Elements that are coded at once: with 2^15 it takes a fifth longer (docs/performance.md)."""
_NONE = np.empty(0, np.intp)
FINEST = 2**12
"""The weight of the block with the largest bound, in a sketch."""
_FLOATS = 1 + 2.0**-12
"""Of a norm after the rotation in float32, over the norm before it."""

assert BLOCK % ROTATED == 0, "spans have whole rotated blocks"


@dataclass(frozen=True)
class Kept:
    """What a site's last code has left out."""

    residual: Residual
    """Of the n × ROTATED elements of the blocks that are coded."""
    bounds: Floats
    """(n,) float32: the bounds with which it was made."""


@dataclass(frozen=True)
class BlockCode:
    """The code of a plan's updates; it can be sent to another process.

    Args:
        values: d, values of an update.
        seed: Of the public signs.
        ring: The ring; its `bound` is not used.
        one_step: Whether a residual is cut at one step, and not at a share of L.
    """

    values: int
    seed: int
    ring: Ring
    one_step: bool = False

    @property
    def blocks(self) -> int:
        """Rotated blocks of an update."""
        return rotated_blocks(self.values)

    @property
    def size(self) -> int:
        """Ring integers of a coded update: whole blocks."""
        return self.blocks * ROTATED

    @property
    def most_kept(self) -> float:
        """M: steps beyond which a residual is cut."""
        return 1.0 if self.one_step else max(1.0, MOST_KEPT * self.ring.levels)

    @property
    def unit(self) -> float:
        """Steps in 1 of a residual."""
        return float(self.most_kept / (2 ** (self.ring.bits - 1) - 1))

    def coded(self, span: Span) -> Span:
        """Where a span of the values, which begins at a block of `protocol.messages.blocks`, is in the coded update."""
        start, stop = (self.size if edge == self.values else edge for edge in (span.start, span.stop))
        return Span(start, stop)

    def lengths(self, norm: float, bounds: Floats) -> Lengths:
        """How long an honest coded update is, with its blocks weighed so that all have about the same steps of values.

        A block's integers times B_j / L are its values. So the weight of block j is B_j over the largest, in whole
        steps of 1 / `FINEST`, from 1 on. Rounding moves an element by less than a step, and a residual by at most M:
        with B_j of at most c T / sqrt(d) each, that is c (1 + M) / L times T.

        Args:
            norm: Largest L2 norm of an update.
            bounds: (blocks,) float32, positive.
        """
        own = bounds.astype(np.float64)
        weights = np.maximum(np.rint(FINEST * own / own.max()), 1)
        steps = float((weights / own).max()) * self.ring.levels * norm * _FLOATS
        beside = math.sqrt(ROTATED * float(weights @ weights)) * (1 + self.most_kept)
        unit = FINEST * self.ring.levels / float(own.max())
        return Lengths(self.size, steps + beside, weights.astype(np.int64), unit)

    def encode(
        self,
        values: Floats,
        bounds: Floats,
        seed: bytes,
        offset: int = 0,
        *,
        factor: float = 1.0,
        kept: Kept | None = None,
        out: RingVector | None = None,
        residual: Residual | None = None,
    ) -> tuple[RingVector, int]:
        """Code `factor` × values, plus what was kept.

        Args:
            values: (m,) float32, finite: elements [offset, offset + m) of the update, up to its end or to a block.
            bounds: (blocks,) float32, positive: B of each block of the whole update.
            seed: Of the rounding, as for `Ring.encode`.
            offset: Element of the update where `values` starts: a whole number of blocks.
            factor: w_i / w_max, in [0, 1].
            kept: r of the blocks under `values`; None: none.
            out: (n × ROTATED,) ring integers to write into, for the n blocks under `values`.
            residual: Where r' is written to, n × ROTATED elements; None: it is not kept.

        Returns:
            (n × ROTATED,) ring integers, and the number of them that were clipped.

        Raises:
            UpdateError: a value is not finite, or so large that its block overflows.
        """
        first, blocks = offset // ROTATED, rotated_blocks(values.size)
        assert offset % ROTATED == 0, "a span begins at a block"
        size, levels = blocks * ROTATED, np.float32(self.ring.levels)
        coded: RingVector = np.empty(size, self.ring.dtype) if out is None else out
        assert coded.size == size, "whole blocks"
        signed = coded.view(self.ring.signed_dtype)
        own = bounds[first : first + blocks].astype(np.float64)
        into = (factor * self.ring.levels / math.sqrt(ROTATED) / own).astype(np.float32)
        carried = None if kept is None else _Carried.into(own, kept, self)
        left = np.float32(1 / self.unit)
        most = np.float32(2 ** (self.ring.bits - 1) - 1)
        dither = Dither(seed, offset, _STEP)
        sign = signs(self.seed)
        memory = np.empty((3, _STEP), np.float32)
        clipped, per_step = 0, _STEP // ROTATED
        for block in range(0, blocks, per_step):
            count = min(per_step, blocks - block)
            begin, length = block * ROTATED, count * ROTATED
            x, z, extra = memory[:, :length].reshape(3, count, ROTATED)
            given = values[begin : begin + length]
            _sign(given, sign, x)
            hadamard_transform(x, z, into[block : block + count])
            if carried is not None:
                carried.add_to(z, block, extra)
            largest = float(np.abs(z, out=x).max())
            if not math.isfinite(largest):
                bad = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0]) * ROTATED
                raise _not_finite(given[bad : bad + ROTATED], offset + begin + bad)
            beyond = (x > levels).reshape(-1).nonzero()[0] if largest > levels else _NONE
            clipped += beyond.size
            dither.draw(extra)
            np.add(z, extra, out=x)
            np.floor(x, out=x)
            whole, left_out = x.reshape(-1), z.reshape(-1)
            whole[beyond] = np.copysign(levels, left_out[beyond])
            if self.ring.bits > 8 and largest > levels - 1:
                # In float32, the sum of thousands of steps and of nearly 1 may be the next step.
                np.minimum(whole, levels, out=whole)
            signed[begin : begin + length] = whole  # whole numbers in range: the cast is exact
            if residual is not None:
                left_out -= whole
                left_out *= left
                left_out[beyond] = left_out[beyond].clip(-most, most)
                np.rint(left_out, out=left_out)
                residual[begin : begin + length] = left_out
        return coded, clipped

    def decode(self, total: RingVector, bounds: Floats, factor: float = 1.0) -> Floats:
        """Decode a sum of coded updates to `factor` × the sum of what they stand for.

        Args:
            total: (size,) sum modulo 2^bits of at most `ring.terms` coded updates.
            bounds: (blocks,) float32, the bounds with which all of them were coded.
            factor: Multiplies the sum.

        Returns:
            (d,) float32.
        """
        signed = total.view(self.ring.signed_dtype)
        outof = factor / self.ring.levels / math.sqrt(ROTATED) * bounds.astype(np.float64)
        steps = outof.astype(np.float32)
        sign = signs(self.seed)
        decoded: Floats = np.empty(self.values, np.float32)
        memory, per_step = np.empty((2, _STEP), np.float32), _STEP // ROTATED
        for block in range(0, self.blocks, per_step):
            count = min(per_step, self.blocks - block)
            begin, length = block * ROTATED, count * ROTATED
            x, z = memory[:, :length].reshape(2, count, ROTATED)
            x[:] = signed[begin : begin + length].reshape(count, ROTATED)
            hadamard_transform(x, z, steps[block : block + count])
            z *= sign
            decoded[begin : begin + length] = z.reshape(-1)[: self.values - begin]
        return decoded


@dataclass(frozen=True)
class _Carried:
    """What the last code has left out, for the next."""

    residual: Residual
    steps: Floats
    """(n,) float32: steps of the new bounds in 1 of the residual, for each block."""
    most: np.float32 | None
    """Where it is cut; None if no bound is smaller than it was."""

    @classmethod
    def into(cls, bounds: npt.NDArray[np.float64], kept: Kept, code: BlockCode) -> _Carried:
        """For the blocks with these new bounds."""
        smaller = (kept.bounds > bounds).any()
        steps = (kept.bounds / bounds * code.unit).astype(np.float32)
        return cls(kept.residual, steps, np.float32(code.most_kept) if smaller else None)

    def add_to(self, rotated: Floats, first: int, memory: Floats) -> None:
        """Add it to blocks (count, ROTATED) from `first` on; `memory` is overwritten."""
        begin, count = first * ROTATED, len(rotated)
        memory[:] = self.residual[begin : begin + rotated.size].reshape(count, ROTATED)
        memory *= self.steps[first : first + count, None]
        if self.most is not None:
            np.clip(memory, -self.most, self.most, out=memory)
        rotated += memory


def _sign(values: Floats, signs: Floats, out: Floats) -> None:
    """Multiply the blocks of `values` by signs; zeros pad the last block."""
    if values.size == out.size:
        np.multiply(values.reshape(out.shape), signs, out=out)
    else:
        out.reshape(-1)[: values.size] = values
        out.reshape(-1)[values.size :] = 0
        out *= signs


def _not_finite(values: Floats, offset: int) -> UpdateError:
    found = np.flatnonzero(~np.isfinite(values))
    if found.size:
        at = int(found[0])
        return UpdateError(f"update[{offset + at}]", float(values[at]), expected="a finite number")
    at = int(np.abs(values).argmax())
    return UpdateError(
        f"update[{offset + at}]", float(values[at]), expected="a number that float32 can rotate"
    )
