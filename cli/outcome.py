"""The outcome of a finished run: tables and advice for a person, one JSON object for a program."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloister.lm.generate import generate
from cloister.privacy.claims import unit_in_words
from cloister.privacy.dataset import DatasetLedger
from cloister.privacy.figures import at_most
from cloister.protocol.errors import BudgetError, LedgerError, StorageError
from cloister.protocol.plan import Plan
from cloister.server.folder import RunFolder
from cloister.server.history import run_history
from cloister.server.outcome import Outcome
from cloister.simulations.inspection import aggregation_error, per_site


def to_json(folder: RunFolder, outcome: Outcome, *, seconds: float) -> dict[str, object]:
    """The outcome for a program.

    Args:
        folder: The run folder.
        outcome: The outcome.
        seconds: Wall-clock time of this command.
    """
    epsilon = None if _noise_declared(folder.plan) else outcome.epsilon
    over = None if epsilon is None else _over_runs(folder, epsilon)
    return {
        "run": str(folder.path),
        "rounds": outcome.rounds,
        "initial_loss": outcome.initial_loss,
        "final_loss": outcome.final_loss,
        "perplexity": outcome.perplexity,
        "epsilon": epsilon,
        "delta": None if epsilon is None else folder.plan.privacy.delta,
        "dataset": None if over is None else asdict(over),
        "stopped": outcome.stopped,
        "seconds": seconds,
        "tokens_per_second": outcome.tokens_per_second or None,
        "params_sha256": outcome.params_sha256,
    }


@dataclass(frozen=True)
class _OverRuns:
    """The dataset of a run over all its runs, as a program gets it."""

    name: str
    limit: float | None
    runs: int | None = None
    epsilon: float | None = None
    problem: str = ""
    """Why neither is known; empty if they are."""


def _over_runs(folder: RunFolder, epsilon: float) -> _OverRuns | None:
    """What the plan's dataset has spent over all runs, with this one's epsilon; None if no ledger counts them."""
    shared = DatasetLedger.of(folder.plan)
    if shared is None:
        return None
    try:
        history = run_history(folder)
        spent = shared.spent(history.run, history.summed)
    except (BudgetError, LedgerError, StorageError) as error:  # the run is finished all the same
        return _OverRuns(shared.dataset, shared.limit, problem=str(error))
    return _OverRuns(shared.dataset, shared.limit, spent.runs, max(spent.epsilon, epsilon))


def print_outcome(console: Console, folder: RunFolder, outcome: Outcome) -> None:
    """Print the outcome for a person: losses, privacy, a sample of text, and the next commands."""
    plan = folder.plan
    sites = Table(title="Held-out loss of each site", title_justify="left")
    for heading in ("site", "sequences", "before", "after"):
        sites.add_column(heading, justify="left" if heading == "site" else "right")
    for site in per_site(folder):
        sites.add_row(site.site, f"{site.sequences:,}", f"{site.before:.3f}", f"{site.after:.3f}")
    if sites.row_count:
        console.print(sites)
    apart = aggregation_error(folder)
    if apart is not None:
        console.print(
            f"lora averages A and B apart: {apart:.1%} off the mean of their products in the last round"
        )
    console.print(_summary(folder, outcome))
    reason = ""
    if plan.privacy.unit == "none":
        reason = "the plan has no privacy unit"
    elif _noise_declared(plan):
        reason = "the noise came from the declared seed simulation.noise_seed"
    if reason:
        console.print(Text(f"no privacy guarantee: {reason}", style="bold yellow"))
    text = generate(folder.final, "The ", max_new_tokens=160, temperature=0.6, seed=0)
    sample = Text(" ".join(text.split()), style="italic")
    console.print(Text("the final model writes: ", style="bold") + sample)
    run = shlex.quote(str(folder.path))
    for line in (
        f"weights {outcome.params_sha256}",
        f"run     {folder.path}",
        f"report  cloister report {run}",
        f"try     cloister generate {run} --prompt 'The '",
    ):
        console.print(Text(line), soft_wrap=True)


def protected(plan: Plan) -> str:
    """What a plan with a privacy unit protects, in words."""
    if plan.privacy.dpsgd:
        return unit_in_words(plan.data, plan.privacy)
    return "all that one site holds"


def _noise_declared(plan: Plan) -> bool:
    """Whether the noise comes from a seed in the plan: anyone who reads the plan can subtract it."""
    return plan.simulation.noise_seed is not None


def _summary(folder: RunFolder, outcome: Outcome) -> Table:
    table = Table(title="Outcome", title_justify="left", show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    if outcome.initial_loss is not None and outcome.final_loss is not None:
        loss = f"{outcome.initial_loss:.3f} -> {outcome.final_loss:.3f} nats per token"
        table.add_row("held-out loss", loss)
        table.add_row("perplexity, accuracy", f"{outcome.perplexity:.2f}, {outcome.accuracy:.1%}")
        table.add_row("bits per byte", f"{outcome.bits_per_byte:.3f}")
    ends = {
        "budget": ", ended by the budget",
        "dataset": ", ended by the limit over all runs",
        "refused": ", ended by refusals",
    }
    table.add_row("rounds", f"{outcome.rounds}{ends.get(outcome.stopped, '')}")
    plan, privacy = folder.plan, folder.plan.privacy
    if outcome.epsilon is not None:
        budget = privacy.target_epsilon if privacy.budget is None else privacy.budget
        limit = "" if budget is None else f", of a budget of {budget:g}"
        table.add_section()
        table.add_row("what is protected", protected(plan))
        over = _over_runs(folder, outcome.epsilon)
        alone = "epsilon, this run" if over is not None and not over.problem else "epsilon, this run alone"
        table.add_row(alone, f"{at_most(outcome.epsilon)}{limit}")
        if over is not None:
            limit = "" if over.limit is None else f", of a limit of {over.limit:g}"
            which, figure = f"epsilon, all runs on {over.name}", f"not known: {over.problem}"
            if over.epsilon is not None:
                which = f"epsilon, all runs ({over.runs}) on {over.name}"
                figure = f"{at_most(over.epsilon)}{limit}"
            table.add_row(Text(which), Text(figure))
        table.add_row("delta", f"{privacy.delta:g}")
    return table
