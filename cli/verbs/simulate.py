"""`cloister simulate`: run a whole federation on this machine.

Run a whole federation on this machine: the coordinator and every site, each with its own records, exchanging the same
messages as in a deployment. The result is kept in the run folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cloister.cli.options.shared_options import Parser, chosen_plan, folder_for
from cloister.cli.show.console import PipedConsole
from cloister.cli.verbs.plan import divided_owners
from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.template import toml_value
from cloister.server.record.folder import RunFolder


def options(parser: Parser) -> None:
    """Plan, run folder, engine."""
    parser.add_plan()
    parser.value("--rounds N", "number of rounds (run.rounds)", type=int)
    add_start(parser)


def add_start(parser: Parser) -> None:
    """What starts a federation on this machine: seed, ledger, run folder, engine."""
    parser.value("--seed N", "public seed (run.seed)", type=int)
    over = parser.add_argument_group("privacy over several runs")
    parser.value(
        "--ledger FILE",
        "charge this ledger, which outlives the run; created if missing (simulation.ledger)",
        to=over,
    )
    parser.value("--dataset NAME", "name of the records in that ledger (simulation.dataset)", to=over)
    parser.value("--out DIR", "run folder, new or empty (default: runs/NAME)")
    parser.add_engine()
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Run the plan in a new folder."""
    plan = chosen_plan(arguments, {"run.rounds": arguments.rounds, **start_fields(arguments)})
    if plan.question is not None:
        raise PlanError(
            "question",
            plan.question.kind,
            expected="none: a question trains nothing",
            fix="cloister ask PLAN",
        )
    return start(plan, arguments)


def start_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that `add_start` sets, as TOML, in which a name such as `2024` stays text."""
    return {
        "run.seed": arguments.seed,
        "simulation.ledger": arguments.ledger and toml_value(str(Path(arguments.ledger).absolute())),
        "simulation.dataset": arguments.dataset and toml_value(arguments.dataset),
    }


def start(plan: Plan, arguments: argparse.Namespace) -> int:
    """Run a plan in a new folder."""
    from cloister.cli.show.execution import execute

    for warning in divided_owners(plan):
        PipedConsole(stderr=True).say(warning, "bold yellow")
    with RunFolder.create(folder_for(arguments.out, Path("runs"), plan.run.name), plan) as folder:
        return execute(folder, arguments, new=True)
