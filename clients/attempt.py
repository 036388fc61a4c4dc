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
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation import keys
from cloister.aggregation.ring import RingVector
from cloister.aggregation.secure_site import SecureSite
from cloister.aggregation.secure_sum import Answered, Contract
from cloister.clients.attempt_files import AttemptFiles, Kept, State
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import StaleError, StepError
from cloister.protocol.messages import (
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
from cloister.protocol.wire import from_bytes, to_bytes

_MASKED = 0
"""In the log of an attempt, beside the steps: the digest of the vector that was masked."""
_TOLD: dict[int, type[Told]] = {
    Step.ADVERTISE: Begin,
    Step.SHARE: Peers,
    Step.CONFIRM: Survivors,
    Step.UNMASK: Unmask,
}
_STEPS: dict[type, Step] = {kind: Step(step) for step, kind in _TOLD.items()}

Answer: TypeAlias = Advertise | Shares | Confirm | Reveal


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
    site: SecureSite | None
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

    def agree(self, told: Told, round_number: int) -> Answer:
        """Handle a step of the attempt at a round's sum that carries no vector.

        Raises:
            SecureSumError: the site refuses, and why.
            StorageError: the site cannot keep what it must; nothing was answered.
        """
        step = _STEPS[type(told)]
        with self._turn() as files:
            state = self._state(files)
            if isinstance(told, Begin):
                return self._begin(files, state, told, round_number)
            kept = self._current(state, round_number)
            site = self._rebuild(state, kept)

            def reveal(mark: Answered) -> None:
                self._remember(files.mark_answered(state, mark), None)

            site.answered = reveal
            answer = _handle(site, told)
            logged = (int(step), to_bytes(told))
            if step is Step.UNMASK:
                self._remember(files.end(self._state(files)), None)
            elif logged not in kept.log:
                self._remember(files.keep(state, logged), site)
            return answer

    def mask(
        self, inbox: Inbox, round_number: int, model: bytes, threads: int, make: Callable[[], RingVector]
    ) -> tuple[Masked, RingVector]:
        """Step 4: mask the site's vector.

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
            site.receive(inbox)
            self._remember(state, site)
        vector = make()  # which may take long
        with self._turn() as files:
            if self._state(files) != state:
                raise StepError("attempt", expected="to be as it was before the vector was made")
            begun = files.keep(files.mark_masking(state), (int(Step.UPDATE), to_bytes(inbox)))
            site.mask(vector, model=model, threads=threads)
            digest = vector_hash(vector)
            statement = site.masked(digest)
            self._remember(files.keep(begun, (_MASKED, digest)), site)
        return statement, vector

    def _turn(self) -> AbstractContextManager[AttemptFiles]:
        return AttemptFiles.turn(self._folder, self._contract.run)

    def _state(self, files: AttemptFiles) -> State:
        known = self._live.get(self._folder)
        return files.state(known.state if known else None)

    def _remember(self, state: State, site: SecureSite | None) -> None:
        self._live[self._folder] = _Known(state, site)

    def _begin(self, files: AttemptFiles, state: State, begin: Begin, round_number: int) -> Answer:
        kept = state.kept
        now = (begin.round, begin.attempt)
        logged = (int(Step.ADVERTISE), to_bytes(begin))
        if kept is None or kept.now != now or kept.log != (logged,):
            answered = state.marks.answered
            revealed = (answered.round, answered.attempt) if answered else (0, 0)
            kept = Kept(max(state.marks.joined, revealed), now, self._random(keys.KEY))
        _check_round(kept, round_number)
        site = self._rebuild(state, kept)
        answer = _handle(site, begin)
        if not kept.log:
            joined = Kept(kept.newest, kept.now, kept.seed, (logged,))
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

    def _rebuild(self, state: State, kept: Kept) -> SecureSite:
        known = self._live.get(self._folder)
        if (
            known is not None
            and known.site is not None
            and known.state.kept == kept
            and known.site.contract == self._contract
        ):
            return known.site
        site = SecureSite(
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
            _handle_again(site, step, body)
        return site


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
    """Bring a rebuilt site to where it was, by a message from its log."""
    if step in _TOLD:
        _handle(site, from_bytes(_TOLD[step], body))
    elif step == Step.UPDATE:
        site.receive(from_bytes(Inbox, body))
    elif step == _MASKED:
        site.take_seeds(model=site.attempt.model)  # they were used, and are never given out again
        site.masked(body)
    else:
        raise StepError("step", step, expected="one of the log of an attempt")


def _unprepared(mark: Answered) -> None:
    raise AssertionError("a mark outside of a turn at the folder")


def _check_round(kept: Kept, round_number: int) -> None:
    """What a vector is of, and what its masks are for, is one round: otherwise one update could be summed in two."""
    if kept.now[0] != round_number:
        raise StaleError("round", round_number, expected=f"{kept.now[0]}, which the attempt is at")
