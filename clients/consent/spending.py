"""The spending of a site's data: its own ledger, charged durably before any record is used."""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Sequence, Set
from pathlib import Path

from cloister.clients.setup.config import SiteConfig
from cloister.privacy.accounting.accountant import composed, epsilon_of
from cloister.privacy.accounting.claims import unit
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import Budget, Charge, Entry, History, Ledger, read_history, release_id
from cloister.privacy.ledger.policy import Policy
from cloister.privacy.mechanism.events import Event, from_json, to_json
from cloister.protocol.errors import BudgetError, LedgerError, PlanError, PolicyError, StaleError
from cloister.protocol.machine.storage import on_disk, write_bytes
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose
from cloister.protocol.plan.plan import Plan


class Spending:
    """The privacy ledger of one site.

    Args:
        config: The site's configuration.
        dataset: In a simulation, the ledger over runs that all sites charge as well.
    """

    def __init__(self, config: SiteConfig, dataset: DatasetLedger | None = None) -> None:
        self._config = config
        self._shared = dataset

    def pay(
        self,
        plan: Plan,
        terms: Terms,
        run: str,
        round_number: int,
        rounds: int,
        policy: Policy | None,
        purpose: Purpose = TRAIN,
    ) -> Entry:
        """Charge the site's ledger for a round, or for the evaluation of its model, durably, before a record is used.

        Training again, after a crash that lost the update, is another release and another charge. Correlated noise is
        charged for the whole run in the first round. Each later round has a charge without events: the record of the
        site's rounds, by which it checks that they keep to the pattern that was paid for.

        Args:
            plan: The plan.
            terms: Its privacy.
            run: Identity of the run.
            round_number: The round.
            rounds: Rounds of the plan that draw this site.
            policy: The site's demands.
            purpose: Of the sum.

        Returns:
            The entry of the site's ledger.

        Raises:
            StaleError: a later round of that purpose is charged, so that the round's own vector may have been released
                and removed.
            BudgetError: the policy or the plan does not allow the charge; nothing was charged.
            PolicyError: with correlated noise, the round is too near another one of the site, or one too many.
        """
        budget = None
        if policy is not None and policy.greatest_epsilon is not None:
            budget = Budget(policy.greatest_epsilon, policy.greatest_delta or terms.delta)
        most = terms.allowed(rounds, plan.cohort.attempts)
        rounds_paid = [
            entry.charge.round for entry in self._ledger.entries(run) if entry.charge.purpose == purpose
        ]
        if round_number < (newest := max(rounds_paid, default=0)):
            raise StaleError(
                "round", round_number, expected=f"{newest} or later, because that round is charged already"
            )
        events = terms.cost(purpose, len(set(rounds_paid)))

        def check_run(entries: tuple[Entry, ...]) -> None:
            """Check the plan's bounds on one run, which hold for every request of the coordinator."""
            self._check_newest(entries)
            earlier = [entry.charge for entry in entries if entry.charge.run == run]
            alike = [charge for charge in earlier if charge.purpose == purpose]
            self._check_pattern(plan, round_number, {charge.round for charge in alike})
            self._check_room(terms, purpose, alike, events, plan.cohort.attempts, most)

        if self._shared is not None:  # first: after a crash in between, the same charge is found there again
            times = rounds_paid.count(round_number)
            self._shared.pay(run, round_number, self._config.name, times, events, purpose)
        charge = self._charge(plan, run, round_number, events, purpose)
        return self._noted(self._ledger.charge(charge, budget, check_run))

    def _check_room(
        self,
        terms: Terms,
        purpose: Purpose,
        alike: Sequence[Charge],
        events: Sequence[Event],
        again: int,
        most: float,
    ) -> None:
        """Check that one more contribution stays within what the plan allows.

        Args:
            terms: The plan's privacy.
            purpose: Of the contribution.
            alike: The earlier charges of the run for that purpose.
            events: What the contribution costs.
            again: As in `Terms.allowed`.
            most: What that returned.

        Raises:
            BudgetError: it does not.
        """
        reserved, name = terms.reserved(again), self._config.name
        if purpose == EVALUATE:
            if len(alike) >= len(reserved):
                raise BudgetError(
                    f"evaluations of {name} in this run",
                    len(alike) + 1,
                    expected=f"at most the {len(reserved)} that the plan allows for it",
                )
            return
        before = [event for charge in alike for event in from_json(charge.event)]
        spent = epsilon_of((*before, *events, *reserved), terms.delta, terms.accountant)
        if spent > most:
            raise BudgetError(
                f"epsilon of {name} in this run",
                spent,
                expected=f"at most the {most:g} that the plan allows for it",
            )

    def check_paid(self, run: str, round_number: int, purpose: Purpose = TRAIN) -> None:
        """Check, before a kept vector is sent again, that the site's ledger still has its last charge, and in a
        simulation the ledger over runs that of the vector.

        Raises:
            LedgerError, StorageError: it has not, or cannot be read.
        """
        self.history()
        if self._shared is not None:
            self._shared.check_paid(run, round_number, purpose)

    def after(self, plan: Plan, terms: Terms, run: str, rounds: int, delta: float | None) -> float:
        """Epsilon of the site's data at the end of the run, with everything that earlier runs have spent (`over_runs`).

        It is computed at several messages of a round, so the ledger is read once and not locked. Nothing is reserved:
        `pay` checks again, in the transaction that charges. Each evaluation of the plan counts, also one that does not
        draw this site.

        Args:
            plan: The plan.
            terms: Its privacy.
            run: Identity of the run, of which some rounds may be charged already.
            rounds: Rounds of the plan that draw this site.
            delta: Delta at which epsilon is stated; None: the plan's.

        Raises:
            LedgerError: the ledger is damaged or altered, or has another owner.
            StorageError: it cannot be read.
        """
        history = self.history()
        mine = [entry.charge for entry in history.entries if entry.charge.run == run]
        paid = len({charge.round for charge in mine if charge.purpose == TRAIN})
        evaluated = len({charge.round for charge in mine if charge.purpose == EVALUATE})
        training = terms.events(rounds - paid, paid) if rounds > paid else ()
        coming = [to_json(each) for each in (training, terms.evaluations[evaluated:]) if each]
        return composed([*history.events(self._config.data_name), *coming], delta or terms.delta)

    def history(self) -> History:
        """What the site's ledger holds.

        Raises:
            LedgerError: the ledger is damaged, altered, lost or older, or has another owner.
            StorageError: it cannot be read.
        """
        history = History(())
        if self._path.exists():
            history = read_history(self._path).of_owner(self._config.name)
        self._check_newest(history.entries)
        return history

    def _check_newest(self, entries: Sequence[Entry]) -> None:
        """Check that the ledger has the last charge that the site has made on its data, in whatever file.

        Raises:
            LedgerError: it is lost, older, such as a restored backup, or another one.
        """
        head = self._heads().get(self._config.data_name)
        if head is not None and all(entry.hash.hex() != head for entry in entries):
            raise LedgerError(
                str(self._path),
                f"{len(entries)} charges",
                expected=f"the charge with the hash {head}, the last of this site on {self._config.data_name!r}",
                fix=f"restore its newest copy; if it is lost, so is what was spent: remove {self._head_file} to go on",
            )

    def _noted(self, entry: Entry) -> Entry:
        """Note a charge as the last one on its data, durably; unless another process has noted a later one."""
        name = self._config.data_name
        with on_disk(self._head_file), self._head_file.with_suffix(".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            heads = self._heads()
            numbers = {each.hash.hex(): each.number for each in self._ledger.entries()}
            if numbers.get(heads.get(name, ""), 0) < entry.number:
                write_bytes(self._head_file, json.dumps(heads | {name: entry.hash.hex()}).encode())
        return entry

    def _heads(self) -> dict[str, str]:
        """The hash of the last charge by the name of the data, which a folder that is moved or linked does not change;
        none where the file is missing.

        Raises:
            LedgerError: it is damaged.
        """
        try:
            return dict(json.loads(self._head_file.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise LedgerError(
                str(self._head_file),
                expected=f"the last charge of each dataset ({error})",
                fix="compare the ledger with cloister logs of the site, and remove the file to go on",
            ) from error

    @property
    def _head_file(self) -> Path:
        return self._config.folder / "ledger-heads.json"

    def _check_pattern(self, plan: Plan, round_number: int, charged: Set[int]) -> None:
        """Check that a round keeps to the pattern for which correlated noise protects the site.

        The last round may be trained again, after a crash that lost its update.

        Args:
            plan: The plan.
            round_number: The round.
            charged: The rounds of the run that are charged.

        Raises:
            PolicyError: it is too near another one, or one too many.
        """
        pattern = plan.privacy.correlated
        if pattern is None or not charged or round_number == max(charged):
            return
        first = max(charged) + pattern.separation
        if round_number < first:
            raise PolicyError(
                "round",
                round_number,
                expected=f"round {first} or later: {self._config.name} was in round {max(charged)}, and the noise "
                f"covers rounds of a site that are at least {pattern.separation} apart",
            )
        if len(charged) >= pattern.participations:
            raise PolicyError(
                "round",
                round_number,
                expected=f"no more rounds: {self._config.name} was in {len(charged)}, the most that the noise covers",
            )

    def check_outlives_runs(self) -> None:
        """Check that ledger and data set have names that persist across runs, as a limit over runs requires.

        Raises:
            PlanError: the data set has no name, or the ledger is not a file outside the state folder.
        """
        config = self._config
        if not config.dataset:
            raise PlanError(
                f"dataset of {config.name}",
                expected="a name in the site's TOML, because its policy limits the epsilon of its data",
            )
        if not config.ledger or Path(config.ledger).resolve().is_relative_to(config.folder.resolve()):
            raise PlanError(
                f"ledger of {config.name}",
                config.ledger,
                expected="a file outside the state folder, because the site's policy limits epsilon over runs",
            )

    @property
    def _path(self) -> Path:
        return Path(self._config.ledger) if self._config.ledger else self._config.folder / "ledger.sqlite"

    @property
    def _ledger(self) -> Ledger:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return Ledger(self._path, self._config.name, composed)

    def _charge(
        self, plan: Plan, run: str, round_number: int, events: Sequence[Event], purpose: Purpose
    ) -> Charge:
        protected = unit(plan) if plan.privacy.dpsgd else "all data of the site"
        trained = "update" if plan.question is None else "answer"
        return Charge(
            id=release_id(run, purpose, round_number, secrets.token_hex(8)),
            dataset=self._config.data_name,
            run=run,
            round=round_number,
            attempt=0,
            what=f"{trained if purpose == TRAIN else 'evaluation'}, per {protected}",
            event=to_json(events),
            delta=plan.privacy.delta,
        )
