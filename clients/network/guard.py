"""A site's guard: which requests are the coordinator's own, and none of them older than one that was served."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.state.kept import run_folder, run_id
from cloister.protocol.errors import SignatureError, StaleError
from cloister.protocol.machine.storage import on_disk
from cloister.protocol.messages.envelope import Envelope, seal, verified
from cloister.protocol.messages.wire import Buffer

_SERVED = "served"
"""The folder of a file for each run, of the highest counter and the hash of its envelope."""
_MARK = struct.Struct(">Q32s")


@dataclass(frozen=True)
class Guard:
    """Of one site."""

    site: str
    """Its name."""
    coordinator: str
    """The coordinator's public key, in hex; empty: no request is served."""
    state: Path
    """The site's state folder."""
    identity: Callable[[str], Ed25519PrivateKey] = field(repr=False)
    """Reads the site's identity key in a run."""

    def check(self, data: bytes, frames: Sequence[Buffer] | None) -> Envelope:
        """Check that the coordinator has signed a request for this site; arguments and errors as for `verified`."""
        return verified(data, bytes.fromhex(self.coordinator), self.site, frames)

    def admit(self, data: bytes, frames: Sequence[Buffer], *, sealed: bool = False) -> Envelope:
        """Check a request's envelope, before anything of the request is decoded, and mark it as served.

        Args:
            data: The envelope.
            frames: The request.
            sealed: Refuse a request whose reply would not be sealed.

        Raises:
            EncodingError, SignatureError, MemberError: as `verified`.
            SignatureError: the reply would not be sealed.
            StaleError: the site has served a later request of the run, or another one with the same counter.
            StorageError: the disk refuses.
        """
        envelope = self.check(data, frames)
        if sealed and not envelope.reply_key:
            raise SignatureError("key of the reply", expected="one, because others carry the reply")
        self.mark(envelope, data)
        return envelope

    def mark(self, envelope: Envelope, data: bytes) -> None:
        """Mark a request as served; again once it has joined the site to its run.

        A run that the site has not joined has no folder, and nothing is marked: its join can be sent again, and takes a
        consent that is free. The mark stays when the folder is removed. A process that is killed between join and mark
        leaves none before the next request.

        Args:
            envelope: What was verified.
            data: It, as it came.

        Raises:
            StaleError, StorageError: as `admit`.
        """
        mark = self.state / _SERVED / run_id(envelope.run)
        known = mark.exists()
        if not known and (known := run_folder(self.state, envelope.run).exists()):
            with on_disk(mark):
                mark.parent.mkdir(mode=0o700, exist_ok=True)
        if known:
            _advance(mark, envelope.counter, hashlib.sha256(data).digest())

    def sealed(self, envelope: Envelope, data: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The frames of a reply as they leave: sealed, if the envelope wants it."""
        if not envelope.reply_key:
            return frames
        return seal(self.identity(envelope.run), envelope.reply_key, data, frames)


def _advance(path: Path, counter: int, digest: bytes) -> None:
    """Mark a request as served.

    The 40 bytes are written in place and not synced: they are whole after the end of any process. After a power cut
    they may be older. What must not happen twice has marks of its own that are synced: the secure sum's, the charges.

    Raises:
        StaleError: a later request was served, or another one with the same counter.
        StorageError: the disk refuses.
    """
    with on_disk(path), os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = os.pread(file.fileno(), _MARK.size, 0)
        highest, known = _MARK.unpack(held) if len(held) == _MARK.size else (0, b"")
        if counter < highest or (counter == highest and digest != known):
            raise StaleError(
                "counter of the request",
                counter,
                expected=f"more than {highest}, which this site has served, or the same request again",
                fix="if the coordinator's run folder was restored from a backup, start a new run",
            )
        os.pwrite(file.fileno(), _MARK.pack(counter, digest), 0)
