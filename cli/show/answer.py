"""The answer to a question: a table for a person, with how far each figure may be off."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.claims import unit
from cloister.privacy.report.answer import Answer
from cloister.privacy.report.figures import at_most, visible, with_error
from cloister.privacy.report.report import MOST_FIGURES
from cloister.protocol.questions.estimate import CLEAR, WITHIN, Estimate
from cloister.server.record.folder import RunFiles, read_answer, read_plan
from cloister.server.record.outcome import outcome

_WIDTH = 16
"""Characters of the longest bar."""
_WIDE = 80
"""Characters of a terminal that has room for bars."""


def print_answer(console: PipedConsole, files: RunFiles, absent: Mapping[str, str] | None = None) -> None:
    """Print the answer in a run folder.

    Args:
        console: Where to.
        files: The run folder.
        absent: The sites that took no part, each with the reason.

    Raises:
        RunFolderError: the run is not finished.
    """
    plan, found = read_plan(files.path), outcome(files)
    if found.stopped:
        console.say(f"no answer: the run ended before its sum was opened ({found.stopped})", "bold yellow")
        return
    answer = read_answer(files)
    console.print(_table(answer, console.width))
    if len(answer.figures) > MOST_FIGURES:
        console.say(f"and {len(answer.figures) - MOST_FIGURES:,} more, in the file of the answer", "dim")
    for site, why in (absent or {}).items():
        console.say(f"{site} took no part: {why}", "yellow")
    if any(each.value is None for each in answer.figures):
        console.say(
            f"- is a figure within {CLEAR:g} standard deviations of the noise from none: it is not told",
            "dim",
        )
    if plan.simulation.noise_seed is not None:
        console.say(
            "no privacy guarantee: the noise came from the declared seed simulation.noise_seed", "bold yellow"
        )
    elif found.epsilon is not None:
        spent = f"epsilon {at_most(found.epsilon)} at delta {plan.privacy.delta:g}, this question alone"
        console.say(f"protects {unit(plan)}: {spent}")
    console.say(f"answer  {files.answer}")
    console.say(f"report  cloister report {shlex.quote(str(files.path))}")


def _table(answer: Answer, width: int) -> Table:
    headings = [answer.kind, "value", "noise, 95 %", "sampling, 95 %"]
    bars = answer.kind == "histogram" and width >= _WIDE
    beside = ["public records"] if answer.public else []
    table = columns(*headings, *beside, *([""] if bars else []), title=f"Answer of {answer.sites} sites")
    largest = max((each.value or 0.0 for each in answer.figures if each.name in answer.cells), default=0.0)
    for each in answer.figures[:MOST_FIGURES]:
        sampling = "" if each.sampling is None else f"± {with_error(WITHIN * each.sampling)}"
        noise = "" if each.value is None else f"± {with_error(WITHIN * each.noise)}"
        row: list[Text | str] = [Text(visible(each.name)), _value(each), noise, sampling]
        if beside:
            exact = answer.public.get(each.name)
            row.append("-" if exact is None else with_error(exact, each.noise))
        if bars:
            length = round(_WIDTH * each.value / largest) if each.name in answer.cells and each.value else 0
            row.append(Text("█" * length, justify="left"))
        table.add_row(*row)
    return table


def _value(estimate: Estimate) -> str:
    return "-" if estimate.value is None else with_error(estimate.value, estimate.noise)
