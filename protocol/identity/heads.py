"""The heads of audit logs that one party keeps of the others, by which a folder restored from a backup is found.

Each party says the head of its audit log to the other in a session, and keeps the other's. At the next session each
says what it has kept, and the owner of the log must have that line. A folder that was restored from an older backup
lacks it: its ledger and its marks may lack charges and answers of the time between.

A folder may also be restored while its command runs, and its log may then outgrow the head that the other party has
kept, which the next head would replace. So an owner remembers what the other party has seen in the session, and says
no other head before it has checked that its log still has that line.

A head is said to parties that have proved who they are, and shows the number of lines. The hash is that of the line
under a key of its own party: nobody else can test guesses of what the line tells. It binds nobody who lies: a party
that forks its log on purpose can keep both.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cloister.protocol.errors import RestoredError, StorageError
from cloister.protocol.identity.audit_log import FIRST, Line, line_of
from cloister.protocol.machine.storage import on_disk, write_bytes, write_new

_log = logging.getLogger(__name__)

COORDINATOR: Final = "coordinator"
"""The name under which a site keeps its coordinator's head."""


@dataclass(frozen=True)
class Head:
    """The last line of an audit log."""

    number: int
    """Its position, from 1; 0: the log is empty."""
    hash: str
    """HMAC-SHA256 of its hash in the chain, in hex."""

    @classmethod
    def said(cls, number: int, hash: str) -> Head:
        """What another party says; `EMPTY` if no party has such a line."""
        return cls(number, hash) if re.fullmatch("[0-9a-f]{64}", hash) else EMPTY


EMPTY: Final = Head(0, FIRST.hex())
_KEY = "audit.key"
"""The file of the key, beside the log."""


class Heads:
    """What one party keeps.

    Args:
        log: Its own audit log; None: it says nothing, keeps nothing and checks nothing, as in a simulation.
        folder: Where it keeps the heads of others, a file for each, made if missing.
    """

    def __init__(self, log: Path | None, folder: Path | None = None) -> None:
        self._log = log
        self._folder = folder

    def own(self) -> Head:
        """The head of its own log.

        Raises:
            AuditLogError: the file is not an audit log.
            StorageError: it cannot be read.
        """
        line = None if self._log is None else line_of(self._log)
        return EMPTY if line is None else self._head(line)

    def following(self, peer: str, seen: Head) -> Head:
        """The head of its own log to say next, after a check of what another party has seen; errors as for `check`."""
        own = self.own()  # first: a log that is replaced in between is found
        self.check(peer, seen)
        return own

    def known(self, peer: str) -> Head:
        """What it has kept of another party; `EMPTY` if nothing, or what is there is damaged."""
        try:
            return Head(**json.loads(self._file(peer).read_bytes())) if self._folder else EMPTY
        except (OSError, ValueError, TypeError):
            return EMPTY

    def note(self, peer: str, head: Head) -> None:
        """Keep a head of another party, which is not of a shorter log than it was.

        A power cut, or a disk that refuses, may lose it: then less is found, and a warning says so of the disk.

        Raises:
            RestoredError: it is.
        """
        self.check_newest(peer, head)
        if self._folder is None or head.number <= self.known(peer).number:
            return
        try:
            with on_disk(self._folder):
                self._folder.mkdir(mode=0o700, exist_ok=True)
            write_bytes(self._file(peer), json.dumps(asdict(head)).encode(), durable=False)
        except StorageError as error:
            _log.warning("%s", error)

    def check_newest(self, peer: str, own: Head) -> None:
        """Check that the log of another party is as long as it was.

        Raises:
            RestoredError: it is shorter.
        """
        known = self.known(peer)
        if own.number < known.number:
            raise RestoredError(
                f"audit log of {peer}",
                f"{own.number} lines",
                expected=f"at least the {known.number} that were seen of it: this is a restored backup, or a copy of "
                "its folder that runs beside it",
                fix="end the copy, or restore a newer one; if there is none, the party that keeps the head can remove "
                f"heads/{peer}.json",
            )

    def check(self, peer: str, head: Head) -> None:
        """Check that its own log has a line that another party says that it has seen.

        Raises:
            RestoredError: it has not.
            AuditLogError: the file is not an audit log.
            StorageError: it cannot be read.
        """
        if self._log is None or head.number == 0:
            return
        line = line_of(self._log, head.number)
        if line is None or self._head(line) != head:
            raise RestoredError(
                "audit log",
                f"{self.own().number} lines",
                expected=f"line {head.number} as {peer} has seen it; this log is older, such as a restored backup",
                fix=f"restore a newer copy of its folder; if there is none, {peer} can remove the head that it keeps",
            )

    def _head(self, line: Line) -> Head:
        assert self._log is not None
        path = self._log.with_name(_KEY)
        if not path.exists():
            write_new(path, os.urandom(32))
        with on_disk(path):
            key = path.read_bytes()
        return Head(line.number, hmac.new(key, bytes.fromhex(line.hash), hashlib.sha256).hexdigest())

    def _file(self, peer: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{peer}.json"


NO_HEADS: Final = Heads(None)
"""Says, keeps and checks nothing."""
