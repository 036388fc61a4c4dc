"""A deployed run: the process that coordinates one run over the sites of a federation, behind the door."""

from __future__ import annotations

import logging
import shutil
import socket
import time

from cloister.lm.model.model import count_parameters
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog
from cloister.protocol.plan.plan import SIMULATED_PUBLIC, Plan
from cloister.server.door.grid import Connected as Site
from cloister.server.door.grid import DoorGrid, most_bytes_of
from cloister.server.federation.app import GridChannel
from cloister.server.federation.deployment import Deployment, check_deployable, check_newest
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity, reached
from cloister.server.record.journal import FINISHED
from cloister.server.record.outcome import Outcome, finish, outcome
from cloister.server.record.progress import Connected, Moved, Observer
from cloister.server.record.public import public_model
from cloister.server.run import run

_log = logging.getLogger(__name__)

_LONG_S = 600.0
"""Seconds between two lines that say that sites are waited for."""
_TOLD_S = 2.0
"""Seconds between two reports of the bytes that have moved."""


def coordinate(folder: RunFolder, registry: Registry, far: socket.socket, observe: Observer) -> Outcome:
    """Run a folder's plan over the sites of a federation, from the beginning or from where an earlier process stopped.

    Args:
        folder: The run folder, with a `Deployment`.
        registry: The coordinator's folder of the federation.
        far: The end of a pair of sockets of which the door serves the other.
        observe: Receives the run's events, in several threads.

    Raises:
        CloisterError: the run stopped; it can be resumed.
    """
    plan, deployment = folder.plan, Deployment.read(folder)
    federation = registry.version(deployment.version)
    check_deployable(plan, federation, folder)
    check_newest(folder)
    if reached(folder, FINISHED):
        finish(folder, observe)
        return outcome(folder)
    public = public_model(folder, observe)
    roster = federation.roster if plan.aggregation.secure else None
    names = federation.roster.names
    telling = Telling(names, observe)
    with DoorGrid(
        far,
        identity(folder, roster),
        folder.spool,
        names,
        most_bytes_of(plan, count_parameters(plan).trained),
        telling.seen,
    ) as grid:
        _wait_for_sites(grid, plan, deployment)
        done = run(
            folder,
            GridChannel(grid, dict(enumerate(names, 1))),
            observe,
            roster=roster,
            public=public,
            evaluation=str(folder.sites.public_records) if plan.server.evaluation == SIMULATED_PUBLIC else "",
            audit_log=AuditLog(registry.path / AUDIT_LOG),
        )
        telling.moved(grid.connected())
        grid.close(over=True)
    shutil.rmtree(folder.spool, ignore_errors=True)
    return done


def _wait_for_sites(grid: DoorGrid, plan: Plan, deployment: Deployment) -> None:
    """Wait until all sites are connected, or when the time is over, those that are needed; the operator sees which."""
    if grid.wait_for(plan.cohort.sites, deployment.wait_s) < plan.cohort.sites:
        while grid.wait_for(plan.cohort.needed(), _LONG_S) < plan.cohort.needed():
            _log.info("waiting for sites")


class Telling:
    """Tells which sites are connected, and the bytes that have moved.

    Args:
        names: The sites of the run.
        observe: Is told.
    """

    def __init__(self, names: tuple[str, ...], observe: Observer) -> None:
        self._names = names
        self._observe = observe
        self._shown: Connected | None = None
        self._moved = Moved({}, {})
        self._moved_at = 0.0

    def seen(self, sites: list[Site]) -> None:
        """Tell what has changed; of the bytes no more often than once in `_TOLD_S`."""
        online = {site.name for site in sites if site.online}
        connected = Connected(
            tuple(name for name in self._names if name in online),
            {name: "it is not connected" for name in self._names if name not in online},
        )
        if connected != self._shown:
            self._shown = connected
            self._observe(connected)
        if time.monotonic() - self._moved_at >= _TOLD_S:
            self.moved(sites)

    def moved(self, sites: list[Site]) -> None:
        """Tell the bytes that have moved, if they are others than were told last."""
        moved = Moved({site.name: site.sent for site in sites}, {site.name: site.received for site in sites})
        if sites and moved != self._moved:
            self._moved, self._moved_at = moved, time.monotonic()
            self._observe(moved)
