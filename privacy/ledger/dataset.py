"""What all runs of simulations on one dataset cost together: a ledger that outlives the run folders.

A unit (`privacy.unit`) is at one site of a run, and each run may partition the dataset in another way. So a run costs a
unit what one site was charged, and never more than the most that any site was charged, round by round. All sites of a
run charge the same ledger: the k-th charge of a round has one id at every site. The first site writes it and the others
find it, so the ledger holds, for each round, the charges of the site with most. A unit in another place in another run
is charged at least its own site's events there, and the sum over runs is an upper bound.

- An owner with records at several sites is part of each: unless the partition keeps owners together, every site is
  charged on its own.
- Under unit `site` all runs divide the dataset in the same way: the charges name the division, and a site of another
  one is another unit.
- Correlated noise is charged for a whole run at once. Sites begin in different rounds, and the first to begin writes
  the charge, under round 1.
- A dataset is charged in one unit: the costs of different units do not add up to that of one of them.
- Runs may be planned after seeing the results of earlier ones: a limit over runs whose mechanisms differ holds at twice
  its delta (`accountant.spent`).
- The trials of a search under a privacy unit (`cloister tune`) are runs like others: each charges the rounds that it
  releases.

Refused: the coordinator alone as the one who charges, because a site must not train before its data is paid for; and
one dataset for each site, whose names mean other records in the next run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cloister.privacy.accounting.accountant import Spent, over_runs
from cloister.privacy.accounting.claims import charged_unit
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.accounting.trust import Shares, shares
from cloister.privacy.ledger.ledger import Budget, Charge, Entry, History, Ledger, read_history, release_id
from cloister.privacy.mechanism.events import Event, to_json
from cloister.protocol.errors import BudgetError, LedgerError, PlanError
from cloister.protocol.machine.storage import on_disk, sync
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose
from cloister.protocol.plan.plan import Plan

OWNER = "simulation"
_NO_RUNS: Mapping[str, Iterable[int]] = {}


@dataclass(frozen=True)
class DatasetSpent:
    """What a dataset has spent over its runs."""

    runs: int
    """Runs that were charged."""
    epsilon: float
    """Epsilon of all of them together."""
    delta: float
    """The delta for which it holds: the plan's, or twice that if their mechanisms differ."""
    head: str
    """Head of the ledger, in hex."""
    shares: Shares | None
    """The share of questions, and the cost against all other parties together; None: no run is a question."""


class DatasetLedger:
    """The charges of a plan's dataset over all runs: `simulation.ledger` and `simulation.dataset`.

    Args:
        plan: A plan that names both.

    Raises:
        PlanError: a question or an evaluation by the sites may have an owner at several of them.
    """

    def __init__(self, plan: Plan) -> None:
        simulation = plan.simulation
        self.path = Path(simulation.ledger)
        self.dataset = simulation.dataset
        self.limit = simulation.greatest_epsilon
        self._budget = None if self.limit is None else Budget(self.limit, plan.privacy.delta)
        self._plan = plan
        self._at_several_sites = plan.owners_divided
        if self._at_several_sites and plan.question is not None:
            self._at_several_sites = False  # one charge is for all of them
            if plan.question.sites_of_owner < plan.cohort.size():
                _refuse_copies(
                    "question.sites_of_owner",
                    plan.question.sites_of_owner,
                    f"{plan.cohort.size()}, the number of sites,",
                    "set question.sites_of_owner so",
                )
        elif self._at_several_sites and plan.charged_evaluations:
            field = "server.evaluation_epsilon"
            _refuse_copies(field, plan.server.evaluation_epsilon, "no value", f"remove {field}")

    @classmethod
    def of(cls, plan: Plan) -> DatasetLedger | None:
        """The ledger that a plan names, or None."""
        return cls(plan) if plan.simulation.ledger else None

    def pay(
        self,
        run: str,
        round_number: int,
        site: str,
        times: int,
        events: Sequence[Event],
        purpose: Purpose = TRAIN,
    ) -> None:
        """Charge what a site is about to release, durably, in one transaction with the check of the limit.

        Args:
            run: Identity of the run.
            round_number: The round.
            site: The site that trains.
            times: How often this site was charged for this round before; more than 0 after a crash.
            events: The site's events of this charge; none with correlated noise after its first round.
            purpose: Of the sum.

        Raises:
            BudgetError: the limit over all runs would be exceeded, or the dataset is charged in another unit.
            LedgerError, StorageError: the ledger is missing or damaged, or cannot be written.
        """
        if not events:
            return
        charge = self._charge(run, round_number, site, times, events, purpose)
        self._history()  # of a ledger that is there: a lost one is not created again
        _note(
            self._head_file,
            Ledger(self.path, OWNER, self._compose).charge(charge, self._budget, self._check_unit),
        )

    def check(
        self,
        terms: Terms,
        run: str,
        summed: Sequence[int],
        sites: Sequence[str],
        evaluated: Sequence[int] = (),
    ) -> None:
        """Create the ledger for a run that begins, and check that the run can begin, or go on.

        Args:
            terms: The plan's privacy.
            run: Identity of a run that has begun; empty for a new one.
            summed: Its rounds whose sum was opened.
            sites: The sites.
            evaluated: Its rounds whose model was evaluated by the sites, which were charged for it.

        Raises:
            BudgetError: nothing is charged for the run, and its first round would exceed the limit, or with evaluations
                that are charged, all of it; or the dataset is charged in another unit.
            LedgerError: the ledger is damaged, or lacks charges of the run, or is missing though the run has begun.
            StorageError: it cannot be written.
        """
        if not run:  # else it is not created again, without what was spent
            self.create()
        history = self._history()
        entries = history.entries
        self._check_unit(entries)
        self._check_complete(entries, run, TRAIN, summed)
        self._check_complete(entries, run, EVALUATE, evaluated)
        last = 1 if terms.evaluated is None else self._plan.run.rounds
        if self.limit is None or any(entry.charge.run == run for entry in entries):
            return
        with_it = self._coming(terms, run or "a new run", range(1, last + 1), sites)
        if with_it is not None and with_it.epsilon > self.limit:
            spent = self._cost(history.events(self.dataset)).epsilon
            room = "one more round" if terms.evaluated is None else "all rounds and evaluations of the run"
            needed = f"with which it is {with_it.epsilon:.4g} at delta {with_it.delta:g}"
            raise BudgetError(
                f"epsilon of the dataset {self.dataset!r} in {self.path}",
                spent,
                expected=f"room for {room}, {needed}, within simulation.greatest_epsilon = {self.limit:g}",
                fix="no run was begun and nothing was charged; only the party responsible for the data can raise the "
                "limit",
            )

    def check_paid(self, run: str, round_number: int, purpose: Purpose = TRAIN) -> None:
        """Check, before a kept vector is sent again, that the ledger still has its charge.

        Raises:
            LedgerError: the ledger is missing, damaged or altered, or lacks the charge.
            StorageError: it cannot be read.
        """
        self._check_complete(self._history().entries, run, purpose, [round_number])

    def affords(self, terms: Terms, run: str, round_number: int, sites: Iterable[str]) -> bool:
        """Whether a round of these sites stays within the limit over all runs, with all evaluations that are to come;
        `pay` checks it again."""
        if self.limit is None:
            return True
        with_it = self._coming(terms, run, [round_number], sites)
        return with_it is None or with_it.epsilon <= self.limit

    def _coming(self, terms: Terms, run: str, rounds: Iterable[int], sites: Iterable[str]) -> Spent | None:
        """The cost of all runs with further rounds and all evaluations of a run; None if they are paid."""
        history, due = self._history(), () if terms.evaluated is None else terms.evaluated.due
        sums = [(TRAIN, number) for number in rounds] + [(EVALUATE, number) for number in due]
        charges = [
            self._charge(run, number, site, 0, terms.cost(purpose), purpose)
            for site in sites
            for purpose, number in sums
        ]
        paid = {entry.charge.id for entry in history.entries}
        coming = {charge.id: charge.event for charge in charges if charge.id not in paid}
        return self._cost([*history.events(self.dataset), *coming.values()]) if coming else None

    def spent(
        self,
        summed: Mapping[str, Iterable[int]] = _NO_RUNS,
        evaluated: Mapping[str, Iterable[int]] = _NO_RUNS,
    ) -> DatasetSpent:
        """What the dataset has spent over all runs, at the plan's delta.

        Args:
            summed: By identity of a run that must be among them, its rounds whose sum was opened.
            evaluated: By identity of a run, its rounds whose model was evaluated by the sites, which were charged.

        Raises:
            BudgetError: the dataset is charged in another unit.
            LedgerError: the ledger is missing, damaged or altered, or lacks charges of these runs.
            StorageError: it cannot be read.
        """
        history = self._history()
        self._check_unit(history.entries)
        for purpose, released in ((TRAIN, summed), (EVALUATE, evaluated)):
            for run, rounds in released.items():
                self._check_complete(history.entries, run, purpose, rounds)
        runs = {entry.charge.run for entry in history.entries if entry.charge.dataset == self.dataset}
        charges, privacy = history.events(self.dataset), self._plan.privacy
        cost, parts = self._cost(charges), shares(charges, privacy.delta, privacy.accountant)
        return DatasetSpent(len(runs), cost.epsilon, cost.delta, history.head.hex(), parts)

    def create(self) -> None:
        """Create the ledger if it is missing.

        Raises:
            LedgerError: there is another file, or it is damaged or altered.
            StorageError: it cannot be written.
        """
        Ledger(self.path, OWNER, self._compose)

    def whole(self, terms: Terms) -> tuple[Event, ...]:
        """What all rounds and evaluations of the plan cost a unit at most: an owner who may be at several sites pays at
        each."""
        sites = self._plan.cohort.size() if self._at_several_sites else 1
        return terms.whole(self._plan.run.rounds) * sites

    def after(self, charges: Sequence[str]) -> Spent:
        """What the dataset will have spent after further charges, each as JSON, with all that its ledger holds, if any.

        Raises:
            BudgetError: the dataset is charged in another unit.
            LedgerError, StorageError: the ledger is damaged or altered, or cannot be read.
        """
        history = self._history() if self.path.is_file() else History(())
        self._check_unit(history.entries)
        return self._cost([*history.events(self.dataset), *charges])

    def _charge(
        self,
        run: str,
        round_number: int,
        site: str,
        times: int,
        events: Sequence[Event],
        purpose: Purpose = TRAIN,
    ) -> Charge:
        number = 1 if self._plan.privacy.correlated is not None else round_number
        where = (site,) if self._at_several_sites else ()
        return Charge(
            id=release_id(run, purpose, number, *where, times),
            dataset=self.dataset,
            run=run,
            round=number,
            attempt=times,
            what=f"update, per {charged_unit(self._plan)}",
            event=to_json(events),
            delta=self._plan.privacy.delta,
        )

    def _check_unit(self, entries: Iterable[Entry]) -> None:
        own = f"update, per {charged_unit(self._plan)}"
        for entry in entries:
            if entry.charge.dataset == self.dataset and entry.charge.what != own:
                raise BudgetError(
                    f"dataset {self.dataset!r} in {self.path}",
                    entry.charge.what,
                    expected=f"{own}, as this plan: epsilons of different units do not add up",
                    fix="protect the same unit as its earlier runs, with unit site in the same division of the "
                    "records, or charge another ledger",
                )

    def _check_complete(
        self, entries: Iterable[Entry], run: str, purpose: Purpose, summed: Iterable[int]
    ) -> None:
        charges = (entry.charge for entry in entries if entry.charge.run == run)
        charged = {charge.round for charge in charges if charge.purpose == purpose}
        what = "round" if purpose == TRAIN else "the evaluation of round"
        needed = {1 if self._plan.privacy.correlated is not None else number for number in summed}
        for number in sorted(needed - charged):
            raise LedgerError(
                str(self.path),
                expected=f"a charge of the dataset {self.dataset!r} for {what} {number} of the run {run}",
                fix="the ledger was replaced or lost: restore it from a backup",
            )

    def _cost(self, events: Sequence[str]) -> Spent:
        return over_runs(events, self._plan.privacy.delta, self._plan.privacy.accountant)

    def _compose(self, events: Sequence[str], delta: float) -> float:
        return over_runs(events, delta, self._plan.privacy.accountant).epsilon

    def _history(self) -> History:
        if not self.path.is_file():
            raise LedgerError(str(self.path), expected="the ledger of the dataset, which is missing")
        _, noted = _noted(self._head_file)  # before the ledger is read, which may have newer charges
        history = read_history(self.path).of_owner(OWNER)
        if noted and all(entry.hash != noted for entry in history.entries):
            raise LedgerError(
                str(self.path),
                f"{len(history.entries)} charges",
                expected=f"the charge with the hash {noted.hex()}, the last that was made",
                fix=f"restore its newest copy; if it is lost, so is what was spent: remove {self._head_file} to go on",
            )
        return history

    @property
    def _head_file(self) -> Path:
        """Has the hash of the last charge, by which an earlier copy of the ledger is noticed."""
        return self.path.with_name(f"{self.path.name}.head")


def _note(path: Path, entry: Entry) -> None:
    """Note a charge as the last one, durably; unless another process has noted a later one.

    Written in place, at once: a kill leaves the one before, or this one.
    """
    with on_disk(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _noted(path)[0] < entry.number:
                os.pwrite(descriptor, f"{entry.number:020} {entry.hash.hex()}\n".encode(), 0)
                sync(descriptor)
        finally:
            os.close(descriptor)


def _noted(path: Path) -> tuple[int, bytes]:
    """The number and the hash of the last charge; 0 and empty where none is noted.

    Raises:
        LedgerError: the file is damaged.
    """
    try:
        number, _, head = path.read_text(encoding="ascii").partition(" ")
        return int(number or "0"), bytes.fromhex(head)
    except FileNotFoundError:
        return 0, b""
    except (OSError, ValueError) as error:
        raise LedgerError(
            str(path),
            expected=f"the hash of the last charge ({error})",
            fix="compare the ledger with the reports of its runs, and remove the file to go on",
        ) from error


def _refuse_copies(field: str, value: object, right: str, fix: str) -> NoReturn:
    """Refuse the vectors of one owner at several sites in one sum, which charges of single sites do not cover."""
    raise PlanError(
        field,
        value,
        expected=f"{right} with a ledger: in this division any of the sites may have records of an owner, and the "
        "vectors of all are in one sum",
        fix=f"{fix}, or each owner at one site (simulation.field is data.owner)",
    )
