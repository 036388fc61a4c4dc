"""What `cloister doctor` checks at a site: federation, keys, releases, disk, devices, and the way to each server."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from cloister.clients.network.route import Route
from cloister.clients.network.superlink import refuses_clock
from cloister.clients.setup.config import SiteConfig
from cloister.clients.setup.enrolment import read_installed
from cloister.protocol.errors import CertificateError, MachineError, ModelError, RosterError
from cloister.protocol.identity.certificates import certificate_to_pem, check_authority, read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import load_identity
from cloister.protocol.identity.supernode import load_supernode_key
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.findings import Hop, Skipped
from cloister.protocol.machine.prerequisites import ENOUGH, check_releases, check_space
from cloister.protocol.plan.plan import Plan

_HOPS: tuple[tuple[str, Callable[[Route], str | Skipped], int], ...] = (
    ("proxy", Route.choose, 0),
    ("DNS", Route.resolve, 1),
    ("TCP", Route.connect, 1),
    ("CONNECT", Route.tunnel, 1),
    ("TLS", Route.handshake, 4),  # a certificate that is refused is fetched again, to say what it is
    ("ALPN", Route.negotiated, 0),
)
"""The hops to a server, and the waits of each."""


class SiteDoctor(Closing):
    """The hops of a site; a context manager, which closes the connections.

    Args:
        path: Its `site.toml`, for messages.
        config: Its settings.
        limit_s: Seconds of each wait.
        plan: The plan that it is to train; None: it is not known.
    """

    def __init__(self, path: Path, config: SiteConfig, limit_s: float, plan: Plan | None = None) -> None:
        self._path = path
        self._config = config
        self._limit_s = limit_s
        self._plan = plan
        self._federation: Federation | None = None
        self._routes: dict[str, Route] = {}

    def close(self) -> None:
        """Close the connections."""
        for route in self._routes.values():
            route.close()

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
                f"correct device and [mesh] in {self._path}; a GPU: does nvidia-smi list it, and has torch CUDA?",
            ),
        ]
        for server in ("superlink", "exchange"):
            before = "federation"
            for name, make, waits in _HOPS:
                look = partial(self._along, server, make)
                found.append(
                    Hop(f"{server} {name}", look, "ask the coordinator", waits * self._limit_s, (before,))
                )
                before = found[-1].name
            if server == "superlink":
                found.append(
                    Hop("superlink clock", self._clock, "ask the coordinator", self._limit_s, (before,))
                )
        return found

    def _installed(self) -> str:
        federation = read_installed(self._config)
        if federation is None:
            raise RosterError("federation", "", expected=f"the installed one, in {self._path}")
        if federation.site(self._config.name) is None:
            raise RosterError(
                "name",
                self._config.name,
                expected=f"a site of {federation.name}, version {federation.version}",
                fix=f"correct name in {self._path}; or the site has left: ask the coordinator",
            )
        path = Path(self._config.federation).with_name("authority.pem")
        again = "install the same file again: cloister site install FILE"
        try:
            authority = read_certificate(path.read_bytes(), str(path))
        except OSError as error:
            raise CertificateError(
                str(path), expected=f"a file that can be read ({error.strerror})", fix=again
            ) from error
        if authority.public_bytes(Encoding.DER) != federation.authority:
            raise CertificateError(str(path), expected="that of the installed federation", fix=again)
        check_authority(authority, datetime.datetime.now(datetime.UTC))
        self._federation = federation
        return f"{federation.name}, version {federation.version}, of {len(federation.sites)} sites"

    @property
    def _entry(self) -> Request:
        assert self._federation is not None
        entry = self._federation.site(self._config.name)
        assert entry is not None
        return entry

    def _keys(self) -> str:
        identity = load_identity(Path(self._config.identity))
        for what, path, right in (
            ("identity", self._config.identity, identity.public_key().public_bytes_raw() == self._entry.key),
            (
                "supernode_key",
                self._config.supernode_key,
                load_supernode_key(Path(self._config.supernode_key)) == self._entry.supernode,
            ),
        ):
            if not right:
                raise RosterError(
                    what, path, expected="the key that the installed federation has for this site"
                )
        return f"{self._config.identity} and {self._config.supernode_key}, of their owner only"

    def _disk(self) -> str:
        if self._plan is None:
            return check_space(self._config.folder, ENOUGH, "needed by a small run; --plan says more exactly")
        return check_space(
            self._config.folder, site_bytes(self._plan), "needed by the plan, besides the data"
        )

    def _devices(self) -> str:
        """As `cloister site check` does, but without a plan nothing is known of the model."""
        from cloister.clients.ranks.device_mesh import devices_for_ranks, devices_of, memory_of, mesh_for
        from cloister.lm.parallel.mesh import Mesh

        config = self._config
        if self._plan is not None:
            mesh, names = mesh_for(self._plan, config.mesh, config.device)
            more = f"; what each will hold: cloister site check {self._path} PLAN"
        else:
            mesh = Mesh(*(getattr(config.mesh, degree.name) or 1 for degree in fields(Mesh)))
            names = devices_of(config.device)
            there = devices_for_ranks(names, mesh.size)
            if mesh.size > len(there):
                raise ModelError(
                    "mesh",
                    mesh.degrees(),
                    expected=f"a product of at most {len(there)}, the site's devices, but it is {mesh.size}",
                    fix=f"lower a degree of [mesh] in {self._path}, or add devices",
                )
            more = "; torch sees no GPU" if config.device == "auto" and names == ["cpu"] else ""
        shown = ", ".join(f"{name} ({memory_of(name) / 1e9:.0f} GB)" for name in dict.fromkeys(names))
        return f"{shown}{more}"

    def _along(self, server: str, make: Callable[[Route], str | Skipped]) -> str | Skipped:
        if server not in self._routes:
            assert self._federation is not None
            root = certificate_to_pem(read_certificate(self._federation.authority, "authority"))
            self._routes[server] = Route(server, getattr(self._federation, server), root, self._limit_s)
        return make(self._routes[server])

    def _clock(self) -> str | Skipped:
        route = self._routes["superlink"]
        route.close()
        refused = refuses_clock(
            route.address, route.root, datetime.datetime.now(datetime.UTC), limit_s=self._limit_s
        )
        if refused is None:
            return Skipped("the SuperLink does not answer")
        if refused:
            raise MachineError(
                "clock",
                expected="one that the SuperLink accepts: at most 5 s ahead of the coordinator's, at most 305 s behind",
                fix="set the wrong one of the two by NTP, such as timedatectl set-ntp true: compare both with a watch",
            )
        return "the SuperLink accepts it"


def site_bytes(plan: Plan) -> int:
    """Bytes that a site's state folder needs for a run, besides the prepared data.

    With T trained parameters in float32, and U bytes of a coded update (`aggregation.sums.Sums.training`):

        4 T  the base model, as the join sends it
      + 4 T  the global model of the round
      + 2 U  the coded update, which is written beside that of the round before
      + 16 T where `local.optimizer_state` is `keep`: two moments, of this round and of the one before

    Raises:
        ModelError: the plan's model does not exist.
    """
    from cloister.aggregation.sums import Sums
    from cloister.lm.model.model import count_parameters

    _, trained, summed = count_parameters(plan)
    update = Sums(plan, summed, most=trained).update_bytes
    kept = 16 * trained if plan.local.optimizer_state == "keep" else 0
    return 8 * trained + 2 * update + kept
