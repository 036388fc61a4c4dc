"""One sum over a cohort, in clear or under masks, in as many attempts as the plan allows.

The steps have the numbers of `round.py`, whose middle this is; an evaluation at the sites is the same without training.

1. Journal the attempt before anything is asked of a site.
2. Advertise: each site returns signed one-time keys.
3. Share: each site checks the keys of the others and returns encrypted shares.
4. Update: each site makes its vector and returns it, masked; vectors fold into one accumulator as they arrive.
5. Consistency: the survivors sign the one list of survivors.
6. Unmask: journal that list, then ask for the shares. Too few, here or before: the attempt ends with nothing opened.
7. Charge the ledger; then open: take the masks off the accumulator and decode it.

Without the secure sum only 1, 4 and 7 remain, and the decoded sum is the same to the last bit.

A site answers one list of survivors in a round and no other (`aggregation/secure_sum.py` says why). So once shares were
asked for, later attempts at the same sum go to just those survivors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cloister.aggregation.average import Opened, PlainSum, SumLayout
from cloister.aggregation.secure_messages import (
    Advertise,
    Confirm,
    Masked,
    Message,
    Reveal,
    Shares,
    from_bytes,
    to_bytes,
)
from cloister.aggregation.secure_sum import Coordinator
from cloister.aggregation.sums import TRAIN, contract_for, layout_for
from cloister.lm.layout import Layout
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import CloisterError, SecureSumError, TooFewSitesError, UpdateError
from cloister.protocol.messages import Agree, Agreed, Contribution, Evaluate, Failure, Reply, Request, Train
from cloister.protocol.plan import Plan
from cloister.protocol.roster import Roster
from cloister.server import journal as steps
from cloister.server.journal import Journal
from cloister.server.progress import AttemptFailed, Observer, RoundStarted, SiteAnswered, SiteFailed
from cloister.server.spending import Spending

M = TypeVar("M", Advertise, Shares, Confirm, Reveal)


class Channel(Protocol):
    """What the coordinator needs of whatever carries its messages."""

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites that have joined, sorted."""

    @property
    def refusals(self) -> Sequence[Failure]:
        """Sites that refused to join, by their own policy or budget."""

    def ask(
        self,
        sites: Iterable[str],
        request: Request,
        deadline_s: float,
        private: Mapping[str, bytes] | None = None,
    ) -> Iterator[Reply | Failure]:
        """Send one request to each site, with bytes for it alone where there are any.

        Yields what comes back until the deadline, one answer for each site, as it comes.
        """


@dataclass(frozen=True)
class Party:
    """The coordinator's side of a run's sums."""

    plan: Plan
    run: str
    """Identity of the run."""
    roster: Roster | None
    """The sites' identities; None where the plan sums in clear."""
    layout: Layout
    """Layout of the trained parameters."""
    channel: Channel
    journal: Journal
    observe: Observer
    clock: Callable[[], float] = time.monotonic
    base_hash: str = ""
    """Hash of the frozen parameters that the sites use, in hex; empty: those that the plan gives."""
    spending: Spending | None = None
    """The coordinator's privacy ledger; None without a privacy unit."""
    refused: set[str] = field(default_factory=set)
    """Sites whose policy or budget forbids them to go on: asking them again is of no use."""


@dataclass(frozen=True)
class Total:
    """A sum that was opened."""

    opened: Opened
    sites: int
    """Sites whose vectors are in it."""
    cohort: int
    attempts: int
    seconds: float
    """From the first request of the attempt that counted to the decoded sum."""


@dataclass(frozen=True)
class Failed:
    """All attempts at a sum ended with too few sites."""

    attempts: int
    """Attempts that failed."""
    bound: bool
    """Shares were asked for in one of them: the sites that answered will answer for no other survivors."""


def sum_over(
    party: Party, purpose: str, cohort: Sequence[str], needed: int, ask: Callable[[int], Train | Evaluate]
) -> Total | Failed:
    """Sum over a cohort, in as many attempts as the plan allows.

    Args:
        party: The run.
        purpose: `train` or `evaluate`.
        cohort: The sites.
        needed: Fewest sites in the sum for it to count.
        ask: The request of step 4, given the number of the try.
    """
    plan, journal, number = party.plan, party.journal, ask(1).round
    failures = journal.count(f"{purpose} {steps.FAILED}", number)  # by earlier processes too
    last = failures + plan.cohort.attempts
    while True:
        unmasking = journal.newest(f"{purpose} {steps.UNMASKING}", number)
        if failures >= last:
            return Failed(failures, bound=unmasking is not None)
        sites = unmasking.detail["survivors"] if unmasking else list(cohort)
        # 1. Journal the attempt.
        attempt = journal.count(f"{purpose} {steps.BEGUN}", number) + 1
        journal.record(number, attempt, f"{purpose} {steps.BEGUN}", {"cohort": sites})
        party.observe(RoundStarted(number, attempt, purpose, tuple(sites)))
        started = party.clock()
        request = ask(failures + 1)
        kind = _Masked if plan.aggregation.secure else _Plain
        under_way = kind(party, purpose, sites, attempt, request, started + plan.cohort.deadline_s)
        try:
            opened = under_way.run(needed)
        except SecureSumError as error:
            failures += 1
            journal.record(number, attempt, f"{purpose} {steps.FAILED}", {"reason": str(error)})
            party.observe(AttemptFailed(number, attempt, str(error)))
            continue
        return Total(opened, len(under_way.folded), len(sites), attempt, party.clock() - started)


class _Plain:
    """One attempt in clear."""

    def __init__(
        self,
        party: Party,
        purpose: str,
        sites: Sequence[str],
        attempt: int,
        request: Train | Evaluate,
        until: float,
    ) -> None:
        self.party = party
        self.purpose = purpose
        self.sites = sites
        self.attempt = attempt
        self.request = request
        self.until = until
        self.folded: set[str] = set()
        self.sum_layout: SumLayout = layout_for(purpose, party.plan, party.layout.size)

    def run(self, needed: int) -> Opened:
        """Carry the attempt through.

        Raises:
            SecureSumError: too few sites are left.
        """
        total = PlainSum(self.sum_layout)
        self.collect(self.sites, None, lambda contribution: total.add(contribution.vector))
        self.check_needed(needed)
        self.pay()
        return total.open()

    def pay(self) -> None:
        """7. Charge the ledger before the sum is opened."""
        if self.party.spending is not None and self.purpose == TRAIN:
            self.party.spending.before_opening(self.request.round, sorted(self.folded))

    def check_needed(self, needed: int) -> None:
        """End the attempt when too few vectors have arrived.

        Raises:
            TooFewSitesError: they have.
        """
        if len(self.folded) < needed:
            raise TooFewSitesError("updates", len(self.folded), expected=f"those of {needed} sites at least")

    def collect(
        self, sites: Sequence[str], private: Mapping[str, bytes] | None, fold: Callable[[Contribution], None]
    ) -> None:
        """4. Update: fold in each vector as it arrives."""
        if self.party.spending is not None and self.purpose == TRAIN:
            self.party.spending.before_training(self.request.round, sites)
        for reply in self.ask(sites, self.request, private):
            refusal = _not_of(reply, self.request)
            if refusal is None:
                assert isinstance(reply, Contribution)
                try:
                    fold(reply)
                except (UpdateError, SecureSumError) as error:
                    refusal = str(error)
            if refusal is None:
                self.folded.add(reply.site)
                self.party.observe(SiteAnswered(self.request.round, reply.site))
            else:
                self.drop(reply.site, refusal, refused=isinstance(reply, Failure) and reply.refused)

    def ask(
        self, sites: Iterable[str], request: Request, private: Mapping[str, bytes] | None
    ) -> Iterator[Reply | Failure]:
        """Ask what is left of the attempt's time long."""
        left = max(0.0, self.until - self.party.clock())
        return self.party.channel.ask(sites, request, left, private)

    def drop(self, site: str, reason: str, *, refused: bool = False) -> None:
        """A site is out of this attempt."""
        if refused:
            self.party.refused.add(site)
            detail = {"site": site, "reason": reason}
            self.party.journal.record(self.request.round, self.attempt, steps.REFUSED, detail)
        self.party.observe(SiteFailed(self.request.round, site, reason))


class _Masked(_Plain):
    """One attempt under masks."""

    def run(self, needed: int) -> Opened:
        """Carry the attempt through.

        Raises:
            SecureSumError: too few sites are left, or what they sent does not fit together; nothing was opened.
        """
        party, request = self.party, self.request
        assert party.roster is not None, "a plan that sums securely was started without a roster"
        layout = party.layout
        contract = contract_for(
            self.purpose,
            party.plan,
            party.roster,
            party.run,
            layout.size,
            layout.digest() + party.base_hash,
        )
        model = bytes.fromhex(request.model_hash)
        coordinator = Coordinator(contract, request.round, self.attempt, model, self.sites)
        # 2. Advertise.
        begin = to_bytes(coordinator.begin)
        left = self.step(1, dict.fromkeys(self.sites, begin), Advertise, coordinator.advertised)
        # 3. Share.
        peers = to_bytes(coordinator.peers())
        left = self.step(2, dict.fromkeys(left, peers), Shares, coordinator.shared)
        # 4. Update.
        inboxes = {site: to_bytes(inbox) for site, inbox in coordinator.inboxes().items()}
        self.collect(sorted(inboxes), inboxes, lambda contribution: _fold(coordinator, contribution))
        self.check_needed(needed)
        # 5. Consistency.
        survivors = coordinator.survivors()
        asked = dict.fromkeys(survivors.survivors, to_bytes(survivors))
        self.step(4, asked, Confirm, coordinator.confirmed)
        # 6. Unmask.
        unmask = coordinator.request()
        detail = {"survivors": list(unmask.survivors)}
        party.journal.record(request.round, self.attempt, f"{self.purpose} {steps.UNMASKING}", detail)
        self.step(5, dict.fromkeys(unmask.survivors, to_bytes(unmask)), Reveal, coordinator.revealed)
        # 7. Charge, then open.
        self.pay()
        return self.sum_layout.open(coordinator.sum(threads=len(os.sched_getaffinity(0))))

    def step(
        self, number: int, private: Mapping[str, bytes], kind: type[M], take: Callable[[M], None]
    ) -> list[str]:
        """Ask sites for one step of the protocol; the sites whose answer stands."""
        plan, request = self.party.plan, self.request
        agree = Agree(
            plan.to_json(), self.party.run, self.purpose, number, request.round, request.tries, request.base
        )
        left = []
        for reply in self.ask(sorted(private), agree, private):
            match reply:
                case Agreed():
                    try:
                        message = from_bytes(kind, reply.body)
                        _check_sender(message, reply.site)
                        take(message)
                    except CloisterError as error:
                        self.drop(reply.site, str(error))
                    else:
                        left.append(reply.site)
                case Failure():
                    self.drop(reply.site, reply.reason, refused=reply.refused)
                case _:
                    self.drop(reply.site, f"it answered with {type(reply).__name__}")
        return left


def _fold(coordinator: Coordinator, contribution: Contribution) -> None:
    statement = from_bytes(Masked, contribution.statement)
    _check_sender(statement, contribution.site)
    digest = vector_hash(contribution.vector)
    if digest != statement.digest:
        raise UpdateError(f"masked vector of {contribution.site}", expected="the bytes that the site signed")
    coordinator.fold(statement, contribution.vector)


def _check_sender(message: Message, site: str) -> None:
    if getattr(message, "site", site) != site:
        raise UpdateError(f"message of {site}", getattr(message, "site", None), expected="its own name in it")


def _not_of(reply: Reply | Failure, request: Train | Evaluate) -> str | None:
    """Why a reply is no contribution to what was asked, in one line; None when it is one."""
    match reply:
        case Failure():
            return reply.reason
        case Contribution() if (reply.round, reply.model_hash) == (request.round, request.model_hash):
            return None
        case Contribution():
            return f"its update is for round {reply.round} or another model, not for round {request.round}"
        case _:
            return f"it answered with {type(reply).__name__}, not with a contribution"
