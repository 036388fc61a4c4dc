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
times smaller than each of them, so `multiple` is 3.5 sqrt(n) at first, and with a privacy unit always. Without a unit
it follows the released number of clipped values: a normal coordinate exceeds c root mean squares with probability
p = 2 Phi(-c). The fraction that was clipped gives c, and `multiple` is multiplied by 3 / c, at least 3/4 and at most 2.
With groups m is the median of their means, and n and W are those of all groups.
It stays between 3, which updates that are all alike need, and 3 n, for one site that moves alone: so a site that lies
in that number can make the steps 3 n / `multiple` times as large, and no more. At c = 3 and 15 levels rounding adds
0.7 % to the squared norm of an update, and clipping less.

All is kept within `aggregation.bound` and 2^-24 of it, which each site checks. The bounds are part of the
instructions of a sum (`messages.Instructions`).

Error feedback: the code of an update leaves a residual, which the site carries into the next round (`carried.py`): a
file of the bounds of the blocks (float32), then the residual, as wide as the ring. It counts once where each round's
update is summed. The residual of an update that was lost is added all the same: mostly less than a step of each value.

Refused: bounds from the sites' own norms, which would be totals of their own, or a round trip before each round.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features import in_clear
from cloister.aggregation.features.feature import (
    AtCoordinator,
    AtSite,
    Basis,
    Clipped,
    Feature,
    Figures,
    Given,
    Me,
    Secrets,
    State,
    Summed,
)
from cloister.aggregation.features.in_clear import InClear
from cloister.aggregation.vector.average import CLIPPED, WEIGHT, SumLayout
from cloister.aggregation.vector.compression import BlockCode, Kept
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.aggregation.vector.rotation import ROTATED, Floats, rotated_blocks
from cloister.privacy.mechanism.clip import Gather, alone
from cloister.protocol.errors import PlanError, UpdateError
from cloister.protocol.figure import Figure
from cloister.protocol.machine.storage import allocate, disk_refusal
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
LEAST_SHARE = 1 / 8
"""Least rms of a block that the bounds assume, as a share of that of all blocks."""
SMALLEST = 2.0**-24
"""Smallest bound of a block, in `aggregation.bound`."""

_FALL, _RISE = 0.75, 2.0
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
    def first(cls, plan: Plan, parameters: int) -> Scales:
        """Those of round 1.

        Args:
            plan: A plan with `aggregation.compression`.
            parameters: Trained parameters of its model.
        """
        compression, local = plan.aggregation.compression, plan.local
        assert compression is not None, "only a plan with compression has scales"
        scale = compression.first_scale
        if scale is None:
            from cloister.lm.training.optimizer import learning_rate

            steps = plan.run.rounds * local.steps
            scale = math.fsum(learning_rate(local, step, steps) for step in range(local.steps))
            if local.optimizer == "sgd":
                scale *= local.clip_norm / math.sqrt(parameters)
        bounds = np.full(rotated_blocks(parameters), FIRST * scale)
        return cls(_within(bounds, plan.aggregation.bound), 0.0)

    def after(self, plan: Plan, mean: Floats, sites: int, weight: float, clipped: int | None) -> Scales:
        """Those of the next round.

        Args:
            plan: The plan.
            mean: (d,) float32: the released mean.
            sites: Sites in it.
            weight: Their total weight over the largest weight.
            clipped: Values that they clipped; None where that is not released.
        """
        blocks = len(self.bounds)
        squares = np.zeros(blocks)
        for block in range(blocks):
            part = mean[block * ROTATED : (block + 1) * ROTATED].astype(np.float64)
            squares[block] = part @ part / ROTATED
        squares *= (weight / sites) ** 2
        everywhere = float(squares.mean())
        if everywhere == 0:
            return self
        multiple = self.multiple or START * math.sqrt(plan.cohort.size())
        if clipped is not None and self.multiple:
            share = min(max(clipped / (sites * blocks * ROTATED), _RAREST), 0.9)
            multiple *= min(max(TARGET / -NormalDist().inv_cdf(share / 2), _FALL), _RISE)
        multiple = min(max(multiple, TARGET), TARGET * plan.cohort.size())
        rms = np.sqrt(np.maximum(squares, everywhere * LEAST_SHARE**2))
        return Scales(_within(multiple * rms, plan.aggregation.bound), multiple)

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
    return bounds


def _limits(largest: float) -> tuple[np.float32, np.float32]:
    return np.float32(largest * SMALLEST), np.float32(largest)


def _within(bounds: npt.NDArray[np.float64], largest: float) -> Floats:
    within: Floats = np.clip(bounds.astype(np.float32), *_limits(largest))
    return within


# The residual.

_RESIDUAL = "residual"
_FLOAT = np.dtype("<f4")


class Residuals(NamedTuple):
    """What a compressed update is coded with."""

    bounds: npt.NDArray[np.float32]
    """(blocks,) float32: the bound of each block of the whole update in this round."""
    before: Path | None
    """The residual that the site carries; None: there is none."""
    after: Path
    """File of the residual of this update, of its full size."""


class Stored:
    """A span of the residual in a file, read and written by parts: pages that are mapped from a file cost more.

    Args:
        file: The open file.
        code: The code of the updates.
        span: Of the coded update.
    """

    def __init__(self, file: int, code: BlockCode, span: Span) -> None:
        self._file = file
        self._type = np.dtype(code.ring.signed_dtype)
        self._start = _FLOAT.itemsize * code.blocks + self._type.itemsize * span.start

    def __getitem__(self, part: slice) -> npt.NDArray[np.signedinteger[Any]]:
        found = np.empty(part.stop - part.start, self._type)
        if os.preadv(self._file, [found.data], self._at(part)) != found.nbytes:
            raise OSError(errno.EIO, "the file is shorter than it was")
        return found

    def __setitem__(self, part: slice, values: npt.NDArray[np.float32]) -> None:
        written = values.astype(self._type)
        if os.pwrite(self._file, written.data, self._at(part)) != written.nbytes:
            raise OSError(errno.ENOSPC, "no space left")

    def _at(self, part: slice) -> int:
        return self._start + self._type.itemsize * int(part.start)


def residuals(carry: Carry, bounds: npt.NDArray[np.float32], code: BlockCode) -> Residuals:
    """The files of what the update before has left out, and of what this one will leave out, which is made here.

    The new one has its full size at once: where the disk is full, no rank meets it later.

    Args:
        carry: What the update begins with, and where it writes what it leaves.
        bounds: (blocks,) float32: the bounds with which the update is coded.
        code: The code of the updates.

    Raises:
        StorageError: the disk is full.
    """
    after = carry.after / _RESIDUAL
    _make(after, bounds, code)
    return Residuals(bounds, carry.before / _RESIDUAL if carry.before else None, after)


@contextmanager
def stored(path: Path, code: BlockCode, span: Span, flags: int) -> Iterator[Stored]:
    """A span of the residual in a file that `residuals` has named.

    Args:
        path: The file.
        code: The code of the updates.
        span: Of the coded update.
        flags: As for `os.open`.

    Raises:
        StorageError: the disk refuses the access.
    """
    try:
        file = os.open(path, flags)
        try:
            yield Stored(file, code, span)
        finally:
            os.close(file)
    except OSError as error:
        raise disk_refusal(path, error) from error


@contextmanager
def kept_in(path: Path | None, code: BlockCode, span: Span) -> Iterator[Kept | None]:
    """What was left out in a span of the coded update of an earlier round; None: there was none.

    Raises:
        StorageError: the disk refuses the access.
    """
    if path is None:
        yield None
        return
    with stored(path, code, span, os.O_RDONLY) as residual:
        bounds = np.fromfile(path, _FLOAT, code.blocks)
        yield Kept(residual, bounds[span.start // ROTATED : span.stop // ROTATED])


def _make(path: Path, bounds: npt.NDArray[np.float32], code: BlockCode) -> None:
    """A file of bounds and zeros, which only its owner may read."""
    allocate(path, _bytes_of(code))
    with path.open("r+b") as file:
        file.write(bounds.astype(_FLOAT).data)


def _bytes_of(code: BlockCode) -> int:
    return _FLOAT.itemsize * code.blocks + np.dtype(code.ring.dtype).itemsize * code.size


# The two halves.


def layout(basis: Basis) -> SumLayout:
    """The weighted updates in whole rotated blocks, and the counters.

    Raises:
        PlanError: there are more blocks than a message has room for.
    """
    plan, parameters = basis.plan, basis.parameters
    ring = Ring(plan.aggregation.ring_bits, plan.aggregation.bound, max(plan.summed()))
    blocks = BlockCode(parameters, plan.run.seed, ring)
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

    residuals: Residuals = field(kw_only=True)
    """The bounds of the round, and the files of what is left out."""

    def release(
        self,
        values: Floats,
        tokens: int,
        offset: int = 0,
        gather: Gather = alone,
        out: RingVector | None = None,
    ) -> tuple[RingVector, Clipped]:
        """As `Code.release`; the residual of the span is written."""
        code = self.layout.blocks
        assert code is not None, "a compressed layout has blocks"
        span = code.coded(Span(offset, offset + values.size))
        factor = self.weight(tokens) / self.layout.heaviest
        with (
            kept_in(self.residuals.before, code, span) as kept,
            stored(self.residuals.after, code, span, os.O_WRONLY) as residual,
        ):
            coded, clipped = code.encode(
                values,
                self.residuals.bounds,
                self.rounding,
                offset,
                factor=factor,
                kept=kept,
                out=out,
                residual=residual,
            )
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
        assert secrets.carry is not None, "a plan with compression carries residuals"
        left, aggregation = residuals(secrets.carry, self.bounds, layout.blocks), self.plan.aggregation
        weighted = aggregation.weighting == "tokens"
        return Compressed(layout, secrets.rounding, weighted, aggregation.temperature, factor, residuals=left)


class _AtCoordinator(AtCoordinator):
    def __init__(self, basis: Basis, given: Given) -> None:
        super().__init__(basis, given)
        self._heaviest = layout(basis).heaviest
        self._parameters = basis.parameters
        self._scales = self._next = Scales.first(basis.plan, basis.parameters)

    def tell(self, number: int, cohort: Sequence[str]) -> bytes:
        return self._scales.to_bytes()

    def bounds(self, told: bytes) -> Floats:
        return bounds_in(told, self.plan, self._parameters)

    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> None:
        sites = sum(len(summed.names) for summed in sums)
        weight = sum(summed.counters[WEIGHT] for summed in sums) / self._heaviest
        known = [summed.counters[CLIPPED] for summed in sums if CLIPPED in summed.counters]
        self._next = self._scales.after(self.plan, mean, sites, weight, sum(known) if known else None)

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
