"""Compression: an update in rotated blocks of few bits, the bounds of the blocks, and what each site's code leaves out.

`aggregation/vector/compression.py` has the code of the blocks. The bounds of a round follow from what was released
before: no site tells anything more for them. All sites of a sum are told them.

In round 1 all blocks have the bound 3 s, where s, `aggregation.compression.first_scale`, is by default the sum of the
round's learning rates. A step of AdamW (and of Muon, which is scaled to it) moves a coordinate by about its learning
rate at most, so s bounds the root mean square of an update, which the rotation does not change. A step of SGD is as
long as its learning rate times `local.clip_norm` at most, so s is that of d parameters over sqrt(d).

After a round with the released mean m, the total weight W of n sites and the largest weight w_max, block j gets

    B_j = multiple × max(rms_j, rms / 8),        rms_j = W / (n w_max) × ||m_j|| / sqrt(S),

with the root mean square `rms` of all rms_j: m's blocks as they were sent, by the sites' mean weight. A block that did
not move can move again by the second term. Updates of n sites that have nothing in common have a mean that is sqrt(n)
times smaller than each of them, so `multiple` is 3.5 sqrt(n) at first; with a privacy unit, with groups and in
asynchronous rounds, always.
Otherwise it follows the released number of clipped values: a normal coordinate exceeds c root mean squares with
probability p = 2 Phi(-c). The fraction that was clipped gives c, and `multiple` is multiplied by 3 / c, at least 3/4
and at most 2. It stays between 3, which updates that are all alike need, and 3 n, for one site that moves alone. A site
that lies in that number moves `multiple` anywhere between them: the steps are up to 3 n / `multiple` times as large, or
values beyond 3 root mean squares are clipped. At c = 3 and 15 levels rounding adds 0.7 % to the squared norm of an
update, and clipping less. With groups m is the median of their means, and W / n the median of theirs. What they
clipped is not used: one site decides the number of its group, and that number would count for all groups.

In asynchronous rounds n is the number of updates in a buffer. An update is coded, and decoded, with the bounds of the
round of its model, whatever round it is summed in. What was clipped in a buffer was clipped by the bounds of several
rounds, so it is not used either. A residual says by which bounds it was made, and goes into the site's next update
whatever weight its staleness gives to it.

All is kept within `aggregation.bound` and 2^-24 of it, which each site checks. The bounds are part of the
instructions of a sum (`messages.Instructions`).

Error feedback: the code of an update leaves a residual, which the site carries into the next round (`carried.py`): a
file of the bounds of the blocks (float32), then the residual, as wide as the ring. It counts once where each round's
update is summed. The residual of an update that was lost is added all the same: mostly less than a step of each value.

Where rounds train different parts of a model (`lm/model/schedule.py`), the blocks of a round's vector have other
parameters in each round. The bounds are then kept for blocks of the whole vector. A block of a round has the root mean
square of the bounds of its elements, and the blocks that the round has trained get theirs in the same way. A residual,
which is a residual of rotated values, is not kept.

Refused: bounds from the sites' own norms, which would be totals of their own, or a round trip before each round.
"""

from __future__ import annotations

import errno
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features import in_clear
from cloister.aggregation.features.feature import (
    WHOLE,
    AtCoordinator,
    AtSite,
    Basis,
    Clipped,
    Feature,
    Figures,
    Given,
    Me,
    Portion,
    Secrets,
    State,
    Summed,
)
from cloister.aggregation.features.in_clear import InClear
from cloister.aggregation.features.norm_bound import bound_of
from cloister.aggregation.vector.average import CLIPPED, WEIGHT, SumLayout
from cloister.aggregation.vector.compression import BlockCode, Kept
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import ROTATED, Floats, rotated_blocks
from cloister.protocol.errors import PlanError, UpdateError
from cloister.protocol.figure import Figure
from cloister.protocol.machine.storage import allocate, on_disk
from cloister.protocol.messages.blocks import Span
from cloister.protocol.messages.messages import LONGEST_TOLD
from cloister.protocol.plan.plan import Plan

if TYPE_CHECKING:  # torch takes seconds to import
    from cloister.lm.training.moments import Carry

NAME = "compression"
FIRST = 3.0
"""Bound of a block in round 1, in `first_scale`."""
START = 3.5
"""`multiple` over the square root of the number of sites, before anything is known of clipped values."""
TARGET = 3.0
"""Root mean squares of a block at which values should be clipped."""
LEAST_BOUND = 1 / 256
"""Least bound of a block where a sketch weighs blocks by their bounds, as a share of the largest: weights, which are
whole steps of `vector.compression.FINEST`, are then off by 1/32 at most. Sites refuse less: in the product of a row
with two blocks, of which one weighs more than all steps of the other, the parts of both could be read."""
LEAST_SHARE = 1 / 8
"""Least rms of a block that the bounds assume, as a share of that of all blocks."""
SMALLEST = 2.0**-24
"""Smallest bound of a block, in `aggregation.bound`."""

Indices: TypeAlias = npt.NDArray[np.int64]

_FALL, _RISE = 0.75, 2.0
_ROUNDED = 1e-6
"""Of a quotient of float32 numbers."""
_RAREST = 1e-7
"""Fraction of clipped values below which the bounds are only known to be far too large."""


@dataclass(frozen=True)
class Scales:
    """The bounds of a round."""

    bounds: Floats
    """(blocks,) float32, positive."""
    multiple: float
    """As above, with which the bounds were made; 0 in round 1."""

    @classmethod
    def first(cls, plan: Plan, parameters: int, norm_bound: float = math.inf) -> Scales:
        """Those of round 1.

        Args:
            plan: A plan with `aggregation.compression`.
            parameters: Trained parameters of its model.
            norm_bound: The largest norm of an update.
        """
        compression, local = plan.aggregation.compression, plan.local
        assert compression is not None, "only a plan with compression has scales"
        scale = compression.first_scale
        if scale is None:
            from cloister.lm.training.optimizer import learning_rate, optimizer_of

            steps = plan.run.rounds * local.steps
            scale = math.fsum(learning_rate(local, step, steps) for step in range(local.steps))
            scale *= optimizer_of(local).rms(local, parameters)
        if norm_bound < math.inf:
            scale = min(scale, norm_bound / math.sqrt(parameters))
        bounds = np.full(rotated_blocks(parameters), FIRST * scale)
        return cls(_within(bounds, plan.aggregation.bound), 0.0)

    @classmethod
    def most(cls, plan: Plan, parameters: int, norm_bound: float) -> Scales:
        """The largest bounds, all together, that rounds with a bound on the norm of an update may have (`at_most`), but
        for `SMALLEST`.

        The root mean squares of blocks have a norm of at most T / sqrt(S) then, with `LEAST_SHARE` of it and
        `LEAST_BOUND` of the largest beside.
        """
        blocks = rotated_blocks(parameters)
        n = plan.cohort.needed() if plan.cohort.mode == "async" else plan.cohort.size()
        multiple = max(FIRST, START * math.sqrt(n) if plan.privacy.unit != "none" else TARGET * n)
        rms = norm_bound / math.sqrt(parameters) * math.sqrt(1 + LEAST_SHARE**2 + blocks * LEAST_BOUND**2)
        return cls(np.full(blocks, min(multiple * rms, plan.aggregation.bound), np.float32), multiple)

    def at_most(self, most: Scales, largest: float) -> Scales:
        """These, where blocks are weighed in sketches: none below `LEAST_BOUND`, and all together not above others.

        Rounds that train parts make the bounds of a whole vector one after the other, and liars could make each of
        them large: a round with all of these blocks would have room for updates that no round may have.

        Args:
            most: Those others, of as many blocks.
            largest: `aggregation.bound`.
        """
        bounds = np.maximum(self.bounds, self.bounds.max() * LEAST_BOUND).astype(np.float64)
        bounds *= min(1.0, float(np.linalg.norm(most.bounds.astype(np.float64)) / np.linalg.norm(bounds)))
        return Scales(_within(bounds, largest), self.multiple)

    def after(
        self,
        plan: Plan,
        mean: Floats,
        sites: int,
        mean_weight: float,
        clipped: int | None,
        norm_bound: float = math.inf,
    ) -> Scales:
        """Those of the next round.

        Args:
            plan: The plan.
            mean: (d,) float32: the released mean.
            sites: Sites in it.
            mean_weight: Their mean weight over the largest weight.
            clipped: Values that they clipped; None where that is not released, or one site would decide it for all.
            norm_bound: The largest norm of an update. A mean that is longer makes no larger bounds: they would make
                room for longer updates, also of sites that lie.
        """
        blocks = rotated_blocks(mean.size)
        squares = np.zeros(blocks)
        for block in range(blocks):
            part = mean[block * ROTATED : (block + 1) * ROTATED].astype(np.float64)
            squares[block] = part @ part / ROTATED
        squares *= mean_weight**2
        squares *= min(1.0, norm_bound**2 / max(float(squares.sum()) * ROTATED, 1e-300))
        everywhere = float(squares.mean())
        if everywhere == 0:
            return self
        n = plan.cohort.needed() if plan.cohort.mode == "async" else plan.cohort.size()
        multiple = self.multiple or START * math.sqrt(n)
        if clipped is not None and self.multiple:
            share = min(max(clipped / (sites * blocks * ROTATED), _RAREST), 0.9)
            multiple *= min(max(TARGET / -NormalDist().inv_cdf(share / 2), _FALL), _RISE)
        multiple = min(max(multiple, TARGET), TARGET * n)
        rms = np.sqrt(np.maximum(squares, everywhere * LEAST_SHARE**2))
        return Scales(_within(multiple * rms, plan.aggregation.bound), multiple)

    def within(self, spans: Sequence[Span]) -> Scales:
        """Those of the blocks of a round's vector, which has these spans of the whole."""
        size = sum(span.size for span in spans)
        if len(spans) == 1 and not spans[0].start and rotated_blocks(size) == len(self.bounds):
            return self
        own, whole, count = _overlaps(spans)
        squares = np.bincount(own, count * self.bounds[whole].astype(np.float64) ** 2) / np.bincount(
            own, count
        )
        return Scales(np.sqrt(squares).astype(np.float32), self.multiple)

    def spread(self, spans: Sequence[Span], made: Scales) -> Scales:
        """These, where a round with these spans of the whole vector has made the bounds of its own blocks."""
        if len(spans) == 1 and not spans[0].start and len(made.bounds) == len(self.bounds):
            return made
        own, whole, count = _overlaps(spans)
        blocks = len(self.bounds)
        squares = np.bincount(whole, count * made.bounds[own].astype(np.float64) ** 2, blocks)
        elements = np.bincount(whole, count, blocks)
        bounds = np.sqrt(squares / np.maximum(elements, 1)).astype(np.float32)
        return Scales(np.where(elements > 0, bounds, self.bounds), made.multiple)

    def to_bytes(self) -> bytes:
        """The bounds as a message carries them: float32, little-endian."""
        return self.bounds.astype("<f4").tobytes()

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """What a checkpoint keeps; `restored` reads it."""
        return {
            "bounds": self.bounds.astype(np.float64),  # exactly
            "multiple": np.array([self.multiple]),
        }

    @classmethod
    def restored(cls, state: Mapping[str, npt.NDArray[np.float64]]) -> Scales:
        """From what `state` returned."""
        return cls(state["bounds"].astype(np.float32), float(state["multiple"][0]))


def _overlaps(spans: Sequence[Span]) -> tuple[Indices, Indices, Indices]:
    """Which blocks of a vector that has these spans of a whole one have elements of which blocks of the whole: block,
    block of the whole, and the number of elements."""
    found: list[tuple[int, int, int]] = []
    own = 0
    for span in spans:
        at = span.start
        while at < span.stop:
            count = min(span.stop - at, ROTATED - at % ROTATED, ROTATED - own % ROTATED)
            found.append((own // ROTATED, at // ROTATED, count))
            at, own = at + count, own + count
    columns = np.array(found, np.int64).T
    return columns[0], columns[1], columns[2]


def bounds_in(sent: bytes, plan: Plan, parameters: int) -> Floats:
    """The bounds in a message, checked.

    Args:
        sent: What `Scales.to_bytes` made, from another party.
        plan: A plan with `aggregation.compression`.
        parameters: Trained parameters of its model.

    Returns:
        (blocks,) float32.

    Raises:
        UpdateError: they are not one finite number for each block, or outside of what the plan allows.
    """
    blocks, largest = rotated_blocks(parameters), plan.aggregation.bound
    if len(sent) != 4 * blocks:
        raise UpdateError(
            "scales", f"{len(sent)} bytes", expected=f"{4 * blocks}: a float32 for each of {blocks} blocks"
        )
    bounds: Floats = np.frombuffer(sent, "<f4").astype(np.float32)
    least, most = _limits(largest)
    within = (bounds >= least) & (bounds <= most)  # false for what is not a number
    if not within.all():
        at = int(np.flatnonzero(~within)[0])
        raise UpdateError(
            f"scales[{at}]",
            float(bounds[at]),
            expected=f"{float(least):.6g} to {float(most):.6g}, which aggregation.bound = {largest:g} allows",
        )
    if plan.aggregation.norm_bound is not None and bounds.min() < bounds.max() * LEAST_BOUND * (1 - _ROUNDED):
        at = int(bounds.argmin())
        raise UpdateError(
            f"scales[{at}]",
            float(bounds[at]),
            expected=f"at least {LEAST_BOUND:g} of the largest, {float(bounds.max()):.6g}, with aggregation.norm_bound",
        )
    return bounds


def _limits(largest: float) -> tuple[np.float32, np.float32]:
    return np.float32(largest * SMALLEST), np.float32(largest)


def _within(bounds: npt.NDArray[np.float64], largest: float) -> Floats:
    return np.clip(bounds.astype(np.float32), *_limits(largest))


# The residual.

_RESIDUAL = "residual"
_FLOAT = np.dtype("<f4")


class Residuals(NamedTuple):
    """The files of what a compressed update is coded with."""

    before: Path | None
    """The residual that the site carries; None: there is none."""
    after: Path
    """File of the residual of this update, of its full size."""

    def kept(self, code: BlockCode, span: Span) -> Kept | None:
        """What was left out in a span of the coded update of an earlier round; None: there was none.

        Raises:
            StorageError: the disk refuses the access.
        """
        if self.before is None:
            return None
        with on_disk(self.before):
            bounds = np.fromfile(self.before, _FLOAT, code.blocks)
            left = np.fromfile(
                self.before, code.ring.signed_dtype, span.size, offset=_place(code, span.start)
            )
            if left.size != span.size:
                raise OSError(errno.EIO, "the file is shorter than it was")
        return Kept(left, bounds[span.start // ROTATED : span.stop // ROTATED])

    def keep(self, code: BlockCode, span: Span, left: npt.NDArray[np.signedinteger[Any]]) -> None:
        """Write what is left out in a span of the coded update, for the next round.

        Raises:
            StorageError: the disk refuses the access.
        """
        with on_disk(self.after), self.after.open("r+b") as file:
            file.seek(_place(code, span.start))
            file.write(left.data)


def residuals(carry: Carry, bounds: npt.NDArray[np.float32], code: BlockCode) -> Residuals:
    """The files of what the update before has left out, and of what this one will leave out, which is made here.

    The new one has its full size at once: where the disk is full, no rank meets it later. Its owner alone may read it.

    Args:
        carry: What the update begins with, and where it writes what it leaves.
        bounds: (blocks,) float32: the bounds with which the update is coded.
        code: The code of the updates.

    Raises:
        StorageError: the disk is full.
    """
    after = carry.after / _RESIDUAL
    with on_disk(after):
        allocate(after, _place(code, code.size))
        with after.open("r+b") as file:
            file.write(bounds.astype(_FLOAT).data)
    return Residuals(carry.before / _RESIDUAL if carry.before else None, after)


def _place(code: BlockCode, element: int) -> int:
    """Byte of a file where an element of the residual is."""
    return _FLOAT.itemsize * code.blocks + np.dtype(code.ring.dtype).itemsize * element


# The two halves.


def layout(basis: Basis) -> SumLayout:
    """The weighted updates in whole rotated blocks, and the counters.

    Raises:
        PlanError: there are more blocks than a message has room for.
    """
    plan, parameters = basis.plan, basis.parameters
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, max(plan.summed()))
    bounded = plan.aggregation.norm_bound is not None  # a larger residual would be room for longer updates
    blocks = BlockCode(parameters, plan.run.seed, ring, one_step=bounded)
    if 4 * blocks.blocks > LONGEST_TOLD:
        raise PlanError(
            "trained parameters",
            parameters,
            expected=f"at most {LONGEST_TOLD // 4} blocks of 2^14 with [aggregation.compression]",
            fix="train an adapter ([model.adapter]), or remove [aggregation.compression]",
        )
    return in_clear.layout(basis, blocks)


@dataclass(frozen=True)
class Compressed(InClear):
    """A `Code` of rotated blocks, with what the site's last code has left out."""

    bounds: Floats = field(kw_only=True)
    """(blocks,) float32: the bound of each block of the whole update in this round."""
    residuals: Residuals | None = field(kw_only=True)
    """The files of what is left out; None where that is not kept."""

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """As `Code.release`; the residual of the span is written."""
        code = self.layout.blocks
        assert code is not None, "a compressed layout has blocks"
        span = code.coded(Span(of.offset, of.offset + values.size))
        factor = self.weight(tokens) / self.layout.heaviest
        coding = partial(code.encode, values, self.bounds, self.rounding, of.offset)
        encode = partial(coding, factor=factor, out=of.out)
        if self.residuals is None:
            coded, clipped = encode()
            return coded, Clipped(values=clipped)
        left = np.empty(span.size, code.ring.signed_dtype)
        coded, clipped = encode(kept=self.residuals.kept(code, span), residual=left)
        self.residuals.keep(code, span, left)
        return coded, Clipped(values=clipped)


@dataclass(frozen=True)
class _AtSite(AtSite):
    plan: Plan
    bounds: Floats

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> _AtSite:
        return cls(basis.plan, bounds_in(told, basis.plan, basis.parameters))

    def code(self, layout: SumLayout, secrets: Secrets, factor: float) -> Compressed:
        assert layout.blocks is not None, "a compressed layout has blocks"
        left = None
        if self.plan.keeps_residuals:
            assert secrets.carry is not None, "a plan that keeps residuals carries them"
            left = residuals(secrets.carry, self.bounds, layout.blocks)
        aggregation = self.plan.aggregation
        return Compressed(layout, secrets.rounding, aggregation, factor, bounds=self.bounds, residuals=left)

    def blocks(self) -> Floats:
        return self.bounds


class _AtCoordinator(AtCoordinator):
    def __init__(self, basis: Basis, given: Given) -> None:
        super().__init__(basis, given)
        self._heaviest = layout(basis).heaviest
        self._part = basis.part
        self._basis = basis
        self._scales = self._next = Scales.first(basis.plan, basis.parameters, bound_of(basis))

    def tell(self, number: int, cohort: Sequence[str]) -> bytes:
        spans = self._part((number,))
        told, size = self._scales.within(spans), sum(span.size for span in spans)
        if self.plan.aggregation.norm_bound is not None:
            bound = bound_of(replace(self._basis, parameters=size))
            told = told.at_most(Scales.most(self.plan, size, bound), self.plan.aggregation.bound)
        return told.to_bytes()

    def bounds(self, told: bytes) -> Floats:
        return bounds_in(told, self.plan, len(told) // 4 * ROTATED)

    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> Figures:
        sites = sum(len(summed.names) for summed in sums)
        weights = [summed.counters[WEIGHT] / self._heaviest / len(summed.names) for summed in sums]
        one = len(sums) == self.plan.aggregation.groups == 1 and self.plan.cohort.mode == "sync"
        clipped = sums[0].counters.get(CLIPPED) if one else None
        spans = self._part(sums[0].rounds)
        weight, bound = statistics.median(weights), bound_of(replace(self._basis, parameters=mean.size))
        made = self._scales.within(spans).after(self.plan, mean, sites, weight, clipped, bound)
        self._next = self._scales.spread(spans, made)
        return {}

    def after_step(self) -> None:
        self._scales = self._next

    def figures(self, sums: Sequence[Summed]) -> Figures:
        return {"multiple": self._scales.multiple}

    def state(self) -> State:
        return self._scales.state()

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._scales = self._next = Scales.restored(state)


FEATURE = Feature(
    NAME,
    wanted=lambda basis: basis.plan.aggregation.compression is not None,
    site=_AtSite,
    coordinator=_AtCoordinator,
    tells=True,
    figures=(
        Figure(
            "multiple", "bounds of the next round's blocks", ".3g", unit="root mean squares", in_line=False
        ),
    ),
    layout=layout,
)
