"""The coordinator's side of a run's sums: `Party`, what all of them share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cloister.aggregation.features.feature import Given
from cloister.aggregation.features.registry import Coordinated
from cloister.aggregation.sums import Sums
from cloister.protocol.errors import QuorumError
from cloister.protocol.identity.audit_log import NO_AUDIT_LOG, AuditLog, Fact, What
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import TRAIN, Division, Purpose
from cloister.protocol.plan.plan import Plan
from cloister.server.record import journal as steps
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.journal import Journal
from cloister.server.record.phases import Phases
from cloister.server.record.progress import Observer
from cloister.server.sum.complaints import Complaint
from cloister.server.sum.members import Members
from cloister.server.sum.outstanding import Outstanding
from cloister.server.sum.spending import Spending


@dataclass(frozen=True)
class Party:
    """The coordinator's side of a run's sums."""

    sums: Sums
    """What the run's sums are made of."""
    run: str
    """Identity of the run."""
    roster: Roster | None
    """The sites' identities; None where the plan sums in clear."""
    members: Members
    journal: Journal
    kept: KeptAttempt
    """What is kept of the attempt that is under way."""
    observe: Observer
    clock: Callable[[], float] = time.monotonic
    spending: Spending | None = None
    """The coordinator's privacy ledger; None without a privacy unit."""
    refused: set[str] = field(default_factory=set)
    """Sites whose policy or budget forbids them to continue."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Sites that lied in a secure sum, each with what it did: they are asked for no other sum."""
    complaints: set[Complaint] = field(default_factory=set)
    """Which site could not open the shares of which, in any secure sum of the run."""
    phases: Phases = field(default_factory=Phases)
    """Counts the seconds of the run's phases."""
    outstanding: Outstanding | None = None
    """What sites are asked, with `cohort.mode = "async"`."""

    given: Given = field(default_factory=Given)
    """What the run gives the plan's features, but for what `members` has."""
    audit_log: AuditLog = NO_AUDIT_LOG
    """Has a line for each refusal, release and charge before its effect."""

    @cached_property
    def features(self) -> Coordinated:
        """What the plan's features do here."""
        return Coordinated(
            self.sums, replace(self.given, declared=lambda site: self.members.speeds.get(site))
        )

    @property
    def plan(self) -> Plan:
        """The run's plan."""
        return self.sums.plan

    def record(self, what: What, number: int, attempt: int, told: Mapping[str, str]) -> None:
        """Write a line of the audit log for each site, with its detail; the site `""` is the coordinator."""
        if self.audit_log:
            plan = self.plan.digest()
            facts = [Fact(what, self.run, plan, number, attempt, *each) for each in told.items()]
            self.audit_log.record(*facts)

    def cohort(self, purpose: Purpose, number: int) -> tuple[str, ...]:
        """The sites that are drawn for a round: from the whole roster, so that each site can repeat the draw."""
        known = self.roster.names if self.roster else self.members.sites
        return self.sums.draw(purpose).cohort(known, number)

    def division(self, purpose: Purpose, number: int) -> Division:
        """How the cohort of a round is divided."""
        traces = purpose == TRAIN and self.plan.aggregation.trace_groups > 1
        return "trace" if traces and self.journal.count(steps.TRACED, number) else "plan"

    def draw(self, purpose: Purpose, number: int) -> Draw:
        """The draw of a round's cohort and of its groups."""
        return self.sums.draw(purpose, self.division(purpose, number))

    def quorum(self, purpose: Purpose, number: int, group: int) -> int:
        """The least number of sites in the sum of a group of a round."""
        return self.sums.quorum(purpose, group, self.division(purpose, number))

    def groups(self, purpose: Purpose, number: int) -> tuple[tuple[str, ...], ...]:
        """The groups of a round's cohort, each the cohort of a sum; without groups one, the whole.

        Raises:
            QuorumError: in clear, too few sites have joined for one of them.
        """
        draw = self.draw(purpose, number)
        if draw.groups == 1:
            return (self.cohort(purpose, number),)
        if self.roster is not None:
            return draw.divided(self.roster.names, number)
        kept = self.journal.newest(f"{purpose} {steps.DIVIDED}", number)
        if kept is None:  # in clear, other sites may have joined when a killed coordinator goes on
            divided = draw.divided(self.members.sites, number)
            for group, size in zip(divided, draw.sizes, strict=True):
                if len(group) < (needed := self.plan.quorum(size)):
                    raise QuorumError(
                        f"round {number}",
                        f"{len(self.members.sites)} sites that have joined",
                        expected=f"{needed} or more in each group of {size} sites, and {draw.groups} groups",
                        fix="repair the sites and continue the run: nothing is lost; a new run can have another "
                        "cohort.quorum",
                    )
            self.journal.record(number, 0, f"{purpose} {steps.DIVIDED}", {"groups": divided})
            return divided
        return tuple(tuple(map(str, group)) for group in kept.detail["groups"])

    def present(self, cohort: Iterable[str]) -> list[str]:
        """The sites of a cohort that can be asked."""
        there = set(self.members.sites).difference(self.left_out)
        return [site for site in cohort if site in there]
