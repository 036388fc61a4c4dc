"""The events of a run as a person sees them: plain lines, with a bar below them on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.measures.figures import FIGURES as EVALUATED
from cloister.privacy.report.figures import at_most
from cloister.protocol.figure import Figure
from cloister.protocol.plan.plan import Plan
from cloister.server.record import progress

_DOING = {"train": "training", "evaluate": "evaluating"}
_LONGEST_S = 1e9
"""Seconds of rounds that the time left follows from: all."""


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


class LineDisplay:
    """Shows a run while it is in progress: one plain line for each event, for logs and pipes.

    A context manager. `event` and `watch` may be called from any thread.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.absent = Absent()
        """The sites that take no part."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: progress.Event) -> None:
        """Show an event of the run."""
        self.absent.event(event)
        line = describe(event)
        if line:
            style = "bold yellow" if isinstance(event, progress.Warned) else ""
            self._console.print(Text(line, style), soft_wrap=True)

    def watch(self, site: str, at_work: bool) -> None:
        """Show that a site started or stopped working: not in lines, because a log would be full of them."""


def describe(event: progress.Event) -> str:
    """An event as one plain line; empty for events that are too frequent to print."""
    match event:
        case progress.Preparing(doing):
            return f"preparing {doing}"
        case progress.Warned(text):
            return f"warning: {text}"
        case progress.Connected(sites, missing):
            rest = "; ".join(f"{site}: {why}" for site, why in missing.items())
            return f"{len(sites)} of {len(sites) + len(missing)} sites are connected" + (
                f"; {rest}" if rest else ""
            )
        case progress.Started(plan, sites, parameters, done):
            return f"{plan.run.name}: {_what(plan, len(sites), parameters, done)}, plan {plan.digest()[:12]}"
        case progress.NotJoined(site, reason):
            return f"{site} did not join: {reason}"
        case progress.SiteFailed(number, site, reason):
            return f"round {number}: {site} dropped out: {reason}"
        case progress.Traced(number, groups, spoiled, common):
            return f"round {number}: in {groups} groups, because of {_liar(spoiled, common)}"
        case progress.AttemptFailed(number, attempt, reason):
            return f"round {number}: attempt {attempt} failed: {reason}"
        case progress.RoundAbandoned(number, spoiled=wrong) if wrong:
            return f"round {number}: given up: a site lied in its update or counters: {wrong}; the model is unchanged"
        case progress.RoundAbandoned(number, apart=True):
            return f"round {number}: given up: too few sites carry one history, so the next round begins with none"
        case progress.RoundAbandoned(number, attempts):
            return f"round {number}: given up after {attempts} attempts; the model is unchanged"
        case progress.NotEvaluated(number, spoiled=wrong) if wrong:
            return f"round {number}: not evaluated: a site lied in its totals: {wrong}"
        case progress.NotEvaluated(number, attempts):
            return f"round {number}: not evaluated, after {attempts} attempts"
        case progress.Refusing(number, sites):
            return f"round {number}: not finished: {', '.join(sites)} refused, and too few sites are left; the run ends"
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
                rate = event.figures["tokens"] / event.seconds if event.seconds else 0.0
                parts.append(f"{rate:,.0f} {event.label}s/s")
            if event.epsilon is not None:
                parts.append(f"epsilon {at_most(event.epsilon)}, {event.seconds:.1f} s")
            return ", ".join(parts)
        case progress.Evaluated():
            found = ", ".join(_lines(EVALUATED, event.figures, "token"))
            return f"round {event.round}: {found or 'the noise hides what the sites have found'}"
        case progress.Step(what, done, of) if done % max(1, of // 10) == 0 or done == of:
            return f"{done} of {of} {what}"
        case progress.Finished(rounds=rounds):
            return f"finished {rounds} rounds"
    return ""


def _liar(spoiled: int, common: Sequence[str]) -> str:
    """Which site has lied, as far as the sites that are in all spoiled sums say it."""
    sums = (
        "a sum that no honest sites can have"
        if spoiled == 1
        else f"{spoiled} sums that no honest sites can have"
    )
    if not common:
        return f"{sums}; more than one site has lied"
    names = ", ".join(common[:8]) + (f" and {len(common) - 8} more" if len(common) > 8 else "")
    return f"{sums}; if one site has lied, it is {'' if len(common) == 1 else 'one of '}{names}"


def _lines(figures: Sequence[Figure], values: Mapping[str, Any], label: str) -> Iterator[str]:
    """The figures of a round or an evaluation that there are, in words."""
    for figure in figures:
        if line := figure.line(values.get(figure.name), label):
            yield line


def _what(plan: Plan, sites: int, parameters: int, done: int) -> str:
    """What a run does, of which some rounds are done."""
    if plan.question is not None:
        return f"a question ({plan.question.kind}), {sites} sites, {parameters:,} cells, {_how(plan)}"
    resumed = f", from round {done}" if done else ""
    return (
        f"{plan.run.rounds} rounds{resumed}, {sites} sites, {parameters:,} trained parameters, {_how(plan)}"
    )


def _how(plan: Plan) -> str:
    how = "secure sum" if plan.aggregation.secure else "sum IN CLEAR: the coordinator sees every update"
    unit = plan.privacy.unit
    if unit == "none":
        return f"{how}, NO differential privacy"
    declared = ", noise from a DECLARED seed" if plan.simulation.noise_seed is not None else ""
    return f"{how}, private per {unit}{declared}"


class LiveDisplay(LineDisplay):
    """The same lines, and below them what goes on: rounds and steps done, time left, who answers, who is at work.

    Args:
        console: The terminal.
        rounds: Rounds of the run.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        super().__init__(console)
        self._lock = threading.Lock()
        self._bars = Progress(
            MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn(), speed_estimate_period=_LONGEST_S
        )
        self._rounds = self._bars.add_task("", total=rounds)
        self._steps = self._bars.add_task("", visible=False)
        self._status = "starting"
        self._begun: progress.RoundStarted | None = None
        self._cohort: tuple[str, ...] = ()
        self._answered: list[str] = []
        self._working: set[str] = set()
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: progress.Event) -> None:
        """Show an event, and update what is below."""
        if not isinstance(event, progress.Step):
            super().event(event)
        with self._lock:
            match event:
                case progress.Preparing(what):
                    self._status = f"preparing {what}"
                case progress.Started(done=done):
                    self._bars.reset(self._rounds, completed=done)
                    self._status = "evaluating"
                case progress.RoundStarted(number, attempt, purpose, cohort):
                    again = f", attempt {attempt}" if attempt > 1 else ""
                    self._status = f"round {number}{again}, {_DOING[purpose]}"
                    # An attempt at the sum of another group, or of the same again.
                    if event.beside(self._begun):
                        self._cohort += tuple(site for site in cohort if site not in self._cohort)
                        self._answered = [site for site in self._answered if site not in cohort]
                    else:
                        self._begun, self._cohort, self._answered = event, cohort, []
                case progress.SiteAnswered():
                    self._answered.append(event.site)
                case progress.Step(what, done, of):
                    self._status = f"{done} of {of} {what}"
                    self._bars.update(self._steps, completed=done, total=of, visible=done < of)
                case progress.RoundDone() | progress.RoundAbandoned():
                    self._bars.update(self._rounds, completed=event.round)
                    self._cohort = ()
                case progress.Finished():
                    self._status, self._cohort = "finished", ()
        self._live.refresh()

    def watch(self, site: str, at_work: bool) -> None:
        """Update the list of sites at work."""
        with self._lock:
            (self._working.add if at_work else self._working.discard)(site)

    def _screen(self) -> RenderableType:
        with self._lock:
            state = Text(self._status, no_wrap=True, overflow="ellipsis")
            if self._begun is not None and self._cohort:
                updates = self._begun.updates
                of = f"{len(self._cohort)} sites have answered" if updates is None else f"{updates} updates"
                state.append(f"  {len(self._answered)} of {of}", style="green")
            if self._working:
                state.append("  at work: " + " ".join(sorted(self._working)), style="dim")
            return Group(self._bars, state)


def display_for(console: Console, plan: Plan, *, json_: bool) -> LineDisplay:
    """The display of a run at a console: live at a terminal, and lines elsewhere."""
    return (
        LiveDisplay(console, plan.run.rounds) if console.is_terminal and not json_ else LineDisplay(console)
    )
