"""`cloister budget`: what privacy costs, or the noise that a budget needs.

Print the epsilon of a plan with a noise multiplier, the noise multiplier for an epsilon, or a table by noise and
rounds; nothing is trained. All else that the cost depends on is in the plan: --set privacy.sampling_rate=0.01.
"""

from __future__ import annotations

import argparse
import json

from cloister.cli.options.shared_options import Parser, chosen_plan
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.accountant import Spent
from cloister.privacy.accounting.claims import mechanism, relation, tells, thing, things, unit
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.report import meaning
from cloister.protocol.errors import CloisterError
from cloister.protocol.plan.plan import Plan
from cloister.simulations.planning import against_all, rounded_up, terms_with
from cloister.simulations.planning import cost as cost_of

_NOISES = (0.5, 1.0, 2.0, 4.0, 8.0)


def options(parser: Parser) -> None:
    """Plan, length, noise or epsilon, group."""
    parser.add_plan()
    parser.value("--rounds N", "number of rounds (run.rounds)", type=int)
    parser.value("--noise-multiplier Z", "noise in units of the clipping norm", type=float)
    parser.value("--target-epsilon E", "epsilon of the whole run, to find its noise", type=float)
    parser.value(
        "--group K",
        "also the epsilon of K units together, such as K records of one person; with --noise-multiplier",
        type=int,
    )
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Print the epsilon of a noise multiplier, the noise multiplier for an epsilon, or a table of both."""
    noise, target, group = arguments.noise_multiplier, arguments.target_epsilon, arguments.group
    if noise is not None and target is not None:
        expected = "only one of them: each determines the other"
        raise CloisterError("--noise-multiplier and --target-epsilon", expected=expected)
    if group is not None and (group < 2 or noise is None):
        raise CloisterError("--group", group, expected="2 or more, and only with --noise-multiplier")
    plan = chosen_plan(arguments, {"run.rounds": arguments.rounds})
    length, shown = plan.run.rounds, PipedConsole(quiet=arguments.json)
    if noise is None and target is None:
        facts = _table(shown, plan, [terms_with(plan, noise_multiplier=each) for each in _NOISES])
    else:
        terms = terms_with(plan, noise_multiplier=noise, target_epsilon=target)
        facts = _row(plan, terms, cost := cost_of(terms, length))
        if target is not None:
            noise = rounded_up(terms.noise_multiplier)  # typed back, it costs no more
            shown.say(f"noise multiplier {noise:.10g} for epsilon {target:g}", "bold")
        _say_epsilon(shown, cost, f"{cost.accountant} accountant{f': {cost.note}' if cost.note else ''}")
        if tells(plan):
            own = against_all(terms, length)
            facts |= {"against_all_epsilon": own.epsilon}
            _say_epsilon(shown, own, "against the coordinator and all other sites together")
        if group is not None:
            together = cost_of(terms, length, group)
            facts |= {"group": group, "group_epsilon": together.epsilon}
            _say_epsilon(shown, together, f"for {group} {things(plan)} together")
        _say_meaning(shown, plan, terms, cost)
    if arguments.json:
        print(json.dumps(facts))
    return 0


def _row(plan: Plan, terms: Terms, cost: Spent) -> dict[str, object]:
    """The JSON of one cost."""
    return {
        "epsilon": cost.epsilon,
        "delta": terms.delta,
        "noise_multiplier": terms.noise_multiplier,
        "accountant": cost.accountant,
        "unit": terms.unit,
        "relation": relation(plan),
    }


def _say_epsilon(console: PipedConsole, cost: Spent, of: str) -> None:
    console.say(f"epsilon {at_most(cost.epsilon)} at delta {cost.delta:g} ({of})", "bold")


def _say_meaning(console: PipedConsole, plan: Plan, terms: Terms, cost: Spent) -> None:
    """Say what is protected, by what, and what an observer may learn."""
    console.say(f"protects  {unit(plan)}; neighbours differ by {relation(plan)}")
    console.say(f"noise     {terms.noise_multiplier:g} x the clipping norm C")
    console.say(f"length    {plan.run.rounds:,} rounds")
    console.say(f"how       {mechanism(plan, terms)}")
    console.say(
        f"In plain words: an observer of everything released, who guesses whether one {thing(plan)}'s data was used, "
        f"is right in at most {meaning(cost.epsilon, terms.delta).guess} of 100 cases; a coin is right in 50."
    )


def _table(console: PipedConsole, plan: Plan, noised: list[Terms]) -> dict[str, object]:
    """Print a table by noise and rounds, those of a plan in its middle; its JSON."""
    length = plan.run.rounds
    lengths = sorted({max(1, length // 4), max(1, length // 2), length, 2 * length})
    if plan.privacy.correlated is not None or plan.charged_evaluations:  # whose noise is that of a whole run
        lengths = [length]
    title = f"epsilon at delta {plan.privacy.delta:g}, by rounds and noise multiplier"
    table = columns("rounds", *(f"{terms.noise_multiplier:g}" for terms in noised), title=title, left=0)
    rows = []
    for rounds in lengths:
        costs = [cost_of(terms, rounds) for terms in noised]
        table.add_row(f"{rounds:,}", *(at_most(cost.epsilon) for cost in costs))
        rows += [_row(plan, *each) | {"rounds": rounds} for each in zip(noised, costs, strict=True)]
    console.print(table)
    console.say("Choose a noise with --noise-multiplier, or compute it with --target-epsilon.")
    return {"table": rows}
