"""A site's side of the secure sum, from one message to the next.

The protocol (`aggregation/secure_sum.py`) is a state machine, and each message of a site may be handled by another
process. So an attempt is kept in the site's own state folder (`attempt_files.py`) as the secret seed of its random
choices and the messages that came, and is rebuilt by handling them again; a process that has it in memory goes on with
that. A message is kept before its answer leaves. The secrets are wiped when shares are revealed, or when the next
attempt begins.

The mark that shares were revealed is synced to disk before they are. A vector is masked once: that masking has begun is
synced to disk before it begins, so that no crash leads to two vectors under one mask. Messages that come to several
processes at once take turns by a lock on the folder, which is free while the vector is made; whoever finds the attempt
changed after that gives up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation import keys
from cloister.aggregation.ring import RingVector
from cloister.aggregation.secure_messages import (
    Begin,
    Inbox,
    Peers,
    Survivors,
    Unmask,
    from_bytes,
    to_bytes,
)
from cloister.aggregation.secure_sum import Answered, Contract, Site
from cloister.clients.attempt_files import AttemptFiles, Kept, State
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import StaleError, StepError

ADVERTISE, SHARE, MASK, CONFIRM, UNMASK = 1, 2, 3, 4, 5
_MASKED = 6  # in the log of an attempt: the digest of the vector that was masked

_AGREED = (ADVERTISE, SHARE, CONFIRM, UNMASK)


@dataclass(frozen=True)
class Member:
    """What a site brings to every secure sum."""

    name: str
    identity: Ed25519PrivateKey
    minimum: int
    """Fewest sites whose sum it takes part in."""


@dataclass(frozen=True)
class _Known:
    """What a process has in memory of a folder."""

    state: State
    site: Site | None
    """The protocol's state, where it was built and its contract and minimum are still those of the messages."""


Live = dict[Path, _Known]
"""By folder, what a process has in memory."""


class Attempts:
    """The attempts of a site at the sums of one contract.

    Args:
        folder: The site's own folder for them.
        contract: As the site derives it from the plan and its pinned roster.
        member: The site.
        live: Attempts that this process has in memory, by folder; shared by all that it opens.
        random: Source of secrets.
    """

    def __init__(
        self,
        folder: Path,
        contract: Contract,
        member: Member,
        live: Live,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._folder = folder
        self._contract = contract
        self._member = member
        self._live = live
        self._random = random

    def agree(self, step: int, body: bytes, round_number: int) -> bytes:
        """Handle step 1, 2, 4 or 5 of the attempt at a round's sum; the answer's bytes.

        Raises:
            SecureSumError: the site refuses, and why.
            StorageError: the site cannot keep what it must; nothing was answered.
        """
        if step not in _AGREED:
            raise StepError("step", step, expected="1, 2, 4 or 5")
        with self._turn() as files:
            state = self._state(files)
            if step == ADVERTISE:
                return self._begin(files, state, body, round_number)
            kept = self._current(state, round_number)
            site = self._rebuild(state, kept)

            def reveal(mark: Answered) -> None:
                self._remember(files.mark_answered(state, mark), None)

            site.answered = reveal
            answer = _handle(site, step, body)
            if step == UNMASK:
                self._remember(files.end(self._state(files)), None)
            elif (step, body) not in kept.log:
                self._remember(files.keep(state, (step, body)), site)
            return answer

    def mask(
        self, inbox: bytes, round_number: int, model: bytes, threads: int, make: Callable[[], RingVector]
    ) -> tuple[bytes, RingVector]:
        """Step 3: mask the site's vector.

        Args:
            inbox: The step's message.
            round_number: The round that the vector is for.
            model: Hash of the global model, as the site computed it.
            threads: Threads that mask.
            make: Makes the vector, of the contract's length; called once the message is found in order. It is masked
                in place.

        Returns:
            The signed statement of the masked vector's digest, and the masked vector.

        Raises:
            SecureSumError: the site refuses, and why.
        """
        with self._turn() as files:
            state = self._state(files)
            kept = self._current(state, round_number)
            if state.marks.masking == kept.now:
                raise StepError(
                    "update", expected="to be asked for once in an attempt", fix="try the round again"
                )
            site = self._rebuild(state, kept)
            site.receive(from_bytes(Inbox, inbox))
            self._remember(state, site)
        vector = make()  # which may take long
        with self._turn() as files:
            if self._state(files) != state:
                raise StepError("attempt", expected="to be as it was before the vector was made")
            begun = files.keep(files.mark_masking(state), (MASK, inbox))
            site.mask(vector, model=model, threads=threads)
            digest = vector_hash(vector)
            statement = site.masked(digest)
            self._remember(files.keep(begun, (_MASKED, digest)), site)
        return to_bytes(statement), vector

    def _turn(self) -> AbstractContextManager[AttemptFiles]:
        return AttemptFiles.turn(self._folder, self._contract.run)

    def _state(self, files: AttemptFiles) -> State:
        known = self._live.get(self._folder)
        return files.state(known.state if known else None)

    def _remember(self, state: State, site: Site | None) -> None:
        self._live[self._folder] = _Known(state, site)

    def _begin(self, files: AttemptFiles, state: State, body: bytes, round_number: int) -> bytes:
        begin = from_bytes(Begin, body)
        kept = state.kept
        now = (begin.round, begin.attempt)
        if kept is None or kept.now != now or kept.log != ((ADVERTISE, body),):
            answered = state.marks.answered
            revealed = (answered.round, answered.attempt) if answered else (0, 0)
            kept = Kept(max(state.marks.joined, revealed), now, self._random(keys.KEY))
        _check_round(kept, round_number)
        site = self._rebuild(state, kept)
        answer = _handle(site, ADVERTISE, body)
        if not kept.log:
            joined = Kept(kept.newest, kept.now, kept.seed, ((ADVERTISE, body),))
            self._remember(files.begin(state, joined), site)
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

    def _rebuild(self, state: State, kept: Kept) -> Site:
        known = self._live.get(self._folder)
        if (
            known is not None
            and known.site is not None
            and known.state.kept == kept
            and known.site.contract == self._contract
        ):
            return known.site
        site = Site(
            self._contract,
            self._member.name,
            self._member.identity,
            minimum=self._member.minimum,
            random=keys.random_from(kept.seed),
            answered=_unprepared,
            earlier=state.marks.answered,
            newest=kept.newest,
        )
        for step, body in kept.log:
            _handle(site, step, body)
        return site


def _handle(site: Site, step: int, body: bytes) -> bytes:
    match step:
        case 1:
            return to_bytes(site.advertise(from_bytes(Begin, body)))
        case 2:
            return to_bytes(site.share(from_bytes(Peers, body)))
        case 3:
            site.receive(from_bytes(Inbox, body))
            return b""
        case 4:
            return to_bytes(site.confirm(from_bytes(Survivors, body)))
        case 5:
            return to_bytes(site.unmask(from_bytes(Unmask, body)))
        case 6:
            site.take_seeds(model=site.attempt.model)  # they were used, and nobody gets them again
            return to_bytes(site.masked(body))
    raise StepError("step", step, expected="a step of the secure sum")


def _unprepared(mark: Answered) -> None:
    raise AssertionError("a mark outside of a turn at the folder")


def _check_round(kept: Kept, round_number: int) -> None:
    """What a vector is of, and what its masks are for, is one round: otherwise one update could be summed in two."""
    if kept.now[0] != round_number:
        raise StaleError("round", round_number, expected=f"{kept.now[0]}, which the attempt is at")
