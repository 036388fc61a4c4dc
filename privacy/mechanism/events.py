"""Events: which mechanism ran, its noise, its sensitivity and its neighbours. A ledger keeps them as canonical JSON.

An event has everything that an accountant needs and no data of an update: `accountant.py` composes events,
`site_noise.py`, `unit_sum.py` and `terms.py` make them. It also says whose noise it counts on, and so whom it trusts
(`accounting/trust.py`): that does not change what it costs everybody else. Refused: one event with a free-text name,
whose sensitivity and neighbours would be elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from cloister.protocol.errors import AccountingError
from cloister.protocol.plan.settings import in_words

Unit = Literal["record", "owner", "site"]

_STRICT = ConfigDict(strict=True, extra="forbid")
Positive = Annotated[float, Field(ge=1e-100, le=1e100)]
"""Its square is a float64 too."""
Noise = Annotated[float, Field(ge=1e-3, le=1e9)]
Count = Annotated[int, Field(ge=1, lt=2**53)]
Triple = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]


class _Checked:
    """An event. It is checked when it is made.

    Raises:
        AccountingError: a field is missing, unknown, of another type, or out of range.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: Callable[[Any], Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = (*first["loc"], "event")[0]
            name = at if isinstance(at, str) else tuple(vars(cls)["__dataclass_fields__"])[at]
            shown = () if first["type"] == "missing" else (first["input"],)
            raise AccountingError(name, *shown, expected=in_words(first["msg"])) from None


@dataclass(frozen=True, config=_STRICT)
class SampledGaussian(_Checked):
    """Steps of DP-SGD (Abadi et al. 2016): f(sample) + N(0, (z C)^2 I), where f sums terms of L2 norm at most C.

    Each unit is in the sample with probability q, independently (Poisson), so a batch may be empty and is still a
    step. Neighbours: add or remove one unit, which changes f by at most C. The worst case is one dimension: N(0, z^2)
    against (1 - q) N(0, z^2) + q N(1, z^2), both ways (Mironov, Talwar and Zhang 2019). With q = 1 it is the Gaussian
    mechanism. The unit's own site adds all of the noise.
    """

    noise_multiplier: Noise
    """z: standard deviation of the noise on the sum, in units of the clipping norm C."""
    sampling_rate: Annotated[float, Field(ge=1e-9, le=1)]
    """q: from 1e-9 to 1."""
    steps: Count
    """Steps, 1 or more."""
    unit: Literal["record", "owner"] = "record"
    """What is drawn and clipped: a record (or a window of one), or an owner with all its records."""
    trusts: Literal["", "coordinator"] = ""
    """`coordinator`: it must send no crafted weights (`privacy.method = "opacus"`). Ledgers of earlier versions do not
    say it."""


@dataclass(frozen=True, config=_STRICT)
class Gaussian(_Checked):
    """Sums over all sites with Gaussian noise: f + N(0, (z C)^2 I), each site's term of L2 norm at most C.

    Neighbours: one site's terms or zeros, which changes f by at most C. k of them, also of different z,
    are exactly one Gaussian mechanism with z = (sum of z_i^-2)^(-1/2) (Dong, Roth and Su 2022, Corollary 3.3). The
    coordinator adds the noise, and is trusted.
    """

    noise_multiplier: Noise
    """z: standard deviation of the noise on the sum, in units of the clipping norm C."""
    count: Count
    """Releases, 1 or more."""


@dataclass(frozen=True, config=_STRICT)
class CorrelatedGaussian(_Checked):
    """All rounds of a run, with noise that is correlated over them: C^-1 (C G + N(0, (z sens(C) C_0)^2 I)).

    Row t of G is the sum of round t, in which each site's term has L2 norm at most C_0. Neighbours: one
    site's terms or zeros. They are in at most `participations` of the `rounds` rounds, any two at least `separation`
    apart, so C G changes by at most sens(C) C_0, and the whole run is one Gaussian mechanism of noise multiplier z,
    whatever C is (`cloister.privacy.mechanism.correlated`). The coordinator adds the noise, and is trusted.
    """

    noise_multiplier: Noise
    """z."""
    rounds: Count
    """Rounds of the run."""
    separation: Count
    """Least distance of two rounds with one site, 1 or more."""
    participations: Count
    """Most rounds with one site, 1 or more."""


@dataclass(frozen=True, config=_STRICT)
class Skellam(_Checked):
    """Sums of integer vectors with Skellam noise: f + (Poisson(mu/2) - Poisson(mu/2)) on each coordinate.

    Neighbours: the vector of one unit or zeros, which changes f by at most `l2` and `l1` in those norms. For
    integer orders alpha > 1 (Agarwal, Kairouz and Liu 2021, "The Skellam mechanism for differentially private federated
    learning", Theorem 3.5 and its corollary for vectors)

        RDP(alpha) <= alpha l2^2 / (2 mu) + min(((2 alpha - 1) l2^2 + 6 l1) / (4 mu^2), 3 l1 / (2 mu)).

    Reduction modulo 2^b is post-processing. Skellam noise is closed under addition, so `variance` is that of the noise
    of all honest sites whose vectors are surely in the sum; what others add costs nothing. Each site adds independent
    Skellam noise of variance mu / `honest`.
    """

    variance: Positive
    """mu: variance of the honest sites' noise together, on each coordinate, in integer steps squared."""
    l2: Positive
    """Largest L2 norm of a unit's integer vector."""
    l1: Positive
    """Largest L1 norm of a unit's integer vector."""
    count: Count
    """Releases, 1 or more."""
    extra: Annotated[tuple[Triple, ...], Field(strict=False)] = ()
    """(variance, l2, l1) of what is released with it under noise of its own, such as adaptive clipping's count."""
    unit: Unit = "site"
    """Whose vector it is: that of a site, or in a question that of a record or an owner."""
    honest: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Sites whose equal parts of the noise are counted in `variance`, and in those of `extra`; 0: not known, as in
    ledgers of earlier versions."""
    asked: bool = False
    """Whether it is a question about sites; one about records or owners is known by its unit."""


Event: TypeAlias = SampledGaussian | Gaussian | CorrelatedGaussian | Skellam


_ADDED: dict[type[Any], dict[str, Any]] = {
    Skellam: {"unit": "site", "honest": 0, "asked": False},
    SampledGaussian: {"trusts": ""},
}
"""Fields that ledgers of earlier versions do not have. With these values they are not written: those ledgers stay
canonical."""
_MECHANISMS: dict[str, type[Any]] = {
    "sampled-gaussian": SampledGaussian,
    "gaussian": Gaussian,
    "correlated-gaussian": CorrelatedGaussian,
    "skellam": Skellam,
}


def to_json(events: Iterable[Event]) -> str:
    """Canonical JSON of `events`, in their order: sorted keys, no spaces, floats by the shortest digits that are exact.

    Equal lists give equal text, so that a ledger can hash it; `from_json` reads it back to equal events.
    """
    names = {kind: name for name, kind in _MECHANISMS.items()}
    listed = [{"mechanism": names[type(event)], **_fields(event)} for event in events]
    return json.dumps(listed, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _fields(event: Event) -> dict[str, Any]:
    """The fields of an event that are written."""
    added = _ADDED.get(type(event), {})
    return {name: value for name, value in asdict(event).items() if name not in added or value != added[name]}


def bare(event: Event) -> Event:
    """The event without whom it trusts, as ledgers of earlier versions have it: it costs the same."""
    if isinstance(event, Skellam):
        return replace(event, honest=0)
    if isinstance(event, SampledGaussian):
        return replace(event, trusts="")
    return event


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
    event: Event = kind(**fields)
    return event


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
