"""A site's side of the secure sum, from one message to the next.

The protocol (`aggregation/secure_sum.py`) is a state machine, and each message of a site may be handled by another
process. So an attempt is kept in the site's own state folder as the secret seed of its random choices and the messages
that came, in a file that only the site can read, and is rebuilt by handling them again; a process that has it in memory
goes on with that. The file is written before a step's answer leaves. Its secrets are wiped when shares are revealed, or
when the next attempt replaces it.

The mark that shares were revealed has a file of its own, synced to disk before they are. A vector is masked once: that
masking has begun is synced to disk before it begins, so that no crash leads to two vectors under one mask. Messages
that come to several processes at once take turns by a lock on the folder, which is free while the vector is made;
whoever finds the attempt changed after that gives up.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

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
from cloister.protocol.encoding import pack, unpack
from cloister.protocol.errors import EncodingError, StaleError, StepError, StorageError
from cloister.protocol.storage import write_bytes

ADVERTISE, SHARE, MASK, CONFIRM, UNMASK = 1, 2, 3, 4, 5
_MASKED = 6  # in the record of an attempt: the digest of the vector that was masked

_AGREED = (ADVERTISE, SHARE, CONFIRM, UNMASK)
Log = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Member:
    """What a site brings to every secure sum."""

    name: str
    identity: Ed25519PrivateKey
    minimum: int
    """Fewest sites whose sum it takes part in."""


@dataclass(frozen=True)
class _Record:
    """An attempt as it is kept."""

    run: str
    newest: tuple[int, int]
    """Round and attempt that the site had joined before this one."""
    now: tuple[int, int]
    """Round and attempt of this one."""
    seed: bytes = field(repr=False)
    log: Log = field(repr=False)


Live = dict[Path, tuple[_Record, Site]]
"""Attempts that a process has in memory, by folder."""


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
        with self._turn():
            record = self._begin(body) if step == ADVERTISE else self._current()
            _check_round(record, round_number)
            site = self._rebuild(record)
            answer = _handle(site, step, body)
            if step == UNMASK:
                self._wipe(record)
            elif (step, body) not in record.log:
                self._keep(record, (*record.log, (step, body)), site)
        return answer

    def mask(
        self, inbox: bytes, round_number: int, model: bytes, threads: int, make: Callable[[], RingVector]
    ) -> tuple[bytes, RingVector]:
        """Step 3: mask the site's vector.

        Args:
            inbox: The step's message.
            round_number: The round that the vector is for.
            model: SHA-256 of the global model, as the site computed it.
            threads: Threads that mask.
            make: Makes the vector, of the contract's length; called once the message is found in order. It is masked
                in place.

        Returns:
            The signed statement of the masked vector's digest, and the masked vector.

        Raises:
            SecureSumError: the site refuses, and why.
        """
        with self._turn():
            record = self._current()
            _check_round(record, round_number)
            if any(step == MASK for step, _ in record.log):
                raise StepError(
                    "update", expected="to be asked for once in an attempt", fix="try the round again"
                )
            site = self._rebuild(record)
            site.receive(from_bytes(Inbox, inbox))
        vector = make()  # which may take long
        with self._turn():
            if self._load() != record:
                raise StepError("attempt", expected="to be as it was before the vector was made")
            begun = self._keep(record, (*record.log, (MASK, inbox)), site, durable=True)
            site.mask(vector, model=model, threads=threads)
            digest = hashlib.sha256(vector.data).digest()
            statement = site.masked(digest)
            self._keep(begun, (*begun.log, (_MASKED, digest)), site)
        return to_bytes(statement), vector

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only process that works on this site's attempt."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _begin(self, body: bytes) -> _Record:
        begin = from_bytes(Begin, body)
        now = (begin.round, begin.attempt)
        before, earlier = self._load(), self._earlier()
        if before and before.now == now and before.log == ((ADVERTISE, body),):
            return before  # the same message twice
        newest = max(
            before.now if before else (0, 0), (earlier.round, earlier.attempt) if earlier else (0, 0)
        )
        return _Record(self._contract.run, newest, now, self._random(keys.KEY), ())

    def _current(self) -> _Record:
        record = self._load()
        if record is None or record.run != self._contract.run or not record.log:
            raise StepError(
                "attempt",
                expected="one that this site has joined and not yet answered",
                fix="try the round again",
            )
        return record

    def _rebuild(self, record: _Record) -> Site:
        known = self._live.get(self._folder)
        if known is not None and record.log and known[0] == record and known[1].contract == self._contract:
            return known[1]
        site = Site(
            self._contract,
            self._member.name,
            self._member.identity,
            minimum=self._member.minimum,
            random=keys.random_from(record.seed),
            answered=self._mark,
            earlier=self._earlier(),
            newest=record.newest,
        )
        for step, body in record.log:
            _handle(site, step, body)
        return site

    def _keep(self, record: _Record, log: Log, site: Site, *, durable: bool = False) -> _Record:
        kept = dataclasses.replace(record, log=log)
        content = pack(kept.run, kept.newest, kept.now, kept.seed, kept.log)
        _write_secret(self._folder / "attempt", content, durable=durable)
        self._live[self._folder] = (kept, site)
        return kept

    def _wipe(self, record: _Record) -> None:
        """Keep only which attempt it was."""
        _write_secret(self._folder / "attempt", pack(record.run, record.newest, record.now, b"", ()))
        self._live.pop(self._folder, None)

    def _load(self) -> _Record | None:
        """The attempt that was kept; a file that a power cut has torn is none, and the next attempt replaces it."""
        try:
            match unpack((self._folder / "attempt").read_bytes()):
                case (str(run), (int(a), int(b)), (int(c), int(d)), bytes(seed), tuple(steps)):
                    return _Record(run, (a, b), (c, d), seed, cast(Log, steps))
        except (FileNotFoundError, EncodingError):
            pass
        return None

    def _mark(self, mark: Answered) -> None:
        content = pack(mark.run, mark.round, mark.attempt, mark.survivors)
        write_bytes(self._folder / "answered", content, durable=True)

    def _earlier(self) -> Answered | None:
        try:
            content = (self._folder / "answered").read_bytes()
        except FileNotFoundError:
            return None
        match unpack(content):
            case (str(run), int(round_), int(attempt), bytes(survivors)):
                return Answered(run, round_, attempt, survivors)
        raise StorageError(str(self._folder / "answered"), expected="a mark as this site keeps it")


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


def _check_round(record: _Record, round_number: int) -> None:
    """What a vector is of, and what its masks are for, is one round: otherwise one update could be summed in two."""
    if record.now[0] != round_number:
        raise StaleError("round", round_number, expected=f"{record.now[0]}, which the attempt is at")


def _write_secret(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file that nobody else can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise StorageError(str(path), expected=f"a disk that takes the write ({error.strerror})") from error
