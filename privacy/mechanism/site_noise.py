"""The site-level mechanism at both ends: an update becomes integers with noise; their sum becomes the mean.

With n sites, updates x_i, clipping norm C and scale s (integer steps in C), one round releases

    sum_i (round(s clip(x_i / C, 1)) + Skellam(v))          the sites add the noise, or
    sum_i  round(s clip(x_i / C, 1)) + N(0, (s sigma)^2)    a coordinator that is trusted adds it, in whole steps,
                                                            and may correlate it over the rounds (`correlated.py`),

where `round` keeps the L2 norm of a site's integers within a bound that is known beforehand (Kairouz, Liu and Steinke
2021, conditional rounding: `clip.py`) and Skellam noise is that of Agarwal, Kairouz and Liu 2021. Neighbours: a site
with its records, and the same site without any, which sends zeros in every coordinate, the count below too; to other
records it is two such steps. Because an update is divided by C first, what a round costs does not depend on C.

Adaptive clipping (Andrew et al. 2021) adds one coordinate: each site sends +r if its update was within C, -r if it was
longer, and 0 if it has no finite update, under the same noise. The coordinator moves C by exp(-eta (b - gamma)) (their
eq. 2), where gamma is the quantile that is aimed at, and b the noised fraction of updates within C, in which a site
without an update counts as half of one. That is post-processing of what the round's event charges.

All noise is added modulo 2^b, before the sum is read as signed numbers. So whatever a site that lies adds to the sum,
also beyond the ring, is post-processing of the noised sum of the others.

An update may lie in spans, each at one rank of a site: all of this is keyed by the offset in the whole update, and what
needs the whole update is computed from sums that are gathered from all spans.

This file is pure: the streams of noise are passed in, and it knows neither plan nor ring. Refused: a class for each
variant (central, distributed, adaptive); they differ in three numbers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.privacy.mechanism.clip import (
    Gather,
    Integers,
    Update,
    alone,
    block_sums,
    clip,
    integer_round,
    norm_of,
    rounded_l1,
    rounded_l2,
)
from cloister.privacy.mechanism.correlated import Blt, CorrelatedRow, Participation, sensitivity
from cloister.privacy.mechanism.events import CorrelatedGaussian, Event, Gaussian, Skellam, positive
from cloister.privacy.mechanism.noise import LARGEST_VARIANCE, NoiseStream, add_steps
from cloister.protocol.errors import AccountingError, UpdateError
from cloister.protocol.messages.blocks import BLOCK
from cloister.protocol.plan.plan import LARGEST_CLIP, SMALLEST_CLIP, AdaptiveSection

WRAP_DEVIATIONS = 12
"""Standard deviations of the noise for which the scale leaves room in the ring: they are exceeded with probability
below 2^-107 for a coordinate."""

_AT_ONCE = 2**18
"""Elements whose noise is drawn at a time, whole blocks: it is 64-bit integers."""
_BELIEVED = 6
"""Standard deviations of the count's noise by which the fraction of updates within C may be below 0 or above 1."""
_FURTHEST = math.log(10.0)
"""Largest change of the logarithm of C in a round: the noise on a fraction of few sites has no bound."""


@dataclass(frozen=True)
class SiteMechanism:
    """One round of the unit `site`. Make one with `distributed` or `central`."""

    dimension: int
    """Coordinates of an update."""
    scale: float
    """s: integer steps in the clipping norm; a power of two, so that scaling is exact."""
    variance: float
    """v: variance of the Skellam noise that each site adds to each integer, in steps squared; 0 where the coordinator
    adds the noise."""
    deviation: float
    """Standard deviation of the noise on the decoded sum that is counted on, in units of the clipping norm; with
    `correlation` that of Z."""
    event: Event
    """What a round costs a site that takes part in it; with `correlation` all of its rounds together."""
    adaptive: AdaptiveSection | None = None
    """How the clipping norm follows the updates' norms; None: it is constant."""
    count_step: int = 0
    """r: the integer that a site adds as +r (update within the clipping norm), -r (longer) or 0 (no update); 0 without
    adaptive clipping."""
    count_deviation: float = 0.0
    """Standard deviation of the noise on the number of updates within the clipping norm; 0 without `adaptive`."""
    correlation: Blt | None = None
    """C, by which a coordinator's noise is correlated over the rounds; None: rounds have independent noise."""
    contributors: int = 0
    """Most sites in a sum; with `correlation` alone."""

    @property
    def size(self) -> int:
        """Integers in a site's vector: the update's, and adaptive clipping's coordinate after them."""
        return self.dimension + (1 if self.count_step else 0)

    def on(self, dimension: int) -> SiteMechanism:
        """The same mechanism on an update of as many coordinates or fewer, which moves the sum no further: the
        sensitivity of rounded updates grows with their coordinates.

        Args:
            dimension: Its coordinates.
        """
        assert 0 < dimension <= self.dimension, "a part of the update"
        return self if dimension == self.dimension else dataclasses.replace(self, dimension=dimension)

    def bound(self, levels: int) -> float:
        """The value, in clipping norms, of the largest integer that a ring carries without wrapping.

        Args:
            levels: That integer.
        """
        return levels / self.scale

    def encode(
        self,
        update: Update,
        clip_norm: float,
        noise: NoiseStream,
        out: npt.NDArray[np.integer[Any]],
        offset: int = 0,
        gather: Gather = alone,
    ) -> int:
        """One span of the integers that a site adds to the sum for its update.

        The spans of an update begin and end at the blocks of `protocol/messages/blocks.py`. The ranks that hold them
        have the same `clip_norm` and `noise`, and all call this; together they return what one rank with all of it
        would.

        Args:
            update: Shape (d,), float32: elements [offset, offset + d) of the update. If any element of the whole
                update is not finite, the site has no update, and all of it is encoded as zeros.
            clip_norm: C of the round.
            noise: A stream that nothing else uses, except `tail` of the same update.
            out: Shape (d,), receives the integers, which may be beyond the ring, modulo 2^b where its own have b bits.
            offset: Element of the update where `update` starts.
            gather: Collects numbers of all spans (`clip.Gather`).

        Returns:
            What the site adds to the count, in units of r, for `tail` alone: 1 if the whole update was within C, -1 if
            it was longer, 0 if there is none.

        Raises:
            UpdateError: the span ends beyond the update, or inside a block that goes on.
        """
        end = offset + update.size
        if update.ndim != 1 or end > self.dimension or (end % BLOCK and end != self.dimension):
            raise UpdateError(
                "update",
                f"{update.shape} at {offset}",
                expected=f"a span of whole blocks of a vector of {self.dimension} values",
            )
        # Never raise on update values, and send the same shape for all of them: a failure is visible, and it is a
        # release that no event charges.
        sums = gather(block_sums(update, offset))
        finite = all(map(math.isfinite, sums))
        norm = norm_of(sums) if finite else 0.0
        scaled = np.zeros_like(update)
        if finite:
            np.multiply(update, 1 / max(norm, clip_norm), out=scaled, dtype=np.float64, casting="same_kind")
        clip(scaled, 1.0, offset, gather)  # the division was rounded
        rounding = noise.child("rounding")
        integer_round(scaled, self.scale, 1.0, rounding, self.dimension, offset, gather, out)
        if self.variance:
            skellam = noise.child("skellam")
            for begin in range(0, out.size, _AT_ONCE):
                part = out[begin : begin + _AT_ONCE]
                part += skellam.skellam(part.size, self.variance, offset + begin).astype(part.dtype)
        return (1 if norm <= clip_norm else -1) if finite else 0

    def tail(self, count: int, noise: NoiseStream) -> Integers:
        """The integers that follow the update's: adaptive clipping's coordinate, with its noise.

        Args:
            count: 1, -1 or 0, as `encode` returned it.
            noise: The stream that `encode` got.

        Returns:
            Shape (size - dimension,), int64.
        """
        extra = self.size - self.dimension
        steps = np.full(extra, count * self.count_step, np.int64)
        if self.variance:
            steps += noise.child("skellam").skellam(extra, self.variance, self.dimension)
        return steps

    def correlated_by(self, blt: Blt, pattern: Participation) -> SiteMechanism:
        """The same mechanism with another matrix for the same noise multiplier and pattern.

        Args:
            blt: C: that with which a run began, perhaps on another machine.
            pattern: The pattern by which sites take part.
        """
        assert self.correlation is not None, "independent noise has no matrix"
        ratio = sensitivity(blt, pattern) / sensitivity(self.correlation, pattern)
        return dataclasses.replace(self, correlation=blt, deviation=self.deviation * ratio)

    def add_noise(self, total: npt.NDArray[np.integer[Any]], noise: NoiseStream | CorrelatedRow) -> None:
        """Add a trusted coordinator's noise to an opened sum, in whole steps; nothing if the sites have added it.

        Args:
            total: Shape (size,), ring integers, modulo 2^b; changed in place.
            noise: A stream that nothing else uses, or with `correlation` the round's row.

        Raises:
            ValueError: the other kind of noise, or a row of another length.
        """
        if self.variance:
            return
        sigma = self.scale * self.deviation
        if isinstance(noise, CorrelatedRow):
            if self.correlation is None:
                raise ValueError("a row: expected a stream, because the rounds are not correlated")
            noise.add_to(total, sigma)
            return
        if self.correlation is not None:
            raise ValueError("a stream: expected the round's row, because the rounds are correlated")
        stream, update = noise.child("update"), total[: self.dimension]
        for begin in range(0, update.size, _AT_ONCE):
            part = update[begin : begin + _AT_ONCE]
            add_steps(part, stream.gaussian(part.size, sigma, begin))
        if self.count_step:
            count = noise.child("count").gaussian(1, 2 * self.count_step * self.count_deviation)
            add_steps(total[self.dimension :], count)

    def decode(self, mean: Update, sites: int, clip_norm: float) -> tuple[Update, float]:
        """The mean update from the opened sum, which has its noise.

        With `correlation` it is the sum divided by `contributors`, as if absent sites had sent zeros: noise of one
        round is cancelled by that of later ones only if all are divided by the same number.

        Args:
            mean: Shape (size,), float32: the decoded sum over `sites`, in clipping norms; overwritten.
            sites: Sites whose vectors are in the sum.
            clip_norm: C of the round.

        Returns:
            The mean update, shape (dimension,), float32, in the memory of `mean`; and C of the next round.
        """
        update = mean[: self.dimension]
        update *= np.float32(clip_norm * (sites / self.contributors if self.correlation else 1))
        if self.adaptive is None:
            return update, clip_norm
        within = (float(mean[self.dimension]) * self.scale / self.count_step + 1) / 2
        room = _BELIEVED * self.count_deviation / sites  # beyond it a site has lied in its count
        within = min(max(within, -room), 1 + room)
        move = -self.adaptive.learning_rate * (within - self.adaptive.quantile)
        moved = clip_norm * math.exp(min(max(move, -_FURTHEST), _FURTHEST))
        return update, min(max(moved, SMALLEST_CLIP), LARGEST_CLIP)


def distributed(
    noise_multiplier: float,
    dimension: int,
    contributors: int,
    honest: int,
    ring_bits: int,
    adaptive: AdaptiveSection | None = None,
) -> SiteMechanism:
    """The mechanism whose noise the sites add, with the scale of `skellam_for` for the clipping norm 1.

    Args:
        noise_multiplier: z that is charged; with `adaptive` for update and count together.
        dimension: Coordinates of an update.
        contributors: Most sites in a sum.
        honest: Fewest sites in an opened sum that have added their noise and keep it secret.
        ring_bits: b, of the integers modulo 2^b that are summed.
        adaptive: Adaptive clipping.

    Raises:
        AccountingError: an argument is out of range, the ring has no room, or the count would cost as much as z.
    """
    sigma_b = 0.0 if adaptive is None else adaptive.count_noise
    on_update = noised_with(noise_multiplier, sigma_b) if sigma_b else noise_multiplier
    found = skellam_for(on_update, 1.0, dimension, contributors, honest, ring_bits)
    event, step = found.event, 0
    if sigma_b:
        step = max(1, math.floor(math.sqrt(event.variance) / (2 * sigma_b)))
        _check_count_fits(step, found.variance_per_site, contributors, sigma_b, ring_bits)
        event = dataclasses.replace(event, extra=((event.variance, float(step), float(step)),))
    root = math.sqrt(event.variance)
    return SiteMechanism(
        dimension=dimension,
        scale=found.scale,
        variance=found.variance_per_site,
        deviation=root / found.scale,
        event=event,
        adaptive=adaptive,
        count_step=step,
        count_deviation=root / (2 * step) if step else 0.0,
    )


def central(
    noise_multiplier: float,
    dimension: int,
    contributors: int,
    ring_bits: int,
    adaptive: AdaptiveSection | None = None,
    correlated: tuple[Blt, Participation] | None = None,
) -> SiteMechanism:
    """The mechanism whose noise a trusted coordinator adds, with the finest scale whose noised sum fits in the ring.

    The noise is for the rounded vectors' own, larger norm, and is rounded to whole steps: a sum of integers with it is
    the rounded sum with Gaussian noise. The ring has room for `WRAP_DEVIATIONS` of it. Correlated noise is larger by
    sens(C) times the norm of the longest row of C^-1. With k of T rounds at one site that is below sqrt(k) (1 + log2(T)
    / 2) for patterns of up to 2,000 rounds, by computation.

    Args:
        noise_multiplier: As in `distributed`, like what follows.
        dimension: Coordinates of an update.
        contributors: n, most sites in a sum.
        ring_bits: b.
        adaptive: Adaptive clipping.
        correlated: C and the pattern by which sites take part, without `adaptive`; None: independent noise.

    Raises:
        AccountingError: the ring has no room, or the count would cost as much as z.
    """
    assert adaptive is None or correlated is None, (
        "the norm of all rounds is one, so that their noise cancels"
    )
    sigma_b = 0.0 if adaptive is None else adaptive.count_noise
    on_update = noised_with(noise_multiplier, sigma_b) if sigma_b else noise_multiplier
    spread = WRAP_DEVIATIONS * on_update
    if correlated is not None:
        blt, pattern = correlated
        # Not of this matrix: two machines find its last digits unlike, and need the same scale.
        spread *= math.sqrt(pattern.effective) * (1 + pattern.rounds.bit_length()) / 2
        on_update *= sensitivity(blt, pattern)
    levels = 2.0 ** (ring_bits - 1)
    scale = 2.0 ** math.floor(math.log2(levels / contributors))
    while scale > 1 and contributors * (scale + 1) + spread * rounded_l2(scale, dimension) >= levels:
        scale /= 2
    # A site adds a step to the count, whose noise is twice as many steps for each site of its deviation.
    step = math.floor((levels - 1) / (contributors + 2 * WRAP_DEVIATIONS * sigma_b))
    if scale <= 1 or step < 1:
        raise AccountingError(
            "ring_bits", ring_bits, expected=f"a ring that holds {contributors} terms and their noise"
        )
    mechanism = SiteMechanism(
        dimension=dimension,
        scale=scale,
        variance=0.0,
        deviation=on_update * rounded_l2(scale, dimension) / scale,
        event=Gaussian(noise_multiplier, 1),
        adaptive=adaptive,
        count_step=step if sigma_b else 0,
        count_deviation=sigma_b,
    )
    if correlated is None:
        return mechanism
    event = CorrelatedGaussian(noise_multiplier, pattern.rounds, pattern.separation, pattern.most)
    return dataclasses.replace(mechanism, event=event, correlation=blt, contributors=contributors)


def _check_count_fits(step: int, variance: float, contributors: int, sigma_b: float, ring_bits: int) -> None:
    """Check that the count fits in the ring: with little noise its steps are large.

    `skellam_for` leaves room for the update's steps alone.

    Raises:
        AccountingError: the sum of the count, with its noise, could wrap.
    """
    if contributors * step + WRAP_DEVIATIONS * math.sqrt(contributors * variance) >= 2.0 ** (ring_bits - 1):
        raise AccountingError(
            "privacy.adaptive.count_noise",
            sigma_b,
            expected=f"more: with so little noise a count of {contributors} sites does not fit in a ring of"
            f" {ring_bits} bits",
            fix="raise privacy.adaptive.count_noise",
        )


def noised_with(noise_multiplier: float, count_noise: float) -> float:
    """The noise multiplier of an update released together with adaptive clipping's count: z_delta.

    Andrew et al. 2021 ("Differentially private learning with adaptive clipping", Theorem 1): the count of unclipped
    sites, whose terms are +-1/2, gets noise of standard deviation sigma_b. A site without records adds 0 to it, so that
    neighbours change it by 1/2. Update and count together are exactly one Gaussian mechanism of noise multiplier z when
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2). The ledger is charged z.

    Args:
        noise_multiplier: z, what is charged.
        count_noise: sigma_b, in sites.

    Raises:
        AccountingError: the count alone would cost as much as z or more.
    """
    z, sigma = positive("noise_multiplier", noise_multiplier), positive("count_noise", count_noise)
    left = 1 - (z / (2 * sigma)) ** 2
    if left <= 0:
        raise AccountingError(
            "privacy.adaptive.count_noise",
            count_noise,
            expected=f"more than half the noise multiplier, {z / 2:g}: the count alone would spend the budget",
            fix="raise privacy.adaptive.count_noise",
        )
    return z / math.sqrt(left)


@dataclass(frozen=True)
class SkellamScale:
    """How one round of the unit `site` turns updates into integers, and what it costs."""

    scale: float
    """s: integer steps in 1 of an update; a power of two, so that scaling is exact."""
    variance_per_site: float
    """Variance of the Skellam noise that each site adds to each coordinate, in integer steps squared."""
    event: Skellam
    """One round: the noise of the honest survivors against one site's integer vector."""


def skellam_for(
    noise_multiplier: float, clip: float, dimension: int, contributors: int, honest: int, ring_bits: int
) -> SkellamScale:
    """The scale and noise of a sum in which only the honest survivors' noise counts.

    Each site adds variance v = (z C s)^2 / honest, so the noise that counts has at least the standard deviation z C s.
    s is the largest power of two with v <= `noise.LARGEST_VARIANCE`, beyond which Skellam noise is not sampled exactly,
    and with the sum inside the ring:

        contributors (s C + 1) + 12 sqrt(contributors v) < 2^(ring_bits - 1).

    A larger s means less rounding: the integer sensitivities of conditional rounding
    (`cloister.privacy.mechanism.clip`) are closer to s C.

    Args:
        noise_multiplier: z, of the noise that counts, in units of the clipping norm.
        clip: C, L2 norm of a site's update.
        dimension: Coordinates of an update.
        contributors: Most sites in a sum.
        honest: Fewest sites in an opened sum that have added their noise and keep it secret.
        ring_bits: b, of the integers modulo 2^b that are summed.

    Raises:
        AccountingError: an argument is out of range, or the ring has no room.
    """
    z, bound = positive("noise_multiplier", noise_multiplier), positive("clip", clip)
    for field, value, least in (
        ("dimension", dimension, 1),
        ("honest", honest, 1),
        ("contributors", contributors, honest),
    ):
        if value < least:
            raise AccountingError(field, value, expected=f"{least} or more")
    room = 2.0 ** (ring_bits - 1)
    per_step = bound * (contributors + WRAP_DEVIATIONS * z * math.sqrt(contributors / honest))
    if room <= contributors:
        raise AccountingError("ring_bits", ring_bits, expected=f"a ring that holds {contributors} terms")
    largest = min((room - contributors) / per_step, math.sqrt(LARGEST_VARIANCE * honest) / (z * bound))
    scale = 2.0 ** math.floor(math.log2(largest))
    while contributors + scale * per_step >= room or (z * bound * scale) ** 2 > LARGEST_VARIANCE * honest:
        scale /= 2  # the logarithm was rounded up
    whole = (
        z * bound * scale
    ) ** 2  # the same number whatever the sites: equal noise is one mechanism in a ledger
    l2 = rounded_l2(scale * bound, dimension)
    event = Skellam(whole, l2, rounded_l1(l2, dimension), 1, honest=honest)
    return SkellamScale(scale, whole / honest, event)
