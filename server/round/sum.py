"""One sum over a cohort, in clear or under masks, in as many attempts as the plan allows.

The steps have the same numbers as in `round.py`. An evaluation at the sites is the same without training.

1. Decide the local steps of each site, if the plan has `local.balance`: once for a round, from the speeds that are
   known when its first attempt begins. Journal the attempt, with them, before anything is asked of a site. A process
   that starts again goes on with the attempt that was under way. With them the round's `Instructions` are made, which
   all sites get in every attempt.
2. Advertise: each site returns signed one-time keys, and the history of what it carries (`clients/state/carried.py`).
Unless
   the instructions are fresh, sites of another history than most are dropouts of the attempt.
3. Share: each site checks the keys of the others and returns encrypted shares.
4. Update: each site makes its vector and returns it, masked; vectors fold into one accumulator as they arrive.
5. Consistency: the survivors sign the one list of survivors.
6. Unmask: journal that list, then ask for the shares. With too few sites, here or before, the attempt ends with nothing
   opened.
7. Charge the ledger; then open: remove the masks from the accumulator and decode it.

Without the secure sum only 1, 4 and 7 remain, and the decoded sum is the same to the last bit. In an asynchronous round
step 4 ends when the buffer is full (`_Buffered`).

What each of the steps 2 to 6 ends with is kept, synced, before a request that depends on it is sent (`attempt.py`).
Each has a deadline of its own, which begins with its requests: the plan's for step 4, a quarter of it for the others.

The cohort is the draw of the round, whoever is there: a site that has not joined, or is left out because it lied, is a
dropout. A site answers only one list of survivors in a round (the reason is in `aggregation/secure/secure_sum.py`).
So after shares were requested, later attempts at the same sum ask only those survivors, and need all of them.

With `aggregation.groups` a round has a sum for each group, and `sums_over` makes them at the same time: the requests of
one step go to the sites of all groups together, and then each group goes on for itself. So a round takes as long as one
sum over all its sites. An attempt is a generator of what it asks (`Asking`). Refused: a thread for each group, because
one that fails would leave others with their requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from cloister.aggregation.features.scales import Scales
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_sum import ring_dtype
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import BufferedSum, Opened, PlainSum, SumLayout
from cloister.aggregation.vector.span import Piece, check_received, manifest_digest
from cloister.lm.model.layout import Vector
from cloister.privacy.ledger.ledger import Entry as Charged
from cloister.protocol.errors import (
    CloisterError,
    ParameterError,
    QuorumError,
    SecureSumError,
    StaleError,
    TooFewSitesError,
    UpdateError,
)
from cloister.protocol.identity.audit_log import NO_AUDIT_LOG, AuditLog, Fact, What
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.balance import balanced
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.messages import (
    TRAIN,
    Advertise,
    Agree,
    Confirm,
    Contribute,
    Contribution,
    Inbox,
    Instructions,
    LocalSteps,
    Purpose,
    Reply,
    Request,
    Reveal,
    Shares,
    Step,
    SumId,
    Survivors,
    Told,
)
from cloister.protocol.plan.plan import Plan
from cloister.server.record import journal as steps
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.journal import Entry, Journal
from cloister.server.record.phases import Phase, Phases
from cloister.server.record.progress import AttemptFailed, Observer, RoundStarted, SiteAnswered, SiteFailed
from cloister.server.round.channel import Failure
from cloister.server.round.complaints import Complaint, liars, suspects
from cloister.server.round.members import Members
from cloister.server.round.outstanding import Outstanding
from cloister.server.round.speeds import Measured, speed_of
from cloister.server.round.spending import Spending

M = TypeVar("M", Advertise, Shares, Confirm, Reveal)


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
    measured: Measured = field(default_factory=Measured)
    """The sites' speeds, with `local.balance = "dynamic"`."""
    outstanding: Outstanding | None = None
    """What sites are asked, with `cohort.mode = "async"`."""

    audit_log: AuditLog = NO_AUDIT_LOG
    """Has a line for each refusal, release and charge before its effect."""

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

    def groups(self, purpose: Purpose, number: int) -> tuple[tuple[str, ...], ...]:
        """The groups of a round's cohort, each the cohort of a sum; without `aggregation.groups` one, the whole.

        Raises:
            QuorumError: in clear, too few sites have joined for one of them.
        """
        draw = self.sums.draw(purpose)
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


@dataclass(frozen=True)
class Total:
    """A sum that was opened."""

    opened: Opened
    names: tuple[str, ...]
    """Sites whose vectors are in it, sorted."""
    cohort: int
    """Sites that were drawn; in an asynchronous round those whose request has ended in it."""
    attempts: int
    seconds: float
    """Seconds from the first request of the successful attempt to the decoded sum."""
    steps: LocalSteps = ()
    """As in `Wanted`."""
    behind: bool = True
    """Whether a site that took part in the successful attempt is not in its sum, or all sums are in clear: what sites
    carry from this round may have different histories."""
    staleness: Mapping[str, Sequence[int]] | None = None
    """In an asynchronous round, by site the server steps since the model of each of its updates in the sum."""
    too_stale: int = 0
    """Updates that exceeded `cohort.staleness`, in all attempts of this process."""

    @property
    def sites(self) -> int:
        """The number of sites whose vectors are in it."""
        return len(self.names)


@dataclass(frozen=True)
class Failed:
    """All attempts at a sum ended with too few sites."""

    attempts: int
    """Attempts that failed."""
    bound: bool
    """No later attempt at the round can have other sites: shares were requested in one of them, and the sites that
    answered will answer for no other survivors; or sites carry another history in this round and not in the next."""
    spoiled: str = ""
    """The total of the opened sum that no honest sites can have: a site lied in its counters, and another attempt would
    sum the same again."""


@dataclass(frozen=True)
class Wanted:
    """A sum to make."""

    purpose: Purpose
    round: int
    """The round; in an evaluation the round of the model."""
    model: Vector
    """The global model's trained parameters; they do not change during the sum."""
    clip: float = 0.0
    """Clipping norm, if the unit of privacy is the site."""
    steps: LocalSteps = ()
    """Local steps of each site of the cohort; empty where all take those of the plan. `sum_over` decides them."""
    scales: Scales | None = None
    """The bounds of a compressed update's blocks; otherwise None."""
    group: int = 0
    """The group of the round's cohort that is summed."""

    def step(self, name: str) -> str:
        """The journal's name of a step of this sum."""
        return steps.of_sum(self.purpose, name, self.group)


@dataclass(frozen=True)
class Asking:
    """What an attempt asks sites for, before it goes on."""

    turn: tuple[int, Step]
    """Attempts at the sum in this process, and the step: of several sums those with the least are asked first."""
    requests: Mapping[str, Request]
    """By site."""
    take: Callable[[Reply | Failure], None]
    """Takes each answer as it arrives."""


T = TypeVar("T")
Asks = Generator[Asking, None, T]


def sum_over(party: Party, wanted: Wanted) -> Total | Failed:
    """Make one sum; as `sums_over`."""
    return sums_over(party, [wanted])[0]


def sums_over(party: Party, wanted: Sequence[Wanted]) -> list[Total | Failed]:
    """Sum over the groups of a round's cohort at the same time, each in as many attempts as the plan allows.

    An attempt that an earlier process began, and did not end, goes on. A sum whose attempt has failed waits with the
    next one until the others have ended theirs, so that all sums together take no longer than one in so many attempts.

    Args:
        party: The run.
        wanted: The sums to make, of one purpose, round and model, of different groups.

    Returns:
        The result of each.
    """
    number, purpose = wanted[0].round, wanted[0].purpose
    model_hash = vector_hash(wanted[0].model)
    asking: dict[int, Asking] = {}
    made: dict[int, Total | Failed] = {}
    with ExitStack() as ends:
        sums = [ends.enter_context(closing(_attempts(party, each, model_hash))) for each in wanted]
        ready: Iterable[int] = range(len(sums))
        while len(made) < len(sums):
            for index in ready:
                try:
                    asking[index] = next(sums[index])
                except StopIteration as end:
                    made[index] = end.value
            turn = min((each.turn for each in asking.values()), default=None)
            ready = [index for index, each in asking.items() if each.turn == turn]
            if turn is not None:
                _ask(party, purpose, number, turn[1], [asking.pop(index) for index in ready])
    return [made[index] for index in range(len(sums))]


def _ask(party: Party, purpose: Purpose, number: int, step: Step, asking: Iterable[Asking]) -> None:
    """Ask the sites of several sums for one step, with the step's own deadline as the timeout."""
    cohort, phase = party.plan.cohort, Phase.TRAIN if purpose == TRAIN else Phase.EVALUATE
    deadline_s = cohort.deadline_s if step is Step.UPDATE else cohort.handshake_s()
    requests = {site: request for each in asking for site, request in each.requests.items()}
    take = {site: each.take for each in asking for site in each.requests}
    with party.phases.during(phase) if step is Step.UPDATE else nullcontext():
        for reply in party.members.ask(requests, deadline_s, group=str(number)):
            take[reply.site](reply)


def _attempts(party: Party, wanted: Wanted, model_hash: bytes) -> Asks[Total | Failed]:
    """The attempts at one sum."""
    plan, journal, number, purpose = party.plan, party.journal, wanted.round, wanted.purpose
    groups = party.groups(purpose, number)
    cohort, number_of_group = groups[wanted.group], wanted.group + 1 if len(groups) > 1 else 0
    steps_of_sites = _local_steps(party, wanted, cohort)
    if steps_of_sites:
        wanted = replace(wanted, steps=steps_of_sites)
        cohort = tuple(site for site, _ in steps_of_sites)  # in clear, other sites may have joined meanwhile
    told = _instructions(party, wanted, model_hash)
    heard: dict[str, float] = {}
    too_stale = 0
    earlier = failures = journal.count(wanted.step(steps.FAILED), number)  # by earlier processes
    last = failures + plan.cohort.attempts
    unopened: set[str] = set()
    doubted: set[str] = set()
    apart = False
    begun = _begun(journal, wanted)
    while True:
        unmasking = journal.newest(wanted.step(steps.UNMASKING), number)
        if failures >= last:
            return Failed(failures, bound=unmasking is not None or apart)
        if begun is not None:
            attempt, sites, needed = begun.attempt, begun.detail["cohort"], begun.detail["needed"]
            begun = None
        else:
            able = [site for site in party.present(cohort) if site not in unopened | doubted]
            sites = unmasking.detail["survivors"] if unmasking else able
            needed = len(sites) if unmasking else party.sums.quorum(purpose, wanted.group)
            # 1. Journal the attempt.
            attempt = journal.count(wanted.step(steps.BEGUN), number) + 1
            detail: dict[str, Any] = {"cohort": sites, "needed": needed, "fresh": told.fresh}
            if wanted.steps:
                detail["steps"] = wanted.steps
            journal.record(number, attempt, wanted.step(steps.BEGUN), detail)
        updates = needed if plan.cohort.mode == "async" else None
        party.observe(RoundStarted(number, attempt, purpose, tuple(sites), updates, number_of_group))
        started = party.clock()
        kind = _Masked if plan.aggregation.secure else _Buffered if plan.cohort.mode == "async" else _Plain
        under_way = kind(party, wanted, told, failures + 1, sites, attempt, failures - earlier)
        try:
            opened = yield from under_way.run(needed)
        except (SecureSumError, UpdateError) as error:
            failures += 1
            apart = under_way.apart
            if under_way.unopened and under_way.complained:
                last += 1  # it tells of a pair with a liar that was not known: this ends before liars are out of pairs
            else:
                unopened |= under_way.unopened
            doubted = suspects(party.complaints, party.present(cohort))
            reason = f"group {number_of_group}: {error}" if number_of_group else str(error)
            journal.record(number, attempt, wanted.step(steps.FAILED), {"reason": reason})
            party.observe(AttemptFailed(number, attempt, reason))
            if isinstance(error, UpdateError):
                return Failed(failures, bound=True, spoiled=reason)
            continue
        finally:
            heard |= under_way.speeds
            too_stale += under_way.too_stale
        if heard:
            journal.record(number, attempt, steps.MEASURED, heard)
            party.measured.add(heard)
        seconds = party.clock() - started
        staleness = under_way.staleness
        drawn = len(cohort) if staleness is None else len(under_way.heard)
        names = tuple(sorted(under_way.folded))
        behind = under_way.behind
        return Total(opened, names, drawn, attempt, seconds, wanted.steps, behind, staleness, too_stale)


def _begun(journal: Journal, wanted: Wanted) -> Entry | None:
    """The attempt at a sum that an earlier process began and did not end."""
    begun = journal.newest(wanted.step(steps.BEGUN), wanted.round)
    failed = journal.newest(wanted.step(steps.FAILED), wanted.round)
    if begun is None or (failed is not None and failed.attempt >= begun.attempt):
        return None
    return begun


def _instructions(party: Party, wanted: Wanted, model_hash: bytes) -> Instructions:
    """What all sites of a sum are told, in each of its attempts: sites keep the updates that they made by it."""
    about = SumId(party.run, bytes.fromhex(party.plan.digest()), wanted.purpose, wanted.round)
    scales = wanted.scales.to_bytes() if wanted.scales else b""
    state: Literal["fresh", "carried"] = "fresh" if _fresh(party, wanted) else "carried"
    return Instructions(about, model_hash, wanted.clip, wanted.steps, scales, state)


def _fresh(party: Party, wanted: Wanted) -> bool:
    """Whether no site uses what it carries: by the journal if the sum has begun.

    In clear each site uses what it has. Under masks all of a sum must have one history, so a round is fresh where
    cohorts are drawn, and after a round in which some site took part and is not in the sum.
    """
    plan, journal = party.plan, party.journal
    if wanted.purpose != TRAIN or not plan.carries:
        return True
    if not plan.aggregation.secure:
        return False
    if plan.drawn:
        return True
    begun = journal.newest(wanted.step(steps.BEGUN), wanted.round)
    if begun is not None:
        return bool(begun.detail["fresh"])
    done = journal.newest(steps.DONE, wanted.round - 1)
    return done is None or bool(done.detail.get("behind", True))


def _local_steps(party: Party, wanted: Wanted, cohort: Sequence[str]) -> LocalSteps:
    """The local steps of a sum's cohort: those that the journal has if the sum has begun, because sites keep the
    updates that they made with them; empty where the plan has no `local.balance`, or nothing is trained."""
    local = party.plan.local
    if wanted.purpose != TRAIN or local.balance == "fixed":
        return ()
    begun = party.journal.newest(wanted.step(steps.BEGUN), wanted.round)
    if begun is not None:
        return tuple((str(site), int(count)) for site, count in begun.detail["steps"])
    speed = party.members.speeds.get if local.balance == "weighted" else party.measured.get
    return balanced(local, {site: speed(site) for site in cohort})


class _Plain:
    """One attempt in clear."""

    def __init__(
        self,
        party: Party,
        wanted: Wanted,
        told: Instructions,
        tries: int,
        sites: Sequence[str],
        attempt: int,
        before: int,
    ) -> None:
        self.before = before
        """Attempts at this sum that this process has made before."""
        self.party = party
        self.wanted = wanted
        self.told = told
        self.digest = instructions_digest(told)
        self.tries = tries
        self.sites = sites
        self.attempt = attempt
        self.heard: set[str] = set()
        """Sites that have answered or failed in step 4."""
        self.folded: set[str] = set()
        self.speeds: dict[str, float] = {}
        """Local steps per second of sites whose update is folded in, with `local.balance = "dynamic"`."""
        self.unopened: frozenset[str] = frozenset()
        """Sites whose shares too few others could open, so that the attempt ended."""
        self.apart = False
        """Whether sites were left out because they carry another history than most."""
        self.complained = False
        """Whether the attempt has complaints that no earlier one had."""
        self.staleness: Mapping[str, list[int]] | None = None
        """As in `Total`."""
        self.too_stale = 0
        """Updates that exceeded `cohort.staleness`."""
        self.sum_layout: SumLayout = party.sums.layout(wanted.purpose)
        self.behind = True
        """As in `Total`."""
        self.bounds = wanted.scales.bounds if wanted.scales else None
        self.kept = party.kept.of_group(wanted.group)

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt.

        Raises:
            SecureSumError: too few sites are left.
        """
        total = PlainSum(self.sum_layout)
        yield from self.collect(
            dict.fromkeys(self.sites), lambda contribution: total.add(self.pieces(contribution))
        )
        self.check_needed(needed)
        self.pay()
        return total.open(self.bounds)

    def pieces(self, contribution: Contribution) -> list[Piece]:
        """The vector of a contribution, checked against its manifest.

        Raises:
            UpdateError: the vector is incomplete, or does not match the manifest.
        """
        layout = self.sum_layout
        return check_received(contribution.manifest, contribution.spans, layout.length, layout.ring.dtype)

    def pay(self) -> None:
        """7. Charge the ledger, and write the release to the audit log, before the sum is opened."""
        sites, purpose = sorted(self.folded), self.wanted.purpose
        if self.party.spending is not None and purpose == TRAIN:
            self.charged(self.party.spending.before_opening(self.wanted.round, sites))
        self.party.record(
            "release", self.wanted.round, self.attempt, dict.fromkeys(sites, f"{purpose}, in the sum")
        )

    def charged(self, entries: Iterable[Charged]) -> None:
        """Write charges to the audit log."""
        told = {entry.charge.dataset: f"head of the ledger {entry.hash.hex()}" for entry in entries}
        self.party.record("charge", self.wanted.round, self.attempt, told)

    def check_needed(self, needed: int) -> None:
        """End the attempt if too few vectors have arrived.

        Raises:
            TooFewSitesError: too few have arrived.
        """
        if len(self.folded) < needed:
            raise TooFewSitesError("updates", len(self.folded), expected=f"those of at least {needed} sites")

    def collect(
        self, inboxes: Mapping[str, Inbox | None], fold: Callable[[Contribution], None]
    ) -> Asks[None]:
        """4. Update: fold in each vector as it arrives."""
        wanted = self.wanted
        if self.party.spending is not None and wanted.purpose == TRAIN:
            self.charged(self.party.spending.before_training(wanted.round, list(inboxes)))
        model = self.wanted.model
        requests = {site: Contribute(self.told, self.tries, inbox, model) for site, inbox in inboxes.items()}
        yield self.asking(requests, Step.UPDATE, lambda reply: self.take(reply, self.told, fold))

    def take(
        self,
        reply: Reply | Failure,
        told: Instructions,
        fold: Callable[[Contribution], None],
    ) -> None:
        """Fold in a reply to a request for a contribution by some instructions; drop its site if it is none."""
        self.heard.add(reply.site)
        refusal = _not_of(reply, told)
        if refusal is None:
            assert isinstance(reply, Contribution)
            try:
                fold(reply)
                self.measure(reply)
            except CloisterError as error:
                refusal = str(error)
        if refusal is None:
            self.folded.add(reply.site)
            self.party.observe(SiteAnswered(self.wanted.round, reply.site))
        else:
            self.drop(reply.site, refusal, refused=isinstance(reply, Failure) and reply.refused)

    def measure(self, contribution: Contribution) -> None:
        """Take the time of a site's training, if it tells one."""
        if self.party.plan.local.balance == "dynamic" and self.wanted.steps:
            speed = speed_of(dict(self.wanted.steps)[contribution.site], contribution.seconds)
            if speed is not None:
                self.speeds[contribution.site] = speed

    def asking(
        self, requests: Mapping[str, Request], step: Step, take: Callable[[Reply | Failure], None]
    ) -> Asking:
        """Requests of a step."""
        return Asking((self.before, step), requests, take)

    def drop(self, site: str, reason: str, *, refused: bool = False) -> None:
        """Drop a site from this attempt."""
        if refused:
            self.party.record("refusal", self.wanted.round, self.attempt, {site: reason})
            self.party.refused.add(site)
            detail = {"site": site, "reason": reason}
            self.party.journal.record(self.wanted.round, self.attempt, steps.REFUSED, detail)
        self.party.observe(SiteFailed(self.wanted.round, site, reason))


def _not_of(reply: Reply | Failure, told: Instructions) -> str | None:
    """The reason that a reply is not a contribution by some instructions, in one line; None if it is one."""
    match reply:
        case Failure():
            return reply.reason
        case Contribution() if (reply.sum, reply.told) == (told.sum, instructions_digest(told)):
            return None
        case Contribution():
            return (
                f"stale update: it is of round {reply.sum.round} or other instructions, but round "
                f"{told.sum.round} was requested"
            )
        case _:
            return f"it answered with {type(reply).__name__}, not with a contribution"


class _Buffered(_Plain):
    """One attempt at an asynchronous round (FedBuff): the sum of the next updates that arrive, of whatever model.

    Each site trains at most one update of each model, and a request outlives the round in which it was sent:

    - At the start of the round each site that is not asked is asked for an update of its model.
    - An update of an earlier round counts by its staleness, or is dropped, and its site is asked for one of this round.
    - A site whose update of this round has arrived, or that has failed, is asked again at the start of the next round.

    So the round does not wait for a slow, failed or silent site while there are enough others. Where no request is
    left and too few updates have arrived, the attempt has failed; the next one asks all sites again, which have kept
    their updates.
    """

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt; its requests are those of `Outstanding`.

        Raises:
            TooFewSitesError: too few updates have arrived, and no site is left that could send one.
        """
        yield from ()
        party, number, outstanding = self.party, self.wanted.round, self.party.outstanding
        assert outstanding is not None, "a plan with asynchronous rounds has requests that outlive them"
        total, most = BufferedSum(self.sum_layout), party.plan.cohort.most_stale()
        staleness: dict[str, list[int]] = {}
        self.staleness = staleness

        def fold(contribution: Contribution) -> None:
            age = number - contribution.sum.round
            if age > most:
                self.too_stale += 1
                raise StaleError(
                    "staleness", age, expected=f"at most {most} rounds, as cohort.staleness says"
                )
            total.add(self.pieces(contribution), age)
            staleness.setdefault(contribution.site, []).append(age)

        # The server's step changes the model in place, and requests with this one may outlive it.
        model = self.wanted.model.copy()
        request = Contribute(self.told, self.tries, None, model)
        outstanding.ask(party.present(self.sites), request)
        with party.phases.during(Phase.TRAIN):
            while total.terms < needed and (answer := outstanding.next()) is not None:
                site, asked, reply = answer
                self.take(reply, asked.told, fold)
                if asked.sum.round < number:
                    outstanding.ask([site], request)
        if total.terms < needed:
            raise TooFewSitesError(
                "updates", total.terms, expected=f"{needed} of them, as cohort.buffer says"
            )
        self.pay()
        return total.open()


class _Masked(_Plain):
    """One attempt under masks."""

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt.

        Raises:
            SecureSumError: too few sites are left, or their messages are inconsistent; nothing was opened.
        """
        party, wanted = self.party, self.wanted
        assert party.roster is not None, "a plan that sums securely needs a roster"
        contract = party.sums.contract(wanted.purpose, party.run, party.roster, wanted.group)
        coordinator = SecureCoordinator(
            contract, wanted.round, self.attempt, self.digest, needed=needed, fresh=self.told.fresh
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
            self.unopened, self.apart = frozenset(coordinator.unopened), bool(coordinator.behind)
            self.complain(coordinator.complaints)
            most = coordinator.attempt.parameters.colluders
            self.leave_out(liars(party.complaints, party.present(coordinator.attempt.cohort), most))
            self.leave_out(coordinator.liars)

    def _steps(self, coordinator: SecureCoordinator) -> Asks[Opened]:
        party, wanted = self.party, self.wanted
        # 2. Advertise.
        begin = dict.fromkeys(self.sites, coordinator.begin)
        yield from self.step(coordinator, begin, Advertise, coordinator.advertised)
        # 3. Share.
        keys = coordinator.peers()
        for site in coordinator.behind:
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
        yield from self.step(coordinator, shown, Confirm, coordinator.confirmed)
        self.behind = bool(coordinator.behind) or len(survivors.survivors) < coordinator.advertising
        # 6. Unmask.
        requests = coordinator.request()
        detail = {"survivors": list(survivors.survivors)}
        party.journal.record(wanted.round, self.attempt, wanted.step(steps.UNMASKING), detail)
        yield from self.step(coordinator, requests, Reveal, coordinator.revealed)
        # 7. Charge, then open.
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
        self.folded.update(statement.site for statement in kept[0])
        return coordinator.survivors()

    def complain(self, complaints: frozenset[Complaint]) -> None:
        """Note new complaints, durably."""
        new = complaints - self.party.complaints
        self.complained = bool(new)
        if new:
            self.party.complaints.update(new)
            detail = {"pairs": sorted(new)}
            self.party.journal.record(self.wanted.round, self.attempt, steps.COMPLAINED, detail)

    def leave_out(self, liars: Mapping[str, str]) -> None:
        """Ask sites that lied for no other sum; durable, so that a resumed run does not ask them either."""
        for site, what in liars.items():
            self.party.left_out[site] = what
            detail = {"site": site, "reason": what}
            self.party.journal.record(self.wanted.round, self.attempt, steps.LEFT_OUT, detail)
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
        coordinator.fold(statement, self.pieces(contribution))

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
            site: agreed.setdefault(id(message), Agree(self.told.sum, message, self.tries))
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
                left.append(reply.site)

        kept = self.kept.replies(context, kind)
        if kept is None:
            yield self.asking(requests, kind.STEP, hear)
            self.kept.keep(context, kind, heard)
        else:
            for reply in kept:
                hear(reply)
        return left
