"""The only exit of a site: a finished update becomes the vector that is summed, span by span.

Without privacy, and if the unit is the record (its noise is already in the update), values are coded in the plan's
ring with secret rounding, or in rotated blocks with `aggregation.compression`: both are post-processing. If the unit is
the site, the site-level mechanism makes the integers (`privacy/mechanism/site_noise.py`). A rank releases its span of
the update; the owner of the tail then makes the rest of the vector from what was clipped in all spans. A site that is
one process has one span.

The vector is kept and sent again in a retry of the round: noise is drawn once for an update, so that repeated sums of
the update cannot average the noise away.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cloister.aggregation.sums import LOSS, TOKENS, Sums, count_of_loss
from cloister.aggregation.vector.average import CLIPPED, WEIGHT, SumLayout, weight_of
from cloister.aggregation.vector.ring import RingVector
from cloister.clients.state.residual import Residuals, kept_in, stored
from cloister.lm.model.layout import Vector
from cloister.privacy.mechanism.clip import Gather, alone
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import Span

MUST_STAY = "must stay at this site"
"""Marks what is said of the site's own records to the persons of the site: exact, and charged to no ledger."""


@dataclass(frozen=True)
class Finished:
    """The result of local training."""

    vector: Vector
    """The update, or a rank's span of it, float32. NaN: there is none, under unit `site`."""
    tokens: int
    """Tokens learned from; under privacy it must not leave the site."""
    loss: float
    """Mean training loss over them; as `tokens`."""


@dataclass(frozen=True)
class Clipped:
    """What was clipped in a span: for the tail of the vector only; it must not leave the site otherwise."""

    values: int = 0
    """Values of the span beyond the ring's bound."""
    count: int = 0
    """What the site adds to adaptive clipping's count, as `SiteMechanism.encode` returns it; the same for all spans."""


@dataclass(frozen=True)
class InClear:
    """The code of an update that may be summed as it is: without privacy, or noised already."""

    layout: SumLayout
    """Layout of the sum; only its counters leave the site."""
    rounding: bytes
    """Secret seed of the stochastic rounding (`ring.Dither`)."""
    weighted: bool
    """Weigh the update by the site's tokens; otherwise by 1."""
    temperature: float = 1.0
    """T of the weight by tokens (`weight_of`)."""

    def release(
        self,
        values: Vector,
        tokens: int,
        offset: int = 0,
        gather: Gather = alone,
        out: RingVector | None = None,
    ) -> tuple[RingVector, Clipped]:
        """The ring integers of one span.

        Args:
            values: Shape (d,), float32: elements [offset, offset + d) of the update.
            tokens: What the site learned from.
            offset: Element of the update where `values` starts.
            gather: Not used.
            out: (d,) ring integers to write into.

        Raises:
            UpdateError: the values are not finite, or end beyond the update.
        """
        coded, clipped = self.layout.encode(values, self._weight(tokens), self.rounding, offset, out)
        return coded, Clipped(values=clipped)

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """The span after the update's: the exact counters.

        Args:
            clipped: What `release` returned for each span.
            tokens: What the site learned from.
            loss: Mean training loss over them.
        """
        return self.layout.tail(
            {
                WEIGHT: self._weight(tokens),
                TOKENS: tokens,
                LOSS: count_of_loss(loss * tokens),
                CLIPPED: sum(span.values for span in clipped),
            }
        )

    def _weight(self, tokens: int) -> int:
        return weight_of(tokens, self.layout.heaviest, self.temperature) if self.weighted else 1


@dataclass(frozen=True)
class Protected:
    """The code of an update that the site-level mechanism protects as a whole."""

    layout: SumLayout
    """Layout of the sum."""
    mechanism: SiteMechanism
    """The mechanism of the plan's terms."""
    clip_norm: float
    """C of the round."""
    noise: NoiseStream
    """A stream that nothing else uses: one for each update, the same at all its ranks."""

    def release(
        self,
        values: Vector,
        tokens: int,
        offset: int = 0,
        gather: Gather = alone,
        out: RingVector | None = None,
    ) -> tuple[RingVector, Clipped]:
        """The ring integers of one span. Nothing here raises because of the update's values.

        Args:
            values: Shape (d,), float32: elements [offset, offset + d) of the update, whole blocks of it.
            tokens: Not used: they are outside the privacy budget.
            offset: Element of the update where `values` starts.
            gather: Collects the numbers of all spans (`privacy.clip.Gather`).
            out: (d,) ring integers to write into.

        Raises:
            UpdateError: the span ends beyond the update, or inside a block that goes on.
        """
        coded: RingVector = np.empty(values.shape, self.layout.ring.dtype) if out is None else out
        count = self.mechanism.encode(values, self.clip_norm, self.noise, coded, offset, gather)
        return coded, Clipped(count=count)

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """The span after the update's: adaptive clipping's coordinate, and the weight 1.

        Args:
            clipped: What `release` returned for each span, or for any one of them.
            tokens: Not used, like what follows: they are outside the privacy budget.
            loss: Mean training loss.
        """
        return self.layout.tail({WEIGHT: 1}, self.mechanism.tail(clipped[0].count, self.noise))


@dataclass(frozen=True)
class Compressed(InClear):
    """The code of an update in rotated blocks, with what the site's last code has left out (`compression.py`)."""

    residuals: Residuals = field(kw_only=True)
    """The bounds of the round, and the files of what is left out."""

    def release(
        self,
        values: Vector,
        tokens: int,
        offset: int = 0,
        gather: Gather = alone,
        out: RingVector | None = None,
    ) -> tuple[RingVector, Clipped]:
        """The ring integers of one span; its residual is written.

        Args:
            values: Shape (d,), float32: elements [offset, offset + d) of the update, whole blocks of it.
            tokens: What the site learned from.
            offset: Element of the update where `values` starts.
            gather: Not used.
            out: Ring integers of the span's whole blocks to write into.

        Raises:
            UpdateError: the values are not finite.
            StorageError: the disk refuses the access.
        """
        code = self.layout.blocks
        assert code is not None, "a compressed layout has blocks"
        span = code.coded(Span(offset, offset + values.size))
        factor = self._weight(tokens) / self.layout.heaviest
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


Code: TypeAlias = InClear | Protected


def code_for(
    sums: Sums,
    *,
    rounding: bytes,
    clip_norm: float,
    noise: NoiseStream | None,
    residuals: Residuals | None = None,
) -> Code:
    """The code of the updates of a plan.

    Args:
        sums: The sums of the plan.
        rounding: Secret seed of the rounding.
        clip_norm: C of the round, if the unit is the site.
        noise: A stream that nothing else uses, if there is a privacy unit.
        residuals: With `aggregation.compression`, the scales of the round and the files of what is left out.
    """
    plan, terms, layout = sums.plan, sums.terms, sums.training
    if terms is not None and terms.mechanism is not None:
        assert noise is not None, "a plan with a unit has noise"
        return Protected(layout, terms.mechanism, clip_norm, noise)
    weighted, temperature = plan.aggregation.weighting == "tokens", plan.aggregation.temperature
    if layout.blocks is not None:
        assert residuals is not None, "a plan with compression has scales and residuals"
        return Compressed(layout, rounding, weighted, temperature, residuals=residuals)
    return InClear(layout, rounding, weighted, temperature)


def contribution(code: Code, update: Finished) -> RingVector:
    """The whole vector of a site that is one process: one span, and the tail.

    Args:
        code: The code of the plan's updates.
        update: The result of local training.

    Raises:
        UpdateError: the update has another length; or, in clear, it is not finite.
    """
    layout = code.layout
    if update.vector.shape != (layout.values,):
        raise UpdateError("update", update.vector.shape, expected=f"a vector of {layout.values} values")
    vector: RingVector = np.empty(layout.length, layout.ring.dtype)
    _, clipped = code.release(update.vector, update.tokens, out=vector[: layout.size])
    vector[layout.size :] = code.tail([clipped], update.tokens, update.loss)
    return vector
