"""Accounting: what was released, as events, and the (epsilon, delta) that they cost together.

A mechanism M is (epsilon, delta)-DP when P[M(D) in S] <= e^epsilon P[M(D') in S] + delta for all neighbours D, D' and
all S (Dwork and Roth 2014). Each event below says which mechanism ran, its sensitivity and its neighbours. `spent`
composes any list of them, also where each was chosen after seeing the ones before, and gives an epsilon that is an
upper bound whatever the parameters; `calibrate` searches the other way.

- `pld` composes privacy loss distributions (Koskela et al. 2020; discretised as in Doroshenko et al. 2022, "Connect the
  dots", which rounds to the safe side). Gaussians alone are composed in closed form (Balle and Wang 2018, Theorem 8).
- `rdp` adds Renyi divergences (Mironov 2017) and converts them (Canonne, Kamath and Steinke 2020, Proposition 12).

Both come from `dp_accounting`, which has no Skellam mechanism: its published curve is added here. Where floating point
would bear on the result (a delta near rounding error, a loss that spans more than a grid can hold) the result is that
of `rdp`, and `Spent` says so. Refused: privacy loss distributions of Skellam noise in many dimensions, whose worst
neighbours are not known, and an accountant of our own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from cloister.privacy.clip import rounded_l1, rounded_l2
from cloister.privacy.noise import LARGEST_VARIANCE
from cloister.protocol.errors import AccountingError

Accountant = Literal["pld", "rdp"]
Unit = Literal["record", "site"]

ADD_OR_REMOVE = "add or remove one record"
"""Neighbours of the unit `record`."""
ZERO_OUT = "replace one site's updates by zeros"
"""Neighbours of the unit `site`."""

LEAST_NOISE, LARGEST_NOISE = 2.0**-6, 2.0**16
"""Noise multipliers between which `calibrate` searches."""
WRAP_DEVIATIONS = 12
"""Standard deviations of the noise for which `skellam_for` leaves room in the ring: they are passed with
probability below 2^-107 for a coordinate."""


def relation(unit: Unit) -> str:
    """What neighbouring means for a unit."""
    return {"record": ADD_OR_REMOVE, "site": ZERO_OUT}[unit]


@dataclass(frozen=True)
class SampledGaussian:
    """Steps of DP-SGD (Abadi et al. 2016): f(sample) + N(0, (z C)^2 I), where f sums terms of L2 norm at most C.

    Each record is in the sample with probability q, on its own (Poisson), so a batch may be empty and is still a step.
    Neighbours: add or remove one record, which changes f by at most C. The worst case is one dimension:
    N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2), both ways (Mironov, Talwar and Zhang 2019). With q = 1 it is the
    Gaussian mechanism.
    """

    noise_multiplier: float
    """z: standard deviation of the noise on the sum, in units of the clipping norm C."""
    sampling_rate: float
    """q: from 1e-9 to 1."""
    steps: int
    """Steps, 1 or more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))
        rate = _positive("sampling_rate", self.sampling_rate)
        if not 1e-9 <= rate <= 1:
            raise AccountingError("sampling_rate", rate, expected="a probability from 1e-9 to 1")
        object.__setattr__(self, "sampling_rate", rate)
        object.__setattr__(self, "steps", _count("steps", self.steps))


@dataclass(frozen=True)
class Gaussian:
    """Sums over all sites with Gaussian noise: f + N(0, (z C)^2 I), each site's term of L2 norm at most C.

    Neighbours: one site's terms are replaced by zeros, which changes f by at most C. k of them, also of different z,
    are exactly one Gaussian mechanism with z = (sum of z_i^-2)^(-1/2) (Dong, Roth and Su 2022, Corollary 3.3).
    """

    noise_multiplier: float
    """z: standard deviation of the noise on the sum, in units of the clipping norm C."""
    count: int
    """Releases, 1 or more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))
        object.__setattr__(self, "count", _count("count", self.count))


@dataclass(frozen=True)
class Skellam:
    """Sums of integer vectors with Skellam noise: f + (Poisson(mu/2) - Poisson(mu/2)) on each coordinate.

    Neighbours: one site's vector is replaced by zeros, which changes f by at most `l2` and `l1` in those norms. For
    integer orders alpha > 1 (Agarwal, Kairouz and Liu 2021, "The Skellam mechanism for differentially private federated
    learning", Theorem 3.5 and its corollary for vectors)

        RDP(alpha) <= alpha l2^2 / (2 mu) + min(((2 alpha - 1) l2^2 + 6 l1) / (4 mu^2), 3 l1 / (2 mu)).

    Reduction modulo 2^b is post-processing. Skellam noise is closed under addition, so `variance` is that of the noise
    of all honest sites whose vectors are surely in the sum; what others add costs nothing.
    """

    variance: float
    """mu: variance of the honest sites' noise together, on each coordinate, in integer steps squared."""
    l2: float
    """Largest L2 norm of a site's integer vector."""
    l1: float
    """Largest L1 norm of a site's integer vector."""
    count: int
    """Releases, 1 or more."""
    extra: tuple[tuple[float, float, float], ...] = ()
    """(variance, l2, l1) of what is released with it under noise of its own, such as adaptive clipping's count."""

    def __post_init__(self) -> None:
        for field in ("variance", "l2", "l1"):
            object.__setattr__(self, field, _positive(field, getattr(self, field)))
        object.__setattr__(self, "count", _count("count", self.count))
        try:
            extra = tuple((variance, l2, l1) for variance, l2, l1 in self.extra)
        except (TypeError, ValueError):
            raise AccountingError("extra", self.extra, expected="triples of variance, l2 and l1") from None
        checked = (tuple(_positive("extra", number) for number in triple) for triple in extra)
        object.__setattr__(self, "extra", tuple(checked))


Event: TypeAlias = SampledGaussian | Gaussian | Skellam

_MECHANISMS: dict[str, type[Any]] = {
    "sampled-gaussian": SampledGaussian,
    "gaussian": Gaussian,
    "skellam": Skellam,
}


def to_json(events: Iterable[Event]) -> str:
    """Canonical JSON of `events`, in their order: sorted keys, no spaces, floats by the shortest digits that are exact.

    Equal lists give equal text, so that a ledger can hash it; `from_json` reads it back to equal events.
    """
    names = {kind: name for name, kind in _MECHANISMS.items()}
    listed = [{"mechanism": names[type(event)], **asdict(event)} for event in events]
    return json.dumps(listed, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> tuple[Event, ...]:
    """Read what `to_json` wrote.

    Raises:
        AccountingError: it is anything else, an unknown mechanism or a value out of its range included.
    """
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AccountingError("events", text, expected=f"JSON ({error})") from None
    if not isinstance(listed, list):
        raise AccountingError("events", text, expected="a list of events")
    events = tuple(_event(item) for item in listed)
    if to_json(events) != text:
        raise AccountingError("events", text, expected="the canonical encoding of its events")
    return events


def _event(item: object) -> Event:
    fields = dict(item) if isinstance(item, dict) else {}
    kind = _MECHANISMS.get(str(fields.pop("mechanism", None)))
    if kind is None:
        raise AccountingError("event", item, expected=f"a mechanism of {', '.join(_MECHANISMS)}")
    try:
        event: Event = kind(**fields)
    except TypeError:
        raise AccountingError(
            "event", item, expected=f"the fields {', '.join(kind.__dataclass_fields__)}"
        ) from None
    return event


@dataclass(frozen=True)
class Spent:
    """What a list of events costs: every one of them together is (epsilon, delta)-DP."""

    epsilon: float
    """An upper bound; `math.inf` where there is none."""
    delta: float
    """The delta that was asked for."""
    accountant: Accountant
    """The accountant whose bound this is."""
    note: str = ""
    """Why that is not the accountant that was asked for, or what was assumed; empty where there is nothing to say."""


def spent(events: Iterable[Event], delta: float, accountant: Accountant = "pld") -> Spent:
    """The epsilon of all `events` together at `delta`.

    Neighbours are those of the events. Where releases for records (`SampledGaussian`) and for sites (`Gaussian`,
    `Skellam`) are in one list, the result is for one record: it may change its site's whole update from one vector of
    the clipped norm to another, so a release for sites is then counted with twice its sensitivity.

    Args:
        events: What was released, in any order; equal ones are merged first, so a long ledger costs little more.
        delta: Above 0 and below 1.
        accountant: `pld`, or `rdp`. Skellam noise has only `rdp`, which then composes the whole list.

    Raises:
        AccountingError: `delta` or `accountant` is not as said above.
    """
    delta = _positive("delta", delta)
    if not delta < 1:
        raise AccountingError("delta", delta, expected="a probability above 0 and below 1")
    if accountant not in get_args(Accountant):
        raise AccountingError("accountant", accountant, expected=" or ".join(get_args(Accountant)))
    losses, mixed = _losses(events)
    found = _compose(losses, delta, accountant)
    if mixed:
        note = "for one record: releases for sites are counted with twice their sensitivity"
        found = replace(found, note="; ".join(filter(None, (note, found.note))))
    return found


class _Losses(NamedTuple):
    """A list of events, merged: all that the epsilon depends on."""

    sampled: tuple[tuple[float, float, int], ...]  # noise multiplier, sampling rate, steps
    rho: float  # zero-concentrated DP of all Gaussians together: the sum of 1 / (2 z^2)
    skellam: tuple[tuple[float, float, float, int], ...]  # variance, l2, l1, count


def _losses(events: Iterable[Event]) -> tuple[_Losses, bool]:
    sampled: Counter[tuple[float, float]] = Counter()
    gaussian: Counter[float] = Counter()
    skellam: Counter[tuple[float, float, float]] = Counter()
    units: set[Unit] = set()
    for event in events:
        units.add("record" if isinstance(event, SampledGaussian) else "site")
        match event:
            case SampledGaussian(z, q, steps):
                sampled[z, q] += steps
            case Gaussian(z, count):
                gaussian[z] += count
            case Skellam(variance, l2, l1, count, extra):
                for part in ((variance, l2, l1), *extra):
                    skellam[part] += count
    mixed = len(units) == 2
    sensitivity = 2 if mixed else 1  # a record may change its site's vector from any to any other
    rho = [count * (sensitivity / z) ** 2 / 2 for z, count in sorted(gaussian.items())]
    rho += [steps * (1 / z) ** 2 / 2 for (z, q), steps in sorted(sampled.items()) if q == 1]
    losses = _Losses(
        tuple((z, q, steps) for (z, q), steps in sorted(sampled.items()) if q < 1),
        math.fsum(rho),
        tuple(
            (mu, sensitivity * l2, sensitivity * l1, count) for (mu, l2, l1), count in sorted(skellam.items())
        ),
    )
    return losses, mixed


@functools.lru_cache(maxsize=4096)
def _compose(losses: _Losses, delta: float, accountant: Accountant) -> Spent:
    if not (losses.sampled or losses.rho or losses.skellam):
        return Spent(0.0, delta, accountant)
    renyi = _rdp(losses, delta)
    if accountant == "rdp":
        return Spent(renyi, delta, "rdp")
    if losses.skellam:
        return Spent(renyi, delta, "rdp", "Skellam noise is composed by Renyi divergences")
    try:
        epsilon = _pld(losses, delta, renyi)
    except _OutOfReachError as error:
        return Spent(renyi, delta, "rdp", str(error))
    if renyi < epsilon:  # both are upper bounds
        return Spent(renyi, delta, "rdp", "here the Renyi bound is the smaller one")
    return Spent(epsilon, delta, "pld")


def _rdp(losses: _Losses, delta: float) -> float:
    """Least epsilon over the orders: those of `dp_accounting`, from 1.1 to 1024, or whole ones with Skellam noise."""
    from dp_accounting import dp_event as dp
    from dp_accounting.rdp import RdpAccountant

    public = [
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(_exact(z, q))), steps)
        for z, q, steps in losses.sampled
    ]
    if losses.rho:
        public.append(dp.ZCDpEvent(rho=losses.rho))
    with _without_log("absl"):
        if not losses.skellam:
            return float(RdpAccountant().compose(dp.ComposedDpEvent(public)).get_epsilon(delta))
        least = math.inf
        for order in _whole_orders(sampled=bool(losses.sampled)):
            bound = math.fsum(count * skellam_rdp(order, mu, l2, l1) for mu, l2, l1, count in losses.skellam)
            # At one order a bound is a (rho = bound / order)-zCDP event, whatever it is at other orders.
            events = dp.ComposedDpEvent([*public, dp.ZCDpEvent(rho=bound / order)])
            least = min(least, float(RdpAccountant([order]).compose(events).get_epsilon(delta)))
        return least


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


_MOST_STEPS = 10**6  # after which a composition takes minutes
_GRID = 2**16  # points of the loss of one step, for all mechanisms of the list together
_DEEPEST = 200_000  # intervals from 0 to epsilon
_COMPOSED = 2**20  # points of the sum of all losses
_COARSEST = 1e-3
_WIDEST = 700.0  # losses whose e^x is a float64
_HOPELESS = 1e5
_ROUNDING = 1e-13
_ROUNDING_PER_STEP = 1e-14


class _OutOfReachError(Exception):
    """Why the discretised distributions give no reliable bound."""


def _pld(losses: _Losses, delta: float, renyi: float) -> float:
    """Epsilon by privacy loss distributions.

    A step's loss is put on a grid of width h. Connecting the dots adds at most h^2/4 to its variance, so h = 1/20 of
    the root mean square of the steps' losses adds less than a thousandth to the variance of the sum; it is
    wider only to keep the grids in memory, and where second differences of probabilities on so fine a grid would be
    rounding error: what they err by is added as mass, 2^-53 span / h^2 a step. The fast Fourier transform is exact to
    rounding alone: raising it to the k-th power multiplies that by k. `delta` is lowered by more than that error.
    """
    import numpy as np
    from dp_accounting import get_epsilon_gaussian
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    steps = sum(steps for _, _, steps in losses.sampled)
    rounding = _ROUNDING + _ROUNDING_PER_STEP * steps
    if delta < 4 * rounding:
        raise _OutOfReachError("delta is too near the rounding error of privacy loss distributions")
    if steps > _MOST_STEPS:
        raise _OutOfReachError(f"privacy loss distributions are composed for up to {_MOST_STEPS:,} steps")
    delta -= rounding
    gaussian = 1 / math.sqrt(2 * losses.rho) if losses.rho else math.inf
    if not losses.sampled:
        return float(get_epsilon_gaussian(gaussian, delta)) * (1 + 1e-9) + 1e-9  # its root is right to 1e-12
    if renyi > _HOPELESS:
        raise _OutOfReachError("the losses span more than a grid can hold")
    sampled = [(_exact(z, q), q, steps) for z, q, steps in losses.sampled]
    parts = [*sampled, (gaussian, 1.0, 1)] if losses.rho else sampled
    span = math.fsum(_span(z, q) for z, q, _ in parts)
    if span > _WIDEST:
        raise _OutOfReachError("the losses span more than a grid can hold")
    variance = math.fsum(steps * _loss_variance(z, q) for z, q, steps in parts)
    width = min(math.sqrt(variance / (steps + 1)) / 20, _COARSEST)
    width = max(width, span / _GRID, renyi / _DEEPEST, math.sqrt(2.0**-53 * span * steps))
    # The library's tail bound makes the sum of k losses about k variance / (h span) points long.
    width = max(width, *(k * _loss_variance(z, q) / (_span(z, q) * _COMPOSED) for z, q, k in sampled))
    composed = None
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for z, q, times in parts:
                one = from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=width)
                one = one if times == 1 else one.self_compose(times)
                composed = one if composed is None else composed.compose(one)
            return float(composed.get_epsilon_for_delta(delta))  # type: ignore[union-attr]  # of one part or more
    except (ValueError, ArithmeticError) as error:
        raise _OutOfReachError(f"the losses cannot be put on a grid ({error})") from error


def _span(z: float, q: float) -> float:
    """About the range of one step's loss, whose tails are cut at e^-50: ten standard deviations."""
    farthest = 10.2 / z + 0.5 / (z * z)
    if q == 1:
        return 2 * farthest
    return farthest if farthest > _WIDEST else math.log1p(q * math.expm1(farthest)) - math.log1p(-q)


def _loss_variance(z: float, q: float) -> float:
    """About the variance of one step's loss: that of the likelihood ratio, q^2 (e^(1/z^2) - 1)."""
    return 1 / (z * z) if q == 1 else q * q * math.expm1(min(1 / (z * z), 20.0))


def _exact(z: float, q: float) -> float:
    """`z`, or the largest noise below it at which float64 resolves one step's loss: less noise, a larger bound."""
    return min(z, math.sqrt(1e9 * q))


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
    target = _positive("target_epsilon", target_epsilon)

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
                fix="give a smaller one, or the noise multiplier itself",
            )

    while enough > too_little * (1 + 5e-4):
        middle = math.sqrt(enough * too_little)
        if epsilon(middle) <= target:
            enough = middle
        else:
            too_little = middle
    return enough


def noised_with(noise_multiplier: float, count_noise: float) -> float:
    """The noise multiplier of an update released together with adaptive clipping's count: z_delta.

    Andrew et al. 2021 ("Differentially private learning with adaptive clipping", Theorem 1): the count of unclipped
    sites, whose terms are +-1/2, gets noise of standard deviation sigma_b. Update and count together are exactly one
    Gaussian mechanism of noise multiplier z when z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2). The ledger is charged z.

    Args:
        noise_multiplier: z, what is charged.
        count_noise: sigma_b, in sites.

    Raises:
        AccountingError: the count alone would cost as much as z or more.
    """
    z, sigma = _positive("noise_multiplier", noise_multiplier), _positive("count_noise", count_noise)
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
    noise_multiplier: float,
    clip: float,
    dimension: int,
    contributors: int,
    floor: int,
    colluders: int,
    ring_bits: int,
) -> SkellamScale:
    """The scale and noise of a sum in which only the honest survivors' noise counts.

    Of the sites in an opened sum, at least `floor` - `colluders` are honest and have added their noise. Each site
    adds variance v = (z C s)^2 / (floor - colluders), so the noise that counts has at least the standard deviation
    z C s. s is the largest power of two with v <= `noise.LARGEST_VARIANCE`, beyond which Skellam noise is not sampled
    exactly, and with the sum inside the ring:

        contributors (s C + 1) + 12 sqrt(contributors v) < 2^(ring_bits - 1).

    A larger s means less rounding: the integer sensitivities of conditional rounding (`cloister.privacy.clip`) are
    closer to s C.

    Args:
        noise_multiplier: z, of the noise that counts, in units of the clipping norm.
        clip: C, L2 norm of a site's update.
        dimension: Coordinates of an update.
        contributors: Most sites in a sum.
        floor: Fewest sites whose sum is opened.
        colluders: Most of them that may work with the coordinator and add no noise.
        ring_bits: b, of the integers modulo 2^b that are summed.

    Raises:
        AccountingError: an argument is out of range, or the ring has no room.
    """
    z, bound = _positive("noise_multiplier", noise_multiplier), _positive("clip", clip)
    for field, value, least in (
        ("dimension", dimension, 1),
        ("floor", floor, 1),
        ("contributors", contributors, floor),
    ):
        if value < least:
            raise AccountingError(field, value, expected=f"{least} or more")
    if not 0 <= colluders < floor:
        raise AccountingError(
            "colluders",
            colluders,
            expected=f"fewer than the {floor} sites of the smallest sum: one must add noise",
        )
    honest = floor - colluders
    room = 2.0 ** (ring_bits - 1)
    per_step = bound * (contributors + WRAP_DEVIATIONS * z * math.sqrt(contributors / honest))
    if room <= contributors:
        raise AccountingError("ring_bits", ring_bits, expected=f"a ring that holds {contributors} terms")
    largest = min((room - contributors) / per_step, math.sqrt(LARGEST_VARIANCE * honest) / (z * bound))
    scale = 2.0 ** math.floor(math.log2(largest))
    while contributors + scale * per_step >= room or (z * bound * scale) ** 2 > LARGEST_VARIANCE * honest:
        scale /= 2  # the logarithm was rounded up
    variance = (z * bound * scale) ** 2 / honest
    l2 = rounded_l2(scale * bound, dimension)
    event = Skellam(variance * honest, l2, rounded_l1(l2, dimension), 1)
    return SkellamScale(scale, variance, event)


def _noise(value: object) -> float:
    number = _positive("noise_multiplier", value)
    if not 1e-3 <= number <= 1e9:
        raise AccountingError("noise_multiplier", value, expected="a number from 0.001 to 1e9")
    return number


def _positive(field: str, value: object) -> float:
    try:
        number = float(value) if not isinstance(value, bool | str) else math.nan  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 1e-100 <= number <= 1e100:  # their squares are float64 too
        raise AccountingError(field, value, expected="a number above 0, and finite")
    return number


def _count(field: str, value: object) -> int:
    try:
        number = index(value) if not isinstance(value, bool) else 0  # type: ignore[arg-type]  # refused below
    except TypeError:
        number = 0
    if not 1 <= number < 2**53:
        raise AccountingError(field, value, expected="a whole number, 1 or more")
    return number
