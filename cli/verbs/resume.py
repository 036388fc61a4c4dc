"""`cloister resume`: continue a run that was stopped.

Continue a run that was stopped, killed or interrupted, after the last round that was done.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser
from cloister.protocol.plan.soundness import changed
from cloister.simulations.run import reopened


def options(parser: Parser) -> None:
    """Run folder, engine."""
    parser.add_run()
    parser.flag(
        "--per-site",
        "when the run is finished, evaluate the initial and the final model on each site's own held-out records "
        "(simulation.per_site); not under a privacy unit",
    )
    parser.add_engine()
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Continue after the last round that was done."""
    from cloister.cli.show.execution import execute

    with reopened(Path(arguments.run)) as folder:
        if arguments.per_site:
            changed(folder.plan, {"simulation.per_site": True})  # refused where the plan could not say so
        return execute(folder, arguments, new=False)
