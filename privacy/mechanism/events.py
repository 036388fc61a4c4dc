"""Events: which mechanism ran, its noise, its sensitivity and its neighbours. A ledger keeps them as canonical JSON.

An event has everything that an accountant needs and no data of an update: `accounting.py` composes events,
`site_noise.py` and `terms.py` make them. Refused: one event with a free-text name, whose sensitivity and neighbours
would be elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import index
from typing import Any, Literal, TypeAlias

from cloister.protocol.errors import AccountingError

Unit = Literal["record", "owner", "site"]

ADD_OR_REMOVE = "add or remove one record"
"""Neighbours of the unit `record`."""
ADD_OR_REMOVE_OWNER = "add or remove all records of one owner"
"""Neighbours of the unit `owner`."""
ZERO_OUT = "add or remove all records of one site, which sends zeros in every coordinate if it has none"
"""Neighbours of the unit `site`; other records in place of a site's own are two such steps away."""


def relation(unit: Unit) -> str:
    """What neighbouring means for a unit."""
    return {"record": ADD_OR_REMOVE, "owner": ADD_OR_REMOVE_OWNER, "site": ZERO_OUT}[unit]


@dataclass(frozen=True)
class SampledGaussian:
    """Steps of DP-SGD (Abadi et al. 2016): f(sample) + N(0, (z C)^2 I), where f sums terms of L2 norm at most C.

    Each unit is in the sample with probability q, independently (Poisson), so a batch may be empty and is still a
    step. Neighbours: add or remove one unit, which changes f by at most C. The worst case is one dimension: N(0, z^2)
    against (1 - q) N(0, z^2) + q N(1, z^2), both ways (Mironov, Talwar and Zhang 2019). With q = 1 it is the Gaussian
    mechanism.
    """

    noise_multiplier: float
    """z: standard deviation of the noise on the sum, in units of the clipping norm C."""
    sampling_rate: float
    """q: from 1e-9 to 1."""
    steps: int
    """Steps, 1 or more."""
    unit: Literal["record", "owner"] = "record"
    """What is drawn and clipped: a record (or a window of one), or an owner with all its records."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))
        rate = positive("sampling_rate", self.sampling_rate)
        if not 1e-9 <= rate <= 1:
            raise AccountingError("sampling_rate", rate, expected="a probability from 1e-9 to 1")
        object.__setattr__(self, "sampling_rate", rate)
        object.__setattr__(self, "steps", _count("steps", self.steps))
        if self.unit not in ("record", "owner"):
            raise AccountingError("unit", self.unit, expected="record or owner")


@dataclass(frozen=True)
class Gaussian:
    """Sums over all sites with Gaussian noise: f + N(0, (z C)^2 I), each site's term of L2 norm at most C.

    Neighbours (`ZERO_OUT`): one site's terms or zeros, which changes f by at most C. k of them, also of different z,
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
class CorrelatedGaussian:
    """All rounds of a run, with noise that is correlated over them: C^-1 (C G + N(0, (z sens(C) C_0)^2 I)).

    Row t of G is the sum of round t, in which each site's term has L2 norm at most C_0. Neighbours (`ZERO_OUT`): one
    site's terms or zeros. They are in at most `participations` of the `rounds` rounds, any two at least `separation`
    apart, so C G changes by at most sens(C) C_0, and the whole run is one Gaussian mechanism of noise multiplier z,
    whatever C is (`cloister.privacy.mechanism.correlated`).
    """

    noise_multiplier: float
    """z."""
    rounds: int
    """Rounds of the run."""
    separation: int
    """Least distance of two rounds with one site, 1 or more."""
    participations: int
    """Most rounds with one site, 1 or more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))
        for field in ("rounds", "separation", "participations"):
            object.__setattr__(self, field, _count(field, getattr(self, field)))


@dataclass(frozen=True)
class Skellam:
    """Sums of integer vectors with Skellam noise: f + (Poisson(mu/2) - Poisson(mu/2)) on each coordinate.

    Neighbours (`ZERO_OUT`): one site's vector or zeros, which changes f by at most `l2` and `l1` in those norms. For
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
            object.__setattr__(self, field, positive(field, getattr(self, field)))
        object.__setattr__(self, "count", _count("count", self.count))
        try:
            extra = tuple((variance, l2, l1) for variance, l2, l1 in self.extra)
        except (TypeError, ValueError):
            raise AccountingError("extra", self.extra, expected="triples of variance, l2 and l1") from None
        checked = (tuple(positive("extra", number) for number in triple) for triple in extra)
        object.__setattr__(self, "extra", tuple(checked))


@dataclass(frozen=True)
class Selection:
    """The best of K independent runs of one mechanism, where K is drawn before the first one and stays secret.

    With a mean above 1, K is truncated negative binomial (Papernot and Steinke 2022, "Hyperparameter Tuning with Renyi
    Differential Privacy", Definition 1) or Poisson. All runs draw from one law, independently of each other and of K,
    and only the best one is released, by a total order on what they return; with K = 0 it is a constant. It is
    RDP by Theorem 2 (truncated negative binomial) or Theorem 6 (Poisson) of that paper. Toward anyone who sees another
    run, or K, it costs what all runs cost.
    """

    law: Literal["negative-binomial", "poisson"]
    """Law of K."""
    mean: float
    """Its mean, above 1."""
    run: tuple[Event, ...]
    """What a round of one run releases."""
    rounds: int
    """Rounds of one run, 1 or more."""
    shape: float | None = None
    """eta of the truncated negative binomial: 0 is the logarithmic law, 1 the geometric one; None for Poisson."""

    def __post_init__(self) -> None:
        if self.law not in ("negative-binomial", "poisson"):
            raise AccountingError("law", self.law, expected="negative-binomial or poisson")
        mean = positive("mean", self.mean)
        if not 1 < mean <= 1000:
            raise AccountingError("mean", mean, expected="a number above 1, and at most 1000")
        object.__setattr__(self, "mean", mean)
        if (self.shape is None) != (self.law == "poisson"):
            raise AccountingError("shape", self.shape, expected="a value exactly with law negative-binomial")
        if self.shape is not None:
            shape = 0.0 if self.shape == 0 and self.shape is not False else positive("shape", self.shape)
            if shape and not 0.01 <= shape <= 100:
                raise AccountingError("shape", shape, expected="0, or a number from 0.01 to 100")
            object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "rounds", _count("rounds", self.rounds))
        run = tuple(self.run)
        if not run or any(isinstance(event, Selection) for event in run):
            raise AccountingError("run", run, expected="one event or more, and no selection among them")
        object.__setattr__(self, "run", run)


Event: TypeAlias = SampledGaussian | Gaussian | CorrelatedGaussian | Skellam | Selection


def plain(events: Iterable[Event]) -> Iterator[SampledGaussian | Gaussian | CorrelatedGaussian | Skellam]:
    """Events, with those of a round of one run in place of a selection."""
    for event in events:
        if isinstance(event, Selection):
            yield from plain(event.run)
        else:
            yield event


_MECHANISMS: dict[str, type[Any]] = {
    "sampled-gaussian": SampledGaussian,
    "gaussian": Gaussian,
    "correlated-gaussian": CorrelatedGaussian,
    "skellam": Skellam,
    "selection": Selection,
}


_LATER: dict[str, object] = {"unit": "record"}
"""Fields that earlier releases did not write, and the values at which they are left out: an old ledger is canonical."""


def to_json(events: Iterable[Event]) -> str:
    """Canonical JSON of `events`, in their order: sorted keys, no spaces, floats by the shortest digits that are exact.

    Equal lists give equal text, so that a ledger can hash it; `from_json` reads it back to equal events.
    """
    listed = [_written(event) for event in events]
    return json.dumps(listed, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _written(event: Event) -> dict[str, object]:
    names = {kind: name for name, kind in _MECHANISMS.items()}
    fields = asdict(event)
    written = {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}
    if isinstance(event, Selection):
        written["run"] = [_written(one) for one in event.run]
    return {"mechanism": names[type(event)], **written}


@lru_cache(maxsize=1024)  # many entries of a ledger have the same text
def from_json(text: str) -> tuple[Event, ...]:
    """Read what `to_json` wrote.

    Raises:
        AccountingError: it is anything else, including an unknown mechanism or a value out of range.
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
    if kind is Selection and isinstance(fields.get("run"), list):
        fields["run"] = tuple(_event(one) for one in fields["run"])
    try:
        event: Event = kind(**fields)
    except TypeError:
        raise AccountingError(
            "event", item, expected=f"the fields {', '.join(kind.__dataclass_fields__)}"
        ) from None
    return event


def _noise(value: object) -> float:
    number = positive("noise_multiplier", value)
    if not 1e-3 <= number <= 1e9:
        raise AccountingError("noise_multiplier", value, expected="a number from 0.001 to 1e9")
    return number


def positive(field: str, value: object) -> float:
    """`value` as a float.

    Raises:
        AccountingError: it is not a number from 1e-100 to 1e100.
    """
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
