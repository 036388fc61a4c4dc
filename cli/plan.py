"""`cloister plan check`: the plan as it will run, and what it will cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloister.cli.display import PipedConsole, protected
from cloister.cli.simulate import find_plan
from cloister.privacy.figures import at_most
from cloister.protocol.plan import Plan

if TYPE_CHECKING:  # it imports the accountants
    from cloister.privacy.terms import Terms


def run(arguments: argparse.Namespace) -> int:
    """Print the resolved plan and its cost."""
    sites = [] if arguments.sites is None else [f"cohort.sites={arguments.sites}"]
    plan = find_plan(arguments.plan, [*arguments.set, *sites])
    from cloister.lm.model import count_parameters
    from cloister.privacy.terms import terms_of
    from cloister.server.cost import cost, secure_cost

    estimate = cost(plan, *count_parameters(plan))
    secure = secure_cost(plan, estimate.trained_parameters)
    terms = terms_of(plan, estimate.trained_parameters)
    private = None if terms is None else _private(plan, terms)
    if arguments.json:
        found = {"plan": json.loads(plan.to_json()), "digest": plan.digest(), **asdict(estimate)}
        print(json.dumps(found | (asdict(secure) if secure else {}) | (private or {})))
        return 0
    console = PipedConsole()
    _print_plan(console, plan)
    table = Table(title="What it costs", title_justify="left", show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    table.add_row("parameters", f"{estimate.parameters:,}")
    table.add_row("trained and summed", f"{estimate.trained_parameters:,}")
    table.add_row("sites in a round", f"{estimate.cohort:,}")
    table.add_row("to a site, each round", size(estimate.bytes_down))
    table.add_row("from a site, each round", size(estimate.bytes_up))
    table.add_row("memory at the coordinator, besides the program", size(estimate.coordinator_bytes))
    table.add_row("tokens learned from in a round, at most", f"{estimate.tokens_per_round:,}")
    if secure:
        table.add_section()
        table.add_row("secure sum: sites n, neighbours k, threshold t", f"{secure.n}, {secure.k}, {secure.t}")
        table.add_row("dropouts and colluders it withstands", f"{secure.dropouts} and {secure.colluders}")
        table.add_row("more from a site, each round", size(secure.overhead_bytes_up))
        table.add_row("more to a site, each round", size(secure.overhead_bytes_down))
        table.add_row("more work at a site, about", f"{secure.site_s:.2g} s")
        table.add_row("more work at the coordinator, about", f"{secure.coordinator_s:.2g} s")
    if private:
        table.add_section()
        table.add_row("privacy: what is protected", protected(plan))
        table.add_row("noise multiplier", f"{private['noise_multiplier']:g}")
        spent = f"{at_most(private['epsilon'])} at delta {private['delta']:g}"
        table.add_row(f"epsilon of a {private['unit']} after all {plan.run.rounds} rounds", spent)
    console.print(table)
    if not private:
        console.print(
            Text("no privacy unit: the model may repeat what it was trained on", style="bold yellow")
        )
    if not secure:
        console.print(
            Text("the sum is in clear: the coordinator sees every site's update", style="bold yellow")
        )
    console.print(Text(f"digest {plan.digest()}", style="dim"))
    return 0


def _private(plan: Plan, terms: Terms) -> dict[str, Any]:
    return {
        "unit": terms.unit,
        "noise_multiplier": terms.noise_multiplier,
        "epsilon": terms.epsilon(plan.run.rounds),
        "delta": terms.delta,
        "relation": terms.relation,
    }


def _print_plan(console: Console, plan: Plan) -> None:
    for section, fields in json.loads(plan.to_json()).items():
        console.print(Text(f"[{section}]", style="bold"))
        for name, value in fields.items():
            console.print(Text(f"{name} = {json.dumps(value, ensure_ascii=False)}"), soft_wrap=True)
        console.print()


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
