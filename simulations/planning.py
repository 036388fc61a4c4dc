"""What a plan would cost in privacy, and the noise that an epsilon needs; nothing is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.protocol.errors import AccountingError
from cloister.protocol.plan.plan import Plan as Contract
from cloister.protocol.plan.soundness import Plan, changed

if TYPE_CHECKING:
    from cloister.privacy.accounting.accountant import Spent
    from cloister.privacy.accounting.terms import Terms

_dimensions: dict[tuple[str, int], int] = {}


def epsilon(plan: Contract, *, group: int = 1) -> float:
    """Epsilon of a plan's whole run, at its delta, for a site that takes part in every round.

    Args:
        plan: A plan with a privacy unit.
        group: So many units together, such as the records of one person.

    Raises:
        AccountingError: the plan has no privacy unit.
        PlanError: no noise meets its target.
    """
    return cost(_known(plan), plan.run.rounds, group).epsilon


def calibrate(plan: Contract, *, epsilon: float) -> Plan:
    """The plan with the least noise multiplier with which its whole run costs at most an epsilon, at its delta.

    Raises:
        AccountingError: the plan has no privacy unit.
        PlanError: no noise meets that epsilon.
    """
    least = terms_with(plan, target_epsilon=epsilon).noise_multiplier
    return _with(plan, noise_multiplier=rounded_up(least))


def rounded_up(noise: float) -> float:
    """A noise multiplier with six decimals that costs no more."""
    return math.ceil(noise * 1e6) / 1e6


def cost(terms: Terms, rounds: int, group: int = 1) -> Spent:
    """What so many rounds, and all evaluations, cost units that differ together."""
    from cloister.privacy.accounting.accountant import spent

    return spent(terms.whole(rounds), terms.delta, terms.accountant, group=group)


def against_all(terms: Terms, rounds: int) -> Spent:
    """What a question, or so many rounds and all evaluations, cost against the coordinator and all other sites
    together."""
    from cloister.privacy.accounting.accountant import spent
    from cloister.privacy.accounting.trust import alone

    return spent(alone(terms.whole(rounds)).events, terms.delta, terms.accountant)


def evaluations(terms: Terms) -> float:
    """Epsilon of all evaluations of a run by its sites, without its training."""
    from cloister.privacy.accounting.accountant import epsilon_of

    return epsilon_of(terms.evaluations, terms.delta, terms.accountant)


def terms_with(plan: Contract, **wanted: float | None) -> Terms:
    """The privacy of a plan with another `noise_multiplier` or `target_epsilon`, and without a budget.

    Raises:
        AccountingError, PlanError: as `calibrate`.
    """
    return _known(_with(plan, **wanted))


def _with(plan: Contract, **wanted: float | None) -> Plan:
    _check_unit(plan)
    values = {"noise_multiplier": None, "target_epsilon": None, "budget": None} | wanted
    return changed(plan, {f"privacy.{name}": value for name, value in values.items()})


def _known(plan: Contract) -> Terms:
    """The privacy of a plan that has a unit."""
    from cloister.privacy.accounting.terms import terms_of

    _check_unit(plan)
    terms = terms_of(plan, dimension_of(plan))
    assert terms is not None, "a plan with a unit has terms"
    return terms


def _check_unit(plan: Contract) -> None:
    if plan.privacy.unit == "none":
        raise AccountingError("privacy.unit", "none", expected="a unit: without one there is no cost")


def dimension_of(plan: Contract) -> int:
    """The trained parameters of a plan's model, as far as its cost depends on their number."""
    if plan.privacy.unit != "site" or plan.question is not None:
        return 1
    from cloister.lm.model.model import count_parameters  # takes seconds to import

    config = Path(plan.model.name).expanduser() / "config.json"
    key = plan.model.model_dump_json(), config.stat().st_mtime_ns if config.is_file() else 0
    if key not in _dimensions:
        _dimensions[key] = count_parameters(plan).trained
    return _dimensions[key]
