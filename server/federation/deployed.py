"""A deployed run: the process that coordinates one run over the sites of a federation, behind the door."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from cloister.lm.model.model import count_parameters
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.door_pb2 import Site
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.plan.plan import Plan
from cloister.server.door.grid import DoorGrid, most_bytes_of
from cloister.server.federation.app import GridChannel
from cloister.server.federation.deployment import Deployment, check_deployable, check_newest
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity, next_start, reached
from cloister.server.record.journal import FINISHED
from cloister.server.record.outcome import Outcome, finish
from cloister.server.record.progress import Connected, Moved, Observer
from cloister.server.record.public import public_model
from cloister.server.run import run

_log = logging.getLogger(__name__)

_LONG_S = 600.0
"""Seconds between two lines that say that sites are waited for."""


@dataclass(frozen=True)
class Begun:
    """A deployed run, as its carrier sees it."""

    folder: RunFolder
    deployment: Deployment
    federation: Federation
    label: str
    """Identity of the run."""
    sender: Callable[[Roster | None], Sender]
    """Makes the side that signs the run's requests; given the sites whose replies are sealed."""


def coordinate(
    folder: RunFolder,
    registry: Registry,
    observe: Observer,
    carried: Callable[[Begun], AbstractContextManager[GridChannel]],
) -> Outcome:
    """Run a folder's plan over the sites of a federation, from the beginning or from where an earlier process stopped.

    Args:
        folder: The run folder, with a `Deployment`.
        registry: The coordinator's folder of the federation.
        observe: Receives the run's events, in several threads.
        carried: A context in which the run's messages are carried; it waits for the sites.

    Raises:
        CloisterError: the run stopped; it can be resumed.
    """
    plan, deployment = folder.plan, Deployment.read(folder)
    federation = registry.version(deployment.version)
    check_deployable(plan, federation, folder)
    check_newest(folder)
    if reached(folder, FINISHED):
        return finish(folder, observe)
    key, public = registry.signing_key(), public_model(folder, observe)
    roster = federation.roster if plan.aggregation.secure else None
    label = identity(folder, roster)
    sender = partial(Sender, key, label, next_start(folder))
    with carried(Begun(folder, deployment, federation, label, sender)) as channel:
        return run(
            folder,
            channel,
            observe,
            roster=roster,
            public=public,
            audit_log=AuditLog(registry.path / AUDIT_LOG),
        )


@contextmanager
def by_door(begun: Begun, far: socket.socket, observe: Observer) -> Iterator[GridChannel]:
    """The messages of a run through the door.

    Args:
        begun: The run.
        far: The end of a pair of sockets of which the door serves the other.
        observe: Receives the events of connections.

    Raises:
        EngineError: the coordinator's process has ended.
    """
    folder, plan, names = begun.folder, begun.folder.plan, begun.federation.roster.names
    tell = _telling(names, observe)
    most_bytes = most_bytes_of(plan, count_parameters(plan).trained)
    with DoorGrid(far, begun.label, folder.spool, names, most_bytes, tell) as grid:
        _wait_for_sites(grid, plan, begun.deployment)
        yield GridChannel(grid, begun.sender(None), dict(enumerate(names, 1)))
        tell(grid.connected())
        grid.close(over=True)
    shutil.rmtree(folder.spool, ignore_errors=True)


def _wait_for_sites(grid: DoorGrid, plan: Plan, deployment: Deployment) -> None:
    """Wait until all sites are connected, or when the time is over, those that are needed; the operator sees which."""
    if grid.wait_for(plan.cohort.sites, deployment.wait_s) < plan.cohort.sites:
        while grid.wait_for(plan.cohort.needed(), _LONG_S) < plan.cohort.needed():
            _log.info("waiting for sites")


def _telling(names: tuple[str, ...], observe: Observer) -> Callable[[list[Site]], None]:
    """Tells which of some sites are connected, and the bytes that have moved, where that is not what was told last."""
    told: dict[type, Connected | Moved] = {Moved: Moved({}, {})}

    def tell(sites: list[Site]) -> None:
        online = {site.name for site in sites if site.online}
        missing = {name: "it is not connected" for name in names if name not in online}
        moved = Moved({site.name: site.sent for site in sites}, {site.name: site.received for site in sites})
        for event in (Connected(tuple(name for name in names if name in online), missing), moved):
            if event != told.get(type(event)):
                told[type(event)] = event
                observe(event)

    return tell
