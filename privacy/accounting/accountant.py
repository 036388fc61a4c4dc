"""Accounting: the (epsilon, delta) that released events cost together, and the noise for a target epsilon.

A mechanism M is (epsilon, delta)-DP when P[M(D) in S] <= e^epsilon P[M(D') in S] + delta for all neighbours D, D' and
all S (Dwork and Roth 2014). Each event of `events.py` says which mechanism ran, its sensitivity and its neighbours.
`spent` composes a list of them that was fixed before the first result was seen, and gives an epsilon that is an upper
bound for all parameters; `calibrate` finds the noise for a given epsilon. `over_runs` composes a list in which each was
chosen after seeing the results of earlier ones, for which privacy loss distributions give no upper bound.

- `pld` composes privacy loss distributions (Koskela et al. 2020; discretised as in Doroshenko et al. 2022, "Connect the
  dots", which rounds pessimistically). Gaussians alone are composed in closed form (Balle and Wang 2018, Theorem 8).
- `rdp` adds Renyi divergences (Mironov 2017) and converts them (Canonne, Kamath and Steinke 2020, Proposition 12).

Both come from `dp_accounting`, which has no Skellam mechanism: its published curve is added here.
Where rounding errors could affect the result (a delta near rounding error, a loss that spans more than a grid can
hold) the result is that of `rdp`, and `Spent` says so. Refused: privacy loss distributions of Skellam noise in many
dimensions, whose worst neighbours are not known, and an accountant of our own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    Skellam,
    Unit,
    bare,
    from_json,
    positive,
)
from cloister.protocol.errors import AccountingError

Accountant = Literal["pld", "rdp"]

LEAST_NOISE, LARGEST_NOISE = 2.0**-6, 2.0**16
"""Noise multipliers between which `calibrate` searches."""

ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
"""Renyi orders of `over_runs`: whole, for Skellam noise, and fixed, because no order may be chosen by the results."""


@dataclass(frozen=True)
class Spent:
    """The cost of a list of events: together they are (epsilon, delta)-DP."""

    epsilon: float
    """An upper bound; `math.inf` if there is none."""
    delta: float
    """The delta that was asked for; twice that of `over_runs` if mechanisms differ."""
    accountant: Accountant
    """The accountant whose bound this is."""
    note: str = ""
    """Why that is not the requested accountant, or what was assumed; otherwise empty."""


def spent(
    events: Iterable[Event],
    delta: float,
    accountant: Accountant = "pld",
    *,
    group: int = 1,
    points: int = 2**16,
    adaptive: bool = False,
) -> Spent:
    """The epsilon of all `events` together at `delta`.

    Whether to go on may depend on results, but not which mechanism is next, unless the list is `adaptive`. Privacy loss
    distributions then still hold for a list of one mechanism, equal but for its number: a stop with a limit on epsilon
    is post-processing of the longest list within the limit. Mechanisms that differ are composed by Renyi divergences at
    the K fixed orders of `ORDERS`, each with delta / K. At one order the divergences of adaptively chosen mechanisms
    add up under a stop at a fixed bound (Feldman and Zrnic 2021, "Individual privacy accounting via a Renyi filter";
    Lecuyer 2021; Whitehouse et al. 2023, "Fully-adaptive composition in differential privacy"), and a union bound over
    the orders lets the better one be chosen afterwards. A ledger may begin with one mechanism and then take another,
    so the two stops are united: **a limit over mechanisms that differ, for one unit, holds at twice its delta**.
    Refused for such a list: to add two bounds, as `_split` does. That of all else, even of one mechanism, is a curve
    over the number of steps, which holds at a number that was fixed beforehand. With one limit over both parts, results
    would choose where on the curve a ledger stops. A bound for a grid of numbers at once, each with a part of delta, is
    valid and was larger: 6.9 and not 6.4 for 1,800 steps (noise 0.8, rate 0.01, delta 1e-6) with three questions.

    Neighbours are those of the events. Where a list has releases for several units, the result is for the smallest
    of them, a record before an owner before a site. Such a unit may change the term of a larger one from any vector of
    the clipped norm to any other, so the releases for larger units are then counted with twice their sensitivity:
    those for sites as such, and those for owners as the replacement of a term that is drawn, (1 - q) N(0, z^2) +
    q N(1, z^2) against (1 - q) N(0, z^2) + q N(-1, z^2).

    A `group` of k units differs together: each is drawn on its own, and in the worst case all have the same gradient,
    so that a step is N(0, z^2) against the mixture of N(j, z^2), with j binomial(k, q) (Choquette-Choo et al. 2024,
    "Privacy amplification for matrix mechanisms"). A release for all sites is counted with k times its sensitivity.

    Args:
        events: What was released, in any order; equal ones are merged first, so a long ledger costs little more.
        delta: Above 0 and below 1.
        accountant: `pld`, or `rdp`. Skellam noise has only `rdp`: it composes the whole list, or, if that is less, its
            bound for that noise is added to that of `pld` for all else. For a `group`,
            and for steps on owners in a list with records, `rdp` knows only a loose bound, without amplification.
        group: k, 1 or more units that differ together.
        points: Grid points of the loss of one step. Fewer take less time, for a group in proportion, and give a larger
            bound.
        adaptive: Whether a mechanism may have been chosen after seeing the results of earlier ones, as those of several
            runs are. The `delta` of the result is then the one for which epsilon holds.

    Raises:
        AccountingError: `delta` or `group` is out of range, `accountant` is unknown, or a group is asked for in a list
            with releases for several units.
    """
    delta = positive("delta", delta)
    if not delta < 1:
        raise AccountingError("delta", delta, expected="a probability above 0 and below 1")
    if accountant not in get_args(Accountant):
        raise AccountingError("accountant", accountant, expected=" or ".join(get_args(Accountant)))
    listed = list(events)
    units = [unit for unit in get_args(Unit) if unit in {_unit(event) for event in listed}]
    if isinstance(group, bool) or group < 1 or (group > 1 and len(units) > 1):
        raise AccountingError(
            "group", group, expected="1 or more units, or 1 where several units were charged"
        )
    losses = _losses(listed, units[0] if units else "site", group)
    if adaptive and len({mechanism(event) for event in set(listed)}) > 1:
        renyi = _rdp(losses, delta / len(ORDERS), ORDERS)
        found = Spent(renyi, 2 * delta, "rdp", _DIFFERENT)
    else:
        found = _compose(losses, delta, accountant, points)
    if len(units) > 1:
        larger = " and ".join(f"{unit}s" for unit in units[1:])
        note = f"for one {units[0]}: releases for {larger} are counted with twice their sensitivity"
        found = replace(found, note="; ".join(filter(None, (note, found.note))))
    return found


def epsilon_of(events: Iterable[Event], delta: float, accountant: str) -> float:
    """The epsilon of `spent`, with `rdp` or, for any other name of a plan's accountant, `pld`."""
    return spent(events, delta, "rdp" if accountant == "rdp" else "pld").epsilon


def over_runs(events: Iterable[str], delta: float, accountant: str = "pld") -> Spent:
    """The cost of the events of ledger entries, each as JSON, over runs of which each may depend on earlier results."""
    listed = [event for text in events for event in from_json(text)]
    return spent(listed, delta, "rdp" if accountant == "rdp" else "pld", adaptive=True)


def composed(events: Iterable[str], delta: float) -> float:
    """The epsilon of `over_runs`: what `ledger.Ledger` composes with. Of mechanisms that differ it holds at twice
    `delta`."""
    return over_runs(events, delta).epsilon


def mechanism(event: Event) -> Event:
    """The event without its number and without whom it trusts: equal noise of more or fewer sites is one mechanism."""
    match bare(event):
        case SampledGaussian() as step:
            return replace(step, steps=1)
        case Gaussian() | Skellam() as release:
            return replace(release, count=1)
        case whole:
            return whole


class _Step(NamedTuple):
    """A step of DP-SGD, and what neighbours change in it."""

    noise: float
    """z."""
    rate: float
    """q."""
    replaced: bool = False
    """Whether a term of norm 1 is replaced by another where it is drawn, and not added or removed."""
    group: int = 1
    """Units that are added or removed together."""

    @property
    def plain(self) -> bool:
        """Whether one unit is added or removed, for which Renyi divergences are known."""
        return not self.replaced and self.group == 1

    @property
    def sensitivity(self) -> int:
        """The most by which neighbours change the sum of a given batch."""
        return 2 if self.replaced else self.group

    @property
    def like(self) -> _Step:
        """A step with known divergences whose loss is of about the same size."""
        return _Step(self.noise / self.sensitivity, self.rate)

    @property
    def exact(self) -> float:
        """z, or the largest noise below it at which float64 resolves the loss: less noise, a larger bound."""
        return min(self.noise, math.sqrt(1e9 * self.rate))

    @property
    def span(self) -> float:
        """About the range of the loss, whose tails are cut at e^-50: ten standard deviations."""
        if not self.plain:
            return 2 * self.like.span
        z, q = self.exact, self.rate
        farthest = 10.2 / z + 0.5 / (z * z)
        if q == 1 or farthest > _WIDEST:
            return 2 * farthest
        return math.log1p(q * math.expm1(farthest)) - math.log1p(-q)

    @property
    def variance(self) -> float:
        """About the variance of the loss: that of the likelihood ratio of one unit, q^2 (e^(1/z^2) - 1)."""
        z, q = self.exact, self.rate
        one = 1 / (z * z) if q == 1 else q * q * math.expm1(min(1 / (z * z), 20.0))
        return one * self.sensitivity**2

    def loss(self, width: float) -> Any:
        """The privacy loss distribution (of `dp_accounting`) of the worst case, on a grid of a width."""
        from dp_accounting.pld import privacy_loss_distribution as distributions
        from dp_accounting.privacy_accountant import NeighboringRelation
        from scipy.stats import binom

        z, q = self.exact, self.rate
        if self.group > 1:
            drawn = range(self.group + 1)
            return distributions.from_mixture_gaussian_mechanism(
                z, drawn, binom.pmf(drawn, self.group, q), value_discretization_interval=width
            )
        relation = NeighboringRelation.REPLACE_ONE if self.replaced else NeighboringRelation.REPLACE_SPECIAL
        return distributions.from_gaussian_mechanism(
            z, sampling_prob=q, value_discretization_interval=width, neighboring_relation=relation
        )


class _Losses(NamedTuple):
    """A list of events, merged: all that the epsilon depends on."""

    steps: tuple[tuple[_Step, int], ...]  # of sampled mechanisms, and how many
    rho: float  # zero-concentrated DP of all Gaussians together: the sum of 1 / (2 z^2)
    skellam: tuple[tuple[float, float, float, int], ...]  # variance, l2, l1, count


def _unit(event: Event) -> Unit:
    return event.unit if isinstance(event, SampledGaussian | Skellam) else "site"


def _losses(events: Sequence[Event], unit: Unit, group: int) -> _Losses:
    """The events as losses of `group` units, where `unit` is the smallest."""
    steps: Counter[_Step] = Counter()
    gaussian: Counter[float] = Counter()
    skellam: Counter[tuple[float, float, float]] = Counter()
    sensitivity = group if unit == "site" else 2  # a part of a site may change its vector from any to any
    for event in events:
        match event:
            case SampledGaussian(z, q, count):
                steps[_Step(z, q, event.unit != unit, group)] += count
            case Gaussian(z, count):
                gaussian[z / sensitivity] += count
            case CorrelatedGaussian(z):
                gaussian[z / sensitivity] += 1
            case Skellam(variance, l2, l1, count, extra):
                times = group if event.unit == unit else 2
                for mu, l2_part, l1_part in ((variance, l2, l1), *extra):
                    skellam[mu, times * l2_part, times * l1_part] += count
    for step in [step for step in steps if step.rate == 1]:
        gaussian[step.noise / step.sensitivity] += steps.pop(step)
    return _Losses(
        tuple(sorted(steps.items())),
        math.fsum(count / z**2 / 2 for z, count in sorted(gaussian.items())),
        tuple((*part, count) for part, count in sorted(skellam.items())),
    )


@functools.lru_cache(maxsize=4096)
def _compose(losses: _Losses, delta: float, accountant: Accountant, points: int) -> Spent:
    if not (losses.steps or losses.rho or losses.skellam):
        return Spent(0.0, delta, accountant)
    renyi = _rdp(losses, delta)
    if accountant == "rdp":
        return Spent(renyi, delta, "rdp")
    if losses.skellam:
        return _split(
            losses,
            delta,
            points,
            Spent(renyi, delta, "rdp", "Skellam noise is composed by Renyi divergences"),
        )
    try:
        epsilon = _pld(losses, delta, renyi, points)
    except _OutOfReachError as error:
        return Spent(renyi, delta, "rdp", str(error))
    if renyi < epsilon:  # both are upper bounds
        return Spent(renyi, delta, "rdp", "here the Renyi bound is the smaller one")
    return Spent(epsilon, delta, "pld")


def _split(losses: _Losses, delta: float, points: int, joint: Spent) -> Spent:
    """The least of the joint Renyi bound and of two bounds added up: Skellam noise by Renyi divergences at a part of
    delta, all else by privacy loss distributions at the rest of it.

    That two mechanisms cost together at most the sum of their epsilons, at the sum of their deltas, holds also where
    they run at the same time and each depends on what the other has released (Vadhan and Wang 2021, "Concurrent
    composition of differential privacy"; Lyu 2022 and Vadhan and Zhang 2023 for a delta). The parts are fixed, so none
    is chosen by results.
    """
    noisy, rest = losses._replace(steps=(), rho=0.0), losses._replace(skellam=())
    if rest == _Losses((), 0.0, ()):
        return joint
    found, least = joint, 0.0
    for part in _PARTS:
        first = _rdp(noisy, part * delta)
        if first + least >= found.epsilon:
            continue  # all else costs no less at a smaller delta, and its distributions take seconds
        least = _compose(rest, (1 - part) * delta, "pld", points).epsilon
        if first + least < found.epsilon:
            found = Spent(first + least, delta, "pld", _ADDED)
    return found


def _rdp(losses: _Losses, delta: float, orders: Sequence[int] | None = None) -> float:
    """Least epsilon over the orders: those of `dp_accounting`, from 1.1 to 1024, or whole ones with Skellam noise.

    Steps whose divergences are not known count as if every unit were drawn.
    """
    from dp_accounting import dp_event as dp
    from dp_accounting.rdp import RdpAccountant

    public = _gaussians(losses)
    with _without_log("absl"):
        if not losses.skellam:
            return float(RdpAccountant(orders).compose(dp.ComposedDpEvent(public)).get_epsilon(delta))
        least = math.inf
        for order in orders or _whole_orders(sampled=any(step.plain for step, _ in losses.steps)):
            bound = math.fsum(count * skellam_rdp(order, mu, l2, l1) for mu, l2, l1, count in losses.skellam)
            # At one order a bound is a (rho = bound / order)-zCDP event, whatever it is at other orders.
            events = dp.ComposedDpEvent([*public, dp.ZCDpEvent(rho=bound / order)])
            least = min(least, float(RdpAccountant([order]).compose(events).get_epsilon(delta)))
        return least


def _gaussians(losses: _Losses) -> list[Any]:
    """The steps and the Gaussians as events of `dp_accounting`."""
    from dp_accounting import dp_event as dp

    found: list[Any] = [
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(step.rate, dp.GaussianDpEvent(step.exact)), count)
        for step, count in losses.steps
        if step.plain
    ]
    rho = losses.rho + math.fsum(
        count * (step.sensitivity / step.noise) ** 2 / 2 for step, count in losses.steps if not step.plain
    )
    if rho:
        found.append(dp.ZCDpEvent(rho=rho))
    return found


def skellam_rdp(order: int, variance: float, l2: float, l1: float) -> float:
    """Bound on the Renyi divergence of the Skellam mechanism: the formula of `Skellam`.

    Args:
        order: alpha, a whole number above 1.
        variance: mu, in integer steps squared.
        l2: L2 sensitivity in integer steps.
        l1: L1 sensitivity in integer steps.
    """
    rounding = min(((2 * order - 1) * l2 * l2 + 6 * l1) / (4 * variance * variance), 3 * l1 / (2 * variance))
    return order * l2 * l2 / (2 * variance) + rounding


@functools.cache
def _whole_orders(*, sampled: bool) -> tuple[int, ...]:
    """Every order to 64, then 8 % apart; the curve of a sampled Gaussian takes time in proportion to the order."""
    largest = 2**10 if sampled else 2**20
    spread = {round(64 * 1.08**step) for step in range(math.ceil(math.log(largest / 64) / math.log(1.08)))}
    return tuple(sorted({*range(2, 64), *spread}))


_DIFFERENT = "mechanisms that differ are composed by Renyi divergences, and hold at twice delta"
_PARTS = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Parts of delta that Skellam noise may have."""
_ADDED = "Skellam noise is counted by Renyi divergences, all else by privacy loss distributions, and the two are added"
_MOST_STEPS = 10**6  # after which a composition takes minutes
_DEEPEST = 200_000  # intervals from 0 to epsilon
_COMPOSED = 2**20  # points of the sum of all losses
_COARSEST = 1e-3
_WIDEST = 700.0  # losses whose e^x is a float64
_HOPELESS = 1e5
_ROUNDING = 1e-13
_ROUNDING_PER_STEP = 1e-14


class _OutOfReachError(Exception):
    """Why the discretised distributions give no reliable bound."""


def _pld(losses: _Losses, delta: float, renyi: float, points: int) -> float:
    """Epsilon by privacy loss distributions.

    A step's loss is put on a grid of width h. Connecting the dots adds at most h^2/4 to its variance, so h = 1/20 of
    the root mean square of the steps' losses adds less than a thousandth to the variance of the sum; it is
    wider only to keep the grids in memory, and where second differences of probabilities on so fine a grid would be
    rounding error: their error is added as mass, 2^-53 span / h^2 a step. The fast Fourier transform is exact to
    rounding alone: raising it to the k-th power multiplies that by k. `delta` is lowered by more than that error.
    """
    import numpy as np
    from dp_accounting import get_epsilon_gaussian

    steps = sum(count for _, count in losses.steps)
    rounding = _ROUNDING + _ROUNDING_PER_STEP * steps
    if delta < 4 * rounding:
        raise _OutOfReachError("delta is too near the rounding error of privacy loss distributions")
    if steps > _MOST_STEPS:
        raise _OutOfReachError(f"privacy loss distributions are composed for up to {_MOST_STEPS:,} steps")
    delta -= rounding
    gaussian = 1 / math.sqrt(2 * losses.rho) if losses.rho else math.inf
    if not losses.steps:
        return float(get_epsilon_gaussian(gaussian, delta)) * (1 + 1e-9) + 1e-9  # its root is right to 1e-12
    size = renyi
    if not all(step.plain for step, _ in losses.steps):  # a guess, because `renyi` is far too large
        size = _rdp(losses._replace(steps=tuple((step.like, count) for step, count in losses.steps)), delta)
    if size > _HOPELESS:
        raise _OutOfReachError("the losses span more than a grid can hold")
    parts = [*losses.steps, (_Step(gaussian, 1.0), 1)] if losses.rho else losses.steps
    span = math.fsum(step.span for step, _ in parts)
    if span > _WIDEST:
        raise _OutOfReachError("the losses span more than a grid can hold")
    variance = math.fsum(count * step.variance for step, count in parts)
    width = min(math.sqrt(variance / (steps + 1)) / 20, _COARSEST)
    width = max(width, span / points, size / _DEEPEST, math.sqrt(2.0**-53 * span * steps))
    # The library's tail bound makes the sum of k losses about k variance / (h span) points long.
    width = max(width, *(k * step.variance / (step.span * _COMPOSED) for step, k in losses.steps))
    composed = None
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for step, count in parts:
                one = step.loss(width)
                one = one if count == 1 else one.self_compose(count)
                composed = one if composed is None else composed.compose(one)
            return float(composed.get_epsilon_for_delta(delta))  # type: ignore[union-attr]  # of one part or more
    except (ValueError, ArithmeticError) as error:
        raise _OutOfReachError(f"the losses cannot be put on a grid ({error})") from error


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Silence a logger: `dp_accounting` reports each order that it leaves out, which only makes its bound larger."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def calibrate(
    target_epsilon: float,
    delta: float,
    events_for: Callable[[float], Sequence[Event]],
    accountant: Accountant = "pld",
) -> float:
    """The least noise multiplier with which the events cost at most `target_epsilon`, to a thousandth of itself.

    The epsilon of what is returned was computed and is at most `target_epsilon`.

    Args:
        target_epsilon: Positive.
        delta: Above 0 and below 1.
        events_for: The events of the whole run with a noise multiplier; epsilon falls as it rises.
        accountant: As in `spent`.

    Raises:
        AccountingError: no noise multiplier from `LEAST_NOISE` to `LARGEST_NOISE` is the least one.
    """
    target = positive("target_epsilon", target_epsilon)

    def epsilon(noise: float) -> float:
        return spent(events_for(noise), delta, accountant).epsilon

    enough = 1.0
    while epsilon(enough) > target:
        enough *= 2
        if enough > LARGEST_NOISE:
            least = epsilon(LARGEST_NOISE)
            raise AccountingError(
                "target_epsilon",
                target_epsilon,
                expected=f"at least {least:.3g}, which the largest noise multiplier {LARGEST_NOISE:g} gives",
                fix="take fewer steps or a larger delta",
            )
    too_little = enough / 2
    while epsilon(too_little) <= target:
        enough, too_little = too_little, too_little / 2
        if too_little < LEAST_NOISE:
            raise AccountingError(
                "target_epsilon",
                target_epsilon,
                expected=f"at most {epsilon(LEAST_NOISE):.3g}, which the least noise multiplier {LEAST_NOISE:g} gives",
                fix="set a smaller one, or set the noise multiplier instead",
            )

    while enough > too_little * (1 + 5e-4):
        middle = math.sqrt(enough * too_little)
        if epsilon(middle) <= target:
            enough = middle
        else:
            too_little = middle
    return enough
