"""A deployed run: the process that coordinates one run over the sites of a federation.

It is the `ServerApp` of a run of Flower's SuperLink, opens the exchange, and invites through Flower every site that is
not connected, again and again until the run is over. So a site comes back by its identity at any time, and neither
SuperLink nor SuperNode is needed for longer than an invitation takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from cloister.lm.model.layout import Vector
from cloister.lm.model.model import count_parameters
from cloister.protocol.errors import EngineError
from cloister.protocol.identity.address import host_of
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog
from cloister.protocol.identity.federation import Federation
from cloister.protocol.plan.plan import SIMULATED_PUBLIC, Plan
from cloister.server.door.certificate import new_certificate
from cloister.server.door.door import ExchangeChannel, most_bytes_of
from cloister.server.federation.app import FlowerRun, GridChannel, SuperLink
from cloister.server.federation.deployment import Deployment, check_deployable
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity, reached
from cloister.server.record.journal import FINISHED
from cloister.server.record.outcome import Outcome, finish, outcome
from cloister.server.record.progress import Connected, Moved, Observer
from cloister.server.record.public import public_model
from cloister.server.run import run
from cloister.server.sum.channel import Channel

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at which sites are connected."""
_AGAIN_S = 10.0
"""Seconds after which a site that has not come is invited again."""
_TOLD_S = 2.0
"""Seconds between two reports of the bytes that have moved."""


def coordinate(
    folder: RunFolder, registry: Registry, superlink: SuperLink, observe: Observer, bind: str
) -> Outcome:
    """Run a folder's plan over the sites of a federation, from the beginning or from where an earlier process stopped.

    Args:
        folder: The run folder, with a `Deployment`.
        registry: The coordinator's folder of the federation.
        superlink: Flower's SuperLink.
        observe: Receives the run's events, in several threads.
        bind: HOST:PORT on which the exchange listens.

    Raises:
        CloisterError: the run stopped; it can be resumed.
    """
    plan, deployment = folder.plan, Deployment.read(folder)
    federation = registry.version(deployment.version)
    check_deployable(plan, federation, deployment.transport, folder)
    if reached(folder, FINISHED):
        finish(folder, observe)
        return outcome(folder)
    public = public_model(folder, observe)
    keys = {site.name: site.supernode for site in registry.federation.sites}
    if deployment.transport == "flower":
        with superlink.run(keys) as flower:
            _wait_for_nodes(flower, federation, plan, deployment, observe)
            return _run(folder, GridChannel(flower.grid), observe, registry, public)
    newest = registry.federation
    with ExchangeChannel(
        identity(folder, federation.roster if plan.aggregation.secure else None),
        new_certificate([host_of(newest.exchange)]),
        folder.spool,
        sites=len(federation.sites),
        most_bytes=most_bytes_of(plan, count_parameters(plan).trained),
        bind=bind,
        advertised=newest.exchange,
        cards=federation.roster.cards,
    ) as channel:
        inviting = Inviting(superlink, keys, channel, federation.roster.names, observe)
        try:
            _wait_for_sites(channel, plan, deployment)
            done = _run(folder, channel, observe, registry, public)
        finally:
            inviting.close()
        channel.close(over=True)
    return done


def _run(
    folder: RunFolder, channel: Channel, observe: Observer, registry: Registry, public: Vector | None
) -> Outcome:
    plan, federation = folder.plan, registry.version(Deployment.read(folder).version)
    return run(
        folder,
        channel,
        observe,
        roster=federation.roster if plan.aggregation.secure else None,
        public=public,
        evaluation=str(folder.sites.public_records) if plan.server.evaluation == SIMULATED_PUBLIC else "",
        audit_log=AuditLog(registry.path / AUDIT_LOG),
    )


def _wait_for_sites(channel: ExchangeChannel, plan: Plan, deployment: Deployment) -> None:
    """Wait until all sites are connected, or when the time is over, those that are needed; the operator sees which."""
    if channel.wait_for(plan.cohort.sites, deployment.wait_s) < plan.cohort.sites:
        while channel.wait_for(plan.cohort.needed(), _LONG_S) < plan.cohort.needed():
            _log.info("waiting for sites")


_LONG_S = 600.0


def _wait_for_nodes(
    flower: FlowerRun, federation: Federation, plan: Plan, deployment: Deployment, observe: Observer
) -> None:
    """As `_wait_for_sites`, for sites that are reached through Flower alone, which can only be asked again."""
    until = time.monotonic() + deployment.wait_s
    shown: set[str] | None = None
    look = threading.Event()
    while True:
        there = set(flower.nodes()).intersection(federation.roster.names)
        if there != shown:
            shown = there
            observe(_connected(federation.roster.names, there, {}))
        needed = plan.cohort.sites if time.monotonic() < until else plan.cohort.needed()
        if len(there) >= needed:
            return
        look.wait(_LOOK_S)


def _connected(names: tuple[str, ...], there: set[str], known: Mapping[str, str]) -> Connected:
    missing = {name: known.get(name, "its SuperNode is not connected") for name in names if name not in there}
    return Connected(tuple(name for name in names if name in there), missing)


class Inviting:
    """Invites the sites that are not connected, until it is closed.

    Args:
        superlink: Flower's SuperLink.
        keys: By site, the public key of its SuperNode.
        channel: The exchange.
        names: The sites of the run.
        observe: Is told when other sites are connected than before, and the bytes that have moved.
    """

    def __init__(
        self,
        superlink: SuperLink,
        keys: Mapping[str, str],
        channel: ExchangeChannel,
        names: tuple[str, ...],
        observe: Observer,
    ) -> None:
        self._superlink = superlink
        self._keys = keys
        self._channel = channel
        self._names = names
        self._observe = observe
        self._over = threading.Event()
        self._known: dict[str, str] = {}
        """What is known of a site that is missing."""
        self._invited_at: dict[str, float] = {}
        self._shown: Connected | None = None
        self._moved = Moved({}, {})
        self._moved_at = 0.0
        self._thread = threading.Thread(target=self._work, name="inviting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Invite no more, and tell all bytes that have moved. The channel is still open."""
        self._over.set()
        self._thread.join()
        try:
            self._tell_moved()
        except Exception:  # such as a reader that is gone: it must not take the place of an error of the run
            _log.warning("telling the bytes that have moved failed", exc_info=True)

    def _work(self) -> None:
        while not self._over.is_set():
            try:
                with self._superlink.run(self._keys) as flower:
                    while not flower.lost:
                        self._look(flower)
                        if self._over.wait(_LOOK_S):
                            return
            except (
                EngineError
            ) as error:  # the SuperLink is starting again; sites that are connected need none
                _log.warning("inviting sites: %s", error)
                self._known = dict.fromkeys(self._names, "the SuperLink does not answer")
            except Exception:  # a defect: the run goes on with the sites that it has
                _log.exception("inviting sites failed")
            self._show(self._online())
            self._over.wait(_LOOK_S)

    def _online(self) -> set[str]:
        return {site.name for site in self._channel.connected() if site.online}

    def _look(self, flower: FlowerRun) -> None:
        """Invite who is missing and is due."""
        now, online, nodes = time.monotonic(), self._online(), flower.nodes()
        for name, reason in flower.refusals():
            self._known[name] = f"it does not come: {reason}"
        due = {}
        for name in self._names:
            if name in online:
                self._known.pop(name, None)
                self._invited_at.pop(name, None)
            elif name not in nodes:
                self._known[name] = "its SuperNode is not connected"
            elif now - self._invited_at.get(name, -_AGAIN_S) >= _AGAIN_S:
                self._invited_at[name] = now
                self._known.setdefault(name, "")
                if not self._known[name].startswith("it does not come"):
                    self._known[name] = "it is invited"
                due[name] = (nodes[name], self._channel.invite().to_bytes())
        if due:
            flower.invite(due)
        self._show(online)

    def _show(self, online: set[str]) -> None:
        connected = _connected(self._names, online, self._known)
        if connected != self._shown:
            self._shown = connected
            self._observe(connected)
        if time.monotonic() - self._moved_at >= _TOLD_S:
            self._tell_moved()

    def _tell_moved(self) -> None:
        """Tell the bytes that have moved, if they are others than were told last."""
        sites = self._channel.connected()
        moved = Moved({site.name: site.sent for site in sites}, {site.name: site.received for site in sites})
        if sites and moved != self._moved:
            self._moved, self._moved_at = moved, time.monotonic()
            self._observe(moved)
