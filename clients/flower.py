"""A site in a Flower federation that is there already: the `ClientApp` that a bundle names.

The SuperNode's configuration has the path of the site's TOML. Each message may come in another process, which finds in
the site's state folder what the last one has left.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import IO

from flwr.app import Context

from cloister.clients.app import client_app
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.setup.enrolment import take
from cloister.clients.site import Site
from cloister.protocol.errors import PlanError, StorageError
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog

_TURN_S = 60.0
"""Seconds for which the process of the message before may take to end."""
_locks: dict[Path, IO[bytes]] = {}
"""By state folder, what keeps another process from serving the site until this one ends."""


def _open(context: Context, resident: Resident) -> Site:
    path = context.node_config.get("site")
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise PlanError("site in the SuperNode's --node-config", path, expected="the path of its site.toml")
    config = read_config(Path(path))
    _take(config)
    return Site(config, resident, audit_log=AuditLog(config.folder / AUDIT_LOG))


def _take(config: SiteConfig) -> None:
    """Take the site for this process.

    Raises:
        StorageError: another process serves it, such as `cloister site start`.
    """
    if config.folder in _locks:
        return
    until = time.monotonic() + _TURN_S
    while True:
        try:
            _locks[config.folder] = take(config)
            return
        except StorageError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.1)  # a lock has no wait with a limit


# Flower's own runtime sets up logging of its own name alone.
logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
app = client_app(_open, sealed=True)
