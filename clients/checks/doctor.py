"""What `cloister doctor` checks at a site: federation, keys, releases, disk, devices, and the way to the door."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path

from cloister.clients.network.door import health
from cloister.clients.network.route import Route
from cloister.clients.setup.config import SiteConfig
from cloister.clients.setup.enrolment import must_be_installed
from cloister.protocol.errors import ConnectionFailedError, RosterError
from cloister.protocol.identity.certificates import check_authority, read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.roster import load_identity
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.findings import Hop
from cloister.protocol.machine.prerequisites import check_releases, check_space
from cloister.protocol.plan.plan import Plan

_HOPS: tuple[tuple[str, Callable[[Route], str], int], ...] = (
    ("proxy", Route.choose, 0),
    ("DNS", Route.resolve, 1),
    ("TCP", Route.connect, 1),
    ("CONNECT", Route.tunnel, 1),
    ("TLS", Route.handshake, 4),  # a certificate that is refused is fetched again, to say what it is
)
"""The hops to the door, and the waits of each."""


@dataclass
class SiteDoctor(Closing):
    """The hops of a site; a context manager, which closes the connection."""

    path: Path
    """Its `site.toml`, for messages."""
    config: SiteConfig
    """Its settings."""
    limit_s: float
    """Seconds of each wait."""
    plan: Plan | None
    """The plan that it is to train; None: it is not known."""

    def close(self) -> None:
        """Close the connection."""
        if "_route" in vars(self):
            self._route.close()

    def hops(self) -> list[Hop]:
        """The hops, in their order."""
        found = [
            Hop("federation", self._installed, "install the coordinator's file: cloister site install FILE"),
            Hop("keys", self._keys, "restore the site's keys from their backup", needs=("federation",)),
            Hop("releases", check_releases, "install cloister again"),
            Hop("disk", self._disk, "free space"),
            Hop(
                "devices",
                self._devices,
                f"correct device and [mesh] in {self.path}; a GPU: does nvidia-smi list it, and has torch CUDA?",
            ),
        ]
        before = "federation"
        for name, make, waits in (*_HOPS, ("door", self._served, 1)):
            look = partial(lambda make: make(self._route), make)
            found.append(Hop(name, look, "ask the coordinator", waits * self.limit_s, (before,)))
            before = name
        return found

    @cached_property
    def _federation(self) -> Federation:
        return must_be_installed(self.config)

    @cached_property
    def _route(self) -> Route:
        return Route(self._federation.entrance, self.limit_s)

    def _installed(self) -> str:
        federation = self._federation
        if federation.site(self.config.name) is None:
            raise RosterError(
                "name",
                self.config.name,
                expected=f"a site of {federation.name}, version {federation.version}",
                fix=f"correct name in {self.path}; or the site has left: ask the coordinator",
            )
        authority = read_certificate(federation.authority, "authority")
        check_authority(authority, datetime.datetime.now(datetime.UTC))
        return f"{federation.name}, version {federation.version}, of {len(federation.sites)} sites"

    def _keys(self) -> str:
        entry, path = self._federation.site(self.config.name), self.config.identity
        if entry is None or load_identity(Path(path)).public_key().public_bytes_raw() != entry.key:
            raise RosterError(
                "identity", path, expected="the key that the installed federation has for this site"
            )
        return f"{path}, of its owner only"

    def _disk(self) -> str:
        needed = site_bytes(self.plan) if self.plan else None
        return check_space(self.config.folder, needed, "needed by the plan, besides the data")

    def _devices(self) -> str:
        """As `cloister site check` does, but without a plan nothing is known of the model."""
        from cloister.clients.ranks.device_mesh import devices_for_ranks, devices_of, memory_of, mesh_for
        from cloister.lm.parallel.mesh import Mesh

        config = self.config
        if self.plan is not None:
            mesh, names = mesh_for(self.plan, config.mesh, config.device)
            more = f"; what each will hold: cloister site check {self.path} PLAN"
        else:
            mesh = Mesh(*(getattr(config.mesh, degree.name) or 1 for degree in fields(Mesh)))
            names = devices_of(config.device)
            there = len(devices_for_ranks(names, mesh.size))
            mesh.check_devices(there, f"lower a degree of [mesh] in {self.path}, or add devices")
            more = "; torch sees no GPU" if config.device == "auto" and names == ["cpu"] else ""
        shown = ", ".join(f"{name} ({memory_of(name) / 1e9:.0f} GB)" for name in dict.fromkeys(names))
        return f"{shown}{more}"

    def _served(self, route: Route) -> str:
        route.close()
        problem = health(route.entrance, self.limit_s)
        if problem:
            raise ConnectionFailedError("door", problem, expected="an answer of `cloister coordinator start`")
        return "the coordinator serves"


def site_bytes(plan: Plan) -> int:
    """Bytes that a site's state folder needs for a run, besides the prepared data.

    With T trained parameters in float32, and U bytes of a coded update (`aggregation.sums.Sums.training`):

        4 T  the base model, as the join sends it
      + 4 T  the global model of the round
      + 2 U  the coded update, which is written beside that of the round before
      + 8 T for each moment of a parameter where `local.optimizer_state` is `keep`: of this round and of the one before

    Raises:
        ModelError: the plan's model does not exist.
    """
    from cloister.aggregation.sums import Sums
    from cloister.lm.model.model import count_parameters
    from cloister.lm.training.optimizer import optimizer_of

    _, trained, summed = count_parameters(plan)
    update = Sums(plan, summed, most=trained).update_bytes
    moments = optimizer_of(plan.local).vectors if plan.local.optimizer_state == "keep" else 0
    return 8 * trained + 2 * update + 8 * trained * moments
