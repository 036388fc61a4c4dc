"""One attempt at a sum in clear, and what each attempt at a sum has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloister.aggregation.vector.average import Opened, PlainSum, SumLayout
from cloister.aggregation.vector.span import Piece, check_received
from cloister.privacy.ledger.ledger import Entry as Charged
from cloister.protocol.errors import CloisterError, TooFewSitesError
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    TRAIN,
    ByFeature,
    Contribute,
    Contribution,
    Inbox,
    Instructions,
    Reply,
    Request,
    Step,
)
from cloister.server.record import journal as steps
from cloister.server.record.progress import SiteAnswered, SiteFailed
from cloister.server.sum.channel import Failure
from cloister.server.sum.party import Party
from cloister.server.sum.wanted import Asking, Asks, Wanted


@dataclass(frozen=True)
class Attempt:
    """An attempt at a sum, as it begins."""

    party: Party
    wanted: Wanted
    told: Instructions
    """What all sites of the sum are told."""
    number: int
    """From 1, over all processes."""
    sites: Sequence[str]
    """The sites that are asked."""
    tries: int
    """As in `Agree`."""
    before: int
    """Attempts at this sum that this process has made before."""
    noted: Mapping[str, Any]
    """What the last of those has noted."""


@dataclass
class Course:
    """What becomes of an attempt."""

    answered: set[str] = field(default_factory=set)
    """Sites that have answered or failed in step 4."""
    dropped: str = ""
    """The site that dropped out last, and why."""
    folded: set[str] = field(default_factory=set)
    """Sites whose vectors are folded in."""
    trainings: dict[str, tuple[ByFeature, float]] = field(default_factory=dict)
    """What sites that answered were told by features, and the seconds of their training as they have told them."""
    noted: dict[str, Any] = field(default_factory=dict)
    """What the attempt tells the plan's features of itself."""
    unopened: frozenset[str] = frozenset()
    """Sites whose shares too few others could open, so that the attempt ended."""
    blamed: frozenset[str] = frozenset()
    """Sites to blame for too few shares, after survivors were asked for them."""
    apart: bool = False
    """Whether sites were left out because they carry another history than most."""
    sketched: bool = False
    """Whether sites were asked for sketches of their vectors."""
    too_long: bool = False
    """Whether a site's vector was too long; it is asked for no other sum."""
    complained: bool = False
    """Whether the attempt has complaints that no earlier one had."""
    behind: bool = True
    """Whether a site that took part in the successful attempt is not in its sum, or all sums are in clear: what sites
    carry from this round may have different histories."""


class Plain:
    """One attempt in clear.

    Args:
        attempt: The attempt.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.course = Course()
        self.party, self.wanted, self.told = attempt.party, attempt.wanted, attempt.told
        self.sums = self.party.sums.of_round(self.wanted.purpose, self.wanted.round)
        self.sum_layout = self.sums.layout(self.wanted.purpose)
        self.bounds = self.party.features.bounds(self.told.features)

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt.

        Raises:
            SecureSumError: too few sites are left.
        """
        total = PlainSum(self.sum_layout, self.bounds)
        yield from self.collect(
            dict.fromkeys(self.attempt.sites),
            lambda contribution: total.add(pieces_of(contribution, self.sum_layout)),
        )
        self.check_needed(needed)
        self.note_survivors(steps.OPENING, sorted(self.course.folded))
        self.pay()
        return total.open()

    def note_survivors(self, step: str, survivors: Sequence[str]) -> None:
        """Journal the sites of the sum."""
        self.note(self.wanted.step(step), survivors=list(survivors))

    def note(self, step: str, **detail: Any) -> None:
        """Journal a step of this attempt."""
        self.party.journal.record(self.wanted.round, self.attempt.number, step, detail)

    def pay(self) -> None:
        """7. Charge the ledger, and write the release to the audit log, before the sum is opened."""
        sites, purpose = sorted(self.course.folded), self.wanted.purpose
        if self.party.spending is not None and purpose == TRAIN:
            self.charged(self.party.spending.before_opening(self.wanted.round, sites))
        self.party.record(
            "release", self.wanted.round, self.attempt.number, dict.fromkeys(sites, f"{purpose}, in the sum")
        )

    def charged(self, entries: Iterable[Charged]) -> None:
        """Write charges to the audit log."""
        told = {entry.charge.dataset: f"head of the ledger {entry.hash.hex()}" for entry in entries}
        self.party.record("charge", self.wanted.round, self.attempt.number, told)

    def check_needed(self, needed: int) -> None:
        """End the attempt if too few vectors have arrived.

        Raises:
            TooFewSitesError: too few have arrived.
        """
        if len(self.course.folded) < needed:
            raise TooFewSitesError(
                "updates", len(self.course.folded), expected=f"those of at least {needed} sites"
            )

    def collect(
        self, inboxes: Mapping[str, Inbox | None], fold: Callable[[Contribution], None]
    ) -> Asks[None]:
        """4. Update: fold in each vector as it arrives."""
        wanted = self.wanted
        if (spending := self.party.spending) is not None:
            before = spending.before_training if wanted.purpose == TRAIN else spending.before_evaluating
            self.charged(before(wanted.round, list(inboxes)))
        model = self.wanted.model
        requests = {
            site: Contribute(self.told, self.attempt.tries, inbox, model) for site, inbox in inboxes.items()
        }
        yield self.asking(requests, Step.UPDATE, lambda reply: self.take(reply, self.told, fold))

    def take(self, reply: Reply | Failure, told: Instructions, fold: Callable[[Contribution], None]) -> None:
        """Fold in a reply to a request for a contribution by some instructions; drop its site if it is none."""
        self.course.answered.add(reply.site)
        refusal = _not_of(reply, told)
        if refusal is None:
            assert isinstance(reply, Contribution)
            # Before the update is folded in: the time of one that is too stale tells that its site is slow.
            self.course.trainings[reply.site] = (told.features, reply.seconds)
            try:
                fold(reply)
            except CloisterError as error:
                refusal = str(error)
        if refusal is None:
            self.party.refused.discard(reply.site)  # it takes part again
            self.course.folded.add(reply.site)
            self.party.observe(SiteAnswered(self.wanted.round, reply.site))
        else:
            self.drop(reply.site, refusal, refused=isinstance(reply, Failure) and reply.refused)

    def asking(
        self, requests: Mapping[str, Request], step: Step, take: Callable[[Reply | Failure], None]
    ) -> Asking:
        """Requests of a step."""
        return Asking((self.attempt.before, step), requests, take)

    def drop(self, site: str, reason: str, *, refused: bool = False) -> None:
        """Drop a site from this attempt."""
        if refused:
            self.party.record("refusal", self.wanted.round, self.attempt.number, {site: reason})
            if self.wanted.purpose == TRAIN:
                self.party.refused.add(site)
            self.note(steps.REFUSED, site=site, reason=reason)
        self.course.dropped = f" ({site}: {reason})"
        self.party.observe(SiteFailed(self.wanted.round, site, reason))


def pieces_of(contribution: Contribution, layout: SumLayout) -> list[Piece]:
    """The vector of a contribution, checked against its manifest.

    Raises:
        UpdateError: the vector is incomplete, or does not match the manifest.
    """
    return check_received(contribution.manifest, contribution.spans, layout.length, layout.ring.dtype)


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
