"""`cloister tune`: search over fields of a plan; private searches have a price.

Run a plan several times with other settings, each time a whole simulation, and find the settings with the least
held-out loss. SEARCH is a TOML file: sampler (grid, random or tpe), trials, pruner, workers, and a [[parameter]] for
each field. Under a privacy unit the number of trials is drawn in secret, only the best trial is kept, and its report
has the price of the search.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from cloister.cli.options.shared_options import (
    Parser,
    add_engine,
    add_json,
    add_plan,
    check_again,
    chosen_plan,
    folder_for,
    tell,
)
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.claims import law
from cloister.privacy.report.figures import at_most
from cloister.protocol.errors import CloisterError, SearchError
from cloister.protocol.plan.plan import Plan
from cloister.simulations.engines import fork_server
from cloister.simulations.search.search import Search, Values, check, load_search, private_plan
from cloister.simulations.search.study import Trial
from cloister.simulations.search.trials import Engine

if TYPE_CHECKING:
    from cloister.simulations.search.tuning import Found, SearchFolder


_SHOWN = 10
"""Trials of the table at the end."""


def options(parser: Parser) -> None:
    """Plan, search, folder, engine."""
    add_plan(parser)
    parser.value("search SEARCH", "a TOML file", nargs="?")
    parser.value("--out DIR", "folder of the search, new or empty (default: runs/NAME-search)")
    parser.value("--again DIR", "instead of a new search: continue this one, which was stopped, as it began")
    parser.flag("--dry-run", "check the search, print what it costs, and run no trial")
    add_engine(parser)
    add_json(parser)


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

    console = PipedConsole(stderr=arguments.json)
    if arguments.again is not None:
        from cloister.simulations.search.tuning import SearchFolder

        with SearchFolder.reopen(Path(arguments.again)) as folder:
            return _tune(folder, arguments, console, new=False)

    plan, search = chosen_plan(arguments), load_search(Path(arguments.search))
    check(plan, search)
    if arguments.dry_run:
        return _say_price(plan, search, arguments)
    from cloister.simulations.search.tuning import SearchFolder

    out = folder_for(arguments.out, Path("runs"), f"{plan.run.name}-search")
    with SearchFolder.create(out, plan, search) as folder:
        return _tune(folder, arguments, console, new=True)


def _say_price(plan: Plan, search: Search, arguments: argparse.Namespace) -> int:
    """Print what a search would do and cost."""
    if plan.privacy.unit == "none":
        return tell(arguments, {"trials": search.count(), "epsilon": None}, _opening(plan, search))
    from cloister.simulations.search.tuning import price, price_facts

    trial = private_plan(plan, search, "0" * 32)
    facts = {"trials": None, **price_facts(trial), "one_search_in_a_hundred": price(trial).many}
    return tell(arguments, facts, _opening(trial, search))


def _tune(folder: SearchFolder, arguments: argparse.Namespace, console: PipedConsole, *, new: bool) -> int:
    from cloister.simulations.search.tuning import to_json, tune

    try:
        console.say(_opening(folder.plan, folder.search))
        console.say(f"folder    {folder.path}")
        if arguments.ray_address is None:
            fork_server.start(folder.plan)
        engine = Engine(arguments.workers, arguments.ray_address)
        found = tune(folder, engine, lambda trial: console.say(_line(trial)))
    except KeyboardInterrupt:
        _say_how_to_continue(console, folder)
        raise
    except CloisterError:
        if new and not folder.begun():
            folder.discard()
        else:
            _say_how_to_continue(console, folder)
        raise
    if arguments.json:
        print(json.dumps(to_json(folder, found)))
    else:
        _print(console, folder, found)
    # Under a privacy unit the exit code is no result: it must not tell more than the model.
    return 0 if folder.private or found.best is not None else 1


def _opening(plan: Plan, search: Search) -> str:
    """What the search does and costs."""
    fields = ", ".join(parameter.field for parameter in search.parameter)
    at_once = "" if search.workers == 1 else f", {search.workers} at a time"
    if plan.simulation.search is None:
        pruned = "" if search.pruner == "none" else f", pruned by {search.pruner}"
        trials = "1 trial" if search.count() == 1 else f"{search.count():,} trials"
        return f"search    {trials} by {search.sampler}{pruned}{at_once}: {fields}"
    from cloister.simulations.search.tuning import price

    cost, chosen = price(plan), plan.simulation.search
    return "\n".join(
        (
            f"search    the best of a secret number of trials by {search.sampler}{at_once}: {fields}",
            f"trials    from {law(chosen)} with mean {chosen.mean:g}; 1 search in 100 has more than {cost.many:,}",
            f"epsilon   {at_most(cost.epsilon)} at delta {cost.delta:g}; one run alone costs {at_most(cost.one)}",
            "          toward those who see nothing but the best trial; losses and number of trials stay sealed",
        )
    )


def _line(trial: Trial) -> str:
    """A trial that begins or has ended."""
    name = f"trial {trial.number}"
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

    from cloister.simulations.search.tuning import price

    if found.trials:
        table = columns("trial", "held-out loss", "", "settings", title="Trials", left=0)
        table.columns[2].justify = table.columns[3].justify = "left"
        ended = sorted(
            found.trials,
            key=lambda one: (one.state != "complete", one.loss is None, one.loss or 0.0, one.number),
        )
        for trial in ended[:_SHOWN]:
            loss = "" if trial.loss is None else f"{trial.loss:.4f}"
            state = {"complete": "", "pruned": "ended early"}.get(trial.state, trial.state)
            table.add_row(f"{trial.number}", loss, state, Text(_settings(trial.values)))
        console.print(table)
        if len(ended) > _SHOWN:
            console.say(f"and {len(ended) - _SHOWN:,} more")
    if found.best is not None:
        run = shlex.quote(str(found.folder))
        loss = "" if found.best.loss is None else f", held-out loss {found.best.loss:.4f}"
        console.say(f"best      {_settings(found.best.values)}{loss}")
        console.say(f"run       {run}")
        console.say(f"report    cloister report {run}")
    elif folder.private:
        console.say(f"best      no trial: the untrained model is in {found.folder}/final")
    else:
        console.say("best      no trial has finished")
    if folder.private:
        cost = price(folder.plan)
        console.say(f"epsilon   {at_most(cost.epsilon)} at delta {cost.delta:g} for the whole search")


def _say_how_to_continue(console: PipedConsole, folder: SearchFolder) -> None:
    console.say(f"stopped; continue with: cloister tune --again {shlex.quote(str(folder.path))}")
