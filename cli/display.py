"""What a person sees of a run: a live screen on a terminal, plain lines elsewhere, one line of JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloister.privacy.claims import unit_in_words
from cloister.privacy.figures import at_most
from cloister.protocol.errors import CloisterError, RunFolderError, StorageError
from cloister.protocol.plan import Plan
from cloister.server.folder import RunFolder
from cloister.server.journal import DONE
from cloister.server.progress import (
    AttemptFailed,
    BudgetSpent,
    Evaluated,
    Event,
    Finished,
    NotEvaluated,
    Preparing,
    PublicStep,
    Refusing,
    RoundAbandoned,
    RoundDone,
    RoundStarted,
    SiteAnswered,
    SiteFailed,
    Started,
)

if TYPE_CHECKING:  # it imports torch
    from cloister.server.outcome import Outcome

_SHOWN_ROUNDS = 10
_SHOWN_FAILURES = 3
_DOING = {"train": "training", "evaluate": "evaluating"}


class Display(Protocol):
    """Shows a run while it goes on."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def event(self, event: Event) -> None:
        """Something happened."""

    def watch(self, site: str, at_work: bool) -> None:
        """A site started or stopped working."""


class PipedConsole(Console):
    """A console whose reader may leave, as `head` does: what follows is dropped, and the run goes on."""

    def on_broken_pipe(self) -> None:
        """Print no more, instead of ending the process."""
        self.quiet = True
        with suppress(OSError):  # a stream without a file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self.file.fileno())  # what is buffered would fail again
            finally:
                os.close(nowhere)


def show_run(folder: RunFolder, arguments: argparse.Namespace, *, new: bool) -> int:
    """Run a folder's plan, show it, and print what came of it; a new run that is refused leaves no folder."""
    console = PipedConsole(stderr=arguments.json)
    display: Display = (
        LiveDisplay(console, folder) if console.is_terminal and not arguments.json else LineDisplay(console)
    )
    started = time.monotonic()
    try:
        from cloister.simulations.federation import simulate  # takes seconds, in which Ctrl-C may come

        with display:
            outcome = simulate(
                folder, display.event, engine=arguments.engine, workers=arguments.workers, watch=display.watch
            )
    except KeyboardInterrupt:
        _print_how_to_go_on(console, folder)
        raise
    except CloisterError as error:
        if not _begun(folder):
            if new and not isinstance(error, StorageError):  # which is for a person to mend, and to resume
                folder.discard()
        elif not isinstance(error, RunFolderError):
            _print_how_to_go_on(console, folder)
        raise
    from cloister.simulations.inspection import aggregation_error, per_site

    declared = folder.plan.simulation.noise_seed is not None
    epsilon = None if declared else outcome.epsilon  # who has the seed can take the noise off
    if arguments.json:
        print(
            json.dumps(
                {
                    "run": str(folder.path),
                    "rounds": outcome.rounds,
                    "initial_loss": outcome.initial_loss,
                    "final_loss": outcome.final_loss,
                    "perplexity": outcome.perplexity,
                    "epsilon": epsilon,
                    "delta": None if epsilon is None else folder.plan.privacy.delta,
                    "stopped": outcome.stopped,
                    "seconds": time.monotonic() - started,
                    "tokens_per_second": outcome.tokens_per_second or None,
                    "params_sha256": outcome.params_sha256,
                }
            )
        )
        return 0
    table = Table(title="Each site's own held-out loss", title_justify="left")
    for heading in ("site", "sequences", "before", "after"):
        table.add_column(heading, justify="left" if heading == "site" else "right")
    for site in per_site(folder):
        table.add_row(site.site, f"{site.sequences:,}", f"{site.before:.3f}", f"{site.after:.3f}")
    if table.row_count:
        console.print(table)
    apart = aggregation_error(folder)
    if apart is not None:
        console.print(
            f"lora averages A and B apart: {apart:.1%} off the mean of their products in the last round"
        )
    console.print(_summary(folder.plan, outcome))
    if folder.plan.privacy.unit == "none":
        console.print(Text("no privacy guarantee: the plan has no privacy unit", style="bold yellow"))
    elif declared:
        seed = "the noise came from the declared seed simulation.noise_seed"
        console.print(Text(f"no privacy guarantee: {seed}", style="bold yellow"))
    _print_sample(console, folder)
    for line in (
        f"weights {outcome.params_sha256}",
        f"run     {folder.path}",
        f"report  cloister report {shlex.quote(str(folder.path))}",
        f"try     cloister generate {shlex.quote(str(folder.path))} --prompt 'The '",
    ):
        console.print(Text(line), soft_wrap=True)
    return 0


def _summary(plan: Plan, outcome: Outcome) -> Table:
    """What came of a run."""
    table = Table(title="What came of it", title_justify="left", show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    if outcome.initial_loss is not None and outcome.final_loss is not None:
        loss = f"{outcome.initial_loss:.3f} -> {outcome.final_loss:.3f} nats per token"
        table.add_row("held-out loss", loss)
        table.add_row("perplexity, accuracy", f"{outcome.perplexity:.2f}, {outcome.accuracy:.1%}")
        table.add_row("bits per byte", f"{outcome.bits_per_byte:.3f}")
    ends = {"budget": ", ended by the budget", "refused": ", ended by refusals"}
    table.add_row("rounds", f"{outcome.rounds}{ends.get(outcome.stopped, '')}")
    privacy = plan.privacy
    if outcome.epsilon is not None:
        budget = privacy.target_epsilon if privacy.budget is None else privacy.budget
        limit = "" if budget is None else f", of a budget of {budget:g}"
        table.add_section()
        table.add_row("what is protected", protected(plan))
        table.add_row("epsilon", f"{at_most(outcome.epsilon)}{limit}")
        table.add_row("delta", f"{privacy.delta:g}")
    return table


def protected(plan: Plan) -> str:
    """What a plan with a privacy unit protects, in words."""
    return (
        unit_in_words(plan.data, plan.privacy) if plan.privacy.unit == "record" else "all that one site holds"
    )


def _begun(folder: RunFolder) -> bool:
    """Whether there is something to lose; a journal that cannot be read may know of something."""
    from cloister.server.history import reached

    try:
        return reached(folder, DONE)
    except RunFolderError:
        return True


def _print_how_to_go_on(console: Console, folder: RunFolder) -> None:
    command = f"cloister resume {shlex.quote(str(folder.path))}"
    console.print(Text(f"stopped; go on with: {command}", style="yellow"), soft_wrap=True)


def _print_sample(console: Console, folder: RunFolder) -> None:
    from cloister.lm.generate import generate

    text = generate(folder.final, "The ", max_new_tokens=160, temperature=0.6, seed=0)
    console.print(
        Text("the final model writes: ", style="bold") + Text(" ".join(text.split()), style="italic")
    )


class LineDisplay:
    """One plain line for each thing that happened; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: Event) -> None:
        """Print the event."""
        line = describe(event)
        if line:
            self._console.print(Text(line), soft_wrap=True)

    def watch(self, site: str, at_work: bool) -> None:
        """Nothing: a line for each would drown the rest."""


def describe(event: Event) -> str:
    """An event as one plain line; empty for those that are too many to print."""
    match event:
        case Preparing(what):
            return f"preparing {what}"
        case Started(plan, sites, parameters, done):
            resumed = f", from round {done}" if done else ""
            return (
                f"{plan.run.name}: {plan.run.rounds} rounds{resumed}, {len(sites)} sites, "
                f"{parameters:,} trained parameters, {_how(plan)}, plan {plan.digest()[:12]}"
            )
        case SiteFailed(number, site, reason):
            return f"round {number}: {site} dropped out: {reason}"
        case AttemptFailed(number, attempt, reason):
            return f"round {number}: attempt {attempt} ended with nothing opened: {reason}"
        case RoundAbandoned(number, attempts):
            return f"round {number}: given up after {attempts} attempts; the model is as it was"
        case NotEvaluated(number, attempts):
            return f"round {number}: not evaluated, after {attempts} attempts"
        case Refusing(number, sites):
            return f"round {number}: not begun: {', '.join(sites)} refused, and too few are left; this is the end"
        case BudgetSpent(number, epsilon, budget):
            return (
                f"round {number}: not begun: epsilon is {at_most(epsilon)}, and the round would exceed the budget of "
                f"{budget:g}; this is the end"
            )
        case RoundDone():
            parts = [f"round {event.round}: {event.sites} sites"]
            if event.train_loss is not None:
                parts.append(f"training loss {event.train_loss:.3f}")
            if event.tokens is not None:
                parts.append(f"{_rate(event):,.0f} tokens/s")
            if event.epsilon is not None:
                parts.append(f"epsilon {at_most(event.epsilon)}, {event.seconds:.1f} s")
            return ", ".join(parts) + _clipped(event)
        case Evaluated():
            return (
                f"round {event.round}: held-out loss {event.loss:.3f}, perplexity {event.perplexity:.2f}, "
                f"accuracy {event.accuracy:.1%}, {event.bits_per_byte:.3f} bits/byte"
            )
        case Finished(rounds):
            return f"finished {rounds} rounds"
    return ""


def _how(plan: Plan) -> str:
    how = "secure sum" if plan.aggregation.secure else "sum IN CLEAR: the coordinator sees every update"
    unit = plan.privacy.unit
    if unit == "none":
        return f"{how}, NO differential privacy"
    declared = ", noise from a DECLARED seed" if plan.simulation.noise_seed is not None else ""
    return f"{how}, private per {unit}{declared}"


def _rate(event: RoundDone) -> float:
    return (event.tokens or 0) / event.seconds if event.seconds else 0.0


def _clipped(event: RoundDone) -> str:
    return f", {event.clipped:,} coordinates clipped at aggregation.bound" if event.clipped else ""


class LiveDisplay:
    """The live screen: progress, sites at work, the last rounds, what went wrong."""

    def __init__(self, console: Console, folder: RunFolder) -> None:
        self._console = console
        self._path = folder.path
        self._plan: Plan = folder.plan
        self._lock = threading.Lock()
        self._status = "starting"
        self._done = 0
        self._first = 0
        self._cohort: tuple[str, ...] = ()
        self._answered: set[str] = set()
        self._working: set[str] = set()
        self._rounds: dict[int, RoundDone | None] = {}
        self._losses: dict[int, Evaluated] = {}
        self._failures: deque[str] = deque(maxlen=_SHOWN_FAILURES)
        self._clock = time.monotonic()
        self._live = Live(console=console, get_renderable=self._screen, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: Event) -> None:
        """Take the event into the picture."""
        with self._lock:
            match event:
                case Preparing(what):
                    self._status = f"preparing {what}"
                case Started(done=done):
                    self._done = self._first = done
                    self._status = "evaluating"
                    self._clock = time.monotonic()
                case RoundStarted(number, attempt, purpose, cohort):
                    again = f", attempt {attempt}" if attempt > 1 else ""
                    self._status = f"round {number}{again}, {_DOING[purpose]}"
                    self._cohort, self._answered = cohort, set()
                case SiteAnswered(site=site):
                    self._answered.add(site)
                case SiteFailed() | AttemptFailed() | RoundAbandoned() | NotEvaluated():
                    self._failures.append(describe(event))
                case PublicStep(step, steps):
                    self._status = f"public training, step {step} of {steps}"
                case BudgetSpent() | Refusing():
                    self._failures.append(describe(event))
                case RoundDone():
                    self._done = event.round
                    self._rounds[event.round] = event
                    self._cohort = ()
                case Evaluated():
                    self._losses[event.round] = event
                    self._rounds.setdefault(event.round, None)
                case Finished():
                    self._status, self._cohort = "finished", ()
        self._live.refresh()

    def watch(self, site: str, at_work: bool) -> None:
        """Keep the list of sites at work."""
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
        progress = Table.grid(padding=(0, 1), expand=True)
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        progress.add_row(
            f"{self._done}/{plan.run.rounds}",
            ProgressBar(total=plan.run.rounds, completed=self._done),
            self._time_left(),
        )
        state = Text(self._status)
        if self._cohort:
            state.append(f"  {len(self._answered)} of {len(self._cohort)} sites answered", style="green")
        if self._working:
            state.append("  at work: " + " ".join(sorted(self._working)), style="dim")
        state.truncate(self._console.width, overflow="ellipsis")
        parts: list[RenderableType] = [head, progress, state]
        shown = sorted(self._rounds)[-max(1, min(_SHOWN_ROUNDS, self._console.height - 10)) :]
        if shown:
            parts.append(self._table(shown))
        for failure in self._failures:
            line = Text(failure, style="yellow")
            line.truncate(self._console.width, overflow="ellipsis")
            parts.append(line)
        return parts

    def _table(self, shown: list[int]) -> Table:
        """The rounds; a narrow terminal gets fewer columns instead of cut ones."""
        private = self._plan.privacy.unit != "none"
        headings = ["round", "loss", "epsilon" if private else "tokens/s", "sites", "perplexity"]
        headings += ["bits/byte"] if private else ["train loss", "bits/byte"]
        width = self._console.width
        headings = headings[: 2 if width < 32 else 4 if width < 64 else len(headings)]
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for number in shown:
            done, loss = self._rounds[number], self._losses.get(number)
            cells = {"round": str(number)}
            if loss:
                cells |= {
                    "loss": f"{loss.loss:.3f}",
                    "perplexity": f"{loss.perplexity:.2f}",
                    "bits/byte": f"{loss.bits_per_byte:.3f}",
                }
            if done:
                cells["sites"] = str(done.sites)
                if done.train_loss is not None:
                    cells |= {"train loss": f"{done.train_loss:.3f}", "tokens/s": f"{_rate(done):,.0f}"}
                if done.epsilon is not None:
                    cells["epsilon"] = at_most(done.epsilon)
            table.add_row(*(cells.get(heading, "") for heading in headings))
        return table

    def _time_left(self) -> str:
        here = self._done - self._first
        if not here:
            return ""
        left = (time.monotonic() - self._clock) / here * (self._plan.run.rounds - self._done)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
