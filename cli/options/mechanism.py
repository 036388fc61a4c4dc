"""The privacy mechanism of a run that is not planned yet: its cost for any noise multiplier and length.

Built from the options of `cloister budget`, each of which is checked against the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloister.privacy.accounting.accountant import Accountant, Spent, spent
from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    Unit,
    relation,
)
from cloister.privacy.mechanism.site_noise import skellam_for
from cloister.protocol.errors import CloisterError
from cloister.protocol.plan.plan import CohortSection
from cloister.protocol.plan.threshold import LARGEST, assumed

_OF_STEPS = ("sampling_rate", "batch_size", "examples", "steps", "steps_per_round")
_OF_SKELLAM = ("sites", "quorum", "colluders", "clip", "dimension")
_RING_BITS = 32


@dataclass(frozen=True)
class Mechanism:
    """A mechanism without its noise multiplier and its number of noised releases."""

    unit: Unit
    delta: float
    accountant: Accountant
    events: Callable[[float, int], Sequence[Event]]
    """From a noise multiplier and a number of noised releases."""
    description: str

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Mechanism:
        """The mechanism that the options describe.

        Raises:
            CloisterError: options contradict each other, or one is missing or out of range.
        """
        return _of_site(arguments) if arguments.unit == "site" else _of_steps(arguments)

    @property
    def counted(self) -> str:
        """What the length counts: a noised release is a round for unit `site`, else a step."""
        return "rounds" if self.unit == "site" else "steps"

    def cost(self, noise: float, length: int, group: int = 1) -> Spent:
        """What `length` releases with noise multiplier `noise` cost `group` units that differ together."""
        return spent(self.events(noise, length), self.delta, self.accountant, group=group)

    def row(self, noise: float | None, cost: Spent | None) -> dict[str, object]:
        """The JSON of one cost; without noise and cost, of a table's head."""
        return {
            "epsilon": cost.epsilon if cost else None,
            "delta": self.delta,
            "noise_multiplier": noise,
            "accountant": cost.accountant if cost else self.accountant,
            "unit": self.unit,
            "relation": relation(self.unit),
        }


def _of_steps(arguments: argparse.Namespace) -> Mechanism:
    unit = arguments.unit
    _only(arguments, ("central", "separation", "participations", *_OF_SKELLAM), "with --unit site")
    rate = arguments.sampling_rate
    if (arguments.batch_size is None) != (arguments.examples is None):
        raise CloisterError("--batch-size and --examples", expected="both options together")
    if (rate is None) == (arguments.batch_size is None):
        raise CloisterError(
            "--sampling-rate",
            expected=f"either this option, or --batch-size and --examples: the probability that one {unit} is in a "
            "step",
        )
    if rate is None:
        if not 1 <= arguments.batch_size <= arguments.examples:
            raise CloisterError(
                "--batch-size",
                arguments.batch_size,
                expected=f"from 1 to --examples, which is {arguments.examples}",
            )
        rate = arguments.batch_size / arguments.examples

    def events(noise: float, steps: int) -> Sequence[Event]:
        return [SampledGaussian(noise, rate, steps, unit)]

    events(1.0, 1)  # refuses a rate outside (0, 1]
    mechanism = f"Gaussian, in each step; every {unit} is in a step with probability {rate:.4g}, on its own"
    return Mechanism(unit, arguments.delta, arguments.accountant, events, mechanism)


def _of_site(arguments: argparse.Namespace) -> Mechanism:
    _only(arguments, _OF_STEPS, "with --unit record or owner")
    if (arguments.separation is None) != (arguments.participations is None):
        raise CloisterError("--separation and --participations", expected="both options together")
    if arguments.central:
        return _central(arguments)
    _only(arguments, ("separation",), "with --central")
    sites: int = _given(arguments.sites, 8)
    clip: float = _given(arguments.clip, 1.0)
    dimension: int = _given(arguments.dimension, 1_000_000)
    quorum: float = _given(arguments.quorum, 0.75)
    if not 1 <= sites <= LARGEST:
        raise CloisterError("--sites", sites, expected=f"from 1 to {LARGEST}")
    if not 0 < quorum <= 1:
        raise CloisterError("--quorum", quorum, expected="a fraction above 0, at most 1")
    colluders = assumed(sites, _given(arguments.colluders, 0.1))
    floor = CohortSection(sites=sites, quorum=quorum).needed()
    if colluders >= floor:
        raise CloisterError(
            "--colluders", colluders, expected=f"fewer than the {floor} sites of the smallest sum"
        )

    def events(noise: float, rounds: int) -> Sequence[Event]:
        of_round = skellam_for(noise, clip, dimension, sites, floor - colluders, _RING_BITS).event
        return [replace(of_round, count=rounds)]

    events(1.0, 1)  # refuses parameters that the ring cannot hold
    honest = f"{floor - colluders} honest sites of the {floor} or more of {sites} in a sum"
    mechanism = f"Skellam, in each round, from {honest}"
    return Mechanism("site", arguments.delta, arguments.accountant, events, mechanism)


def _central(arguments: argparse.Namespace) -> Mechanism:
    _only(arguments, _OF_SKELLAM, "without --central")
    b, k = arguments.separation, arguments.participations
    for option, value in (("--separation", b), ("--participations", k)):
        if value is not None and value < 1:
            raise CloisterError(option, value, expected="1 or more")

    def events(noise: float, rounds: int) -> Sequence[Event]:
        return [Gaussian(noise, rounds) if b is None else CorrelatedGaussian(noise, rounds, b, k)]

    when = "in each round"
    if b is not None:
        when = f"correlated over all rounds, for a site in at most {k} of them that are at least {b} apart"
    mechanism = f"Gaussian, {when}, by a coordinator that must be trusted"
    return Mechanism("site", arguments.delta, arguments.accountant, events, mechanism)


def _only(arguments: argparse.Namespace, options: Sequence[str], where: str) -> None:
    for option in options:
        value = getattr(arguments, option)
        if value is not None and value is not False:
            name = option.replace("_", "-")
            raise CloisterError(f"--{name}", expected=f"this option only {where}")


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
