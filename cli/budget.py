"""`cloister budget`: what a run's privacy will cost, or the noise that a budget needs, without training anything."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from cloister.aggregation.graph import LARGEST, assumed
from cloister.cli.display import PipedConsole
from cloister.privacy.accounting import (
    Accountant,
    Event,
    Gaussian,
    SampledGaussian,
    Spent,
    Unit,
    calibrate,
    relation,
    skellam_for,
    spent,
)
from cloister.privacy.figures import at_most
from cloister.privacy.report import meaning
from cloister.protocol.errors import CloisterError
from cloister.protocol.plan import CohortSection

_NOISES = (0.5, 1.0, 2.0, 4.0, 8.0)
_LENGTHS = (10, 30, 100, 300)
_DISTRIBUTED = ("sites", "quorum", "colluders", "clip", "dimension")
_RING_BITS = 32


_WHOSE: dict[Unit, str] = {"record": "a given record", "site": "a given site's data"}


@dataclass(frozen=True)
class _Setting:
    """All of a run but its noise and its length."""

    unit: Unit
    delta: float
    accountant: Accountant
    events: Callable[[float, int], Sequence[Event]]
    """Of a noise multiplier and a number of noised releases."""
    mechanism: str

    @property
    def counted(self) -> str:
        return "steps" if self.unit == "record" else "rounds"

    def cost(self, noise: float, length: int) -> Spent:
        return spent(self.events(noise, length), self.delta, self.accountant)

    def row(self, noise: float | None, cost: Spent | None) -> dict[str, object]:
        """What a program gets to know; None where a table holds it."""
        return {
            "epsilon": cost.epsilon if cost else None,
            "delta": self.delta,
            "noise_multiplier": noise,
            "accountant": cost.accountant if cost else self.accountant,
            "unit": self.unit,
            "relation": relation(self.unit),
        }


def run(arguments: argparse.Namespace) -> int:
    """Print the epsilon of a noise, the noise for an epsilon, or a table of both."""
    if arguments.noise_multiplier is not None and arguments.target_epsilon is not None:
        raise CloisterError(
            "--noise-multiplier and --target-epsilon", expected="one of them: each gives the other"
        )
    setting = _record(arguments) if arguments.unit == "record" else _site(arguments)
    length = _length(arguments)
    if arguments.noise_multiplier is None and arguments.target_epsilon is None:
        return _show_table(arguments, setting, length)
    if length is None:
        wanted = "--steps or --rounds" if setting.unit == "record" else "--rounds"
        raise CloisterError(wanted, expected="how long the run goes on, and it is missing")
    noise = arguments.noise_multiplier
    if noise is None:
        noise = calibrate(
            arguments.target_epsilon,
            setting.delta,
            lambda noise: setting.events(noise, length),
            setting.accountant,
        )
    cost = setting.cost(noise, length)
    if arguments.json:
        print(json.dumps(setting.row(noise, cost)))
        return 0
    console = PipedConsole()
    if arguments.target_epsilon is not None:
        _say(console, f"noise multiplier {_up(noise)} for epsilon {arguments.target_epsilon:g}", "bold")
    by = f"{cost.accountant} accountant{f': {cost.note}' if cost.note else ''}"
    _say(console, f"epsilon {at_most(cost.epsilon)} at delta {setting.delta:g} ({by})", "bold")
    _say(console, f"protects  one {setting.unit}; neighbours: {relation(setting.unit)}")
    _say(console, f"noise     {_up(noise)} x the clipping norm, {setting.mechanism}")
    _say(console, f"length    {length:,} {setting.counted}")
    _say(
        console,
        f"In plain words: from all that is released, nobody can guess whether {_WHOSE[setting.unit]} was used and be "
        f"right in more than {meaning(cost.epsilon, setting.delta).guess} of 100 cases, where a coin is right in 50.",
    )
    _caution(console, arguments)
    return 0


def _record(arguments: argparse.Namespace) -> _Setting:
    for option in ("central", *_DISTRIBUTED):
        value = getattr(arguments, option)
        if value is not None and value is not False:
            raise CloisterError(f"--{option}", expected="the unit site, and this is record")
    rate = arguments.sampling_rate
    if (arguments.batch_size is None) != (arguments.examples is None):
        raise CloisterError("--batch-size and --examples", expected="both, and one is missing")
    if (rate is None) == (arguments.batch_size is None):
        raise CloisterError(
            "--sampling-rate",
            expected="either the rate, or --batch-size and --examples, to know which share of a site's records "
            "is in a step",
        )
    if rate is None:
        if not 1 <= arguments.batch_size <= arguments.examples:
            raise CloisterError(
                "--batch-size", arguments.batch_size, expected=f"1 to the {arguments.examples} of --examples"
            )
        rate = arguments.batch_size / arguments.examples
    SampledGaussian(1.0, rate, 1)  # refuses a rate that is none

    def events(noise: float, steps: int) -> Sequence[Event]:
        return [SampledGaussian(noise, rate, steps)]

    mechanism = f"Gaussian, in each step; every record is in a step with probability {rate:.4g}, on its own"
    return _Setting("record", arguments.delta, arguments.accountant, events, mechanism)


def _site(arguments: argparse.Namespace) -> _Setting:
    for option in ("sampling_rate", "batch_size", "examples", "steps", "steps_per_round"):
        if getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise CloisterError(f"--{name}", expected="the unit record, and this is site")
    if arguments.central:
        for option in _DISTRIBUTED:
            if getattr(arguments, option) is not None:
                raise CloisterError(f"--{option}", expected="no --central, with which it has no bearing")
        return _Setting(
            "site",
            arguments.delta,
            arguments.accountant,
            lambda noise, rounds: [Gaussian(noise, rounds)],
            "Gaussian, in each round, by a coordinator that must be trusted",
        )
    sites: int = _given(arguments.sites, 8)
    clip: float = _given(arguments.clip, 1.0)
    dimension: int = _given(arguments.dimension, 1_000_000)
    quorum: float = _given(arguments.quorum, 0.75)
    if not 1 <= sites <= LARGEST:
        raise CloisterError("--sites", sites, expected=f"1 to {LARGEST}")
    if not 0 < quorum <= 1:
        raise CloisterError("--quorum", quorum, expected="a fraction above 0, at most 1")
    colluders = assumed(sites, _given(arguments.colluders, 0.1))
    floor = CohortSection(sites=sites, quorum=quorum).needed()

    def events(noise: float, rounds: int) -> Sequence[Event]:
        of_round = skellam_for(noise, clip, dimension, sites, floor, colluders, _RING_BITS).event
        return [replace(of_round, count=rounds)]

    events(1.0, 1)  # refuses what cannot be summed
    honest = f"{floor - colluders} honest sites of the {floor} or more of {sites} in a sum"
    mechanism = f"Skellam, in each round, from {honest}"
    return _Setting("site", arguments.delta, arguments.accountant, events, mechanism)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _length(arguments: argparse.Namespace) -> int | None:
    """Noised releases of the run: steps of the unit `record`, rounds of the unit `site`; None where it is not given."""
    for option in ("rounds", "steps", "steps_per_round"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise CloisterError(f"--{option.replace('_', '-')}", value, expected="1 or more")
    if arguments.steps is not None:
        if arguments.rounds is not None or arguments.steps_per_round is not None:
            raise CloisterError(
                "--steps", arguments.steps, expected="the steps of the whole run, or else --rounds"
            )
        return int(arguments.steps)
    if arguments.rounds is None:
        return None
    return int(arguments.rounds) * (arguments.steps_per_round or 1)


def _show_table(arguments: argparse.Namespace, setting: _Setting, length: int | None) -> int:
    lengths = (
        _LENGTHS if length is None else sorted({max(1, length // 4), max(1, length // 2), length, 2 * length})
    )
    costs = {(count, noise): setting.cost(noise, count) for count in lengths for noise in _NOISES}
    if arguments.json:
        rows = [
            {**setting.row(noise, cost), setting.counted: count} for (count, noise), cost in costs.items()
        ]
        print(json.dumps({**setting.row(None, None), "table": rows}))
        return 0
    console = PipedConsole()
    table = Table(title=f"epsilon at delta {setting.delta:g}, by {setting.counted} and noise multiplier")
    table.add_column(setting.counted, justify="right")
    for noise in _NOISES:
        table.add_column(f"{noise:g}", justify="right")
    for count in lengths:
        table.add_row(f"{count:,}", *(at_most(costs[count, noise].epsilon) for noise in _NOISES))
    console.print(table)
    _say(console, f"protects  one {setting.unit}; neighbours: {relation(setting.unit)}")
    _say(console, f"noise     {setting.mechanism}")
    _say(console, "Choose one with --noise-multiplier, or give --target-epsilon to have it computed.")
    _caution(console, arguments)
    return 0


def _caution(console: PipedConsole, arguments: argparse.Namespace) -> None:
    if arguments.examples is not None and arguments.delta * arguments.examples >= 1:
        _say(
            console,
            f"caution: delta {arguments.delta:g} is not below 1 / {arguments.examples:,} examples: "
            "so large a delta allows a whole record to be published",
            "bold yellow",
        )


def _up(noise: float) -> str:
    """A noise multiplier, rounded up so that it can be typed back: four decimals, or four digits of a small one."""
    decimals = max(4, 3 - math.floor(math.log10(noise)))
    return f"{math.ceil(noise * 10**decimals - 1e-9) / 10**decimals:.{decimals}f}".rstrip("0").rstrip(".")


def _say(console: PipedConsole, line: str, style: str = "") -> None:
    console.print(Text(line, style=style), soft_wrap=True)
