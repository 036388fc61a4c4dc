"""How long the noise of a private run is beside what records add to it, from the sizes of sites; and what to change.

Sampling rate, units, steps, sites and noise multiplier decide together. With n units at a site, the rate q, S local
steps, s sites and d trained parameters, a batch has q n units in expectation, each of which adds a gradient of norm C
at most. The noise on their sum has the norm z C sqrt(d). So in one step the noise is

    z sqrt(d) / (q n)

times as long as the longest signal, which all gradients of the batch have only where they agree. Noise of steps and
sites is independent and their signals add up, so in the mean of a round it is 1 / sqrt(S s) of that. With the unit
`site` the noise of a sum is z C sqrt(d) beside s updates of norm C: z sqrt(d) / s. Larger batches at the same epsilon
gain (De et al. 2022, "Unlocking high-accuracy differentially private image classification through scale", section 3).

It is a rule of thumb. The shipped private run has 0.65 in a round and keeps 45 % of the gain of the run without noise;
with batches four times as large and the noise for the same epsilon it has 0.2 and keeps 66 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cloister.privacy.accounting.terms import Terms
from cloister.protocol.plan.plan import Plan

_FAR = 2.0
"""Times by which the batch by which a sum is divided may differ from the expected one."""


@dataclass(frozen=True)
class Signal:
    """A private run, as far as sizes tell how well it can learn."""

    fewest: int
    """Units of the site that has fewest; with the unit `site` 1."""
    median: float
    """Units of the median site."""
    most: int
    batch: float
    """Expected units of a batch of the median site; with the unit `site` the sites of a round."""
    step: float
    """Norm of the noise in a step of the median site over that of its longest signal; with the unit `site` that of a
    round."""
    round: float
    """The same in the mean of a round."""
    coordinate: float
    """Standard deviation of the noise of one coordinate of the mean of a step, in units of the clipping norm."""
    typical: float
    """Root mean square of a coordinate of a gradient that is as long as the clipping norm, in its units."""


def signal_of(plan: Plan, terms: Terms, parameters: int, units: Sequence[int]) -> Signal | None:
    """The signal of a plan's runs; None for a question, or where no site has a unit.

    Args:
        plan: A plan with a privacy unit.
        terms: Its privacy.
        parameters: That a round trains.
        units: Of each site; with the unit `site` they do not matter.
    """
    privacy, local = plan.privacy, plan.local
    if plan.question is not None or not any(units):
        return None
    noise, sites = terms.noise_multiplier * math.sqrt(parameters), plan.cohort.size()
    typical = 1 / math.sqrt(parameters)
    if privacy.unit == "site":
        ratio = noise / sites
        return Signal(1, 1.0, 1, float(sites), ratio, ratio, terms.noise_multiplier / sites, typical)
    assert privacy.sampling_rate is not None, "a sound plan has it"
    median = float(statistics.median(units))
    batch = privacy.sampling_rate * median
    step = noise / batch if batch else math.inf
    return Signal(
        fewest=min(units),
        median=median,
        most=max(units),
        batch=batch,
        step=step,
        round=step / math.sqrt(local.steps * sites),
        coordinate=terms.noise_multiplier / batch if batch else math.inf,
        typical=typical,
    )


def advice(plan: Plan, signal: Signal, protected: int | None = None) -> list[str]:
    """What is wrong with a plan for sites of these sizes, and what to change; one line each.

    Args:
        plan: The plan.
        signal: Of its runs.
        protected: Units of all sites together, where that is known.
    """
    found, privacy = [], plan.privacy
    if privacy.unit != "site":
        divisor = plan.local.batch_size * plan.local.accumulation
        if signal.batch and not 1 / _FAR <= divisor / signal.batch <= _FAR:
            found.append(
                f"a batch has {signal.batch:,.3g} units in expectation (privacy.sampling_rate x units of a site), and "
                f"its sum is divided by {divisor} (local.batch_size x local.accumulation): set the latter to about "
                f"{max(1, round(signal.batch)):,}"
            )
    if signal.round > 1:
        more = (
            "more sites in a round, fewer trained parameters (an adapter of a lower rank), or a larger epsilon"
            if privacy.unit == "site"
            else "a higher privacy.sampling_rate, more local.steps or sites, fewer trained parameters (an adapter of a "
            "lower rank), or a larger epsilon"
        )
        found.append(
            f"the noise in the mean of a round is {signal.round:.3g} times as long as the longest signal, so a run "
            f"learns little: {more}"
        )
    if protected is not None and privacy.delta * protected > 1:
        found.append(
            f"privacy.delta = {privacy.delta:g} is more than 1 / {protected:,}, one over the units of all sites: "
            "lower it"
        )
    return found


def summary(plan: Plan, signal: Signal) -> str:
    """The signal in one line."""
    beside = (
        f"noise of {signal.coordinate:.2g} C a coordinate beside {signal.typical:.2g} C of a clipped gradient"
    )
    if plan.privacy.unit == "site":
        return f"{signal.batch:,.0f} sites in a round, {beside}: {signal.round:.2g} times the longest signal"
    sizes = f"{signal.fewest:,}" if signal.fewest == signal.most else f"{signal.fewest:,} to {signal.most:,}"
    return (
        f"{sizes} units at a site, {signal.batch:,.3g} expected in a batch, {beside}; noise over the longest signal: "
        f"{signal.step:.2g} in a step, {signal.round:.2g} in the mean of a round"
    )
