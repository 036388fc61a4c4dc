"""A deployed site: one process that stays at the coordinator's door, from run to run."""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import threading
import time
from functools import partial
from pathlib import Path

from cloister.clients.checks.heartbeat import heartbeat_path
from cloister.clients.network.door import DoorSite, Visitor
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.setup.enrolment import must_be_installed, take
from cloister.clients.site import Site
from cloister.protocol.errors import EngineError, StorageError
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog
from cloister.protocol.identity.certificates import check_authority, read_certificate
from cloister.protocol.identity.heads import Heads
from cloister.protocol.identity.roster import load_identity
from cloister.protocol.machine.storage import write_bytes

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
"""Seconds between two heartbeats."""
_END_S = 5.0
"""Seconds for which a request that is handled may still go on when the site is stopped."""


class DeployedSite:
    """A site's process; `run` serves until it is stopped.

    Its configuration is read again for each session and each request: what is installed meanwhile is used.

    Args:
        path: The site's TOML.

    Raises:
        CloisterError: the site is not set up, or another process serves it.
    """

    def __init__(self, path: Path) -> None:
        self._config = partial(read_config, path)
        config = self._config()
        authority = read_certificate(must_be_installed(config).authority, "authority")
        check_authority(authority, datetime.datetime.now(datetime.UTC))
        load_identity(Path(config.identity))
        self._lock = take(config)
        self._heartbeat = heartbeat_path(config)
        self._unshown = False
        """Whether the last heartbeat could not be written."""
        self._resident = Resident()
        self._site = DoorSite(
            Visitor(
                config.name,
                lambda: load_identity(Path(self._config().identity)),
                lambda: must_be_installed(self._config()).entrance,
                Heads(config.folder / AUDIT_LOG, config.folder / "heads"),
            ),
            self._open,
            config.folder / "door",
            ended=self._resident.close,
        )

    def run(self, stopped: threading.Event) -> bool:
        """Serve until `stopped` is set.

        Returns:
            Whether nothing is left at work: a training that goes on does not keep the process from ending, because
            the site is asked again when it is back.

        Raises:
            EngineError: the site is at the door no more, by a defect.
        """
        serving = threading.Thread(target=self._serve, name="door", daemon=True)
        with self._lock:
            self._show()  # in place of what a process before has left
            serving.start()
            try:
                while not stopped.wait(_HEARTBEAT_S):
                    if not serving.is_alive():
                        raise EngineError("connection", expected="a thread that keeps it; it failed")
                    self._show()
            finally:
                self._site.stop()
                serving.join(_END_S)
                self._heartbeat.unlink(missing_ok=True)
        return not serving.is_alive()

    def _serve(self) -> None:
        try:
            self._site.run()
        finally:
            self._resident.close()

    def _open(self) -> Site:
        config = self._config()
        return Site(config, self._resident, audit_log=AuditLog(config.folder / AUDIT_LOG))

    def _show(self) -> None:
        """Write a heartbeat for `cloister status`."""
        contact_s = time.monotonic() - self._site.heard_at
        seen = {
            "pid": os.getpid(),
            "connected": self._site.connected,
            "contact_s": round(contact_s, 1) if math.isfinite(contact_s) else None,
            "run": self._site.run_label,
            "trouble": self._site.trouble,
        }
        try:
            write_bytes(self._heartbeat, json.dumps(seen).encode(), durable=False)
        except StorageError as error:  # the site goes on, and answers what it can: others wait for no dropout
            if not self._unshown:
                _log.warning("%s", error)
            self._unshown = True
        else:
            self._unshown = False
