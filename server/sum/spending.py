"""The spending of a run in the coordinator's ledger: for the report, and to stop before exceeding the budget.

Each site is a dataset of its own, because sites that take part in different rounds spend differently. A round is
charged before its result can be released. Under the units `record` and `owner` every site that is asked to train is
charged, also in an attempt that fails, because training uses its records; so is one that is asked to evaluate
(`server.evaluation_epsilon`). Under unit `site` the sum is the release, so
its survivors are charged before it is opened. Correlated noise is charged for the whole run in
a site's first round; the charges of its later rounds have no events. The sites' own ledgers do not depend on this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from cloister.privacy.accounting.accountant import composed, epsilon_of
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import Charge, Entry, Ledger, release_id
from cloister.privacy.mechanism.events import Event, from_json, to_json
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose
from cloister.server.record.progress import BudgetSpent

OWNER = "coordinator"


class Spending:
    """The coordinator's ledger of one run.

    Args:
        terms: The plan's privacy.
        run: Identity of the run.
        path: The ledger's file.
        dataset: In a simulation, the ledger over runs, which its sites charge.
    """

    def __init__(self, terms: Terms, run: str, path: Path, *, dataset: DatasetLedger | None = None) -> None:
        self.terms = terms
        self._dataset = dataset
        self._run = run
        self._ledger = Ledger(path, OWNER, composed)

    def before_training(self, round_number: int, sites: Iterable[str]) -> tuple[Entry, ...]:
        """Under the units `record` and `owner`, charge the sites that are about to be asked; returns the entries."""
        return self._charge(round_number, sites) if self.terms.unit != "site" else ()

    def before_evaluating(self, round_number: int, sites: Iterable[str]) -> tuple[Entry, ...]:
        """Charge the sites that are about to be asked for an evaluation; returns the entries."""
        return self._charge(round_number, sites, EVALUATE)

    def before_opening(self, round_number: int, sites: Iterable[str]) -> tuple[Entry, ...]:
        """Under unit `site`, charge the sites whose sum is about to be opened; returns the entries."""
        return self._charge(round_number, sites) if self.terms.unit == "site" else ()

    def exceeded(self, round_number: int, sites: Sequence[str]) -> BudgetSpent | None:
        """What a round of these sites would exceed: the plan's budget, or its dataset's limit over all runs."""
        if self.terms.budget is not None and not self._affords(round_number, sites):
            return BudgetSpent(round_number, self.epsilon(), self.terms.budget)
        dataset = self._dataset
        if dataset is None or dataset.affords(self.terms, self._run, round_number, sites):
            return None
        assert dataset.limit is not None, "only a limit can be exceeded"
        return BudgetSpent(round_number, dataset.spent().epsilon, dataset.limit, dataset.dataset)

    def _affords(self, round_number: int, sites: Iterable[str]) -> bool:
        events, paid = self._read(TRAIN)
        futures, before = set(), _before(round_number, paid)
        evaluated = Counter(site for _, site in self._read(EVALUATE)[1])
        for site in sites:
            more = () if (round_number, site) in paid else self.terms.events(1, before[site])
            futures.add((*events.get(site, ()), *more, *self.terms.evaluations[evaluated[site] :]))
        assert self.terms.budget is not None
        return all(self._epsilon(future) <= self.terms.budget for future in futures)

    def epsilon(self) -> float:
        """The largest epsilon of a site so far."""
        return max(self.epsilons().values(), default=0.0)

    def epsilons(self) -> dict[str, float]:
        """Epsilon of each site so far, by name."""
        return {site: self._epsilon(events) for site, events in self._read(TRAIN)[0].items()}

    def _charge(self, round_number: int, sites: Iterable[str], purpose: Purpose = TRAIN) -> tuple[Entry, ...]:
        before = _before(round_number, self._read(purpose)[1])
        charges = [
            Charge(
                id=release_id(self._run, purpose, round_number, site),
                dataset=site,
                run=self._run,
                round=round_number,
                attempt=0,  # a retry of the round releases the same again
                what="update" if purpose == TRAIN else "evaluation",
                event=to_json(self.terms.cost(purpose, before[site])),
                delta=self.terms.delta,
            )
            for site in sites
        ]
        return self._ledger.charge_all(charges, None)

    def _read(self, purpose: Purpose) -> tuple[dict[str, list[Event]], set[tuple[int, str]]]:
        """All events of each site, and the (round, site) pairs that are charged for one purpose."""
        events: dict[str, list[Event]] = {}
        paid = set()
        for entry in self._ledger.entries(self._run):
            events.setdefault(entry.charge.dataset, []).extend(from_json(entry.charge.event))
            if entry.charge.purpose == purpose:
                paid.add((entry.charge.round, entry.charge.dataset))
        return events, paid

    def _epsilon(self, events: Sequence[Event]) -> float:
        return epsilon_of(events, self.terms.delta, self.terms.accountant)


def _before(round_number: int, paid: Iterable[tuple[int, str]]) -> Counter[str]:
    """For each site its charged rounds before a round, of (round, site) pairs; a retry of the round finds the same."""
    return Counter(site for number, site in paid if number < round_number)
