"""`cloister budget`: what privacy costs, or the noise that a budget needs.

Print the epsilon of a noise multiplier, the noise multiplier for an epsilon, or a table of both; nothing is trained.
Unit record or owner: DP-SGD on units drawn with --sampling-rate, or --batch-size of --examples, for --steps, or
--rounds of --steps-per-round. Unit site: whole updates, each clipped, for --rounds.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial

from cloister.cli.options.mechanism import Mechanism
from cloister.cli.options.shared_options import Parser, add_json
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.accountant import Spent, calibrate
from cloister.privacy.mechanism.events import relation
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.report import meaning
from cloister.protocol.errors import CloisterError

_NOISES = (0.5, 1.0, 2.0, 4.0, 8.0)
_LENGTHS = (10, 30, 100, 300)


def options(parser: Parser) -> None:
    """Unit, noise or epsilon, length, and the mechanism of each unit."""
    parser.value("--unit", "what is protected", choices=("record", "owner", "site"), required=True)
    parser.value("--noise-multiplier Z", "noise in units of the clipping norm", type=float)
    parser.value("--target-epsilon E", "epsilon of the whole run, to find its noise", type=float)
    parser.value("--delta D", "delta of the guarantee (default: 1e-5)", 1e-5)
    parser.value("--rounds R", "rounds of the run", type=int)
    parser.value(
        "--group K",
        "also the epsilon of K units together, such as K records of one person; with --noise-multiplier",
        type=int,
    )
    parser.value(
        "--accountant", "privacy loss distributions, or Renyi divergences", "pld", choices=("pld", "rdp")
    )
    add_json(parser)
    steps = partial(parser.value, to=parser.add_argument_group("unit record or owner"))
    steps("--sampling-rate Q", "probability that a unit is in a step", type=float)
    steps("--batch-size B", "expected units in a step; with --examples", type=int)
    steps("--examples N", "units of the smallest site; with --batch-size", type=int)
    steps("--steps S", "steps of the whole run, instead of --rounds", type=int)
    steps("--steps-per-round K", "steps of a round (default: 1)", type=int)
    group = parser.add_argument_group("unit site")
    site = partial(parser.value, to=group)
    parser.flag("--central", "Gaussian noise, added by a trusted coordinator", group)
    site(
        "--separation B",
        "correlate the noise of --central; least rounds from one round with a site to its next",
        type=int,
    )
    site("--participations K", "most rounds with one site; with --separation", type=int)
    site("--sites N", "sites in a round (default: 8)", type=int)
    site("--quorum F", "fraction of the sites in the smallest sum (default: 0.75)", type=float)
    site("--colluders F", "fraction of the sites that add no noise (default: 0.1)", type=float)
    site("--clip C", "clipping norm of an update (default: 1)", type=float)
    site("--dimension P", "parameters of an update (default: 1000000)", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Print the epsilon of a noise multiplier, the noise multiplier for an epsilon, or a table of both."""
    if arguments.noise_multiplier is not None and arguments.target_epsilon is not None:
        raise CloisterError(
            "--noise-multiplier and --target-epsilon", expected="only one of them: each determines the other"
        )
    if arguments.group is not None and (arguments.group < 2 or arguments.noise_multiplier is None):
        raise CloisterError(
            "--group", arguments.group, expected="2 or more, and only with --noise-multiplier"
        )

    mechanism = Mechanism.of(arguments)
    length = _length(arguments)
    if arguments.noise_multiplier is None and arguments.target_epsilon is None:
        return _run_table(arguments, mechanism, length)
    if length is None:
        wanted = "--rounds" if mechanism.unit == "site" else "--steps or --rounds"
        raise CloisterError(wanted, expected="the length of the run")
    noise = arguments.noise_multiplier
    if noise is None:
        noise = calibrate(
            arguments.target_epsilon,
            mechanism.delta,
            lambda noise: mechanism.events(noise, length),
            mechanism.accountant,
        )
    cost = mechanism.cost(noise, length)
    together = mechanism.cost(noise, length, arguments.group) if arguments.group else None
    if arguments.json:
        extra = {"group": arguments.group, "group_epsilon": together.epsilon} if together else {}
        print(json.dumps({**mechanism.row(noise, cost), **extra}))
    else:
        _print_cost(arguments, mechanism, noise, length, cost, together)
    return 0


def _length(arguments: argparse.Namespace) -> int | None:
    """Noised releases of the run: rounds for unit `site`, else steps; None if not given."""
    for option in ("rounds", "steps", "steps_per_round"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise CloisterError(f"--{option.replace('_', '-')}", value, expected="1 or more")
    if arguments.steps is not None:
        if arguments.rounds is not None or arguments.steps_per_round is not None:
            raise CloisterError(
                "--steps", arguments.steps, expected="either --steps, or --rounds with --steps-per-round"
            )
        return int(arguments.steps)
    if arguments.rounds is None:
        return None
    return int(arguments.rounds) * (arguments.steps_per_round or 1)


def _run_table(arguments: argparse.Namespace, mechanism: Mechanism, length: int | None) -> int:
    lengths: tuple[int, ...] = _LENGTHS
    if length is not None:
        lengths = tuple(sorted({max(1, length // 4), max(1, length // 2), length, 2 * length}))
    costs = {(count, noise): mechanism.cost(noise, count) for count in lengths for noise in _NOISES}
    if arguments.json:
        rows = [
            {**mechanism.row(noise, cost), mechanism.counted: count} for (count, noise), cost in costs.items()
        ]
        print(json.dumps({**mechanism.row(None, None), "table": rows}))
    else:
        _print_table(arguments, mechanism, lengths, costs)
    return 0


def _print_cost(
    arguments: argparse.Namespace,
    mechanism: Mechanism,
    noise: float,
    length: int,
    cost: Spent,
    together: Spent | None,
) -> None:

    console = PipedConsole()
    if arguments.target_epsilon is not None:
        console.say(f"noise multiplier {_up(noise)} for epsilon {arguments.target_epsilon:g}", "bold")
    by = f"{cost.accountant} accountant{f': {cost.note}' if cost.note else ''}"
    console.say(f"epsilon {at_most(cost.epsilon)} at delta {mechanism.delta:g} ({by})", "bold")
    if together is not None:
        several = f"{arguments.group} {mechanism.unit}s together"
        console.say(f"epsilon {at_most(together.epsilon)} at delta {mechanism.delta:g} for {several}", "bold")
    console.say(f"protects  one {mechanism.unit}; neighbours: {relation(mechanism.unit)}")
    console.say(f"noise     {_up(noise)} x the clipping norm, {mechanism.description}")
    console.say(f"length    {length:,} {mechanism.counted}")
    whose = {"record": "a given record", "owner": "a given owner's data", "site": "a given site's data"}
    guess = meaning(cost.epsilon, mechanism.delta).guess
    console.say(
        f"In plain words: an observer of everything released, who guesses whether {whose[mechanism.unit]} was used, "
        f"is right in at most {guess} of 100 cases; a coin is right in 50.",
    )
    _caution(console, arguments)


def _print_table(
    arguments: argparse.Namespace,
    mechanism: Mechanism,
    lengths: tuple[int, ...],
    costs: dict[tuple[int, float], Spent],
) -> None:

    console = PipedConsole()
    counted = mechanism.counted
    title = f"epsilon at delta {mechanism.delta:g}, by {counted} and noise multiplier"
    table = columns(counted, *(f"{noise:g}" for noise in _NOISES), title=title, left=0)
    for count in lengths:
        table.add_row(f"{count:,}", *(at_most(costs[count, noise].epsilon) for noise in _NOISES))
    console.print(table)
    console.say(f"protects  one {mechanism.unit}; neighbours: {relation(mechanism.unit)}")
    console.say(f"noise     {mechanism.description}")
    console.say("Choose a noise with --noise-multiplier, or compute it with --target-epsilon.")
    _caution(console, arguments)


def _caution(console: PipedConsole, arguments: argparse.Namespace) -> None:
    if arguments.examples is not None and arguments.delta * arguments.examples >= 1:
        console.say(
            f"caution: delta {arguments.delta:g} is not below 1 / {arguments.examples:,} examples: "
            "a delta this large allows a mechanism that publishes a whole record",
            "bold yellow",
        )


def _up(noise: float) -> str:
    """A noise multiplier rounded up to four decimals, or four digits if small: typed back, it costs no more."""
    decimals = max(4, 3 - math.floor(math.log10(noise)))
    return f"{math.ceil(noise * 10**decimals - 1e-9) / 10**decimals:.{decimals}f}".rstrip("0").rstrip(".")
