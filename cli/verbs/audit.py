"""`cloister audit`: attack a run's mechanism with canaries, to test its claim.

Play a simulated run again, with new noise, through the functions that a run calls, and attack it with canaries. With
unit record or owner, a new site with the records of the first one joins the plan and trains; canaries with planted
gradients are among its units, and the noised sum of each step is seen. With unit site, new sites join and a
coordinator runs the rounds, under masks if the plan has them; a site has a canary for its update, or no records, and
the noised sums are seen. A question is answered again and again by new sites, with or without one unit; given as a
plan, it is audited before it is asked. The lower bound on epsilon that the guesses prove is compared with the epsilon
that was charged, and noise, clipping, sampling and number of releases with their charge; with each is printed the
smallest error that would have been found. What is sent must follow from the noised sums to the last byte. Not played:
processes and networks, dropouts, a coordinator that lies, tokenisation. The result of a run is kept in its audit.json.
Exit code 3, the alarm, if the bound is above the charge or what was released is not what was charged; for honest code
that has a probability of at most 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from cloister.cli.options.shared_options import Parser
from cloister.cli.show.console import PipedConsole
from cloister.privacy.report.figures import at_least, at_most, scientific
from cloister.protocol.errors import PlanError
from cloister.server.record.folder import RunFolder

if TYPE_CHECKING:
    from cloister.privacy.audit.fit import Check
    from cloister.simulations.audit.audited import Audited


ALARM = 3
"""Exit code of an audit that refutes the claim."""


def options(parser: Parser) -> None:
    """Run folder or question, size and confidence of the attack."""
    parser.value("run RUN", "the run folder; or the plan of a question, as TOML, which is not asked then")
    parser.value(
        "--canaries M",
        "canaries among the units, updates of honest sites, or answers to a question (default: the strongest audit, or "
        "some 500 updates)",
        type=int,
    )
    parser.value("--confidence P", "confidence of the printed bound, not of an alarm", 0.95)
    parser.value("--steps N", "local steps to attack, at most (default: all of the run)", type=int)
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Audit a run and print both epsilons; returns 3 if the claim is refuted."""

    with _opened(Path(arguments.run)) as folder:
        # It takes seconds: only for a folder that holds a run.
        from cloister.simulations.audit.audit import audit

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
    from cloister.clients.training.release import MUST_STAY

    if arguments.json:
        print(json.dumps(asdict(found) | {"alarm": found.alarm, MUST_STAY.replace(" ", "_"): True}))
    else:
        _print(found)
    if found.alarm:
        reasons = [found.row.problem] if found.row.problem else []
        if found.refuted:
            assert found.row.refuting is not None
            bound, claimed = at_least(found.row.refuting), at_most(found.claimed)
            reasons.insert(0, f"epsilon is at least {bound}, but {claimed} is claimed")
        why = "; ".join(reasons)
        print(
            f"cloister: alarm: {why}: the code does not keep its guarantee; release nothing from this run",
            file=sys.stderr,
        )
        return ALARM
    return 0


@contextmanager
def _opened(path: Path) -> Iterator[RunFolder]:
    """The folder of a run; for the plan of a question one that is removed again, with its sites."""
    if not path.is_file():
        with RunFolder.reopen(path) as folder:
            yield folder
        return
    from cloister.protocol.plan.soundness import Plan
    from cloister.simulations.federation import lay_out

    plan = Plan.load(path)
    if plan.question is None:
        raise PlanError("question", expected="a plan with a [question], or the folder of a run")
    with TemporaryDirectory() as temporary, RunFolder.create(Path(temporary) / "run", plan) as folder:
        folder.sites.path.mkdir()
        lay_out(plan, folder.sites.path)
        yield folder


def _print(found: Audited) -> None:
    from cloister.clients.training.release import MUST_STAY

    row = found.row
    claims = f"{at_most(found.claimed)} for what was played, {at_most(found.claimed_run)} for the run"
    lines = [
        f"played    {found.what}",
        f"guesses   {row.correct:,} of {row.guesses:,} right, among {row.canaries:,} fair coins",
        f"audited   epsilon is at least {at_least(row.epsilon)}, with confidence {100 * row.confidence:g} %",
        f"claimed   epsilon is at most {claims}; delta {scientific(found.delta)}",
        f"power     half of the noise would show as about {at_least(found.at_half_noise)}, which is no alarm yet",
        *(
            f"{'' if number else 'measured':10}{_measured(check)}"
            for number, check in enumerate(found.checks)
        ),
    ]
    if not found.alarm:
        lines.append("no alarm: the claim is not refuted, which does not prove it")
    lines.append(
        f"{MUST_STAY}: no charge covers these figures of the site's records; the report has the verdict"
    )
    PipedConsole().print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _measured(check: Check) -> str:
    line = f"{check.what}: {check.found:.5g}, charged {check.charged:.5g}"
    return (
        line if check.visible is None else f"{line}; an error of {100 * check.visible:.2g} % would be found"
    )
