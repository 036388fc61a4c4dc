"""`cloister resume`: continue a run that was stopped.

Continue a run that was stopped, killed or interrupted, after the last round that was done.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.options.shared_options import add_engine, add_json, add_per_site, add_run

if TYPE_CHECKING:
    from cloister.protocol.plan.plan import Plan


def options(parser: argparse.ArgumentParser) -> None:
    """Run folder, engine."""
    add_run(parser)
    add_per_site(parser)
    add_engine(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Continue after the last round that was done."""
    from cloister.cli.show.execution import execute
    from cloister.protocol.errors import RunFolderError
    from cloister.server.record.folder import RunFolder

    with RunFolder.reopen(Path(arguments.run)) as folder:
        if folder.deployment.exists():
            raise RunFolderError(
                str(folder.path),
                expected="a simulation, and this run was deployed",
                fix=f"continue it with: {folder.resume_command()}",
            )
        if arguments.per_site:
            _check_per_site(folder.plan)
        return execute(folder, arguments, new=False)


def _check_per_site(plan: Plan) -> None:
    """Refuse --per-site if the plan could not have said so itself.

    Raises:
        PlanError: it has a privacy unit.
    """
    from cloister.protocol.plan.soundness import from_json

    simulation = plan.simulation.model_copy(update={"per_site": True})
    from_json(plan.model_copy(update={"simulation": simulation}).to_json())
