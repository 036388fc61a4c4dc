"""The weighted mean of updates, and exact totals of counters, from one sum of ring vectors.

A site's contribution is one vector: its weighted, coded update and then a tail with its counters. The update may be
coded in any number of spans, because values are keyed by their offset. The tail has one owner and is a span of its own.
The coordinator adds contributions to one accumulator as they arrive and opens the total once, so its memory does
not grow with the number of sites, and a site sends no figures outside of the vector:

    mean = (sum_i w_i x_i) / (sum_i w_i)        (McMahan et al. 2017, algorithm 1)

with weights represented as w_i / w_max in [0, 1], so that the heaviest site uses the whole resolution of the ring.
Weights are whole numbers, so that the sum of them is exact (`weight_of`).

With `aggregation.compression` the update is rotated and coded in blocks (`compression.py`); the rest is the same.

A site may lie in its counters, and the mean is divided by one of them. So each counter has a range for one site
(`Counter`), and a total outside of as many times that range makes no mean: with uniform weights the total weight is the
number of sites. With others a site that lies can move it anywhere between the number of sites and as many times
`heaviest`.

In clear each value of an update is checked too: a site that lies in its integers moves no value further than the bound
times the weight that it states (`SumLayout.check`). Under masks no party can check it.

The buffer of an asynchronous round (FedBuff) has updates of different models. It is a sum in clear for each model,
because the updates of each have a staleness, a part of the model and bounds of their own (`BufferedSum`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter as Counters
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.compression import BlockCode
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.aggregation.vector.sketch import Lengths
from cloister.aggregation.vector.span import Piece, add_pieces, check_pieces
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK, Span, cut

_ROUNDED = 1 + 1e-9
"""Of the norm, which is a sum of floats."""
WEIGHT = "weight"
CLIPPED = "clipped"


def weight_of(tokens: int, heaviest: int, temperature: float) -> int:
    """A site's weight by its tokens n: n^(1/T), in units in which the largest possible n has the weight n.

    It is rounded to a whole number, n itself for T = 1, and at least 1 for a site with a token. Arivazhagan et al. 2019
    ("Massively multilingual neural machine translation in the wild", section 4.2) sample languages by such powers.

    Args:
        tokens: n, 0 or more.
        heaviest: The largest n that a site can have.
        temperature: T, 1 or more.
    """
    if temperature == 1 or not tokens:
        return tokens
    return max(1, round(heaviest * math.pow(tokens / heaviest, 1 / temperature)))


class Counter(NamedTuple):
    """An exact total that travels with an update, and what one site can add to it."""

    name: str
    most: int
    """The largest number that a site can send."""
    least: int = 0
    """The smallest."""


@dataclass(frozen=True)
class SumLayout:
    """What a summed vector holds: `size` values of the update, `extra` values beside it, and the counters.

    Args:
        ring: The ring and its fixed-point code.
        size: Ring elements of the update, one for each value; 0 for a sum of counters alone. With `blocks` those of
            whole blocks.
        counters: The counters, in their order.
        heaviest: The largest weight a site can have.
        extra: Values that a mechanism sums beside the update, coded as the update is.
        most_extra: Most steps of such a value of one site, in either direction, without noise.
        blocks: The code of rotated blocks, without extra values; None: each value has the ring's own code.
        most_norm: Largest L2 norm of the update's integers, without noise; infinite: they have only a bound each.
        norm_bound: Largest L2 norm of an update before it is coded; infinite: the plan has none.
    """

    ring: Ring
    size: int
    counters: tuple[Counter, ...]
    heaviest: int = 1
    extra: int = 0
    most_extra: int = 0
    blocks: BlockCode | None = None
    most_norm: float = math.inf
    norm_bound: float = math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the counters, in their order."""
        return tuple(counter.name for counter in self.counters)

    @property
    def values(self) -> int:
        """Values of an update before it is coded."""
        return self.size if self.blocks is None else self.blocks.values

    @property
    def length(self) -> int:
        """Ring elements in a vector of this layout: the update in [0, size), the tail in [size, length)."""
        return self.size + self.extra + len(self.counters) * self.ring.limbs

    def lengths(self, bounds: Floats | None = None) -> Lengths | None:
        """How long the integers of an honest update are; None: they have only a bound each.

        Args:
            bounds: With `blocks`, the bound of each block.
        """
        if math.isinf(self.norm_bound):
            return None if math.isinf(self.most_norm) else Lengths(self.size, self.most_norm)
        if self.blocks is None:  # rounding moves each by less than a step
            longest = self.ring.scale * self.norm_bound + math.sqrt(self.size)
            return Lengths(self.size, longest, unit=self.ring.scale)
        assert bounds is not None, "a compressed sum has a bound for each block"
        return self.blocks.lengths(self.norm_bound, bounds)

    def encode(
        self,
        values: npt.NDArray[np.float32],
        weight: int,
        seed: bytes,
        offset: int = 0,
        out: RingVector | None = None,
    ) -> tuple[RingVector, int]:
        """One span of a site's part of a weighted mean.

        Args:
            values: (d,) float32: elements [offset, offset + d) of the update.
            weight: The site's weight, from 1 to `heaviest`.
            seed: Of the stochastic rounding, as in `Ring.encode`: the same for all spans of an update.
            offset: Element of the update where `values` starts.
            out: (d,) ring integers to write into.

        Returns:
            (d,) ring integers, and the number of values that were beyond the ring's bound.

        Raises:
            UpdateError: the values are not finite, end beyond the update, or the weight is out of range.
        """
        if values.ndim != 1 or offset < 0 or offset + values.size > self.size:
            raise UpdateError(
                "update", f"{values.shape} at {offset}", expected=f"a span of a vector of {self.size} values"
            )
        if not 0 < weight <= self.heaviest:
            raise UpdateError("weight", weight, expected=f"from 1 to {self.heaviest}")
        return self.ring.encode(values, seed, offset, factor=weight / self.heaviest, out=out)

    def tail(self, counters: Mapping[str, int], extra: npt.ArrayLike = ()) -> RingVector:
        """The span [size, length): the extra values, as whole numbers of steps, and then the counters.

        Args:
            counters: The exact counters, at least those of the layout.
            extra: The extra values; those beyond the ring are reduced modulo 2^bits.

        Returns:
            (length - size,) ring integers.

        Raises:
            UpdateError: there are more or fewer extra values than the layout has.
        """
        steps = np.asarray(extra, np.int64)
        if steps.shape != (self.extra,):
            raise UpdateError("extra values", steps.shape, expected=f"a vector of {self.extra} values")
        coded = self.ring.encode_counters([counters[name] for name in self.names])
        return np.concatenate([steps.astype(self.ring.dtype), coded])

    def counted(self, tail: RingVector, sites: int) -> dict[str, int]:
        """The totals of the counters over some sites, checked.

        Args:
            tail: Their ring integers, the end of the vector.
            sites: The number of sites whose vectors were added.

        Raises:
            UpdateError: a total is beyond what so many sites can send.
        """
        totals = self.ring.decode_counters(tail)
        for (name, most, least), total in zip(self.counters, totals, strict=True):
            if not least * sites <= total <= most * sites:
                expected = f"{least * sites}" if least == most else f"{least * sites} to {most * sites}"
                raise UpdateError(f"total of {name}", total, expected=f"{expected} for {sites} updates")
        return dict(zip(self.names, totals, strict=True))

    def check(self, pieces: Sequence[Piece], bounds: Floats | None = None) -> dict[str, int]:
        """Check one site's vector in clear, and return its counters.

        An honest site of weight w sends values of at most L w / w_max steps, rounded up, and perhaps one more, because
        that is a product of floats. With `blocks` it adds a residual, and sends at most L steps. In clear no site adds
        unit `site`'s noise, so the norm of its integers is that of a clipped update. A bound on the norm of an update
        is as much shorter as the weight that the site states.

        Args:
            pieces: Offset and ring integers of each span of the vector; they are only read, and not copied.
            bounds: As for `lengths`.

        Raises:
            UpdateError: the pieces have another type or do not tile it, or a counter, a value or the norm is out of
                range.
        """
        check_pieces(pieces, self.length, self.ring.dtype)
        tail = _tail(self, pieces)
        counters = self.counted(tail, 1)
        if not np.array_equal(tail, self.ring.encode_counters(list(counters.values()))):
            raise UpdateError("code of the counters", expected="no limb that could wrap in a sum")
        most = levels = self.ring.levels
        if self.blocks is None and self.size:
            most = min(levels, -(-levels * counters[WEIGHT] // self.heaviest) + 1)
        self._check_steps(pieces, "a value of the update", 0, self.size, most)
        self._check_steps(pieces, "a value beside the update", self.size, self.extra, self.most_extra)
        share = counters[WEIGHT] / self.heaviest if math.isfinite(self.norm_bound) else 1.0
        lengths = replace(self, norm_bound=self.norm_bound * share).lengths(bounds)
        if lengths is not None and (norm := lengths.norm(pieces)) > lengths.longest * _ROUNDED:
            raise UpdateError("norm of the update, in steps", norm, expected=f"at most {lengths.longest:.6g}")
        return counters

    def _check_steps(self, pieces: Sequence[Piece], what: str, begin: int, size: int, most: int) -> None:
        for steps in self._signed(pieces, begin, size):
            for furthest in (int(steps.min()), int(steps.max())):
                if abs(furthest) > most:
                    expected = f"at most {most} in either direction"
                    raise UpdateError(f"steps of {what}", furthest, expected=expected)

    def _signed(self, pieces: Sequence[Piece], begin: int, size: int) -> Iterator[npt.NDArray[Any]]:
        """The elements [begin, begin + size) as signed numbers, in parts that are not empty."""
        for offset, vector in pieces:
            start = max(0, begin - offset)
            signed = vector[start : max(start, begin + size - offset)].view(self.ring.signed_dtype)
            for at in range(0, signed.size, BLOCK):
                yield signed[at : at + BLOCK]

    def open(self, total: RingVector, sites: int, bounds: Floats | None = None) -> Opened:
        """Check a finished sum, which is decoded when its mean is asked for.

        Args:
            total: (length,) ring integers; overwritten then.
            sites: The number of vectors in the sum.
            bounds: With `blocks`, the bound of each block.

        Raises:
            UpdateError: there is no vector in it; or a counter is out of range, so a site lied in it.
        """
        if not sites:
            raise UpdateError("number of updates", 0, expected="at least one contribution")
        values = self.size + self.extra
        counters = self.counted(total[values:], sites)
        return Opened(total[:values], counters, partial(self._decode, counters=counters, bounds=bounds))

    def _decode(self, total: RingVector, counters: Mapping[str, int], bounds: Floats | None) -> Floats:
        """The mean, block by block, in the sum's own memory where a ring integer is as wide as a float."""
        factor = self.heaviest / counters[WEIGHT]
        if self.blocks is not None:
            assert bounds is not None, "a compressed sum has a bound for each block"
            return self.blocks.decode(total, bounds, factor)
        mean = total.view(np.float32) if total.itemsize == 4 else np.empty(total.size, np.float32)
        for begin, end, _, _ in cut(0, total.size):
            block = self.ring.decode(total[begin:end])
            block *= factor
            mean[begin:end] = block
        return mean


@dataclass
class Opened:
    """A sum whose counters are decoded, and whose values are when the mean is read."""

    total: RingVector | None
    """(values + extra,) ring integers, to which noise may be added; None: the mean was read, in their memory."""
    counters: dict[str, int]
    """Exact totals."""
    decode: Callable[[RingVector], Floats]
    """Makes the mean of `total`."""
    rounds: tuple[int, ...] = ()
    """The rounds whose models the updates in a buffer are of; empty: that of the sum alone."""

    @cached_property
    def mean(self) -> Floats:
        """(values + extra,) weighted mean of the updates, and of the extra values."""
        assert self.total is not None, "the mean is not read yet"
        total, self.total = self.total, None
        return self.decode(total)


class PlainSum:
    """The sum in clear: one accumulator, to which contributions are added in any order.

    Args:
        layout: Of a contribution.
        bounds: As for `SumLayout.open`.
    """

    def __init__(self, layout: SumLayout, bounds: Floats | None = None) -> None:
        self._layout = layout
        self._bounds = bounds
        self._total: RingVector | None = np.zeros(layout.length, dtype=layout.ring.dtype)
        self.terms = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        """Fold in one contribution, in pieces that tile the vector.

        Raises:
            UpdateError: the pieces have another type or do not tile it, a counter or a value is out of range, or the
                sum already has as many contributions as the ring holds; the sum is unchanged.
        """
        self._layout.check(pieces, self._bounds)
        if self.terms >= self._layout.ring.terms:
            raise UpdateError(
                "number of updates", self.terms + 1, expected=f"at most {self._layout.ring.terms}"
            )
        assert self._total is not None, "a contribution was added after the sum was opened"
        add_pieces(self._total, pieces)
        self.terms += 1

    def open(self) -> Opened:
        """Decode the sum of what was added; once, because its memory becomes the mean's."""
        assert self._total is not None, "the sum was opened before"
        total, self._total = self._total, None
        return self._layout.open(total, self.terms, self._bounds)


class OfModel(NamedTuple):
    """What the updates of one model have in common."""

    round: int
    """The round that began with the model."""
    layout: SumLayout
    spans: tuple[Span, ...]
    """Where the values of its round lie in the vector of all that the run trains: increasing, without overlaps."""
    bounds: Floats | None = None
    """As for `SumLayout.open`: those of its round."""


class BufferedSum:
    """The sum of a buffer of FedBuff (Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation").

    An update x_i has the coordinates that the round of its model trains: all, or a part (`lm/model/schedule.py`). With
    the weight w_i of its site and its staleness s_i, the number of rounds since its model, the mean of coordinate
    k is over the updates that have k:

        mean_k = (sum_i c_i w_i x_ik) / (sum_i c_i w_i),        c_i = 1 / sqrt(1 + s_i)

    A coordinate that no update has is not in the mean, and the server does not step on it. FedBuff divides by the
    number of updates; dividing by their weights makes a buffer of equally stale updates count as a fresh one, and one
    update of a part count there as a whole buffer of that part.

    The updates of one model r have one staleness, layout and place, and were coded with the bounds of r. So they have a
    `PlainSum`, whose ring integers are exact in any order, with the mean m_r and the total weight W_r, and then

        mean_k = (sum_r c_r W_r m_rk) / (sum_r c_r W_r)        over the models r whose round trains k.

    Where all updates are of one model, the mean is that of its `PlainSum` to the last bit.

    Args:
        number: The round, which began with the newest model.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._sums: dict[int, tuple[OfModel, PlainSum]] = {}

    @property
    def terms(self) -> int:
        """The number of contributions."""
        return sum(total.terms for _, total in self._sums.values())

    def add(self, pieces: Sequence[Piece], of: OfModel) -> None:
        """Fold in one contribution, in pieces that tile the vector.

        Args:
            pieces: Offset and ring integers of each span.
            of: Its model, the same for all contributions of a round.

        Raises:
            UpdateError: the pieces have another type or do not tile it, or a counter or a value is out of range; the
                sum is unchanged.
        """
        assert not of.layout.extra, "a mechanism's extra values are not summed in a buffer"
        known, total = self._sums.get(of.round) or (of, PlainSum(of.layout, of.bounds))
        total.add(pieces)
        self._sums[of.round] = known, total

    def open(self) -> Opened:
        """The mean of what was added, once; and the totals of the counters, which staleness does not weigh.

        Raises:
            UpdateError: nothing was added.
        """
        if not self._sums:
            raise UpdateError("number of updates", 0, expected="at least one contribution")
        rounds, counters = tuple(sorted(self._sums)), Counters[str]()
        parts: list[tuple[float, Floats, tuple[Span, ...]]] = []
        for number in rounds:
            of, total = self._sums[number]
            opened = total.open()
            counters.update(opened.counters)
            weight = opened.counters[WEIGHT] / math.sqrt(1 + self._number - number)
            parts.append((weight, opened.mean, of.spans))
        mean = parts[0][1] if len(parts) == 1 else _merged(parts)
        return Opened(np.empty(0, np.uint32), dict(counters), lambda _total: mean, rounds)


def _merged(parts: Sequence[tuple[float, Floats, Sequence[Span]]]) -> Floats:
    """The weighted mean of several vectors, each of which has some spans of a whole one: of its elements that are in at
    least one of them, over those that have it.

    Args:
        parts: The weight, the vector, and where its elements lie, increasing and without overlaps.
    """
    edges = sorted({edge for *_, spans in parts for span in spans for edge in (span.start, span.stop)})
    own = [list(accumulate((span.size for span in spans), initial=0)) for *_, spans in parts]
    # Between two edges: weights, and elements of each vector that has it.
    found: list[list[tuple[float, Floats]]] = []
    for start, stop in pairwise(edges):
        found.append([])
        for (weight, vector, spans), firsts in zip(parts, own, strict=True):
            at = bisect_right(spans, start, key=lambda span: span.start) - 1
            if at >= 0 and start < spans[at].stop:
                first = firsts[at] + start - spans[at].start
                found[-1].append((weight, vector[first : first + stop - start]))
    merged = np.empty(sum(have[0][1].size for have in found if have), np.float32)
    done = 0
    for have in filter(None, found):
        total = math.fsum(weight for weight, _ in have)
        for begin, end, _, _ in cut(0, have[0][1].size):
            block = np.zeros(end - begin)
            for weight, vector in have:
                block += weight / total * vector[begin:end].astype(np.float64)
            merged[done + begin : done + end] = block
        done += have[0][1].size
    return merged


def weighted(means: Sequence[Floats], weights: Sequence[int]) -> Floats:
    """The weighted mean of the means of several sums, in the memory of the first.

    Args:
        means: (d,) float32 each; one or more of equal length. The first is overwritten.
        weights: The total weight of each sum, 1 or more.
    """
    first, total = means[0], sum(weights)
    for begin, end, _, _ in cut(0, first.size if len(means) > 1 else 0):
        parts = (mean[begin:end] * (weight / total) for mean, weight in zip(means, weights, strict=True))
        first[begin:end] = sum(part.astype(np.float64) for part in parts)
    return first


def _tail(layout: SumLayout, pieces: Sequence[Piece]) -> RingVector:
    """The counters' ring integers of a contribution, from the pieces that tile it."""
    start = layout.size + layout.extra
    tail: RingVector = np.empty(layout.length - start, layout.ring.dtype)
    for offset, vector in pieces:
        after = max(offset, start)
        tail[after - start : max(offset + vector.size, start) - start] = vector[after - offset :]
    return tail
