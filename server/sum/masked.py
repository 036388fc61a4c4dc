"""One attempt under masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_sum import ring_dtype
from cloister.aggregation.vector.average import Opened
from cloister.aggregation.vector.span import manifest_digest
from cloister.protocol.errors import CloisterError, ParameterError, UpdateError
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    Advertise,
    Agree,
    Confirm,
    Contribution,
    Reply,
    Reveal,
    Shares,
    Survivors,
    Told,
)
from cloister.server.record import journal as steps
from cloister.server.record.progress import SiteFailed
from cloister.server.sum.channel import Failure
from cloister.server.sum.complaints import Complaint, liars
from cloister.server.sum.plain import Attempt, Plain, pieces_of
from cloister.server.sum.wanted import Asks

M = TypeVar("M", Advertise, Shares, Confirm, Reveal)


class Masked(Plain):
    """One attempt under masks.

    Args:
        attempt: The attempt.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.kept = self.party.kept.of_group(self.wanted.group)

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt.

        Raises:
            SecureSumError: too few sites are left, or their messages are inconsistent; nothing was opened.
        """
        party, wanted = self.party, self.wanted
        assert party.roster is not None, "a plan that sums securely needs a roster"
        division = self.told.sum.division
        contract = self.sums.contract(wanted.purpose, party.run, party.roster, wanted.group, division)
        coordinator = SecureCoordinator(
            contract,
            wanted.round,
            self.attempt.number,
            instructions_digest(self.told),
            needed=needed,
            fresh=self.told.fresh,
            lengths=self.sum_layout.lengths(self.bounds) if contract.sketches else None,
        )
        if coordinator.attempt.parameters.n > self.sum_layout.ring.terms:
            raise ParameterError(
                "sites in the cohort",
                coordinator.attempt.parameters.n,
                expected=f"at most {self.sum_layout.ring.terms}, for which the ring has room",
            )
        try:
            return (yield from self._steps(coordinator))
        finally:
            self.course.unopened = frozenset(coordinator.found.unopened)
            self.course.apart = bool(coordinator.found.behind)
            too_long = coordinator.sketches.too_long if coordinator.sketches is not None else {}
            self.course.too_long = bool(too_long)
            new = self.complain(coordinator.complaints)
            most = coordinator.attempt.parameters.colluders
            self.leave_out(liars(party.complaints, party.present(coordinator.attempt.cohort), most))
            self.leave_out(coordinator.found.liars | too_long)
            self.show(new)

    def _steps(self, coordinator: SecureCoordinator) -> Asks[Opened]:
        # 2. Advertise.
        begin = dict.fromkeys(self.attempt.sites, coordinator.begin)
        yield from self.step(coordinator, begin, Advertise, coordinator.advertised)
        # 3. Share.
        try:
            keys = coordinator.peers()
        finally:  # named also where too few others are left
            for site in coordinator.found.behind:
                self.drop(
                    site,
                    "what it carries has another history than at most sites; it takes part in the next round",
                )
        peers = dict.fromkeys((each.site for each in keys.advertised), keys)
        yield from self.step(coordinator, peers, Shares, coordinator.shared)
        # 4. Update.
        survivors = yield from self.update(coordinator)
        # 5. Consistency.
        shown = dict.fromkeys(survivors.survivors, survivors)
        self.course.sketched = coordinator.contract.sketches
        yield from self.step(coordinator, shown, Confirm, coordinator.confirmed)
        self.course.behind = bool(coordinator.found.behind) or len(survivors.survivors) < len(keys.advertised)
        # 6. Unmask.
        requests = coordinator.request()
        self.note_survivors(steps.UNMASKING, survivors.survivors)
        revealed = yield from self.step(coordinator, requests, Reveal, coordinator.revealed)
        if lacking := coordinator.lacking:
            accused = {of for _, of in coordinator.complaints}.intersection(lacking)
            self.course.blamed = frozenset(accused or set(requests).difference(revealed))
        # 7. Charge, then open; of a sum that cannot be opened nothing is released.
        if not lacking:
            self.pay()
        total = coordinator.sum(threads=len(os.sched_getaffinity(0)))
        return self.sum_layout.open(total, len(survivors.survivors), self.bounds)

    def update(self, coordinator: SecureCoordinator) -> Asks[Survivors]:
        """4. Update: fold in the masked vectors, or take the sum that an earlier process has kept."""
        context, contract = coordinator.attempt.context, coordinator.contract
        inboxes = coordinator.inboxes()
        kept = self.kept.sum(context, ring_dtype(contract.ring_bits))
        if kept is None:
            yield from self.collect(inboxes, lambda contribution: self.fold(coordinator, contribution))
            survivors = coordinator.survivors()
            self.kept.keep_sum(context, *coordinator.folded)
            return survivors
        coordinator.fold_again(*kept)
        self.course.folded.update(statement.site for statement in kept[0])
        return coordinator.survivors()

    def complain(self, complaints: frozenset[Complaint]) -> frozenset[Complaint]:
        """Note new complaints, durably, and return them."""
        new = complaints - self.party.complaints
        self.course.complained = bool(new)
        if new:
            self.party.complaints.update(new)
            self.note(steps.COMPLAINED, pairs=sorted(new))
        return new

    def show(self, complaints: frozenset[Complaint]) -> None:
        """Show the complaints in which no site is known to lie, by the site that is complained of."""
        open_ = {pair for pair in complaints if self.party.left_out.keys().isdisjoint(pair)}
        for site in sorted({of for _, of in open_}):
            by = sorted(by for by, of in open_ if of == site)
            more = f" and {len(by) - 3} more" if len(by) > 3 else ""
            reason = f"{', '.join(by[:3])}{more} could not open its shares: one of each two lies"
            self.party.observe(SiteFailed(self.wanted.round, site, reason))

    def leave_out(self, liars: Mapping[str, str]) -> None:
        """Ask sites that lied for no other sum; durable, so that a resumed run does not ask them either."""
        for site, what in liars.items():
            self.party.left_out[site] = what
            self.note(steps.LEFT_OUT, site=site, reason=what)
            self.party.observe(SiteFailed(self.wanted.round, site, f"left out of all later sums: {what}"))

    def fold(self, coordinator: SecureCoordinator, contribution: Contribution) -> None:
        """Add a masked vector to the sum.

        Raises:
            UpdateError, SecureSumError: the vector does not match the statement that its site has signed.
        """
        site, statement = contribution.site, contribution.statement
        if statement is None or statement.site != site:
            raise UpdateError(f"statement of {site}", expected="one that the site itself has signed")
        if manifest_digest(contribution.manifest) != statement.digest:
            raise UpdateError(f"masked vector of {site}", expected="the manifest that the site signed")
        coordinator.fold(statement, pieces_of(contribution, self.sum_layout))

    def step(
        self,
        coordinator: SecureCoordinator,
        told: Mapping[str, Told],
        kind: type[M],
        take: Callable[[M], None],
    ) -> Asks[list[str]]:
        """Ask sites for one step of the protocol, or take the replies with which it has ended in an earlier process.

        Returns:
            The sites with a valid answer.
        """
        agreed: dict[int, Agree] = {}  # one request object for all sites if they get the same message
        requests = {
            site: agreed.setdefault(id(message), Agree(self.told.sum, message, self.attempt.tries))
            for site, message in told.items()
        }
        context = coordinator.attempt.context
        heard: list[M] = []
        left: list[str] = []

        def hear(reply: Reply | Failure) -> None:
            if isinstance(reply, Failure):
                self.drop(reply.site, reply.reason, refused=reply.refused)
                return
            if not isinstance(reply, kind):
                self.drop(reply.site, f"it answered with {type(reply).__name__}, not with {kind.__name__}")
                return
            heard.append(reply)
            try:
                take(reply)
            except CloisterError as error:
                self.drop(reply.site, str(error))
            else:
                self.party.refused.discard(reply.site)  # it takes part again
                left.append(reply.site)

        kept = self.kept.replies(context, kind)
        if kept is None:
            yield self.asking(requests, kind.STEP, hear)
            self.kept.keep(context, kind, heard)
        else:
            for reply in kept:
                hear(reply)
        return left
