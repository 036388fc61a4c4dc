"""What a search costs under a privacy unit: its trials are ordinary runs on one dataset, and their costs compose.

Each trial charges the ledger over runs (`privacy/ledger/dataset.py`): that of the plan, or one in the search's folder.
So a search may choose a trial by the losses of earlier ones, end it early, and show every score: the price, which is a
limit of the search's own ledger, holds against everybody. Refused: the best of a secret number of trials (Papernot and
Steinke 2022), which costs less only against those who see no other trial, no time and no load of a processor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cloister.privacy.accounting.accountant import Spent, mechanism, over_runs, spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.mechanism.events import Event, to_json
from cloister.privacy.report.figures import at_most
from cloister.protocol.errors import BudgetError, PlanError, SearchError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import changed
from cloister.simulations.planning import dimension_of
from cloister.simulations.search.search import LARGEST_GRID, Search, Values, of_trial

_PRICED = ("run.", "model.", "cohort.", "privacy.", "local.steps", "server.evaluat")
"""What the fields begin with that can change the cost, perhaps only together with others."""
_ROUNDING = 1e-6
"""The ledger composes the same charges in another order."""
LEDGER = "ledger.sqlite"
"""The ledger over runs in the folder of a search whose plan names none."""


@dataclass(frozen=True)
class Price:
    """What a search costs."""

    epsilon: float
    """Of all trials together, if each runs all its rounds."""
    delta: float
    """The delta for which it holds: the plan's, or twice that if the mechanisms of trials differ."""
    one: float
    """Epsilon of one run of the plan, at the plan's delta."""
    exact: bool
    """Whether the cost of each trial is known; else each counts as the most expensive one of the bounds and choices."""
    total: float
    """With what the ledger over runs holds already."""


def charged_plan(plan: Plan, folder: Path) -> Plan:
    """A plan as the trials of a search in a folder have it: under a privacy unit it names a ledger over runs.

    Its own budget is then the limit of that ledger: the search may spend it, and not each trial.

    Raises:
        PlanError: it declares its noise, for which there is no ledger.
    """
    privacy, simulation = plan.privacy, plan.simulation
    if privacy.unit == "none" or simulation.ledger:
        return plan
    if simulation.noise_seed is not None:
        raise PlanError(
            "simulation.noise_seed",
            simulation.noise_seed,
            expected="no value in a search under a privacy unit, which is charged: declared noise protects nothing",
            fix="remove it",
        )
    names = {"ledger": str((folder / LEDGER).absolute()), "dataset": simulation.source}
    budget = privacy.budget or privacy.target_epsilon
    limit = {} if budget is None else {"greatest_epsilon": budget}
    return changed(plan, {f"simulation.{name}": value for name, value in {**names, **limit}.items()})


def limited(plan: Plan, price: Price, own: bool) -> Plan:
    """A plan whose trials together cost at most the price, also where they train updates again after crashes.

    Args:
        plan: A plan that `charged_plan` returned.
        price: Its price.
        own: Whether the ledger over runs is the search's own; the limit of another one is its owner's.
    """
    if not own or plan.simulation.greatest_epsilon is not None or not math.isfinite(price.epsilon):
        return plan
    shown = float(at_most(price.epsilon * (1 + _ROUNDING)))
    return changed(plan, {"simulation.greatest_epsilon": shown})


def price_of(plan: Plan, search: Search) -> Price | None:
    """What a search costs; None without a privacy unit.

    Args:
        plan: A plan that `charged_plan` returned.
        search: The search, which is checked.

    Raises:
        PlanError: a trial has no noise that meets its target.
        BudgetError: the ledger charges the dataset in another unit.
        LedgerError, StorageError: the ledger is damaged, or cannot be read.
    """
    dataset = DatasetLedger.of(plan)
    if dataset is None:
        return None
    if search.sampler == "grid":
        charges, exact = [to_json(_run(plan, point)) for point in search.grid()], True
    else:
        runs = _corners(plan, search)
        most = max(runs, key=lambda run: spent(run, plan.privacy.delta, "rdp").epsilon)
        known = {mechanism(event) for event in most}
        # One release of each other mechanism, because a list of mechanisms that differ is composed in another way.
        others = [event for run in runs for event in dict.fromkeys(run) if mechanism(event) not in known]
        charges, exact = [to_json(most)] * search.count() + [to_json(others)], len(runs) == 1

    def together(charges: Sequence[str]) -> Spent:
        return over_runs(charges, plan.privacy.delta, plan.privacy.accountant)

    found, one = together(charges), together([to_json(_run(plan, {}))])
    return Price(found.epsilon, found.delta, one.epsilon, exact, dataset.after(charges).epsilon)


def check_price(plan: Plan, price: Price) -> None:
    """Refuse a search that costs more than may be spent.

    Args:
        plan: A plan that `charged_plan` returned.
        price: Its price.

    Raises:
        BudgetError: the plan's budget, or what the ledger over runs has left, is less.
    """
    privacy, simulation = plan.privacy, plan.simulation
    name = "budget" if privacy.target_epsilon is None else "target_epsilon"
    budget = privacy.budget or privacy.target_epsilon
    if budget is not None and not price.epsilon <= budget:
        raise BudgetError(
            f"privacy.{name}",
            budget,
            expected=f"at least the {at_most(price.epsilon)} that all trials of the search cost together",
            fix="set privacy.noise_multiplier, and privacy.budget to what the search may cost"
            if name == "target_epsilon"
            else "raise it, set fewer trials, or add noise",
        )
    if simulation.greatest_epsilon is not None and not price.total <= simulation.greatest_epsilon:
        raise BudgetError(
            "simulation.greatest_epsilon",
            simulation.greatest_epsilon,
            expected=f"at least {at_most(price.total)}: what {simulation.ledger} holds, and all trials of the search",
            fix="set fewer trials, or add noise; only the party responsible for the data can raise the limit",
        )


def _run(plan: Plan, values: Values) -> tuple[Event, ...]:
    """What a trial costs the dataset if it runs all its rounds."""
    with of_trial(values):
        tried = changed(plan, values)
        terms = terms_of(tried, dimension_of(tried))
    assert terms is not None, "the plan has a unit"
    return DatasetLedger(tried).whole(terms)


def _corners(plan: Plan, search: Search) -> list[tuple[Event, ...]]:
    """What runs cost that combine choices and bounds of the fields that can change the cost, each cost once.

    The cost rises or falls with each of these fields, so no other settings cost more. A field may change it only
    together with another one. Combinations that are not sound are left out: their trials fail.

    Raises:
        SearchError: there are too many combinations.
    """
    usual, priced = _run(plan, {}), []
    for parameter in search.parameter:
        can = parameter.field.startswith(_PRICED)
        if can or any(_run(plan, {parameter.field: value}) != usual for value in parameter.edges()):
            priced.append(parameter)
    if math.prod(len(parameter.edges()) for parameter in priced) > LARGEST_GRID:
        raise SearchError(
            "parameter",
            len(priced),
            expected=f"fields that can change the cost with at most {LARGEST_GRID} combinations of bounds and choices",
            fix="search fewer of them at once",
        )
    found: dict[tuple[Event, ...], None] = {}
    for values in itertools.product(*(parameter.edges() for parameter in priced)):
        with suppress(PlanError):
            found[_run(plan, dict(zip((one.field for one in priced), values, strict=True)))] = None
    return list(found) or [usual]
