"""`cloister audit`: a lower bound on epsilon by canaries, beside the epsilon that a run claims."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.shared_options import add_json, add_run

if TYPE_CHECKING:
    from cloister.simulations.audited import Audited

HELP = "attack a run's mechanism with canaries, to test its claim"

ALARM = 3
"""Exit code of an audit that refutes the claim."""


def options(parser: argparse.ArgumentParser) -> None:
    """Run folder, size and confidence of the attack."""
    parser.description = (
        "Attack the mechanism of a simulated run with canaries, and compare the lower bound on epsilon that this "
        "proves with the claimed epsilon. The result is kept in audit.json. Exit code 3 if the claim is refuted."
    )
    add_run(parser)
    parser.add_argument(
        "--canaries",
        type=int,
        metavar="M",
        help="canaries among the records, or repetitions of a round's sum (default: the strongest audit)",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of the bound (default: 0.95)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="local steps to attack, at most (default: all of the run)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Audit a run and print both epsilons; returns 3 if the claim is refuted."""
    from rich.console import Console
    from rich.progress import Progress

    from cloister.privacy.figures import at_least, at_most
    from cloister.server.folder import RunFolder

    with RunFolder.reopen(Path(arguments.run)) as folder:
        from cloister.simulations.audit import audit  # takes seconds: only for a folder that holds a run

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
        print(json.dumps(_to_json(found)))
    else:
        _print(found)
    if found.alarm:
        print(
            f"cloister: alarm: epsilon is at least {at_least(found.row.epsilon)}, but {at_most(found.claimed)} is "
            "claimed: the code does not keep its guarantee; release nothing from this run",
            file=sys.stderr,
        )
        return ALARM
    return 0


def _to_json(found: Audited) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "what": found.what,
        "row": asdict(found.row),
        "claimed": found.claimed,
        "claimed_run": found.claimed_run,
        "delta": found.delta,
        "at_half_noise": found.at_half_noise,
        "alarm": found.alarm,
    }


def _print(found: Audited) -> None:
    from cloister.cli.console import PipedConsole
    from cloister.privacy.figures import at_least, at_most, scientific

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
