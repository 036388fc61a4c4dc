"""A site's side of the secure sum, durable between messages.

The protocol (`aggregation/secure/secure_sum.py`) is a state machine, and each message of a site may be handled by
another process. So an attempt is kept in the site's own state folder (`attempt_files.py`) as the secret seed of its
random choices, the history that it advertises and the messages received so far, and is rebuilt by handling them
again; a process that has it in memory continues from there. The secrets are wiped when shares are revealed, or when
the next attempt begins.

What a site has answered is on disk, synced, before the answer leaves, at every step; the mark that shares are revealed
is, before they are. So a message that arrives again, also at another process and after a crash, gets the same answer
byte for byte, and another message for a step that was answered is refused. The answer to the request for shares is kept
when the secrets are wiped.

An attempt masks one vector. The shares that its masks come from and the digest of what was masked are synced together,
before anything of it leaves. If its answer was lost, the vector is masked again, and it leaves only if it has that
digest: two vectors under one keystream would reveal their difference.

A lock on the folder serialises messages that arrive at several processes at the same time. It is released while the
vector is made; a process that then finds the attempt changed gives up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias, get_args

from cloister.aggregation.secure import keys
from cloister.aggregation.secure.secure_site import Member, Past, SecureSite
from cloister.aggregation.secure.secure_sum import Answered, Contract
from cloister.aggregation.vector.span import Piece, manifest_digest
from cloister.clients.state.attempt_files import MASKED, AttemptFiles, Kept, State
from cloister.clients.state.kept import Written
from cloister.protocol.errors import AnsweredError, StaleError, StepError
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Shares,
    Step,
    Survivors,
    Told,
    Unmask,
)
from cloister.protocol.messages.wire import from_bytes, to_bytes

_TOLD: dict[int, type[Told]] = {kind.STEP: kind for kind in get_args(Told)}

Answer: TypeAlias = Advertise | Shares | Confirm | Reveal
Mask: TypeAlias = Callable[[SecureSite, list[Piece]], Written]
"""Masks the pieces of a whole vector, each element once."""


def _no_sketch(_seed: bytes, _count: int) -> bytes:
    raise AssertionError("a contract with sketches needs what makes them")


class Attempts:
    """The attempts of a site at the sums of one contract; it has in memory what it last read or wrote.

    Args:
        folder: The site's own folder for them.
        contract: As the site derives it from the plan and its pinned roster.
        member: The site.
        history: That of what the site carries into the round now (`carried.py`).
        most_sketches: Of one vector, where the contract has sketches.
        random: Source of secrets.
    """

    def __init__(
        self,
        folder: Path,
        contract: Contract,
        member: Member,
        history: Callable[[], bytes] = lambda: NOTHING_CARRIED,
        most_sketches: int = 0,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._folder = folder
        self._contract = contract
        self._member = member
        self._history = history
        self._most_sketches = most_sketches
        self._random = random
        self._known: State | None = None
        self._site: SecureSite | None = None  # the protocol's state, if it was built for what is known

    def agree(
        self, told: Told, round_number: int, sketch: Callable[[bytes, int], bytes] = _no_sketch
    ) -> Answer:
        """Handle a step of the attempt at a round's sum that carries no vector.

        Args:
            told: The step's message.
            round_number: The round.
            sketch: Where the contract has sketches: makes that of the vector that was masked, given its seed and how
                many sketches there are of the vector with it. It may take long, and the lock on the folder is not held.

        Raises:
            SecureSumError: the site refuses.
            StorageError: the site cannot write its state; nothing was answered.
        """
        step: Step = told.STEP
        with self._turn() as files:
            state = files.state(self._known)
            if isinstance(told, Begin):
                return self._begin(files, state, told, round_number)
            if isinstance(told, Unmask) and state.kept is None:
                sent = files.revealed(to_bytes(told))
                if sent is not None:
                    return from_bytes(Reveal, sent)
            kept = self._current(state, round_number)
            site = self._rebuild(state, kept)
            self._known = self._site = None  # a step that is not kept on disk is not taken

            def reveal(mark: Answered) -> None:
                self._remember(files.mark_answered(state, mark), None)

            site.answered = reveal
            answer = _handle(site, told)
            if step is Step.CONFIRM and self._contract.sketches:
                state = self._count_sketch(files, state, kept)
            if step is Step.UNMASK:
                files.keep_revealed(files.state(self._known), to_bytes(told), to_bytes(answer))
                self._remember(files.end(files.state(self._known)), None)
            else:
                self._remember(files.keep(state, (int(step), _bytes_of(told))), site)
        if step is Step.CONFIRM and self._contract.sketches:
            return site.sketched(sketch(site.seed, state.marks.sketched[2]))
        return answer

    def _count_sketch(self, files: AttemptFiles, state: State, kept: Kept) -> State:
        """Count the sketch of an attempt, once and before it is made.

        Raises:
            AnsweredError: the coordinator has had as many as it may.
        """
        if any(step == Step.CONFIRM for step, _ in kept.log):
            return state
        counted = files.mark_sketched(state)
        if (count := counted.marks.sketched[2]) > self._most_sketches:
            raise AnsweredError(
                "sketches of one update",
                count,
                expected=f"at most {self._most_sketches} (cohort.attempts): each shows the coordinator more of it",
                fix="continue with the next round",
            )
        return counted

    def masked_in(self, round_number: int) -> bool:
        """Whether the site has masked a vector of a round, which may be in a sum that was opened."""
        with self._turn() as files:
            return files.state(self._known).marks.masked == round_number

    def mask(
        self,
        inbox: Inbox,
        round_number: int,
        instructions: bytes,
        make: Callable[[bytes], list[Piece]],
        mask: Mask,
        *,
        fresh: bool = False,
    ) -> tuple[Masked, Written]:
        """Step 4: mask the site's vector; the same message again masks the same vector again.

        Args:
            inbox: The step's message.
            round_number: The round that the vector is for.
            instructions: Digest of those that the vector is made by, as the site computed it.
            make: Makes the vector in pieces that tile it, given the history that the site has advertised; called after
                the message was checked.
            mask: Masks those pieces with the seeds of the site's side of the attempt.
            fresh: Whether they let no site use what it carries.

        Returns:
            The signed statement of the masked vector's manifest, and that vector.

        Raises:
            SecureSumError: the site refuses.
        """
        with self._turn() as files:
            state = files.state(self._known)
            kept = self._current(state, round_number)
            site = self._rebuild(state, kept)
            self._remember(state, None)  # a site whose masking failed is built again
            # Before a vector is made: making one may be a release.
            site.check_told(instructions, fresh=fresh)
            site.receive(inbox)
        pieces = make(kept.history)  # which may take long
        with self._turn() as files:
            if files.state(self._known) != state:
                raise StepError(
                    "attempt", expected="the attempt to be unchanged since before the vector was made"
                )
            masked = mask(site, pieces)
            digest = manifest_digest(masked.manifest)
            statement = site.masked(digest)  # refuses another than the one that is kept
            # Nothing of the vector leaves before these are synced.
            logged = (int(Step.UPDATE), to_bytes(inbox)), (MASKED, digest)
            self._remember(files.keep(files.mark_masked(state, round_number), *logged), site)
        return statement, masked

    def _turn(self) -> AbstractContextManager[AttemptFiles]:
        return AttemptFiles.turn(self._folder, self._contract.run)

    def _remember(self, state: State, site: SecureSite | None) -> None:
        self._known, self._site = state, site

    def _begin(self, files: AttemptFiles, state: State, begin: Begin, round_number: int) -> Answer:
        kept = state.kept
        now = (begin.round, begin.attempt)
        logged = (int(Step.ADVERTISE), to_bytes(begin))
        if kept is None or kept.now != now or kept.log != (logged,):
            kept = Kept(state.marks.joined, now, self._random(keys.KEY), history=self._history())
        _check_round(kept, round_number)
        site = self._rebuild(state, kept)
        answer = _handle(site, begin)
        self._remember(files.begin(state, replace(kept, log=(logged,))), site)
        return answer

    def _current(self, state: State, round_number: int) -> Kept:
        if state.kept is None:
            raise StepError(
                "attempt",
                expected="one that this site has joined and not yet answered",
                fix="try the round again",
            )
        _check_round(state.kept, round_number)
        return state.kept

    def _rebuild(self, state: State, kept: Kept) -> SecureSite:
        if self._site is not None and self._known is not None and self._known.kept == kept:
            return self._site
        site = SecureSite(
            self._contract,
            self._member,
            random=keys.random_from(kept.seed),
            answered=_unprepared,
            past=Past(state.marks.answered, kept.newest, kept.history),
        )
        for step, body in kept.log:
            _handle_again(site, step, body)
        return site


@lru_cache(maxsize=2)  # in a process that plays many sites, all get the same keys, and the same survivors
def _bytes_of(told: Told) -> bytes:
    return to_bytes(told)


def _handle(site: SecureSite, told: Told) -> Answer:
    match told:
        case Begin():
            return site.advertise(told)
        case Peers():
            return site.share(told)
        case Survivors():
            return site.confirm(told)
        case Unmask():
            return site.unmask(told)


def _handle_again(site: SecureSite, step: int, body: bytes) -> None:
    """Replay a message from the log to a rebuilt site."""
    if step in _TOLD:
        _handle(site, from_bytes(_TOLD[step], body))
    elif step == Step.UPDATE:
        site.receive(from_bytes(Inbox, body))
    elif step == MASKED:
        site.take_seeds(instructions=site.attempt.instructions)  # they were used and must not be used again
        site.masked(body)
    else:
        raise StepError("step", step, expected="a message of the log of an attempt")


def _unprepared(mark: Answered) -> None:
    raise AssertionError("a mark was written without the lock on the folder")


def _check_round(kept: Kept, round_number: int) -> None:
    """Check that vector and masks belong to one round: otherwise one update could be summed in two."""
    if kept.now[0] != round_number:
        raise StaleError("round", round_number, expected=f"{kept.now[0]}, the round of the attempt")
