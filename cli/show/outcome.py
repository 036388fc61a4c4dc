"""The outcome of a finished run: tables and advice for a person, one JSON object for a program.

What is shown beside the figures of the run itself (the losses of each site, a sample of text) may fail, and then a line
says what is not shown: the run is finished all the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from cloister.aggregation.features.registry import FIGURES
from cloister.cli.show.answer import print_answer
from cloister.cli.show.console import PipedConsole, columns
from cloister.lm.measures.confusion import ClassFigures, Confusion
from cloister.lm.measures.figures import FIGURES as EVALUATED
from cloister.lm.output.generate import generate
from cloister.privacy.accounting.claims import unit
from cloister.privacy.report.figures import at_most
from cloister.privacy.report.report import QuestionsRow
from cloister.protocol.errors import CloisterError, one_line
from cloister.protocol.figure import finite
from cloister.protocol.messages.messages import EVALUATE, TRAIN
from cloister.protocol.plan.plan import DataSection
from cloister.server.display import LineDisplay
from cloister.server.record.folder import RunFolder, read_answer
from cloister.server.record.history import run_history
from cloister.server.record.outcome import Outcome
from cloister.server.record.phases import Phase
from cloister.server.record.report import gather, most_charges, over_runs
from cloister.server.round.rows import what_to_change
from cloister.simulations.federation import left_out
from cloister.simulations.site_losses import Losses, keep, per_site

T = TypeVar("T")

_SHOWN_CLASSES = 6
"""Most classes whose confusion matrix fits on a terminal; the JSON has it for any number."""


def to_json(
    folder: RunFolder, outcome: Outcome, absent: Mapping[str, str], *, seconds: float
) -> dict[str, object]:
    """The outcome for a program.

    Args:
        folder: The run folder.
        outcome: The outcome.
        absent: The sites that took no part, each with the reason.
        seconds: Wall-clock time of this command, with imports, up to the end of the run.

    Returns:
        Among others: `phase_seconds`, seconds by phase, and `round_seconds`, seconds in rounds, both over all processes
        that worked on the run (`server/record/outcome.py`); `tokens_per_second`, which is `tokens` / `round_seconds`,
        or of a classifier `texts` and `texts_per_second`, of a token classifier `words` and `words_per_second`, of
        preferences `pairs` and `pairs_per_second`; `classification`, the held-out texts by class, or prompts by choice,
        and what they were taken for (`lm/measures/confusion.py`), while `accuracy` is that of labels, of texts, words
        or tokens; `entities`, those of held-out texts by type (`lm/measures/entities.py`); `command_seconds`;
        `peak_rss_bytes`, the largest resident sets in this command; of a question `answer`. None where there is no
        figure.
    """
    epsilon = None if folder.plan.simulation.noise_seed is not None else _epsilon(folder, outcome)
    over = None if epsilon is None else over_runs(folder.plan, run_history(folder), epsilon)
    label = folder.plan.data.label
    return finite(
        {
            "run": str(folder.path),
            "rounds": outcome.rounds,
            "initial_loss": outcome.initial_loss,
            "final_loss": outcome.final_loss,
            "classification": None
            if outcome.confusion is None
            else outcome.confusion.to_json(folder.plan.data.outcomes),
            "entities": None
            if outcome.entities is None
            else outcome.entities.to_json(folder.plan.data.classes),
            "epsilon": epsilon,
            "delta": None if epsilon is None else folder.plan.privacy.delta,
            "dataset": None if over is None else asdict(over),
            "stopped": outcome.stopped,
            "absent": dict(absent),
            "command_seconds": seconds,
            "phase_seconds": dict(outcome.phase_seconds),
            "round_seconds": outcome.round_seconds,
            **outcome.values((*EVALUATED, *FIGURES)),
            "tokens": None,
            "texts": None,
            f"{label}s": outcome.tokens or None,
            "given_up": outcome.given_up,
            "gate_refused": outcome.gate_refused,
            "tokens_per_second": None,
            "texts_per_second": None,
            f"{label}s_per_second": outcome.tokens_per_second or None,
            "peak_rss_bytes": {"coordinator": outcome.coordinator_rss, "largest_worker": outcome.worker_rss},
            "params_sha256": outcome.params_sha256,
            **({"answer": _answer(folder, outcome)} if folder.plan.question is not None else {}),
        }
    )


def _answer(folder: RunFolder, outcome: Outcome) -> dict[str, object] | None:
    """The answer to the run's question; None if it ended before its sum was opened."""
    return None if outcome.stopped else read_answer(folder).to_json()


def losses_of_sites(
    console: PipedConsole, folder: RunFolder, display: LineDisplay, workers: int | None
) -> Losses | None:
    """Evaluate each site of a finished run, and keep the result; None if that is not possible.

    A line says what is not known or not kept, and why.
    """
    what = "not shown: the held-out loss of"
    found = _tried(
        console,
        f"{what} each site",
        lambda: per_site(folder, display.event, workers=workers, watch=display.watch),
    )
    if found is None:
        return None
    if found.problems:
        first, *others = found.problems
        more = f" and {len(others)} more" if others else ""
        console.say(f"{what} {first}{more}: {found.problems[first]}", "yellow")
    _tried(console, "not kept: the held-out loss of each site", lambda: keep(folder, found.sites))
    return found


def print_outcome(
    console: PipedConsole,
    folder: RunFolder,
    outcome: Outcome,
    losses: Losses | None,
    absent: Mapping[str, str],
) -> None:
    """Print the outcome for a person: losses, privacy, a sample of text, and the next commands.

    Args:
        console: Where to.
        folder: The run folder.
        outcome: The outcome.
        losses: What `losses_of_sites` returned; None if they were not asked for.
        absent: As for `to_json`.
    """
    plan = folder.plan
    if plan.question is not None:
        print_answer(console, folder, absent)
        return
    if losses is not None:
        _print_losses(console, losses)
    console.print(_summary(folder, outcome))
    if outcome.confusion is not None:
        console.print(*_classes(outcome.confusion, plan.data))
    if outcome.entities is not None:
        console.print(_by_class(outcome.entities.by_class(), plan.data.classes, "entities", "type"))
    for site, why in absent.items():
        console.say(f"{site} took no part in the run: {why}", "yellow")
    reason = ""
    if plan.privacy.unit == "none":
        reason = "the plan has no privacy unit"
    elif plan.simulation.noise_seed is not None:
        reason = "the noise came from the declared seed simulation.noise_seed"
    if reason:
        console.say(f"no privacy guarantee: {reason}", "bold yellow")
    lost = _tried(console, "not shown: the records that are not used", lambda: left_out(plan, folder.sites))
    if lost:
        console.say(f"records of the sites: {lost}", "yellow")
    writes, chat = plan.data.kind.writes, plan.data.format == "messages"
    prompt = "Hello" if chat else "The "
    if writes:
        text = _tried(
            console,
            "not shown: a sample of the final model",
            lambda: generate(
                folder.final, prompt, chat=chat, max_new_tokens=160, fit=True, temperature=0.6, seed=0
            ),
        )
        if text is not None:
            sample = Text(" ".join(text.split()), style="italic")
            verb = f"answers {prompt!r}" if chat or writes == "answer" else "writes"
            console.print(Text(f"the final model {verb}: ", style="bold") + sample)
    run = shlex.quote(str(folder.path))
    for line in (
        f"weights {outcome.params_sha256}",
        f"run     {folder.path}",
        f"report  cloister report {run}",
        f"try     cloister generate {run} --prompt {prompt!r}"
        if writes
        else f"export  cloister export {run} DIR",
    ):
        console.say(line)


def _print_losses(console: PipedConsole, losses: Losses) -> None:
    sites = columns("site", "sequences", "before", "after", title="Held-out loss of each site")
    for site in losses.sites:
        shown = ("" if loss is None else f"{loss:.3f}" for loss in (site.before, site.after))
        sites.add_row(site.site, f"{site.sequences:,}", *shown)
    if sites.row_count:
        console.print(sites)


def _tried(console: PipedConsole, failure: str, make: Callable[[], T]) -> T | None:
    """What `make` returns; None, after a line with what failed and why, if it fails."""
    try:
        return make()
    except Exception as error:  # of any class: the run is finished, and its command must not fail
        console.say(f"{failure}: {one_line(error)}", "yellow")
        return None


def _epsilon(folder: RunFolder, outcome: Outcome) -> float | None:
    """The epsilon of the run, as its report states it."""
    if outcome.epsilon is None:
        return None
    try:
        counts = (most_charges(folder, purpose) for purpose in (TRAIN, EVALUATE))
        counted = all(most <= charged for charged, most in counts)
        return outcome.epsilon if counted else gather(folder.path).epsilon
    except CloisterError:  # a damaged ledger ends no run: the report says what it is worth
        return outcome.epsilon


def _summary(folder: RunFolder, outcome: Outcome) -> Table:
    label = folder.plan.data.label
    table = columns("", "", title="Outcome")
    if outcome.initial_loss is not None and outcome.final_loss is not None:
        loss = f"{outcome.initial_loss:.3f} -> {outcome.final_loss:.3f} nats per {label}"
        table.add_row("held-out loss", loss)
        if outcome.rounds and outcome.final_loss >= outcome.initial_loss:
            table.add_row("", Text(f"it did not fall: {what_to_change(folder.plan)}", "bold yellow"))
        for name, value in outcome.shown(EVALUATED, label):
            table.add_row(name, value)
    ends = {
        "budget": ", ended by the budget",
        "dataset": ", ended by the limit over all runs",
        "refused": ", ended by refusals",
    }
    table.add_row("rounds", f"{outcome.rounds}{ends.get(outcome.stopped, '')}")
    if outcome.given_up:
        table.add_row("rounds given up, which changed nothing", str(outcome.given_up))
    if outcome.gate_refused:
        table.add_row("rounds refused by the gate", str(outcome.gate_refused))
    for name, value in outcome.shown(FIGURES, label):
        table.add_row(name, value)
    plan, privacy = folder.plan, folder.plan.privacy
    if (epsilon := _epsilon(folder, outcome)) is not None:
        budget = privacy.target_epsilon if privacy.budget is None else privacy.budget
        limit = "" if budget is None else f", of a budget of {budget:g}"
        table.add_section()
        table.add_row("what is protected", unit(plan))
        over = over_runs(plan, run_history(folder), epsilon)
        alone = "epsilon, this run" if over is not None and not over.problem else "epsilon, this run alone"
        table.add_row(alone, f"{at_most(epsilon)}{limit}")
        if over is not None:
            limit = "" if over.limit is None else f", of a limit of {over.limit:g}"
            runs, figure = f" ({over.runs})", "no bound"
            if over.problem:
                runs, figure = "", f"not known: {over.problem}"
            elif over.epsilon is not None:
                figure = f"{at_most(over.epsilon)} at delta {over.delta:g}{limit}"
            table.add_row(Text(f"epsilon, all runs{runs} on {over.name}"), Text(figure))
            if over.asked is not None:
                table.add_row("  against all others together", _against_all(over.asked))
        table.add_row("delta", f"{privacy.delta:g}")
    _add_costs(table, outcome, label)
    return table


def _against_all(asked: QuestionsRow) -> str:
    """Epsilon over all runs against the coordinator and all other sites together."""
    found = asked.against_all
    if found is None:
        return "no figure"
    return "no bound" if found.epsilon is None else f"{at_most(found.epsilon)} at delta {found.delta:g}"


def _classes(confusion: Confusion, data: DataSection) -> Iterator[Table]:
    """The held-out texts by class, or prompts by choice: the figures of each, and where there are few what they were
    taken for."""
    classes, (counted, by) = data.outcomes, data.counted
    yield _by_class(confusion.by_class(), classes, f"{counted}s", by)
    if len(classes) > _SHOWN_CLASSES:
        return
    matrix = columns(by, *classes, title="What they were taken for")
    for name, row in zip(classes, confusion.counts, strict=True):
        matrix.add_row(Text(name), *(f"{count:,}" for count in row))
    yield matrix


def _by_class(figures: Sequence[ClassFigures], names: Sequence[str], counted: str, by: str) -> Table:
    table = columns(by, "precision", "recall", "F1", counted, title=f"Held-out {counted} by {by}")
    for name, each in zip(names, figures, strict=True):
        table.add_row(
            Text(name), f"{each.precision:.3f}", f"{each.recall:.3f}", f"{each.f1:.3f}", f"{each.support:,}"
        )
    return table


def _add_costs(table: Table, outcome: Outcome, label: str) -> None:
    """Time and memory; the phases two to a row, so that a narrow terminal holds the table."""
    table.add_section()
    names = [phase.value for phase in Phase]
    for pair in zip(names[::2], names[1::2], strict=True):
        figures = (f"{outcome.phase_seconds.get(name, 0.0):,.1f} s" for name in pair)
        table.add_row(", ".join(pair), ", ".join(figures))
    if outcome.tokens_per_second:
        table.add_row(f"{label}s/s in rounds", f"{outcome.tokens_per_second:,.0f}")
    for whose, peak in (("coordinator", outcome.coordinator_rss), ("largest worker", outcome.worker_rss)):
        if peak is not None:
            table.add_row(f"peak RSS, {whose}", f"{peak / 1e9:.2f} GB")
