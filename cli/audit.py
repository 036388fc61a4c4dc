"""`cloister audit`: a lower bound on epsilon by canaries, beside the epsilon that a run claims."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from cloister.cli.display import PipedConsole
from cloister.privacy.figures import at_least, at_most, scientific
from cloister.server.folder import RunFolder

if TYPE_CHECKING:  # it imports torch
    from cloister.simulations.audited import Audited

ALARM = 3
"""Exit code of an audit that refutes the claim."""


def run(arguments: argparse.Namespace) -> int:
    """Audit a run and print both figures; returns 3 where the claim is refuted."""
    with RunFolder.reopen(Path(arguments.run)) as folder:
        from cloister.simulations.audit import audit  # it imports for seconds

        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("auditing", total=None)
            found = audit(
                folder,
                canaries=arguments.canaries,
                steps=arguments.steps,
                confidence=arguments.confidence,
                progress=lambda done, of: bar.update(task, completed=done, total=of),
            )
    if arguments.json:
        row = asdict(found.row)
        print(
            json.dumps(
                {
                    "what": found.what,
                    "row": row,
                    "claimed": found.claimed,
                    "claimed_run": found.claimed_run,
                    "delta": found.delta,
                    "at_half_noise": found.at_half_noise,
                    "alarm": found.alarm,
                }
            )
        )
    else:
        _print(found)
    if found.alarm:
        print(
            f"cloister: alarm: epsilon is at least {at_least(found.row.epsilon)}, and {at_most(found.claimed)} is"
            " claimed: the code does not keep its guarantee; nothing of this run may be given out",
            file=sys.stderr,
        )
        return ALARM
    return 0


def _print(found: Audited) -> None:
    row = found.row
    claims = f"{at_most(found.claimed)} for what was played, {at_most(found.claimed_run)} for the run"
    lines = [
        f"played    {found.what}",
        f"guesses   {row.correct:,} of {row.guesses:,} right, among {row.canaries:,} fair coins",
        f"audited   epsilon is at least {at_least(row.epsilon)}, with confidence {100 * row.confidence:g} %",
        f"claimed   epsilon is at most {claims}; delta {scientific(found.delta)}",
        f"power     half of the noise would show as about {at_least(found.at_half_noise)}",
    ]
    if not found.alarm:
        lines.append("no alarm: the claim is not refuted, which does not prove it")
        if found.at_half_noise <= found.claimed:
            lines.append("this audit is too weak to notice that half of the noise is missing")
    PipedConsole().print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
