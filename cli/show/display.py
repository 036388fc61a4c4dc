"""The events of a run as a person sees them: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.tasks.figures import FIGURES as EVALUATED
from cloister.privacy.report.figures import at_most
from cloister.protocol.figure import Figure
from cloister.protocol.plan.plan import Plan
from cloister.server.record import progress

_SHOWN_ROUNDS = 10
_SHOWN_FAILURES = 3
_SETS_STATUS = progress.Step, progress.Preparing, progress.Started, progress.RoundStarted, progress.Finished
_FAILURES = (
    *(progress.NotJoined, progress.SiteFailed, progress.AttemptFailed, progress.RoundAbandoned),
    *(progress.NotEvaluated, progress.BudgetSpent, progress.Refusing),
)
_DOING = {"train": "training", "evaluate": "evaluating"}


class LineDisplay:
    """Shows a run while it is in progress: one plain line for each event, for logs and pipes.

    A context manager. `event` and `watch` may be called from any thread.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: progress.Event) -> None:
        """Show an event of the run."""
        line = describe(event)
        if line:
            self._console.print(Text(line), soft_wrap=True)

    def watch(self, site: str, at_work: bool) -> None:
        """Show that a site started or stopped working: not in lines, because a log would be full of them."""


class Absent(dict[str, str]):
    """The sites that take no part in a run, each with the reason."""

    def event(self, event: progress.Event) -> None:
        """Follow the run."""
        match event:
            case progress.Preparing("sites"):
                self.clear()  # all are asked again
            case progress.NotJoined(site, reason):
                self[site] = reason
            case progress.SiteAnswered(site=site):
                self.pop(site, None)  # it has joined since


def describe(event: progress.Event) -> str:
    """An event as one plain line; empty for events that are too frequent to print."""
    match event:
        case progress.Preparing(what):
            return f"preparing {what}"
        case progress.Connected(sites, missing):
            rest = "; ".join(f"{site}: {why}" for site, why in missing.items())
            return f"{len(sites)} of {len(sites) + len(missing)} sites are connected" + (
                f"; {rest}" if rest else ""
            )
        case progress.Started(plan, sites, parameters, done):
            resumed = f", from round {done}" if done else ""
            return (
                f"{plan.run.name}: {plan.run.rounds} rounds{resumed}, {len(sites)} sites, "
                f"{parameters:,} trained parameters, {_how(plan)}, plan {plan.digest()[:12]}"
            )
        case progress.NotJoined(site, reason):
            return f"{site} did not join: {reason}"
        case progress.SiteFailed(number, site, reason):
            return f"round {number}: {site} dropped out: {reason}"
        case progress.AttemptFailed(number, attempt, reason):
            return f"round {number}: attempt {attempt} failed: {reason}"
        case progress.RoundAbandoned(number, spoiled=wrong) if wrong:
            return f"round {number}: given up: a site lied in its counters: {wrong}; the model is unchanged"
        case progress.RoundAbandoned(number, attempts):
            return f"round {number}: given up after {attempts} attempts; the model is unchanged"
        case progress.NotEvaluated(number, spoiled=wrong) if wrong:
            return f"round {number}: not evaluated: a site lied in its totals: {wrong}"
        case progress.NotEvaluated(number, attempts):
            return f"round {number}: not evaluated, after {attempts} attempts"
        case progress.Refusing(number, sites):
            return f"round {number}: not started: {', '.join(sites)} refused, and too few sites are left; the run ends"
        case progress.BudgetSpent(number, epsilon, budget, dataset):
            of, most = (f" of {dataset!r} over all runs", "limit") if dataset else ("", "budget")
            return (
                f"round {number}: not started: epsilon{of} is {at_most(epsilon)}, and the round would exceed the "
                f"{most} of {budget:g}; the run ends"
            )
        case progress.RoundDone():
            parts = [f"round {event.round}: {event.sites} sites"]
            if event.refused:
                parts.append(f"refused by the gate, so the model is unchanged ({event.refused})")
            parts += _lines(FIGURES, event.figures, event.label)
            if event.figures.get("tokens"):
                parts.append(f"{_rate(event):,.0f} {event.label}s/s")
            if event.epsilon is not None:
                parts.append(f"epsilon {at_most(event.epsilon)}, {event.seconds:.1f} s")
            return ", ".join(parts)
        case progress.Evaluated():
            found = ", ".join(_lines(EVALUATED, event.figures, "token"))
            return f"round {event.round}: {found}"
        case progress.Step(what, done, of) if done % max(1, of // 10) == 0 or done == of:
            return f"{done} of {of} {what}"
        case progress.Finished(rounds):
            return f"finished {rounds} rounds"
    return ""


def _lines(figures: Sequence[Figure], values: Mapping[str, Any], label: str) -> Iterator[str]:
    """The figures of a round or an evaluation that there are, in words."""
    for figure in figures:
        if line := figure.line(values.get(figure.name), label):
            yield line


def with_group(cohort: tuple[str, ...], event: progress.RoundStarted) -> tuple[str, ...]:
    """The sites that are asked in a round with groups, with those of another attempt at the sum of one group."""
    return cohort + tuple(site for site in event.cohort if site not in cohort)


def answers(count: int, cohort: tuple[str, ...], updates: int | None) -> str:
    """How many sites have answered in an attempt, or how many updates have arrived in an asynchronous round.

    Args:
        count: So many.
        cohort: As in `RoundStarted`.
        updates: As in `RoundStarted`.
    """
    return (
        f"{count} of {len(cohort)} sites have answered"
        if updates is None
        else f"{count} of {updates} updates"
    )


def _how(plan: Plan) -> str:
    how = "secure sum" if plan.aggregation.secure else "sum IN CLEAR: the coordinator sees every update"
    unit = plan.privacy.unit
    if unit == "none":
        return f"{how}, NO differential privacy"
    declared = ", noise from a DECLARED seed" if plan.simulation.noise_seed is not None else ""
    return f"{how}, private per {unit}{declared}"


def _rate(event: progress.RoundDone) -> float:
    return event.figures.get("tokens", 0) / event.seconds if event.seconds else 0.0


def _cells(figures: Sequence[Figure], values: Mapping[str, Any]) -> dict[str, str]:
    """The values of the figures that have a column, by its heading."""
    return {
        figure.column: shown
        for figure in figures
        if figure.column and (shown := figure.shown(values.get(figure.name)))
    }


class LiveDisplay(LineDisplay):
    """A live screen: progress, sites at work, the last rounds, the last failures.

    Args:
        console: The terminal.
        plan: The run's plan.
        path: The run folder.
    """

    def __init__(self, console: Console, plan: Plan, path: Path) -> None:
        self._console = console
        self._path = path
        self._plan = plan
        self._lock = threading.Lock()
        self._status = "starting"
        self._step: progress.Step | None = None
        self._done = 0
        self._first = 0
        self._begun: progress.RoundStarted | None = None
        self._cohort: tuple[str, ...] = ()
        self._answered: list[str] = []
        self._updates: int | None = None
        self._working: set[str] = set()
        self._rounds: dict[int, progress.RoundDone | None] = {}
        self._evaluated: dict[int, progress.Evaluated] = {}
        self._failures: deque[str] = deque(maxlen=_SHOWN_FAILURES)
        self._clock = time.monotonic()
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: progress.Event) -> None:
        """Update the screen."""
        with self._lock:
            if isinstance(event, _FAILURES):
                self._failures.append(describe(event))
            if isinstance(event, _SETS_STATUS):
                self._step = event if isinstance(event, progress.Step) else None
            match event:
                case progress.Preparing(what):
                    self._status = f"preparing {what}"
                case progress.Connected() if not self._cohort:
                    self._status = describe(event)
                case progress.Connected(missing=missing) if missing:
                    self._failures.append(describe(event))
                case progress.Started(done=done):
                    self._done = self._first = done
                    self._status = "evaluating"
                    self._clock = time.monotonic()
                case progress.RoundStarted(number, attempt, purpose, cohort, updates):
                    again = f", attempt {attempt}" if attempt > 1 else ""
                    self._status = f"round {number}{again}, {_DOING[purpose]}"
                    if event.beside(self._begun):
                        self._cohort = with_group(self._cohort, event)
                        self._answered = [site for site in self._answered if site not in cohort]
                    else:
                        self._begun = event
                        self._cohort, self._updates, self._answered = cohort, updates, []
                case progress.SiteAnswered():
                    self._answered.append(event.site)
                case progress.Step(what, done, of):
                    self._status = f"{done} of {of} {what}"
                case progress.RoundDone():
                    self._done = event.round
                    self._rounds[event.round] = event
                    self._cohort = ()
                    if event.refused:
                        self._failures.append(describe(event))
                case progress.Evaluated():
                    self._evaluated[event.round] = event
                    self._rounds.setdefault(event.round, None)
                case progress.Finished():
                    self._status, self._cohort = "finished", ()
        self._live.refresh()

    def watch(self, site: str, at_work: bool) -> None:
        """Update the list of sites at work."""
        with self._lock:
            (self._working.add if at_work else self._working.discard)(site)

    def _screen(self) -> RenderableType:
        with self._lock:
            return Group(*self._parts())

    def _parts(self) -> list[RenderableType]:
        plan = self._plan
        style = "green" if plan.aggregation.secure else "bold yellow"
        head = Text.assemble(
            ("cloister ", "bold cyan"), (plan.run.name, "bold"), "  ", (_how(plan), style), f"  {self._path}"
        )
        head.truncate(self._console.width, overflow="ellipsis")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        done, of = (self._step.done, self._step.of) if self._step else (self._done, plan.run.rounds)
        left = "" if self._step else self._time_left()
        bar.add_row(f"{done}/{of}", ProgressBar(total=of, completed=done), left)
        state = Text(self._status)
        if self._cohort:
            state.append(f"  {answers(len(self._answered), self._cohort, self._updates)}", style="green")
        if self._working:
            state.append("  at work: " + " ".join(sorted(self._working)), style="dim")
        state.truncate(self._console.width, overflow="ellipsis")
        parts: list[RenderableType] = [head, bar, state]
        shown = sorted(self._rounds)[-max(1, min(_SHOWN_ROUNDS, self._console.height - 10)) :]
        if shown:
            parts.append(self._table(shown))
        for failure in self._failures:
            line = Text(failure, style="yellow")
            line.truncate(self._console.width, overflow="ellipsis")
            parts.append(line)
        return parts

    def _table(self, shown: list[int]) -> Table:
        """The rounds, in as many columns as fit the width of the terminal without being cut."""
        private = self._plan.privacy.unit != "none"
        rate = f"{self._plan.data.label}s/s"
        cells: list[dict[str, str]] = []
        for number in shown:
            done, found = self._rounds[number], self._evaluated.get(number)
            row = {"round": str(number)}
            if done:
                row |= {"sites": str(done.sites)} | _cells(FIGURES, done.figures)
                if "tokens" in done.figures:
                    row[rate] = f"{_rate(done):,.0f}"
                if done.epsilon is not None:
                    row["epsilon"] = at_most(done.epsilon)
            cells.append(row | (_cells(EVALUATED, found.figures) if found else {}))
        first = ["round", "loss", "epsilon" if private else rate, "sites"]
        others = [figure.column for figure in (*EVALUATED, *FIGURES) if figure.column not in ("", *first)]
        headings = first + [column for column in others if any(column in row for row in cells)]
        table, left = Table(box=None, padding=(0, 2, 0, 0)), self._console.width
        for index, heading in enumerate(headings):
            left -= max(len(heading), *(len(row.get(heading, "")) for row in cells)) + 2
            if left < 0:
                headings = headings[:index]
                break
            table.add_column(heading, justify="right", no_wrap=True)
        for row in cells:
            table.add_row(*(row.get(heading, "") for heading in headings))
        return table

    def _time_left(self) -> str:
        here = self._done - self._first
        if not here:
            return ""
        left = (time.monotonic() - self._clock) / here * (self._plan.run.rounds - self._done)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def display_for(console: Console, plan: Plan, path: Path, *, json_: bool) -> LineDisplay:
    """The display of a run at a console: live at a terminal, and lines elsewhere."""
    return LiveDisplay(console, plan, path) if console.is_terminal and not json_ else LineDisplay(console)
