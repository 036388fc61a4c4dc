"""Bounds: the L2 norm of an update, the clip to it, and integers whose norm keeps a bound that is known beforehand.

The noise is calibrated to the sensitivity, so a bound here holds for the numbers that are returned, after rounding.
Rounding can increase a norm in two places: float32 rounding after the scaling of a clip, which is why `clip`
rounds toward zero; and the rounding to integers before a discrete mechanism, for which `integer_round` draws
again until the bound of `rounded_l2` holds (Kairouz, Liu and Steinke 2021, "The distributed discrete Gaussian
mechanism for federated learning with secure aggregation", Algorithm 1 with granularity 1 / scale).

A vector may lie in spans, each at one rank, that begin and end at the blocks of `protocol/messages/blocks.py`. What
needs the whole vector (its norm, whether it is finite, whether to draw again) is computed from the blocks' sums of
squares, which a `gather` collects from all spans in their order; so every rank computes the same as one rank that has
all of it.

A sum of float64 squares is itself rounded. The square of a float32 is exact in float64; each block's sum is
off by less than `BLOCK` x 2^-53 = 2^-38 of itself in any order of adding, and `math.fsum` adds the blocks. A norm is
then off by 2^-39 of itself. Norms are compared with a bound lowered by `_MARGIN` = 2^-37 of itself, which covers this
with room for the few operations around it: what passes is within the bound in exact arithmetic. Refused: a float64 copy
of the vector, and a random rotation before the rounding (it tightens the largest coordinate, which a 32-bit ring does
not need).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.privacy.mechanism.noise import NoiseStream, check_positive
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK, cut

Update: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]
Gather: TypeAlias = Callable[[list[float]], list[float]]
"""This span's numbers -> those of all spans of the vector, in the order of the spans. All ranks make the same calls."""

BETA = math.exp(-0.5)
"""Probability with which one rounding may exceed `rounded_l2`: the value that Kairouz et al. choose."""
REDRAWS = 64
"""Roundings that `integer_round` tries: all of them exceed it with probability at most `BETA`^64 = 1.3e-14."""

_MARGIN = 2.0**-37
# A 32-bit ring holds less; up to here `rounded_l2` exceeds the bound by more than the margin.
_MOST_STEPS = 2.0**32


def alone(numbers: list[float]) -> list[float]:
    """The `Gather` of a vector that lies in one span."""
    return numbers


def block_sums(vector: Update, offset: int = 0) -> list[float]:
    """The sums of squares of the vector's blocks, in float64.

    Args:
        vector: Shape (d,), float32: elements [offset, offset + d) of the whole vector.
        offset: Element of the whole vector where `vector` starts: that of a block.

    Returns:
        A sum for each block; infinite or NaN if and only if an element of the block is not finite.

    Raises:
        ValueError: the vector has another type or shape, or starts inside a block.
    """
    if vector.dtype != np.float32 or vector.ndim != 1:
        shown = f"{vector.dtype}{list(vector.shape)}"
        raise ValueError(f"vector is {shown}: expected one dimension of float32")
    if offset < 0 or offset % BLOCK:
        raise ValueError(f"offset is {offset}: expected a multiple of {BLOCK}")
    # Not a dot product: the number of BLAS threads would change its last bits.
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return [
            float(np.multiply(block, block, dtype=np.float64).sum())
            for block in (vector[begin:end] for begin, end, _, _ in cut(offset, vector.size))
        ]


def norm_of(sums: list[float]) -> float:
    """The L2 norm of a vector from its blocks' sums of squares: accurate to 2^-38 of itself, added in one order."""
    return math.sqrt(math.fsum(sums))


def l2_norm(vector: Update, offset: int = 0, gather: Gather = alone) -> float:
    """The L2 norm of the whole vector, accumulated in float64 in blocks, accurate to 2^-38 of itself.

    Args:
        vector: Shape (d,), float32: elements [offset, offset + d) of the whole vector.
        offset: Element of the whole vector where `vector` starts: that of a block.
        gather: Collects the blocks' sums of all spans.

    Raises:
        UpdateError: an element of the whole vector is not finite; the error names the first one in this span.
        ValueError: the vector has another type or shape, or starts inside a block.
    """
    sums = gather(block_sums(vector, offset))
    if not all(map(math.isfinite, sums)):
        wrong = np.flatnonzero(~np.isfinite(vector))
        if not wrong.size:
            raise UpdateError("update in another span", expected="finite numbers")
        raise UpdateError(f"update[{offset + wrong[0]}]", float(vector[wrong[0]]), expected="a finite number")
    return norm_of(sums)


def clip(vector: Update, bound: float, offset: int = 0, gather: Gather = alone) -> None:
    """Scale the whole vector down in place to the L2 norm `bound` where it is longer: x min(1, bound / |x|).

    Its norm is then at most `bound` in exact arithmetic. A vector within the bound stays as it is; one that is longer,
    or shorter by less than 2^-37 of the bound, is scaled and rounded toward zero, so it may be shorter than the bound
    by one unit in the last place of each element.

    Args:
        vector: Shape (d,), float32: elements [offset, offset + d) of the whole vector.
        bound: L2 norm, positive and finite.
        offset: Element of the whole vector where `vector` starts: that of a block.
        gather: Collects the blocks' sums of all spans.

    Raises:
        UpdateError: an element is not finite; nothing was written.
        ValueError: another argument is out of range, or has the wrong type or shape.
    """
    check_positive("bound", bound)
    norm = l2_norm(vector, offset, gather)
    if norm > bound * (1 - _MARGIN):
        factor = bound / norm * (1 - _MARGIN)
        for begin, end, _, _ in cut(offset, vector.size):
            vector[begin:end] = _toward_zero(np.multiply(vector[begin:end], factor, dtype=np.float64))


def rounded_l2(bound: float, d: int) -> float:
    """The L2 norm that conditional rounding to integers allows a vector of the norm `bound` and length d.

    min(c + sqrt(d), sqrt(c^2 + d/4 + sqrt(2 log(1/beta)) (c + sqrt(d)/2))) with c = `bound` and beta = `BETA`: Kairouz
    et al. 2021, Algorithm 1. Unconditional stochastic rounding stays below it with probability at least 1 - beta.

    Args:
        bound: L2 norm before the rounding, in integer steps (scale times the clipping norm).
        d: Coordinates.

    Raises:
        ValueError: the norm is not positive and finite.
    """
    check_positive("bound", bound)
    spread = math.sqrt(2 * math.log(1 / BETA)) * (bound + math.sqrt(d) / 2)
    return min(bound + math.sqrt(d), math.sqrt(bound * bound + d / 4 + spread))


def rounded_l1(l2: float, d: int) -> float:
    """The largest L1 norm of d integers with the L2 norm `l2`: min(sqrt(d) l2, l2^2).

    The first is Cauchy and Schwarz's inequality; the second holds because |i| <= i^2 for an integer.
    """
    check_positive("l2", l2)
    return min(math.sqrt(d) * l2, l2 * l2)


def integer_round(
    vector: Update,
    scale: float,
    l2_bound: float,
    noise: NoiseStream,
    dimension: int,
    offset: int = 0,
    gather: Gather = alone,
    out: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.integer[Any]]:
    """Round scale x the whole vector to integers stochastically, so that the L2 norm of the result is at most
    `rounded_l2(scale * l2_bound, dimension)`.

    Each coordinate goes up with the probability of its fraction (to 2^-53), else down, which is unbiased; all are
    drawn again while the norm is above the bound (Kairouz et al. 2021, Algorithm 1), and this condition makes a
    small bias. Coordinate e takes element e of a stream of its own for each try. After `REDRAWS` tries the fraction is
    cut off instead: never above the bound, but biased toward zero. That happens with probability at most
    `BETA`^`REDRAWS`.

    Args:
        vector: Shape (d,), float32: elements [offset, offset + d) of a vector with an L2 norm of at most `l2_bound`
            (as `clip` returns it).
        scale: Integer steps for 1.0, positive; a power of two scales exactly.
        l2_bound: Clipping norm; `scale * l2_bound` is at most 2^32.
        noise: A stream that nothing else has used; the same for all spans.
        dimension: Coordinates of the whole vector.
        offset: Element of the whole vector where `vector` starts: that of a block.
        gather: Collects the blocks' sums of all spans; called once, and once for each try.
        out: Shape (d,), receives the result, modulo 2^b where its integers have b bits; by default a new int64 vector.

    Returns:
        Shape (d,), `out`.

    Raises:
        UpdateError: an element is not finite, or the norm is above `l2_bound`.
        ValueError: another argument is out of range, or has the wrong type or shape.
    """
    check_positive("scale", scale)
    check_positive("l2_bound", l2_bound)
    if scale * l2_bound > _MOST_STEPS:
        raise ValueError(f"scale * l2_bound is {scale * l2_bound:.6g}: expected at most 2^32")
    if offset + vector.size > dimension:
        raise ValueError(f"vector ends at element {offset + vector.size}: expected at most {dimension}")
    norm = l2_norm(vector, offset, gather)
    if norm > l2_bound:
        raise UpdateError(
            "norm of the update", norm, expected=f"at most the clipping norm {l2_bound}", fix="clip it first"
        )
    rounded = np.empty(vector.size, np.int64) if out is None else out
    if dimension == 0:
        return rounded
    largest = rounded_l2(scale * l2_bound, dimension) * (1 - _MARGIN)
    for number in range(REDRAWS):
        sums = []
        draws = noise.child(str(number)).uniform(vector.size, offset)
        for (begin, end, _, _), draw in zip(cut(offset, vector.size), draws, strict=True):
            scaled = np.multiply(vector[begin:end], scale, dtype=np.float64)
            down = np.floor(scaled)
            down += draw < scaled - down
            rounded[begin:end] = down.astype(np.int64)  # whole numbers in range; the assignment is modulo 2^b
            sums.append(float(np.square(down).sum()))
        if norm_of(gather(sums)) <= largest:
            return rounded
    for begin, end, _, _ in cut(offset, vector.size):
        cut_off = np.trunc(np.multiply(vector[begin:end], scale, dtype=np.float64))
        rounded[begin:end] = cut_off.astype(np.int64)
    return rounded


def _toward_zero(values: npt.NDArray[np.float64]) -> Update:
    """float64 to float32, rounded toward zero; denormal numbers too."""
    nearest = values.astype(np.float32)
    lifted = np.abs(nearest) > np.abs(values)
    bits = nearest.view(np.uint32)
    bits -= lifted  # sign and magnitude: one less is one step toward zero
    return nearest
