"""`cloister tune`: search over fields of a plan.

Run a plan several times with other settings, each time a whole simulation, and find the settings with the least
held-out loss. SEARCH is a TOML file: sampler (grid, random or tpe), trials, pruner, workers, and a [[parameter]] for
each field. Under a privacy unit every trial is charged, and their costs compose; --dry-run prints the price.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from cloister.cli.options.shared_options import Parser, check_again, chosen_plan, folder_for, tell
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.report.figures import at_most
from cloister.protocol.errors import CloisterError, SearchError
from cloister.protocol.plan.plan import Plan
from cloister.simulations.engines import fork_server
from cloister.simulations.search.price import Price, charged_plan, check_price, price_of
from cloister.simulations.search.search import SEARCH, Search, Values, check
from cloister.simulations.search.study import Trial
from cloister.simulations.search.trials import Engine, Heard

if TYPE_CHECKING:
    from cloister.simulations.search.tuning import Found, SearchFolder


_SHOWN = 10
"""Trials of the table at the end."""
_QUIET_S = 5.0
"""Seconds without a line after which the loss of a trial that runs is one."""


def options(parser: Parser) -> None:
    """Plan, search, folder, engine."""
    parser.add_plan()
    parser.value("search SEARCH", "a TOML file", nargs="?")
    parser.value("--out DIR", "folder of the search, new or empty (default: runs/NAME-search)")
    parser.value("--again DIR", "instead of a new search: continue this one, which was stopped, as it began")
    parser.flag("--dry-run", "check the search, print what it costs, and run no trial")
    parser.add_engine()
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Run a search, new or begun."""
    if arguments.again is not None:
        check_again(arguments, SearchError)
    elif arguments.plan is None or arguments.search is None:
        raise SearchError(
            "SEARCH",
            expected="a plan and a search: cloister tune PLAN.toml SEARCH.toml",
            fix="or --again DIR",
        )

    if arguments.again is None:
        plan, search = chosen_plan(arguments), SEARCH.load(Path(arguments.search))
        check(plan, search)
        if arguments.dry_run:
            return _say_price(plan, search, arguments)
    from cloister.simulations.search.tuning import SearchFolder

    if arguments.again is not None:
        folder = SearchFolder.reopen(Path(arguments.again))
    else:
        out = folder_for(arguments.out, Path("runs"), f"{plan.run.name}-search")
        folder = SearchFolder.create(out, plan, search)
    with folder:
        return _tune(folder, arguments, PipedConsole(stderr=arguments.json))


def _say_price(plan: Plan, search: Search, arguments: argparse.Namespace) -> int:
    """Print what a search would do and cost."""
    plan = charged_plan(plan, Path(arguments.out or "search"))
    price = price_of(plan, search)
    facts: dict[str, object] = {"trials": search.count(), "epsilon": None}
    if price is not None:
        check_price(plan, price)
        facts |= {
            "epsilon": price.epsilon,
            "delta": price.delta,
            "epsilon_of_one": price.one,
            "exact": price.exact,
        }
    return tell(arguments, facts, *_opening(search, price))


def _tune(folder: SearchFolder, arguments: argparse.Namespace, console: PipedConsole) -> int:
    from cloister.simulations.search.tuning import to_json, tune

    said = time.monotonic()

    def say(told: Trial | Heard) -> None:
        nonlocal said
        if isinstance(told, Trial) or time.monotonic() - said > _QUIET_S:
            console.say(_line(told))
            said = time.monotonic()

    try:
        for line in _opening(folder.search, price_of(folder.plan, folder.search)):
            console.say(line)
        console.say(f"folder    {folder.path}")
        if arguments.ray_address is None:
            fork_server.start(folder.plan)
        engine = Engine(arguments.workers, arguments.ray_address)
        found = tune(folder, engine, say)
    except KeyboardInterrupt:
        _say_how_to_continue(console, folder)
        raise
    except CloisterError:
        if arguments.again is None and not folder.study.exists():
            folder.discard()
        else:
            _say_how_to_continue(console, folder)
        raise
    if arguments.json:
        print(json.dumps(to_json(folder, found)))
    else:
        _print(console, folder, found)
    return 0 if found.best is not None else 1


def _opening(search: Search, price: Price | None) -> Iterator[str]:
    """What a search does and costs, line by line."""
    fields = ", ".join(parameter.field for parameter in search.parameter)
    at_once = "" if search.workers == 1 else f", {search.workers} at a time"
    pruned = "" if search.pruner == "none" else f", pruned by {search.pruner}"
    trials = "1 trial" if search.count() == 1 else f"{search.count():,} trials"
    yield f"search    {trials} by {search.sampler}{pruned}{at_once}: {fields}"
    if price is not None:
        most = "" if price.exact else "at most "
        yield (
            f"epsilon   {most}{at_most(price.epsilon)} at delta {price.delta:g} for {trials}; "
            f"one run of the plan costs {at_most(price.one)}"
        )


def _line(trial: Trial | Heard) -> str:
    """A trial that begins, has told a loss, or has ended."""
    name = f"trial {trial.number}"
    if isinstance(trial, Heard):
        return f"{name}: round {trial.round}, held-out loss {trial.loss:.4f}"
    match trial.state:
        case "running":
            return f"{name}: {_settings(trial.values)}"
        case "failed":
            return f"{name}: failed: {trial.reason}"
        case "pruned":
            return f"{name}: ended early{'' if trial.loss is None else f' at held-out loss {trial.loss:.4f}'}"
        case _:
            return f"{name}: held-out loss {trial.loss:.4f}"


def _settings(values: Values) -> str:
    shown = (
        f"{field} = {value:.4g}" if isinstance(value, float) else f"{field} = {value}"
        for field, value in values.items()
    )
    return ", ".join(shown)


def _print(console: PipedConsole, folder: SearchFolder, found: Found) -> None:
    table = columns("trial", "held-out loss", "", "settings", title="Trials", left=0)
    table.columns[2].justify = table.columns[3].justify = "left"
    ended = sorted(
        found.trials, key=lambda one: (one.state != "complete", one.loss is None, one.loss or 0.0, one.number)
    )
    for trial in ended[:_SHOWN]:
        loss = "" if trial.loss is None else f"{trial.loss:.4f}"
        state = {"complete": "", "pruned": "ended early"}.get(trial.state, trial.state)
        table.add_row(f"{trial.number}", loss, state, Text(_settings(trial.values)))
    console.print(table)
    if len(ended) > _SHOWN:
        console.say(f"and {len(ended) - _SHOWN:,} more")
    if found.best is not None:
        run = shlex.quote(str(folder.trial(found.best.number).path))
        loss = "" if found.best.loss is None else f", held-out loss {found.best.loss:.4f}"
        console.say(f"best      {_settings(found.best.values)}{loss}")
        console.say(f"run       {run}")
        console.say(f"report    cloister report {run}")
    else:
        console.say("best      no trial has finished")
    if (spent := found.spent) is not None:
        runs = "1 run" if spent.runs == 1 else f"{spent.runs:,} runs"
        ledger = f"{runs} on {folder.plan.simulation.dataset!r} in {folder.plan.simulation.ledger}"
        console.say(f"epsilon   {at_most(spent.epsilon)} at delta {spent.delta:g} for the {ledger};")
        limit = folder.plan.simulation.greatest_epsilon
        most = "for the trials alone it is the price above, if none trained a round again after a crash"
        if limit is not None:
            most = (
                f"it is at most {limit:g}, the limit of that ledger (twice this delta if mechanisms differ)"
            )
        console.say(f"          if losses decided how many rounds there were, {most}")


def _say_how_to_continue(console: PipedConsole, folder: SearchFolder) -> None:
    console.say(f"stopped; continue with: cloister tune --again {shlex.quote(str(folder.path))}")
