"""`cloister simulate`: run a whole federation on this machine.

Run a whole federation on this machine: the coordinator and every site, each with its own records, exchanging the same
messages as in a deployment. The result is kept in the run folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser, chosen_plan, folder_for
from cloister.protocol.plan.template import toml_value
from cloister.server.record.folder import RunFolder


def options(parser: Parser) -> None:
    """Plan, run folder, engine."""
    parser.add_plan()
    parser.value("--rounds N", "number of rounds (run.rounds)", type=int)
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
    from cloister.cli.show.execution import execute

    fields = {  # as TOML, in which a name such as `2024` stays text
        "run.rounds": arguments.rounds,
        "run.seed": arguments.seed,
        "simulation.ledger": arguments.ledger and toml_value(str(Path(arguments.ledger).absolute())),
        "simulation.dataset": arguments.dataset and toml_value(arguments.dataset),
    }
    plan = chosen_plan(arguments, fields)
    with RunFolder.create(folder_for(arguments.out, Path("runs"), plan.run.name), plan) as folder:
        return execute(folder, arguments, new=True)
